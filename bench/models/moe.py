"""Mixtures of experts: Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V2 and -V3, whose tokens each go to a few of many
experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.models.base import FlopCount
from bench.models.decoder import DecoderFamily
from bench.models.routing import ROUTINGS, Routing

if TYPE_CHECKING:
    from bench.core.precision import Precision

EXPERT_COUNT_FIELDS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
"""Architectures as transformers calls them (`model_type`), and what each calls its number of experts."""

LATENT_ATTENTION_ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
"""Those that compress keys and values (and queries, with `query_rank`) to what all heads share."""

UNDIVIDED_ARCHITECTURES = {"gpt_oss": "has a sink for each head of attention"}
"""Those whose layers tensor parallelism does not divide, and why."""

GROUPED_ALIGNMENT_BYTES = 16
"""Of the rows of what torch multiplies in groups in bf16 (aten/src/ATen/native/GroupedMMUtils.h)."""

ExpertCount = Annotated[int, Within(1, 4096)]


@dataclass(frozen=True, kw_only=True)
class MixtureOfExpertsFamily(DecoderFamily):
    num_experts: ExpertCount
    """In every layer, of which each token goes to `experts_per_token`."""
    experts_per_token: ExpertCount
    head_size: Annotated[int | None, Within(2, 2**16)] = None
    """Width of a head; null for hidden_size / num_heads. DeepSeek's: what is not rotated of it, and of the values."""
    architecture: Annotated[str, OneOf(*EXPERT_COUNT_FIELDS)] = "mixtral"
    num_shared_experts: Annotated[int, Within(0, 4096)] = 0
    """DeepSeek's: experts that every token goes to."""
    num_dense_layers: Annotated[int, Within(0, 512)] = 0
    """DeepSeek's: layers at the beginning that have no experts."""
    dense_intermediate_size: Annotated[int | None, Within(1, 2**20)] = None
    """Width of their feed-forward layer; null where there are none."""
    kv_rank: Annotated[int | None, Within(1, 2**20)] = None
    """DeepSeek's: what keys and values are compressed to."""
    query_rank: Annotated[int | None, Within(1, 2**20)] = None
    """DeepSeek's: what queries are compressed to; null: they are not."""
    expert_groups: ExpertCount = 1
    """DeepSeek-V3's: groups of experts, of half of which a token's experts are chosen (of one, of all)."""
    rotary_size: Annotated[int | None, Within(2, 2**16)] = None
    """DeepSeek's: the part of a head that is rotated, which all heads of keys share."""
    routing: Annotated[str, OneOf(*ROUTINGS)] = "balanced"
    """How tokens are sent to experts: as the router with its random weights says, evenly, or at random with some
    experts more popular."""
    routing_skew: Annotated[float, Within(0, 10)] = 1.0
    """Exponent of Zipf's law for the popularity of experts at ``routing=skewed``; 0: all as popular."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.mixtral.modeling_mixtral",)
    can_divide_expert_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise invalid_value_error(
                "model.experts_per_token", self.experts_per_token, f"at most model.num_experts={self.num_experts}"
            )
        super().__post_init__()
        if self._has_latent_attention:
            for name in ("kv_rank", "rotary_size"):
                if getattr(self, name) is None:
                    valid_text = f"a number, for model.architecture={self.architecture}"
                    raise invalid_value_error(f"model.{name}", None, valid_text)
            if self.num_kv_heads not in (None, self.num_heads):
                valid_text = f"model.num_heads={self.num_heads}, for model.architecture={self.architecture}"
                raise invalid_value_error("model.num_kv_heads", self.num_kv_heads, valid_text)
        if self.expert_groups > 1 and self.num_experts % (2 * self.expert_groups):
            raise invalid_value_error(
                "model.expert_groups", self.expert_groups, f"a divisor of half of model.num_experts={self.num_experts}"
            )

    def _require_even_rotary_size(self) -> None:
        if not self._has_latent_attention:
            super()._require_even_rotary_size()
            return
        names = ["rotary_size"]
        if self.architecture == "deepseek_v2":  # which rotates complex numbers, and they lie behind those of the rank
            names.append("kv_rank")
        for name in names:
            if (getattr(self, name) or 0) % 2:
                raise invalid_value_error(f"model.{name}", getattr(self, name), "an even number")

    @property
    def _has_latent_attention(self) -> bool:
        return self.architecture in LATENT_ATTENTION_ARCHITECTURES

    def _build_routing(self) -> Routing:
        return Routing(self.routing, self.routing_skew)

    def build_config(self) -> Any:
        from transformers import AutoConfig

        fields = self._list_config_fields() | {
            "num_experts_per_tok": self.experts_per_token,
            EXPERT_COUNT_FIELDS[self.architecture]: self.num_experts,
        }
        if self.architecture == "qwen3_moe":
            fields["moe_intermediate_size"] = self.intermediate_size
        elif self.architecture == "gpt_oss" and self.sliding_window is None:
            fields.setdefault("layer_types", ["full_attention"] * self.num_layers)
            fields["sliding_window"] = self.block_size
        if self._has_latent_attention:
            fields |= {
                "head_dim": self.rotary_size,
                "intermediate_size": self.dense_intermediate_size or self.intermediate_size,
                "moe_intermediate_size": self.intermediate_size,
                "n_shared_experts": self.num_shared_experts,
                "first_k_dense_replace": self.num_dense_layers,
                "kv_lora_rank": self.kv_rank,
                "q_lora_rank": self.query_rank,
                "qk_rope_head_dim": self.rotary_size,
                "qk_nope_head_dim": self._head_size,
                "v_head_dim": self._head_size,
                "topk_method": "greedy",
            }
        if self.architecture == "deepseek_v3":
            fields |= {"n_group": self.expert_groups, "topk_group": max(1, self.expert_groups // 2)}
        return AutoConfig.for_model(self.architecture, **fields)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Of attention, of the router, and of the experts that each token goes to; scores over the full square.

        DeepSeek's attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) compresses keys and values to
        ``kv_rank``, beside which one rotated key serves all heads, and queries to ``query_rank``.
        """
        length, hidden, heads, head_size = sequence_length, self.hidden_size, self.num_heads, self._head_size
        num_expert_layers = self.num_layers - self.num_dense_layers
        key_size = head_size
        if self._has_latent_attention:
            assert self.kv_rank is not None
            assert self.rotary_size is not None
            key_size += self.rotary_size
            if self.query_rank is None:
                projections = hidden * heads * key_size
            else:
                projections = self.query_rank * (hidden + heads * key_size)
            projections += hidden * (self.kv_rank + self.rotary_size)
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

    def check_expert_width(self, precision: Precision, num_parts: int) -> None:
        """Of `compute_grouped_experts`: torch multiplies rows of a multiple of 16 bytes alone, in bf16."""
        if precision.compute != "bf16":
            return
        multiple = GROUPED_ALIGNMENT_BYTES // precision.compute_itemsize
        shared = f", of which {num_parts} ranks have a part each" if num_parts > 1 else ""
        for name, divisor, reason in (
            ("hidden_size", multiple, ""),
            ("intermediate_size", multiple * num_parts, shared),
        ):
            if (size := getattr(self, name)) % divisor:
                raise ImpossibleError(
                    f"model.{name}={size} is not valid with precision={precision.name}, in which torch multiplies "
                    f"experts in groups only by rows of a multiple of {GROUPED_ALIGNMENT_BYTES} bytes: choose a "
                    f"multiple of {divisor}{reason}, or precision=fp32."
                )

    def find_undivided_sequence_reason(self) -> str:
        if self._has_latent_attention:
            return "whose values are narrower than its keys"
        return super().find_undivided_sequence_reason()

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, those of keys and values too, and the widths of experts, of those that every token goes to together
        and of layers without; the last rank's part of the vocabulary may be smaller."""
        divided = [name for name in EXPERT_COUNT_FIELDS if name not in UNDIVIDED_ARCHITECTURES]
        self._require_divided_layers(UNDIVIDED_ARCHITECTURES, f"one of {', '.join(divided)}, or expert parallelism")
        sizes = super().list_divided_sizes(sequence_length, sequence_parallel=sequence_parallel)
        if self.num_shared_experts:
            sizes["model.num_shared_experts x model.intermediate_size"] = (
                self.num_shared_experts * self.intermediate_size
            )
        if self.num_dense_layers:
            sizes["model.dense_intermediate_size"] = self.dense_intermediate_size or self.intermediate_size
        return sizes
