"""Where the level of a series changes. Pure functions on numbers.

`ruptures` finds the best places for one or two changes by dynamic programming; whether there is a change at all is
decided here, by an F test corrected for the number of places it could have been found at, so that a flat series is
rarely split. What is split is searched again, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import ruptures
from scipy import stats


@dataclass(frozen=True)
class LevelChange:
    """A change of level before the value number `index`."""

    index: int
    before: float
    after: float
    """Geometric mean of the values up to the neighbouring changes."""
    p: float

    @property
    def change(self) -> float:
        """After over before, less 1."""
        return self.after / self.before - 1


def find_level_changes(values: Sequence[float], level: float, threshold: float) -> list[LevelChange]:
    """Changes of level in positive values that scatter.

    Parameters
    ----------
    level: float
        Probability that a flat series, with independent normal noise in its logarithm, is split anywhere.
    threshold: float
        Smallest change that counts, a fraction.
    """
    logs = np.log(np.asarray(values, dtype=float))
    p_by_index = dict(_find_splits(logs, 0, level))
    while True:
        level_changes = _build_level_changes(logs, p_by_index)
        small_changes = [
            change for change in level_changes if abs(math.log(change.after / change.before)) < math.log1p(threshold)
        ]
        if not small_changes:
            return level_changes
        del p_by_index[min(small_changes, key=lambda change: abs(math.log(change.after / change.before))).index]


def find_exact_level_changes(values: Sequence[float], threshold: float) -> list[LevelChange]:
    """Changes of level in values that do not scatter (memory, predictions): whatever leaves the range of a level."""
    p_by_index: dict[int, float] = {}
    start = 0
    for index in range(1, len(values)):
        level_values = values[start:index]
        if values[index] > max(level_values) * (1 + threshold) or values[index] < min(level_values) / (1 + threshold):
            p_by_index[index], start = 0.0, index
    return _build_level_changes(np.log(np.asarray(values, dtype=float)), p_by_index)


def _compute_min_segment(count: int) -> int:
    """Values at each level, of so many in all: the longer a series, the more often two outliers are neighbours."""
    return 2 + (count >= 25) + (count >= 75)


def _find_splits(logs: np.ndarray, offset: int, level: float) -> list[tuple[int, float]]:
    """Places (counted from `offset`) of significant changes with their p values."""
    min_segment = _compute_min_segment(len(logs))
    for num_changes in (1, 2):  # two at once only where there is not one: what comes and goes
        if len(logs) < max(min_segment * (num_changes + 1), num_changes + 3):
            return []
        search = ruptures.KernelCPD(kernel="linear", min_size=min_segment).fit(logs.reshape(-1, 1))
        split_indices = search.predict(n_bkps=num_changes)[:-1]
        p = min(
            1.0, 2 * _count_divisions(len(logs), num_changes, min_segment) * _compute_p_value(logs, split_indices)
        )  # 2: one change, or two
        if p <= level:
            break
    else:
        return []
    edges = [0, *split_indices, len(logs)]
    splits = [(offset + index, p) for index in split_indices]
    for start, end in pairwise(edges):
        splits += _find_splits(logs[start:end], offset + start, level)
    return sorted(splits)


def _count_divisions(count: int, num_changes: int, min_segment: int) -> int:
    """Ways to divide so many values into parts of at min_segment `min_segment`."""
    return math.comb(count - min_segment * (num_changes + 1) + num_changes, num_changes)


def _compute_p_value(logs: np.ndarray, split_indices: Sequence[int]) -> float:
    """F test of several levels against one, at given places."""
    segments = np.split(logs, split_indices)
    variation_within = sum(float(((segment - segment.mean()) ** 2).sum()) for segment in segments)
    variation_between = float(((logs - logs.mean()) ** 2).sum()) - variation_within
    degrees = len(logs) - len(segments)
    if variation_within <= 1e-24 * len(logs):
        return 0.0 if variation_between > 1e-18 * len(logs) else 1.0
    return float(
        stats.f.sf(variation_between / len(split_indices) / (variation_within / degrees), len(split_indices), degrees)
    )


def _build_level_changes(logs: np.ndarray, p_by_index: dict[int, float]) -> list[LevelChange]:
    edges = [0, *sorted(p_by_index), len(logs)]
    means = [math.exp(float(logs[start:end].mean())) for start, end in pairwise(edges)]
    return [LevelChange(edges[i], means[i - 1], means[i], p_by_index[edges[i]]) for i in range(1, len(edges) - 1)]
