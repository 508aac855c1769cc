"""Whether predictions of published rows became worse than ``results/predicted/accuracy.json`` says they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.validation.score_summaries import pick_configurations
from bench.validation.scores import Score
from bench.validation.tables import format_table

GROUP_MARGIN = 0.005
"""By how much the mean error of a group of configurations may grow."""

CONFIGURATION_MARGIN = 0.03
"""By how much the error of one configuration may grow."""

MOVED_LIMIT = 0.001
"""From where on an error is said to have moved."""


@dataclass(frozen=True)
class MovedError:
    """An error as it was committed and as it is now, both as shares with their sign; of a group the mean of sizes."""

    name: str
    before: float
    after: float
    margin: float

    @property
    def growth(self) -> float:
        return abs(self.after) - abs(self.before)

    @property
    def is_worse(self) -> bool:
        """By more than the margin."""
        return self.growth > self.margin


def compare_errors(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[MovedError]:
    """Groups, then configurations, whose errors moved, of those that both summaries have.

    Parameters
    ----------
    before, after: mapping
        As `bench.validation.page.build_accuracy_summary` returns them. Groups are compared over the configurations that
        both have.
    """
    shared = [key for key in after["configurations"] if key in before["configurations"]]
    groups: dict[str, list[str]] = {}
    for key in shared:
        groups.setdefault(before["configurations"][key]["group"], []).append(key)

    def compute_mean(summary: Mapping[str, Any], keys: Sequence[str]) -> float:
        return fmean(abs(summary["configurations"][key]["error"]) for key in keys)

    moved = [
        MovedError(f"{name} (mean of {len(keys)})", compute_mean(before, keys), compute_mean(after, keys), GROUP_MARGIN)
        for name, keys in groups.items()
    ]
    moved += [
        MovedError(
            key,
            before["configurations"][key]["error"],
            after["configurations"][key]["error"],
            CONFIGURATION_MARGIN,
        )
        for key in shared
    ]
    return [error for error in moved if abs(error.after - error.before) > MOVED_LIMIT]


def render_moved(moved: Sequence[MovedError]) -> str:
    """A table of what moved, worst first."""
    rows = (
        (error.name, f"{error.before:+.1%}", f"{error.after:+.1%}", "worse" if error.is_worse else "")
        for error in sorted(moved, key=lambda error: -error.growth)
    )
    return format_table(("what", "error before", "now", ""), rows)


def list_wrong_verdicts(scores: Sequence[Score]) -> list[str]:
    """Rows of configurations that ran and are said not to fit."""
    return [
        f"{score.reading.source}, row {score.reading.row}"
        for score in pick_configurations(scores)
        if score.is_too_large
    ]
