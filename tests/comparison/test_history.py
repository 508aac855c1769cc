"""Histories: points in order of time, changes of level named by their commit, and few of them where nothing changed."""

from __future__ import annotations

import json
import urllib.parse
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from bench import history as command
from bench.comparison import CANNOT_TELL, IMPROVEMENT, REGRESSION, build_histories
from bench.comparison.history import find_exact_level_changes, find_level_changes
from bench.comparison.result import ALLOCATED, STEP_TIME, TFLOPS
from bench.core.errors import UsageError
from bench.records import read_all_attempts, read_latest_attempts
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import save_drawing
from bench.reporting.figures.regression import draw_histories
from bench.reporting.regressions.sections import (
    build_change_section,
    build_detectable_section,
    build_history_section,
    build_store_change_section,
)
from tests.browser import open_browser
from tests.records_fixture import write_store
from tests.repeated_runs import PEAK_BYTES, draw_step_times, make_runs, move_to_gpus


def make_sha(number):
    """A commit that can be told from others by its first letters."""
    return f"{number:02x}" * 20


def make_nightly_rows(
    count, *, spread=0.01, repeats=2, seed=0, slower=lambda night: 0.0, columns=lambda night: {}, **common
):
    """Rows of one configuration, run every night with another commit."""
    rng = np.random.default_rng(seed)
    rows = []
    for night in range(count):
        which = {
            "git_sha": make_sha(night),
            "day": str(date(2026, 4, 1) + timedelta(night)),
            **common,
            **columns(night),
        }
        rows += make_runs(draw_step_times(rng, repeats, spread, slower(night)), **which)
    return rows


def find_series(all_series, quantity, number=0):
    return [series for series in all_series if series.quantity == quantity][number]


# Change points


def draw_noise(rng, kind, count):
    return {
        "normal": lambda: rng.normal(size=count),
        "heavy tails": lambda: rng.standard_t(3, count),
        "disturbed": lambda: rng.normal(size=count) * np.where(rng.random(count) < 0.1, 4, 1),
    }[kind]()


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "disturbed"])
@pytest.mark.parametrize("count", [5, 12, 40])
def test_a_flat_series_is_rarely_split(kind, count):
    rng = np.random.default_rng(count)
    trials = 500
    split = sum(
        bool(find_level_changes(np.exp(0.03 * draw_noise(rng, kind, count)), 0.01, 0.015)) for _ in range(trials)
    )
    assert split / trials <= (0.02 if kind == "normal" else 0.03), "1 % is meant; tails may cost as much again"


def test_a_step_is_found_at_its_place():
    rng = np.random.default_rng(0)
    every, found_at = [], []
    for _ in range(200):
        values = np.exp(rng.normal(0, 0.01, 30) + np.where(np.arange(30) >= 17, np.log1p(0.03), 0))
        every.append([step.index for step in find_level_changes(values, 0.01, 0.015)])
        found_at += [abs(index - 17) <= 1 for index in every[-1]]
    assert np.mean([len(places) == 1 for places in every]) >= 0.97
    assert np.mean(found_at) > 0.9


def test_what_comes_and_goes_is_two_changes():
    rng = np.random.default_rng(0)
    level = np.where((np.arange(30) >= 12) & (np.arange(30) < 18), np.log1p(0.05), 0)
    (up, down) = find_level_changes(np.exp(rng.normal(0, 0.01, 30) + level), 0.01, 0.015)
    assert (up.index, down.index) == (12, 18)
    assert up.change == pytest.approx(0.05, abs=0.015)
    assert down.change == pytest.approx(-0.048, abs=0.015)


def test_one_outlier_is_no_change_and_a_small_step_does_not_count():
    values = np.exp(np.random.default_rng(0).normal(0, 0.005, 20))
    outlier = values.copy()
    outlier[10] *= 1.5
    assert find_level_changes(outlier, 0.01, 0.015) == []
    small = values * np.where(np.arange(20) >= 10, 1.014, 1)
    assert find_level_changes(small, 0.01, 0.015) == []
    assert [step.index for step in find_level_changes(small, 0.01, 0.005)] == [10]


def test_values_that_do_not_scatter_change_at_once():
    assert [step.index for step in find_level_changes([1.0] * 5 + [1.1] * 4, 0.01, 0.015)] == [5]
    (step,) = find_exact_level_changes([100, 100, 105], 0.01)
    assert (step.index, step.before, step.after) == (2, pytest.approx(100), pytest.approx(105))
    assert find_exact_level_changes([100, 100.5, 100, 100.5], 0.01) == []


# Histories


def test_a_slower_commit_is_named_with_its_date_and_what_else_changed():
    rows = make_nightly_rows(
        20,
        slower=lambda night: 0.05 * (night >= 11),
        columns=lambda night: {"torch_version": "2.13.0" if night < 11 else "2.14.0"},
    )
    all_series = build_histories(rows[::-1])
    (change,) = find_series(all_series, STEP_TIME).change_points
    assert (change.git_sha, change.date, change.previous) == (make_sha(11), "2026-04-12", make_sha(10)[:7])
    assert change.verdict == REGRESSION
    assert change.change == pytest.approx(0.05, abs=0.01)
    assert "torch: 2.13.0 → 2.14.0" in [str(difference) for difference in change.software]
    (inverse,) = find_series(all_series, TFLOPS).change_points
    assert (inverse.git_sha, inverse.verdict) == (make_sha(11), REGRESSION)
    assert find_series(all_series, ALLOCATED).change_points == ()


def test_memory_changes_at_one_commit_the_newest_included():
    rows = make_nightly_rows(6, columns=lambda night: {"memory": int(PEAK_BYTES * (1.05 if night == 5 else 1))})
    (change,) = find_series(build_histories(rows), ALLOCATED).change_points
    assert (change.git_sha, change.verdict) == (make_sha(5), REGRESSION)


def test_flat_histories_of_many_configurations_are_quiet():
    rows = [row for size in range(1, 31) for row in make_nightly_rows(15, seed=size, world_size=2 * size, spread=0.02)]
    all_series = build_histories(rows)
    assert len({series.name for series in all_series}) == 30
    assert not any(series.change_points for series in all_series)


def test_another_machine_is_told_and_no_regression():
    old, new = make_nightly_rows(8), make_nightly_rows(16, seed=1, slower=lambda night: 0.1)[16:]
    all_series = build_histories([*move_to_gpus(old), *move_to_gpus(new, power_limit_w=300.0)])
    (change,) = find_series(all_series, STEP_TIME).change_points
    assert change.verdict == CANNOT_TELL
    assert [str(difference) for difference in change.machines] == ["power limit: 400 W → 300 W"]
    all_series = build_histories([*move_to_gpus(old), *move_to_gpus(new, name="NVIDIA H100")])
    assert [series.device for series in all_series if series.quantity == STEP_TIME] == [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100",
    ]
    assert not any(series.change_points for series in all_series)


def test_degraded_runs_and_runs_out_of_memory_are_points_of_their_own_kind():
    def choose_columns(night):
        return {"status": "oom"} if night in (4, 5) else {"degraded": True} if night == 8 else {}

    series = find_series(
        build_histories(make_nightly_rows(12, slower=lambda night: 0.5 * (night == 8), columns=choose_columns)),
        STEP_TIME,
    )
    assert [point.value is None for point in series.points] == [night in (4, 5, 8) for night in range(12)]
    assert series.points[8].degraded == 2
    assert series.points[8].degraded_value > 1.3 * series.points[7].value
    assert [
        (change_point.git_sha, change_point.before, change_point.after, change_point.verdict)
        for change_point in series.change_points
    ] == [
        (make_sha(4), "ok", "oom", REGRESSION),
        (make_sha(6), "oom", "ok", IMPROVEMENT),
    ]


def test_runs_of_one_commit_and_day_are_one_point_and_versions_are_apart():
    rows = [*make_runs([0.1, 0.11]), *make_runs([0.12], torch_version="2.14.0")]
    series = find_series(build_histories(rows), STEP_TIME)
    assert [point.runs for point in series.points] == [2, 1]
    assert series.points[0].value == pytest.approx((0.1 * 0.11) ** 0.5)
    assert (series.points[0].low, series.points[0].high) == (0.1, 0.11)
    assert build_histories(make_runs([0.1, 0.11])) == []


def test_every_attempt_counts(tmp_path):
    """A run that is forced again with another commit is the same run: a new attempt."""
    (first,) = make_runs([0.1])
    again = {**first, "attempt": 1, "git_sha": make_sha(7), "started_at": "2026-06-01T00:00:00+00:00"}
    store = write_store(tmp_path / "store", [first, again])
    assert len(read_latest_attempts(store).records) == 1
    assert [row["attempt"] for row in read_all_attempts(store).records] == [1, 0]
    assert [
        point.git_sha for point in find_series(build_histories(read_all_attempts(store).records), STEP_TIME).points
    ] == [
        first["git_sha"],
        make_sha(7),
    ]


# The command


@pytest.fixture
def stores(tmp_path: Path):
    def choose_columns(night):
        return {"status": "oom"} if night == 14 else {"degraded": True} if night == 3 else {}

    changed = make_nightly_rows(20, slower=lambda night: 0.06 * (night >= 9), columns=choose_columns)
    flat = make_nightly_rows(20, seed=5, model="gpt_tiny")
    return write_store(tmp_path / "one", changed), write_store(tmp_path / "two", flat)


@pytest.mark.slow
def test_the_command_prints_and_draws_the_changes(stores, tmp_path, capsys):
    output = tmp_path / "out"
    assert command.main([*(str(store) for store in stores), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"{make_sha(9)[:7]}" in printed
    assert "2026-04-10" in printed
    assert "2 configurations, 20 points each: 3 changes of level." in printed
    data = json.loads((output / "history.json").read_text())
    (change,) = [
        change
        for series in data["series"]
        if series["quantity"] == STEP_TIME.column
        for change in series["change_points"]
        if change["change"]
    ]
    assert change["git_sha"] == make_sha(9)
    assert len(list(output.glob("history-*.png"))) == len(list(output.glob("history-*.svg"))) == 6


def test_a_drawing_names_the_commit_and_marks_what_is_not_a_value(stores, tmp_path):
    all_series = build_histories([row for store in stores for row in read_all_attempts(store).records])
    with style.apply_report_style():
        drawing = draw_histories(all_series, (STEP_TIME,))[0]
    save_drawing(drawing, tmp_path)
    axes = drawing.figure.axes[0]
    words = [text.get_text() for text in axes.texts]
    assert any(word.startswith(f"{make_sha(9)[:7]}: +") for word in words)
    assert f"{make_sha(14)[:7]}: ok → oom" in words
    assert sum(line.get_marker() == "X" for line in axes.lines) == 1
    assert sum(line.get_marker() == "v" for line in axes.lines) == 1
    names = [text.get_text() for legend in drawing.figure.legends for text in legend.get_texts()]
    assert "degraded: not representative" in names
    assert "out of memory" in names
    assert make_sha(9)[:7] in drawing.alt


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nowhere", "There is no store at"),
        (lambda folder: write_store(folder / "once", make_runs([0.1, 0.1])), "there is no history to show"),
    ],
)
def test_bad_input_is_a_sentence(make, words, tmp_path, capsys):
    assert command.main([str(make(tmp_path))]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_an_output_that_cannot_be_written_is_a_sentence(stores, capsys):
    assert command.main([str(stores[0]), "--output", str(next(stores[0].glob("*/0.json")))]) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- Regressions as sections: the verdict is said, figures are drawn, and what is missing is asked for in a sentence.


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


# The page


@pytest.mark.long
@pytest.mark.slow
def test_the_page_names_the_commit_lists_every_configuration_and_links_to_rows(stores, tmp_path):
    output = tmp_path / "out"
    assert command.main([*(str(store) for store in stores), "--output", str(output)]) == 0
    with open_browser() as browser:
        page = browser.new_page()
        complaints = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((output / "index.html").as_uri())
        first = page.locator("h2#changes + .scroll tbody tr").filter(has_text="step time")
        assert make_sha(9)[:7] in (first.first.text_content() or "")
        rows = page.locator("#configurations tbody tr")
        assert rows.count() == 6  # two configurations, each with time, speed and memory
        page.locator("#words").fill("gpt_tiny")
        page.wait_for_function("document.getElementById('count').textContent === '3 of 6'")
        assert page.locator("section:visible").count() == 3
        page.locator("#words").fill("")
        page.locator("#changed").check()
        page.wait_for_function("document.getElementById('count').textContent !== '6 of 6'")
        page.locator("#changed").uncheck()
        links = page.locator("section details a").evaluate_all("all => all.map(link => link.href)")
        assert len(links) == 6 * 20 * 2
        row = json.loads(Path(urllib.parse.urlparse(links[0]).path).read_text())
        assert row["model"] == "t5_tiny"
        page.locator("section img").first.scroll_into_view_if_needed()
        page.wait_for_function("document.querySelector('section img').naturalWidth > 100")
        assert complaints == []
        page.screenshot(path=str(tmp_path / "history.png"), full_page=False)
