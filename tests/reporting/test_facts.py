"""The tables that explain the paper's figures: every number in them follows from rows."""

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
from bench.reporting.notebook.notebook import Notebook
from bench.reporting.paper import paper_statements, paper_tables
from bench.reporting.tables.table import prepare_table
from tests.conftest import compose_run_config, run_command
from tests.records_fixture import make_record, write_store
from tests.reporting.test_paper_figures import predicted


@pytest.fixture(scope="module")
def shipped() -> Notebook:
    return Notebook()


@pytest.mark.slow
def test_the_papers_text_beside_its_own_figures():
    rows = predicted("model_scale") + predicted("prefetch") + predicted("rate_limiter")
    paper_rows = paper_statements.compare_text_and_figures(
        prepare_table(rows), ["Figure 6(a)", "Figure 6(b)", "Figure 6(c)"]
    ).to_dict("records")
    rows_by_subject = {row["What"].partition(" (")[0]: row for row in paper_rows}
    fits = rows_by_subject["Models that fit with DDP"]
    assert fits["Text of the paper"] == "runs out of memory when it wraps a model larger than 2.28B (section 5.2)"
    assert fits["Its figure"] == "runs: T5 611M, T5 2.28B; out of memory: T5 11.3B"
    assert fits["Predicted here"] == fits["Its figure"]
    prefetch = rows_by_subject["What backward prefetch gains"]
    assert prefetch["Text of the paper"] == "about 18 % faster (section 5.2)"
    assert prefetch["Its figure"] == "+21.8 % (128 GPUs), +22.3 % (256 GPUs), +23.3 % (512 GPUs)"
    limiter = rows_by_subject["What the rate limiter gains"]
    assert limiter["Text of the paper"] == "up to 5 times faster (section 5.3)"
    assert limiter["Its figure"] == "2.23 times (2 machines), 3.05 times (4 machines)"
    assert limiter["Predicted here"].count("checkpointing none") == 2


def test_the_papers_text_on_scaling_beside_its_figures():
    rows = predicted("t5_11b_scale") + predicted("gpt_175b_scale")
    paper_table = paper_statements.compare_text_and_figures(prepare_table(rows), ["Figure 7(b)", "Figure 7(c)"])
    rows_by_subject = {row["What"]: row for row in paper_table.to_dict("records")}
    decline = rows_by_subject["T5-11B: speed per GPU lost from 8 to 512 GPUs"]
    assert decline["Text of the paper"] == "7 % (section 5.4)"
    assert decline["Its figure"] == "5.9 % (batch 8), 3.4 % (batch 16)"
    assert decline["Predicted here"] == "0.0 % (batch 8), 0.0 % (batch 16)"
    assert rows_by_subject["GPT-175B, batch 1: TFLOPS per GPU"]["Text of the paper"] == "more than 173 (section 5.4)"
    assert rows_by_subject["GPT-175B, batch 2: TFLOPS per GPU"]["Its figure"].startswith(
        "90.20 on 128 GPUs, at most 186.5"
    )


def test_without_rows_there_is_nothing_to_say():
    assert paper_statements.compare_text_and_figures(prepare_table([make_record()]), ["Figure 7(c)"]).empty
    assert paper_tables.build_flops_table(prepare_table([make_record()])).empty


def test_tflops_with_and_without_what_is_computed_again():
    table = prepare_table(predicted("t5_11b_scale"))
    (row,) = paper_tables.build_flops_table(table).to_dict("records")
    assert row["Peak, TFLOPS"] == "312"
    recomputation_ratio = float((table["hardware_tflops_per_gpu"] / table["tflops_per_gpu"]).iloc[0])
    assert 1.2 < recomputation_ratio < 4 / 3
    fastest = float(row["Fastest point, TFLOPS"])
    assert float(row["HFU"].split()[0]) == pytest.approx(100 * fastest / 312, abs=0.06)
    assert float(row["MFU"].split()[0]) == pytest.approx(100 * fastest / 312 / recomputation_ratio, abs=0.06)


def test_parts_of_the_peak_add_up(shipped):
    records = shipped.select_records(model="t5_11b", evidence="predicted", strategy="ddp", precision="bf16")
    table = paper_tables.build_memory_parts_table(records)
    assert len(table) == len(records) > 0
    for row in table.to_dict("records"):
        names = ("Parameters", "Gradients", "Optimizer", "Activations", "Gathered", "Other")
        total = sum(float(row[name].replace(",", "")) for name in names)
        assert total == pytest.approx(float(row["Allocated"].replace(",", "")), rel=0.02)
        assert row[""] == "does not fit"
    assert paper_tables.build_memory_parts_table([make_record()]).empty


def test_traffic_at_both_ends_is_the_papers():
    table = paper_tables.build_traffic_table(10**9, 2, 64, 8).set_index("F")
    assert list(table.index) == [1, 2, 4, 8, 16, 32, 64]
    whole = 2.0
    assert float(table.loc[1, "Sent in all"]) == pytest.approx(2 * whole * 63 / 64, rel=0.01)
    assert float(table.loc[64, "Sent in all"]) == pytest.approx(3 * whole * 63 / 64, rel=0.01)
    assert float(table.loc[8, "Between groups"]) == pytest.approx(2 * whole / 8 * 7 / 8, rel=0.01)
    column = table["Of it in rings that leave the machine"].astype(float)
    assert column.idxmin() == 8
    assert column.loc[16] > column.loc[1]
    assert (paper_tables.build_traffic_table(10**9, 2, 8, 8)["Of it in rings that leave the machine"] == "0").all()


def test_steps_show_the_knob_that_is_varied():
    table = paper_tables.build_step_table(prepare_table(predicted("prefetch")), "backward_prefetch")
    assert list(table["Backward prefetch"]) == ["none", "pre"] * 3
    assert list(table["GPUs"]) == ["128", "128", "256", "256", "512", "512"]
    assert set(table["Evidence"]) == {"predicted"}


def test_parts_of_the_step_add_up(shipped):
    table = paper_tables.build_time_parts_table(
        shipped.select_records(model="t5_2b", evidence="predicted", strategy="fsdp", precision="bf16")
    )
    assert {"1", "8", "64"} <= set(table["F"])
    for row in table.to_dict("records"):
        names = ("Compute", "Optimizer", "Communication not hidden", "Waiting for the host")
        milliseconds = {name: float(row[name].replace(",", "")) for name in (*names, "Step", "Communication")}
        assert sum(milliseconds[name] for name in names) == pytest.approx(milliseconds["Step"], rel=0.01)
        assert milliseconds["Communication"] >= milliseconds["Communication not hidden"]
    assert paper_tables.build_time_parts_table([make_record()]).empty


def test_what_was_printed_is_shown_with_how_it_was_obtained():
    table = paper_tables.build_published_table("Figure 7(c)")
    digitised = table[table["How"] == "digitised"]
    assert len(digitised) == 14
    assert set(digitised["±"]) == {"0.1"}
    assert "text" in set(table["How"])


def test_what_is_sharded_falls_by_sixteen_bytes_per_parameter_or_nobody_knows_why(shipped):
    table = paper_tables.build_memory_scaling_table(
        shipped.build_table(hardware="a100_80gb", model=("gpt_175b", "t5_11b"))
    )
    bytes_ = {
        (row["Model"], row["Line"], row["Evidence"]): float(row["Bytes per parameter, sharded"])
        for row in table.to_dict("records")
    }
    assert bytes_["gpt_175b", "batch 1", "published"] == pytest.approx(16, abs=1)
    assert bytes_["t5_11b", "batch 8", "predicted"] == pytest.approx(16, abs=1)
    assert bytes_["t5_11b", "batch 8", "published"] < 6


# --- Exposed communication: measured step less rehearsed step, where both are of one configuration and one device.


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
    assert (
        build_section(MEASURED).notice == "No run in this store was both measured and rehearsed on the same hardware."
    )
    assert not build_section(MEASURED).drawings


@pytest.mark.slow
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


@pytest.mark.long
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
