"""Mixtures of experts: Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V2, whose tokens each go to a few of many experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import nn

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.models.base import (
    BlockCount,
    DropoutRate,
    FlopCount,
    HeadCount,
    LayerWidth,
    TokenCount,
    find_undivided_attention_reason,
)
from bench.models.decoder import DecoderPipelineStage, build_decoder_division
from bench.models.division import LayerDivision, PipelineStageModule
from bench.models.experts import ROUTINGS, Routing
from bench.models.pretrained import PretrainedFamily, shorten_list

EXPERT_COUNT_FIELDS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "deepseek_v2": "n_routed_experts",
}
"""Architectures as transformers calls them (`model_type`), and what each calls its number of experts."""

DIVIDED_ARCHITECTURES = ("mixtral", "qwen3_moe")
"""Those whose attention is divided as Llama's."""

ExpertCount = Annotated[int, Within(1, 4096)]


@dataclass(frozen=True)
class MixtureOfExpertsFamily(PretrainedFamily):
    vocabulary_size: TokenCount
    block_size: TokenCount
    """Longest sequence that the model was made for."""
    hidden_size: LayerWidth
    num_layers: BlockCount
    num_heads: HeadCount
    intermediate_size: LayerWidth
    """Width of an expert, whose gate is as wide."""
    num_experts: ExpertCount
    """In every layer, of which each token goes to `experts_per_token`."""
    experts_per_token: ExpertCount
    num_kv_heads: Annotated[int | None, Within(1, 4096)] = None
    """Heads of keys and values, each shared by as many of queries; null for `num_heads`."""
    head_size: Annotated[int | None, Within(2, 2**16)] = None
    """Width of a head; null for hidden_size / num_heads. DeepSeek's: what is not rotated of it, and of the values."""
    tie_embeddings: bool = False
    """The head over the vocabulary shares the embedding's weight."""
    architecture: Annotated[str, OneOf(*EXPERT_COUNT_FIELDS)] = "mixtral"
    sliding_window: Annotated[int | None, Within(1, 10**7)] = None
    """Tokens that layers with a sliding window attend to; null for all."""
    num_shared_experts: Annotated[int, Within(0, 4096)] = 0
    """DeepSeek's: experts that every token goes to."""
    num_dense_layers: Annotated[int, Within(0, 512)] = 0
    """DeepSeek's: layers at the beginning that have no experts."""
    dense_intermediate_size: Annotated[int | None, Within(1, 2**20)] = None
    """Width of their feed-forward layer; null where there are none."""
    kv_rank: Annotated[int | None, Within(1, 2**20)] = None
    """DeepSeek's: what keys and values are compressed to."""
    rotary_size: Annotated[int | None, Within(2, 2**16)] = None
    """DeepSeek's: the part of a head that is rotated, which all heads of keys share."""
    routing: Annotated[str, OneOf(*ROUTINGS)] = "balanced"
    """How tokens are sent to experts: as the router with its random weights says, evenly, or at random with some
    experts more popular."""
    routing_skew: Annotated[float, Within(0, 10)] = 1.0
    """Exponent of Zipf's law for the popularity of experts at ``routing=skewed``; 0: all as popular."""
    dropout: DropoutRate = 0.0
    """Of attention's weights."""
    layer_types: tuple[str, ...] | None = None
    """Of a shortened model: which of its layers have a sliding window; null as the architecture has them."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.mixtral.modeling_mixtral",)
    can_divide_expert_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise invalid_value_error(
                "model.experts_per_token", self.experts_per_token, f"at most model.num_experts={self.num_experts}"
            )
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise invalid_value_error(
                "model.num_heads", self.num_heads, f"a divisor of model.hidden_size={self.hidden_size}"
            )
        if self.num_heads % self._num_kv_heads:
            raise invalid_value_error(
                "model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}"
            )
        if self.architecture == "deepseek_v2":
            for name in ("kv_rank", "rotary_size"):
                if getattr(self, name) is None:
                    raise invalid_value_error(f"model.{name}", None, "a number, for model.architecture=deepseek_v2")

    @property
    def _num_kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _head_size(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    def _build_routing(self) -> Routing:
        return Routing(self.routing, self.routing_skew)

    def build_config(self) -> Any:
        from transformers import AutoConfig

        fields: dict[str, Any] = {
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.block_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": self._head_size,
            "tie_word_embeddings": self.tie_embeddings,
            "sliding_window": self.sliding_window,
            "attention_dropout": self.dropout,
            "num_experts_per_tok": self.experts_per_token,
            EXPERT_COUNT_FIELDS[self.architecture]: self.num_experts,
            "intermediate_size": self.intermediate_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        if self.architecture == "qwen3_moe":
            fields["moe_intermediate_size"] = self.intermediate_size
        elif self.architecture == "gpt_oss" and self.sliding_window is None:
            fields |= {"layer_types": ["full_attention"] * self.num_layers, "sliding_window": self.block_size}
        if self.layer_types is not None:
            fields["layer_types"] = list(self.layer_types)
        if self.architecture == "deepseek_v2":
            fields |= {
                "head_dim": self.rotary_size,
                "intermediate_size": self.dense_intermediate_size or self.intermediate_size,
                "moe_intermediate_size": self.intermediate_size,
                "n_shared_experts": self.num_shared_experts,
                "first_k_dense_replace": self.num_dense_layers,
                "kv_lora_rank": self.kv_rank,
                "q_lora_rank": None,
                "qk_rope_head_dim": self.rotary_size,
                "qk_nope_head_dim": self._head_size,
                "v_head_dim": self._head_size,
                "topk_method": "greedy",
            }
        return AutoConfig.for_model(self.architecture, **fields)

    def limit_blocks(self, max_blocks: int, period: int = 1) -> MixtureOfExpertsFamily | None:
        """None where more than the first layer differ from those that repeat."""
        num_layers = min(max_blocks, self.num_layers)
        if not self._has_repeated_blocks:
            return None
        layer_types = getattr(self.build_config(), "layer_types", None)
        return dataclasses.replace(
            self,
            num_layers=num_layers,
            layer_types=None if layer_types is None else tuple(shorten_list(layer_types, num_layers, period)),
        )

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Of attention, of the router, and of the experts that each token goes to; scores over the full square.

        DeepSeek-V2's attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) compresses keys and values to
        ``kv_rank``, beside which one rotated key serves all heads.
        """
        length, hidden, heads, head_size = sequence_length, self.hidden_size, self.num_heads, self._head_size
        num_expert_layers = self.num_layers - self.num_dense_layers
        key_size = head_size
        if self.architecture == "deepseek_v2":
            assert self.kv_rank is not None
            assert self.rotary_size is not None
            key_size += self.rotary_size
            projections = hidden * heads * key_size + hidden * (self.kv_rank + self.rotary_size)
            projections += self.kv_rank * heads * 2 * head_size + heads * head_size * hidden
        else:
            projections = 2 * hidden * head_size * (heads + self._num_kv_heads)
        per_expert = 3 * hidden * self.intermediate_size
        experts = self.experts_per_token + self.num_shared_experts
        dense_width = self.dense_intermediate_size or 0
        expert_linear = projections + experts * per_expert + hidden * self.num_experts
        dense_linear = projections + 3 * hidden * dense_width
        # The sum over a token's experts keeps what each gave: only shared experts end in a product nobody keeps.
        last_width = self.num_shared_experts * self.intermediate_size
        attention = 2 * length * length * heads * (key_size + head_size)
        recomputed_dense = 2 * length * (dense_linear - hidden * dense_width) + attention
        recomputed_expert = 2 * length * (expert_linear - hidden * last_width) + attention
        return FlopCount(
            blocks_linear=2 * length * (num_expert_layers * expert_linear + self.num_dense_layers * dense_linear),
            blocks_attention=self.num_layers * attention,
            blocks_last_linear=2
            * length
            * hidden
            * (num_expert_layers * last_width + self.num_dense_layers * dense_width),
            causal_attention=self.num_layers * attention,
            outside_blocks=2 * length * hidden * self.vocabulary_size,
            recomputed_by_block=(
                (recomputed_dense,) * self.num_dense_layers + (recomputed_expert,) * num_expert_layers,
            ),
        )

    def check_sequence_length(self, sequence_length: int) -> None:
        """At least 2, since a label is the next token, and at most the positions that the model was made for."""
        if not 2 <= sequence_length <= self.block_size:
            valid = f"a whole number from 2 to model.block_size={self.block_size}"
            raise invalid_value_error("sequence_length", sequence_length, valid, ImpossibleError)

    def find_undivided_sequence_reason(self) -> str:
        if self.architecture == "deepseek_v2":
            return "whose values are narrower than its keys"
        return find_undivided_attention_reason(self.attention, self.list_layer_types())

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, those of keys and values too, and the width of the experts; the last rank's part of the vocabulary may
        be smaller."""
        if self.architecture not in DIVIDED_ARCHITECTURES:
            raise ImpossibleError(
                f"model.architecture={self.architecture} is not valid with tensor parallelism, whose division of its "
                f"attention nobody has stated: choose {' or '.join(DIVIDED_ARCHITECTURES)}, or expert parallelism."
            )
        sizes = {
            "model.num_heads": self.num_heads,
            "model.num_kv_heads": self._num_kv_heads,
            "model.intermediate_size": self.intermediate_size,
        }
        return sizes | {"sequence_length": sequence_length} if sequence_parallel else sizes

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        """Of attention, embedding and head; experts are whole."""
        return build_decoder_division(model, self.find_block_lists(model)[0], sequence_parallel=sequence_parallel)

    @property
    def num_blocks(self) -> int:
        return self.num_layers

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The first stage embeds, the last one has the final norm and the head."""
        return DecoderPipelineStage(model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        return ((sequence_length, self.hidden_size),)
