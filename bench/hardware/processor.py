"""How fast a processor is that computes by itself: there the time of an operator is a sum, nothing runs beside it.

No vendor states any of this, so there are no peaks and no shares of them: every number is a rate, measured by
``python -m bench.calibrate``. Dictionaries have one entry per number format (fp32, bf16, fp16); a format that is
missing was not measured, and times in it are not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bench.typed import Within

TimesByName = dict[str, Annotated[float, Within(0, 1e7, unit="microseconds")]]
RatesByName = dict[str, Annotated[float, Within(1e-6, 1e9)]]


@dataclass(frozen=True)
class ProcessorMatmulSpeed:
    """Matrix products: the sum of a call, of their arithmetic and of the bytes of operands and result, each once.

    Libraries copy one operand into an order of their own: the right one, or the left one if that is transposed.
    """

    call_us: TimesByName
    """Microseconds of a call, beyond what any operator takes."""
    gflops: RatesByName
    """10^9 floating-point operations per second, a multiply-add counting 2."""
    transposed_gflops: RatesByName
    """The same where the left operand is transposed, as in the gradient of a weight."""
    copied_gb_s: RatesByName
    """10^9 bytes per second of the operand that is copied."""
    other_gb_s: RatesByName
    """10^9 bytes per second of the other operand."""
    result_gb_s: RatesByName
    """10^9 bytes per second of the result."""


@dataclass(frozen=True)
class ProcessorAttentionSpeed:
    """Fused attention: the sum of its blocks of queries and of their arithmetic over the whole square of scores."""

    forward_gflops: RatesByName
    """10^9 floating-point operations per second, forward (2 products over the scores)."""
    backward_gflops: RatesByName
    """The same backward (5 products)."""
    forward_block_us: TimesByName
    """Microseconds that starting a block of queries and keys takes, forward."""
    backward_block_us: TimesByName
    """The same backward."""


@dataclass(frozen=True)
class ProcessorOptimizerSpeed:
    """Optimizers' steps; keys are an optimizer and its implementation, as ``adamw fused``."""

    tensor_us: TimesByName
    """Microseconds per tensor that is updated."""
    gb_s: RatesByName
    """10^9 bytes per second, of those that `(module moves; name stays)` counts."""


@dataclass(frozen=True)
class ProcessorSpeed:
    """A processor as a device."""

    products: ProcessorMatmulSpeed
    attention: ProcessorAttentionSpeed
    updates: ProcessorOptimizerSpeed
