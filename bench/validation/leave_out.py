"""Rows predicted with constants that were chosen without them: without their source, their device, or their family.

What is fitted to training rows is the few constants of `SHARED_CONSTANTS`, the same for all devices. For each source,
device and family that is left out they are chosen anew, by the mean error on all other complete rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean

from bench.validation.metrics import SPEED
from bench.validation.readings import Reading
from bench.validation.score_summaries import group_by, pick_configurations
from bench.validation.scores import Score, score_readings

SHARED_CONSTANTS: dict[str, tuple[str, ...]] = {
    "hardware.speeds.many_gpus_share": ("0.88", "0.895", "0.925", "0.94"),
    "hardware.speeds.overlap_loss": ("0.05", "0.25"),
    "hardware.speeds.links.node_efficiency": ("0.8", "1.0"),
}
"""What is fitted to training rows, as overrides, and values to try beside the one in use."""

LEFT_OUT_KINDS: dict[str, Callable[[Score], str]] = {
    "source": lambda score: score.reading.source,
    "device": lambda score: score.hardware,
    "model family": lambda score: score.family,
}


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Rows of one source, device or family, predicted with constants chosen without them."""

    kind: str
    """A key of `LEFT_OUT_KINDS`."""
    name: str
    constants: tuple[tuple[str, str], ...]
    """What was chosen otherwise than in conf/hardware."""
    scores: list[Score]


def score_left_out(scores: Sequence[Score]) -> list[LeftOut]:
    """Every source, device and family of complete rows of speed, left out in turn."""
    base = pick_configurations(score for score in scores if score.kind == SPEED and score.reading.is_complete)
    candidates: dict[tuple[tuple[str, str], ...], list[Score]] = {(): base}
    for key, values in SHARED_CONSTANTS.items():
        for value in values:
            constants = ((key, value),)
            candidates[constants] = _score_with([score.reading for score in base], constants)
    results = []
    for kind, get_name in LEFT_OUT_KINDS.items():
        for name in group_by(base, get_name):
            chosen = min(candidates, key=lambda constants: _compute_error(candidates[constants], get_name, name))
            left_out = [score for score in candidates[chosen] if get_name(score) == name]
            results.append(LeftOut(kind, name, chosen, left_out))
    return results


def _score_with(readings: Sequence[Reading], constants: tuple[tuple[str, str], ...]) -> list[Score]:
    """The same rows with other constants, unless a source sets them itself."""
    changed = [
        dataclasses.replace(reading, settings=tuple({**dict(constants), **dict(reading.settings)}.items()))
        for reading in readings
    ]
    ordered = [
        dataclasses.replace(reading, settings=tuple(sorted(reading.settings, key=lambda item: "." in item[0])))
        for reading in changed
    ]
    return score_readings(ordered)[0]


def _compute_error(scores: Sequence[Score], get_name: Callable[[Score], str], left_out: str) -> float:
    """Mean absolute error of all others, every source on every device counting as much; 0 if there are none."""
    others = [score for score in scores if get_name(score) != left_out]
    groups = group_by(others, lambda score: f"{score.reading.source} {score.hardware}").values()
    return fmean(fmean(abs(score.error) for score in group) for group in groups) if groups else 0.0
