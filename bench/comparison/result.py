"""What a comparison comes to, as plain values that every output is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.comparison.hosts import EnvironmentDifference
from bench.comparison.labels import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION
from bench.comparison.settings import ComparisonSettings

FORMAT_VERSION = 1
"""Of the JSON that is written of it."""


@dataclass(frozen=True)
class QuantityChange:
    """One quantity of one configuration, or of all of them together (geometric means)."""

    quantity: str
    """Column of the rows, or ``status``."""
    verdict: str
    reason: str = ""
    """Why that verdict, where the numbers alone do not say it."""
    base: float | str | None = None
    """Geometric mean over runs (times), median over runs (memory), or statuses in words."""
    candidate: float | str | None = None
    base_runs: int = 0
    candidate_runs: int = 0
    change: float | None = None
    """candidate / base - 1."""
    low: float | None = None
    high: float | None = None
    """Confidence interval of `change`; None where runs show no spread to tell it from."""
    p: float | None = None
    """p value of the slowdown or speed-up, whichever it is, corrected for the number of comparisons."""
    spread: float | None = None
    """Standard deviation from run to run, as a fraction."""
    detectable: float | None = None
    """Slowdown that would be found 95 times in 100 with so many runs and this spread."""


@dataclass(frozen=True)
class ComparedConfiguration:
    """One configuration that both sides have."""

    name: str
    evidence: str
    verdict: str
    changes: tuple[QuantityChange, ...]
    """Status first, then the quantities that both sides have."""
    question: dict[str, object]
    """The configuration, as path -> value."""
    machines: tuple[EnvironmentDifference, ...] = ()
    software: tuple[EnvironmentDifference, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, quantity: str) -> QuantityChange:
        return next(change for change in self.changes if change.quantity == quantity)

    def get(self, quantity: str) -> QuantityChange | None:
        """The change of a quantity; None where either side does not have it."""
        return next((change for change in self.changes if change.quantity == quantity), None)

    @property
    def reasons(self) -> list[str]:
        """Reasons of the changes that decided the verdict."""
        return list(
            dict.fromkeys(change.reason for change in self.changes if change.verdict == self.verdict and change.reason)
        )


@dataclass(frozen=True)
class OverallComparison:
    """All configurations of one kind of evidence together."""

    evidence: str
    configurations: int
    verdict: str
    changes: tuple[QuantityChange, ...]

    def get(self, quantity: str) -> QuantityChange | None:
        """The change of a quantity; None where no configuration has it."""
        return next((change for change in self.changes if change.quantity == quantity), None)


@dataclass(frozen=True)
class UnmatchedConfiguration:
    """A configuration that only one side has."""

    name: str
    evidence: str
    runs: int


@dataclass(frozen=True)
class RunComparison:
    """Everything that comparing two sets of rows says."""

    settings: ComparisonSettings
    verdict: str
    sentence: str
    """The verdict in one sentence."""
    rows: tuple[ComparedConfiguration, ...]
    overall: tuple[OverallComparison, ...]
    """One per kind of evidence."""
    only_base: tuple[UnmatchedConfiguration, ...] = ()
    only_candidate: tuple[UnmatchedConfiguration, ...] = ()
    machines: tuple[EnvironmentDifference, ...] = ()
    """Of any configuration; if there are some, they are to be told first."""
    software: tuple[EnvironmentDifference, ...] = ()
    notes: tuple[str, ...] = ()
    comparable: bool = True
    """Whether anything could be compared at all."""

    @property
    def exit_code(self) -> int:
        """0 no regression, 1 regression, 2 nothing comparable."""
        return 2 if not self.comparable else int(self.verdict == REGRESSION)

    def list_with_verdict(self, verdict: str) -> list[ComparedConfiguration]:
        """The configurations with a verdict."""
        return [row for row in self.rows if row.verdict == verdict]

    counts: dict[str, int] = field(default_factory=dict)
    """Configurations per verdict."""


def find_worst_verdict(verdicts: list[str]) -> str:
    """The verdict of several quantities of one configuration: what is bad first, then what is good."""
    for verdict in (REGRESSION, IMPROVEMENT, CANNOT_TELL):
        if verdict in verdicts:
            return verdict
    return NO_CHANGE
