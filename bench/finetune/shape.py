"""How adapters and quantised weights change a model."""

from __future__ import annotations

from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""Every linear layer of the blocks; peft's word."""


@dataclass(frozen=True)
class AdapterSpec:
    """How a model is changed: hashable, as traces are remembered by it."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    bits: int | None = None
    """None: weights stay as they are."""
    double_quantisation: bool = True
