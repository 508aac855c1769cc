"""Two versions of the code in turn: a machine that drifts raises no alarm, a slower version is found."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench import compare
from bench.comparison import CANNOT_TELL, REGRESSION, ComparisonSettings, compare_records
from bench.comparison.comparing import is_interleaved
from bench.comparison.interleaved_runs import SIDES, CodeVersion, draw_order, find_code_version
from bench.comparison.result import STEP_TIME
from bench.comparison.statistics import pool_paired_shifts
from bench.comparison.timing import StepTimes, judge_times
from bench.core.errors import UsageError
from bench.records import read_latest_attempts
from tests.conftest import ROOT
from tests.repeated_runs import make_runs

SETTINGS = ComparisonSettings()
QUIET_STORE = ROOT / "results" / "measured" / "cpu_repeats_quiet"
CORRELATION = 0.7


def draw_drift(rng: np.random.Generator, count: int) -> np.ndarray:
    """An autoregressive series of order 1 whose values have a standard deviation of 1."""
    values = np.empty(count)
    values[0] = rng.normal()
    for index in range(1, count):
        values[index] = CORRELATION * values[index - 1] + math.sqrt(1 - CORRELATION**2) * rng.normal()
    return values


def measure_alarm_rate(count: int, configurations: int, rounds: int, *, in_turn: bool, slower: float = 0.0) -> float:
    """Share of comparisons of a machine that drifts by 3 % in which any regression is called.

    Every pass over the configurations is run after run; `in_turn` as `bench.compare run` orders passes, else all of the
    base before all of the candidate.
    """
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(count):
        passes = 0.03 * draw_drift(rng, 2 * rounds * configurations).reshape(2 * rounds, configurations)
        sides: list[list[np.ndarray]] = [[], []]
        if in_turn:
            firsts = rng.integers(0, 2, (rounds + 1) // 2)
            order = [side for first in firsts for side in (first, 1 - first, 1 - first, first)][: 2 * rounds]
        else:
            order = [0] * rounds + [1] * rounds
        for side, run_pass in zip(order, passes, strict=True):
            sides[side].append(run_pass)
        base, candidate = (np.exp(np.array(side).T) for side in sides)
        times = [
            StepTimes(tuple(before), tuple((1 + slower) * after), is_interleaved=in_turn)
            for before, after in zip(base, candidate, strict=True)
        ]
        alone, together = judge_times(times, SETTINGS)
        assert together is not None
        alarms += REGRESSION in [judgement.verdict for judgement in (*alone, together)]
    return alarms / count


@pytest.mark.slow
@pytest.mark.parametrize(("configurations", "rounds", "count"), [(1, 5, 1000), (1, 10, 500), (4, 5, 500), (8, 10, 150)])
def test_in_turn_a_drifting_machine_raises_a_false_alarm_in_at_most_one_of_a_hundred(configurations, rounds, count):
    """0.1 to 0.7 % in a thousand and more trials of each; here as many as chance allows for 1 % (one in a thousand)."""
    alarms = count * measure_alarm_rate(count, configurations, rounds, in_turn=True)
    assert alarms <= stats.binom.isf(0.001, count, 0.01)


@pytest.mark.slow
def test_one_side_after_the_other_the_same_machine_raises_many():
    """What running in turn is for."""
    assert measure_alarm_rate(300, 1, 5, in_turn=False) > 0.06


@pytest.mark.slow
def test_in_turn_a_real_slowdown_is_found_in_spite_of_the_drift():
    assert measure_alarm_rate(60, 8, 10, in_turn=True, slower=0.05) > 0.9


def test_a_real_five_percent_in_the_quiet_repeats_is_found():
    """Repetitions 0, 2, 4, ... against 1, 3, 5, ..., either way: all together are called."""
    rows = read_latest_attempts(QUIET_STORE).records
    halves = [[row for row in rows if row["repeat"] % 2 == rest] for rest in (0, 1)]
    for base, candidate in (halves, halves[::-1]):
        assert compare_records(base, candidate).exit_code == 0
        slower = [{**row, "step_time_median_s": 1.05 * row["step_time_median_s"]} for row in candidate]
        comparison = compare_records(base, slower)
        assert comparison.exit_code == 1
        change = comparison.overall[0].get(STEP_TIME.column)
        assert change is not None
        assert change.verdict == REGRESSION
        assert change.low is not None
        assert 0 < change.low < 0.05 < change.high + 0.02
        assert "which excludes no change: slower by at least" in comparison.sentence


def test_rounds_are_judged_by_their_differences():
    rng = np.random.default_rng(3)
    drift = np.cumsum(rng.normal(0, 0.2, 6))  # far more than what is to be found
    base = np.exp(drift + rng.normal(0, 0.001, (3, 6)))
    shift = pool_paired_shifts([(row, 1.02 * row * np.exp(rng.normal(0, 0.001, 6))) for row in base])
    assert shift.change == pytest.approx(0.02, abs=0.002)
    assert shift.degrees == 5
    low, high = shift.compute_interval(0.95)
    assert 0.015 < low < high < 0.025
    assert not pool_paired_shifts([([1.0], [1.1])]).has_spread


def make_sides(order: str) -> tuple[list[dict], list[dict]]:
    """Rows whose starts, in order of time, are of base (b) and candidate (c)."""
    rows = make_runs([0.1] * len(order))
    rows = [{**row, "started_at": f"2026-05-04T10:{minute:02d}:00+00:00"} for minute, row in enumerate(rows)]
    return tuple([row for row, side in zip(rows, order, strict=True) if side == wanted] for wanted in "bc")


@pytest.mark.parametrize(
    ("order", "expected"),
    [("bcbcbc", True), ("bccbbc", True), ("cbbccb", True), ("bbbccc", False), ("bbcbcc", False), ("bcbcb", False)],
)
def test_runs_in_turn_are_known_by_their_starts(order, expected):
    assert is_interleaved(*make_sides(order)) is expected


def test_a_store_beside_itself_was_not_run_in_turn():
    rows = make_runs([0.1, 0.101, 0.102])
    assert not is_interleaved(rows, rows)


def test_every_two_rounds_begin_with_either_side():
    order = list(itertools.islice(draw_order(20), 20))
    assert {frozenset(pair) for pair in order} == {frozenset((0, 1))}
    assert [sum(first for first, _ in order[index : index + 2]) for index in range(0, 20, 2)] == [1] * 10


# What is said, and what fails


def test_cannot_tell_says_how_many_runs_more_would_decide_and_strict_fails():
    rng = np.random.default_rng(1)
    base, candidate = (make_runs(0.1 * np.exp(rng.normal(0, 0.03, 4)), day=day) for day in ("2026-05-04", "2026-05-05"))
    comparison = compare_records(base, candidate)
    (row,) = comparison.rows
    assert row.verdict == CANNOT_TELL
    (reason,) = row.reasons
    more = int(reason.split("; ")[-1].split()[0])
    assert f"(sweep.repeats={4 + more})" in reason
    assert comparison.exit_code == 0
    assert compare_records(base, candidate, ComparisonSettings(strict=True)).exit_code == 1
    # with so many runs that look alike it is decided
    repeats = math.ceil((4 + more) / 4)
    many = [make_runs(np.tile([run["step_time_median_s"] for run in side], repeats)) for side in (base, candidate)]
    assert compare_records(*many).rows[0].verdict != CANNOT_TELL


# The command


def test_what_a_path_stands_for(tmp_path):
    assert find_code_version("base", ROOT).checkout == ROOT
    assert find_code_version("base", Path(sys.executable)) == CodeVersion(Path(sys.executable), None)
    environment = Path(sys.prefix)
    assert find_code_version("base", environment).python == environment / "bin" / "python"
    with pytest.raises(UsageError, match=r"BASE=.* is not valid: choose a checkout of this suite, a virtual"):
        find_code_version("base", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "."], "BASE=nowhere is not valid: choose a checkout"),
        ([".", ".", "store=x"], "store=x is not valid here"),
        ([".", ".", "--repeats", "1"], "--repeats=1 is not valid"),
        ([".", ".", "model=t5_tny"], "(did you mean t5_tiny?)"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_a_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert compare.main(["run", *arguments, "--store", str(tmp_path / "compared")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_two_checkouts_are_run_in_turn_and_compared(tmp_path, capsys):
    """Real runs of this checkout, and of a copy of it whose rows say that they take twice the memory, busy or not."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("bench", "conf"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("results", "analysis"):
        (copy / name).symlink_to(ROOT / name)
    row_file = copy / "bench" / "rank" / "row.py"
    text = row_file.read_text()
    assert '"peak_allocated_bytes": max(' in text
    row_file.write_text(text.replace('"peak_allocated_bytes": max(', '"peak_allocated_bytes": 2 * max(', 1))
    settings = ["model=gpt_tiny", "strategy=single", "measurement.steps=3", "sequence_length=32", "check=false"]
    store = tmp_path / "compared"
    typed = ["run", str(ROOT), str(copy), *settings, "--repeats", "2", "--store", str(store)]
    assert compare.main(typed) == 1
    assert "Regression. Of 1 configuration: 1 regression." in capsys.readouterr().out
    rows = [read_latest_attempts(store / side).records for side in SIDES]
    assert [sorted(row["repeat"] for row in side) for side in rows] == [[0, 1]] * 2
    assert compare.main(typed) == 2  # never beside rows of other code
    assert "a new folder" in capsys.readouterr().err
