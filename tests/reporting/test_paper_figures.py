"""The FSDP paper's figures in the report: published points beside the runs that are theirs, and beside no others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from bench.config.run_config import RunConfig
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import DOES_NOT_FIT, FITS, MemoryPrediction, PredictedRange, Prediction, TimePrediction
from bench.rank.row import build_configured_columns
from bench.records import Record
from bench.records.published import load_published
from bench.records.store import validate_record
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import ReportSection
from bench.reporting.figures import paper
from bench.reporting.paper.deviations import compute_deviations
from bench.reporting.tables.table import prepare_table
from tests.config.test_sweeps import runs
from tests.reporting.test_report import overlaps, words

FIGURES = {
    "model_scale": {"Figure 6(a)"},
    "prefetch": {"Figure 6(b)", "Figure 7(b)", "Figure 8(b)"},
    "rate_limiter": {"Figure 6(c)"},
    "dhen_scale": {"Figure 7(a)", "Figure 8(a)"},
    "gpt_175b_scale": {"Figure 7(b)", "Figure 8(b)"},
    "t5_11b_scale": {"Figure 7(c)", "Figure 8(c)"},
    "memory": {"Figure 7(b)", "Figure 7(c)", "Figure 8(b)", "Figure 8(c)"},
}
PAPER = load_published().query("source_key == 'fsdp_paper'")


def foretold(config: RunConfig) -> Prediction:
    """As if everything ran at half its peak and needed 40 GB; DDP and full replication of 11.3B do not fit."""
    peak = config.hardware.peak_tflops[config.precision.peak] * 1e12
    count = config.model.count_flops_per_sequence(config.sequence_length).compute_hardware_flops(
        config.activation_checkpointing
    )
    step_s = count * config.batch_size_per_gpu / (0.5 * peak)
    fits = config.strategy.resolved_sharding_factor > 1 or config.model.num_parameters < 10**10
    needed = 40e9 if fits else 200e9
    memory = MemoryPrediction(
        PredictedRange(needed, 0.95 * needed, 1.05 * needed), PredictedRange(1.1 * needed, needed, 1.2 * needed),
        PredictedRange(1.2 * needed, 1.1 * needed, 1.3 * needed), PredictedRange(1.3 * needed, needed, 1.4 * needed),
        PredictedRange(1.2 * needed, 1.1 * needed, 1.3 * needed),
        {"parameters": int(needed / 2)}, "backward", "block", 80 * 10**9, FITS if fits else DOES_NOT_FIT,
    )  # fmt: skip
    degraded = config.batch_size_per_gpu == 2 and config.gpus == 128
    steps = PredictedRange(step_s, 0.9 * step_s, 1.1 * step_s)
    return Prediction(memory, TimePrediction(steps, step_s, 0, 0, 0, 0, "compute", degraded))


def row_of(config: RunConfig, **columns: Any) -> Record:
    about = {"sweep": "test", "attempt": 0, "started_at": "2026-01-01T00:00:00+00:00", "launcher": "predict"}
    row = {**build_configured_columns(config), **about, **build_predicted_row(config, foretold(config)), **columns}
    validate_record(row)
    return row


@functools.cache
def predicted(sweep: str, *overrides: str) -> list[Record]:
    return [row_of(config) for config in runs(f"sweep={sweep}", "mode=predict", *overrides)]


def draw(rows: list[Record]) -> ReportSection:
    table = prepare_table(rows)
    with style.apply_report_style():
        return paper.build_section(table, style.build_palette(table["variant_key"]))


def shown(rows: list[Record], figure: str) -> Any:
    selected = paper.select(prepare_table(rows))
    return selected[selected["figure"] == figure]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("sweep", FIGURES)
def test_every_sweep_of_the_paper_draws_its_figure_beside_the_published_points(sweep):
    rows = predicted(sweep)
    section = draw(rows)
    assert {drawing.title.partition(":")[0] for drawing in section.drawings} == FIGURES[sweep]
    for drawing in section.drawings:
        assert overlaps(drawing.figure) == [], drawing.name
        assert drawing.figure.get_figheight() < 11
        everything = " ".join(words(drawing.figure))
        assert "FSDP paper (arXiv:2304.11277)" in everything
        for kind in ("published", "predicted"):
            assert kind in everything
            assert kind in drawing.alt
        assert "nan" not in drawing.alt
        assert ("recomputation counted" in everything) == (drawing.title[7:11] in ("6(a)", "6(b)", "7(b)", "7(c)"))


def test_the_same_quantity_is_drawn_for_both_kinds():
    points = shown(predicted("t5_11b_scale"), "Figure 7(c)").query("quantity == 'TFLOP/s'")
    published = points.query("evidence == 'published'").sort_values(["series", "world_size"])
    printed = PAPER.query("source_figure == 'Figure 7(c)'").sort_values(["batch_size_per_gpu", "world_size"])
    assert sorted(published["value"]) == pytest.approx(sorted(printed["hardware_tflops_per_gpu"]))
    assert list(published["high"] - published["value"]) == pytest.approx([0.1] * 14)
    mine = points.query("evidence == 'predicted'")
    assert len(mine) == 14
    assert list(mine["value"]) == pytest.approx([156.0] * 14)  # half of 312, recomputation counted
    assert list(mine["low"]) == pytest.approx([156 / 1.1] * 14)
    errors = compute_deviations(points)
    expected = sorted(156 / np.array(printed["hardware_tflops_per_gpu"], dtype=float) - 1)
    assert sorted(errors) == pytest.approx(expected)


def test_points_of_dhen_are_samples_per_second_and_memory_of_a_kind_that_is_not_named():
    table = prepare_table(predicted("dhen_scale"))
    points = paper.select(table)
    for figure, metric, margin in (("Figure 7(a)", "p90_qps", 30), ("Figure 8(a)", "peak_memory", 1)):
        published = points[(points["figure"] == figure) & (points["evidence"] == "published")]
        printed = PAPER[PAPER["source_figure"] == figure]
        assert set(printed["source_metric"]) == {metric}
        assert sorted(published["value"]) == sorted(map(float, printed["source_value"]))
        assert set((published["high"] - published["value"]).round(6)) == {margin}
        assert set(published["series"]) == {
            f"{kind}, {name}" for kind in ("full shard", "hybrid") for name in ("RAF", "NRAF")
        }
    mine = points.query("figure == 'Figure 7(a)' and evidence == 'predicted'")
    assert len(mine) == 20
    assert sorted(mine["value"]) == pytest.approx(sorted(1024 / table["step_time_median_s"]))
    assert list(mine["high"]) == pytest.approx(list(mine["value"] / 0.9))


@pytest.mark.slow
def test_memory_is_in_the_papers_gigabytes_with_its_rounding():
    points = shown(predicted("memory"), "Figure 8(b)")
    assert set(points["quantity"]) == {"allocated", "active", "reserved"}
    mine = points.query("evidence == 'predicted' and quantity == 'allocated'")
    assert list(mine["value"]) == pytest.approx([40.0] * 10)
    assert list(mine["high"]) == pytest.approx([42.0] * 10)
    published = points.query("evidence == 'published'")
    assert set(published["high"] - published["value"]) == {0.5}
    assert published["value"].max() == 80


@pytest.mark.long
@pytest.mark.slow
def test_out_of_memory_is_a_mark_in_both_kinds():
    points = shown(predicted("model_scale"), "Figure 6(a)").query("out_of_memory")
    assert set(points["panel"]) == {"T5 11.3B"}
    assert sorted(zip(points["series"], points["evidence"], strict=True)) == [
        ("DDP", "predicted"),
        ("DDP", "published"),
        ("FSDP, full replication", "predicted"),
        ("FSDP, full replication", "predicted"),
    ]
    (drawing,) = draw(predicted("model_scale")).drawings
    crosses = [line for axes in drawing.figure.axes for line in axes.lines if line.get_marker() == "X"]
    assert len(crosses) == 2 + 3 + 1, "of the store two and one, of the paper one in each of three panels"
    assert "OOM" in words(drawing.figure)
    assert "out of memory" in drawing.alt


@pytest.mark.slow
def test_bars_are_grouped_by_model_with_their_errors_in_percent():
    points = shown(predicted("model_scale"), "Figure 6(a)")
    (drawing,) = draw(predicted("model_scale")).drawings
    panels = drawing.figure.axes
    columns = list(dict.fromkeys(points.query("evidence == 'predicted'")["column"]))
    assert [axes.get_title(loc="left").partition(":")[0] for axes in panels] == columns
    published = points.query("evidence == 'published'").set_index(["panel", "series"])["value"]
    for axes, column in zip(panels, columns, strict=True):
        predictions = points[points["column"] == column].dropna(subset="value")
        bars = sorted(axes.patches, key=lambda bar: bar.get_x())
        assert len(bars) == len(predictions) + published.notna().sum()
        assert [label.get_text() for label in axes.get_xticklabels()] == ["T5 611M", "T5 2.28B", "T5 11.3B"]
        errors = (
            predictions["value"]
            / published[list(zip(predictions["panel"], predictions["series"], strict=True))].to_numpy()
            - 1
        )
        wanted = sorted(f"{100 * error:+.0f} %".replace("-", "−") for error in errors)
        assert sorted(text.get_text() for text in axes.texts) == wanted
        assert f"{abs(errors).mean():.0%} off on average".replace("%", " %") in axes.get_title(loc="left")
    colours = {to_hex(bar.get_edgecolor()) for axes in panels for bar in axes.patches}
    kinds = ("ddp", "fsdp1/no_shard", "fsdp1/hybrid_shard", "fsdp1/full_shard")
    assert colours == {style.find_strategy_colour(kind) for kind in kinds}, "each as everywhere"


@pytest.mark.slow
def test_lines_say_how_far_they_are_off_and_what_their_intervals_hold():
    figures = draw(predicted("memory")).drawings
    drawing = next(one for one in figures if "8(c)" in one.title)
    said = " ".join(words(drawing.figure))
    points = shown(predicted("memory"), "Figure 8(c)").dropna(subset="value")
    keys = ["quantity", "series", "world_size"]
    pairs = points.query("evidence == 'predicted'").merge(
        points.query("evidence == 'published'"), on=keys, suffixes=("", "_paper")
    )
    for quantity, group in pairs.groupby("quantity"):
        errors = group["value"] / group["value_paper"] - 1
        assert f"predicted {quantity}: {100 * abs(errors).mean():.1f} % off on average" in said
        stated = group[group["high"] > group["low"]]
        inside = (stated["low"] <= stated["high_paper"]) & (stated["low_paper"] <= stated["high"])
        if len(stated):
            assert f"intervals hold {inside.sum()} of {len(stated)} published points" in said


@pytest.mark.slow
def test_what_the_paper_does_not_state_is_called_an_inference():
    (drawing,) = draw(predicted("model_scale")).drawings
    assert "our inference: 64 GPUs, batch 8 × 512, checkpointing full" in " ".join(words(drawing.figure))
    assert "inference" in drawing.caption
    points = shown(predicted("model_scale"), "Figure 6(a)")
    assert set(points["column"]) == {"", "bf16 autocast", "bf16 parameters", "tf32"}
    smaller = draw(predicted("model_scale", "gpus=16")).drawings
    assert [drawing.name for drawing in smaller] == ["paper-figure-6-a-16-gpus-batch-8-512-checkpointing-full"]


@pytest.mark.slow
def test_degraded_points_are_marked():
    drawings = {drawing.title.partition(":")[0]: drawing for drawing in draw(predicted("gpt_175b_scale")).drawings}
    assert "degraded: the allocator retries" in words(drawings["Figure 7(b)"].figure)


def test_the_rate_limiter_is_compared_in_seconds_with_checkpointing_both_ways():
    points = shown(predicted("rate_limiter"), "Figure 6(c)")
    published = points.query("evidence == 'published'")
    assert dict(zip(zip(published["panel"], published["series"], strict=True), published["value"], strict=True)) == {
        ("2 machines", "rate limiter on"): 8.36,
        ("2 machines", "rate limiter off"): 18.61,
        ("4 machines", "rate limiter on"): 5.02,
        ("4 machines", "rate limiter off"): 15.33,
    }
    assert set(points["column"]) == {"", "checkpointing none", "checkpointing full"}


OTHERS: dict[str, Callable[[], list[Record]]] = {
    "another GPU": lambda: [{**row, "hardware": "h100_80gb"} for row in predicted("t5_11b_scale")],
    "another shape of the model": lambda: predicted("t5_11b_scale", "model.d_ff=32768"),
    "FSDP2": lambda: predicted("t5_11b_scale", "strategy=fsdp"),
    "another precision": lambda: predicted("t5_11b_scale", "precision=fp16"),
    "another sequence": lambda: predicted("t5_11b_scale", "sequence_length=256"),
    "no checkpointing": lambda: predicted("t5_11b_scale", "activation_checkpointing=none"),
    "no prefetch": lambda: predicted("t5_11b_scale", "strategy.backward_prefetch=none"),
    "ZeRO-2": lambda: predicted("t5_11b_scale", "strategy.reshard_after_forward=false"),
    "several blocks a unit": lambda: predicted("t5_11b_scale", "strategy.blocks_per_unit=2"),
    "a memory limit": lambda: predicted("t5_11b_scale", "hardware.memory_limit_gib=40"),
    "accumulation": lambda: predicted("t5_11b_scale", "gradient_accumulation=2"),
    "a failure": lambda: [{**row, "status": "error", "error": "x"} for row in predicted("t5_11b_scale")],
    "one size of a model": lambda: predicted("model_scale", "model=t5_2b"),
    "GPT-175B that is not minGPT": lambda: [{**row, "family": "gpt"} for row in predicted("gpt_175b_scale")],
    "two ways to spread a model": lambda: [
        row for row in predicted("model_scale") if row["effective_strategy"] in ("ddp", "fsdp1/full_shard")
    ],
    "one number of GPUs": lambda: predicted("t5_11b_scale", "gpus=64"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_runs_that_are_not_the_papers_do_not_stand_beside_its_points(other):
    section = draw(OTHERS[other]())
    assert section.drawings == []
    assert "No runs in this store are those of a figure" in section.notice


@pytest.mark.slow
def test_measured_runs_stand_beside_predicted_ones_and_look_different():
    configs = runs("sweep=t5_11b_scale")
    measured = [
        row_of(config, evidence="measured", repeat=repeat, run_id=f"{config.run_id[:15]}{repeat}", launcher="slurm")
        for config in configs
        for repeat in range(3)
    ]
    points = shown([*measured, *predicted("t5_11b_scale")], "Figure 7(c)")
    assert points.groupby("evidence").size().to_dict() == {"measured": 14, "predicted": 14, "published": 14}
    drawing = next(d for d in draw([*measured, *predicted("t5_11b_scale")]).drawings if "7(c)" in d.title)
    lines = [line for line in drawing.figure.axes[0].lines if len(line.get_xdata()) > 1]
    looks = {(str(line.get_linestyle()), line.get_marker(), line.get_markerfacecolor() == "white") for line in lines}
    assert looks == {("-.", "D", True), (":", "o", True), ("-", "o", False)}
    assert "Measured TFLOP/s" in drawing.caption
    assert "Predicted TFLOP/s" in drawing.caption
