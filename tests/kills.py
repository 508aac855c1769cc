"""Kill processes of sweeps at random moments, and count what is lost: ``python -m tests.kills --kills 100``.

Sweeps of quick runs are started again and again until every run has its result, while their processes are killed: the
sweep, what starts its job (submitit's controller on this machine, slurmctld on the cluster), the job's process and the
ranks. Then no row may be gone or changed, no run may have two results, and no process may be left.
Exit code 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.records import Record
from tests import slurm_cluster
from tests.cluster_sweeps import ONE_NODE, list_job_processes, run_jobs_command
from tests.fake_model import (
    FAKE_MODEL_OVERRIDES,
    ROOT,
    SweepProcess,
    build_marked_environment,
    find_marked_processes,
    read_attempts_by_run,
    wait_until,
)

ROLES = ("sweep", "controller", "worker", "rank")

QUICK_RUN = (
    *(override for override in FAKE_MODEL_OVERRIDES if override != "hardware=cpu"),
    "strategy=ddp",
    "+model.step_s=0.2",
)

RANK_LIFETIME_S = 2.0

WAIT_TIMEOUT_S = 120.0


@dataclass
class KillReport:
    """What was killed, and what that did."""

    kills: Counter[str] = field(default_factory=Counter)
    sweeps: int = 0
    results: int = 0
    violations: list[str] = field(default_factory=list)

    def format_report(self) -> str:
        """All of it, in a few lines."""
        killed = ", ".join(f"{count} x {role}" for role, count in sorted(self.kills.items()))
        lines = [f"{self.kills.total()} kills ({killed or 'none'}) in {self.sweeps} sweeps, {self.results} results."]
        counts = Counter(line.partition(":")[0] for line in self.violations)
        lines.append(", ".join(f"{counts[what]} {what}" for what in ("rows lost", "measured twice", "processes left")))
        return "\n".join([*lines, *self.violations])


class WatchedStore:
    """A store whose rows are looked at again and again."""

    def __init__(self, path: Path, runs: int, report: KillReport) -> None:
        self.path, self._runs, self._report = path, runs, report
        self._last_contents: dict[Path, bytes] = {}

    def check_rows(self) -> None:
        """Compare with what was there before."""
        for path, before in self._last_contents.items():
            if not path.exists() or path.read_bytes() != before:
                self._report.violations.append(f"rows lost: {path}")
        self._last_contents = {path: path.read_bytes() for path in self.path.glob("*/[0-9]*.json")}
        for run, attempts in self._read_rows().items():
            if sum(row["status"] == "ok" for row in attempts) > 1:
                self._report.violations.append(f"measured twice: {run}")

    @property
    def is_complete(self) -> bool:
        """Whether every run has its result."""
        return (
            sum(any(row["status"] == "ok" for row in attempts) for attempts in self._read_rows().values()) == self._runs
        )

    def _read_rows(self) -> dict[str, list[Record]]:
        return read_attempts_by_run(self.path)


class KillCampaign:
    """Kills on one kind of launcher.

    Parameters
    ----------
    kills: int
        How many.
    runs: int
        Of each sweep: a second each.
    deadline: float
        On `time.monotonic`: no further kill after it.
    """

    max_delay_s = 6.0
    """A kill comes at most so long after there is something to kill: of ranks, which live shorter,
    `RANK_LIFETIME_S`."""

    def __init__(self, kills: int, runs: int, rng: random.Random, folder: Path, deadline: float) -> None:
        self._kills_left, self._runs, self._rng, self._folder, self._deadline = kills, runs, rng, folder, deadline
        self.grid = f"repeat={','.join(map(str, range(runs)))}"
        self.report = KillReport()

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be killed any more."""
        return self._kills_left <= 0 or time.monotonic() > self._deadline

    def run_sweeps(self) -> KillReport:
        """Sweep after sweep, each until it is complete."""
        number = 0
        while not self.is_over:
            store = WatchedStore(self._folder / f"store-{number}" / "store", self._runs, self.report)
            while not store.is_complete:
                self.report.sweeps += 1
                self.run_sweep(store)
                store.check_rows()
            self.report.results += self._runs
            number += 1
        return self.report

    def run_sweep(self, store: WatchedStore) -> None:
        """One sweep, with kills, to its end."""
        raise NotImplementedError

    def kill_random_process(
        self, list_pids: Callable[[str], list[int]], is_running: Callable[[], bool], roles: Sequence[str] = ROLES
    ) -> str | None:
        """Kill a process of a random role at a random moment of its life; returns the role, None if nobody has it."""
        role = self._rng.choice(roles)
        wait_until(lambda: not is_running() or bool(list_pids(role)), WAIT_TIMEOUT_S)
        wait_until(
            lambda: not is_running(), self._rng.uniform(0, RANK_LIFETIME_S if role == "rank" else self.max_delay_s)
        )
        pids = list_pids(role) if is_running() else []
        if not pids:
            return None
        pid = self._rng.choice(pids)
        self._kills_left -= 1
        self.report.kills[role] += 1
        kill_label = f"sweep {self.report.sweeps}, kill {self.report.kills.total()}"
        print(
            time.strftime("%H:%M:%S"), f"{kill_label}: {role}, {_command_line(pid)[-60:]}", file=sys.stderr, flush=True
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return role


class LocalCampaign(KillCampaign):
    """On this machine."""

    def run_sweep(self, store: WatchedStore) -> None:
        """Until it has ended, or was killed and its job has ended."""
        process = SweepProcess(store.path, "-m", *QUICK_RUN, "hardware=cpu", "gpus=2", self.grid)
        try:
            while process.process.poll() is None and not self.is_over:
                self.kill_random_process(
                    lambda role: _list_local_pids(process, role), lambda: process.process.poll() is None
                )
                store.check_rows()
            process.wait(WAIT_TIMEOUT_S)
            for pid in process.wait_for_leftover_pids(WAIT_TIMEOUT_S):
                self.report.violations.append(f"processes left: {_command_line(pid)}")
            if "Traceback" in process.output:
                self.report.violations.append(f"traceback: {process.output[-2000:]}")
        finally:
            process.clean_up()


def _list_local_pids(sweep: SweepProcess, role: str) -> list[int]:
    """The live processes of a role."""
    if role == "sweep":
        return [sweep.process.pid]
    if role == "controller":
        return sweep.list_pids("submitit.local._local")
    return _select_role_pids(sweep.list_pids("submitit.core._submit"), role)


class SlurmCampaign(KillCampaign):
    """On a cluster of our own."""

    max_delay_s = 10.0

    cluster_overrides = (*ONE_NODE, "cluster.start_timeout_s=60")
    """What a process waits for another that was killed."""

    def __init__(self, cluster: slurm_cluster.SlurmTestCluster, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._cluster = cluster

    def run_sweep(self, store: WatchedStore) -> None:
        """Until none of its jobs is left."""
        store.path.mkdir(parents=True, exist_ok=True)
        mark = f"kills-{self.report.sweeps}"
        with (store.path.parent / f"{mark}.txt").open("w") as log:
            sweep_process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.sweep",
                    "-m",
                    *QUICK_RUN,
                    *self.cluster_overrides,
                    self.grid,
                    f"store={store.path}",
                ],
                cwd=ROOT,
                env=build_marked_environment(mark),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

            def is_running() -> bool:
                return sweep_process.poll() is None or bool(self._cluster.squeue())

            def list_pids(role: str) -> list[int]:
                return self._list_pids(sweep_process, role)

            while is_running() and not self.is_over:
                # What has submitted everything does not come again.
                role = self.kill_random_process(
                    list_pids, is_running, ROLES if sweep_process.poll() is None else ROLES[1:]
                )
                if role == "controller":
                    self._cluster.restore()
                    self._cluster.wait_for("nodes that are known again", self._has_known_nodes)
                self._release_held_jobs()
                store.check_rows()
            sweep_process.wait(WAIT_TIMEOUT_S)

        def has_finished() -> bool:
            self._release_held_jobs()
            return not is_running()

        wait_until(has_finished, 5 * WAIT_TIMEOUT_S)
        slurm_cluster.make_idle(self._cluster)
        run_jobs_command("collect", store.path)
        wait_until(lambda: not list_job_processes(os.environ["SLURM_CONF"]), WAIT_TIMEOUT_S)
        for pid in [*list_job_processes(os.environ["SLURM_CONF"]), *find_marked_processes(mark)]:
            self.report.violations.append(f"processes left: {_command_line(pid)}")
        output = (store.path.parent / f"{mark}.txt").read_text()
        if "Traceback" in output:
            self.report.violations.append(f"traceback: {output[-2000:]}")

    def _release_held_jobs(self) -> None:
        """Let jobs go on that SLURM holds because it could not start them, as whoever looks after it would."""
        for line in self._cluster.squeue("-o", "%A %r"):
            job, _, reason = line.partition(" ")
            if "held" in reason:
                self._cluster.run("scontrol", "release", job, check=False)

    def _has_known_nodes(self) -> bool:
        """Whether the nodes have told a new slurmctld of themselves: until then it refuses all there is to submit."""
        return not any(state.startswith("unk") for state in self._cluster.read_node_states().values())

    def _list_pids(self, sweep_process: subprocess.Popen[bytes], role: str) -> list[int]:
        if role == "sweep":
            return [sweep_process.pid] if sweep_process.poll() is None else []
        if role == "controller":
            return [self._cluster.read_daemon_pid("slurmctld")]
        job_pids = [pid for pid in list_job_processes(os.environ["SLURM_CONF"]) if _is_job_process(pid)]
        return _select_role_pids(job_pids, role)


def _is_job_process(pid: int) -> bool:
    """Whether a process is a job's Python, not srun or slurmstepd."""
    command_line = _command_line(pid)
    return "submitit.core._submit" in command_line and "srun" not in command_line.partition(" ")[0]


def _select_role_pids(job_pids: list[int], role: str) -> list[int]:
    """Jobs' own processes, or what they have started: ranks, the store they meet in, a forkserver."""
    children = slurm_cluster.list_descendants(job_pids)
    if role == "worker":
        return [pid for pid in job_pids if pid not in children]
    return [pid for pid in children if re.search("submitit.core._submit|forkserver", _command_line(pid))]


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Kill, and tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--runs", type=int, default=5, help="of each sweep (default: 5)")
    parser.add_argument("--minutes", type=float, default=60, help="no further kill after so long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default: 0)")
    parser.add_argument("--folder", type=Path, help="for the stores, which stay there (default: a temporary one)")
    parser.add_argument("--on", choices=("local", "slurm", "both"), default="both", help="half on each if both")
    options = parser.parse_args(arguments)
    rng, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    reports: list[KillReport] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        slurm_kills = options.kills if options.on != "both" else options.kills // 2
        if options.on in ("slurm", "both"):
            with slurm_cluster.running_cluster(slurm_cluster.SESSION_KNOBS) as cluster:
                os.environ.update(cluster.env)
                campaign = SlurmCampaign(cluster, slurm_kills, options.runs, rng, folder / "slurm", deadline)
                reports.append(campaign.run_sweeps())
                print(f"SLURM: {reports[-1].format_report()}", flush=True)
        if options.on in ("local", "both"):
            local_kills = options.kills - (slurm_kills if options.on == "both" else 0)
            reports.append(LocalCampaign(local_kills, options.runs, rng, folder / "local", deadline).run_sweeps())
            print(f"This machine: {reports[-1].format_report()}", flush=True)
    return int(any(report.violations for report in reports))


if __name__ == "__main__":
    sys.exit(main())
