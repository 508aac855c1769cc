"""What a comparison comes to, as plain values that every output is made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.comparison.hosts import EnvironmentDifference
from bench.core.errors import invalid_value_error
from bench.core.presentation import OPTIONAL_SETTING_FORMATTERS, format_optional_setting
from bench.core.units import GIB
from bench.records import Record


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
    strict: bool = False
    """What cannot be told fails, as a regression does."""

    def __post_init__(self) -> None:
        for name in ("threshold", "memory_threshold", "reserved_threshold"):
            if not 0 <= getattr(self, name) < 1:
                raise invalid_value_error(name, getattr(self, name), "a number of at least 0 and below 1 (100 %)")
        if not self.threshold <= self.margin < 1:
            raise invalid_value_error("margin", self.margin, f"a number from threshold={self.threshold:g} to 1 (100 %)")
        for name in ("false_alarms", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise invalid_value_error(name, getattr(self, name), "a number between 0 and 1")


# --- The words of a comparison: verdicts, quantities, and names of configurations.

REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL = "regression", "improvement", "no change", "cannot tell"
VERDICTS = (REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL)


@dataclass(frozen=True)
class ComparedQuantity:
    """A column that is compared."""

    column: str
    title: str
    unit: str
    worse_direction: int
    """1 where more is worse, -1 where less is."""


STEP_TIME = ComparedQuantity("step_time_median_s", "step time", "s", 1)
TFLOPS = ComparedQuantity("tflops_per_gpu", "TFLOPS per GPU", "TFLOP/s", -1)
ALLOCATED = ComparedQuantity("peak_allocated_bytes", "allocated memory", "bytes", 1)
RESERVED = ComparedQuantity("peak_reserved_bytes", "reserved memory", "bytes", 1)
QUANTITIES = (STEP_TIME, TFLOPS, ALLOCATED, RESERVED)


def name_configurations(records: Sequence[Record], questions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each configuration, given by one of its rows and by what it asks; no two are the same.

    Where the short names of two configurations are equal, what differs between their questions is added.
    """
    short_names = [_format_short_name(record) for record in records]
    questions_by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, question in zip(short_names, questions, strict=True):
        questions_by_name.setdefault(name, []).append(question)
    full_names = []
    for name, question in zip(short_names, questions, strict=True):
        same_named = questions_by_name[name]
        differing_paths = {
            path for twin in same_named for path in (*twin, *question) if twin.get(path) != question.get(path)
        }
        assignments = [
            f"{path.rpartition('.')[2]}={_format_plain_value(question.get(path))}" for path in sorted(differing_paths)
        ]
        full_names.append(" ".join([name, *assignments]))
    name_counts = Counter(full_names)
    seen_counts: Counter[str] = Counter()
    for position, name in enumerate(full_names):
        if name_counts[name] > 1:
            seen_counts[name] += 1
            full_names[position] = f"{name} #{seen_counts[name]}"
    return full_names


def _format_short_name(record: Record) -> str:
    """``t5_tiny fsdp/hybrid_shard F=2 fp32 4 ranks batch 4×64``, and what else is set to something uncommon."""
    strategy = record.get("effective_strategy") or record.get("strategy") or "strategy not stated"
    parts = [record.get("model") or "model not stated", strategy]
    factor, world_size = record.get("sharding_factor"), record.get("world_size")
    if factor is not None and world_size is not None and 1 < factor < world_size:
        parts.append(f"F={factor}")
    parts.append(record.get("precision") or "")
    if world_size is not None:
        parts.append(f"{world_size} rank{'' if world_size == 1 else 's'}")
    parts.append(f"batch {record.get('batch_size_per_gpu')}×{record.get('sequence_length')}")
    if (record.get("gradient_accumulation") or 1) > 1:
        parts.append(f"accumulation {record['gradient_accumulation']}")
    if record.get("activation_checkpointing") not in (None, "none"):
        parts.append(f"checkpointing {record['activation_checkpointing']}")
    if record.get("compile"):
        parts.append("compiled")
    parts += [format_optional_setting(column, record.get(column)) for column in OPTIONAL_SETTING_FORMATTERS]
    if record.get("memory_limit_bytes") is not None:
        parts.append(f"limit {record['memory_limit_bytes'] / GIB:.3g} GiB")
    return " ".join(part for part in parts if part)


def _format_plain_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_percent(fraction: float, *, signed: bool = True) -> str:
    """``+3.1 %``; one decimal more below 1 %, where that is what matters."""
    if fraction == 0:
        return "0 %"
    digits = 1 if abs(fraction) >= 0.00995 else 2
    if not signed:
        return f"{100 * fraction:.{digits}f}".removesuffix("0").removesuffix(".") + " %"
    return f"{100 * fraction:+.{digits}f} %".replace("-", "−")


# --- What a comparison comes to, as plain values that every output is made from.

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


def describe_exclusion(change: QuantityChange) -> str:
    """What the confidence interval of a time leaves out: "excludes no change: slower by at least 2.1 %"."""
    if change.low is None or change.high is None:
        return ""
    if change.low > 0 or change.high < 0:
        word, bound = ("slower", change.low) if change.low > 0 else ("faster", -change.high)
        return f"excludes no change: {word} by at least {format_percent(bound, signed=False)}"
    slowdown, speedup = (format_percent(abs(bound), signed=False) for bound in (change.high, change.low))
    return f"excludes more than {slowdown} slower and more than {speedup} faster"


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
        """0 no regression, 1 regression (with `strict` also where something cannot be told), 2 nothing comparable."""
        if not self.comparable:
            return 2
        is_open = self.verdict == CANNOT_TELL or any(row.verdict == CANNOT_TELL for row in self.rows)
        return int(self.verdict == REGRESSION or (self.settings.strict and is_open))

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
