"""Llama and its likes: RMSNorm, rotary positions, grouped-query attention and a gated feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from bench.core.errors import invalid_value_error
from bench.core.typed_config import OneOf
from bench.models.base import FlopCount
from bench.models.decoder import DecoderFamily

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


@dataclass(frozen=True, kw_only=True)
class LlamaFamily(DecoderFamily):
    architecture: Annotated[str, OneOf(*ARCHITECTURES)] = "llama"

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.llama.modeling_llama",)
    can_divide_layers: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.architecture in ("gemma2", "gemma3_text") and self.sliding_window is None:
            valid = f"a number of tokens, since layers of {self.architecture} have a sliding window"
            raise invalid_value_error("model.sliding_window", None, valid)
        if self.architecture == "gemma2" and self.attention != "eager":
            raise invalid_value_error("model.attention", self.attention, "eager, since Gemma 2 caps its scores")

    def build_config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.architecture, **self._list_config_fields())

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

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, those of keys and values too, and the width of the feed-forward layer; the last rank's part of the
        vocabulary may be smaller."""
        self._require_divided_layers(UNDIVIDED_ARCHITECTURES, "another strategy, or a model of another architecture")
        return super().list_divided_sizes(sequence_length, sequence_parallel=sequence_parallel)

    @property
    def num_blocks(self) -> int | None:
        return None if self.architecture in UNSTAGED_ARCHITECTURES else super().num_blocks
