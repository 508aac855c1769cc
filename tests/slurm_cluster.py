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

SESSION_KNOBS = {"NODES": "4", "GPUS": "8", "CPUS": "16"}
"""Of the session's cluster."""

SLURM_TIMEOUT_S = 180.0
"""How long to wait for what takes seconds on a machine that is not busy: it may be, or slow."""

NODE_NAMES = [f"testnode{number}" for number in range(1, int(SESSION_KNOBS["NODES"]) + 1)]


def run_cluster_script(
    *arguments: str | Path, knobs: Mapping[str, str] = MappingProxyType({}), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``slurm/test-cluster`` as a person would; `knobs` are its, without their prefix."""
    variables = {f"TEST_CLUSTER_{name}": value for name, value in knobs.items()} | environment
    return subprocess.run(
        ["/bin/bash", SCRIPT, *arguments],
        env=remove_slurm_variables(os.environ) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * SLURM_TIMEOUT_S,
        check=False,
    )


def remove_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment that knows no other cluster, and no job that the tests may be running in."""
    prefixes = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "TEST_CLUSTER_")
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


class SlurmTestCluster:
    """The test cluster that lives in the folder `state`."""

    def __init__(self, state: Path) -> None:
        self.state = state

    @property
    def env(self) -> dict[str, str]:
        """What SLURM's commands need in their environment."""
        return {"SLURM_CONF": str(self.state / "slurm.conf")}

    def run(self, *command: str | Path, check: bool = True, timeout_s: float = SLURM_TIMEOUT_S) -> str:
        """The output of one of SLURM's commands, or of anything that calls them."""
        result = subprocess.run(
            command,
            env=remove_slurm_variables(os.environ) | self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
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

    def read_job_state(self, job: str | int) -> str:
        """A job's state, for slurmctld, also after its end: ``RUNNING``, ``COMPLETED`` ...; empty: no such job."""
        states = self.run("squeue", "--noheader", "-t", "all", "-o", "%T", "-j", str(job), check=False)
        return " ".join(sorted(set(states.split())))

    def read_node_states(self) -> dict[str, str]:
        """The state of every node; it ends in ``*`` where a node does not answer."""
        return dict(line.split() for line in self.run("sinfo", "-hN", "-p", "main", "-o", "%N %T").splitlines())

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float = SLURM_TIMEOUT_S) -> None:
        """Wait until something is so; fails, with the queue, if it is not so within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                queue = self.run("squeue", "-t", "all", check=False)
                pytest.fail(f"waited {timeout_s:g} s for: {what}\n{queue}\n{self.run('sinfo', check=False)}")
            time.sleep(0.1)

    def cancel_all(self, timeout_s: float = SLURM_TIMEOUT_S) -> None:
        """Cancel every job, and wait until nothing of them is left, in the queue or on a node."""
        self.run("scancel", "--quiet", *set(self.squeue("-o", "%A")), check=False)
        self.wait_for("an empty queue", lambda: not self.squeue(), timeout_s)
        self.wait_for("idle nodes", lambda: set(self.read_node_states().values()) == {"idle"}, timeout_s)

    def can_allocate_everything(self) -> bool:
        """Whether SLURM would give all there is to one job: it loses count of GPUs when a job fails to start."""
        all_resources = (f"--nodes={SESSION_KNOBS['NODES']}", f"--gpus-per-node={SESSION_KNOBS['GPUS']}")
        command = ("sbatch", "--test-only", *all_resources, "--wrap", "true")
        result = subprocess.run(
            command, env=remove_slurm_variables(os.environ) | self.env, capture_output=True, check=False
        )
        return result.returncode == 0

    def kill_node(self, name: str, *, mark_down: bool = False) -> None:
        """A node dies: SIGKILL for its slurmd, its job steps and all they have started.

        SLURM takes about half a minute to notice, unless it is told by `mark_down`. `restore` brings the node back.
        Down alone would not do: SLURM takes an answer that the node gave before its end, and that is read seconds
        later, for its return, and starts jobs on it.
        """
        daemon = self.read_daemon_pid(f"slurmd.{name}")
        log = str(self.state / "log" / f"slurmd.{name}.log")
        stopped: set[int] = set()
        while started := self._list_node_processes(daemon, log) - stopped:  # what they have started meanwhile, too
            for pid in started:
                send_signal(pid, signal.SIGSTOP)
            stopped.update(started)
            self.wait_for("the processes to stop", lambda: all(map(has_stopped_or_ended, stopped)))
        for pid in stopped:
            send_signal(pid, signal.SIGKILL)
        if mark_down:
            for state in ("down", "drain"):
                self.scontrol("update", f"nodename={name}", f"state={state}", "reason=killed")

    def _list_node_processes(self, daemon: int, log: str) -> set[int]:
        """A slurmd, those it has forked to become slurmstepd or that are, and all that these have started."""
        forked = [pid for pid in list_pids() if pid != daemon and _read_command_name(pid) in ("slurmd", "slurmstepd")]
        roots = [daemon, *(pid for pid in forked if log in _list_open_files(pid))]
        return {pid for pid in (*roots, *list_descendants(roots)) if not has_ended(pid)}

    def wait_for_saved_state(self) -> None:
        """Wait until slurmctld has written down its queue, as it does within 5 s; a SIGKILL forgets what came later."""
        now = time.time()
        job = self.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true").strip()
        self.run("scancel", job)  # what does not change is not written
        self.wait_for("slurmctld's saved state", lambda: (self.state / "ctld" / "job_state").stat().st_mtime > now)

    def stop_controller(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld, cleanly or not; jobs go on. `restore` brings it back."""
        pid = self.read_daemon_pid("slurmctld")
        send_signal(pid, signal_number)
        self.wait_for("the end of slurmctld", lambda: has_ended(pid))

    def restart_controller(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """Restart slurmctld, after a clean stop or a ``SIGKILL``."""
        self.stop_controller(signal_number)
        self.restore()

    def restore(self) -> None:
        """Bring back every daemon that is dead and every node that is down."""
        result = run_cluster_script("start", self.state)
        assert result.returncode == 0, result.stderr

    def is_up(self) -> bool:
        """Whether every daemon runs and every node answers."""
        return run_cluster_script("status", self.state).returncode == 0

    def read_daemon_pid(self, name: str) -> int:
        """The process of slurmctld, or of a node's slurmd."""
        return int((self.state / "run" / f"{name}.pid").read_text())


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmTestCluster]:
    """The test cluster, which ``SLURM_CONF`` in our own environment names too."""
    with running_cluster(SESSION_KNOBS) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(remove_slurm_variables(os.environ)):
            patch.delenv(name)
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture
def idle_slurm(slurm: SlurmTestCluster) -> Iterator[SlurmTestCluster]:
    """The test cluster, with an empty queue and all nodes up before and after the test."""
    make_idle(slurm)
    yield slurm
    make_idle(slurm)


def make_idle(cluster: SlurmTestCluster) -> None:
    """Bring back what is dead and end what runs."""
    if not cluster.is_up():
        cluster.restore()
    cluster.cancel_all()
    if not cluster.can_allocate_everything():
        cluster.restart_controller()  # it counts anew
        cluster.wait_for("the nodes whole", cluster.can_allocate_everything)


@contextmanager
def running_cluster(knobs: Mapping[str, str]) -> Iterator[SlurmTestCluster]:
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
        started = run_cluster_script("start", folder, knobs=knobs)
        if started.returncode == 2:
            skip_without_slurm(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        yield SlurmTestCluster(folder)
    finally:
        guard.communicate(timeout=SLURM_TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)  # still there if there was nothing to stop


def skip_without_slurm(reason: str) -> NoReturn:
    """Skip the test, or fail it where SLURM has to be there."""
    if os.environ.get("REQUIRE_SLURM", "0") != "0":
        pytest.fail(f"REQUIRE_SLURM is set, but {reason}")
    pytest.skip(f"{reason} (or run .ci/run, which does)")


def list_pids() -> list[int]:
    """The pids of all processes."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    return _read_stat(pid)[:1] in ([], ["Z"], ["X"])


def has_stopped_or_ended(pid: int) -> bool:
    """Whether a process can start no other any more, after ``SIGSTOP`` at least not for now."""
    return _read_stat(pid)[:1] == ["T"] or has_ended(pid)


def list_descendants(pids: list[int]) -> list[int]:
    """What these processes have started, and what that has started ..."""
    parents = {pid: int(status[1]) for pid in list_pids() if (status := _read_stat(pid))}
    descendant_pids: list[int] = []
    while more := [
        pid for pid, parent in parents.items() if parent in (*pids, *descendant_pids) and pid not in descendant_pids
    ]:
        descendant_pids += more
    return descendant_pids


def read_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine did."""
    return int(_read_stat(pid)[19])


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Send a signal to a process that may just have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _read_stat(pid: int) -> list[str]:
    """State, parent ... as in ``/proc/PID/stat``; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _read_command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _list_open_files(pid: int) -> list[str]:
    try:
        return [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
