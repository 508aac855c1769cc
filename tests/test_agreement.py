"""Estimates beside what they are held against: which rows are paired, how far apart they are, and how that is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection

from bench.reporting import agreement, style
from bench.reporting.agreement import MEMORY, SPEED, pairs, summary
from bench.reporting.drawing import Section
from bench.reporting.figures import agreement as figure
from bench.reporting.figures import paper
from bench.reporting.interactive_figures import deviations, paper_figure
from bench.reporting.table import prepare
from tests.records_fixture import record
from tests.test_paper_figures import predicted
from tests.test_report import overlaps, words


def draw(rows) -> Section:
    table = prepare(rows)
    with style.context():
        return figure.section(table, style.palette(table["variant_key"]))


def both(kind: str, off: float = 1.1, **columns) -> list[dict]:
    """A measured row and one of another kind of evidence, of the same run, whose memory is so many times as much."""
    row = record(**columns)
    of_kind = {**row, "evidence": kind, "run_id": row["run_id"][::-1], "ranks": []}
    of_kind["config"] = {**row["config"], "mode": kind}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        of_kind[name] = round(off * row[name])
    return [row, of_kind]


# ---- pairs


def test_published_points_stand_beside_the_rows_that_are_theirs():
    found = pairs(prepare(predicted("t5_11b_scale")))
    assert set(found["source"]) == {"Figure 7(c)", "Figure 8(c)"}
    speed = found[found["quantity"] == SPEED]
    assert len(speed) == 14
    assert list(speed["value"]) == pytest.approx([156.0] * 14)
    assert list(speed["reference_high"] - speed["reference"]) == pytest.approx([0.1] * 14)
    assert list(speed["deviation"]) == pytest.approx(list(156 / speed["reference"] - 1))
    assert set(found["against"]) == {"published"}
    assert all("GPUs" in label for label in found["label"])


def test_figures_whose_runs_are_not_stated_are_not_compared_point_by_point():
    rows = predicted("model_scale") + predicted("rate_limiter")
    assert paper.select(prepare(rows))["figure"].nunique() == 2
    assert pairs(prepare(rows)).empty


@pytest.mark.parametrize("kind", ["predicted", "rehearsed"])
def test_measured_rows_stand_beside_estimates_of_the_same_run(kind):
    rows = both(kind, model="t5_tiny") + both(kind, off=0.8, model="gpt_tiny") + [record(world_size=4)]
    found = pairs(prepare(rows)).query("quantity == 'memory'")
    assert sorted(found["deviation"]) == pytest.approx([-0.2, 0.1])
    assert set(found["against"]) == {"measured"}
    assert set(found["evidence"]) == {kind}


def test_a_rehearsals_speed_leaves_communication_out_and_is_not_compared():
    assert SPEED not in set(pairs(prepare(both("rehearsed", world_size=2)))["quantity"])
    assert SPEED in set(pairs(prepare(both("predicted", world_size=2)))["quantity"])


def test_repeats_are_one_reference_with_their_range():
    first, estimate = both("predicted")
    second = {**first, "repeat": 1, "run_id": "0" * 16, "peak_allocated_bytes": 2 * first["peak_allocated_bytes"]}
    (pair,) = pairs(prepare([first, second, estimate])).query("quantity == 'memory'").to_dict("records")
    assert pair["reference_high"] == pytest.approx(2 * pair["reference_low"])
    assert pair["reference"] == pytest.approx(1.5 * pair["reference_low"])


def test_runs_that_differ_or_failed_are_no_pair():
    measured, estimate = both("predicted")
    estimate["config"] = {**estimate["config"], "gpus": 64}
    assert pairs(prepare([measured, estimate])).empty
    measured, estimate = both("predicted")
    assert pairs(prepare([{**measured, "status": "error", "error": "x"}, estimate])).empty
    assert pairs(prepare([measured])).empty


def test_degraded_points_are_shown_and_not_counted():
    rows = predicted("gpt_175b_scale")
    found = pairs(prepare(rows)).query("quantity == 'speed'")
    assert found["degraded"].sum() == 1
    (told,) = summary(found).to_dict("records")
    assert (told["pairs"], len(found)) == (9, 10)


def test_the_summary_is_what_the_pairs_come_to():
    rows = [*both("predicted", 1.1, model="t5_tiny"), *both("predicted", 0.7, model="gpt_tiny")]
    (told,) = summary(pairs(prepare(rows)).query("quantity == 'memory'")).to_dict("records")
    assert (told["mean"], told["worst"], told["bias"]) == pytest.approx((0.2, -0.3, -0.1))
    assert np.isnan(told["inside"])
    found = pairs(prepare(predicted("t5_11b_scale"))).query("quantity == 'speed'")
    (told,) = summary(found).to_dict("records")
    expected = np.mean([low <= 156 <= high for low, high in zip(found["reference"] / 1.1, found["reference"] / 0.9,
                                                                strict=True)])  # fmt: skip
    assert told["inside"] == pytest.approx(expected, abs=0.1)


# ---- as drawn


def test_every_pair_is_drawn_with_both_uncertainties():
    rows = predicted("memory") + both("rehearsed") + both("predicted", model="gpt_tiny")
    section = draw(rows)
    assert [drawing.name for drawing in section.drawings] == ["agreement-speed", "agreement-memory"]
    for drawing in section.drawings:
        assert overlaps(drawing.figure) == []
        assert "nan" not in drawing.alt + drawing.caption
        assert drawing.figure.get_figheight() < 11
    memory = section.drawings[1].figure
    found = pairs(prepare(rows)).query("quantity == 'memory'")
    marks = [line for line in memory.axes[0].lines if line.get_marker() not in ("None", "<")]
    assert sum(len(line.get_xdata()) for line in marks) == len(found)
    bars = [len(lines.get_segments()) for lines in memory.axes[0].collections if isinstance(lines, LineCollection)]
    assert sum(bars) == 2 * len(found)
    assert {line.get_fillstyle() for line in marks} == {"full", "left"}
    told = " ".join(words(memory))
    for text in ("Figure 8(b), published", "measured: CPU", "estimate: predicted", "estimate: rehearsed", "within 5%"):
        assert text in told
    (listing,) = section.listings
    assert len(listing.rows) == len(summary(pairs(prepare(rows))))


def test_nothing_to_compare_is_said():
    section = draw([record()])
    assert section.drawings == []
    assert section.nothing == figure.NOTHING


def test_sources_differ_in_colour_and_in_marker():
    looks = figure.look(pairs(prepare(predicted("memory"))))
    assert len({colour for colour, _ in looks.values()}) == len({marker for _, marker in looks.values()}) == len(looks)


# ---- to hover over


def test_hovering_tells_both_numbers_and_their_uncertainty():
    found = pairs(prepare(predicted("t5_11b_scale")))
    (trace,) = deviations(found, SPEED).data
    assert len(trace.x) == 14
    assert trace.marker.symbol.endswith("-open")
    first = found.query("quantity == 'speed'").iloc[0]
    assert first["label"] in trace.hovertext[0]
    assert "predicted: 156.0 (141.8 to 173.3)" in trace.hovertext[0]
    assert len(deviations(found, MEMORY).data) == 1


def test_the_papers_lines_to_hover_over_are_those_of_the_static_figure():
    points = paper.select(prepare(predicted("t5_11b_scale")), ["Figure 7(c)"])
    assert set(points["figure"]) == {"Figure 7(c)"}
    made = paper_figure(points, "TFLOP/s")
    assert {trace.name for trace in made.data} == {
        f"batch {batch}, {kind}" for batch in (8, 16) for kind in ("published", "predicted")
    }
    dashes = {trace.name.split(", ")[1]: trace.line.dash for trace in made.data}
    assert dashes == {"published": "dashdot", "predicted": "dot"}
    published = next(trace for trace in made.data if trace.name == "batch 8, published")
    assert list(published.error_y.array) == pytest.approx([0.1] * 7)
    assert len(points) == sum(len(trace.x) for trace in made.data)
    assert made.layout.xaxis.type == "log"
    assert made.layout.yaxis.title.text == "hardware TFLOP/s per GPU (recomputation counted)"


def test_ends_of_an_axis_hold_everything():
    assert agreement.geometric_ends(pd.DataFrame({"a": [10.0]})) == pytest.approx((10 / 1.2**0.06, 10 * 1.2**0.06))
    low, high = agreement.geometric_ends(pd.DataFrame({"a": [10.0, 20.0], "b": [1000.0, 20.0]}))
    assert 5 < low < 10
    assert 1000 < high < 2000
