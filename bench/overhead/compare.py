"""What pairs of runs say about the cost of the harness. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.rank.statistics import compute_median, compute_median_interval

MAX_STEP_RATIO = 1.01
"""The median step may take this many times the bare script's."""

MAX_FIXED_RATIO = 1.3
"""Everything outside of the timed steps may take this many times the bare script's."""


MAX_QUIET_CORES = 0.15
"""A pair counts as quiet if others kept no more than this many cores busy during either of its runs."""

MIN_PAIRS = 6
"""Fewer give no 95 % interval of the median."""


@dataclass(frozen=True)
class OverheadRun:
    """One run of either side."""

    parameters: int
    step_times_s: list[float]
    """Of the slowest rank, per timed step."""
    untimed_steps: int
    """Steps before the timed ones."""
    wall_s: float
    """From starting the command to its exit."""
    others_cores: float = 0.0
    """Cores that other processes of this machine kept busy meanwhile, on average."""
    surplus_s: float = 0.0
    """Part of `wall_s` that is done only to make the two sides alike."""

    @property
    def step_s(self) -> float:
        """Median step time."""
        return compute_median(self.step_times_s)

    @property
    def fixed_s(self) -> float:
        """Everything but the timed steps and the surplus."""
        return self.wall_s - sum(self.step_times_s) - self.surplus_s


@dataclass(frozen=True)
class OverheadPair:
    """A run of each side, one right after the other."""

    ours: OverheadRun
    bare: OverheadRun

    @property
    def step_ratio(self) -> float:
        """Our median step over the bare script's."""
        return self.ours.step_s / self.bare.step_s

    @property
    def fixed_ratio(self) -> float:
        """Our fixed cost over the bare script's."""
        return self.ours.fixed_s / self.bare.fixed_s

    @property
    def is_quiet(self) -> bool:
        """Whether the machine was left to the pair."""
        return max(self.ours.others_cores, self.bare.others_cores) <= MAX_QUIET_CORES


@dataclass(frozen=True)
class RatioSummary:
    """What the ratios of all pairs come to."""

    limit: float
    lowest: float
    median: float
    highest: float
    interval: tuple[float, float] | None
    """95 % confidence interval of the median; None of fewer than 6 pairs."""

    @property
    def is_within_limit(self) -> bool:
        """Whether the median keeps the limit."""
        return self.median <= self.limit

    @property
    def is_conclusive(self) -> bool:
        """Whether the whole interval lies on the median's side of the limit."""
        if self.interval is None:
            return False
        low, high = self.interval
        return high <= self.limit if self.is_within_limit else low > self.limit

    def __str__(self) -> str:
        interval_text, doubt_text = f"too few for a 95 % interval, which takes {MIN_PAIRS}", ""
        if self.interval is not None:
            interval_text = "95 % interval {:.4f} to {:.4f}".format(*self.interval)
            doubt_text = "" if self.is_conclusive else ", but the interval holds the limit: more pairs would settle it"
        return (
            f"{self.median:.4f} ({interval_text}, range {self.lowest:.4f} to {self.highest:.4f}):"
            f" {'within' if self.is_within_limit else 'NOT within'} {self.limit:g}{doubt_text}"
        )


def summarize_ratios(ratios: Sequence[float], limit: float) -> RatioSummary:
    """Judge the ratios of all pairs by their median."""
    return RatioSummary(limit, min(ratios), compute_median(ratios), max(ratios), compute_median_interval(ratios))


def select_quiet_pairs(pairs: Sequence[OverheadPair]) -> list[OverheadPair]:
    """The quiet pairs if they are enough to judge by, else all. What others did decides, never the ratio."""
    quiet_pairs = [pair for pair in pairs if pair.is_quiet]
    return quiet_pairs if len(quiet_pairs) >= MIN_PAIRS else list(pairs)


def is_ours_first(pair_number: int) -> bool:
    """Whether our side goes first: ABBA, so that slow drift favours neither side."""
    return pair_number % 2 == 0
