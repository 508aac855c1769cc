"""A model family with adapters: to whatever builds, traces, wraps or fills a model it is a family like the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.finetune.adapters import ADAPTERS, BASE, add_adapters, initial_std
from bench.finetune.flops import CountedFlops
from bench.finetune.quantised import expect_drawn_weights, quantise_layers, store, stored_bytes
from bench.finetune.shape import Shape
from bench.models import Batch, Family, FlopCount
from bench.precision import Precision


@dataclass(frozen=True)
class Adapted(Family):
    """A family whose weights are frozen, and quantised if asked for, with adapters that are trained."""

    base: Family
    shape: Shape
    precision: Precision

    def build(self) -> nn.Module:
        """The base's model on meta, with adapters."""
        model = self.base.build()
        if self.shape.bits is not None:
            quantise_layers(self.base, model, self.shape, self.precision)
        add_adapters(self.base, model, self.shape)
        if self.shape.bits is not None:
            expect_drawn_weights(model)
        return model

    def init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """As the base says; adapters as LoRA has them."""
        if any(part in name for part in ADAPTERS):
            return initial_std(name, parameter)
        return self.base.init_std(self.drawn_as(name), parameter)

    def drawn_as(self, name: str) -> str:
        """Its name in the base's model, so that frozen weights are those that full training starts from."""
        return name.replace(BASE, "")

    def store(self, module: nn.Module) -> None:
        """Quantise a layer that was filled."""
        if self.shape.bits is not None:
            store(module)

    def stored_bytes(self, model: nn.Module) -> dict[int, int]:
        """Of quantised weights."""
        return stored_bytes(model) if self.shape.bits is not None else {}

    def shortened(self, blocks: int) -> Adapted | None:
        """With fewer blocks."""
        base = self.base.shortened(blocks)
        return None if base is None else dataclasses.replace(self, base=base)

    def batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """The base's."""
        return self.base.batch(num_sequences, sequence_length, generator)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The base's."""
        return self.base.loss(logits, labels)

    def block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The base's."""
        return self.base.block_lists(model)

    def chain(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """The base's."""
        return self.base.chain(blocks, *args, **kwargs)

    def tokens_per_sequence(self, sequence_length: int) -> int:
        """The base's."""
        return self.base.tokens_per_sequence(sequence_length)

    def check_sequence_length(self, sequence_length: int) -> None:
        """The base's."""
        self.base.check_sequence_length(sequence_length)

    def fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The base's."""
        return self.base.fp32_modules(model)

    def flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """What is really computed: no gradients of frozen weights, but adapters."""
        unquantised = dataclasses.replace(self, shape=dataclasses.replace(self.shape, bits=None))
        return CountedFlops.of(unquantised, sequence_length)
