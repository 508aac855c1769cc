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
class Step:
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


def steps(values: Sequence[float], level: float, threshold: float) -> list[Step]:
    """Changes of level in positive values that scatter.

    Parameters
    ----------
    level: float
        Probability that a flat series, with independent normal noise in its logarithm, is split anywhere.
    threshold: float
        Smallest change that counts, a fraction.
    """
    logs = np.log(np.asarray(values, dtype=float))
    places = dict(_split(logs, 0, level))
    while True:
        found = _levels(logs, places)
        small = [step for step in found if abs(math.log(step.after / step.before)) < math.log1p(threshold)]
        if not small:
            return found
        del places[min(small, key=lambda step: abs(math.log(step.after / step.before))).index]


def exact_steps(values: Sequence[float], threshold: float) -> list[Step]:
    """Changes of level in values that do not scatter (memory, predictions): whatever leaves the range of a level."""
    places: dict[int, float] = {}
    start = 0
    for index in range(1, len(values)):
        here = values[start:index]
        if values[index] > max(here) * (1 + threshold) or values[index] < min(here) / (1 + threshold):
            places[index], start = 0.0, index
    return _levels(np.log(np.asarray(values, dtype=float)), places)


def _least(count: int) -> int:
    """Values at each level, of so many in all: the longer a series, the more often two outliers are neighbours."""
    return 2 + (count >= 25) + (count >= 75)


def _split(logs: np.ndarray, offset: int, level: float) -> list[tuple[int, float]]:
    """Places (counted from `offset`) of significant changes with their p values."""
    least = _least(len(logs))
    for changes in (1, 2):  # two at once only where there is not one: what comes and goes
        if len(logs) < max(least * (changes + 1), changes + 3):
            return []
        search = ruptures.KernelCPD(kernel="linear", min_size=least).fit(logs.reshape(-1, 1))
        places = search.predict(n_bkps=changes)[:-1]
        p = min(1.0, 2 * _possible(len(logs), changes, least) * _p_value(logs, places))  # 2: one change, or two
        if p <= level:
            break
    else:
        return []
    edges = [0, *places, len(logs)]
    found = [(offset + place, p) for place in places]
    for low, high in pairwise(edges):
        found += _split(logs[low:high], offset + low, level)
    return sorted(found)


def _possible(count: int, changes: int, least: int) -> int:
    """Ways to divide so many values into parts of at least `least`."""
    return math.comb(count - least * (changes + 1) + changes, changes)


def _p_value(logs: np.ndarray, places: Sequence[int]) -> float:
    """F test of several levels against one, at given places."""
    parts = np.split(logs, places)
    within = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    between = float(((logs - logs.mean()) ** 2).sum()) - within
    degrees = len(logs) - len(parts)
    if within <= 1e-24 * len(logs):
        return 0.0 if between > 1e-18 * len(logs) else 1.0
    return float(stats.f.sf(between / len(places) / (within / degrees), len(places), degrees))


def _levels(logs: np.ndarray, places: dict[int, float]) -> list[Step]:
    edges = [0, *sorted(places), len(logs)]
    means = [math.exp(float(logs[low:high].mean())) for low, high in pairwise(edges)]
    return [Step(edges[i], means[i - 1], means[i], places[edges[i]]) for i in range(1, len(edges) - 1)]
