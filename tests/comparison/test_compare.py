"""`python -m bench.compare`: what matches, what is a regression, what is only told, and what each output says."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import compare as command
from bench.comparison import (
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    ComparisonSettings,
    compare_records,
    compute_detectable_change,
)
from bench.comparison.result import ALLOCATED, RESERVED, STEP_TIME, TFLOPS, format_percent
from bench.comparison.timing import StepTimes, judge_times
from bench.records import read_latest_attempts
from bench.records.matching import build_run_key, encode_config_key
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import save_drawing
from bench.reporting.figures.regression import build_detectable_table, draw_changes, draw_detectable_slowdowns
from bench.reporting.regressions.files import format_markdown
from bench.reporting.regressions.junit import format_junit_xml
from tests.conftest import ROOT, run_command
from tests.records_fixture import write_store
from tests.repeated_runs import A100_FACTS, PEAK_BYTES, TOPOLOGY, draw_step_times, make_runs, move_to_gpus

REPEATED_STORES = [ROOT / "results" / "measured" / name for name in ("cpu_repeats", "cpu_repeats_quiet")]
"""The same configurations on a shared machine and on one that was left alone."""
QUIET_STORE = ROOT / "results" / "calibration" / "rows"
UPGRADED = {"torch_version": "2.14.0", "git_sha": "f" * 40, "day": "2026-06-01"}


def make_rng(seed=0):
    return np.random.default_rng(seed)


def get_only_row(comparison):
    """The only configuration of a comparison."""
    (row,) = comparison.rows
    return row


def make_five_runs(seed=0, slower=0.0, **columns):
    """Five runs of one configuration at a spread of 1 %."""
    return make_runs(draw_step_times(make_rng(seed), 5, 0.01, slower), **columns)


# What matches


def test_runs_match_whatever_their_version_commit_repetition_seed_and_sweep():
    base = make_five_runs(1)
    how = {"seed": 7, "repeat": 9, "measurement": {"warmup_steps": 5, "steps": 40}, "gpus_per_node": 4}
    candidate = [{**row, "sweep": "other", "config": {**row["config"], **how}} for row in make_five_runs(2, **UPGRADED)]
    row = get_only_row(compare_records(base, candidate))
    assert row[STEP_TIME.column].base_runs == row[STEP_TIME.column].candidate_runs == 5
    assert row.notes == ("timed steps per run: 0, now 40",)
    assert [str(difference) for difference in row.software] == [
        "commit: 0123456789 → ffffffffff",
        "torch: 2.13.0+cpu → 2.14.0",
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "gpt_tiny"},
        {"strategy": "fsdp"},
        {"world_size": 4},
        {"precision": "bf16"},
        {"memory_limit_bytes": 2**30},
    ],
)
def test_another_configuration_is_listed_and_not_compared(other):
    comparison = compare_records(make_five_runs(), make_five_runs(**other))
    assert comparison.rows == ()
    assert (len(comparison.only_base), len(comparison.only_candidate)) == (1, 1)
    assert comparison.only_base[0].runs == 5
    assert comparison.exit_code == 2


def test_kinds_of_evidence_never_mix():
    rehearsed = make_five_runs(slower=0.5, evidence="rehearsed")
    comparison = compare_records(make_five_runs(), rehearsed)
    assert comparison.exit_code == 2
    both = compare_records([*make_five_runs(), *rehearsed], [*make_five_runs(3), *rehearsed])
    assert [row.evidence for row in both.rows] == ["measured", "rehearsed"]
    assert [overall.evidence for overall in both.overall] == ["measured", "rehearsed"]
    assert both.exit_code == 0


def test_published_rows_are_left_out_and_a_row_in_two_folders_counts_once():
    comparison = compare_records(
        [*make_five_runs(), *make_five_runs(), *make_five_runs(evidence="published")], make_five_runs(3)
    )
    assert get_only_row(comparison).changes[0].base_runs == 5
    assert comparison.notes == ("5 published rows left out: nobody runs them again",)


def test_two_configurations_never_have_one_name():
    rows = make_five_runs()
    other = [{**row, "config": {**row["config"], "knob": 3}, "run_id": "0" * 15 + str(n)} for n, row in enumerate(rows)]
    names = [row.name for row in compare_records([*rows, *other], [*rows, *other]).rows]
    assert len(set(names)) == 2
    assert any(name.endswith("knob=3") for name in names)


# Verdicts


def test_equal_code_is_no_change():
    comparison = compare_records(make_five_runs(1), make_five_runs(2))
    assert comparison.verdict == get_only_row(comparison).verdict == NO_CHANGE
    assert comparison.exit_code == 0


def test_a_slowdown_is_a_regression_with_its_interval_and_a_speedup_an_improvement():
    comparison = compare_records(make_five_runs(1), make_five_runs(2, slower=0.05))
    change = get_only_row(comparison)[STEP_TIME.column]
    assert comparison.exit_code == 1
    assert change.verdict == REGRESSION
    assert change.low < 0.05 < change.high
    assert 0 < change.low < change.change < change.high
    assert change.p < 0.01
    inverse = get_only_row(comparison)[TFLOPS.column]
    assert inverse.change == pytest.approx(1 / (1 + change.change) - 1)
    assert (inverse.low, inverse.high) == pytest.approx((1 / (1 + change.high) - 1, 1 / (1 + change.low) - 1))
    back = compare_records(make_five_runs(2, slower=0.05), make_five_runs(1))
    assert back.verdict == IMPROVEMENT
    assert back.exit_code == 0


def test_a_change_between_runs_that_were_not_made_in_turn_may_be_the_machine():
    after = compare_records(make_five_runs(1), make_five_runs(2, slower=0.05, day="2026-05-05"))
    assert after.exit_code == 1
    assert "one side was run after the other had ended" in after.notes[0]
    assert compare_records(make_five_runs(1), make_five_runs(2, slower=0.05)).notes == ()
    assert compare_records(make_five_runs(1), make_five_runs(2, day="2026-05-05")).notes == ()


def test_noise_hides_a_slowdown_and_the_reason_says_what_could_be_found():
    base, candidate = (
        make_runs(draw_step_times(make_rng(seed), 3, 0.1, slower)) for seed, slower in ((1, 0), (2, 0.05))
    )
    row = get_only_row(compare_records(base, candidate))
    assert row.verdict == CANNOT_TELL
    assert re.search(r"runs scatter by [\d.]+ %: only a slowdown of [\d.]+ % would be found 95 times", row.reasons[0])


def test_steps_inside_a_run_are_no_repetition():
    """One run on each side with a hundred steps each says nothing of the spread, twice as slow or not."""
    comparison = compare_records(make_runs([0.1], steps=100), make_runs([0.2], steps=100))
    row = get_only_row(comparison)
    assert row.verdict == CANNOT_TELL
    assert row[STEP_TIME.column].change == pytest.approx(1.0)
    assert row[STEP_TIME.column].low is None
    assert "one run on a side shows no spread" in row.reasons[0]
    assert comparison.exit_code == 0


@pytest.mark.long
@pytest.mark.parametrize("repeats", [1, 5])
def test_a_memory_growth_of_five_percent_is_always_found(repeats):
    for seed in range(40):
        times = [draw_step_times(make_rng(seed + side), repeats, 0.05) for side in (0, 1)]
        comparison = compare_records(make_runs(times[0]), make_runs(times[1], memory=int(1.05 * PEAK_BYTES)))
        assert comparison.exit_code == 1
        assert get_only_row(comparison)[ALLOCATED.column].verdict == REGRESSION
        assert (
            compare_records(make_runs(times[0], memory=int(1.05 * PEAK_BYTES)), make_runs(times[1])).verdict
            == IMPROVEMENT
        )
        assert compare_records(make_runs(times[0]), make_runs(times[1])).exit_code == 0


def test_memory_that_varies_from_run_to_run_is_no_regression_unless_the_runs_are_apart():
    def set_reserved_bytes(rows, *factors):
        pairs = zip(rows, itertools.cycle(factors))
        return [{**row, "peak_reserved_bytes": int(PEAK_BYTES * factor)} for row, factor in pairs]

    row = get_only_row(
        compare_records(
            set_reserved_bytes(make_five_runs(1), 1, 1.06), set_reserved_bytes(make_five_runs(2), 1.05, 1.01)
        )
    )
    assert row[RESERVED.column].verdict == CANNOT_TELL
    row = get_only_row(
        compare_records(
            set_reserved_bytes(make_five_runs(1), 1, 1.02), set_reserved_bytes(make_five_runs(2), 1.05, 1.07)
        )
    )
    assert row[RESERVED.column].verdict == REGRESSION


@pytest.mark.parametrize(
    ("before", "after", "verdict", "words"),
    [
        ("ok", "oom", REGRESSION, "ended ok, now oom (in forward)"),
        ("ok", "error", REGRESSION, "ended ok, now error (it fell over)"),
        ("ok", "timeout", REGRESSION, "ended ok, now timeout"),
        ("oom", "ok", IMPROVEMENT, "was oom, now ok"),
        ("error", "ok", IMPROVEMENT, "was error, now ok"),
        ("oom", "oom", NO_CHANGE, "out of memory in both"),
        ("error", "error", CANNOT_TELL, "failed in both: error (it fell over)"),
        ("oom", "error", CANNOT_TELL, "failed in both: oom, now error (it fell over)"),
        ("ok", "preempted", CANNOT_TELL, "no run of the candidate came to a result"),
    ],
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_what_became_of_the_runs(before, after, verdict, words, repeats):
    sides = []
    for status in (before, after):
        failed = {"error": "it fell over"} if status == "error" else {}
        sides.append(make_runs([0.1] * repeats, status=status, **failed))
    row = get_only_row(compare_records(*sides))
    assert (row["status"].verdict, row["status"].reason.partition(":")[0]) == (verdict, words.partition(":")[0])
    assert words in row["status"].reason


def test_runs_that_fail_now_and_then_are_called_flaky():
    base = make_runs([0.1] * 5)
    for failed, verdict in ((1, CANNOT_TELL), (4, REGRESSION)):
        candidate = [*make_runs([0.1] * (5 - failed)), *make_runs([0.1] * failed, status="oom")]
        status = get_only_row(compare_records(base, candidate))["status"]
        assert status.verdict == verdict
        assert status.reason.startswith("flaky: ok, now ")


def test_degraded_runs_are_left_out_of_the_time_and_said():
    candidate = make_five_runs(2)
    slow = [{**row, "degraded": True} for row in make_five_runs(3, slower=0.5, day="2026-06-02")]
    row = get_only_row(compare_records(make_five_runs(1), [*candidate, *slow]))
    assert row[STEP_TIME.column].verdict == NO_CHANGE
    assert row[STEP_TIME.column].candidate_runs == 5
    assert "5 of 10 candidate runs degraded: time left out" in row.notes
    assert get_only_row(compare_records(make_five_runs(1), slow))[STEP_TIME.column].verdict == CANNOT_TELL


def test_predictions_do_not_scatter_so_one_of_each_says_it():
    base, slower = make_runs([0.1], evidence="predicted"), make_runs([0.103], evidence="predicted")
    assert compare_records(base, slower).exit_code == 1
    assert compare_records(base, make_runs([0.101], evidence="predicted")).verdict == NO_CHANGE


def test_a_small_slowdown_of_all_configurations_is_found_in_all_together():
    """Two percent in each of ten, at three repeats and a spread of 2 %, is seen in none of them alone."""
    sides = []
    for slower in (0.0, 0.02):
        generator = make_rng(7 + int(1000 * slower))
        sides.append(
            [
                row
                for size in range(1, 11)
                for row in make_runs(draw_step_times(generator, 3, 0.01, slower), world_size=2 * size)
            ]
        )
    comparison = compare_records(*sides)
    (overall,) = comparison.overall
    assert overall.get(STEP_TIME.column).verdict == REGRESSION
    assert overall.get(STEP_TIME.column).change == pytest.approx(0.02, abs=0.006)
    assert comparison.exit_code == 1
    assert len(comparison.list_with_verdict(REGRESSION)) < 5


# Machines


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ({"power_limit_w": 300.0}, "power limit: 400 W → 300 W"),
        ({"driver": "570.1"}, "driver: 550.54.15 → 570.1"),
        ({"sm_clock_max_mhz": 1200}, "highest SM clock: 1410 MHz → 1200 MHz"),
    ],
)
def test_another_machine_makes_no_regression_of_times_but_memory_and_status_count(fact, expected):
    base, slower = move_to_gpus(make_five_runs(1)), move_to_gpus(make_five_runs(2, slower=0.5), **fact)
    comparison = compare_records(base, slower)
    assert [str(difference) for difference in comparison.machines] == [expected]
    assert get_only_row(comparison)[STEP_TIME.column].verdict == CANNOT_TELL
    assert get_only_row(comparison)[STEP_TIME.column].reason == "different machines"
    assert comparison.exit_code == 0
    assert compare_records(base, slower, ComparisonSettings(across_machines=True)).exit_code == 1
    assert compare_records(base, move_to_gpus(make_five_runs(2, memory=2 * PEAK_BYTES), **fact)).exit_code == 1
    assert compare_records(base, move_to_gpus(make_five_runs(2, status="oom"), **fact)).exit_code == 1


def test_on_another_gpu_nothing_is_comparable():
    base, other = (
        move_to_gpus(make_five_runs(1)),
        move_to_gpus(make_five_runs(2, slower=0.5, memory=2 * PEAK_BYTES), name="NVIDIA H100 80GB HBM3"),
    )
    comparison = compare_records(base, other)
    assert comparison.exit_code == 2
    assert get_only_row(comparison).verdict == CANNOT_TELL
    assert comparison.sentence.startswith("Nothing comparable: the machines differ")
    assert compare_records(base, other, ComparisonSettings(across_machines=True)).exit_code == 1


def test_another_network_is_another_machine_and_the_affinity_of_a_job_is_none():
    base = move_to_gpus(make_five_runs(1))
    other = move_to_gpus(make_five_runs(2), variables={"NCCL_IB_DISABLE": "1"})
    assert [difference.name for difference in compare_records(base, other).machines] == ["network settings"]
    for topology, differs in ((TOPOLOGY.replace("NV12", "SYS"), True), (TOPOLOGY.replace("0-31", "32-63"), False)):
        moved = [
            {**row, "environment": {**row["environment"], "topology": topology}}
            for row in move_to_gpus(make_five_runs(2))
        ]
        differences = [str(difference) for difference in compare_records(base, moved).machines]
        assert differences == (["links inside a node: NV12 2× → SYS 2×"] if differs else [])
    two_nodes = move_to_gpus(make_five_runs(2, nodes=2))
    assert "ranks: 2 on 1 node → 1 on each of 2 nodes" in [
        str(difference) for difference in compare_records(base, two_nodes).machines
    ]


def test_what_an_upgrade_changes_is_told_and_compared():
    base = move_to_gpus(make_five_runs(1))
    after = [
        {**row, "environment": {**row["environment"], "nccl": "2.30"}}
        for row in move_to_gpus(make_five_runs(2, slower=0.1))
    ]
    comparison = compare_records(base, after)
    assert comparison.exit_code == 1
    assert "NCCL: 2.27.3 → 2.30" in [str(difference) for difference in comparison.software]
    assert not comparison.machines


def test_rows_of_two_devices_are_no_repeats_of_one_another():
    fast, slow = move_to_gpus(make_five_runs(1)), move_to_gpus(make_five_runs(2, slower=0.5), name="NVIDIA L4")
    comparison = compare_records([*fast, *slow], [*move_to_gpus(make_five_runs(3)), *slow])
    assert [row.verdict for row in comparison.rows] == [NO_CHANGE, NO_CHANGE]
    comparison = compare_records([*fast, *slow], move_to_gpus(make_five_runs(3)))
    assert get_only_row(comparison).verdict == NO_CHANGE
    assert len(comparison.only_base) == 1


def test_what_a_row_does_not_say_is_no_difference():
    bare = [{**row, "environment": {}} for row in move_to_gpus(make_five_runs(2))]
    assert not compare_records(move_to_gpus(make_five_runs(1)), bare).machines
    assert A100_FACTS["name"] == bare[0]["gpu_name"]


# The command


@pytest.fixture
def stores(tmp_path: Path):
    """A base and a candidate with a slowdown, a memory growth, a new OOM, one that is degraded and some on one side."""
    base, candidate = [], []
    for number in range(7):
        which = {"model": ("t5_tiny", "gpt_tiny")[number % 2], "world_size": 2 ** (1 + number // 2)}
        base += make_five_runs(number, **which) if number != 6 else []
        after = {"memory": int(1.05 * PEAK_BYTES)} if number == 1 else {"status": "oom"} if number == 2 else {}
        after |= {"degraded": True} if number == 3 else {}
        if number != 5:
            candidate += make_five_runs(number + 50, 0.06 if number == 0 else 0.0, **which, **after, **UPGRADED)
    return write_store(tmp_path / "base", base), write_store(tmp_path / "candidate", candidate)


def test_the_command_prints_everything_and_writes_what_was_asked_for(stores, tmp_path, capsys):
    base, candidate = stores
    files = {kind: tmp_path / "out" / f"result.{kind}" for kind in ("md", "json", "xml")}
    arguments = [str(base), str(candidate), "--markdown", str(files["md"]), "--json", str(files["json"])]
    assert command.main([*arguments, "--junit", str(files["xml"])]) == 1
    printed = capsys.readouterr().out
    for words in (
        "torch: 2.13.0+cpu → 2.14.0",
        "ok → oom",
        "95 % interval",
        "all 5 together",
        "Only in base: 1 configuration",
        "Only in candidate: 1 configuration",
        "5 of 5 candidate runs degraded: time left out",
        "Regression. Of 5 configurations: 3 regression, 1 no change, 1 cannot tell.",
    ):
        assert words in printed

    data = json.loads(files["json"].read_text())
    assert (data["verdict"], data["exit_code"]) == (REGRESSION, 1)
    assert data["counts"] == {REGRESSION: 3, IMPROVEMENT: 0, NO_CHANGE: 1, CANNOT_TELL: 1}
    slower = next(row for row in data["rows"] if row["question"]["gpus"] == 2 and row["name"].startswith("t5"))
    time = next(change for change in slower["changes"] if change["quantity"] == STEP_TIME.column)
    assert time["low"] < 0.06 < time["high"]
    assert (time["base_runs"], time["verdict"]) == (5, REGRESSION)

    table = [line for line in files["md"].read_text().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "every line has as many cells"
    assert len(table) == 2 + 1 + 5
    assert format_percent(time["change"]) in files["md"].read_text()

    suite = ElementTree.fromstring(files["xml"].read_bytes()).find("testsuite")
    cases = suite.findall("testcase")
    assert (int(suite.get("tests")), int(suite.get("failures")), int(suite.get("skipped"))) == (5, 3, 1)
    assert len(cases) == 5
    assert sum(case.find("failure") is not None for case in cases) == 3
    assert {case.get("classname") for case in cases} == {"bench.compare.measured"}
    assert "ok, now oom" in " ".join(
        case.find("failure").get("message") for case in cases if case.find("failure") is not None
    )


def test_nothing_in_a_row_is_taken_for_markup(tmp_path):
    failed = make_five_runs(2, model="a|b_<c>", status="error", error="it | fell\nover <script> & \x00")
    comparison = compare_records(make_five_runs(1, model="a|b_<c>"), failed)
    table = [line for line in format_markdown(comparison, "x", "y").splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "<script>" not in format_markdown(comparison, "x", "y").replace("\\<", "")
    case = ElementTree.fromstring(format_junit_xml(comparison, "x", "y").encode()).find("testsuite/testcase")
    assert case.get("name").startswith("a|b_<c>")
    assert "fell" in case.find("failure").get("message")


def test_runs_that_had_the_machine_to_themselves_and_others_that_had_not_are_told():
    beside = [{**row, "concurrent_runs": 3} for row in make_five_runs(2)]
    assert (
        "other runs of the store at the same time: up to 0, now 3"
        in get_only_row(compare_records(make_five_runs(1), beside)).notes
    )


def test_the_command_says_machines_first_and_refuses(tmp_path, capsys):
    base = write_store(tmp_path / "a", move_to_gpus(make_five_runs(1)))
    other = write_store(tmp_path / "b", move_to_gpus(make_five_runs(2, slower=0.2), name="NVIDIA H100 80GB HBM3"))
    report = tmp_path / "report.xml"
    assert command.main([str(base), str(other), "--junit", str(report)]) == 2
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "The machines differ (times are not compared):"
    assert printed.splitlines()[1].strip() == f"device: {A100_FACTS['name']} → NVIDIA H100 80GB HBM3"
    assert ElementTree.fromstring(report.read_bytes()).find("testsuite").get("errors") == "1"
    assert command.main([str(base), str(other), "--across-machines"]) == 1
    assert capsys.readouterr().out.startswith("The machines differ (compared all the same):")


def test_thresholds_are_percentages(stores, tmp_path):
    base = write_store(tmp_path / "a", make_five_runs(1))
    slower = write_store(tmp_path / "b", make_five_runs(2, slower=0.05))
    assert command.main([str(base), str(slower)]) == 1
    assert command.main([str(base), str(slower), "--threshold", "10"]) == 0
    larger = write_store(tmp_path / "c", make_five_runs(3, memory=int(1.05 * PEAK_BYTES)))
    assert command.main([str(base), str(larger)]) == 1
    assert command.main([str(base), str(larger), "--memory-threshold", "6", "--reserved-threshold", "6"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "{b}"], "There is no store at nowhere"),
        (["{empty}", "{b}"], "holds no rows"),
        (["{a}", "{b}", "--threshold", "-1"], "--threshold=-1 is not valid: choose a percentage from 0 to below 100."),
        (["{a}", "{b}", "--threshold", "nan"], "--threshold=nan is not valid"),
        (["{a}", "{b}", "--margin", "1"], "--margin=1 is not valid: choose a percentage of at least --threshold=1.5."),
        (["{a}", "{b}", "--false-alarms", "0"], "--false-alarms=0 is not valid"),
        (["{a}", "{b}", "--json", "{row}"], "choose a file that is not the row of a run"),
        (["{a}", "{b}", "--json", "{a}/rows.jsonl"], "choose a file that is not the row of a run"),
        (["{a}", "{b}", "--markdown", "{a}"], "cannot be written"),
    ],
)
def test_bad_input_is_a_sentence_and_nothing_is_overwritten(arguments, words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {name: write_store(tmp_path / name, make_five_runs(seed)) for seed, name in enumerate("ab")}
    row = next(places["a"].glob("*/0.json"))
    before = row.read_bytes()
    filled = [argument.format(**places, empty=tmp_path / "empty", row=row) for argument in arguments]
    assert command.main(filled) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert row.read_bytes() == before


@pytest.mark.long
@pytest.mark.slow
def test_as_a_person_types_it(stores):
    done = run_command("bench.compare", *(str(store) for store in stores))
    assert done.returncode == 1
    assert done.stderr == ""
    assert "Regression." in done.stdout
    assert run_command("bench.compare", "only-one").returncode == 2


# Real runs of the same code on one machine


def iterate_splits(rows):
    """Every way to take half of the repetitions as base and the rest as candidate."""
    repeats = sorted({row["repeat"] for row in rows})
    for chosen in itertools.combinations(repeats, len(repeats) // 2):
        yield [row for row in rows if row["repeat"] in chosen], [row for row in rows if row["repeat"] not in chosen]


def iterate_halves(values):
    """Every way to divide values into two halves."""
    for chosen in itertools.combinations(range(len(values)), len(values) // 2):
        yield [values[i] for i in chosen], [value for i, value in enumerate(values) if i not in chosen]


def group_step_times(rows):
    """Step times of each configuration in the order of its repetitions."""
    times: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["repeat"]):
        times.setdefault(encode_config_key(build_run_key(row)), []).append(row["step_time_median_s"])
    return times


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "most"),
    [(REPEATED_STORES[0], 0.01), (REPEATED_STORES[1], 0.015)],
    ids=[store.name for store in REPEATED_STORES],
)
def test_the_same_code_twice_raises_no_alarm_on_real_runs(store, most):
    """Ten repetitions of eight configurations, split into five and five in all 252 ways."""
    rows = read_latest_attempts(store).records
    assert len({row["repeat"] for row in rows}) == 10
    comparisons = [compare_records(*sides) for sides in iterate_splits(rows)]
    assert len(comparisons) == math.comb(10, 5)
    assert sum(comparison.exit_code == 1 for comparison in comparisons) / len(comparisons) < 0.01
    alone = [
        judge_times([StepTimes(tuple(base), tuple(candidate))], ComparisonSettings())[1].verdict == REGRESSION
        for times in group_step_times(rows).values()
        for base, candidate in iterate_halves(times)
    ]
    assert sum(alone) / len(alone) < most  # a single configuration: up to 1.3 % at its worst spread, near 2 %


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("store", REPEATED_STORES, ids=lambda store: store.name)
def test_a_slowdown_planted_in_real_runs_is_found(store):
    """As large a one as the curve says is found at the spread of these runs."""
    rows = read_latest_attempts(store).records
    times = group_step_times(rows)
    spread = math.sqrt(np.mean([np.var(np.log(values), ddof=1) for values in times.values()]))
    planted = compute_detectable_change(5, spread, configurations=len(times))
    detections = []
    for base, candidate in itertools.islice(iterate_splits(rows), 0, None, 6):
        slower = [{**row, "step_time_median_s": (1 + planted) * row["step_time_median_s"]} for row in candidate]
        detections.append(compare_records(base, slower).exit_code == 1)
    assert sum(detections) / len(detections) >= 0.95


def test_too_few_repetitions_of_the_same_code_are_not_called_anything():
    """Thirty configurations, three repetitions: one against two cannot tell, and memory repeats."""
    rows = read_latest_attempts(QUIET_STORE).records
    for repeat in {row["repeat"] for row in rows}:
        sides = [[row for row in rows if (row["repeat"] == repeat) == is_chosen] for is_chosen in (True, False)]
        for base, candidate in (sides, sides[::-1]):
            comparison = compare_records(base, candidate)
            assert (comparison.verdict, comparison.exit_code) == (CANNOT_TELL, 0)
            assert {row[ALLOCATED.column].verdict for row in comparison.rows} == {NO_CHANGE}


# Figures


@pytest.mark.slow
def test_figures_of_a_comparison(stores, tmp_path):
    comparison = compare_records(*(read_latest_attempts(store).records for store in stores))
    with style.apply_report_style():
        drawings = [*draw_changes(comparison), *draw_changes(comparison, ALLOCATED), draw_detectable_slowdowns()]
    for drawing in drawings:
        assert "<svg" in save_drawing(drawing, tmp_path)
        assert (tmp_path / f"{drawing.name}.png").stat().st_size > 5000
        assert drawing.alt
        assert drawing.caption
    words = " ".join(text.get_text() for text in drawings[0].figure.axes[0].texts)
    assert "ok → oom" in words
    assert "degraded" in words
    assert "+5.0 %" in " ".join(text.get_text() for text in drawings[1].figure.axes[0].texts)


def test_the_curve_that_is_drawn_is_the_one_that_is_measured():
    table = build_detectable_table((3, 5, 10), (0.01, 0.02))
    assert table.loc[5, 0.01] < 0.03 < table.loc[5, 0.02]
    assert (table.diff().dropna() < 0).all(axis=None)
