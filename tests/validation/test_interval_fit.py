"""Intervals hold on sources and devices that took no part in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest

from bench.prediction.intervals import (
    ALLOCATED,
    COMPLETE,
    DEVICE_CLASSES,
    DEVICE_USED,
    INTERVAL_METRICS,
    RESERVED,
    ROUGH,
    UNKNOWN,
    IntervalFactors,
    add_intervals,
    classify_hardware,
    find_factors,
    find_rough_verdict,
    is_time_known,
    load_interval_file,
)
from bench.prediction.prediction import DOES_NOT_FIT, PredictedRange, Prediction, TimePrediction
from bench.prediction.predictor import predict_runs
from bench.records.published import PUBLISHED_CSV, read_published_lines
from bench.validation.interval_fit import TARGET_COVERAGE, Residual, fit_interval, forget_source, is_covered_on_average
from bench.validation.readings import read_line
from tests.conftest import compose_run_config


def draw_residuals(sources: int, devices: int, rows: int, seed: int) -> list[Residual]:
    """Rows whose source and device shift them all, as in truth."""
    drawn = random.Random(seed)
    device_shifts = [drawn.gauss(0, 0.03) for _ in range(devices)]
    residuals = []
    for source in range(sources):
        shift = drawn.gauss(0, 0.04)
        for device, device_shift in enumerate(device_shifts):
            residuals += [
                Residual(f"source {source}", f"device {device}", shift + device_shift + drawn.gauss(0, 0.03))
                for _ in range(rows)
            ]
    return residuals


def test_rows_of_new_sources_lie_within_the_interval_of_others() -> None:
    covered = total = 0
    for seed in range(20):
        residuals = draw_residuals(sources=12, devices=3, rows=10, seed=seed)
        fitted = fit_interval(residuals[:180], is_device_left_out=True)
        assert fitted.coverage_by_source is not None
        assert fitted.coverage_by_source >= TARGET_COVERAGE
        new = [math.exp(residual.log_ratio) for residual in residuals[180:]]
        covered += sum(fitted.low <= ratio <= fitted.high for ratio in new)
        total += len(new)
    assert covered / total >= 0.93


def test_an_interval_is_no_wider_than_its_residuals_ask_for() -> None:
    residuals = draw_residuals(sources=8, devices=2, rows=20, seed=1)
    fitted = fit_interval(residuals, is_device_left_out=False)
    largest = max(abs(residual.log_ratio) for residual in residuals)
    assert fitted.margin <= largest
    assert math.log(fitted.high) <= largest + fitted.margin + 1e-9
    halved = [Residual(item.source, item.device, item.log_ratio / 2) for item in residuals]
    narrower = fit_interval(halved, is_device_left_out=False)
    assert narrower.high < fitted.high
    assert narrower.low > fitted.low


def test_sources_that_agree_exactly_leave_room_for_one_that_does_not() -> None:
    exact = [Residual("exact", "device", 0.0) for _ in range(10)]
    other = [Residual("other", "device", 0.04 + 0.001 * row) for row in range(10)]
    fitted = fit_interval([*exact, *other], is_device_left_out=False)
    assert fitted.coverage_by_source is not None
    assert fitted.coverage_by_source >= TARGET_COVERAGE
    assert math.log(fitted.high) < 0.12


def test_a_biased_source_widens_one_side() -> None:
    residuals = draw_residuals(sources=6, devices=2, rows=10, seed=3)
    biased = [*residuals, *(Residual("biased", "device 0", 0.3) for _ in range(10))]
    before, after = (fit_interval(rows, is_device_left_out=False) for rows in (residuals, biased))
    assert math.log(after.high) >= 0.3 > math.log(before.high)


def test_one_row_of_many_does_not_decide_how_wide_an_interval_is() -> None:
    residuals = draw_residuals(sources=10, devices=2, rows=26, seed=4)
    outlier = [*residuals[1:], dataclasses.replace(residuals[0], log_ratio=1.0)]
    before, after = (fit_interval(rows, is_device_left_out=False) for rows in (residuals, outlier))
    assert math.log(after.high) < math.log(before.high) + 0.02


def test_an_interval_holds_for_each_source_but_one_in_ten_by_itself() -> None:
    """Of one source in six a tenth of the rows are far off: too few to matter among all rows, not in their source."""
    residuals = [
        Residual(f"source {source}", "device", 0.3 if source % 6 == 0 and row < 2 else 0.001 * row)
        for source in range(12)
        for row in range(20)
    ]
    fitted = fit_interval(residuals, is_device_left_out=False)
    assert math.log(fitted.high) >= 0.3


def test_on_average_a_table_counts_as_much_as_any_other_and_few_of_all_rows_are_outside() -> None:
    """Of 21 tables one is far off: with 7 of 107 rows an interval for a new table need not hold for it, with 200 of 300
    it has to."""
    near = [Residual(f"source {source}", "device", 0.002 * row) for source in range(20) for row in range(5)]

    def fit_half_width(residuals: list[Residual], **options: Any) -> float:
        return math.log(fit_interval(residuals, is_device_left_out=False, **options).high)

    few, many = ([*near, *(Residual("far off", "device", 0.45) for _ in range(rows))] for rows in (7, 200))
    assert fit_half_width(few) >= 0.45
    assert fit_half_width(few, is_covered=is_covered_on_average) < 0.1
    assert fit_half_width(many, is_covered=is_covered_on_average) >= 0.45
    nearer = [*many[:95], *(Residual(f"near {source}", "device", 0.3) for source in range(4) for _ in range(50))]
    assert fit_half_width(nearer, is_covered=is_covered_on_average) >= 0.3


def test_factors_widen_a_range_and_never_narrow_it() -> None:
    assert IntervalFactors(0.9, 1.2).widen(PredictedRange(10, 9.5, 10.5)) == PredictedRange(10, 9, 12)
    assert IntervalFactors(0.9, 1.2).widen(PredictedRange(10, 5, 20)) == PredictedRange(10, 5, 20)


@pytest.mark.parametrize("metric", INTERVAL_METRICS)
def test_devices_of_which_less_is_known_have_no_narrower_intervals(metric: str) -> None:
    for row_class, is_layout in itertools.product((COMPLETE, ROUGH, UNKNOWN), (False, True)):
        factors = [find_factors(metric, name, row_class=row_class, is_layout=is_layout) for name in DEVICE_CLASSES]
        lows, highs = [entry.low for entry in factors], [entry.high for entry in factors]
        assert lows == sorted(lows, reverse=True)
        assert highs == sorted(highs)
        assert lows[0] < 1 < highs[0]


@pytest.mark.parametrize("metric", INTERVAL_METRICS)
@pytest.mark.parametrize("is_layout", [False, True])
def test_rows_of_which_less_is_known_have_no_narrower_intervals(metric: str, is_layout: bool) -> None:
    for device_class in DEVICE_CLASSES:
        complete, rough, unknown = (
            find_factors(metric, device_class, row_class=row_class, is_layout=is_layout)
            for row_class in (COMPLETE, ROUGH, UNKNOWN)
        )
        assert unknown.low <= rough.low <= complete.low
        assert unknown.high >= rough.high >= complete.high


def test_what_nobody_looked_up_is_shown_by_rows_read_as_if_nobody_had() -> None:
    """The row is read anew by its words alone, and belongs to a group of its own among residuals."""
    line = next(line for line in read_published_lines(PUBLISHED_CSV) if line["source_key"] == "llm_foundry")
    known, forgotten = read_line(1, line), read_line(1, forget_source(line))
    assert (known.assumed_class, forgotten.assumed_class) == (ROUGH, UNKNOWN)
    assert known.is_complete
    assert not forgotten.is_complete
    assert known.source in forgotten.source
    assert dict(known.settings) != dict(forgotten.settings)


@pytest.mark.slow
def test_predictions_state_the_intervals_of_the_file() -> None:
    config = compose_run_config(
        *("mode=predict", "model=gpt_350m", "gpus=8", "strategy=ddp", "hardware=a100_80gb", "precision=bf16"),
        *("batch_size_per_gpu=8", "sequence_length=1024"),
    )
    (prediction,) = predict_runs([config])
    assert prediction.time is not None
    assert is_time_known(config, prediction.time)
    device_class = classify_hardware(config.hardware)
    factors = find_factors("step time", device_class)
    step_s = prediction.time.step_s
    assert step_s.low == pytest.approx(step_s.value * factors.low)
    assert step_s.high == pytest.approx(step_s.value * factors.high)
    used, factors = prediction.memory.device_used, find_factors(DEVICE_USED, device_class)
    assert used.low <= used.value * factors.low * (1 + 1e-9)
    assert add_intervals(config, prediction) == prediction
    assert find_rough_verdict(config, prediction.memory) != DOES_NOT_FIT


def test_memory_that_few_sources_tell_of_is_no_more_certain_than_other_memory() -> None:
    factors = load_interval_file()["factors"]
    for device_class in DEVICE_CLASSES:
        for name in (COMPLETE, ROUGH):
            entries = {metric: factors[metric][device_class][name] for metric in (ALLOCATED, RESERVED, DEVICE_USED)}
            first_class = {metric: factors[metric][DEVICE_CLASSES[0]][name]["basis"] for metric in entries}
            fitted = [entry for metric, entry in entries.items() if first_class[metric] == "fitted"]
            assert fitted, name
            for metric, entry in entries.items():
                if first_class[metric] != "fitted":
                    assert entry["low"] <= min(other["low"] for other in fitted)
                    assert entry["high"] >= max(other["high"] for other in fitted)


KNOWN_STEP = ("mode=predict", "model=llama_tiny", "gpus=1", "strategy=fsdp", "hardware=h100_80gb", "precision=bf16")


@pytest.mark.parametrize(
    ("overrides", "bubble_s", "is_known"),
    [
        ((), 0.0, True),
        ((), 0.09, True),
        ((), 0.11, False),  # the processor of the machine decides
        (("strategy.cpu_offload=true",), 0.0, False),
        (("precision=tf32",), 0.0, False),
        (("optimizer=muon",), 0.0, False),
        (("optimizer=sgd",), 0.0, True),
        (("model=dhen_tiny", "sequence_length=1", "strategy=ddp"), 0.0, False),
        (("strategy=pipeline", "gpus=2"), 0.4, True),  # a bubble of the pipeline's
    ],
)
def test_a_time_that_nobody_measured_has_the_interval_of_rough_rows(
    overrides: tuple[str, ...], bubble_s: float, is_known: bool
) -> None:
    config = compose_run_config(*KNOWN_STEP, *overrides)
    time = TimePrediction(PredictedRange(1.0, 1.0, 1.0), 1.0 - bubble_s, 0.0, 0.0, bubble_s, 0.0, "compute", False)
    assert is_time_known(config, time) == is_known
    prediction = Prediction(predict_runs([config])[0].memory, time)
    stated = add_intervals(config, prediction).time
    assert stated is not None
    layout = config.strategy.timetable is not None
    row_class = COMPLETE if is_known else ROUGH
    factors = find_factors("step time", classify_hardware(config.hardware), row_class=row_class, is_layout=layout)
    assert (stated.step_s.low, stated.step_s.high) == (factors.low, factors.high)
