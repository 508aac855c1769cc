"""Every way a run or a sweep can end badly, tried for real: the row it leaves, the time it takes, who is left over."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.records import Record
from tests import kills
from tests.fake_model import (
    FAKE_MODEL_OVERRIDES,
    OOM_REQUEST_BYTES,
    ROOT,
    SweepProcess,
    plan_runs,
    read_attempts_by_run,
    read_row_files,
    run_sweep,
    wait_until,
)
from tests.slurm_cluster import list_descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO_RANKS = (*FAKE_MODEL_OVERRIDES, "gpus=2", "hardware.memory_limit_gib=1")

TIME_LIMIT_S = 20

PROMPT_TIMEOUT_S = 60
"""Long enough for what takes a second or two even on a busy machine; nothing here ends by itself so soon."""


def read_only_row(store: Path, **wanted: str) -> Record:
    """The one row of the run with this fault (and whatever else is wanted), which has one attempt."""
    matching_runs = [
        attempts
        for attempts in read_attempts_by_run(store).values()
        if all({**attempts[-1], **attempts[-1]["config"]["model"]}[name] == value for name, value in wanted.items())
    ]
    assert len(matching_runs) == 1, f"{len(matching_runs)} runs with {wanted}"
    (attempts,) = matching_runs
    assert len(attempts) == 1
    return attempts[0]


def compute_duration_s(row: Record) -> float:
    """How long a run took."""
    times = [datetime.datetime.fromisoformat(row[name]) for name in ("started_at", "finished_at")]
    return (times[1] - times[0]).total_seconds()


# Out of memory

OOM_FAULTS = [
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
def out_of_memory(tmp_path_factory) -> SweepProcess:
    store = tmp_path_factory.mktemp("oom") / "store"
    return run_sweep(store, "-m", *TWO_RANKS, "strategy=ddp,fsdp", f"+model.fault={','.join(OOM_FAULTS)}")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", OOM_FAULTS)
def test_out_of_memory_is_a_row_with_phase_bytes_and_rank(out_of_memory, fault, strategy):
    row = read_only_row(out_of_memory.store, fault=fault, strategy=strategy)
    _, phase, rank, *_ = fault.partition("+")[0].split(":")
    assert row["status"] == "oom"
    assert row["oom_phase"] == phase
    assert row["oom_rank"] == int(rank)
    assert row["oom_bytes"] == OOM_REQUEST_BYTES
    assert "can't allocate memory" in row["error"]
    assert row["memory_limit_bytes"] == 2**30
    assert row.get("step_time_median_s") is None
    assert compute_duration_s(row) <= PROMPT_TIMEOUT_S


def test_the_other_rank_only_lost_its_connection(out_of_memory):
    row = read_only_row(out_of_memory.store, fault="oom:forward:1", strategy="ddp")
    other, struck = row["ranks"]
    assert struck["status"] == "oom"
    assert other["status"] == "error"
    assert "onnection" in other["error"]
    log = out_of_memory.store / row["run_id"] / "0.log"
    assert "Traceback" in log.read_text()


def test_a_rank_that_never_noticed_is_in_the_row_with_its_phase(out_of_memory):
    row = read_only_row(out_of_memory.store, fault="oom:forward:1+hang:forward:0", strategy="ddp")
    hanging, struck = row["ranks"]
    assert (hanging["status"], hanging["phase"], struck["status"]) == ("killed", "forward", "oom")
    assert hanging["host"] == struck["host"]


def test_a_sweep_of_runs_out_of_memory_is_complete(out_of_memory):
    assert out_of_memory.process.returncode == 0
    assert "Traceback" not in out_of_memory.output


# Errors and hangs

ERROR_MESSAGES = {
    "raise:init:0": ("rank 0, init: ArithmeticError: the fake model was told to fail",),
    "raise:forward:1": ("rank 1, forward: ArithmeticError: the fake model was told to fail",),
    "raise:optimizer:0:4": ("rank 0, optimizer: ArithmeticError: the fake model was told to fail",),
    "raise:forward:1+hang:forward:0": ("rank 1, forward: ArithmeticError",),
    "kill:backward:1": ("rank 1 was killed by SIGKILL",),
    "kill:init:0": ("rank 0 was killed by SIGKILL",),
    "exit:forward:0": ("rank 0 ended with exit code 3",),
    "leave:optimizer:1": ("rank 1", "SystemExit"),
}
HANG_FAULTS = ["stubborn:forward:1"]


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> SweepProcess:
    """Failures and hangs, each with a run after it that is well."""
    store = tmp_path_factory.mktemp("errors") / "store"
    faults = ",".join([*ERROR_MESSAGES, *HANG_FAULTS, "none"])
    return run_sweep(
        store, "-m", *TWO_RANKS, "strategy=ddp", f"+model.fault={faults}", f"cluster.time_limit_s={TIME_LIMIT_S}"
    )


@pytest.mark.long
@pytest.mark.parametrize("fault", ERROR_MESSAGES)
def test_a_failing_rank_is_an_error_that_names_it(failing, fault):
    row = read_only_row(failing.store, fault=fault)
    assert row["status"] == "error"
    for part in ERROR_MESSAGES[fault]:
        assert part in row["error"]
    assert "\n" not in row["error"]
    assert row.get("oom_phase") is None
    assert compute_duration_s(row) < TIME_LIMIT_S


@pytest.mark.parametrize("fault", HANG_FAULTS)
def test_a_run_that_hangs_is_over_at_its_time_limit(failing, fault):
    row = read_only_row(failing.store, fault=fault)
    assert row["status"] == "timeout"
    assert {rank["status"] for rank in row["ranks"]} == {"killed"}
    assert f"{TIME_LIMIT_S} s" in row["error"]
    assert TIME_LIMIT_S - 1 <= compute_duration_s(row) <= TIME_LIMIT_S + PROMPT_TIMEOUT_S


def test_the_sweep_goes_on_after_every_failure(failing):
    assert read_only_row(failing.store, fault="none")["status"] == "ok"
    assert len(read_attempts_by_run(failing.store)) == len(ERROR_MESSAGES) + len(HANG_FAULTS) + 1
    assert failing.process.returncode == 1
    assert failing.output.count("\nerror ") == len(ERROR_MESSAGES)
    assert failing.output.count("\ntimeout ") == len(HANG_FAULTS)
    assert "Traceback" not in failing.output


# Sweeps that are killed

NUM_RUNS = 6
SLOW_SWEEP = (
    "-m",
    *FAKE_MODEL_OVERRIDES,
    "strategy=ddp",
    "gpus=2",
    "+model.step_s=0.6",
    f"repeat={','.join(str(n) for n in range(NUM_RUNS))}",
)
"""A sweep whose runs sleep for three seconds each."""


class InterruptedStore:
    """A store on which one sweep is interrupted again and again."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.run_ids = [config.run_id for config in plan_runs(*SLOW_SWEEP[1:])]

    def list_unfinished_runs(self) -> list[str]:
        """Runs without a result, in the order they will run."""
        recorded = read_attempts_by_run(self.store)
        return [
            run for run in self.run_ids if not recorded.get(run) or recorded[run][-1]["status"] not in ("ok", "oom")
        ]

    def start_until_run_trains(self, position: int) -> tuple[SweepProcess, str]:
        """Start the sweep and wait until the run at some position of those unfinished trains; returns that run."""
        run = self.list_unfinished_runs()[position]
        before = set((self.store / run).glob("*.log"))
        process = SweepProcess(self.store, *SLOW_SWEEP)

        def has_started_training() -> bool:
            return any("forward" in log.read_text() for log in set((self.store / run).glob("*.log")) - before)

        if not wait_until(has_started_training, 180):
            process.clean_up()
            raise AssertionError(f"run {run} did not start:\n{process.output}")
        return process, run


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> InterruptedStore:
    return InterruptedStore(tmp_path_factory.mktemp("interrupted") / "store")


@pytest.fixture
def cleaning() -> Iterator[list[SweepProcess]]:
    """Sweeps of a test that may end with them running."""
    started: list[SweepProcess] = []
    yield started
    for process in started:
        process.clean_up()


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Ctrl-C", "SIGTERM of everything"])
def test_a_stopped_sweep_ends_at_once_and_loses_nothing(interrupted, cleaning, how):
    signal_number = signal.SIGTERM if "SIGTERM" in how else signal.SIGINT
    first = "SIGTERM" in how  # one run more for half of these, which takes its time
    process, current = interrupted.start_until_run_trains(1 if first else 0)
    cleaning.append(process)
    finished = read_row_files(interrupted.store)
    if how in ("Ctrl-C", "SIGTERM of everything"):  # the whole process group gets it, as from a terminal
        os.killpg(process.process.pid, signal_number)
    else:
        process.process.send_signal(signal_number)
    assert process.wait(PROMPT_TIMEOUT_S) == 1
    assert not process.wait_for_leftover_pids(PROMPT_TIMEOUT_S)
    after = read_row_files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert len(after) == len(finished) + 1  # it did not go on to the next run
    current_rows = read_attempts_by_run(interrupted.store)[current]
    assert current_rows[-1]["status"] == "preempted"
    assert current_rows[-1]["error"].startswith("stopped by SIG")
    assert f"Stopped by {signal_number.name}" in process.output
    assert "Traceback" not in process.output


@pytest.mark.long
def test_a_killed_sweep_finishes_its_current_run_and_no_other(interrupted, cleaning):
    process, current = interrupted.start_until_run_trains(0)
    cleaning.append(process)
    finished = read_row_files(interrupted.store)
    process.process.kill()
    process.wait(PROMPT_TIMEOUT_S)
    assert not process.wait_for_leftover_pids(PROMPT_TIMEOUT_S)
    after = read_row_files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert len(after) == len(finished) + 1
    assert read_attempts_by_run(interrupted.store)[current][-1]["status"] == "ok"


@pytest.mark.long
def test_a_sweep_outlives_its_job_and_says_which_run_was_lost(interrupted, cleaning):
    process, current = interrupted.start_until_run_trains(0)
    cleaning.append(process)
    finished = read_row_files(interrupted.store)
    following = interrupted.list_unfinished_runs()[1]
    (job,) = [number for number in process.list_pids("submitit.core._submit") if has_controller_parent(number)]
    os.kill(job, signal.SIGKILL)
    assert wait_until(lambda: "lost" in process.output, PROMPT_TIMEOUT_S), process.output
    assert process.wait(180) == 1
    assert not process.wait_for_leftover_pids(PROMPT_TIMEOUT_S)
    lost = [line for line in process.output.splitlines() if line.startswith("lost")]
    assert len(lost) == 1
    assert "gpt_tiny ddp fp32 x2" in lost[0]
    assert "its job was killed or crashed" in lost[0]
    recorded = read_attempts_by_run(interrupted.store)
    assert recorded[current][-1]["status"] == "error"
    assert "its job was killed or crashed" in recorded[current][-1]["error"]
    assert recorded[following][-1]["status"] == "ok"
    after = read_row_files(interrupted.store)
    assert {path: after[path] for path in finished} == finished


@pytest.mark.long
def test_a_killed_controller_leaves_its_job_at_work_alone(interrupted, cleaning):
    process, current = interrupted.start_until_run_trains(0)
    cleaning.append(process)
    attempts = len(read_attempts_by_run(interrupted.store).get(current, []))
    (controller,) = process.list_pids("submitit.local._local")
    (job,) = [number for number in process.list_pids("submitit.core._submit") if has_controller_parent(number)]
    os.kill(controller, signal.SIGKILL)
    beside: set[int] = set()

    def has_ended() -> bool:
        ranks = list_descendants([job])  # of this run, or of a next one of the job's
        others = set(process.list_pids("submitit.")) - {job, controller, *ranks}
        beside.update(others - set(list_descendants([job])))
        return process.process.poll() is not None

    assert wait_until(has_ended, 180)
    assert process.process.returncode == 0, process.output
    assert not beside
    assert len(read_attempts_by_run(interrupted.store)[current]) == attempts + 1
    assert read_attempts_by_run(interrupted.store)[current][-1]["status"] == "ok"
    assert not process.wait_for_leftover_pids(PROMPT_TIMEOUT_S)


def has_controller_parent(pid: int) -> bool:
    """Whether a process's parent is submitit's controller: of a job's processes that is the job, not its ranks."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
    return b"submitit.local._local" in Path(f"/proc/{parent}/cmdline").read_bytes()


def test_the_same_command_completes_what_was_interrupted(interrupted):
    """Whatever the tests before have done to it: every run ends with one result, and no result is repeated."""
    finished = read_row_files(interrupted.store)
    process = run_sweep(interrupted.store, *SLOW_SWEEP)
    assert process.process.returncode == 0, process.output
    recorded = read_attempts_by_run(interrupted.store)
    assert set(recorded) == set(interrupted.run_ids)
    for attempts in recorded.values():
        assert [row["status"] for row in attempts].count("ok") == 1
        assert attempts[-1]["status"] == "ok"
        assert [row["attempt"] for row in attempts] == list(range(len(attempts)))
    after = read_row_files(interrupted.store)
    assert {path: after[path] for path in finished} == finished
    assert not list(ROOT.glob("core*"))


# --- A few of the kills of ``make kills``, the same ones each time.


@pytest.mark.long
@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(capsys):
    assert kills.main(["--on", "local", "--kills", "2", "--runs", "2", "--seed", "12"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("This machine: 2 kills")
    assert "0 rows lost, 0 measured twice, 0 processes left" in output
