"""The committed accuracy page is what the predictor comes to today, and what it says is good enough."""

from __future__ import annotations

import re

import pytest

from bench.config import run_config
from bench.planning.compose import composed
from bench.simulate.predict import predict_all
from bench.simulate.prediction import DOES_NOT_FIT
from bench.validation.command import ACCURACY, accuracy, compare
from bench.validation.runs import LEFT_OUT, SPEED, TUNED_AT, Case, cases
from bench.validation.shapes import Shape
from bench.validation.statistics import Result, grouped, summary
from bench.validation.strategies import strategy_shapes


@pytest.fixture(scope="module")
def published() -> list[Case]:
    return cases()


@pytest.fixture(scope="module")
def results(published: list[Case]) -> list[Result]:
    return compare(published)


def speeds(results: list[Result], *, tuned: bool) -> list[Result]:
    return [each for each in results if each.case.quantity == SPEED and each.case.counted and each.case.tuned == tuned]


def test_mpt_rows_are_runs_of_exactly_the_published_number_of_parameters(published: list[Case]) -> None:
    sizes = {case.label.split(",")[0]: case.config.model.num_parameters for case in published if "MPT" in case.label}
    assert sizes["MPT-125m"] == 125_311_488
    assert sizes["MPT-1b"] == 1_315_950_592
    assert sizes["MPT-70b"] == 64_862_437_376


def test_rows_at_other_gpu_counts_are_left_out_of_tuning(published: list[Case]) -> None:
    counted = [case for case in published if case.quantity == SPEED and case.counted]
    assert {case.config.gpus for case in counted if case.tuned} == set(TUNED_AT)
    assert not {case.config.gpus for case in counted if not case.tuned} & set(TUNED_AT)
    assert len([case for case in counted if not case.tuned]) > 30


def test_what_is_not_compared_has_a_reason() -> None:
    assert all(reason for reason in LEFT_OUT.values())


def test_speed_is_within_the_goal_on_rows_nothing_was_tuned_on(results: list[Result]) -> None:
    found = summary(speeds(results, tuned=False))
    assert found.mean <= 0.05
    assert abs(found.worst) <= 0.15


def test_every_run_that_was_published_is_predicted_to_run(results: list[Result]) -> None:
    missed = [each.case.label for each in results if each.case.counted and not each.runs]
    assert not missed


def test_memory_that_is_allocated_is_within_the_goal(results: list[Result]) -> None:
    groups = grouped([each for each in results if each.case.counted], lambda each: each.case.quantity)
    found = summary(groups["allocated"])
    assert found.mean <= 0.05
    assert abs(found.worst) <= 0.15


def test_ddp_fits_up_to_the_model_of_the_paper() -> None:
    settings = {"mode": "predict", "strategy": "ddp", "hardware": "a100_80gb", "gpus": "64", "gpus_per_node": "8"}
    settings |= {"sequence_length": "512", "activation_checkpointing": "full"}
    runs = [run_config(composed({**settings, "model": model})) for model in ("t5_2b", "t5_11b")]
    small, large = predict_all(runs)
    assert small.memory.verdict != DOES_NOT_FIT
    assert large.memory.verdict == DOES_NOT_FIT


@pytest.fixture(scope="module")
def of_strategies() -> list[Shape]:
    return strategy_shapes(predict_all)


def test_zero_3_of_2021_is_as_fast_as_one_adapter_lets_it(of_strategies: list[Shape]) -> None:
    (shape,) = [each for each in of_strategies if "Megatron's Table 2" in each.what]
    published = [float(number) for number in shape.published.split(", ")]
    assert published == [144, 88, 44]
    alone, one = (re.findall(r"\d+(?=[,;]|$)", part) for part in shape.predicted.split("; "))
    assert [float(number) / value for number, value in zip(one, published, strict=True)] == pytest.approx(
        [1] * 3, rel=0.25
    )
    assert float(alone[2]) > 3 * published[2]  # with all of them it would have scaled


def test_tensor_parallelism_of_a_machine_is_as_fast_as_megatrons(of_strategies: list[Shape]) -> None:
    """At degrees of 4 and 8; of whole layers and of two ranks that share them the prediction is faster."""
    (shape,) = [each for each in of_strategies if "Megatron's Table 1" in each.what]
    published, predicted = (
        [float(number) for number in said.split(", ")] for said in (shape.published, shape.predicted)
    )
    assert published == [137, 138, 142, 135]
    assert predicted[2:] == pytest.approx(published[2:], rel=0.06)
    assert predicted == sorted(predicted, reverse=True)


def test_what_the_zero_paper_fits_is_predicted_to_fit(of_strategies: list[Shape]) -> None:
    (shape,) = [each for each in of_strategies if "what fits" in each.what]
    assert shape.predicted.startswith("fits, does not fit; ")
    assert not shape.predicted.endswith(DOES_NOT_FIT)


def test_the_committed_page_is_what_comes_out_today(results: list[Result]) -> None:
    assert accuracy(results) == ACCURACY.read_text(encoding="utf-8"), "run python -m bench.predict validate"
