"""A model family with adapters: to whatever builds, traces, wraps or fills a model it is a family like the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.core import processes
from bench.core.precision import Precision
from bench.finetune.adapters import (
    ADAPTER_NAME_PARTS,
    BASE_LAYER_SUFFIX,
    AdapterSpec,
    add_adapters,
    find_adapter_init_std,
    list_adapter_layers,
)
from bench.finetune.quantised import (
    find_quantised_formats,
    list_quantised_layers,
    prepare_drawn_weights,
    quantise_drawn_weight,
    quantise_layers,
)
from bench.models import Batch, Family, FlopCount
from bench.models.base import FULL, NONE, StoredFormat, find_checkpointing_interval
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.checkpointing import shorten_family

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule


@dataclass(frozen=True)
class AdaptedFamily(Family):
    """A family whose weights are frozen, and quantised if asked for, with adapters that are trained."""

    base: Family
    adapter_spec: AdapterSpec
    precision: Precision
    storage_dtype: torch.dtype
    """In which the strategy hands parameters to the model; weights of 4 bits are packed into numbers of this format."""

    def build_model(self) -> nn.Module:
        """The base's model on meta, with adapters."""
        model = self.base.build_model()
        if self.adapter_spec.bits is not None:
            quantise_layers(self.base, model, self.adapter_spec, self.precision, self.storage_dtype)
        add_adapters(self.base, model, self.adapter_spec)
        if self.adapter_spec.bits is not None:
            prepare_drawn_weights(model)
        return model

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """As the base says; adapters as LoRA has them."""
        if any(name_part in name for name_part in ADAPTER_NAME_PARTS):
            return find_adapter_init_std(name, parameter)
        return self.base.find_init_std(self.find_seed_name(name), parameter)

    def find_seed_name(self, name: str) -> str:
        """Its name in the base's model, so that frozen weights are those that full training starts from."""
        return name.replace(BASE_LAYER_SUFFIX, "")

    def convert_drawn_parameters(self, module: nn.Module) -> None:
        """Quantise a layer that was filled."""
        if self.adapter_spec.bits is not None:
            quantise_drawn_weight(module)

    def list_converted_modules(self, model: nn.Module) -> list[nn.Module]:
        return list_quantised_layers(model) if self.adapter_spec.bits is not None else []

    def find_stored_formats(self, model: nn.Module) -> dict[int, StoredFormat]:
        formats = find_quantised_formats(model) if self.adapter_spec.bits is not None else {}
        if not self.adapter_spec.fp32_adapters:
            return formats
        itemsize = self.precision.parameter_itemsize
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        return {
            id(parameter): StoredFormat(tuple(parameter.shape), parameter.numel() * itemsize, 0) for parameter in frozen
        } | formats

    def list_layers_stored_in_fp32(self, model: nn.Module) -> Sequence[nn.Module]:
        return list_adapter_layers(model) if self.adapter_spec.fp32_adapters else ()

    @property
    def block_period(self) -> int:
        return self.base.block_period

    @property
    def num_first_blocks(self) -> int:
        return self.base.num_first_blocks

    def limit_blocks(self, max_blocks: int, period: int = 1) -> AdaptedFamily | None:
        base = shorten_family(self.base, max_blocks, period)
        return None if base is None else dataclasses.replace(self, base=base)

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        return self.base.build_batch(num_sequences, sequence_length, generator)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.base.compute_loss(logits, labels)

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        return self.base.find_block_lists(model)

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        return self.base.run_blocks(blocks, *args, **kwargs)

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        return self.base.count_tokens_per_sequence(sequence_length)

    def count_expert_tokens(self, sequence_length: int) -> tuple[int, ...]:
        return self.base.count_expert_tokens(sequence_length)

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        from bench.finetune.division import divide_adapters

        division = self.base.build_layer_division(model, sequence_parallel=sequence_parallel)
        return divide_adapters(division)

    def find_layer_style(self, layer: nn.Module, style: ParallelStyle) -> ParallelStyle:
        from bench.finetune.division import find_layer_style

        return find_layer_style(layer, style)

    @property
    def num_blocks(self) -> int | None:
        return self.base.num_blocks

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        return self.base.build_stage(model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        return self.base.find_stage_input_shapes(block, sequence_length)

    def check_sequence_length(self, sequence_length: int) -> None:
        self.base.check_sequence_length(sequence_length)

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        return self.base.find_fp32_modules(model)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """What is really computed: no gradients of frozen weights, but adapters."""
        unquantised_family = dataclasses.replace(self, adapter_spec=dataclasses.replace(self.adapter_spec, bits=None))
        return AdapterFlopCount.from_family(unquantised_family, sequence_length)


# --- FLOPs of training adapters: counted, since a backward pass that skips frozen weights follows no simple rule.

FEWER_COUNTED_BLOCKS, MORE_COUNTED_BLOCKS = 2, 3
"""Blocks per list that are counted; all further ones cost as much as the third."""


@dataclass(frozen=True, kw_only=True)
class AdapterFlopCount(FlopCount):
    """FLOPs of a step of one sequence, with frozen weights.

    Forward computes every product and the adapters' two. Backward computes the gradient of every product's input and of
    adapters, but of no frozen weight: 4 of the 6 FLOPs per weight and token of full training, and the adapters' 6. In
    the first block autograd goes back no further than the first adapter, and what lies before it has no backward. What
    dequantisation takes is no matrix product, and not counted.
    """

    family: Family = dataclasses.field(kw_only=True)
    sequence_length: int = dataclasses.field(kw_only=True)

    @staticmethod
    def from_family(family: Family, sequence_length: int) -> AdapterFlopCount:
        """Of a family with adapters. The forward products of the base are told apart as the base tells them."""
        base = family.base.count_flops_per_sequence(sequence_length)  # type: ignore[attr-defined]
        return AdapterFlopCount(**vars(base), family=family, sequence_length=sequence_length)

    @property
    def model_flops(self) -> int:
        """Forward and backward without recomputation."""
        return self.compute_hardware_flops("none")

    def compute_hardware_flops(
        self, activation_checkpointing: str, *, loss_in_chunks: bool = False, recorded_flops: int | None = None
    ) -> int:
        """`recorded_flops` is not needed: all is counted."""
        flops = count_training_flops(self.family, self.sequence_length, activation_checkpointing)
        return flops + (self.outside_blocks if self.head is None else self.head) * loss_in_chunks


@functools.lru_cache(maxsize=256)
def count_training_flops(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    """FLOPs of the matrix products of one sequence's forward and backward pass, from a step of the model on meta.

    Apart where there may be GPUs: there is a backward pass, and peft imports bitsandbytes, which starts CUDA.
    """
    return processes.call_isolated(_count_training_flops, family, sequence_length, activation_checkpointing)


def _count_training_flops(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    """Blocks of a list are alike, and computing each again takes the same."""
    lengths = {len(blocks) for blocks in family.find_block_lists(family.base.build_model())}  # type: ignore[attr-defined]
    shorter_family, longer_family = family.limit_blocks(FEWER_COUNTED_BLOCKS), family.limit_blocks(MORE_COUNTED_BLOCKS)
    if (
        family.block_period > 1
        or shorter_family is None
        or longer_family is None
        or len(lengths) > 1
        or min(lengths) <= MORE_COUNTED_BLOCKS
    ):
        return _count_step_flops(family, sequence_length, activation_checkpointing)
    interval = find_checkpointing_interval(activation_checkpointing)
    if interval is not None:
        (num_blocks,) = lengths
        unrecomputed_flops, recomputed_flops = (
            _count_training_flops(family, sequence_length, mode) for mode in (NONE, FULL)
        )
        num_checkpointed = num_blocks // interval
        return unrecomputed_flops + (recomputed_flops - unrecomputed_flops) * num_checkpointed // num_blocks
    shorter_flops, longer_flops = (
        _count_step_flops(short_family, sequence_length, activation_checkpointing)
        for short_family in (shorter_family, longer_family)
    )
    return shorter_flops + (min(lengths) - FEWER_COUNTED_BLOCKS) * (longer_flops - shorter_flops)


def _count_step_flops(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    """Counted with attention as separate products over the full square of scores, as `FlopCount` says."""
    attention = family.base.attention if family.base.attention == "eager" else "sdpa"  # type: ignore[attr-defined]
    sdpa_family = dataclasses.replace(family, base=dataclasses.replace(family.base, attention=attention))  # type: ignore
    model = sdpa_family.build_model().to("meta")  # some buffers are elsewhere
    model.train()
    checkpoint_blocks(sdpa_family, model, activation_checkpointing, sequence_length=sequence_length)
    batch = sdpa_family.build_batch(1, sequence_length, torch.Generator())
    inputs = {name: tensor.to("meta") for name, tensor in batch.inputs.items()}
    flop_counter = _MatmulFlopCounter()
    original_attention, functional.scaled_dot_product_attention = (
        functional.scaled_dot_product_attention,
        _compute_unfused_attention,
    )
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), flop_counter:
            model(**inputs)["logits"].sum().backward()
    finally:
        functional.scaled_dot_product_attention = original_attention
    return flop_counter.total_flops


def _compute_unfused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """The two matrix products of attention, whose queries' heads may share those of keys and values."""
    heads_per_key = query.shape[-3] // key.shape[-3]
    key, value = (tensor.repeat_interleave(heads_per_key, dim=-3) for tensor in (key, value))
    return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value


class _MatmulFlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.total_flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        return result
