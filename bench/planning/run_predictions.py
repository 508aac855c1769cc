"""What the predictor says of planned runs: all at once, each once, and one sentence where it cannot tell."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.prediction.prediction import PredictedRange, Prediction
from bench.prediction.predictor import predict_runs


@dataclass(frozen=True)
class Unpredictable:
    """There is no prediction of a run."""

    reason: str
    """One sentence."""
    is_impossible: bool
    """The question is impossible; else the predictor failed."""


RunPrediction = Prediction | Unpredictable

_predictions_by_run_id: dict[str, RunPrediction] = {}
"""By run_id."""


def predict_configs(configs: Sequence[RunConfig]) -> list[RunPrediction]:
    """Predict runs, whatever their mode."""
    new_configs = {config.run_id: config for config in configs if config.run_id not in _predictions_by_run_id}
    _predictions_by_run_id.update(zip(new_configs, _predict_new_runs(list(new_configs.values())), strict=True))
    return [_predictions_by_run_id[config.run_id] for config in configs]


def _predict_new_runs(configs: list[RunConfig]) -> list[RunPrediction]:
    """All at once; where that fails one by one, so that one run costs the others nothing."""
    try:
        return [_reject_non_finite(prediction) for prediction in predict_runs(configs)] if configs else []
    except Exception as error:
        if len(configs) > 1:
            return [prediction for config in configs for prediction in _predict_new_runs([config])]
        if isinstance(error, UsageError):
            return [Unpredictable(str(error), is_impossible=True)]
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        description = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":").rstrip(".")
        return [
            Unpredictable(
                f"the predictor failed: {description} ({last_frame.name}, line {last_frame.lineno}).",
                is_impossible=False,
            )
        ]


def _reject_non_finite(prediction: Prediction) -> RunPrediction:
    """The prediction, unless there is a number in it that is none."""
    memory, time = prediction.memory, prediction.time
    values = [*vars(memory).values(), *(vars(time).values() if time else ())]
    range_values = [number for value in values if isinstance(value, PredictedRange) for number in vars(value).values()]
    if all(
        math.isfinite(number) for number in (*range_values, *(value for value in values if isinstance(value, float)))
    ):
        return prediction
    return Unpredictable("the predictor failed: it came to no number.", is_impossible=False)
