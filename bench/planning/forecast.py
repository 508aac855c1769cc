"""What the predictor says of planned runs: all at once, each once, and one sentence where it cannot tell."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.errors import UsageError
from bench.simulate.predict import predict_all
from bench.simulate.prediction import Prediction, Range


@dataclass(frozen=True)
class Untold:
    """There is no prediction of a run."""

    reason: str
    """One sentence."""
    refused: bool
    """The question is impossible; else the predictor failed."""


Forecast = Prediction | Untold

_told: dict[str, Forecast] = {}
"""By run_id."""


def forecasts(configs: Sequence[RunConfig]) -> list[Forecast]:
    """Predict runs, whatever their mode."""
    new = {config.run_id: config for config in configs if config.run_id not in _told}
    _told.update(zip(new, _ask(list(new.values())), strict=True))
    return [_told[config.run_id] for config in configs]


def _ask(configs: list[RunConfig]) -> list[Forecast]:
    """All at once; where that fails one by one, so that one run costs the others nothing."""
    try:
        return [_checked(prediction) for prediction in predict_all(configs)] if configs else []
    except Exception as error:
        if len(configs) > 1:
            return [forecast for config in configs for forecast in _ask([config])]
        if isinstance(error, UsageError):
            return [Untold(str(error), refused=True)]
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":").rstrip(".")
        return [Untold(f"the predictor failed: {words} ({last.name}, line {last.lineno}).", refused=False)]


def _checked(prediction: Prediction) -> Forecast:
    """The prediction, unless there is a number in it that is none."""
    memory, time = prediction.memory, prediction.time
    values = [*vars(memory).values(), *(vars(time).values() if time else ())]
    ranges = [number for value in values if isinstance(value, Range) for number in vars(value).values()]
    if all(math.isfinite(number) for number in (*ranges, *(value for value in values if isinstance(value, float)))):
        return prediction
    return Untold("the predictor failed: it came to no number.", refused=False)
