"""Estimates beside what they are held against: which rows are paired, how far apart they are, and how that is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection

from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import ReportSection
from bench.reporting.figures import paper
from bench.reporting.figures.agreement import FIGURE, assign_source_styles, build_section
from bench.reporting.page.interactive_figures import build_deviation_figure, build_paper_figure
from bench.reporting.tables import agreement
from bench.reporting.tables.agreement import MEMORY, SPEED, build_pairs, summarize_pairs
from bench.reporting.tables.table import prepare_table
from tests.records_fixture import make_record
from tests.reporting.test_paper_figures import predicted
from tests.reporting.test_report import overlaps, words


def draw_section(rows) -> ReportSection:
    table = prepare_table(rows)
    with style.apply_report_style():
        return build_section(table, style.build_palette(table["variant_key"]))


def make_row_pair(kind: str, memory_ratio: float = 1.1, **columns) -> list[dict]:
    """A measured row and one of another kind of evidence, of the same run, whose memory is so many times as much."""
    row = make_record(**columns)
    estimate_row = {**row, "evidence": kind, "run_id": row["run_id"][::-1], "ranks": []}
    estimate_row["config"] = {**row["config"], "mode": kind}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        estimate_row[name] = round(memory_ratio * row[name])
    return [row, estimate_row]


# ---- pairs


def test_published_points_stand_beside_the_rows_that_are_theirs():
    pair_table = build_pairs(prepare_table(predicted("t5_11b_scale")))
    assert set(pair_table["source"]) == {"Figure 7(c)", "Figure 8(c)"}
    speed = pair_table[pair_table["quantity"] == SPEED]
    assert len(speed) == 14
    assert list(speed["value"]) == pytest.approx([156.0] * 14)
    assert list(speed["reference_high"] - speed["reference"]) == pytest.approx([0.1] * 14)
    assert list(speed["deviation"]) == pytest.approx(list(156 / speed["reference"] - 1))
    assert set(pair_table["against"]) == {"published"}
    assert all("GPUs" in label for label in pair_table["label"])


@pytest.mark.slow
def test_figures_whose_runs_are_not_stated_are_not_compared_point_by_point():
    rows = predicted("model_scale") + predicted("rate_limiter")
    assert paper.select(prepare_table(rows))["figure"].nunique() == 2
    assert build_pairs(prepare_table(rows)).empty


@pytest.mark.parametrize("kind", ["predicted", "rehearsed"])
def test_measured_rows_stand_beside_estimates_of_the_same_run(kind):
    rows = (
        make_row_pair(kind, model="t5_tiny")
        + make_row_pair(kind, memory_ratio=0.8, model="gpt_tiny")
        + [make_record(world_size=4)]
    )
    pair_table = build_pairs(prepare_table(rows)).query("quantity == 'memory'")
    assert sorted(pair_table["deviation"]) == pytest.approx([-0.2, 0.1])
    assert set(pair_table["against"]) == {"measured"}
    assert set(pair_table["evidence"]) == {kind}


def test_a_rehearsals_speed_leaves_communication_out_and_is_not_compared():
    assert SPEED not in set(build_pairs(prepare_table(make_row_pair("rehearsed", world_size=2)))["quantity"])
    assert SPEED in set(build_pairs(prepare_table(make_row_pair("predicted", world_size=2)))["quantity"])


def test_repeats_are_one_reference_with_their_range():
    first, estimate = make_row_pair("predicted")
    second = {**first, "repeat": 1, "run_id": "0" * 16, "peak_allocated_bytes": 2 * first["peak_allocated_bytes"]}
    (pair,) = build_pairs(prepare_table([first, second, estimate])).query("quantity == 'memory'").to_dict("records")
    assert pair["reference_high"] == pytest.approx(2 * pair["reference_low"])
    assert pair["reference"] == pytest.approx(1.5 * pair["reference_low"])


def test_runs_that_differ_or_failed_are_no_pair():
    measured, estimate = make_row_pair("predicted")
    estimate["config"] = {**estimate["config"], "gpus": 64}
    assert build_pairs(prepare_table([measured, estimate])).empty
    measured, estimate = make_row_pair("predicted")
    assert build_pairs(prepare_table([{**measured, "status": "error", "error": "x"}, estimate])).empty
    assert build_pairs(prepare_table([measured])).empty


def test_degraded_points_are_shown_and_not_counted():
    rows = predicted("gpt_175b_scale")
    pair_table = build_pairs(prepare_table(rows)).query("quantity == 'speed'")
    assert pair_table["degraded"].sum() == 1
    (summary_row,) = summarize_pairs(pair_table).to_dict("records")
    assert (summary_row["pairs"], len(pair_table)) == (9, 10)


def test_the_summary_is_what_the_pairs_come_to():
    rows = [*make_row_pair("predicted", 1.1, model="t5_tiny"), *make_row_pair("predicted", 0.7, model="gpt_tiny")]
    (summary_row,) = summarize_pairs(build_pairs(prepare_table(rows)).query("quantity == 'memory'")).to_dict("records")
    assert (summary_row["mean"], summary_row["worst"], summary_row["bias"]) == pytest.approx((0.2, -0.3, -0.1))
    assert np.isnan(summary_row["inside"])
    pair_table = build_pairs(prepare_table(predicted("t5_11b_scale"))).query("quantity == 'speed'")
    (summary_row,) = summarize_pairs(pair_table).to_dict("records")
    expected = np.mean([low <= 156 <= high for low, high in zip(pair_table["reference"] / 1.1,
    pair_table["reference"] / 0.9,
                                                                strict=True)])  # fmt: skip
    assert summary_row["inside"] == pytest.approx(expected, abs=0.1)


# ---- as drawn


@pytest.mark.long
@pytest.mark.slow
def test_every_pair_is_drawn_with_both_uncertainties():
    rows = predicted("memory") + make_row_pair("rehearsed") + make_row_pair("predicted", model="gpt_tiny")
    section = draw_section(rows)
    assert [drawing.name for drawing in section.drawings] == ["agreement-speed", "agreement-memory"]
    for drawing in section.drawings:
        assert overlaps(drawing.figure) == []
        assert "nan" not in drawing.alt + drawing.caption
        assert drawing.figure.get_figheight() < 11
    memory = section.drawings[1].figure
    pair_table = build_pairs(prepare_table(rows)).query("quantity == 'memory'")
    marks = [line for line in memory.axes[0].lines if line.get_marker() not in ("None", "<")]
    assert sum(len(line.get_xdata()) for line in marks) == len(pair_table)
    bars = [len(lines.get_segments()) for lines in memory.axes[0].collections if isinstance(lines, LineCollection)]
    assert sum(bars) == 2 * len(pair_table)
    assert {line.get_fillstyle() for line in marks} == {"full", "left"}
    drawn_text = " ".join(words(memory))
    for text in ("Figure 8(b), published", "measured: CPU", "estimate: predicted", "estimate: rehearsed", "within 5%"):
        assert text in drawn_text
    (listing,) = section.tables
    assert len(listing.rows) == len(summarize_pairs(build_pairs(prepare_table(rows))))


def test_nothing_to_compare_is_said():
    section = draw_section([make_record()])
    assert section.drawings == []
    assert section.notice == FIGURE.empty_message != ""


def test_sources_differ_in_colour_and_in_marker():
    looks = assign_source_styles(build_pairs(prepare_table(predicted("memory"))))
    assert len({colour for colour, _ in looks.values()}) == len({marker for _, marker in looks.values()}) == len(looks)


# ---- to hover over


def test_hovering_tells_both_numbers_and_their_uncertainty():
    pair_table = build_pairs(prepare_table(predicted("t5_11b_scale")))
    (trace,) = build_deviation_figure(pair_table, SPEED).data
    assert len(trace.x) == 14
    assert trace.marker.symbol.endswith("-open")
    first = pair_table.query("quantity == 'speed'").iloc[0]
    assert first["label"] in trace.hovertext[0]
    assert "predicted: 156.0 (141.8 to 173.3)" in trace.hovertext[0]
    assert len(build_deviation_figure(pair_table, MEMORY).data) == 1


def test_the_papers_lines_to_hover_over_are_those_of_the_static_figure():
    points = paper.select(prepare_table(predicted("t5_11b_scale")), ["Figure 7(c)"])
    assert set(points["figure"]) == {"Figure 7(c)"}
    hover_figure = build_paper_figure(points, "TFLOP/s")
    assert {trace.name for trace in hover_figure.data} == {
        f"batch {batch}, {kind}" for batch in (8, 16) for kind in ("published", "predicted")
    }
    dashes = {trace.name.split(", ")[1]: trace.line.dash for trace in hover_figure.data}
    assert dashes == {"published": "dashdot", "predicted": "dot"}
    published = next(trace for trace in hover_figure.data if trace.name == "batch 8, published")
    assert list(published.error_y.array) == pytest.approx([0.1] * 7)
    assert len(points) == sum(len(trace.x) for trace in hover_figure.data)
    assert hover_figure.layout.xaxis.type == "log"
    assert hover_figure.layout.yaxis.title.text == "hardware TFLOP/s per GPU (recomputation counted)"


def test_ends_of_an_axis_hold_everything():
    assert agreement.compute_log_limits(pd.DataFrame({"a": [10.0]})) == pytest.approx((10 / 1.2**0.06, 10 * 1.2**0.06))
    low, high = agreement.compute_log_limits(pd.DataFrame({"a": [10.0, 20.0], "b": [1000.0, 20.0]}))
    assert 5 < low < 10
    assert 1000 < high < 2000
