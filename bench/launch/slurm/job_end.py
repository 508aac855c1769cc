"""How jobs come to their end, in SLURM's words: why one is stopped, what became of one that is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from bench.launch.slurm import queue
from bench.launch.slurm.queue import JobState

TIME_LIMIT_MARGIN_S = 150
"""SLURM looks at time limits every minute or so, and may send the warning signal a minute early."""

STATUS_BY_JOB_STATE = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "PREEMPTED": "preempted", "CANCELLED": "preempted"}
"""Statuses of runs by what SLURM calls the end of their job; `error` for all others."""

NEVER_STARTED_REASON = "never started"
"""The reason of an array's element that has left the queue on its own before it ran: SLURM forgets such a one."""

NO_OUTPUT_FILE_EXIT_CODE = "0:53"
"""Exit code of a job whose node could not open the file for its output."""

UNWRITABLE_EXIT_CODE = 73
"""Exit code of a job that could not write its row (EX_CANTCREAT of sysexits.h)."""

MAX_ACCOUNTING_LAG_S = 15.0
"""How far accounting may be behind the queue."""


def find_job_incarnations(job_ids: Iterable[str]) -> dict[str, list[JobState]]:
    """What SLURM says of jobs that have left the queue: their incarnations, as far as it remembers them.

    Accounting remembers all of them. Where it does not answer, or is behind, the controller remembers the last one for
    some minutes. An element that was cancelled alone before it ran is in neither; only that the rest of its array is
    known tells of it.
    """
    job_ids = list(job_ids)
    incarnations_by_job = queue.query_accounting(job_ids) or {}
    unsettled_ids = [job_id for job_id in job_ids if not queue.has_job_ended(incarnations_by_job.get(job_id, []))]
    remembered_states, was_answered = queue.query_controller(unsettled_ids)
    for job_id in unsettled_ids:
        array_id, incarnations = job_id.partition("_")[0], incarnations_by_job.get(job_id, [])
        was_waiting = not incarnations or incarnations[-1].state == "PENDING"
        known_arrays = queue.list_array_ids(
            remembered_states if incarnations else [*remembered_states, *incarnations_by_job]
        )
        if job_id in remembered_states:
            incarnations_by_job[job_id] = [*incarnations[:-1], remembered_states[job_id]]
        elif was_answered and was_waiting and array_id != job_id and array_id in known_arrays:
            incarnations_by_job[job_id] = [*incarnations[:-1], JobState(job_id, "CANCELLED", NEVER_STARTED_REASON)]
    return {job_id: incarnations_by_job[job_id] for job_id in job_ids if job_id in incarnations_by_job}


def wait_for_job_incarnations(job_ids: Iterable[str]) -> dict[str, list[JobState]]:
    """The same for jobs that have ended, as soon as SLURM knows so of each: accounting is some seconds behind."""
    wanted_ids, deadline = set(job_ids), time.monotonic() + MAX_ACCOUNTING_LAG_S
    while True:
        accounting = queue.query_accounting(wanted_ids)
        incarnations_by_job = find_job_incarnations(wanted_ids)
        if accounting is None or time.monotonic() > deadline:
            return incarnations_by_job
        unsettled_ids = [job_id for job_id in wanted_ids if not queue.has_job_ended(accounting.get(job_id, []))]
        if all(
            job_id in incarnations_by_job and incarnations_by_job[job_id][-1].reason == NEVER_STARTED_REASON
            for job_id in unsettled_ids
        ):
            return incarnations_by_job
        time.sleep(1)


def is_job_alive(job_id: str, *, is_own: bool) -> bool:
    """Whether a job waits or runs. Of another account's, which SLURM may hide, only what SLURM says is its end counts.

    Raises
    ------
    queue.SlurmError
        If SLURM cannot be asked.
    """
    try:
        if any(state.job_id == job_id for state in queue.query_squeue("--all", f"--jobs={job_id}")):
            return True
    except queue.SlurmError as error:
        if queue.UNKNOWN_JOB_MESSAGE not in str(error):
            raise
    return not is_own and not queue.has_job_ended(find_job_incarnations([job_id]).get(job_id, []))


def find_stop_reason(job_id: str, restart_count: int, nodes: Iterable[str]) -> tuple[str, str]:
    """Why a running job was sent a signal.

    Parameters
    ----------
    restart_count: int
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
        job_fields = dict(
            re.findall(r"(\w+)=(\S+)", queue.run_slurm_command("scontrol", "show", "job", "--oneliner", job_id))
        )
        down_nodes = queue.run_slurm_command(
            "sinfo", "--noheader", "--Node", "--states=down,fail", f"--nodes={','.join(nodes)}", "--format=%N"
        )
    except queue.SlurmError as error:
        return "unknown", f"why is unknown, for SLURM cannot be asked: {error}"
    if down_nodes.strip():
        return "node failure", f"{', '.join(sorted(set(down_nodes.split())))} went down"
    if job_fields.get("PreemptTime", "None") != "None" or job_fields.get("JobState") == "PREEMPTED":
        return "preempted", "a job of higher priority took its nodes"
    if int(job_fields.get("Restarts", 0)) > restart_count or job_fields.get("JobState") == "PENDING":
        return "requeued", "the job was taken off its nodes to start anew"
    run_s, limit_s = (
        queue.parse_duration_s(job_fields.get("RunTime", "")),
        queue.parse_duration_s(job_fields.get("TimeLimit", "")),
    )
    if limit_s and run_s > limit_s - TIME_LIMIT_MARGIN_S and run_s > limit_s / 4:
        return "time limit", "the job came to its time limit"
    if job_fields.get("JobState") in ("CANCELLED", "COMPLETING"):
        return "cancelled", "the job was cancelled"
    return "none", f"SLURM has no reason for it, the job's state is {job_fields.get('JobState')}"


def find_exit_record(owner: Mapping[str, Any]) -> dict[str, str]:
    """Status and error of an attempt that a job began and did not finish, by what SLURM says of its end."""
    job_id, restart_count = owner["job"], owner["restart"]
    deadline = time.monotonic() + MAX_ACCOUNTING_LAG_S
    while True:
        accounting = queue.query_accounting([job_id])
        incarnations = (accounting or {}).get(job_id, [])[restart_count:]
        if len(incarnations) > 1 or queue.has_job_ended(incarnations):
            end_state = incarnations[0]
            break
        if accounting is None or time.monotonic() > deadline:
            remembered_states, was_answered = queue.query_controller([job_id])
            if job_id not in remembered_states:
                reason = "SLURM knows nothing of it any more" if was_answered else "SLURM cannot be asked here"
                return {"status": "error", "error": f"why job {job_id} ended is unknown: {reason}"}
            end_state = remembered_states[job_id]
            if queue.has_job_ended([end_state]):
                break
            return {"status": "error", "error": f"SLURM started job {job_id} anew; why is unknown, without accounts"}
        time.sleep(1)
    error = f"SLURM ended job {job_id}: {describe_job_end(end_state)}"
    if end_state.state == "FAILED" and end_state.reason.startswith(f"{UNWRITABLE_EXIT_CODE}:"):
        error = f"job {job_id} could not write its row: the store was full or read-only"
    return {"status": STATUS_BY_JOB_STATE.get(end_state.state, "error"), "error": error}


def describe_job_end(end_state: JobState) -> str:
    """The end of a job as SLURM has it: ``NODE_FAIL on n1, exit code 0:0``."""
    nodes_text = f" on {end_state.nodes}" if end_state.nodes else ""
    return f"{end_state.state}{nodes_text}, {'exit code ' if ':' in end_state.reason else ''}{end_state.reason}"
