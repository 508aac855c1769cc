"""How fast a processor is that computes by itself: there the time of an operator is a sum, nothing runs beside it.

No vendor states any of this, so there are no peaks and no shares of them: every number is a rate, measured by
``python -m bench.calibrate``. Dictionaries have one entry per number format (fp32, bf16, fp16); a format that is
missing was not measured, and times in it are not predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bench.errors import bad_value

PREFIX = "hardware.speeds.processor"


@dataclass(frozen=True)
class Products:
    """Matrix products: the sum of a call, of their arithmetic and of the bytes of operands and result, each once.

    Libraries copy one operand into an order of their own: the right one, or the left one if that is transposed.
    """

    call_us: dict[str, float]
    """Microseconds of a call, beyond what any operator takes."""
    gflops: dict[str, float]
    """10^9 floating-point operations per second, a multiply-add counting 2."""
    transposed_gflops: dict[str, float]
    """The same where the left operand is transposed, as in the gradient of a weight."""
    copied_gb_s: dict[str, float]
    """10^9 bytes per second of the operand that is copied."""
    other_gb_s: dict[str, float]
    """10^9 bytes per second of the other operand."""
    result_gb_s: dict[str, float]
    """10^9 bytes per second of the result."""

    def __post_init__(self) -> None:
        _require_rates("products", self)


@dataclass(frozen=True)
class FusedAttention:
    """Fused attention: the sum of its blocks of queries and of their arithmetic over the whole square of scores."""

    forward_gflops: dict[str, float]
    """10^9 floating-point operations per second, forward (2 products over the scores)."""
    backward_gflops: dict[str, float]
    """The same backward (5 products)."""
    forward_block_us: dict[str, float]
    """Microseconds that starting a block of queries and keys takes, forward."""
    backward_block_us: dict[str, float]
    """The same backward."""

    def __post_init__(self) -> None:
        _require_rates("attention", self)


@dataclass(frozen=True)
class Updates:
    """Optimizers' steps; keys are an optimizer and its implementation, as ``adamw fused``."""

    tensor_us: dict[str, float]
    """Microseconds per tensor that is updated."""
    gb_s: dict[str, float]
    """10^9 bytes per second, of those that `bench.simulate.pace.OPTIMIZER_PASSES` counts."""

    def __post_init__(self) -> None:
        _require_rates("updates", self)


@dataclass(frozen=True)
class Processor:
    """A processor as a device."""

    products: Products
    attention: FusedAttention
    updates: Updates


def _require_rates(section: str, values: Any) -> None:
    """Microseconds may be 0; rates must be above it."""
    for name, numbers in vars(values).items():
        valid = "a number of at least 0" if name.endswith("_us") else "a number above 0"
        for key, number in numbers.items():
            if not 0 <= number < math.inf or (number == 0 and not name.endswith("_us")):
                raise bad_value(f"{PREFIX}.{section}.{name}.{key}", number, valid)
