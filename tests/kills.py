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
from tests.cluster_sweeps import ONE_NODE, job_processes, jobs
from tests.fake_model import OVERRIDES, ROOT, Sweep, marked_environment, marked_processes, rows, wait_until

ROLES = ("sweep", "controller", "worker", "rank")

QUICK = (*(each for each in OVERRIDES if each != "hardware=cpu"), "strategy=ddp", "+model.step_s=0.2")

RANK_LIVES_S = 2.0

PATIENCE_S = 120.0


@dataclass
class Findings:
    """What was killed, and what that did."""

    kills: Counter[str] = field(default_factory=Counter)
    sweeps: int = 0
    results: int = 0
    wrong: list[str] = field(default_factory=list)

    def told(self) -> str:
        """All of it, in a few lines."""
        killed = ", ".join(f"{count} x {role}" for role, count in sorted(self.kills.items()))
        lines = [f"{self.kills.total()} kills ({killed or 'none'}) in {self.sweeps} sweeps, {self.results} results."]
        counts = Counter(line.partition(":")[0] for line in self.wrong)
        lines.append(", ".join(f"{counts[what]} {what}" for what in ("rows lost", "measured twice", "processes left")))
        return "\n".join([*lines, *self.wrong])


class Store:
    """A store whose rows are looked at again and again."""

    def __init__(self, path: Path, runs: int, findings: Findings) -> None:
        self.path, self._runs, self._findings = path, runs, findings
        self._seen: dict[Path, bytes] = {}

    def look(self) -> None:
        """Compare with what was there before."""
        for path, before in self._seen.items():
            if not path.exists() or path.read_bytes() != before:
                self._findings.wrong.append(f"rows lost: {path}")
        self._seen = {path: path.read_bytes() for path in self.path.glob("*/[0-9]*.json")}
        for run, attempts in self._rows().items():
            if sum(row["status"] == "ok" for row in attempts) > 1:
                self._findings.wrong.append(f"measured twice: {run}")

    @property
    def complete(self) -> bool:
        """Whether every run has its result."""
        return sum(any(row["status"] == "ok" for row in attempts) for attempts in self._rows().values()) == self._runs

    def _rows(self) -> dict[str, list[Record]]:
        return rows(self.path)


class Campaign:
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

    spread_s = 6.0
    """A kill comes at most so long after there is something to kill: of ranks, which live shorter, `RANK_LIVES_S`."""

    def __init__(self, kills: int, runs: int, chance: random.Random, folder: Path, deadline: float) -> None:
        self._left, self._runs, self._chance, self._folder, self._deadline = kills, runs, chance, folder, deadline
        self.grid = f"repeat={','.join(map(str, range(runs)))}"
        self.findings = Findings()

    @property
    def over(self) -> bool:
        """Whether nothing is to be killed any more."""
        return self._left <= 0 or time.monotonic() > self._deadline

    def carry_out(self) -> Findings:
        """Sweep after sweep, each until it is complete."""
        number = 0
        while not self.over:
            store = Store(self._folder / f"store-{number}" / "store", self._runs, self.findings)
            while not store.complete:
                self.findings.sweeps += 1
                self.sweep(store)
                store.look()
            self.findings.results += self._runs
            number += 1
        return self.findings

    def sweep(self, store: Store) -> None:
        """One sweep, with kills, to its end."""
        raise NotImplementedError

    def kill(
        self, processes: Callable[[str], list[int]], running: Callable[[], bool], roles: Sequence[str] = ROLES
    ) -> str | None:
        """Kill a process of a random role at a random moment of its life; returns the role, None if nobody has it."""
        role = self._chance.choice(roles)
        wait_until(lambda: not running() or bool(processes(role)), PATIENCE_S)
        wait_until(lambda: not running(), self._chance.uniform(0, RANK_LIVES_S if role == "rank" else self.spread_s))
        found = processes(role) if running() else []
        if not found:
            return None
        number = self._chance.choice(found)
        self._left -= 1
        self.findings.kills[role] += 1
        place = f"sweep {self.findings.sweeps}, kill {self.findings.kills.total()}"
        print(time.strftime("%H:%M:%S"), f"{place}: {role}, {_command_line(number)[-60:]}", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return role


class LocalCampaign(Campaign):
    """On this machine."""

    def sweep(self, store: Store) -> None:
        """Until it has ended, or was killed and its job has ended."""
        process = Sweep(store.path, "-m", *QUICK, "hardware=cpu", "gpus=2", self.grid)
        try:
            while process.process.poll() is None and not self.over:
                self.kill(lambda role: _local(process, role), lambda: process.process.poll() is None)
                store.look()
            process.wait(PATIENCE_S)
            for number in process.left(PATIENCE_S):
                self.findings.wrong.append(f"processes left: {_command_line(number)}")
            if "Traceback" in process.output:
                self.findings.wrong.append(f"traceback: {process.output[-2000:]}")
        finally:
            process.clean_up()


def _local(sweep: Sweep, role: str) -> list[int]:
    """The live processes of a role."""
    if role == "sweep":
        return [sweep.process.pid]
    if role == "controller":
        return sweep.processes("submitit.local._local")
    return _of_jobs(sweep.processes("submitit.core._submit"), role)


class SlurmCampaign(Campaign):
    """On a cluster of our own."""

    spread_s = 10.0

    profile = (*ONE_NODE, "cluster.start_timeout_s=60")
    """What a process waits for another that was killed."""

    def __init__(self, cluster: slurm_cluster.Cluster, *asked: object) -> None:
        super().__init__(*asked)  # type: ignore[arg-type]
        self._cluster = cluster

    def sweep(self, store: Store) -> None:
        """Until none of its jobs is left."""
        store.path.mkdir(parents=True, exist_ok=True)
        mark = f"kills-{self.findings.sweeps}"
        with (store.path.parent / f"{mark}.txt").open("w") as log:
            submitting = subprocess.Popen(
                [sys.executable, "-m", "bench.sweep", "-m", *QUICK, *self.profile, self.grid, f"store={store.path}"],
                cwd=ROOT,
                env=marked_environment(mark),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

            def running() -> bool:
                return submitting.poll() is None or bool(self._cluster.squeue())

            def processes(role: str) -> list[int]:
                return self._processes(submitting, role)

            while running() and not self.over:
                # What has submitted everything does not come again.
                role = self.kill(processes, running, ROLES if submitting.poll() is None else ROLES[1:])
                if role == "controller":
                    self._cluster.restore()
                    self._cluster.wait_for("nodes that are known again", self._knows_nodes)
                self._release()
                store.look()
            submitting.wait(PATIENCE_S)

        def over() -> bool:
            self._release()
            return not running()

        wait_until(over, 5 * PATIENCE_S)
        slurm_cluster.make_idle(self._cluster)
        jobs("collect", store.path)
        wait_until(lambda: not job_processes(os.environ["SLURM_CONF"]), PATIENCE_S)
        for number in [*job_processes(os.environ["SLURM_CONF"]), *marked_processes(mark)]:
            self.findings.wrong.append(f"processes left: {_command_line(number)}")
        said = (store.path.parent / f"{mark}.txt").read_text()
        if "Traceback" in said:
            self.findings.wrong.append(f"traceback: {said[-2000:]}")

    def _release(self) -> None:
        """Let jobs go on that SLURM holds because it could not start them, as whoever looks after it would."""
        for line in self._cluster.squeue("-o", "%A %r"):
            job, _, reason = line.partition(" ")
            if "held" in reason:
                self._cluster.run("scontrol", "release", job, check=False)

    def _knows_nodes(self) -> bool:
        """Whether the nodes have told a new slurmctld of themselves: until then it refuses all there is to submit."""
        return not any(state.startswith("unk") for state in self._cluster.node_states().values())

    def _processes(self, submitting: subprocess.Popen[bytes], role: str) -> list[int]:
        if role == "sweep":
            return [submitting.pid] if submitting.poll() is None else []
        if role == "controller":
            return [self._cluster.daemon("slurmctld")]
        programs = [number for number in job_processes(os.environ["SLURM_CONF"]) if _runs_job(number)]
        return _of_jobs(programs, role)


def _runs_job(number: int) -> bool:
    """Whether a process is a job's Python, not srun or slurmstepd."""
    words = _command_line(number)
    return "submitit.core._submit" in words and "srun" not in words.partition(" ")[0]


def _of_jobs(programs: list[int], role: str) -> list[int]:
    """Jobs' own processes, or what they have started: ranks, the store they meet in, a forkserver."""
    children = slurm_cluster.descendants(programs)
    if role == "worker":
        return [number for number in programs if number not in children]
    return [each for each in children if re.search("submitit.core._submit|forkserver", _command_line(each))]


def _command_line(number: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
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
    chance, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    everything: list[Findings] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        share = options.kills if options.on != "both" else options.kills // 2
        if options.on in ("slurm", "both"):
            with slurm_cluster.running_cluster(slurm_cluster.KNOBS) as cluster:
                os.environ.update(cluster.env)
                campaign = SlurmCampaign(cluster, share, options.runs, chance, folder / "slurm", deadline)
                everything.append(campaign.carry_out())
                print(f"SLURM: {everything[-1].told()}", flush=True)
        if options.on in ("local", "both"):
            rest = options.kills - (share if options.on == "both" else 0)
            everything.append(LocalCampaign(rest, options.runs, chance, folder / "local", deadline).carry_out())
            print(f"This machine: {everything[-1].told()}", flush=True)
    return int(any(findings.wrong for findings in everything))


if __name__ == "__main__":
    sys.exit(main())
