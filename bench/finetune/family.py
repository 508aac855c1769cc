"""A model family with adapters: to whatever builds, traces, wraps or fills a model it is a family like the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.core.precision import Precision
from bench.finetune.adapters import ADAPTER_NAME_PARTS, BASE_LAYER_SUFFIX, add_adapters, find_adapter_init_std
from bench.finetune.flops import AdapterFlopCount
from bench.finetune.quantised import find_quantised_bytes, prepare_drawn_weights, quantise_drawn_weight, quantise_layers
from bench.finetune.shape import AdapterSpec
from bench.models import Batch, Family, FlopCount


@dataclass(frozen=True)
class AdaptedFamily(Family):
    """A family whose weights are frozen, and quantised if asked for, with adapters that are trained."""

    base: Family
    adapter_spec: AdapterSpec
    precision: Precision

    def build_model(self) -> nn.Module:
        """The base's model on meta, with adapters."""
        model = self.base.build_model()
        if self.adapter_spec.bits is not None:
            quantise_layers(self.base, model, self.adapter_spec, self.precision)
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

    def find_stored_bytes(self, model: nn.Module) -> dict[int, int]:
        """Of quantised weights."""
        return find_quantised_bytes(model) if self.adapter_spec.bits is not None else {}

    def limit_blocks(self, max_blocks: int) -> AdaptedFamily | None:
        """With fewer blocks."""
        base = self.base.limit_blocks(max_blocks)
        return None if base is None else dataclasses.replace(self, base=base)

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """The base's."""
        return self.base.build_batch(num_sequences, sequence_length, generator)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The base's."""
        return self.base.compute_loss(logits, labels)

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The base's."""
        return self.base.find_block_lists(model)

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """The base's."""
        return self.base.run_blocks(blocks, *args, **kwargs)

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """The base's."""
        return self.base.count_tokens_per_sequence(sequence_length)

    def check_sequence_length(self, sequence_length: int) -> None:
        """The base's."""
        self.base.check_sequence_length(sequence_length)

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The base's."""
        return self.base.find_fp32_modules(model)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """What is really computed: no gradients of frozen weights, but adapters."""
        unquantised_family = dataclasses.replace(self, adapter_spec=dataclasses.replace(self.adapter_spec, bits=None))
        return AdapterFlopCount.from_family(unquantised_family, sequence_length)
