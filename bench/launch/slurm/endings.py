"""How jobs come to their end, in SLURM's words: why one is stopped, what became of one that is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bench.launch.slurm import queue
from bench.launch.slurm.queue import JobState

STOPPED_BY_LIMIT_S = 150
"""SLURM looks at time limits every minute or so, and may send the warning signal a minute early."""

STATUSES = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "PREEMPTED": "preempted", "CANCELLED": "preempted"}
"""Statuses of runs by what SLURM calls the end of their job; `error` for all others."""

NOT_STARTED = "never started"
"""The reason of an array's element that has left the queue on its own before it ran: SLURM forgets such a one."""

NO_OUTPUT_FILE = "0:53"
"""Exit code of a job whose node could not open the file for its output."""

UNWRITABLE = 73
"""Exit code of a job that could not write its row (EX_CANTCREAT of sysexits.h)."""

ACCOUNTS_LAG_S = 15.0
"""How far accounting may be behind the queue."""


def ends(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """What SLURM says of jobs that have left the queue: their incarnations, as far as it remembers them.

    Accounting remembers all of them. Where it does not answer, or is behind, the controller remembers the last one for
    some minutes. An element that was cancelled alone before it ran is in neither; only that the rest of its array is
    known tells of it.
    """
    jobs = list(jobs)
    found = queue.history(jobs) or {}
    unsettled = [job for job in jobs if not queue.over(found.get(job, []))]
    remembered, asked = queue.remembered(unsettled)
    for job in unsettled:
        array, incarnations = job.partition("_")[0], found.get(job, [])
        waited = not incarnations or incarnations[-1].state == "PENDING"
        rest = queue.arrays_of(remembered if incarnations else [*remembered, *found])
        if job in remembered:
            found[job] = [*incarnations[:-1], remembered[job]]
        elif asked and waited and array != job and array in rest:
            found[job] = [*incarnations[:-1], JobState(job, "CANCELLED", NOT_STARTED)]
    return {job: found[job] for job in jobs if job in found}


def settled_ends(jobs: Iterable[str]) -> dict[str, list[JobState]]:
    """The same for jobs that have ended, as soon as SLURM knows so of each: accounting is some seconds behind."""
    wanted, deadline = set(jobs), time.monotonic() + ACCOUNTS_LAG_S
    while True:
        accounts = queue.history(wanted)
        found = ends(wanted)
        if accounts is None or time.monotonic() > deadline:
            return found
        left = [job for job in wanted if not queue.over(accounts.get(job, []))]
        if all(job in found and found[job][-1].reason == NOT_STARTED for job in left):
            return found
        time.sleep(1)


def lives(job_id: str, *, own: bool) -> bool:
    """Whether a job waits or runs. Of another account's, which SLURM may hide, only what SLURM says is its end counts.

    Raises
    ------
    queue.SlurmError
        If SLURM cannot be asked.
    """
    try:
        if any(state.job_id == job_id for state in queue.squeue("--all", f"--jobs={job_id}")):
            return True
    except queue.SlurmError as error:
        if queue.UNKNOWN_JOB not in str(error):
            raise
    return not own and not queue.over(ends([job_id]).get(job_id, []))


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
        `cancelled`, `preempted`, `time limit`, `node failure`, `requeued`, `none` if SLURM has no reason, or `unknown`
        if it cannot be asked; and the same for people.
    """
    try:
        facts = dict(re.findall(r"(\w+)=(\S+)", queue.ask("scontrol", "show", "job", "--oneliner", job_id)))
        down = queue.ask(
            "sinfo", "--noheader", "--Node", "--states=down,fail", f"--nodes={','.join(nodes)}", "--format=%N"
        )
    except queue.SlurmError as error:
        return "unknown", f"why is unknown, for SLURM cannot be asked: {error}"
    if down.strip():
        return "node failure", f"{', '.join(sorted(set(down.split())))} went down"
    if facts.get("PreemptTime", "None") != "None" or facts.get("JobState") == "PREEMPTED":
        return "preempted", "a job of higher priority took its nodes"
    if int(facts.get("Restarts", 0)) > restart or facts.get("JobState") == "PENDING":
        return "requeued", "the job was taken off its nodes to start anew"
    run, limit = queue.seconds(facts.get("RunTime", "")), queue.seconds(facts.get("TimeLimit", ""))
    if limit and run > limit - STOPPED_BY_LIMIT_S and run > limit / 4:
        return "time limit", "the job came to its time limit"
    if facts.get("JobState") in ("CANCELLED", "COMPLETING"):
        return "cancelled", "the job was cancelled"
    return "none", f"SLURM has no reason for it, the job's state is {facts.get('JobState')}"


def obituary(owner: Mapping[str, Any]) -> dict[str, str]:
    """Status and error of an attempt that a job began and did not finish, by what SLURM says of its end."""
    job_id, restart = owner["job"], owner["restart"]
    deadline = time.monotonic() + ACCOUNTS_LAG_S
    while True:
        accounts = queue.history([job_id])
        incarnations = (accounts or {}).get(job_id, [])[restart:]
        if len(incarnations) > 1 or queue.over(incarnations):
            end = incarnations[0]
            break
        if accounts is None or time.monotonic() > deadline:
            remembered, asked = queue.remembered([job_id])
            if job_id not in remembered:
                why = "SLURM knows nothing of it any more" if asked else "SLURM cannot be asked here"
                return {"status": "error", "error": f"why job {job_id} ended is unknown: {why}"}
            end = remembered[job_id]
            if queue.over([end]):
                break
            return {"status": "error", "error": f"SLURM started job {job_id} anew; why is unknown, without accounts"}
        time.sleep(1)
    words = f"SLURM ended job {job_id}: {described(end)}"
    if end.state == "FAILED" and end.reason.startswith(f"{UNWRITABLE}:"):
        words = f"job {job_id} could not write its row: the store was full or read-only"
    return {"status": STATUSES.get(end.state, "error"), "error": words}


def described(end: JobState) -> str:
    """The end of a job as SLURM has it: ``NODE_FAIL on n1, exit code 0:0``."""
    where = f" on {end.nodes}" if end.nodes else ""
    return f"{end.state}{where}, {'exit code ' if ':' in end.reason else ''}{end.reason}"
