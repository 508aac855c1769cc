"""Every way a sweep on a cluster can go wrong, tried for real: what the rows say, who is disturbed, what is left over.

Each test ends with the command that started it: it submits what has no result, and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import bench.sweep
from bench import records
from bench.launch.slurm import submissions
from bench.records import Record, claims
from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    LONG_RUN,
    TWO_NODES,
    call_main,
    check_no_processes,
    find_run_attempts,
    format_store_override,
    list_job_processes,
    run_jobs_command,
    submit_sweep,
    wait_for_training,
)
from tests.fake_model import OOM_REQUEST_BYTES, ROOT, read_attempts_by_run, read_row_files, wait_until
from tests.slurm_cluster import (
    NODE_NAMES,
    SLURM_TIMEOUT_S,
    SlurmTestCluster,
    list_descendants,
    make_idle,
    read_start_ticks,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = (*FAKE_MODEL_RUN, "cluster=slurm_test", "cluster.gpus_per_node=1", "gpus=2")
"""A run on two nodes, one rank on each."""

STEPS = 9

SLEEPY = (*TWO_RANKS, "+model.step_s=0.4", f"measurement.steps={STEPS}")
"""The same, long enough to be held up by `hold`, short enough to wait for."""


@dataclass(frozen=True)
class Run:
    """A run, and the job that a submission made of it."""

    store: Path
    run_id: str
    job_id: str

    @property
    def rows(self) -> list[Record]:
        """All its attempts."""
        return [
            records.read_row(records.get_row_path(self.store, self.run_id, attempt))
            for attempt in records.list_attempts(self.store, self.run_id)
        ]

    @property
    def statuses(self) -> list[str]:
        return [row["status"] for row in self.rows]

    def trains(self, attempt: int = 0) -> bool:
        """Whether an attempt is past its first forward pass, on both of its nodes."""
        logs = [self.store / self.run_id / f"{attempt}.node{node}.log" for node in (0, 1)]
        return all(log.exists() and "forward" in log.read_text() for log in logs)

    @property
    def nodes(self) -> list[str]:
        """Where it runs; its leader on the first."""
        claim = claims.find_claim(self.store, self.run_id)
        assert claim is not None
        return str(claim.row["hosts"]).split(",")

    def task(self, rank: int) -> int:
        """The process that watches over a rank; the first of them leads."""
        array, _, element = self.job_id.partition("_")
        job = (
            {f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={element}"} if element else {f"SLURM_JOB_ID={array}"}
        )
        found = []
        for process in list_job_processes(os.environ["SLURM_CONF"]):
            with contextlib.suppress(OSError):
                variables = set(Path(f"/proc/{process}/environ").read_bytes().decode().split("\0"))
                program = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
                if {*job, f"SLURM_PROCID={rank}"} <= variables and "srun" not in program[0] and "-m" in program:
                    found.append(process)
        (task,) = set(found) - set(list_descendants(found))
        return task

    def rank(self, rank: int) -> int:
        """The process of a rank; not of the first, whose watcher has other children too."""
        (process,) = list_descendants([self.task(rank)])
        return process

    @property
    def meeting_point(self) -> int:
        """The process of the store in which its ranks find each other: the first that the leader starts."""
        return min(list_descendants([self.task(0)]), key=read_start_ticks)


def submitted(store: Path) -> list[Run]:
    """What the newest submission from a store consists of."""
    newest = submissions.list_submissions(store, include_closed=True)[-1]
    found = []
    for array in newest.arrays:
        job_id = newest.read_job_id(array)
        assert job_id is not None
        found += [Run(store, entry.run_id, array.build_element_id(job_id, i)) for i, entry in enumerate(array.entries)]
    return found


def submit_again(store: Path, *command: str) -> list[Run]:
    """Give the same command once more; returns what it submitted, which may be nothing."""
    before = len(submissions.list_submissions(store, include_closed=True))
    submit_sweep(store, *command)
    return submitted(store) if len(submissions.list_submissions(store, include_closed=True)) > before else []


def over(cluster: SlurmTestCluster, store: Path, limit: float = 300) -> None:
    """Wait until no job of a store is in the queue."""
    names = [
        array.job_name
        for submission in submissions.list_submissions(store, include_closed=True)
        for array in submission.arrays
    ]

    def gone() -> bool:
        return not {line.strip() for line in cluster.squeue("-o", "%j")} & set(names)

    cluster.wait_for(f"the end of all jobs of {store}", gone, limit)


def hold(cluster: SlurmTestCluster, *runs: Run, attempt: int = 0) -> None:
    """Let runs train, and have each go on for ever from then on, until `let_go`."""
    for run in runs:
        cluster.wait_for(f"{run} to train", lambda: run.trains(attempt), timeout_s=240)  # noqa: B023
        os.kill(run.rank(1), signal.SIGSTOP)


def let_go(*runs: Run) -> None:
    for run in runs:
        os.kill(run.rank(1), signal.SIGCONT)


def check_nothing_left(cluster: SlurmTestCluster, *stores: Path) -> None:
    """No job, no process, no claim and no file of an unfinished row."""
    cluster.wait_for("an empty queue", lambda: not cluster.squeue())
    check_no_processes(os.environ["SLURM_CONF"])
    for store in stores:
        left = [
            (store / claims.CLAIMS_FOLDER / f"{run_id}.claim").read_text() for run_id in claims.list_claimed_runs(store)
        ]
        assert left == [], cluster.run("sacct", "--duplicates", check=False)
        assert list(store.glob("*/.row-*")) == []


def check_whole(row: Record, ranks: int = 2, steps: int = STEPS) -> None:
    """An undisturbed result: every timed step of every rank."""
    assert row["status"] == "ok", row["error"]
    assert [len(rank["step_times_s"]) for rank in row["ranks"]] == [steps] * ranks


def seconds(row: Record) -> float:
    """How long an attempt took."""
    times = [datetime.datetime.fromisoformat(row[name]) for name in ("started_at", "finished_at")]
    return (times[1] - times[0]).total_seconds()


@contextlib.contextmanager
def running(log: Path, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m module arguments`` in a session of its own, its output in a file; killed at the end at the latest."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# What goes wrong inside the processes: out of memory, killed

FAULTS = {"out of memory": "oom:forward:3", "killed": "kill:backward:2", "well": "none"}


@dataclass
class Twice:
    """What a command submitted, what it had come to when the same command was given again, and what that submitted."""

    store: Path
    runs: dict[str, Run]
    first: dict[str, list[Record]]
    again: list[Run]
    kept: bool
    """Whether the rows of before were left as they were."""


@pytest.fixture(scope="module")
def failing(slurm: SlurmTestCluster, tmp_path_factory: pytest.TempPathFactory) -> Twice:
    """Runs of four ranks on two nodes, one after the other."""
    make_idle(slurm)
    store = tmp_path_factory.mktemp("failing") / "store"
    command = (*FAKE_MODEL_RUN, *TWO_NODES, "hardware.memory_limit_gib=1", f"+model.fault={','.join(FAULTS.values())}")
    submit_sweep(store, *command)
    runs = dict(zip(FAULTS, submitted(store), strict=True))
    over(slurm, store)
    first = {name: run.rows for name, run in runs.items()}
    check_nothing_left(slurm, store)
    before = read_row_files(store)
    again = submit_again(store, *command)
    over(slurm, store)
    check_nothing_left(slurm, store)
    after = read_row_files(store)
    return Twice(store, runs, first, again, {path: after[path] for path in before} == before)


def test_out_of_memory_on_one_rank_of_one_node_is_a_result(failing):
    (row,) = failing.first["out of memory"]
    assert row["status"] == "oom"
    assert (row["oom_phase"], row["oom_rank"], row["oom_bytes"]) == ("forward", 3, OOM_REQUEST_BYTES)
    assert "can't allocate memory" in row["error"]
    assert row["job_id"] == failing.runs["out of memory"].job_id
    assert row["hosts"] == f"{NODE_NAMES[0]},{NODE_NAMES[1]}"
    assert [rank["host"] for rank in row["ranks"]] == [NODE_NAMES[0]] * 2 + [NODE_NAMES[1]] * 2
    statuses = [rank["status"] for rank in row["ranks"]]
    assert statuses[3] == "oom"
    assert set(statuses[:3]) <= {"error", "killed"}  # on a busy machine one may be killed before it says what it lost
    assert seconds(row) <= 120
    assert "Traceback" in (failing.store / row["run_id"] / "0.node1.log").read_text()


def test_a_killed_rank_is_an_error_that_names_it(failing):
    (row,) = failing.first["killed"]
    assert row["status"] == "error"
    assert row["error"].partition("; ")[0] == "rank 2 was killed by SIGKILL"  # behind it what the others noticed
    assert row["job_id"] == failing.runs["killed"].job_id
    assert seconds(row) <= 120


def test_the_array_goes_on_after_failures(failing):
    (row,) = failing.first["well"]
    check_whole(row, ranks=4, steps=1)


def test_the_same_command_repeats_what_failed_and_nothing_else(failing):
    killed = failing.runs["killed"]
    assert [run.run_id for run in failing.again] == [killed.run_id]
    assert killed.statuses == ["error", "error"]
    assert killed.rows[1]["job_id"] == failing.again[0].job_id != killed.job_id
    assert failing.kept


# What goes wrong from outside, while several runs are on. Waiting for time limits takes a minute and more, so these
# two sweeps share it.

STRUCK = {
    "untouched": lambda run, cluster: None,
    "leader killed": lambda run, cluster: os.kill(run.task(0), signal.SIGKILL),
    "follower killed": lambda run, cluster: os.kill(run.task(1), signal.SIGKILL),
    "rank killed": lambda run, cluster: os.kill(run.rank(1), signal.SIGKILL),
    "store killed": lambda run, cluster: os.kill(run.meeting_point, signal.SIGKILL),
    "cancelled": lambda run, cluster: cluster.run("scancel", run.job_id),
    "requeued": lambda run, cluster: cluster.scontrol("requeue", run.job_id),
}

LIMITED = {
    "hanging": lambda run, cluster: keep_stopped(run.rank(1)),
    "deaf": lambda run, cluster: (keep_stopped(run.rank(1)), keep_stopped(run.task(0))),
}
"""Under a time limit of a minute. Of the last nobody is there to notice that time is up, or to write the row.

Its leader alone would not do: SLURM has it continue, for a moment that may be enough to write the row of a whole run.
"""


STOPPER = """
import os, signal, sys, time
if os.geteuid() == 0:
    os.nice(-20)  # others may keep the processors busy just when SLURM has the process continue
try:
    while open(f"/proc/{sys.argv[1]}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
        for _ in range(100):
            os.kill(int(sys.argv[1]), signal.SIGSTOP)
            time.sleep(0.001)
except (FileNotFoundError, ProcessLookupError):
    pass
"""


def keep_stopped(process: int) -> None:
    """Stop a process, and again whenever SLURM has it continue, as it does before it sends a signal."""
    stopper = subprocess.Popen([sys.executable, "-c", STOPPER, str(process)])
    threading.Thread(target=stopper.wait, daemon=True).start()


class Ordeal:
    """A sweep of which each run has a fate of its own, and the same command once more."""

    def __init__(
        self, cluster: SlurmTestCluster, store: Path, fates: Mapping[str, Callable[..., object]], *overrides: str
    ):
        self.cluster, self.store, self.fates = cluster, store, fates
        repeats = ",".join(str(number) for number in range(len(fates)))
        self.command = (*SLEEPY, f"cluster.parallelism={len(fates)}", f"repeat={repeats}", *overrides)

    def submit(self) -> None:
        submit_sweep(self.store, *self.command)
        self.runs = dict(zip(self.fates, submitted(self.store), strict=True))

    def warn(self) -> None:
        """Send what SLURM sends some time before a limit, at all moments from Python's start until all train."""

        def starting(run: Run) -> bool:
            logs = self.store.glob(f".jobs/*/*/{run.job_id}_?_log.out")
            return sum("Starting" in log.read_text() for log in logs) == 2

        def training() -> bool:
            for run in runs:
                if starting(run) and not run.trains():
                    self.cluster.run("scancel", "--signal=USR2", run.job_id)
                assert not run.rows, f"{run}: {run.rows[-1]['error']}"
            return all(run.trains() for run in runs)

        runs = self.runs.values()
        self.cluster.wait_for("all runs to train", training, timeout_s=240)

    def strike(self) -> None:
        """Let everything train, and what is to befall it befall it at once."""
        left = dict(self.fates)

        def struck() -> bool:
            for name in [name for name in left if self.runs[name].trains()]:
                left.pop(name)(self.runs[name], self.cluster)
            return not left

        self.cluster.wait_for("all runs to train", struck, timeout_s=240)

    def collect(self) -> None:
        """Wait for the end, and look at it from another shell."""
        over(self.cluster, self.store)
        self.collected = run_jobs_command("collect", self.store)
        self.first = {name: run.rows for name, run in self.runs.items()}
        self.before = read_row_files(self.store)

    def again(self, *overrides: str) -> None:
        self.repeated = {run.run_id: run for run in submit_again(self.store, *self.command, *overrides)}

    @property
    def names_repeated(self) -> set[str]:
        return {name for name, run in self.runs.items() if run.run_id in self.repeated}

    def complete(self) -> None:
        """Wait for the end of what was repeated."""
        over(self.cluster, self.store)
        after = read_row_files(self.store)
        self.kept = {path: after[path] for path in self.before} == self.before


@pytest.fixture(scope="module")
def ordeals(slurm: SlurmTestCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ordeal]:
    make_idle(slurm)
    folder = tmp_path_factory.mktemp("ordeals")
    limited = Ordeal(slurm, folder / "limited", LIMITED, "cluster.time_limit_min=1")
    struck = Ordeal(slurm, folder / "struck", STRUCK)
    limited.submit()
    limited.warn()
    limited.strike()
    struck.submit()
    struck.strike()
    struck.collect()
    struck.again()
    limited.collect()
    limited.again("cluster.time_limit_min=5")
    for ordeal in (struck, limited):
        ordeal.complete()
    check_nothing_left(slurm, limited.store, struck.store)
    return {"struck": struck, "limited": limited}


@pytest.fixture(scope="module")
def struck(ordeals: dict[str, Ordeal]) -> Ordeal:
    return ordeals["struck"]


@pytest.fixture(scope="module")
def limited(ordeals: dict[str, Ordeal]) -> Ordeal:
    return ordeals["limited"]


ENDS = {
    "leader killed": ("error", "SLURM ended job {job}: FAILED on testnode[1-2], exit code"),
    "follower killed": ("error", "rank 1 on testnode2 has not been heard of again: its node or its processes are gone"),
    "rank killed": ("error", "rank 1 was killed by SIGKILL"),
    "store killed": ("error", "the store in which its ranks find each other was killed"),
    "cancelled": ("preempted", "stopped by SIGTERM: the job was cancelled"),
}


@pytest.mark.parametrize("fate", ENDS)
def test_what_ends_a_run_from_outside_is_in_its_row(struck, fate):
    (row,) = struck.first[fate]
    status, words = ENDS[fate]
    assert (row["status"], row["attempt"]) == (status, 0)
    assert words.format(job=struck.runs[fate].job_id) in row["error"]
    assert "\n" not in row["error"]
    assert row["job_id"] == struck.runs[fate].job_id
    assert row["hosts"] == "testnode1,testnode2"


def test_a_requeued_run_starts_afresh_as_another_attempt(struck):
    first, second = struck.first["requeued"]
    assert first["status"] == "preempted"
    assert "the job was taken off its nodes to start anew" in first["error"]
    check_whole(second)
    assert first["job_id"] == second["job_id"] == struck.runs["requeued"].job_id
    assert [row["environment"]["slurm"]["restart"] for row in (first, second)] == [0, 1]


def test_the_run_beside_them_is_not_disturbed(struck):
    (row,) = struck.first["untouched"]
    check_whole(row)
    assert row["concurrent_runs"] >= 2


def test_another_shell_says_what_failed(struck, limited):
    assert struck.collected.returncode == limited.collected.returncode == 1
    assert "2 done, 5 failed" in struck.collected.stdout
    assert "0 done, 2 failed" in limited.collected.stdout
    for fate in ENDS:
        assert ENDS[fate][1].format(job=struck.runs[fate].job_id) in struck.collected.stdout


def test_a_run_that_hangs_ends_before_its_time_limit(limited):
    (row,) = limited.first["hanging"]
    assert row["status"] == "timeout"
    assert row["error"] == "not finished after 1 min, its job's time limit"
    assert seconds(row) <= 60


def test_a_run_whose_leader_hangs_is_ended_by_slurm(limited):
    (row,) = limited.first["deaf"]
    assert row["status"] == "timeout"
    assert f"SLURM ended job {limited.runs['deaf'].job_id}: TIMEOUT on testnode[1-2]" in row["error"]
    assert row["hosts"] == "testnode1,testnode2"


def test_the_same_command_completes_what_was_struck(struck, limited):
    assert struck.names_repeated == {*ENDS}
    assert limited.names_repeated == {"hanging", "deaf"}
    for ordeal in (struck, limited):
        assert ordeal.kept
        for name in ordeal.names_repeated:
            failed, whole = ordeal.runs[name].rows
            check_whole(whole)
            assert whole["attempt"] == 1
            assert whole["job_id"] == ordeal.repeated[whole["run_id"]].job_id != failed["job_id"]


# Watching and cancelling; the controller


@pytest.mark.long
def test_cancelled_watched_and_without_a_controller(idle_slurm, tmp_path):
    store, log = tmp_path / "store", tmp_path / "log"
    command = (*SLEEPY, "repeat=0,1,2")

    submit_sweep(store, *command)
    first = submitted(store)
    with running(log, "bench.jobs", "watch", str(store)) as watch:
        hold(idle_slurm, first[0])
        assert wait_until(lambda: "2 queued, 1 running" in log.read_text(), SLURM_TIMEOUT_S), log.read_text()
        watch.kill()
    assert first[0].job_id in idle_slurm.squeue("-r", "-o", "%i", "-t", "running")
    cancelled = run_jobs_command("cancel", store)
    assert cancelled.returncode == 1
    assert "Cancelled 3 job(s)." in cancelled.stdout
    assert "3 failed" in cancelled.stdout
    check_nothing_left(idle_slurm, store)
    ((running_row,), *waiting_rows) = (run.rows for run in first)
    assert running_row["status"] == "preempted"
    assert running_row["error"] == "stopped by SIGTERM: the job was cancelled"
    for run, (row,) in zip(first[1:], waiting_rows, strict=True):
        assert row["status"] == "skipped"
        assert row["error"] == f"its job {run.job_id} was cancelled before it came to run"
        assert row["job_id"] == run.job_id

    second = submit_again(store, *command)
    assert [run.run_id for run in second] == [run.run_id for run in first]
    hold(idle_slurm, second[0], attempt=1)
    idle_slurm.stop_controller()
    with (
        running(tmp_path / "collect", "bench.jobs", "collect", str(store)) as collect,
        running(tmp_path / "sweep", "bench.sweep", "-m", *command, format_store_override(store)) as sweep,
    ):
        assert (collect.wait(SLURM_TIMEOUT_S), sweep.wait(SLURM_TIMEOUT_S)) == (1, 2)
    for asked in ("collect", "sweep"):
        said = (tmp_path / asked).read_text().splitlines()
        assert all("SLURM has not answered" in line for line in said[:-1])
        assert said[:-1]
        assert "Unable to contact slurm controller" in said[-1]
    with running(log, "bench.jobs", "watch", str(store)) as watch:
        time.sleep(2)
        idle_slurm.restore()
        let_go(second[0])
        assert watch.wait(2 * SLURM_TIMEOUT_S) == 0, log.read_text()
    assert "3 done" in log.read_text()
    for run in second:
        failed, whole = run.rows
        assert failed["attempt"] == 0
        check_whole(whole)
        assert (whole["job_id"], whole["environment"]["slurm"]["restart"]) == (run.job_id, 0)
    check_nothing_left(idle_slurm, store)
    assert submit_again(store, *command) == []


# Preemption, nodes that fail


@dataclass
class Restarted:
    """A run that SLURM started four times, and one beside it."""

    run: Run
    other: Run
    nodes: list[list[str]]
    """Of the starts that did not end well; the leader's first."""
    again: list[Run]


@pytest.fixture(scope="module")
def restarted(slurm: SlurmTestCluster, tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    """It is preempted; a follower's node dies, which SLURM has to notice; the leader's node dies, and SLURM is told."""
    make_idle(slurm)
    store = tmp_path_factory.mktemp("restarted") / "store"
    command = (*SLEEPY, "cluster.exclusive=true", "cluster.parallelism=2", "repeat=0,1")
    submit_sweep(store, *command)
    run, other = submitted(store)
    nodes = []

    hold(slurm, run)
    nodes.append(run.nodes)
    urgent = ("--nodes=2", f"--nodelist={','.join(run.nodes)}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    slurm.run("sbatch", "--partition=high", *urgent)

    hold(slurm, run, attempt=1)
    nodes.append(run.nodes)
    slurm.kill_node(nodes[-1][1])

    hold(slurm, run, attempt=2)
    nodes.append(run.nodes)
    slurm.kill_node(nodes[-1][0], mark_down=True)

    over(slurm, store)
    check_nothing_left(slurm, store)
    return Restarted(run, other, nodes, submit_again(store, *command))


def test_a_preempted_run_starts_afresh_by_itself(restarted):
    row = restarted.run.rows[0]
    assert row["status"] == "preempted"
    assert row["error"] == "stopped by SIGUSR2: a job of higher priority took its nodes"
    assert row["hosts"].split(",") == restarted.nodes[0]
    assert row.get("step_time_median_s") is None


def test_a_run_outlives_the_node_of_a_follower(restarted):
    row, node = restarted.run.rows[1], restarted.nodes[1][1]
    assert row["status"] == "error"
    first, *_ = row["error"].split("; ")  # behind it what the others noticed
    assert first == f"rank 1 on {node} has not been heard of again: its node or its processes are gone"
    assert row["hosts"].split(",") == restarted.nodes[1]


def test_a_run_outlives_the_node_of_its_leader(restarted):
    row = restarted.run.rows[2]
    assert row["status"] == "error"
    assert row["error"].startswith(f"SLURM ended job {restarted.run.job_id}: NODE_FAIL on testnode[")
    assert row["hosts"].split(",") == restarted.nodes[2]


def test_every_start_is_an_attempt_and_the_last_is_whole(restarted):
    rows = restarted.run.rows
    assert [row["attempt"] for row in rows] == [0, 1, 2, 3]
    assert [row["environment"]["slurm"]["restart"] for row in rows] == [0, 1, 2, 3]
    assert {row["job_id"] for row in rows} == {restarted.run.job_id}
    check_whole(rows[3])
    assert not {restarted.nodes[1][1], restarted.nodes[2][0]} & set(rows[3]["hosts"].split(","))
    (undisturbed,) = restarted.other.rows
    check_whole(undisturbed)
    assert restarted.again == []


# A container without SLURM's commands: Python does not find them

ALONE = f"cluster.python='env PATH=/nonexistent {shlex.quote(sys.executable)}'"

UNKNOWN = "why is unknown, for SLURM cannot be asked: scontrol is not on this machine's PATH"


@pytest.mark.long
def test_a_cause_that_cannot_be_asked_for_is_unknown_and_no_signal_is_ignored(idle_slurm, tmp_path):
    """One run is preempted, which SLURM announces by SIGUSR2, as it does a time limit; another is cancelled."""
    preempted, cancelled = tmp_path / "preempted", tmp_path / "cancelled"
    command = (*FAKE_MODEL_RUN, *LONG_RUN, "cluster=slurm_test", "gpus=1", ALONE, "cluster.time_limit_min=60")
    submit_sweep(preempted, *command, "cluster.nodelist=testnode1")
    submit_sweep(cancelled, *command, "cluster.nodelist=testnode2")
    assert all(wait_for_training(store) for store in (preempted, cancelled))
    take = ("--nodes=1", "--nodelist=testnode1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    idle_slurm.run("sbatch", "--partition=high", *take)
    idle_slurm.run("scancel", *[job for job, node in _jobs(idle_slurm) if node == "testnode2"])
    idle_slurm.wait_for("the end of all jobs", lambda: idle_slurm.squeue() == [])
    for store, name in ((preempted, "SIGUSR2"), (cancelled, "SIGTERM")):
        (row,) = find_run_attempts(store)
        assert (row["status"], row["error"]) == ("error", f"stopped by {name}: {UNKNOWN}")


def _jobs(cluster: SlurmTestCluster) -> list[list[str]]:
    return [line.split() for line in cluster.squeue("-o", "%A %N", "-t", "running")]


# Jobs that can never start

NEVER = {
    "no such partition": (("cluster.partition=nowhere",), "invalid partition"),
    "more GPUs than a node has": (("cluster.gpus_per_node=9", "gpus=18"), "node configuration is not available"),
    "more nodes than there are": (("gpus=5",), "ode"),
}


@pytest.mark.parametrize("why", NEVER)
def test_what_can_never_start_is_refused_at_submission(idle_slurm, tmp_path, why):
    overrides, words = NEVER[why]
    refused = call_main(bench.sweep.main, *TWO_RANKS, *overrides, format_store_override(tmp_path / "store"))
    assert refused.returncode == 2
    assert words in refused.stderr
    assert "cluster=slurm_test refuses" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert idle_slurm.squeue() == []
    assert submissions.list_submissions(tmp_path / "store", include_closed=True) == []


# Whoever submits is gone


def died_holding(store: Path, row: Record) -> None:
    """Put back the claim of a job that is gone, as if it had died between writing its row and giving the claim back."""
    owner = {"job": row["job_id"], "restart": 0}
    content = {"attempt": row["attempt"], "owner": owner, "row": row}
    (store / claims.CLAIMS_FOLDER / f"{row['run_id']}.claim").write_text(json.dumps(content))


def test_the_submitting_host_may_die_at_any_time(idle_slurm, tmp_path):
    """In the middle of a submission of three arrays; then, the rest submitted, right after."""
    store, log = tmp_path / "store", tmp_path / "log"
    command = (
        "-m",
        *FAKE_MODEL_RUN,
        "cluster=slurm_test",
        "cluster.gpus_per_node=1",
        "gpus=2,3,4",
        format_store_override(store),
    )

    def job_ids() -> list[str]:
        return [path.read_text().strip() for path in store.glob(".jobs/*/*/job_id")]

    def jobs_submitted() -> set[str]:
        return set(idle_slurm.squeue("-t", "all", "-o", "%F", "--name", ",".join(names())))

    def names() -> list[str]:
        return [
            array.job_name
            for submission in submissions.list_submissions(store, include_closed=True)
            for array in submission.arrays
        ]

    for expected in (1, 3):
        with running(log, "bench.sweep", *command) as process:
            assert wait_until(lambda: len(job_ids()) >= expected, SLURM_TIMEOUT_S), log.read_text()  # noqa: B023
            os.killpg(process.pid, signal.SIGKILL)
    assert len(submissions.list_submissions(store)) in (1, 2)  # the first may just have been through

    over(idle_slurm, store)
    (finished, *_), *_ = read_attempts_by_run(store).values()
    died_holding(store, finished)
    assert claims.list_claimed_runs(store) == [finished["run_id"]]

    followed = run_jobs_command("watch", store)
    assert followed.returncode == 0, followed.stdout
    assert len(jobs_submitted()) == 3
    runs = {
        entry.run_id
        for array in submissions.list_submissions(store, include_closed=True)[0].arrays
        for entry in array.entries
    }
    assert len(runs) == 3
    found = {run_id: Run(store, run_id, "").rows for run_id in runs}
    for (row,) in found.values():
        check_whole(row, ranks=row["world_size"], steps=1)
    assert {row["job_id"] for (row,) in found.values()} == jobs_submitted()
    assert finished in [row for (row,) in found.values()]
    check_nothing_left(idle_slurm, store)
    assert submissions.list_submissions(store) == []
    done = call_main(bench.sweep.main, *command)
    assert done.returncode == 0
    assert "3 done, 0 to run" in done.stdout
    assert len(jobs_submitted()) == 3


# The store


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {done.stderr}")


def fill(disk: Path) -> None:
    with (disk / "rubbish").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Keep a disk full, whatever is given back to it meanwhile."""
    done = threading.Event()

    def refill() -> None:
        while not done.wait(0.01):
            fill(disk)

    fill(disk)
    thread = threading.Thread(target=refill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        (disk / "rubbish").unlink()


@pytest.mark.parametrize("trouble", ["No space left on device", "Read-only file system"])
def test_a_store_that_takes_nothing_is_refused_at_submission(idle_slurm, tmp_path, trouble):
    mount("-t", "tmpfs", "-o", "size=1m", "none", tmp_path)
    try:
        if trouble == "No space left on device":
            fill(tmp_path)
        else:
            mount("-o", "remount,ro", tmp_path)
        refused = call_main(bench.sweep.main, *TWO_RANKS, format_store_override(tmp_path / "store"))
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert refused.returncode == 2
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith(f"store={tmp_path / 'store'} is not valid")
    assert trouble in sentence
    assert idle_slurm.squeue() == []


@pytest.fixture
def shared_disk(idle_slurm: SlurmTestCluster, tmp_path: Path) -> Iterator[Path]:
    """A small file system that this machine and all nodes see; nodes may have mount namespaces of their own."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * 2**20)
    made = subprocess.run(["mke2fs", "-q", "-F", "-b4096", "-O^has_journal", image], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot make a file system here: {made.stderr!r}")
    mount("-o", "loop", image, disk)
    device = subprocess.run(
        ["findmnt", "--noheadings", "--output=SOURCE", disk], capture_output=True, text=True, check=True
    ).stdout.strip()
    daemons = [(idle_slurm.state / "run" / f"slurmd.{node}.pid").read_text().strip() for node in NODE_NAMES]
    apart = [pid for pid in daemons if not Path(f"/proc/{pid}/ns/mnt").samefile("/proc/self/ns/mnt")]
    try:
        for pid in apart:
            mount("-N", pid, device, disk)
        yield disk
    finally:
        idle_slurm.cancel_all()
        for pid in apart:
            subprocess.run(["umount", "-N", pid, "--lazy", disk], check=False)
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.long
def test_a_run_finds_room_for_its_row_on_a_disk_that_filled_up(idle_slurm, shared_disk):
    """Two runs are on when the disk fills up, a third has not started."""
    store = shared_disk / "store"
    command = (*SLEEPY, "cluster.parallelism=2", "cluster.start_timeout_s=30", "repeat=0,1,2")
    submit_sweep(store, *command)
    *begun, late = submitted(store)
    hold(idle_slurm, *begun)
    with full(shared_disk):
        let_go(*begun)
        over(idle_slurm, store)
        for run in begun:
            (row,) = run.rows
            check_whole(row)
        assert late.rows == []
        check_no_processes(os.environ["SLURM_CONF"])
        collected = run_jobs_command("collect", store)
        assert collected.returncode == 1
        assert collected.stderr == f"store={store} cannot be written: No space left on device.\n"
    assert run_jobs_command("collect", store).returncode == 1
    (row,) = late.rows
    assert row["status"] == "error"
    assert f"its job {late.job_id} could not write to the store: it was full or read-only" in row["error"]
    before = read_row_files(store)
    assert [run.run_id for run in submit_again(store, *command)] == [late.run_id]
    over(idle_slurm, store)
    assert late.statuses == ["error", "ok"]
    after = read_row_files(store)
    assert {path: after[path] for path in before} == before
    assert run_jobs_command("collect", store).returncode == 0
    check_nothing_left(idle_slurm, store)


def chattr(flag: str, *paths: Path) -> bool:
    """Forbid or allow changes; whether that works here."""
    return subprocess.run(["chattr", flag, *paths], capture_output=True, check=False).returncode == 0


@pytest.mark.long
def test_a_row_is_written_when_the_store_can_be_written_again(idle_slurm, tmp_path):
    store = tmp_path / "store"
    command = (*SLEEPY, "cluster.parallelism=2", "repeat=0,1")
    submit_sweep(store, *command)
    run, other = submitted(store)
    hold(idle_slurm, run)
    idle_slurm.wait_for(
        "the end of the other run", lambda: other.rows and claims.list_claimed_runs(store) == [run.run_id]
    )
    closed = (store / run.run_id, store / claims.CLAIMS_FOLDER)
    try:
        if not chattr("+i", *closed):
            pytest.skip("chattr +i does not work here")
        with pytest.raises(OSError) as refused:  # noqa: PT011
            (store / run.run_id / "x").touch()
        assert refused.value.errno == errno.EPERM
        let_go(run)
        (output,) = store.glob(f".jobs/*/*/{run.job_id}_0_log.out")
        idle_slurm.wait_for("a first try", lambda: "cannot write the row" in output.read_text())
        assert run.rows == []
    finally:
        chattr("-i", *closed)
    over(idle_slurm, store)
    for (row,) in (run.rows, other.rows):
        check_whole(row)
    check_nothing_left(idle_slurm, store)
    assert submit_again(store, *command) == []
