"""Every way a run or a sweep can end badly, tried for real: the row it leaves, the time it takes, who is left over."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.records import Record
from tests.fake_model import (
    HUGE_BYTES,
    OVERRIDES,
    ROOT,
    Sweep,
    files,
    planned,
    rows,
    sweep,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO_RANKS = (*OVERRIDES, "gpus=2", "hardware.memory_limit_gib=1")

TIME_LIMIT_S = 20

AT_ONCE_S = 60
"""Long enough for what takes a second or two even on a busy machine; nothing here ends by itself so soon."""


def only_row(store: Path, **wanted: str) -> Record:
    """The one row of the run with this fault (and whatever else is wanted), which has one attempt."""
    found = [
        attempts
        for attempts in rows(store).values()
        if all({**attempts[-1], **attempts[-1]["config"]["model"]}[name] == value for name, value in wanted.items())
    ]
    assert len(found) == 1, f"{len(found)} runs with {wanted}"
    (attempts,) = found
    assert len(attempts) == 1
    return attempts[0]


def seconds(row: Record) -> float:
    """How long a run took."""
    times = [datetime.datetime.fromisoformat(row[name]) for name in ("started_at", "finished_at")]
    return (times[1] - times[0]).total_seconds()


# Out of memory

OOMS = [
    f"oom:{where}"
    for where in (
        "init:0",
        "init:1",
        "forward:1",
        "backward:0",
        "optimizer:1",
        "forward:1:4",
        "forward:1+hang:forward:0",
    )
]
"""The fifth step is the first that is timed. In the last the other rank never comes to notice."""


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory) -> Sweep:
    store = tmp_path_factory.mktemp("oom") / "store"
    return sweep(store, "-m", *TWO_RANKS, "strategy=ddp,fsdp", f"+model.fault={','.join(OOMS)}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", OOMS)
def test_out_of_memory_is_a_row_with_phase_bytes_and_rank(out_of_memory, fault, strategy):
    row = only_row(out_of_memory.store, fault=fault, strategy=strategy)
    _, phase, rank, *_ = fault.partition("+")[0].split(":")
    assert row["status"] == "oom"
    assert row["oom_phase"] == phase
    assert row["oom_rank"] == int(rank)
    assert row["oom_bytes"] == HUGE_BYTES
    assert "can't allocate memory" in row["error"]
    assert row["memory_limit_bytes"] == 2**30
    assert row.get("step_time_median_s") is None
    assert seconds(row) <= AT_ONCE_S


def test_the_other_rank_only_lost_its_connection(out_of_memory):
    row = only_row(out_of_memory.store, fault="oom:forward:1", strategy="ddp")
    other, struck = row["ranks"]
    assert struck["status"] == "oom"
    assert other["status"] == "error"
    assert "onnection" in other["error"]
    log = out_of_memory.store / row["run_id"] / "0.log"
    assert "Traceback" in log.read_text()


def test_a_sweep_of_runs_out_of_memory_is_complete(out_of_memory):
    assert out_of_memory.process.returncode == 0
    assert "Traceback" not in out_of_memory.output


# Errors and hangs

ERRORS = {
    "raise:init:0": ("rank 0, init: ArithmeticError: the fake model was told to fail",),
    "raise:forward:1": ("rank 1, forward: ArithmeticError: the fake model was told to fail",),
    "raise:optimizer:0:4": ("rank 0, optimizer: ArithmeticError: the fake model was told to fail",),
    "raise:forward:1+hang:forward:0": ("rank 1, forward: ArithmeticError",),
    "kill:backward:1": ("rank 1 was killed by SIGKILL",),
    "kill:init:0": ("rank 0 was killed by SIGKILL",),
    "exit:forward:0": ("rank 0 ended with exit code 3",),
    "leave:optimizer:1": ("rank 1", "SystemExit"),
}
HANGS = ["stubborn:forward:1"]


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> Sweep:
    """Failures and hangs, each with a run after it that is well."""
    store = tmp_path_factory.mktemp("errors") / "store"
    faults = ",".join([*ERRORS, *HANGS, "none"])
    return sweep(
        store, "-m", *TWO_RANKS, "strategy=ddp", f"+model.fault={faults}", f"cluster.time_limit_s={TIME_LIMIT_S}"
    )


@pytest.mark.parametrize("fault", ERRORS)
def test_a_failing_rank_is_an_error_that_names_it(failing, fault):
    row = only_row(failing.store, fault=fault)
    assert row["status"] == "error"
    for part in ERRORS[fault]:
        assert part in row["error"]
    assert "\n" not in row["error"]
    assert row.get("oom_phase") is None
    assert seconds(row) < TIME_LIMIT_S


@pytest.mark.parametrize("fault", HANGS)
def test_a_run_that_hangs_is_over_at_its_time_limit(failing, fault):
    row = only_row(failing.store, fault=fault)
    assert row["status"] == "timeout"
    assert f"{TIME_LIMIT_S} s" in row["error"]
    assert TIME_LIMIT_S - 1 <= seconds(row) <= TIME_LIMIT_S + AT_ONCE_S


def test_the_sweep_goes_on_after_every_failure(failing):
    assert only_row(failing.store, fault="none")["status"] == "ok"
    assert len(rows(failing.store)) == len(ERRORS) + len(HANGS) + 1
    assert failing.process.returncode == 1
    assert failing.output.count("\nerror ") == len(ERRORS)
    assert failing.output.count("\ntimeout ") == len(HANGS)
    assert "Traceback" not in failing.output


# Sweeps that are killed

NUM_RUNS = 6
PATIENT = (
    "-m",
    *OVERRIDES,
    "strategy=ddp",
    "gpus=2",
    "+model.step_s=0.6",
    f"repeat={','.join(str(n) for n in range(NUM_RUNS))}",
)
"""A sweep whose runs sleep for three seconds each."""


class Interrupted:
    """A store on which one sweep is interrupted again and again."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.order = [config.run_id for config in planned(*PATIENT[1:])]

    def unfinished(self) -> list[str]:
        """Runs without a result, in the order they will run."""
        recorded = rows(self.store)
        return [run for run in self.order if not recorded.get(run) or recorded[run][-1]["status"] not in ("ok", "oom")]

    def start_into(self, position: int) -> tuple[Sweep, str]:
        """Start the sweep and wait until the run at some position of those unfinished trains; returns that run."""
        run = self.unfinished()[position]
        before = set((self.store / run).glob("*.log"))
        process = Sweep(self.store, *PATIENT)

        def trains() -> bool:
            return any("forward" in log.read_text() for log in set((self.store / run).glob("*.log")) - before)

        if not wait_until(trains, 180):
            process.clean_up()
            raise AssertionError(f"run {run} did not start:\n{process.output}")
        return process, run


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Interrupted:
    return Interrupted(tmp_path_factory.mktemp("interrupted") / "store")


@pytest.fixture
def cleaning() -> Iterator[list[Sweep]]:
    """Sweeps of a test that may end with them running."""
    started: list[Sweep] = []
    yield started
    for process in started:
        process.clean_up()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Ctrl-C", "SIGTERM of everything"])
def test_a_stopped_sweep_ends_at_once_and_loses_nothing(interrupted, cleaning, how):
    number = signal.SIGTERM if "SIGTERM" in how else signal.SIGINT
    first = "SIGTERM" in how  # one run more for half of these, which takes its time
    process, current = interrupted.start_into(1 if first else 0)
    cleaning.append(process)
    finished = files(interrupted.store)
    if how in ("Ctrl-C", "SIGTERM of everything"):  # the whole process group gets it, as from a terminal
        os.killpg(process.process.pid, number)
    else:
        process.process.send_signal(number)
    assert process.wait(AT_ONCE_S) == 1
    assert not process.left(AT_ONCE_S)
    after = files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert len(after) == len(finished) + 1  # it did not go on to the next run
    current_rows = rows(interrupted.store)[current]
    assert current_rows[-1]["status"] == "preempted"
    assert current_rows[-1]["error"].startswith("stopped by SIG")
    assert f"Stopped by {number.name}" in process.output
    assert "Traceback" not in process.output


def test_a_killed_sweep_finishes_its_current_run_and_no_other(interrupted, cleaning):
    process, current = interrupted.start_into(0)
    cleaning.append(process)
    finished = files(interrupted.store)
    process.process.kill()
    process.wait(AT_ONCE_S)
    assert not process.left(AT_ONCE_S)
    after = files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert len(after) == len(finished) + 1
    assert rows(interrupted.store)[current][-1]["status"] == "ok"


def test_a_sweep_outlives_its_job_and_says_which_run_was_lost(interrupted, cleaning):
    process, current = interrupted.start_into(0)
    cleaning.append(process)
    finished = files(interrupted.store)
    following = interrupted.unfinished()[1]
    (job,) = [number for number in process.processes("submitit.core._submit") if parent_runs_job(number)]
    os.kill(job, signal.SIGKILL)
    assert wait_until(lambda: "lost" in process.output, AT_ONCE_S), process.output
    assert process.wait(180) == 1
    assert not process.left(AT_ONCE_S)
    lost = [line for line in process.output.splitlines() if line.startswith("lost")]
    assert len(lost) == 1
    assert "gpt_tiny ddp fp32 x2" in lost[0]
    assert "its job was killed or crashed" in lost[0]
    recorded = rows(interrupted.store)
    assert recorded[current][-1]["status"] == "error"
    assert "its job was killed or crashed" in recorded[current][-1]["error"]
    assert recorded[following][-1]["status"] == "ok"
    after = files(interrupted.store)
    assert {path: after[path] for path in finished} == finished


def test_a_killed_controller_leaves_its_job_at_work_alone(interrupted, cleaning):
    process, current = interrupted.start_into(0)
    cleaning.append(process)
    attempts = len(rows(interrupted.store).get(current, []))
    (controller,) = process.processes("submitit.local._local")
    (job,) = [number for number in process.processes("submitit.core._submit") if parent_runs_job(number)]
    ranks = {number for number in process.processes("submitit.core._submit") if number != job}
    os.kill(controller, signal.SIGKILL)
    beside: set[int] = set()

    def ended() -> bool:
        beside.update(set(process.processes("submitit.")) - ranks - {job, controller})
        return process.process.poll() is not None

    assert wait_until(ended, 180)
    assert process.process.returncode == 0, process.output
    assert not beside
    assert len(rows(interrupted.store)[current]) == attempts + 1
    assert rows(interrupted.store)[current][-1]["status"] == "ok"
    assert not process.left(AT_ONCE_S)


def parent_runs_job(number: int) -> bool:
    """Whether a process's parent is submitit's controller: of a job's processes that is the job, not its ranks."""
    status = Path(f"/proc/{number}/status").read_text()
    parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    return b"submitit.local._local" in Path(f"/proc/{parent}/cmdline").read_bytes()


def test_the_same_command_completes_what_was_interrupted(interrupted):
    """Whatever the tests before have done to it: every run ends with one result, and no result is repeated."""
    finished = files(interrupted.store)
    process = sweep(interrupted.store, *PATIENT)
    assert process.process.returncode == 0, process.output
    recorded = rows(interrupted.store)
    assert set(recorded) == set(interrupted.order)
    for attempts in recorded.values():
        assert [row["status"] for row in attempts].count("ok") == 1
        assert attempts[-1]["status"] == "ok"
        assert [row["attempt"] for row in attempts] == list(range(len(attempts)))
    after = files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert not list(ROOT.glob("core*"))
