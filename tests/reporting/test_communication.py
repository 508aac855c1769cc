"""Exposed communication: measured step less rehearsed step, where both are of one configuration and one device."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.text import Text

from bench.rank.row import build_configured_columns
from bench.records import read_latest_attempts
from bench.reporting import write_report
from bench.reporting.drawing import style
from bench.reporting.figures import communication
from bench.reporting.figures.communication import ValueWithInterval, compute_difference
from bench.reporting.tables.table import prepare_table
from tests.conftest import compose_run_config, run_command
from tests.records_fixture import write_store

CPU_NAME = "AMD EPYC 9554 64-Core Processor"


def make_row(*overrides, step=0.1, low=None, high=None, **columns):
    """A row of the run that `overrides` describe, with its median step and interval in seconds."""
    times = {"step_time_median_s": step, "step_time_ci_low_s": low or step, "step_time_ci_high_s": high or step}
    facts = {"started_at": "2026-05-04T10:00:00+00:00", "finished_at": "2026-05-04T10:00:20+00:00", "attempt": 0}
    ran = {"status": "ok", "degraded": False, "gpu_name": CPU_NAME, "sweep": "test"}
    return {**build_configured_columns(compose_run_config(*overrides)), **facts, **ran, **times, **columns}


MEASURED = make_row("gpus=2", step=0.100, low=0.096, high=0.107)
REHEARSED = make_row("gpus=2", "mode=rehearse", step=0.080, low=0.077, high=0.084)


def select_pairs(*rows):
    return communication.select(prepare_table(list(rows))).to_dict("records")


def build_section(*rows):
    table = prepare_table(list(rows))
    with style.apply_report_style():
        return communication.build_section(table, style.build_palette(table["variant_key"]))


def test_the_difference_of_two_medians_has_the_interval_of_both():
    result = compute_difference(ValueWithInterval(10, 6, 13), ValueWithInterval(4, 1, 8))
    assert (result.value, result.low, result.high) == pytest.approx((6, 6 - math.hypot(4, 4), 6 + math.hypot(3, 3)))
    exact = compute_difference(ValueWithInterval(10, 10, 10), ValueWithInterval(4, 4, 4))
    assert (exact.value, exact.low, exact.high) == (6, 6, 6)


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    from bench.rank.row import compute_median, compute_median_interval

    random = np.random.default_rng(0)
    num_covering = 0
    for _ in range(400):
        pair = [random.lognormal(0, 0.3, 20) + shift for shift in (3.0, 1.0)]
        interval = compute_difference(
            *(
                ValueWithInterval(compute_median(list(samples)), *compute_median_interval(list(samples)))
                for samples in pair
            )
        )
        num_covering += interval.low <= 2.0 <= interval.high
    assert num_covering / 400 > 0.93


def test_exposed_communication_is_what_a_measured_step_takes_longer():
    (pair,) = select_pairs(MEASURED, REHEARSED)
    assert pair["exposed_s"] == pytest.approx(0.020)
    assert pair["share"] == pytest.approx(0.20)
    assert pair["exposed_low_s"] == pytest.approx(0.020 - math.hypot(0.004, 0.004))
    assert pair["exposed_high_s"] == pytest.approx(0.020 + math.hypot(0.007, 0.003))
    assert math.isnan(pair["profiled"])
    assert math.isnan(pair["predicted"])


def test_the_profilers_and_the_predicted_share_stand_beside_it():
    profiled = make_row("gpus=2", "measurement.profile=true", step=0.102, exposed_communication=0.15)
    predicted = make_row("gpus=2", "mode=predict", step=0.09, exposed_communication=0.11, gpu_name=None)
    (pair,) = select_pairs(MEASURED, REHEARSED, profiled, predicted)
    assert (pair["profiled"], pair["predicted"]) == (0.15, 0.11)
    assert pair["measured_s"] == pytest.approx(0.101)  # the median of both measured runs


def test_repeats_widen_the_interval_to_all_of_theirs():
    again = make_row("gpus=2", "repeat=1", step=0.110, low=0.108, high=0.125)
    (pair,) = select_pairs(MEASURED, REHEARSED, again)
    assert pair["measured_s"] == pytest.approx(0.105)
    assert (pair["measured_low_s"], pair["measured_high_s"]) == (0.096, 0.125)


@pytest.mark.parametrize(
    "other",
    [
        make_row("gpus=2", "mode=rehearse", step=0.08, gpu_name="another processor"),
        make_row("gpus=4", "mode=rehearse", step=0.08),
        make_row("gpus=2", "mode=rehearse", "batch_size_per_gpu=8", step=0.08),
        make_row("gpus=2", "mode=rehearse", "hardware.memory_limit_gib=0.5", step=0.08),
        make_row("gpus=2", "mode=rehearse", "hardware.cpu_threads=2", step=0.08),
        make_row("gpus=2", "mode=rehearse", step=0.08, degraded=True),
        make_row("gpus=2", "repeat=1", step=0.08),
        {
            **make_row("gpus=2", "mode=rehearse", step=0.08),
            "status": "oom",
            "oom_phase": "init",
            "step_time_median_s": None,
        },
    ],
    ids=["device", "ranks", "batch", "limit", "threads", "degraded", "measured twice", "oom"],
)
def test_what_is_not_one_question_makes_no_pair(other):
    assert select_pairs(MEASURED, other) == []


def test_without_a_pair_the_page_says_so():
    assert build_section(MEASURED).notice == communication.EMPTY_MESSAGE
    assert not build_section(MEASURED).drawings


def test_a_rehearsal_slower_than_the_measurement_is_shown_as_it_is(tmp_path):
    slower = make_row("gpus=2", "mode=rehearse", step=0.105, low=0.104, high=0.107)
    drawn = build_section(MEASURED, slower)
    (drawing,) = drawn.drawings
    low, _ = drawing.figure.axes[0].get_xlim()
    assert low < -4.9
    assert "−5.00 ms of 100 ms" in [text.get_text() for text in drawing.figure.findobj(Text)]
    assert drawn.tables[0].rows[0][5] == "-5.00 (-9.47 to 2.07)"
    page = write_report(
        read_latest_attempts(write_store(tmp_path / "store", [MEASURED, slower])), "store", tmp_path / "report"
    )
    assert "-5.00 (-9.47 to 2.07)" in page.read_text()
    assert "That contention is in the difference" in page.read_text()


def test_where_a_side_has_no_interval_the_difference_has_none():
    bare = {**REHEARSED, "step_time_ci_low_s": None, "step_time_ci_high_s": None}
    (pair,) = select_pairs(MEASURED, bare)
    assert pair["exposed_s"] == pytest.approx(0.02)
    assert all(math.isnan(pair[name]) for name in ("rehearsed_low_s", "exposed_low_s", "share_high"))
    drawn = build_section(MEASURED, bare)
    assert len(drawn.drawings) == 1
    assert drawn.tables[0].rows[0][3:6] == ["100 (96.0 to 107)", "80.0", "20.0"]


@pytest.mark.slow
def test_measured_and_rehearsed_with_one_command_come_to_a_figure(tmp_path):
    store = tmp_path / "store"
    arguments = ["-m", "model=t5_tiny", "gpus=2", "mode=measure,rehearse", "measurement.profile=true", f"store={store}"]
    done = run_command("bench.sweep", *arguments, "sequence_length=32", "measurement.steps=3")
    assert done.returncode == 0, done.stderr
    rows = [
        {**row, "degraded": False} for row in read_latest_attempts(store).records
    ]  # other tests may run beside this one
    (pair,) = select_pairs(*rows)
    assert pair["measured_s"] > 0
    assert pair["rehearsed_s"] > 0
    assert 0 < pair["profiled"] < 1
    assert len(build_section(*rows).drawings) == 1
