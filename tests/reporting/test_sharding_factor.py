"""The figure of the sharding factor: every factor of equal configurations, and nothing else, on one axis."""

from __future__ import annotations

import pytest

from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import ReportSection
from bench.reporting.figures import sharding_factor
from bench.reporting.page.interactive_figures import build_trade_off_figure
from bench.reporting.tables.table import prepare_table
from tests.records_fixture import make_record
from tests.reporting.test_report import CUDA, overlaps, words

GIB = 2**30


def run(factor: int, **columns) -> dict:
    asked = {"strategy": "fsdp", "world_size": 16, "nodes": 2, **CUDA, "peak_reserved_bytes": 100 * GIB // factor}
    return make_record(sharding_factor=factor, **{**asked, **columns})


def predicted(factor: int, **columns) -> dict:
    row = run(factor, evidence="predicted", steps=1, **columns)
    step = row["step_time_median_s"]
    about = {
        "step_time_ci_low_s": 0.9 * step,
        "step_time_ci_high_s": 1.1 * step,
        "exposed_communication": 0.02 * factor,
    }
    memory = {"peak_reserved_low_bytes": 90 * GIB // factor, "peak_reserved_high_bytes": 110 * GIB // factor}
    return {**row, **about, **memory}


FACTORS = (1, 2, 4, 8, 16)


def draw(rows) -> ReportSection:
    table = prepare_table(rows)
    with style.apply_report_style():
        return sharding_factor.build_section(table, style.build_palette(table["variant_key"]))


def test_a_line_per_strategy_and_kind_of_evidence():
    rows = [run(f) for f in FACTORS] + [predicted(f) for f in FACTORS] + [run(1, strategy="ddp")]
    selected = sharding_factor.select(prepare_table(rows))
    lines = selected.groupby(["series", "evidence"])["sharding_factor"].apply(tuple).to_dict()
    assert lines == {("DDP", "measured"): (1,), ("FSDP2", "measured"): FACTORS, ("FSDP2", "predicted"): FACTORS}
    (drawing,) = draw(rows).drawings
    axes = drawing.figure.axes
    assert len(axes) == 3
    looks = {
        (str(line.get_linestyle()), line.get_marker(), line.get_markerfacecolor() == "white")
        for line in axes[1].lines
        if len(line.get_xdata()) == len(FACTORS)
    }
    assert looks == {("-", "o", False), (":", "o", True)}
    told = " ".join(words(drawing.figure))
    assert "within a machine" in told
    assert "16 bytes per parameter / F" in told
    assert "nan" not in drawing.alt + drawing.caption
    assert "FSDP2 (measured) from F = 1 to 16: 100 GiB to 6.25 GiB" in drawing.caption
    assert overlaps(drawing.figure) == []


def test_intervals_and_ranges_are_those_of_the_rows():
    repeats = [run(2, repeat=0, peak_reserved_bytes=40 * GIB), run(2, repeat=1, peak_reserved_bytes=50 * GIB)]
    rows = [run(1), *repeats, run(4), *(predicted(f) for f in FACTORS)]
    selected = sharding_factor.select(prepare_table(rows)).set_index(["evidence", "sharding_factor"])
    assert tuple(selected.loc[("measured", 2), ["memory", "memory_low", "memory_high"]] / GIB) == (45, 40, 50)
    told = selected.loc[("predicted", 4)]
    assert (told["memory_low"] / GIB, told["memory_high"] / GIB) == (22.5, 27.5)
    assert told["tflops_low"] == pytest.approx(told["tflops"] / 1.1)
    assert told["exposed"] == pytest.approx(0.08)


@pytest.mark.slow
def test_out_of_memory_is_on_the_axis_and_at_what_it_needed():
    lost = {"status": "oom", "tflops_per_gpu": None, "step_time_median_s": None, "peak_reserved_bytes": 150 * GIB}
    rows = [run(1, **lost), *(run(f) for f in FACTORS[1:])]
    memory, speed = draw(rows).drawings[0].figure.axes[:2]
    crosses = {tuple(line.get_ydata()) for line in memory.lines if line.get_marker() == "X"}
    assert crosses == {(0.0,), (150.0,)}
    assert {tuple(line.get_ydata()) for line in speed.lines if line.get_marker() == "X"} == {(0.0,)}
    assert "F=1 out of memory" in draw(rows).drawings[0].alt
    figure = build_trade_off_figure(sharding_factor.select(prepare_table(rows)))
    assert [trace.name for trace in figure.data] == ["FSDP2, measured", "FSDP2, measured: out of memory"]
    assert list(figure.data[1].x) == [150.0]


@pytest.mark.parametrize(
    "other",
    [{"world_size": 32}, {"precision": "fp32"}, {"batch_size_per_gpu": 1}, {"model": "gpt_tiny"},
     {"activation_checkpointing": "full"}, {"memory_limit_bytes": 40 * GIB}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_what_differs_in_more_than_the_factor_is_another_figure(other):
    rows = [run(f) for f in (1, 2, 4)] + [run(f, **other) for f in (1, 2, 8)]
    selected = sharding_factor.select(prepare_table(rows))
    assert [len(facet) for _, facet in selected.groupby(sharding_factor.FACET_COLUMNS, dropna=False)] == [3, 3]


def test_two_factors_are_no_trade():
    section = draw([run(1), run(16)])
    assert section.drawings == []
    assert "three sharding factors" in section.notice


def test_degraded_points_and_failures():
    rows = [run(1, degraded=True), run(2), run(4), run(8, status="error", error="x")]
    (drawing,) = draw(rows).drawings
    assert any("degraded" in text for text in words(drawing.figure))
    assert set(sharding_factor.select(prepare_table(rows))["sharding_factor"]) == {1, 2, 4}


def test_on_a_cpu_it_says_what_it_is_no_evidence_for():
    rows = [make_record(strategy="fsdp", sharding_factor=f, world_size=4) for f in (1, 2, 4)]
    (drawing,) = draw(rows).drawings
    assert "functional evidence, not scaling evidence" in " ".join(words(drawing.figure))
    assert "functional evidence, not scaling evidence" in drawing.caption


def test_hovering_tells_the_numbers():
    figure = build_trade_off_figure(sharding_factor.select(prepare_table([predicted(f) for f in FACTORS])))
    (trace,) = figure.data
    assert trace.line.dash == "dot"
    assert trace.marker.symbol == "circle-open"
    assert "F = 4, predicted</b><br>25.0 GiB (22.5 GiB to 27.5 GiB)" in trace.hovertext[2]
    assert "8.0 % communication not hidden" in trace.hovertext[2]
