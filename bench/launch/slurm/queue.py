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

COMMAND_TIMEOUT_S = 60
"""How long a command may take: a busy controller is slow."""

SLOW_ANSWER_NOTICE_S = 5
"""After how long it is said that one has not answered."""

TRANSIENT_ERRORS = (
    "timed out",
    "Unable to contact slurm controller",
    "Zero Bytes",
    "temporarily un",
    "standby",
    "connection",
)
"""Parts of what SLURM says when the same command may succeed a moment later."""

SUBMIT_RETRY_DELAYS_S = (2, 5, 15)
"""How long to wait before each further try to submit."""

PERMANENT_PENDING_REASONS = {
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

UNDECIDED_PENDING_REASONS = {"None", "PartitionConfig"}
"""Reasons of a job that the scheduler has not looked at yet."""


UNKNOWN_JOB_MESSAGE = "Invalid job id"
"""Part of what squeue says of a job that the controller does not remember."""

LIVE_STATES = {"PENDING", "RUNNING", "RESIZING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}
"""States in which a job has not ended."""

HELD_JOB_HINTS = {"JobHeldUser": "held: scontrol release {job}", "JobHeldAdmin": "held by an administrator"}
"""What to do about jobs that wait for these reasons."""


class SlurmError(RuntimeError):
    """One of SLURM's commands failed; the text is what it said."""

    @property
    def is_transient(self) -> bool:
        """Whether the same command may succeed a moment later."""
        return any(pattern.lower() in str(self).lower() for pattern in TRANSIENT_ERRORS)


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


def is_slurm_installed() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def run_slurm_command(*command: str, input_text: str | None = None, folder: Path | None = None) -> str:
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
                output, errors = process.communicate(input_text, timeout=SLOW_ANSWER_NOTICE_S)
            except subprocess.TimeoutExpired:
                message = (
                    f"SLURM has not answered {command[0]} for {SLOW_ANSWER_NOTICE_S} s; waiting up to "
                    f"{COMMAND_TIMEOUT_S} s."
                )
                print(message, file=sys.stderr, flush=True)
                output, errors = process.communicate(timeout=COMMAND_TIMEOUT_S - SLOW_ANSWER_NOTICE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SlurmError(f"{command[0]} did not answer within {COMMAND_TIMEOUT_S} s") from None
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        message = " ".join((errors or output).split())
        raise SlurmError(message or f"{command[0]} failed with exit code {process.returncode}")
    return output


def list_live_jobs(*, all_users: bool = False) -> dict[str, JobState]:
    """Jobs that wait or run, array elements one by one: one's own, or those of everybody as far as SLURM shows them.

    Raises
    ------
    SlurmError
        If the controller cannot be asked.
    """
    return {state.job_id: state for state in query_squeue("--all" if all_users else "--me")}


def query_squeue(*options: str) -> list[JobState]:
    """Jobs in the queue that some options of squeue choose, array elements one by one.

    Raises
    ------
    SlurmError
        If the controller cannot be asked, or knows none of the jobs that were named.
    """
    job_states = []
    for line in run_slurm_command("squeue", "--noheader", "--array", "--format=%i|%T|%r|%M|%N", *options).splitlines():
        job_id, state, reason, elapsed, nodes = line.split("|", 4)
        job_states.append(JobState(job_id, state, reason, parse_duration_s(elapsed), nodes))
    return job_states


def query_accounting(job_ids: Iterable[str]) -> dict[str, list[JobState]] | None:
    """What accounting knows of jobs, arrays whole: for each element its incarnations, the first start first.

    None where the cluster keeps no accounts, or they cannot be asked.
    """
    array_ids = list_array_ids(job_ids)
    if not array_ids:
        return {}
    try:
        output = run_slurm_command(
            *("sacct", "--allusers", "--allocations", "--noheader", "--parsable2", "--duplicates"),
            *(f"--jobs={','.join(array_ids)}", "--format=JobID,State,ExitCode,ElapsedRaw,NodeList"),
        )
    except SlurmError:
        return None
    incarnations_by_job: dict[str, list[JobState]] = {}
    for line in output.splitlines():
        job_ids_text, state, exit_code, elapsed, nodes = line.split("|", 4)
        state_words = state.split() or ["UNKNOWN"]
        for job_id in expand_element_ids(job_ids_text):
            incarnation = JobState(
                job_id, state_words[0], exit_code, int(elapsed or 0), "" if nodes == "None assigned" else nodes
            )
            incarnations_by_job.setdefault(job_id, []).append(incarnation)
    return incarnations_by_job


def query_controller(job_ids: Iterable[str]) -> tuple[dict[str, JobState], bool]:
    """What the controller remembers of jobs and the rest of their arrays, and whether it answered."""
    array_ids = list_array_ids(job_ids)
    try:
        states = query_squeue("--all", "--states=all", f"--jobs={','.join(array_ids)}") if array_ids else []
    except SlurmError as error:
        return {}, UNKNOWN_JOB_MESSAGE in str(error)
    return {state.job_id: state for state in states}, True


def list_array_ids(job_ids: Iterable[str]) -> list[str]:
    """Ids of the arrays that some jobs are elements of, and of those that are of none."""
    return sorted({job_id.partition("_")[0] for job_id in job_ids})


def expand_element_ids(job_ids_text: str) -> list[str]:
    """Jobs that accounting has in one line: ``5_[0,2-3%1]`` is those of an array that never left the queue."""
    array_id, bracket, index_text = job_ids_text.partition("_[")
    if not bracket:
        return [job_ids_text]
    element_ids = []
    for index_range in index_text.partition("]")[0].partition("%")[0].split(","):
        first, _, last = index_range.partition("-")
        element_ids += [f"{array_id}_{index}" for index in range(int(first), int(last or first) + 1)]
    return element_ids


def has_job_ended(incarnations: Sequence[JobState]) -> bool:
    """Whether SLURM says that a job has ended, for all that it says of it."""
    return bool(incarnations) and incarnations[-1].state not in LIVE_STATES


def find_job_ids_by_name(names: Collection[str]) -> dict[str, str]:
    """Ids of queued jobs of some names, anybody's, arrays whole."""
    if not names:
        return {}
    lines = run_slurm_command("squeue", "--all", "--noheader", "--format=%F|%j").splitlines()
    return {name: job_id for job_id, _, name in (line.partition("|") for line in lines) if name in names}


def cancel_jobs(job_ids: Iterable[str]) -> None:
    """Cancel jobs, arrays or elements; those that have ended are left alone."""
    job_ids = sorted(job_ids)
    if job_ids:
        run_slurm_command("scancel", *job_ids)


def check_script(script: str) -> None:
    """Ask whether SLURM would take a job script, without submitting it.

    Raises
    ------
    SlurmError
        If it would not, with its reason.
    """
    _retry_transient_errors(lambda: run_slurm_command("sbatch", "--test-only", input_text=script))


def submit_script(script: Path, folder: Path, job_name: str) -> str:
    """Submit a job script, to run in a folder; returns the id of the job.

    A controller that does not answer in time may have taken the job all the same: its name, which no other job has,
    is looked for before it is submitted again.

    Raises
    ------
    SlurmError
        If it is refused, with the reason.
    """
    has_tried = False

    def submit_once() -> str:
        nonlocal has_tried
        job_id_by_name = find_job_ids_by_name([job_name]) if has_tried else {}
        has_tried = True
        return job_id_by_name.get(job_name) or run_slurm_command("sbatch", "--parsable", str(script), folder=folder)

    job_id = _retry_transient_errors(submit_once).strip().partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch said {job_id!r}, not the id of a job")
    return job_id


def _retry_transient_errors(request: Callable[[], str]) -> str:
    """Ask again, for a while, after what passes."""
    deadline = time.monotonic() + 2 * COMMAND_TIMEOUT_S
    for pause_s in (*SUBMIT_RETRY_DELAYS_S, None):
        try:
            return request()
        except SlurmError as error:
            if not error.is_transient or pause_s is None or time.monotonic() > deadline:
                raise
            print(f"{error}; trying again in {pause_s} s.", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    raise AssertionError


def has_gpus() -> bool:
    """Whether any node of the cluster has GPUs as SLURM sees it; true where it cannot be asked."""
    try:
        return any("gpu" in line for line in run_slurm_command("sinfo", "--noheader", "--format=%G").splitlines())
    except SlurmError:
        return True


def requeue_job(job_id: str) -> None:
    """Have SLURM start a running job anew."""
    run_slurm_command("scontrol", "requeue", job_id)


def list_other_jobs(job_id: str, nodes: Iterable[str]) -> list[str] | None:
    """Other jobs, of anybody, that run on some nodes; None where SLURM does not say."""
    try:
        lines = run_slurm_command(
            "squeue", "--noheader", "--states=RUNNING", f"--nodelist={','.join(nodes)}", "--format=%i"
        ).split()
    except SlurmError:
        return None
    return [line for line in lines if line != job_id]


@functools.cache
def query_max_array_size() -> int:
    """Most elements one job array of this cluster may have."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", run_slurm_command("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else 1001


def parse_duration_s(duration_text: str) -> int:
    """``1-02:03:04`` or ``3:04`` in seconds."""
    days, _, rest = duration_text.rpartition("-")
    if not re.fullmatch(r"[\d:]+", rest):
        return 0
    total_s = 0
    for part in rest.split(":"):
        total_s = 60 * total_s + int(part)
    return total_s + 86400 * int(days or 0)
