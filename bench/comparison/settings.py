"""What a comparison takes for a change, and how often it may be wrong."""

from __future__ import annotations

from dataclasses import dataclass

from bench.core.errors import invalid_value_error


@dataclass(frozen=True)
class ComparisonSettings:
    """Thresholds and error rates of a comparison. All are fractions: 0.015 is 1.5 %."""

    threshold: float = 0.015
    """Smallest change of the step time that counts; smaller ones are never called, however certain they are."""
    margin: float = 0.03
    """What "no change" of a time excludes: its confidence interval lies within this distance of no change."""
    memory_threshold: float = 0.01
    """Smallest change of the peak of allocated memory that counts: equal code allocates the same bytes."""
    reserved_threshold: float = 0.03
    """The same of reserved memory, which depends on the order in which streams freed their blocks."""
    false_alarms: float = 0.01
    """Largest probability that a comparison of equal code calls any regression (or any improvement) of a time."""
    confidence: float = 0.95
    """Level of the confidence intervals, which are not corrected for the number of comparisons."""
    across_machines: bool = False
    """Compare although the machines differ."""

    def __post_init__(self) -> None:
        for name in ("threshold", "memory_threshold", "reserved_threshold"):
            if not 0 <= getattr(self, name) < 1:
                raise invalid_value_error(name, getattr(self, name), "a number of at least 0 and below 1 (100 %)")
        if not self.threshold <= self.margin < 1:
            raise invalid_value_error("margin", self.margin, f"a number from threshold={self.threshold:g} to 1 (100 %)")
        for name in ("false_alarms", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise invalid_value_error(name, getattr(self, name), "a number between 0 and 1")
