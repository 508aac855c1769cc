"""The search for unstated settings finds those that a point was made from, and its committed results come out again."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from bench.claims.settings_search import (
    TOLERANCE,
    FigurePoint,
    SettingsSearch,
    predict_errors,
    read_search_result,
    search_settings,
)
from bench.claims.unstated_figure import describe_search_figure, draw_search_figure
from bench.claims.unstated_page import find_last_stage, render_counts, render_grid, render_nearest
from bench.claims.unstated_settings import SEARCHES, get_result_path
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.config.speed_columns import compute_speed_columns
from bench.prediction.predictor import predict_runs

SAME = 0.002
"""Difference of errors up to which they are the same: they are written in thousandths."""

FIXED = {"hardware": "a100_80gb", "gpus": "8", "strategy": "fsdp1"}
STATED = {"sequence_length": "64"}
TRUE_SETTINGS = {"batch_size_per_gpu": "8", "activation_checkpointing": "none"}


def build_small_search() -> SettingsSearch:
    """Two points of T5 `tiny` and `mini` that are predictions of one of four settings."""
    points = []
    for model in ("t5_tiny", "t5_mini"):
        stated = {"model": model, **STATED}
        config = build_run_config(compose_config({"mode": "predict", **FIXED, **stated, **TRUE_SETTINGS}))
        (prediction,) = predict_runs([config])
        assert prediction.time is not None
        tflops = compute_speed_columns(config, prediction.time.step_s.value)["hardware_tflops_per_gpu"]
        points.append(FigurePoint(model, tflops, "tflops", tuple(stated.items())))
    return SettingsSearch(
        "small",
        FIXED,
        {
            "batch": tuple((("batch_size_per_gpu", value),) for value in ("2", "8")),
            "checkpointing": tuple((("activation_checkpointing", value),) for value in ("none", "full")),
        },
        (("tiny", tuple(points[:1])), ("mini", tuple(points[1:]))),
    )


@pytest.mark.slow
def test_it_finds_the_setting_that_points_were_made_from() -> None:
    search = build_small_search()
    result = search_settings(search)
    assert (result.num_settings, result.stages[0].num_predicted) == (4, 4)
    last = result.stages[-1]
    assert last.nearest[0].settings == TRUE_SETTINGS
    assert last.nearest[0].worst_error == pytest.approx(0, abs=1e-9)
    assert last.num_reproducing == sum(tried.worst_error <= TOLERANCE for tried in last.nearest) >= 1


@pytest.mark.slow
def test_a_point_that_no_setting_reaches_leaves_none() -> None:
    search = build_small_search()
    (name, (point,)), second = search.stages
    impossible = dataclasses.replace(point, value=1000 * point.value)
    result = search_settings(dataclasses.replace(search, stages=((name, (impossible,)), second)))
    assert [stage.num_reproducing for stage in result.stages] == [0, 0]
    assert result.stages[-1].num_predicted == 0


def test_a_setting_that_cannot_run_reproduces_nothing() -> None:
    point = FigurePoint("none", 1.0, "tflops", (("model", "t5_tiny"),))
    search = SettingsSearch("impossible", FIXED, {}, (("none", (point,)),))
    assert predict_errors(search, point, [{"precision": "fp32", "batch_size_per_gpu": "0"}]) == [math.inf]


@pytest.mark.parametrize("name", SEARCHES)
def test_committed_results_are_of_the_grids_that_are_searched(name: str) -> None:
    search, result = SEARCHES[name](), read_search_result(get_result_path(name))
    assert (
        (result.name, result.num_settings) == (search.name, search.num_settings) == (name, len(search.list_settings()))
    )
    assert [stage.points for stage in result.stages] == [points for points, _ in search.stages]
    assert result.stages[0].num_predicted == search.num_settings
    for stage, later in zip(result.stages, result.stages[1:], strict=False):
        assert later.num_reproducing <= stage.num_reproducing <= stage.num_predicted
        assert later.num_predicted <= stage.num_predicted
    for stage in result.stages:
        assert [tried.worst_error for tried in stage.nearest] == sorted(tried.worst_error for tried in stage.nearest)
        for tried in stage.nearest:
            assert tried.settings in search.list_settings()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SEARCHES)
def test_the_nearest_settings_come_out_as_they_are_committed(name: str) -> None:
    search, result = SEARCHES[name](), read_search_result(get_result_path(name))
    nearest = find_last_stage(result).nearest[0]
    points = {point.label: point for _, points in search.stages for point in points}
    for label, error in list(nearest.errors.items())[:4]:
        assert predict_errors(search, points[label], [nearest.settings]) == [pytest.approx(error, abs=SAME)]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_page_says_what_was_searched_and_what_is_left(name: str) -> None:
    search, result = SEARCHES[name](), read_search_result(get_result_path(name))
    assert f"{search.num_settings:,} settings in all" in render_grid(search)
    assert render_counts(result).count("\n") == 2 + len(search.stages)
    last = find_last_stage(result)
    assert render_nearest(search, last, 3).count("\n") == 2 + min(3, len(last.nearest))


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_its_figure_is_drawn(name: str, tmp_path: Path) -> None:
    search, result = SEARCHES[name](), read_search_result(get_result_path(name))
    draw_search_figure(search, result, tmp_path / "figure.svg")
    assert "predicted against published" in describe_search_figure(search, result) or search.num_settings
    assert (tmp_path / "figure.svg").stat().st_size > 5000
