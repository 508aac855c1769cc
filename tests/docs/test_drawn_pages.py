"""Pages whose commands a build of the site executes: all, or a share that every commit draws anew."""

from __future__ import annotations

import pytest
from page_commands import NOT_DRAWN, _select_lines, draw_pages

from tests.commit_draws import is_drawn

NAMES = [f"guides/page_{number}" for number in range(40)]


def test_all_pages_are_executed_unless_a_share_is_asked_for(monkeypatch, capsys):
    monkeypatch.delenv("PAGES_ONE_IN", raising=False)
    assert draw_pages(NAMES) == NAMES
    assert not capsys.readouterr().out


def test_what_a_commit_leaves_out_is_said(monkeypatch, capsys):
    monkeypatch.setenv("PAGES_ONE_IN", "4")
    drawn = draw_pages(NAMES)
    left_out = sorted({*NAMES} - {*drawn})
    assert left_out
    assert capsys.readouterr().out.startswith(f"NOT RUN: {', '.join(left_out)}: ")


def test_every_page_is_drawn_by_some_commit_and_a_fourth_by_each():
    drawn = [[is_drawn(name, f"{commit:040x}", 4) for name in NAMES] for commit in range(60)]
    assert all(any(draws) for draws in zip(*drawn, strict=True))
    assert sum(map(sum, drawn)) == pytest.approx(60 * 40 / 4, rel=0.15)


def test_a_page_that_was_not_executed_says_so_whatever_lines_it_shows():
    assert _select_lines(NOT_DRAWN, "20-30") == NOT_DRAWN
    assert _select_lines("first\nsecond", "2-") == "second"
