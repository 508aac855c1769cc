"""``activation_checkpointing=budget``: as much is kept for backward as is predicted to fit."""

from __future__ import annotations

import bisect

from bench.config.compose import compose_shared_config
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.models.base import BUDGET, BUDGET_PREFIX, FULL, NONE
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.prediction import FITS

KEY = "activation_checkpointing"

CHOICES = (NONE, *(f"{BUDGET_PREFIX}{percent}" for percent in range(95, 0, -5)), FULL)
"""From what keeps most to what keeps least."""


def choose_budget(point: RunSettings) -> RunSettings:
    """The settings with the first of `CHOICES` that is predicted to fit, where they ask for a budget; ``full`` if
    nothing does. The row has what was chosen: the next version of the predictor may choose another.

    Raises
    ------
    ImpossibleError
        If there is no telling what fits.
    """
    if point.get(KEY) != BUDGET:
        return point
    position = bisect.bisect_left(CHOICES[:-1], True, key=lambda mode: _fits(_build_config(point, mode)))
    return {**point, KEY: CHOICES[position]}


def _build_config(point: RunSettings, mode: str) -> RunConfig:
    return build_run_config(compose_shared_config({**point, KEY: mode}))


def _fits(config: RunConfig) -> bool:
    (prediction,) = predict_configs([config])
    if isinstance(prediction, Unpredictable):
        raise ImpossibleError(f"{KEY}={BUDGET} needs a prediction, and {prediction.reason}")
    if prediction.memory.capacity is None:
        raise ImpossibleError(
            f"{KEY}={BUDGET} is not valid for hardware={config.hardware.name}, whose memory is not limited: choose "
            f"{BUDGET_PREFIX}P with P from 1 to 99, or set hardware.memory_gb."
        )
    return prediction.memory.verdict == FITS
