"""Decoders as transformers builds them, divided among ranks: layers by tensor parallelism, blocks into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.typed_config import Within
from bench.models.base import (
    BlockCount,
    DropoutRate,
    HeadCount,
    LayerWidth,
    TokenCount,
    find_undivided_attention_reason,
    require_predicted_positions,
)
from bench.models.pretrained import PretrainedFamily, shorten_list

if TYPE_CHECKING:
    from torch import nn

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule

HEAD_DIM = 2
"""The dimension of queries and keys, before they are transposed, that counts heads."""


WHOLE_HEAD_ARCHITECTURES = ("llama", "gemma2", "gemma3_text", "deepseek_v2")
"""Those whose width transformers wants to be a multiple of the number of heads, whatever the width of a head."""


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(PretrainedFamily):
    """Decoders whose attention and gated feed-forward layers are called as Llama's."""

    vocabulary_size: TokenCount
    block_size: TokenCount
    """Longest sequence that the model was made for."""
    hidden_size: LayerWidth
    num_layers: BlockCount
    num_heads: HeadCount
    intermediate_size: LayerWidth
    """Width of the feed-forward layer, or of an expert, whose gate is as wide."""
    num_kv_heads: Annotated[int | None, Within(1, 4096)] = None
    """Heads of keys and values, each shared by as many of queries; null for `num_heads`."""
    head_size: Annotated[int | None, Within(2, 2**16)] = None
    """Width of a head; null for hidden_size / num_heads."""
    tie_embeddings: bool = False
    """The head over the vocabulary shares the embedding's weight."""
    architecture: str
    """As transformers calls it (`model_type`)."""
    sliding_window: Annotated[int | None, Within(1, 10**7)] = None
    """Tokens that layers with a sliding window attend to; null for all."""
    dropout: DropoutRate = 0.0
    """Of attention's weights."""
    layer_types: tuple[str, ...] | None = None
    """Of a shortened model: which of its layers have a sliding window; null as the architecture has them."""

    def __post_init__(self) -> None:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise invalid_value_error(
                "model.num_heads", self.num_heads, f"a divisor of model.hidden_size={self.hidden_size}"
            )
        if self.architecture in WHOLE_HEAD_ARCHITECTURES and self.hidden_size % self.num_heads:
            valid = f"a multiple of model.num_heads={self.num_heads}, which transformers asks of {self.architecture}"
            raise invalid_value_error("model.hidden_size", self.hidden_size, valid)
        if self.num_heads % self._num_kv_heads:
            raise invalid_value_error(
                "model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}"
            )
        self._require_even_rotary_size()

    def _require_even_rotary_size(self) -> None:
        """Raise `UsageError` unless elements of a head can be turned by their position in pairs."""
        if self._head_size % 2 == 0:
            return
        if self.head_size is not None:
            raise invalid_value_error("model.head_size", self.head_size, "an even number")
        valid = f"a multiple of {2 * self.num_heads}, which makes heads of an even size"
        raise invalid_value_error("model.hidden_size", self.hidden_size, valid)

    @property
    def _num_kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _head_size(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    def _list_config_fields(self) -> dict[str, Any]:
        """Arguments of transformers' configuration."""
        return {
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.block_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": self._head_size,
            "intermediate_size": self.intermediate_size,
            "tie_word_embeddings": self.tie_embeddings,
            "sliding_window": self.sliding_window,
            "attention_dropout": self.dropout,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
            **({} if self.layer_types is None else {"layer_types": list(self.layer_types)}),
        }

    def limit_blocks(self, max_blocks: int, period: int = 1) -> Self | None:
        num_layers = min(max_blocks, self.num_layers)
        if not self._can_be_shortened(max_blocks, period):
            return None
        layer_types = getattr(self.build_config(), "layer_types", None)
        return dataclasses.replace(
            self,
            num_layers=num_layers,
            layer_types=None if layer_types is None else tuple(shorten_list(layer_types, num_layers, period)),
        )

    def check_sequence_length(self, sequence_length: int) -> None:
        """At least 2, since a label is the next token, and at most the positions that the model was made for."""
        require_predicted_positions(sequence_length, self.block_size)

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, those of keys and values too, and `intermediate_size`; the last rank's part of the vocabulary may be
        smaller."""
        sizes = {
            "model.num_heads": self.num_heads,
            "model.num_kv_heads": self._num_kv_heads,
            "model.intermediate_size": self.intermediate_size,
        }
        return sizes | {"sequence_length": sequence_length} if sequence_parallel else sizes

    def _require_divided_layers(self, undivided_architectures: Mapping[str, str], choices: str) -> None:
        """Raise `ImpossibleError` for an architecture whose layers are not divided, with the reason."""
        if self.architecture in undivided_architectures:
            raise ImpossibleError(
                f"model.architecture={self.architecture} is not valid with tensor parallelism, since it "
                f"{undivided_architectures[self.architecture]}: choose {choices}."
            )

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        return build_decoder_division(model, self.find_block_lists(model)[0], sequence_parallel=sequence_parallel)

    def find_undivided_sequence_reason(self) -> str:
        return find_undivided_attention_reason(self.attention, self.list_layer_types())

    @property
    def num_blocks(self) -> int | None:
        return self.num_layers

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The first stage embeds, the last one has the final norm and the head."""
        from bench.models.decoder_stage import DecoderPipelineStage

        return DecoderPipelineStage(model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        return ((sequence_length, self.hidden_size),)


def build_decoder_division(model: nn.Module, blocks: nn.ModuleList, *, sequence_parallel: bool) -> LayerDivision:
    """Attention by heads, of which those of keys and values may be fewer; the gated feed-forward layer by its width.

    For models whose layers are called as Llama's. Experts, those that every token goes to too, and what routes tokens
    to them are left whole.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    from bench.models.division import SEQUENCE_SHARD, LayerDivision, RowwiseEmbedding, build_sequence_split
    from bench.models.latent_attention import is_latent_attention, list_latent_attention_styles

    division = LayerDivision()
    hidden_layout = SEQUENCE_SHARD if sequence_parallel else Replicate()
    apart: set[nn.Module] = set()
    for name, module in model.named_modules():
        layer = name.rpartition(".")[2]
        if module in apart:
            continue
        if layer == "shared_experts":
            apart.update(module.modules())
        elif layer == "embed_tokens":
            division.parallel_styles.append((module, RowwiseEmbedding()))
        elif is_latent_attention(module):
            division.parallel_styles += list_latent_attention_styles(module, sequence_parallel=sequence_parallel)
            apart.update(module.modules())
        elif layer == "self_attn":
            # Once for query, key and value, so that their gradients are added up before they are sent.
            gathered_input = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": hidden_layout},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            division.parallel_styles.append((module, gathered_input))
        elif layer == "mlp" and not hasattr(module, "experts"):
            gathered_input = PrepareModuleInput(input_layouts=hidden_layout, desired_input_layouts=Replicate())
            division.parallel_styles.append((module, gathered_input))
        elif layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            division.parallel_styles.append((module, ColwiseParallel()))
        elif layer in ("o_proj", "down_proj"):
            division.parallel_styles.append((module, RowwiseParallel(output_layouts=hidden_layout)))
        elif layer in ("q_norm", "k_norm"):
            heads_style = SequenceParallel(sequence_dim=HEAD_DIM, use_local_output=True)
            division.parallel_styles.append((module, heads_style))
        elif layer.endswith("norm") and sequence_parallel:
            division.parallel_styles.append((module, SequenceParallel(use_local_output=True)))
        elif layer == "lm_head":
            logits_style = ColwiseParallel(
                input_layouts=hidden_layout, output_layouts=Shard(-1), use_local_output=False
            )
            division.parallel_styles.append((module, logits_style))
    if sequence_parallel:
        division.parallel_styles.append((blocks[0], build_sequence_split(1)))
    return division
