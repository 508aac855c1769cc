"""Llama and its likes: RMSNorm, rotary positions, grouped-query attention and a gated feed-forward layer."""

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
from bench.models.pretrained import PretrainedFamily, shorten_list

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "phi3", "gemma", "gemma2", "gemma3_text", "granite"),
)
"""As transformers calls them (`model_type`): what differs is biases, further norms, and how norms are scaled."""


UNDIVIDED_ARCHITECTURES = {
    "phi3": "has one matrix for several",
    "olmo2": "has norms over all heads together",
}
"""Those whose layers tensor parallelism cannot divide, and why."""

NORM_LAST_ARCHITECTURES = ("olmo2", "gemma2", "gemma3_text")
"""Those whose blocks end in a norm, which keeps the last product for backward."""

UNSTAGED_ARCHITECTURES = ("granite",)
"""Those whose forward pass does to what a stage takes what it does to embeddings."""


@dataclass(frozen=True)
class LlamaFamily(PretrainedFamily):
    vocabulary_size: TokenCount
    block_size: TokenCount
    """Longest sequence that the model was made for."""
    hidden_size: LayerWidth
    num_layers: BlockCount
    num_heads: HeadCount
    intermediate_size: LayerWidth
    """Width of the feed-forward layer, whose gate is as wide."""
    num_kv_heads: Annotated[int | None, Within(1, 4096)] = None
    """Heads of keys and values, each shared by as many of queries; null for `num_heads`."""
    head_size: Annotated[int | None, Within(2, 2**16)] = None
    """Width of a head; null for hidden_size / num_heads."""
    tie_embeddings: bool = False
    """The head over the vocabulary shares the embedding's weight."""
    architecture: Annotated[str, OneOf(*ARCHITECTURES)] = "llama"
    sliding_window: Annotated[int | None, Within(1, 10**7)] = None
    """Tokens that layers with a sliding window attend to; null for all."""
    dropout: DropoutRate = 0.0
    """Of attention's weights."""
    layer_types: tuple[str, ...] | None = None
    """Of a shortened model: which of its layers have a sliding window; null as the architecture has them."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.llama.modeling_llama",)
    can_divide_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise invalid_value_error(
                "model.num_heads", self.num_heads, f"a divisor of model.hidden_size={self.hidden_size}"
            )
        if self.architecture == "gemma2" and self.attention != "eager":
            raise invalid_value_error("model.attention", self.attention, "eager, since Gemma 2 caps its scores")
        if self.num_heads % self._num_kv_heads:
            raise invalid_value_error(
                "model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}"
            )

    @property
    def _num_kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _head_size(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    def build_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.architecture,
            vocab_size=self.vocabulary_size,
            max_position_embeddings=self.block_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self._num_kv_heads,
            head_dim=self._head_size,
            intermediate_size=self.intermediate_size,
            tie_word_embeddings=self.tie_embeddings,
            sliding_window=self.sliding_window,
            attention_dropout=self.dropout,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            **({} if self.layer_types is None else {"layer_types": list(self.layer_types)}),
        )

    def limit_blocks(self, max_blocks: int, period: int = 1) -> LlamaFamily | None:
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
        """Query, key, value, output, and three feed-forward products per token; scores over the full square.

        The scores of all heads take ``2 * length**2 * num_heads * head_size``, their product with the values as much.
        """
        length, hidden = sequence_length, self.hidden_size
        query_width, kv_width = self.num_heads * self._head_size, self._num_kv_heads * self._head_size
        final_linear = 2 * length * hidden * self.intermediate_size
        linear = 2 * length * hidden * (2 * query_width + 2 * kv_width) + 3 * final_linear
        attention = 4 * length * length * query_width
        unrecomputed_linear = 0 if self.architecture in NORM_LAST_ARCHITECTURES else final_linear
        return FlopCount(
            blocks_linear=self.num_layers * linear,
            blocks_attention=self.num_layers * attention,
            causal_attention=self.num_layers * attention,
            blocks_last_linear=self.num_layers * unrecomputed_linear,
            outside_blocks=2 * length * hidden * self.vocabulary_size,
            recomputed_by_block=((linear + attention - unrecomputed_linear,) * self.num_layers,),
        )

    def check_sequence_length(self, sequence_length: int) -> None:
        """At least 2, since a label is the next token, and at most the positions that the model was made for."""
        if not 2 <= sequence_length <= self.block_size:
            valid = f"a whole number from 2 to model.block_size={self.block_size}"
            raise invalid_value_error("sequence_length", sequence_length, valid, ImpossibleError)

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, those of keys and values too, and the width of the feed-forward layer; the last rank's part of the
        vocabulary may be smaller."""
        if self.architecture in UNDIVIDED_ARCHITECTURES:
            raise ImpossibleError(
                f"model.architecture={self.architecture} is not valid with tensor parallelism, since it "
                f"{UNDIVIDED_ARCHITECTURES[self.architecture]}: choose another strategy, or a model of another "
                "architecture."
            )
        sizes = {
            "model.num_heads": self.num_heads,
            "model.num_kv_heads": self._num_kv_heads,
            "model.intermediate_size": self.intermediate_size,
        }
        return sizes | {"sequence_length": sequence_length} if sequence_parallel else sizes

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        return build_decoder_division(model, self.find_block_lists(model)[0], sequence_parallel=sequence_parallel)

    def find_undivided_sequence_reason(self) -> str:
        return find_undivided_attention_reason(self.attention, self.list_layer_types())

    @property
    def num_blocks(self) -> int | None:
        return None if self.architecture in UNSTAGED_ARCHITECTURES else self.num_layers

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The first stage embeds, the last one has the final norm and the head."""
        return DecoderPipelineStage(model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        return ((sequence_length, self.hidden_size),)
