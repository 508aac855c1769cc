"""Autocast that a model brings along."""

from __future__ import annotations

import torch
from torch import nn

from bench.strategies.base import WrapContext


class AutocastModule(nn.Module):
    """A model that enters autocast by itself: in whichever thread a copy of it runs.

    ``parallel_apply`` tells its threads whether autocast is on, but not to which format, which every thread keeps for
    itself: bf16 would become fp16, CUDA's default.
    """

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._device, self._dtype = device, dtype

    def forward(self, **inputs: torch.Tensor) -> object:
        with torch.autocast(self._device, self._dtype):
            return self.model(**inputs)


def wrap_in_autocast(model: nn.Module, context: WrapContext) -> nn.Module:
    """The model, in a wrapper if its precision is mixed."""
    return (
        AutocastModule(model, context.device.type, context.precision.compute_dtype)
        if context.precision.is_mixed
        else model
    )
