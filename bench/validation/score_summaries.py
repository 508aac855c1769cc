"""What the errors of scored rows come to: in sum, each configuration once, in groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from bench.validation.scores import Score

Item = TypeVar("Item")


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some scores, as shares."""

    count: int
    mean: float
    """Of absolute errors."""
    worst: float
    """The largest error, with its sign."""
    bias: float
    """Mean of signed errors."""
    share_within: float
    """Share of scores in their interval."""


def summarize_scores(scores: Sequence[Score]) -> ErrorSummary:
    """Mean, worst and bias of at least one score that has an error."""
    errors = [score.error for score in scores]
    return ErrorSummary(
        count=len(errors),
        mean=fmean(map(abs, errors)),
        worst=max(errors, key=abs),
        bias=fmean(errors),
        share_within=fmean(score.is_within for score in scores),
    )


def pick_configurations(scores: Iterable[Score]) -> list[Score]:
    """One score per configuration and kind: rows with other metrics of the same step say the same again."""
    picked: dict[tuple[object, ...], Score] = {}
    for score in scores:
        key = (
            score.reading.source,
            score.reading.identity,
            score.kind,
            round(score.log_ratio, 2) if score.is_counted else 0,
        )
        picked.setdefault(key, score)
    return list(picked.values())


def group_by(items: Iterable[Item], get_key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Items by a property, in the order the properties first appear."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(get_key(item), []).append(item)
    return groups


SIZE_CLASSES = (
    (1e9, "below 1B"),
    (5e9, "1B to 5B"),
    (20e9, "5B to 20B"),
    (100e9, "20B to 100B"),
    (math.inf, "above 100B"),
)


def classify_model_size(score: Score) -> str:
    """How large the model is, in words."""
    return next(name for limit, name in SIZE_CLASSES if score.parameters < limit)
