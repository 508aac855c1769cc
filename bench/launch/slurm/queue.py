"""What SLURM says of jobs, asked through its own commands.

`squeue` is asked first and decides what is alive: after a node failure `sacct` calls a job ended that SLURM is about
to run again. Jobs are named as SLURM names them: ``12`` or ``12_3`` for an element of an array.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ANSWER_S = 60
"""How long a command may take: a busy controller is slow."""

STOPPED_BY_LIMIT_S = 150
"""SLURM looks at time limits every minute or so, and may send the warning signal a minute early."""

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


STATUSES = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "PREEMPTED": "preempted", "CANCELLED": "preempted"}
"""Statuses of runs by what SLURM calls the end of their job; `error` for all others."""

UNWRITABLE = 73
"""Exit code of a job that could not write its row (EX_CANTCREAT of sysexits.h)."""


LIVE = {"PENDING", "RUNNING", "RESIZING", "SUSPENDED", "COMPLETING", "CONFIGURING"}
"""States in which a job has not ended."""

ACCOUNTS_LAG_S = 15.0
"""How far accounting may be behind the queue."""


class SlurmError(RuntimeError):
    """One of SLURM's commands failed; the text is what it said."""


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


def ask(*command: str, text: str | None = None) -> str:
    """Run one of SLURM's commands, with some text as its input.

    Raises
    ------
    SlurmError
        If it is not there, fails or does not answer.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {ANSWER_S} s") from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(words or f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout


def alive() -> dict[str, JobState]:
    """The user's own jobs that wait or run, array elements one by one.

    Raises
    ------
    SlurmError
        If the controller cannot be asked.
    """
    found = {}
    for line in ask("squeue", "--me", "--noheader", "--array", "--format=%i|%T|%r|%M|%N").splitlines():
        job_id, state, reason, elapsed, nodes = line.split("|", 4)
        found[job_id] = JobState(job_id, state, reason, _seconds(elapsed), nodes)
    return found


def history(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """What accounting knows of jobs, arrays whole: for each element its incarnations, the first start first.

    Empty where the cluster keeps no accounts.
    """
    arrays = sorted({job.partition("_")[0] for job in jobs})
    if not arrays:
        return {}
    try:
        text = ask(
            *("sacct", "--allocations", "--noheader", "--parsable2", "--duplicates", f"--jobs={','.join(arrays)}"),
            "--format=JobID,State,ExitCode,ElapsedRaw,NodeList",
        )
    except SlurmError:
        return {}
    found: dict[str, list[JobState]] = {}
    for line in text.splitlines():
        ids, state, code, elapsed, nodes = line.split("|", 4)
        words = state.split() or ["UNKNOWN"]
        for job_id in elements(ids):
            entry = JobState(job_id, words[0], code, int(elapsed or 0), "" if nodes == "None assigned" else nodes)
            found.setdefault(job_id, []).append(entry)
    return found


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


def settled_history(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """The same for jobs that have ended, as soon as accounting knows so of each: it is some seconds behind."""
    wanted, deadline = set(jobs), time.monotonic() + ACCOUNTS_LAG_S
    while True:
        found = history(wanted)
        ends = {job: states[-1].state for job, states in found.items()}
        if all(ends.get(job, "PENDING") not in LIVE for job in wanted) or time.monotonic() > deadline:
            return found
        time.sleep(1)


def by_name() -> dict[str, str]:
    """Ids of the user's queued jobs by their name, arrays whole."""
    lines = ask("squeue", "--me", "--noheader", "--format=%F|%j").splitlines()
    return {name: job for job, _, name in (line.partition("|") for line in lines)}


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
    ask("sbatch", "--test-only", text=script)


def requeue(job_id: str) -> None:
    """Have SLURM start a running job anew."""
    ask("scontrol", "requeue", job_id)


def why_stopped(job_id: str, restart: int, nodes: Iterable[str]) -> tuple[str, str]:
    """Why a running job was sent a signal.

    Parameters
    ----------
    restart: int
        How often the job had been started before, when it began to run.
    nodes: iterable of str
        The job's nodes.

    Returns
    -------
    str, str
        `cancelled`, `preempted`, `time limit`, `node failure`, `requeued` or `unknown`; and the same for people.
    """
    try:
        facts = dict(re.findall(r"(\w+)=(\S+)", ask("scontrol", "show", "job", "--oneliner", job_id)))
        down = ask("sinfo", "--noheader", "--Node", "--states=down,fail", f"--nodes={','.join(nodes)}", "--format=%N")
    except SlurmError as error:
        return "unknown", f"SLURM could not be asked why: {error}"
    if down.strip():
        return "node failure", f"{', '.join(sorted(set(down.split())))} went down"
    if facts.get("PreemptTime", "None") != "None" or facts.get("JobState") == "PREEMPTED":
        return "preempted", "a job of higher priority took its nodes"
    if int(facts.get("Restarts", 0)) > restart or facts.get("JobState") == "PENDING":
        return "requeued", "the job was taken off its nodes to start anew"
    run, limit = _seconds(facts.get("RunTime", "")), _seconds(facts.get("TimeLimit", ""))
    if limit and run > limit - STOPPED_BY_LIMIT_S and run > limit / 4:
        return "time limit", "the job came to its time limit"
    if facts.get("JobState") in ("CANCELLED", "COMPLETING"):
        return "cancelled", "the job was cancelled"
    return "unknown", f"the job's state is {facts.get('JobState')}"


def obituary(owner: dict[str, Any]) -> dict[str, str]:
    """Status and error of an attempt that a job began and did not finish, by what accounting says of its end."""
    job_id, restart = owner["job"], owner["restart"]
    deadline = time.monotonic() + ACCOUNTS_LAG_S
    while True:
        incarnations = history([job_id]).get(job_id, [])[restart:]
        if len(incarnations) > 1 or (incarnations and incarnations[0].state not in LIVE):
            break
        if time.monotonic() > deadline:
            return {"status": "error", "error": f"job {job_id} ended without a word"}
        time.sleep(1)
    end = incarnations[0]
    where = f" on {end.nodes}" if end.nodes else ""
    words = f"SLURM ended job {job_id}: {end.state}{where}, exit code {end.reason}"
    if end.state == "FAILED" and end.reason.startswith(f"{UNWRITABLE}:"):
        words = f"job {job_id} could not write its row: the store was full or read-only"
    return {"status": STATUSES.get(end.state, "error"), "error": words}


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


def _seconds(clock: str) -> int:
    """``1-02:03:04`` or ``3:04`` in seconds."""
    days, _, rest = clock.rpartition("-")
    if not re.fullmatch(r"[\d:]+", rest):
        return 0
    seconds = 0
    for part in rest.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds + 86400 * int(days or 0)
