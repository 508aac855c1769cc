"""FLOPs of training adapters: counted, since a backward pass that skips frozen weights follows no simple rule."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench import processes
from bench.models import Family, FlopCount
from bench.models.blocks import checkpoint_blocks

FEW, MORE = 2, 3
"""Blocks per list that are counted; all further ones cost as much as the third."""


@dataclass(frozen=True)
class CountedFlops(FlopCount):
    """FLOPs of a step of one sequence, with frozen weights.

    Forward computes every product and the adapters' two. Backward computes the gradient of every product's input and of
    adapters, but of no frozen weight: 4 of the 6 FLOPs per weight and token of full training, and the adapters' 6. In
    the first block autograd goes back no further than the first adapter, and what lies before it has no backward. What
    dequantisation takes is no matrix product, and not counted.
    """

    family: Family
    sequence_length: int

    @staticmethod
    def of(family: Family, sequence_length: int) -> CountedFlops:
        """Of a family with adapters. The forward products of the base are told apart as the base tells them."""
        base = family.base.flops_per_sequence(sequence_length)  # type: ignore[attr-defined]
        return CountedFlops(**vars(base), family=family, sequence_length=sequence_length)

    @property
    def model(self) -> int:
        """Forward and backward without recomputation."""
        return self.hardware("none")

    def hardware(self, activation_checkpointing: str) -> int:
        """What the device executes."""
        return counted(self.family, self.sequence_length, activation_checkpointing)


@functools.lru_cache(maxsize=256)
def counted(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    """FLOPs of the matrix products of one sequence's forward and backward pass, from a step of the model on meta.

    Apart where there may be GPUs: there is a backward pass, and peft imports bitsandbytes, which starts CUDA.
    """
    return processes.apart(_count, family, sequence_length, activation_checkpointing)


def _count(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    lengths = {len(blocks) for blocks in family.block_lists(family.base.build())}  # type: ignore[attr-defined]
    few, more = family.shortened(FEW), family.shortened(MORE)
    if few is None or more is None or len(lengths) > 1 or min(lengths) <= MORE:
        return _step(family, sequence_length, activation_checkpointing)
    first, second = (_step(each, sequence_length, activation_checkpointing) for each in (few, more))
    return first + (min(lengths) - FEW) * (second - first)


def _step(family: Family, sequence_length: int, activation_checkpointing: str) -> int:
    """Counted with attention as separate products over the full square of scores, as `FlopCount` says."""
    fused = dataclasses.replace(family, base=dataclasses.replace(family.base, attention="sdpa"))  # type: ignore
    model = fused.build()
    model.train()
    checkpoint_blocks(fused, model, activation_checkpointing)
    batch = fused.batch(1, sequence_length, torch.Generator())
    inputs = {name: tensor.to("meta") for name, tensor in batch.inputs.items()}
    count = _Count()
    attention, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, _products
    try:
        with count:
            model(**inputs)["logits"].sum().backward()
    finally:
        functional.scaled_dot_product_attention = attention
    return count.flops


def _products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The two matrix products of attention."""
    return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value


class _Count(TorchDispatchMode):
    """Adds up the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        return out
