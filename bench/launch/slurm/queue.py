"""What SLURM says of jobs, asked through its own commands.

`squeue` is asked first and decides what is alive: after a node failure `sacct` calls a job ended that SLURM is about
to run again. Jobs are named as SLURM names them: ``12`` or ``12_3`` for an element of an array.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWER_S = 60
"""How long a command may take: a busy controller is slow."""

SILENCE_S = 5
"""After how long it is said that one has not answered."""

PASSING = ("timed out", "Unable to contact slurm controller", "Zero Bytes", "temporarily un", "standby", "connection")
"""Parts of what SLURM says when the same command may succeed a moment later."""

SUBMIT_AGAIN_S = (2, 5, 15)
"""How long to wait before each further try to submit."""

NEVER_STARTS = {
    "AccountNotAllowed",
    "AssocMaxCpuPerJobLimit",
    "AssocMaxGRESPerJob",
    "AssocMaxNodePerJobLimit",
    "AssocMaxWallDurationPerJobLimit",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSMaxCpuPerJobLimit",
    "QOSMaxGRESPerJob",
    "QOSMaxNodePerJobLimit",
    "QOSMaxWallDurationPerJobLimit",
    "QOSNotAllowed",
}
"""Reasons for waiting that waiting does not cure (squeue(1), JOB REASON CODES)."""

UNDECIDED = {"None", "PartitionConfig"}
"""Reasons of a job that the scheduler has not looked at yet."""


UNKNOWN_JOB = "Invalid job id"
"""Part of what squeue says of a job that the controller does not remember."""

LIVE = {"PENDING", "RUNNING", "RESIZING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}
"""States in which a job has not ended."""

HELD = {"JobHeldUser": "held: scontrol release {job}", "JobHeldAdmin": "held by an administrator"}
"""What to do about jobs that wait for these reasons."""


class SlurmError(RuntimeError):
    """One of SLURM's commands failed; the text is what it said."""

    @property
    def passing(self) -> bool:
        """Whether the same command may succeed a moment later."""
        return any(part.lower() in str(self).lower() for part in PASSING)


@dataclass(frozen=True)
class JobState:
    """One job or array element as SLURM sees it."""

    job_id: str
    state: str
    """PENDING, RUNNING, COMPLETED, ...: one word."""
    reason: str = ""
    """Why it waits, or its exit code."""
    elapsed_s: int = 0
    nodes: str = ""


def installed() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def ask(*command: str, text: str | None = None, folder: Path | None = None) -> str:
    """Run one of SLURM's commands, with some text as its input, in a folder or in this one.

    Raises
    ------
    SlurmError
        If it is not there, fails or does not answer.
    """
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        process = subprocess.Popen(command, text=True, cwd=folder, **pipes)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine's PATH") from None
    with process:
        try:
            try:
                output, errors = process.communicate(text, timeout=SILENCE_S)
            except subprocess.TimeoutExpired:
                said = f"SLURM has not answered {command[0]} for {SILENCE_S} s; waiting up to {ANSWER_S} s."
                print(said, file=sys.stderr, flush=True)
                output, errors = process.communicate(timeout=ANSWER_S - SILENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SlurmError(f"{command[0]} did not answer within {ANSWER_S} s") from None
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        words = " ".join((errors or output).split())
        raise SlurmError(words or f"{command[0]} failed with exit code {process.returncode}")
    return output


def alive(*, everybody: bool = False) -> dict[str, JobState]:
    """Jobs that wait or run, array elements one by one: one's own, or those of everybody as far as SLURM shows them.

    Raises
    ------
    SlurmError
        If the controller cannot be asked.
    """
    return {state.job_id: state for state in squeue("--all" if everybody else "--me")}


def squeue(*options: str) -> list[JobState]:
    """Jobs in the queue that some options of squeue choose, array elements one by one.

    Raises
    ------
    SlurmError
        If the controller cannot be asked, or knows none of the jobs that were named.
    """
    found = []
    for line in ask("squeue", "--noheader", "--array", "--format=%i|%T|%r|%M|%N", *options).splitlines():
        job_id, state, reason, elapsed, nodes = line.split("|", 4)
        found.append(JobState(job_id, state, reason, seconds(elapsed), nodes))
    return found


def history(jobs: Iterable[str]) -> dict[str, list[JobState]] | None:
    """What accounting knows of jobs, arrays whole: for each element its incarnations, the first start first.

    None where the cluster keeps no accounts, or they cannot be asked.
    """
    arrays = arrays_of(jobs)
    if not arrays:
        return {}
    try:
        text = ask(
            *("sacct", "--allusers", "--allocations", "--noheader", "--parsable2", "--duplicates"),
            *(f"--jobs={','.join(arrays)}", "--format=JobID,State,ExitCode,ElapsedRaw,NodeList"),
        )
    except SlurmError:
        return None
    found: dict[str, list[JobState]] = {}
    for line in text.splitlines():
        ids, state, code, elapsed, nodes = line.split("|", 4)
        words = state.split() or ["UNKNOWN"]
        for job_id in elements(ids):
            entry = JobState(job_id, words[0], code, int(elapsed or 0), "" if nodes == "None assigned" else nodes)
            found.setdefault(job_id, []).append(entry)
    return found


def remembered(jobs: Iterable[str]) -> tuple[dict[str, JobState], bool]:
    """What the controller remembers of jobs and the rest of their arrays, and whether it answered."""
    arrays = arrays_of(jobs)
    try:
        states = squeue("--all", "--states=all", f"--jobs={','.join(arrays)}") if arrays else []
    except SlurmError as error:
        return {}, UNKNOWN_JOB in str(error)
    return {state.job_id: state for state in states}, True


def arrays_of(jobs: Iterable[str]) -> list[str]:
    """Ids of the arrays that some jobs are elements of, and of those that are of none."""
    return sorted({job.partition("_")[0] for job in jobs})


def elements(job_ids: str) -> list[str]:
    """Jobs that accounting has in one line: ``5_[0,2-3%1]`` is those of an array that never left the queue."""
    array, bracket, inside = job_ids.partition("_[")
    if not bracket:
        return [job_ids]
    found = []
    for part in inside.partition("]")[0].partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += [f"{array}_{number}" for number in range(int(first), int(last or first) + 1)]
    return found


def over(incarnations: Sequence[JobState]) -> bool:
    """Whether SLURM says that a job has ended, for all that it says of it."""
    return bool(incarnations) and incarnations[-1].state not in LIVE


def by_name(names: Collection[str]) -> dict[str, str]:
    """Ids of queued jobs of some names, anybody's, arrays whole."""
    if not names:
        return {}
    lines = ask("squeue", "--all", "--noheader", "--format=%F|%j").splitlines()
    return {name: job for job, _, name in (line.partition("|") for line in lines) if name in names}


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs, arrays or elements; those that have ended are left alone."""
    jobs = sorted(jobs)
    if jobs:
        ask("scancel", *jobs)


def test(script: str) -> None:
    """Ask whether SLURM would take a job script, without submitting it.

    Raises
    ------
    SlurmError
        If it would not, with its reason.
    """
    _patiently(lambda: ask("sbatch", "--test-only", text=script))


def submit(script: Path, folder: Path, job_name: str) -> str:
    """Submit a job script, to run in a folder; returns the id of the job.

    A controller that does not answer in time may have taken the job all the same: its name, which no other job has,
    is looked for before it is submitted again.

    Raises
    ------
    SlurmError
        If it is refused, with the reason.
    """
    tried = False

    def try_once() -> str:
        nonlocal tried
        taken = by_name([job_name]) if tried else {}
        tried = True
        return taken.get(job_name) or ask("sbatch", "--parsable", str(script), folder=folder)

    job_id = _patiently(try_once).strip().partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch said {job_id!r}, not the id of a job")
    return job_id


def _patiently(request: Callable[[], str]) -> str:
    """Ask again, for a while, after what passes."""
    deadline = time.monotonic() + 2 * ANSWER_S
    for pause_s in (*SUBMIT_AGAIN_S, None):
        try:
            return request()
        except SlurmError as error:
            if not error.passing or pause_s is None or time.monotonic() > deadline:
                raise
            print(f"{error}; trying again in {pause_s} s.", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    raise AssertionError


def has_gpus() -> bool:
    """Whether any node of the cluster has GPUs as SLURM sees it; true where it cannot be asked."""
    try:
        return any("gpu" in line for line in ask("sinfo", "--noheader", "--format=%G").splitlines())
    except SlurmError:
        return True


def requeue(job_id: str) -> None:
    """Have SLURM start a running job anew."""
    ask("scontrol", "requeue", job_id)


def neighbours(job_id: str, nodes: Iterable[str]) -> list[str] | None:
    """Other jobs, of anybody, that run on some nodes; None where SLURM does not say."""
    try:
        lines = ask("squeue", "--noheader", "--states=RUNNING", f"--nodelist={','.join(nodes)}", "--format=%i").split()
    except SlurmError:
        return None
    return [line for line in lines if line != job_id]


@functools.cache
def max_array_size() -> int:
    """Most elements one job array of this cluster may have."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else 1001


def seconds(clock: str) -> int:
    """``1-02:03:04`` or ``3:04`` in seconds."""
    days, _, rest = clock.rpartition("-")
    if not re.fullmatch(r"[\d:]+", rest):
        return 0
    seconds = 0
    for part in rest.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)
