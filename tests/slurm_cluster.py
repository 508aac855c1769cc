"""A real SLURM for tests: ``slurm/test-cluster``, started for the first test that asks for it, gone with the session.

``slurm`` is the cluster, ``idle_slurm`` the same with an empty queue and all nodes up before and after the test. Where
SLURM is not installed these tests are skipped, and the last lines of pytest's output say so; with ``REQUIRE_SLURM=1``
they fail instead.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = ROOT / "slurm" / "test-cluster"

KNOBS = {"NODES": "4", "GPUS": "8", "CPUS": "16"}
"""Of the session's cluster."""

PATIENCE_S = 180.0
"""How long to wait for what takes seconds on a machine that is not busy: it may be, or slow."""

NODES = [f"testnode{number}" for number in range(1, int(KNOBS["NODES"]) + 1)]


def cluster_script(
    *arguments: str | Path, knobs: Mapping[str, str] = MappingProxyType({}), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``slurm/test-cluster`` as a person would; `knobs` are its, without their prefix."""
    given = {f"TEST_CLUSTER_{name}": value for name, value in knobs.items()} | environment
    return subprocess.run(
        ["/bin/bash", SCRIPT, *arguments],
        env=without_slurm(os.environ) | given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that knows no other cluster, and no job that the tests may be running in."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "TEST_CLUSTER_")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


class Cluster:
    """The test cluster that lives in the folder `state`."""

    def __init__(self, state: Path) -> None:
        self.state = state

    @property
    def env(self) -> dict[str, str]:
        """What SLURM's commands need in their environment."""
        return {"SLURM_CONF": str(self.state / "slurm.conf")}

    def run(self, *command: str | Path, check: bool = True, limit: float = PATIENCE_S) -> str:
        """The output of one of SLURM's commands, or of anything that calls them."""
        result = subprocess.run(
            command,
            env=without_slurm(os.environ) | self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert not check or result.returncode == 0, f"{command} ended with {result.returncode}: {result.stderr}"
        return result.stdout

    def squeue(self, *arguments: str) -> list[str]:
        """Lines of ``squeue``, without the heading; ``-t all`` shows ended jobs too."""
        return self.run("squeue", "--noheader", *arguments).splitlines()

    def sacct(self, *arguments: str) -> list[str]:
        """Lines of ``sacct``, without the heading, fields separated by ``|``; up to 5 s behind the queue."""
        return self.run("sacct", "--noheader", "--parsable2", *arguments).splitlines()

    def scontrol(self, *arguments: str) -> str:
        """The output of ``scontrol``."""
        return self.run("scontrol", *arguments)

    def job_state(self, job: str | int) -> str:
        """A job's state, for slurmctld, also after its end: ``RUNNING``, ``COMPLETED`` ...; empty: no such job."""
        states = self.run("squeue", "--noheader", "-t", "all", "-o", "%T", "-j", str(job), check=False)
        return " ".join(sorted(set(states.split())))

    def node_states(self) -> dict[str, str]:
        """The state of every node; it ends in ``*`` where a node does not answer."""
        return dict(line.split() for line in self.run("sinfo", "-hN", "-p", "main", "-o", "%N %T").splitlines())

    def wait_for(self, what: str, condition: Callable[[], object], limit: float = PATIENCE_S) -> None:
        """Wait until something is so; fails, with the queue, if it is not so within `limit` seconds."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                queue = self.run("squeue", "-t", "all", check=False)
                pytest.fail(f"waited {limit:g} s for: {what}\n{queue}\n{self.run('sinfo', check=False)}")
            time.sleep(0.1)

    def cancel_all(self, limit: float = PATIENCE_S) -> None:
        """Cancel every job, and wait until nothing of them is left, in the queue or on a node."""
        self.run("scancel", "--quiet", *set(self.squeue("-o", "%A")), check=False)
        self.wait_for("an empty queue", lambda: not self.squeue(), limit)
        self.wait_for("idle nodes", lambda: set(self.node_states().values()) == {"idle"}, limit)

    def is_whole(self) -> bool:
        """Whether SLURM would give all there is to one job: it loses count of GPUs when a job fails to start."""
        everything = (f"--nodes={KNOBS['NODES']}", f"--gpus-per-node={KNOBS['GPUS']}")
        command = ("sbatch", "--test-only", *everything, "--wrap", "true")
        tried = subprocess.run(command, env=without_slurm(os.environ) | self.env, capture_output=True, check=False)
        return tried.returncode == 0

    def kill_node(self, name: str, *, noticed: bool = False) -> None:
        """A node dies: SIGKILL for its slurmd, its job steps and all they have started.

        SLURM takes about half a minute to notice, unless it is told by `noticed`. `restore` brings the node back.
        Down alone would not do: SLURM takes an answer that the node gave before its end, and that is read seconds
        later, for its return, and starts jobs on it.
        """
        killed = [self.daemon(f"slurmd.{name}")]
        log = str(self.state / "log" / f"slurmd.{name}.log")
        killed += [pid for pid in processes() if _command(pid) == "slurmstepd" and log in _open_files(pid)]
        killed += descendants(killed[1:])
        for pid in killed:
            kill(pid, signal.SIGKILL)
        if noticed:
            for state in ("down", "drain"):
                self.scontrol("update", f"nodename={name}", f"state={state}", "reason=killed")

    def save_state(self) -> None:
        """Wait until slurmctld has written down its queue, as it does within 5 s; a SIGKILL forgets what came later."""
        now = time.time()
        job = self.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true").strip()
        self.run("scancel", job)  # what does not change is not written
        self.wait_for("slurmctld's saved state", lambda: (self.state / "ctld" / "job_state").stat().st_mtime > now)

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld, cleanly or not; jobs go on. `restore` brings it back."""
        pid = self.daemon("slurmctld")
        kill(pid, number)
        self.wait_for("the end of slurmctld", lambda: ended(pid))

    def restart_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Restart slurmctld, after a clean stop or a ``SIGKILL``."""
        self.stop_controller(number)
        self.restore()

    def restore(self) -> None:
        """Bring back every daemon that is dead and every node that is down."""
        result = cluster_script("start", self.state)
        assert result.returncode == 0, result.stderr

    def is_up(self) -> bool:
        """Whether every daemon runs and every node answers."""
        return cluster_script("status", self.state).returncode == 0

    def daemon(self, name: str) -> int:
        """The process of slurmctld, or of a node's slurmd."""
        return int((self.state / "run" / f"{name}.pid").read_text())


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """The test cluster, which ``SLURM_CONF`` in our own environment names too."""
    with running_cluster(KNOBS) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(without_slurm(os.environ)):
            patch.delenv(name)
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture
def idle_slurm(slurm: Cluster) -> Iterator[Cluster]:
    """The test cluster, with an empty queue and all nodes up before and after the test."""
    make_idle(slurm)
    yield slurm
    make_idle(slurm)


def make_idle(cluster: Cluster) -> None:
    """Bring back what is dead and end what runs."""
    if not cluster.is_up():
        cluster.restore()
    cluster.cancel_all()
    if not cluster.is_whole():
        cluster.restart_controller()  # it counts anew
        cluster.wait_for("the nodes whole", cluster.is_whole)


@contextmanager
def running_cluster(knobs: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster of its own in a short path (the names of Unix sockets are limited), for as long as the block lasts.

    Another process takes it down: at the end of the block, or when this process ends, whatever has ended it.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    guard = subprocess.Popen(
        ["/bin/bash", "-c", 'read -r; "$0" stop --remove "$1"', SCRIPT, folder],
        stdin=subprocess.PIPE,  # which nobody else holds: it closes when we end
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        started = cluster_script("start", folder, knobs=knobs)
        if started.returncode == 2:
            unavailable(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        yield Cluster(folder)
    finally:
        guard.communicate(timeout=PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)  # still there if there was nothing to stop


def unavailable(why: str) -> NoReturn:
    """Skip the test, or fail it where SLURM has to be there."""
    if os.environ.get("REQUIRE_SLURM", "0") != "0":
        pytest.fail(f"REQUIRE_SLURM is set, but {why}")
    pytest.skip(f"{why} (or run .ci/run, which does)")


def processes() -> list[int]:
    """The pids of all processes."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def ended(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    return _status(pid)[:1] in ([], ["Z"], ["X"])


def descendants(pids: list[int]) -> list[int]:
    """What these processes have started, and what that has started ..."""
    parents = {pid: int(status[1]) for pid in processes() if (status := _status(pid))}
    found: list[int] = []
    while more := [pid for pid, parent in parents.items() if parent in (*pids, *found) and pid not in found]:
        found += more
    return found


def started(pid: int) -> int:
    """When a process started, in clock ticks since the machine did."""
    return int(_status(pid)[19])


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may just have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _status(pid: int) -> list[str]:
    """State, parent ... as in ``/proc/PID/stat``; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _open_files(pid: int) -> list[str]:
    try:
        return [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
