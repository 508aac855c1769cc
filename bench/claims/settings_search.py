"""Which settings reproduce the points of a figure whose settings are not stated: an exhaustive search of a grid.

Every setting of the grid is predicted for the first points; those far off are dropped, the others are predicted for the
next points, and so on. A setting solves the figure if all its points are predicted within `TOLERANCE`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.config.speed_columns import compute_speed_columns
from bench.core.errors import UsageError
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.prediction import DOES_NOT_FIT, Prediction

TOLERANCE = 0.10
"""Relative error up to which a point is reproduced."""

DROPPING_ERROR = 0.25
"""A setting that is further off at one point is not predicted for more: it could neither be a solution nor, where there
is a nearer one, the nearest."""

NUM_NEAREST = 5
"""Settings that a result names for each group of points where none or few reproduce them, the nearest first."""

MAX_NAMED = 60
"""Settings that a result names for each group of points at most."""

COUNTED_FLOPS = "flops"
"""The one key of an alternative that changes no run: which FLOPs a source counts, hardware or model."""

AxisAlternative = tuple[tuple[str, str], ...]
"""Settings that one alternative of an axis sets together."""


@dataclass(frozen=True)
class FigurePoint:
    """One number of a figure."""

    label: str
    value: float
    """As printed: TFLOP/s per GPU, or GB."""
    quantity: str
    """``tflops``, or a peak of memory: ``allocated``, ``active`` or ``reserved``."""
    settings: AxisAlternative
    """What is stated of this point alone: the model, the strategy, the number of GPUs."""


@dataclass(frozen=True)
class SettingsSearch:
    """The question: a figure's points, what is stated of all of them, and what is left open."""

    name: str
    fixed: Mapping[str, str]
    axes: Mapping[str, tuple[AxisAlternative, ...]]
    """What is left open, by name: its alternatives."""
    stages: tuple[tuple[str, tuple[FigurePoint, ...]], ...]
    """Points in the order in which they are predicted, each group with a name."""

    @property
    def num_settings(self) -> int:
        """Size of the grid."""
        return math.prod(len(alternatives) for alternatives in self.axes.values())

    def list_settings(self) -> list[dict[str, str]]:
        """Every setting of the grid."""
        return [
            dict(itertools.chain.from_iterable(alternatives)) for alternatives in itertools.product(*self.axes.values())
        ]


@dataclass
class TriedSetting:
    """One setting of the grid, and how far its predictions are off the points that it was tried on."""

    settings: dict[str, str]
    errors: dict[str, float] = field(default_factory=dict)
    """By the label of a point, predicted against published as a share; infinite where it cannot run or does not fit."""

    @property
    def worst_error(self) -> float:
        """The largest error, whatever its sign."""
        return max(map(abs, self.errors.values()), default=0.0)


@dataclass(frozen=True)
class StageResult:
    """What a search came to once it had tried a group of points, and all groups before."""

    points: str
    """What the group is called."""
    num_predicted: int
    """Settings that were predicted for it."""
    num_reproducing: int
    """Settings of the grid that reproduce all points so far."""
    nearest: tuple[TriedSetting, ...]
    """The nearest of those that were tried on all points so far, by their worst error: at least those that reproduce
    them, up to `MAX_NAMED`."""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    name: str
    num_settings: int
    stages: tuple[StageResult, ...]

    def write(self, path: Path) -> None:
        """As JSON, errors rounded to a thousandth."""
        plain = dataclasses.asdict(self)
        for tried in (tried for stage in plain["stages"] for tried in stage["nearest"]):
            tried["errors"] = {label: round(error, 3) for label, error in tried["errors"].items()}
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def read_search_result(path: Path) -> SearchResult:
    """What `SearchResult.write` wrote."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    stages = [
        StageResult(**{**stage, "nearest": tuple(TriedSetting(**tried) for tried in stage["nearest"])})
        for stage in plain["stages"]
    ]
    return SearchResult(plain["name"], plain["num_settings"], tuple(stages))


def search_settings(search: SettingsSearch, on_progress: Callable[[str], None] = lambda message: None) -> SearchResult:
    """Try the whole grid."""
    remaining = [TriedSetting(settings) for settings in search.list_settings()]
    stages = []
    for name, points in search.stages:
        on_progress(f"{search.name}: {len(remaining)} settings for {name}")
        num_predicted = len(remaining)
        for point in points:
            errors = predict_errors(search, point, [tried.settings for tried in remaining])
            for tried, error in zip(remaining, errors, strict=True):
                tried.errors[point.label] = error
            remaining = [tried for tried in remaining if tried.worst_error <= DROPPING_ERROR]
        remaining.sort(key=lambda tried: tried.worst_error)
        num_reproducing = sum(tried.worst_error <= TOLERANCE for tried in remaining)
        named = remaining[: min(MAX_NAMED, max(NUM_NEAREST, num_reproducing))]
        stages.append(StageResult(name, num_predicted, num_reproducing, tuple(copy.deepcopy(tried) for tried in named)))
    return SearchResult(search.name, search.num_settings, tuple(stages))


def predict_errors(
    search: SettingsSearch, point: FigurePoint, settings_list: Sequence[Mapping[str, str]]
) -> list[float]:
    """Predicted against published of one point, for some settings."""
    configs = [_build_config({**search.fixed, **settings, **dict(point.settings)}) for settings in settings_list]
    predictions = iter(predict_configs([config for config in configs if config is not None], replay_allocator=False))
    return [
        math.inf
        if config is None
        else _compute_error(point, config, next(predictions), settings.get(COUNTED_FLOPS, "hardware"))
        for config, settings in zip(configs, settings_list, strict=True)
    ]


def _build_config(settings: dict[str, str]) -> RunConfig | None:
    """The run, None where it cannot be. DDP cannot cast parameters, and runs under autocast."""
    settings = {key: value for key, value in settings.items() if key != COUNTED_FLOPS}
    if settings["strategy"] == "ddp":
        settings = {key: value for key, value in settings.items() if not key.startswith("strategy.")}
        if settings.get("precision.mixing") == "parameters":
            settings["precision.mixing"] = "autocast"
    try:
        return build_run_config(compose_config({"mode": "predict", **settings}))
    except UsageError:
        return None


def _compute_error(
    point: FigurePoint, config: RunConfig, prediction: Prediction | Unpredictable, counted_flops: str
) -> float:
    if isinstance(prediction, Unpredictable) or prediction.memory.verdict == DOES_NOT_FIT:
        return math.inf
    if point.quantity != "tflops":
        return float(getattr(prediction.memory, point.quantity).value) / 1e9 / point.value - 1
    assert prediction.time is not None
    columns: dict[str, Any] = compute_speed_columns(config, prediction.time.step_s.value)
    name = "hardware_tflops_per_gpu" if counted_flops == "hardware" else "tflops_per_gpu"
    return float(columns[name]) / point.value - 1


def count_values(settings_list: Iterable[Mapping[str, str]], axis: Sequence[AxisAlternative]) -> list[int]:
    """How many settings have each alternative of an axis."""
    settings_list = list(settings_list)
    return [
        sum(all(settings.get(key) == value for key, value in alternative) for settings in settings_list)
        for alternative in axis
    ]
