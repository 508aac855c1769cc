"""Regressions as sections: the verdict is said, figures are drawn, and what is missing is asked for in a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.errors import UsageError
from bench.reporting.regressions.sections import (
    build_change_section,
    build_detectable_section,
    build_history_section,
    build_store_change_section,
)
from tests.records_fixture import write_store
from tests.repeated_runs import PEAK_BYTES, draw_step_times, make_runs


def side(seed: int, slower: float = 0.0, **columns):
    return make_runs(draw_step_times(np.random.default_rng(seed), 5, 0.01, slower), **columns)


def test_a_regression_is_said_drawn_and_listed():
    section = build_change_section(side(1), side(2, slower=0.2))
    assert section.how_to_read.startswith("Regression. Of 1 configuration: 1 regression.")
    assert [drawing.name.split("-")[0] for drawing in section.drawings]
    (listing,) = section.tables
    (row,) = listing.rows
    told = dict(zip(listing.columns, row, strict=True))
    assert (told["Runs"], told["Verdict"]) == ("5, 5", "regression")
    assert told["Change"].startswith("+")
    assert " to " in told["Interval"]


def test_memory_is_drawn_where_it_changed():
    same, grown = build_change_section(side(1), side(2)), build_change_section(side(1), side(2, memory=2 * PEAK_BYTES))
    assert len(same.drawings) == 1
    assert len(grown.drawings) == 2


def test_nothing_in_common_is_said_and_not_explained():
    section = build_change_section(side(1), side(2, model="gpt_tiny"))
    assert section.how_to_read.strip() == "Nothing to compare: base and candidate have no configuration in common."
    assert section.drawings == section.tables == []


def test_stores_are_compared_or_asked_for(tmp_path):
    base, candidate = (write_store(tmp_path / name, side(seed)) for seed, name in enumerate(("base", "candidate")))
    assert build_store_change_section(base, candidate).drawings
    for pair in ((None, candidate), (base, None), (None, None)):
        assert (
            "python -m bench.notebooks regressions base=BEFORE store=AFTER" in build_store_change_section(*pair).notice
        )
    with pytest.raises(UsageError, match="no store at"):
        build_store_change_section(base, tmp_path / "missing")


def test_the_history_of_a_store(tmp_path):
    rows = []
    for day in range(1, 9):
        slower = 0.2 if day > 4 else 0.0
        sha = f"{day:x}" * 40
        rows += side(day, slower, day=f"2026-05-0{day}", git_sha=sha, sweep=f"day {day}")
    drawings = build_history_section(write_store(tmp_path / "store", rows)).drawings
    assert any("5555555" in drawing.alt for drawing in drawings)
    assert "python -m bench.notebooks regressions store=DIR" in build_history_section(None).notice
    alone = write_store(tmp_path / "alone", side(1))
    assert "more than one commit" in build_history_section(alone).notice


def test_what_can_be_found_as_curves_and_as_numbers():
    section = build_detectable_section()
    (drawing,) = section.drawings
    assert len(drawing.figure.axes[0].lines) >= 4
    (listing,) = section.tables
    five = next(row for row in listing.rows if row[0] == "5")
    spread = next(name for name in listing.columns if name.startswith("spread 1"))
    assert 1.5 < float(five[listing.columns.index(spread)].removesuffix(" %")) < 4
