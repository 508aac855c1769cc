"""The line on the terminal while something takes long."""

from __future__ import annotations

import io
import re

from bench.core.command_line import PlainConsole
from bench.core.progress import ProgressLine, observe_progress, show_progress, track_progress


def test_what_is_counted_is_told_and_costs_nothing_where_nobody_listens():
    told = []
    with observe_progress(lambda doing, done, total: told.append((doing, done, total))):
        assert list(track_progress("abc", 3, "tracing")) == ["a", "b", "c"]
    assert told == [("tracing", 0, 3), ("tracing", 1, 3), ("tracing", 2, 3), ("tracing", 3, 3)]
    list(track_progress("abc", 3, "tracing"))
    assert len(told) == 4


def test_the_line_says_how_far_how_long_and_what_is_on():
    screen = io.StringIO()
    console = PlainConsole(file=screen, force_terminal=True, width=120, force_interactive=True)
    with ProgressLine(console, 44, "starting") as line:
        line.show("t5_tiny ddp fp32 x4 b4")
        line.advance()
        line._bar.refresh()
    shown = screen.getvalue()
    assert "1/44" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"\d:\d\d:\d\d", shown)
    assert "t5_tiny ddp fp32 x4 b4" in shown


def test_counted_work_is_shown_behind_what_it_is_for():
    screen = io.StringIO()
    console = PlainConsole(file=screen, force_terminal=True, width=120, force_interactive=True)
    with show_progress(console, "gpus=8: predicting 30 candidates") as line:
        for _ in track_progress(range(3), 3, "simulating steps"):
            line._bar.refresh()
    assert "gpus=8: predicting 30 candidates: simulating steps" in screen.getvalue()
    assert "2/3" in screen.getvalue()


def test_without_a_terminal_it_is_quiet():
    screen = io.StringIO()
    with show_progress(PlainConsole(file=screen), "predicting"):
        list(track_progress(range(3), 3, "tracing"))
    assert screen.getvalue() == ""
