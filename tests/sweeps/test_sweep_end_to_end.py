"""The sweep from what is typed to what is recorded: the truth of its numbers, its plan, its store, its search."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench import records
from bench import sweep as command
from bench.config.compose import compose_config
from bench.config.groups import list_config_groups
from bench.config.run_checks import MAX_TOKENS_PER_PROCESS
from bench.config.run_config import RunConfig
from bench.core.typed_config import format_override_value
from bench.launch.local import LocalLauncher
from bench.launch.task import search_largest_batch
from bench.planning.batch_search import (
    BatchTrial,
    choose_next_batch_size,
    find_largest_fitting,
    search_largest_batches,
)
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.rank.row import build_configured_columns
from bench.records.schema import COLUMNS, FORMAT_VERSION
from tests.conftest import limit_cpu_time
from tests.fake_model import (
    CPU,
    FAKE_MODEL_OVERRIDES,
    FLOPS_PER_TOKEN,
    ROOT,
    SweepProcess,
    plan_runs,
    read_attempts_by_run,
    read_row_files,
    run_sweep,
)
from tests.finetune.test_finetune import needs_both, needs_peft
from tests.records_fixture import make_record

# Harness truth

STEP_S, SLOWER_S, STEPS = 0.15, 0.05, 3


@pytest.fixture(scope="module")
def known_times(tmp_path_factory) -> SweepProcess:
    store = tmp_path_factory.mktemp("truth") / "store"
    return run_sweep(
        store,
        "-m",
        *FAKE_MODEL_OVERRIDES,
        "strategy=ddp",
        "gpus=1,2",
        "gradient_accumulation=1,2",
        f"+model.step_s={STEP_S}",
        f"+model.slow_rank_s={SLOWER_S}",
        f"measurement.steps={STEPS}",
        "+hardware.peak_tflops.fp32=0.002",
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_known_step_time_comes_back_with_its_speed(known_times, gpus, accumulation):
    (row,) = [
        attempts[0]
        for attempts in read_attempts_by_run(known_times.store).values()
        if (attempts[0]["world_size"], attempts[0]["gradient_accumulation"]) == (gpus, accumulation)
    ]
    expected_s = accumulation * (STEP_S + (SLOWER_S if gpus == 2 else 0))
    step_s = row["step_time_median_s"]
    assert row["status"] == "ok"
    assert expected_s <= step_s <= 1.25 * expected_s + 0.03
    tokens = 2 * 16 * accumulation  # per rank and step
    assert row["tflops_per_gpu"] == pytest.approx(3 * FLOPS_PER_TOKEN * tokens / step_s / 1e12)
    assert row["hardware_tflops_per_gpu"] == pytest.approx(row["tflops_per_gpu"])
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 0.002)
    assert row["tokens_per_second_per_gpu"] == pytest.approx(tokens / step_s)
    raw = [rank["step_times_s"] for rank in row["ranks"]]
    assert [len(times) for times in raw] == [STEPS] * gpus
    slowest = np.max(raw, axis=0)
    assert step_s == pytest.approx(np.median(slowest))
    assert row["step_time_ci_low_s"] is row["step_time_ci_high_s"] is row["step_time_p95_s"] is None  # 3 steps
    assert len(row["losses"]) == 2 + 2 + STEPS  # observed, warm-up, timed
    assert row["setup_s"] >= 4 * expected_s  # those steps are not timed


@pytest.mark.slow
def test_a_sweep_without_a_terminal_is_quiet(known_times):
    assert known_times.process.returncode == 0
    lines = known_times.output.splitlines()
    assert len(lines) == 2 + 1 + 2 + 4, known_times.output  # the plan, what was not given, a head, a line per run
    assert lines[2].startswith("Not given: precision=fp32"), known_times.output
    assert lines[0] == "Sweep adhoc: 4 runs, 0 done, 4 to run"
    assert lines[1] == "Shapes on one machine: 2 x 1 rank, 2 x 2 ranks"
    assert not {"\x1b", "\r"} & set(known_times.output)


# Side by side

THREE = ("-m", *FAKE_MODEL_OVERRIDES, "strategy=ddp", "gpus=2", "+model.step_s=0.2", "repeat=0,1,2")


@pytest.mark.long
@pytest.mark.slow
def test_sweeps_side_by_side_execute_every_run_once(tmp_path):
    shared, own = tmp_path / "shared" / "store", tmp_path / "own" / "store"
    started = [SweepProcess(store, *THREE) for store in (shared, shared, own)]
    try:
        for process in started:
            assert process.wait() == 0, process.output
            assert process.output.count(" ok ") == 3, process.output
    finally:
        left = [process.wait_for_leftover_pids() for process in started]
        for process in started:
            process.clean_up()
    assert left == [[], [], []]
    ids = [config.run_id for config in plan_runs(*THREE[1:])]
    for store in (shared, own):
        recorded = read_attempts_by_run(store)
        assert sorted(recorded) == sorted(ids)
        assert [[row["status"] for row in attempts] for attempts in recorded.values()] == [["ok"]] * 3


# What is recorded already

FIVE = ("-m", *FAKE_MODEL_OVERRIDES, "strategy=single", "repeat=0,1,2,3,4")


def put(store: Path, config: RunConfig, status: str, **columns: Any) -> None:
    """Record a run as if it had been executed."""
    figures = {
        "ok": {"step_time_median_s": 0.1, "tflops_per_gpu": 0.1, "peak_allocated_bytes": 2**20},
        "oom": {"oom_phase": "backward", "oom_bytes": 2**20, "oom_rank": 0},
    }
    ended = figures.get(status, {"error": f"ended as {status}"})
    when = {"started_at": "2026-01-01T00:00:00+00:00", "finished_at": "2026-01-01T00:00:01+00:00"}
    row = {
        **build_configured_columns(config),
        **ended,
        **when,
        "status": status,
        "sweep": "adhoc",
        "attempt": 0,
        **columns,
    }
    records.write_row(store, row)


@pytest.fixture
def five(tmp_path) -> tuple[Path, list[str]]:
    """A store with a run of each status, and their run ids."""
    store = tmp_path / "store"
    configs = plan_runs(*FIVE[1:])
    for config, status in zip(configs, ("ok", "oom", "error", "timeout", "preempted"), strict=True):
        put(store, config, status)
    return store, [config.run_id for config in configs]


@pytest.mark.long
@pytest.mark.slow
def test_results_are_not_repeated_unless_forced_and_failures_are(five):
    store, ids = five
    before = read_row_files(store)
    again = run_sweep(store, *FIVE, "report=true")
    assert again.process.returncode == 0, again.output
    assert "5 runs, 2 done, 3 to run" in again.output
    after = read_row_files(store)
    assert {path: after[path] for path in before} == before
    assert [[row["status"] for row in read_attempts_by_run(store)[run]] for run in ids] == [
        ["ok"],
        ["oom"],
        ["error", "ok"],
        ["timeout", "ok"],
        ["preempted", "ok"],
    ]
    assert "Report: " in again.output
    assert (store / "report").is_dir()

    forced = run_sweep(store, *FIVE, "repeat=0,1", "force=true")
    assert forced.process.returncode == 0, forced.output
    assert "2 runs, 0 done, 2 to run" in forced.output
    assert {path: read_row_files(store)[path] for path in after} == after
    assert [[row["status"] for row in read_attempts_by_run(store)[run]] for run in ids[:2]] == [
        ["ok", "ok"],
        ["oom", "ok"],
    ]
    assert read_attempts_by_run(store)[ids[0]][1]["attempt"] == 1
    assert records.load(store)["attempt"].sum() == 5


@pytest.fixture
def no_launch(monkeypatch) -> None:
    """On a machine without GPUs, where launching is a failure."""

    def launch(*_args: Any, **_options: Any) -> None:
        pytest.fail("something was launched")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    monkeypatch.setattr("bench.sweeps.run_sweep.detect_device", lambda: CPU)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("no_launch")
def test_a_finished_sweep_starts_nothing_and_its_report_changes_no_row(five, capsys):
    store, ids = five
    before = read_row_files(store)
    assert command.main([*FIVE, "repeat=0,1", f"store={store}", "report=true"]) == 0
    shown = capsys.readouterr().out
    assert "2 runs, 2 done, 0 to run" in shown
    assert "Report: " in shown
    assert read_row_files(store) == before
    assert sorted(read_attempts_by_run(store)) == sorted(ids)


# The plan


@pytest.mark.slow
@pytest.mark.usefixtures("no_launch")
def test_a_dry_run_shows_the_plan_and_touches_nothing(five, capsys):
    store, ids = five
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    typed = [*FIVE[:-2], "strategy=single,ddp,fsdp", "gpus=1,2", "repeat=0,1,2,3,4", f"store={store}", "dry_run=true"]
    assert command.main(typed) == 0
    shown = capsys.readouterr().out
    assert "25 runs, 2 done, 23 to run, 5 impossible" in shown
    assert "Shapes on one machine: 13 x 1 rank, 10 x 2 ranks" in shown
    assert "Impossible (5): gpus=2 is not valid for strategy=single" in shown
    state = {line.split()[0]: line for line in shown.splitlines() if line[:16].isalnum()}
    assert "done: ok" in state[ids[0]]
    assert "done: oom" in state[ids[1]]
    for run in ids[2:]:
        assert state[run].rstrip().endswith("to run")
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert "\x1b" not in shown


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("no_launch")
def test_a_dry_run_without_a_store_makes_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["dry_run=true"]) == 0
    assert "Sweep default" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_grid_of_a_command_line_is_the_one_made_by_hand():
    typed = ["model=gpt_tiny,t5_tiny", "strategy=ddp,fsdp", "strategy.sharding_factor=1,2", "gpus=1,2"]
    request = parse_sweep_request(typed, multirun=True, device=CPU)
    assert request.points == [
        {"model": model, "strategy": strategy, "strategy.sharding_factor": factor, "gpus": gpus, "hardware": "cpu"}
        for model in ("gpt_tiny", "t5_tiny")
        for strategy in ("ddp", "fsdp")
        for factor in ("1", "2")
        for gpus in ("1", "2")
    ]
    plan = build_sweep_plan(request.points, Path("none"), force=False, check_run=lambda config: None)
    assert [
        (run.model.name, run.strategy.name, run.strategy.resolved_sharding_factor, run.gpus) for run in plan.to_run
    ] == [
        (model, *rest)
        for model in ("gpt_tiny", "t5_tiny")
        for rest in (("ddp", 1, 1), ("ddp", 1, 2), ("fsdp", 1, 1), ("fsdp", 1, 2), ("fsdp", 2, 2))
    ]
    assert len(plan.impossible) == 6


def possible(*arguments: str) -> list[RunConfig]:
    """The runs that these overrides ask for and that could run somewhere."""
    request = parse_sweep_request(arguments, multirun=True, device=CPU)
    return build_sweep_plan(request.points, Path("none"), force=True, check_run=lambda config: None).to_run


def command_lines(grid: dict[str, Any]) -> Iterator[list[str]]:
    """The command lines that come to what a grid of a sweep file lists, one for each choice of its linked axes."""
    axes = grid.get("axes") or {}
    plain = {key: values for key, values in axes.items() if not isinstance(values[0], dict)}
    linked = [values for key, values in axes.items() if key not in plain]
    settings = {
        **(grid.get("fixed") or {}),
        **{key: ",".join(map(format_override_value, values)) for key, values in plain.items()},
    }
    for alternatives in itertools.product(*linked):
        chosen = {key: value for alternative in alternatives for key, value in alternative.items()}
        yield [
            f"{key}={value if key in plain else format_override_value(value)}"
            for key, value in {**settings, **chosen}.items()
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(list_config_groups()["sweep"]) - {"adhoc"}))
def test_a_sweep_file_and_the_command_line_come_to_the_same_runs(name):
    described = compose_config({"sweep": name})["sweep"]
    on = ["hardware=h200"] if described.get("device") == "cuda" else []
    from_file = {config.run_id for config in possible(f"sweep={name}", "sweep.repeats=1", *on)}
    grids = described["grids"]
    typed = [config for grid in grids for line in command_lines(grid) for config in possible(*line, *on)]
    assert from_file <= {config.run_id for config in typed}
    if not any(grid.get("exclude") for grid in grids):
        assert from_file == {config.run_id for config in typed}
    assert from_file


def test_linked_axes_on_the_command_line_are_those_of_a_file():
    grid = "sweep.grids=[{fixed:{gpus:2},axes:{model:[gpt_tiny,t5_tiny],variant:[{strategy:ddp},{strategy:fsdp}]}}]"
    inline = [config.run_id for config in plan_runs(grid)]
    assert inline == [config.run_id for config in plan_runs("gpus=2", "model=gpt_tiny,t5_tiny", "strategy=ddp,fsdp")]


# What names a run


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to every field of a configuration that holds a plain value."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [*value, "x"] if isinstance(value, list) else {**value, "x": 1}


@pytest.mark.parametrize(
    "asked",
    [
        "strategy=single",
        *[f"strategy={name} gpus=2" for name in ("ddp", "zero1", "fsdp", "fsdp1", "accelerate", "lightning")],
        *[f"strategy={name} gpus=2" for name in ("deepspeed", "tensor_parallel", "naive_pipeline", "pipeline")],
        "strategy=data_parallel gpus=2 hardware=a100_40gb",
        pytest.param("strategy=ddp finetune=lora", marks=needs_peft),
        pytest.param("strategy=ddp finetune=qlora", marks=needs_both),
    ],
)
@pytest.mark.parametrize("model", ["t5_tiny", "gpt_tiny"])
def test_every_knob_is_part_of_a_runs_name(model, asked):
    (config,) = plan_runs(f"model={model}", *asked.split())
    seen = {config.run_id}
    paths = list(leaves(config))
    assert len(paths) > 35
    for path in paths:
        other = copy.deepcopy(config)
        other.__dict__.pop("run_id", None)
        owner: Any = other
        for name in path[:-1]:
            owner = getattr(owner, name)
        object.__setattr__(owner, path[-1], changed(getattr(owner, path[-1])))
        # where numbers were read, how links are called, what only energy follows from; what is resolved elsewhere; what
        # a measurement has no need to believe
        unnamed = (
            ("hardware", "sources"),
            ("hardware", "interconnect"),
            ("hardware", "power_w"),
            ("requested",),
            ("global_batch",),
            ("hardware", "speeds"),
            ("hardware", "host"),
        )
        if path[:2] in unnamed:
            assert other.run_id == config.run_id
        else:
            assert other.run_id not in seen, path
            seen.add(other.run_id)


def test_a_run_is_named_by_its_settings_alone(tmp_path):
    base = ("model=gpt_tiny", "strategy=fsdp", "gpus=2")
    (config,) = plan_runs(*base)
    elsewhere = (
        f"store={tmp_path}",
        "force=true",
        "report=false",
        "search=largest_batch",
        "cluster.time_limit_s=7",
        "cluster.max_cpu_processes=3",
        "sweep.name=another",
        "hardware=cpu",  # what auto comes to
        "strategy.sharding_factor=full",  # the default, said
        "strategy.sharding_factor=2",  # what full comes to
        "sweep=adhoc",
    )
    for setting in elsewhere:
        (same,) = plan_runs(*base, setting)
        assert same.run_id == config.run_id, setting
    for setting in ("seed=1", "repeat=1", "measurement.steps=21", "hardware.memory_limit_gib=1", "model.name=mine"):
        (other,) = plan_runs(*base, setting)
        assert other.run_id != config.run_id, setting


# The store


def test_torn_foreign_and_later_files_are_named_and_passed_over(tmp_path):
    good, torn, later = (make_record(repeat=repeat) for repeat in range(3))
    for row in (good, torn, later):
        records.write_row(tmp_path, row)
    whole = records.get_row_path(tmp_path, torn["run_id"], 0).read_text()
    problems = {
        records.get_row_path(tmp_path, torn["run_id"], 1): whole[: len(whole) // 2],
        records.get_row_path(tmp_path, torn["run_id"], 2): "",
        records.get_row_path(tmp_path, later["run_id"], 1): json.dumps({**later, "format": FORMAT_VERSION + 1}),
        tmp_path / good["run_id"] / "notes.txt": "remember the milk",
        tmp_path / good["run_id"] / "7.json": "[1, 2]",
        tmp_path / good["run_id"] / "8.json": "\xff\xfe",
    }
    for path, text in problems.items():
        path.write_bytes(text.encode("latin-1"))
    (tmp_path / "README.md").write_text("about these runs")
    with pytest.warns(records.UnreadableRecordWarning) as warned:
        frame = records.load(tmp_path)
    assert sorted(frame["run_id"]) == sorted(row["run_id"] for row in (good, torn, later))
    assert set(frame["attempt"]) == {0}
    reported = [str(warning.message) for warning in warned]
    assert len(reported) == len(problems) == len(frame.attrs["unreadable"])
    for path in problems:
        assert sum(str(path) in message for message in reported) == 1, path
    assert any(f"format {FORMAT_VERSION + 1} is newer" in message for message in reported)
    assert records.read_latest_row(tmp_path, torn["run_id"])["attempt"] == 0


@pytest.mark.slow
def test_thousands_of_rows_load_fast(tmp_path):
    template = {**make_record(), "format": FORMAT_VERSION}
    for number in range(3000):
        row = {**template, "run_id": f"{number:016x}", "repeat": number}
        folder = tmp_path / row["run_id"]
        folder.mkdir()
        (folder / "0.json").write_text(json.dumps(row, indent=1))
    with limit_cpu_time(225):  # 77 seen
        frame = records.load(tmp_path)
    assert len(frame) == 3000
    assert frame["repeat"].nunique() == 3000
    assert {column.name: column.dtype for column in COLUMNS} == {name: str(kind) for name, kind in frame.dtypes.items()}
    assert pd.api.types.is_float_dtype(frame["tflops_per_gpu"])


WRITERS = """
import multiprocessing, sys
from bench import records

def work(writer):
    refused = 0
    for number in range(20):
        row = {"run_id": "0" * 16, "evidence": "measured", "status": "error", "started_at": "2026-01-01T00:00:00+00:00",
               "error": f"{writer} {number} " + "x" * 20000}
        while True:
            try:
                attempt = records.find_next_attempt(sys.argv[1], row["run_id"])
                records.write_row(sys.argv[1], {**row, "attempt": attempt})
                break
            except FileExistsError:
                refused += 1
    return refused

with multiprocessing.get_context("fork").Pool(16) as pool:
    print(sum(pool.map(work, range(16), chunksize=1)))
"""


@pytest.mark.slow
def test_concurrent_writers_to_one_run_lose_and_tear_nothing(tmp_path):
    store = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(store)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) > 0, "nobody ever raced, so nothing was tried"
    written = read_attempts_by_run(store)["0" * 16]
    assert [row["attempt"] for row in written] == list(range(16 * 20))
    assert sorted(row["error"].split(" x")[0] for row in written) == sorted(
        f"{writer} {number}" for writer in range(16) for number in range(20)
    )
    assert {len(row["error"].rpartition(" ")[2]) for row in written} == {20000}
    assert not list(store.glob("*/.row-*"))
    assert len(records.load(store)) == 1


def test_a_taken_attempt_stays_as_it_is(tmp_path):
    path = records.write_row(tmp_path, make_record(attempt=0))
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        records.write_row(tmp_path, make_record(attempt=0) | {"git_sha": "other"})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["0.json"]


@pytest.mark.usefixtures("no_launch")
def test_a_store_that_cannot_be_written_is_refused(capsys):
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    read_only = [mount[1] for mount in mounts if "ro" in mount[3].split(",") and Path(mount[1]).is_dir()]
    for store in [*read_only[:1], "/proc/runs", f"{__file__}/runs"]:
        assert command.main([*FAKE_MODEL_OVERRIDES, f"store={store}"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"store={store} is not valid: choose a folder that can be written to (")
        assert len(shown.err.splitlines()) == 1


# The largest batch


def search(
    fits: Callable[[int], int | None], start: int, limit: int | None, unit: int = 1
) -> tuple[int | None, list[int]]:
    """What the search finds where a batch takes so much memory (None: more than there is), and what it tried."""
    tried: dict[int, int | None] = {}
    order = []
    while (size := choose_next_batch_size(tried, start, limit, unit)) is not None:
        assert size >= 1
        assert size % unit == 0
        assert size not in tried, f"{size} again after {order}"
        assert len(order) < 60, "no end"
        tried[size] = fits(size)
        order.append(size)
    return find_largest_fitting(tried), order


def linear(limit: int, fixed: int, per_sequence: int, noise: float = 0.0) -> Callable[[int], int | None]:
    """Memory that grows with the batch, up to a share of noise that each batch always has; more than fits is None."""

    def peak(size: int) -> int | None:
        needed = (fixed + per_sequence * size) * (1 + noise * random.Random(size).uniform(-1, 1))
        return int(needed) if needed <= limit else None

    return peak


@pytest.mark.parametrize("start", [1, 4, 64, 5000])
@pytest.mark.parametrize(("fixed", "per_sequence"), [(10, 3), (100, 7), (900, 1), (0, 250), (0, 2)])
def test_the_search_finds_the_largest_batch_in_few_runs(fixed, per_sequence, start):
    limit = 1000
    found, order = search(linear(limit, fixed, per_sequence), start, limit)
    assert found == (limit - fixed) // per_sequence
    assert found in order
    assert found + 1 in order
    halvings = max(0, (start // found).bit_length() if start > found else 0)
    assert len(order) <= 8 + halvings, order


@pytest.mark.parametrize("start", [4, 64, 5000])
def test_the_search_tries_multiples_of_what_a_strategy_asks_for(start):
    found, order = search(linear(1000, 100, 7), start, 1000, unit=4)
    assert found == 128  # that fits; 132 would not, and 129 is no multiple
    assert 132 in order


@pytest.mark.parametrize("start", [1, 4, 64])
@pytest.mark.parametrize("noise", [0.001, 0.01, 0.05])
def test_the_search_ends_at_a_boundary_in_spite_of_fragmentation(noise, start):
    for per_sequence in (1, 2, 5, 11, 60):
        fits = linear(2000, 150, per_sequence, noise)
        found, order = search(fits, start, 2000)
        assert found is not None
        assert fits(found) is not None
        assert fits(found + 1) is None
        assert found + 1 in order
        assert len(order) <= 20, order


def test_the_search_knows_when_nothing_fits_and_where_the_limit_is_unknown():
    assert search(lambda size: None, 4, 1000) == (None, [4, 2, 1])
    assert search(lambda size: None, 1, None) == (None, [1])
    found, order = search(linear(1000, 100, 7), 1, None)
    assert found == 128
    assert {128, 129} <= set(order)
    assert len(order) <= 16
    constant = search(lambda size: 500 if size <= 40 else None, 1, 1000)[0]
    assert constant == 40


def test_the_search_does_not_crawl_where_reported_memory_stops_growing():
    """A caching allocator fills what there is, and flushes before it gives up."""
    for largest in (7, 100, 200, 777):
        found, order = search(lambda size: min(1000, 10 * size) if size <= largest else None, 2, 1000)  # noqa: B023
        assert found == largest
        assert len(order) <= 25, order


def test_a_search_without_an_answer_ends():
    (config,) = plan_runs("model=gpt_tiny", "strategy=single")
    tried = []

    def attempt(run: RunConfig) -> dict[str, Any]:
        tried.append(run.batch_size_per_gpu)
        return {"status": "error" if len(tried) > 2 else "ok", "peak_reserved_bytes": 10}

    assert search_largest_batch(config, attempt) is None
    assert len(tried) == 3
    assert search_largest_batch(config, lambda run: None) is None


def test_a_search_ends_at_the_most_tokens_a_run_may_have():
    """However much memory there is."""
    (config,) = plan_runs("model=gpt_tiny", "strategy=single", "sequence_length=64")
    most = MAX_TOKENS_PER_PROCESS // 64
    assert search_largest_batch(config, lambda run: {"status": "ok", "peak_reserved_bytes": 10}) == most
    (search,) = search_largest_batches(
        [config], lambda configs: [BatchTrial(1000 * run.batch_size_per_gpu, 10**15, True) for run in configs]
    )
    assert search.largest_batch_size == most


@pytest.mark.long
@pytest.mark.slow
def test_the_largest_batch_is_really_the_largest(tmp_path):
    limit_gib = 0.09
    typed = [
        "model=gpt_tiny",
        "model.num_layers=2",
        "strategy=ddp",
        "hardware=cpu",
        f"hardware.memory_limit_gib={limit_gib}",
        "batch_size_per_gpu=2",
        "sequence_length=32",
        "measurement.steps=1",
        "measurement.warmup_steps=2",
        "search=largest_batch",
        "report=false",
    ]
    found = run_sweep(tmp_path / "store", *typed)
    assert found.process.returncode == 0, found.output
    recorded = list(read_attempts_by_run(found.store).values())
    assert all(len(attempts) == 1 for attempts in recorded)
    by_size = {attempts[0]["batch_size_per_gpu"]: attempts[0] for attempts in recorded}
    assert len(by_size) == len(recorded) <= 10, sorted(by_size)  # on a CPU more than tensors counts against the limit
    assert {row["status"] for row in by_size.values()} == {"ok", "oom"}
    largest = max(size for size, row in by_size.items() if row["status"] == "ok")
    assert largest > 2
    assert by_size[largest + 1]["status"] == "oom"
    assert by_size[largest + 1]["oom_phase"] in ("forward", "backward")
    assert "Largest batch per rank that fits" in found.output
    assert found.output.splitlines()[-1].split()[-1] == str(largest)
    assert by_size[largest]["peak_allocated_bytes"] < limit_gib * 2**30
