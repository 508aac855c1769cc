"""One thing that was timed for a calibration."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

MATMUL, ATTENTION, MEMORY, OPERATOR, OPTIMIZER, LAUNCH, COLLECTIVE = (
    "matmul",
    "attention",
    "memory",
    "operator",
    "optimizer",
    "launch",
    "collective",
)
SAMPLE_KINDS = (MATMUL, ATTENTION, MEMORY, OPERATOR, OPTIMIZER, LAUNCH, COLLECTIVE)


@dataclass(frozen=True)
class CalibrationSample:
    """Repeated timings of one operation at one size."""

    kind: str
    """One of `SAMPLE_KINDS`."""
    name: str
    """Operator (``mm``, ``gelu_backward``), optimizer and its implementation, or collective (``all-gather``)."""
    format: str
    """fp32, tf32, bf16 or fp16; ``bytes`` for collectives."""
    dims: tuple[int, ...]
    """Of a matrix product: batch, m, n, k, and 1 if the left operand is transposed. Of attention: batch, heads,
    queries, keys, head dimension. Else the shape or the number of elements."""
    flops: float
    bytes_moved: float
    """Operands read and results written, each once. Of a collective: the whole message, as
    `bench.prediction.cost.collectives` counts it."""
    seconds: tuple[float, ...]
    """Each repetition; of a collective that of the slowest rank."""
    ranks: int = 1
    ranks_per_node: int = 1

    @property
    def median_s(self) -> float:
        """Median of the repetitions in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the repetitions, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median_s
