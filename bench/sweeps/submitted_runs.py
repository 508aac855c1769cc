"""Follow, cancel and describe what was submitted from a store."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.core.errors import UsageError
from bench.launch.attempt import describe_outcome
from bench.launch.slurm import queue
from bench.launch.slurm.submission_status import (
    DONE,
    FAILED,
    LOST,
    QUEUED,
    RUNNING,
    UNFINISHED_STATES,
    UNKNOWN,
    UNSUBMITTED,
    SubmittedRunStatus,
    collect_submissions,
    describe_last_output,
    list_run_statuses,
)
from bench.launch.slurm.submissions import Submission, hold_submission_lock, list_submissions

POLL_INTERVAL_S = 5.0
SLURM_SILENCE_TIMEOUT_S = 600.0
"""How long a watch goes on without hearing from SLURM: controllers are restarted."""
MAX_TABLE_ROWS = 20
STATES = (QUEUED, RUNNING, UNKNOWN, DONE, FAILED, LOST, UNSUBMITTED)
STYLE_BY_STATE = {QUEUED: "dim", RUNNING: "cyan", UNKNOWN: "dim", DONE: "green", FAILED: "red", LOST: "red"}


def follow_submissions(
    action: str, store: Path, submission_name: str | None, console: Console
) -> list[SubmittedRunStatus]:
    """Watch or cancel what was submitted, if `action` says so, and collect what is over.

    Raises
    ------
    UsageError
        If there is no store or no such submission, or nothing that this account may cancel.
    SlurmError
        If SLURM cannot be asked.
    """
    submissions = _select_submissions(store, submission_name)
    if not submissions:
        return []
    if action == "watch":
        _watch_submissions(store, submissions, console)
    elif action == "cancel":
        _cancel_submissions(store, submissions)
    with hold_submission_lock(store):  # jobs that are about to be submitted look lost
        return collect_submissions(store, submissions)


def _select_submissions(store: Path, name: str | None) -> list[Submission]:
    """The open submissions of a store, or the one called `name`.

    Raises
    ------
    UsageError
        If there is no store, or no such submission.
    """
    if not store.is_dir():
        raise UsageError(f"store={store} is not valid: choose a folder that a sweep wrote to.")
    all_submissions = list_submissions(store, include_closed=True)
    if name is None:
        return [submission for submission in all_submissions if not submission.is_closed]
    chosen_submissions = [submission for submission in all_submissions if submission.name == name]
    if not chosen_submissions:
        names = (
            ", ".join(submission.name for submission in all_submissions)
            or "none: nothing was submitted from this store"
        )
        raise UsageError(f"--submission={name} is not valid: choose {names}.")
    return chosen_submissions


def _select_own_submissions(submissions: Sequence[Submission]) -> list[Submission]:
    """Those of some submissions that this account may cancel.

    Raises
    ------
    UsageError
        If there are none.
    """
    own_submissions = [submission for submission in submissions if submission.is_own]
    others_text = ", ".join(
        f"{submission.name} of {submission.user}" for submission in submissions if not submission.is_own
    )
    if not own_submissions:
        raise UsageError(f"Only who submitted jobs can cancel them, and nothing here is yours: {others_text}.")
    if others_text:
        print(f"Left alone: {others_text}.")
    return own_submissions


def _cancel_submissions(store: Path, submissions: Sequence[Submission]) -> None:
    """Cancel what waits or runs, and wait until none of it is left."""
    statuses = list_run_statuses(store, _select_own_submissions(submissions), with_accounting=False)
    live_statuses = [status for status in statuses if status.queue_state is not None and status.job_id is not None]
    for submission in submissions:
        own_job_ids = [status.job_id for status in live_statuses if status.submission is submission and status.job_id]
        if own_job_ids:
            submission.write_cancelled_job_ids(own_job_ids)
    job_ids = [status.job_id for status in live_statuses if status.job_id]
    queue.cancel_jobs(job_ids)
    deadline = time.monotonic() + SLURM_SILENCE_TIMEOUT_S
    while set(job_ids) & set(queue.list_live_jobs()) and time.monotonic() < deadline:
        time.sleep(1)
    print(f"Cancelled {len(job_ids)} job(s).")


def _watch_submissions(store: Path, submissions: Sequence[Submission], console: Console) -> None:
    """Show how far the submissions are until they are over."""
    answered_at = time.monotonic()
    reported_attempts: set[tuple[str, int, int]] = set()
    with bars.Progress(
        bars.BarColumn(bar_width=30),
        bars.TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress_bar:
        progress_task = progress_bar.add_task(
            "asking SLURM", total=sum(len(array.entries) for submission in submissions for array in submission.arrays)
        )
        last_line = ""
        while True:
            try:
                statuses = list_run_statuses(store, submissions)
                answered_at = time.monotonic()
            except queue.SlurmError as error:
                if time.monotonic() - answered_at > SLURM_SILENCE_TIMEOUT_S:
                    raise
                progress_bar.update(progress_task, description=f"SLURM does not answer: {error}")
                time.sleep(POLL_INTERVAL_S)
                continue
            for status in statuses:
                _print_new_row(status, reported_attempts, console)
            progress_line = _describe_progress(statuses)
            progress_bar.update(
                progress_task,
                description=progress_line,
                completed=sum(status.state in (DONE, FAILED, LOST) for status in statuses),
            )
            if not console.is_terminal and progress_line != last_line:
                console.print(progress_line)
                last_line = progress_line
            if all(status.is_over for status in statuses):
                return
            time.sleep(POLL_INTERVAL_S)


def _print_new_row(status: SubmittedRunStatus, reported_attempts: set[tuple[str, int, int]], console: Console) -> None:
    """Print a line for each new row."""
    record = status.record
    if record is None:
        return
    key = (status.submitted_run.run_id, status.index, record["attempt"])
    if key not in reported_attempts:
        reported_attempts.add(key)
        console.print(
            f"{record['status']:9} {status.submitted_run.label}: {describe_outcome(record)}",
            soft_wrap=True,
            markup=False,
        )


def _describe_progress(statuses: Sequence[SubmittedRunStatus]) -> str:
    """How far the submissions are: ``3 queued, 1 running, 4 done, 0.2 GPU-hours so far``."""
    count_by_state = Counter(status.state for status in statuses)
    parts = [f"{count_by_state[state]} {state}" for state in STATES if count_by_state[state] or state == DONE]
    gpu_hours = [status.gpu_hours for status in statuses]
    known_gpu_hours = [hours for hours in gpu_hours if hours is not None]
    gpu_hours_text = (
        f"{sum(known_gpu_hours):.2f} GPU-hours so far"
        if len(known_gpu_hours) == len(gpu_hours)
        else "GPU-hours unknown (sacct does not answer)"
    )
    return ", ".join([*parts, gpu_hours_text])


def build_status_report(store: Path, statuses: Sequence[SubmittedRunStatus]) -> RenderableType:
    """Every submission in a line, what failed and why, and what to type next."""
    parts: list[RenderableType] = []
    for name in dict.fromkeys(status.submission.name for status in statuses):
        submission_statuses = [status for status in statuses if status.submission.name == name]
        state_text = "over" if all(status.is_over for status in submission_statuses) else "open"
        owner_text = "" if submission_statuses[0].submission.is_own else f" of {submission_statuses[0].submission.user}"
        parts.append(
            Text(
                f"{name}{owner_text} ({submission_statuses[0].submission.sweep}), {state_text}: "
                f"{_describe_progress(submission_statuses)}"
            )
        )
    unfinished_statuses = [status for status in statuses if status.state in UNFINISHED_STATES]
    failed_statuses = [status for status in statuses if status.state in (FAILED, LOST)]
    for title, chosen_statuses in (("Not over", unfinished_statuses), ("Failed", failed_statuses)):
        if chosen_statuses:
            parts.append(_build_table(title, chosen_statuses))
    if failed_statuses or any(status.state == UNSUBMITTED for status in statuses):
        parts.append(Text("The same sweep command submits again what has no result."))
    if not unfinished_statuses:
        parts.append(Text(f"Report: python -m bench.report {shlex.quote(str(store))}"))
    return Group(*parts)


def _build_table(title: str, statuses: Sequence[SubmittedRunStatus]) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    for status in statuses[:MAX_TABLE_ROWS]:
        status_text = status.state
        if status.state == QUEUED and status.queue_state is not None:
            pending_hint = queue.HELD_JOB_HINTS.get(status.queue_state.reason, status.queue_state.reason)
            status_text = f"waits: {pending_hint.format(job=status.job_id)}"
        elif status.state == RUNNING and status.queue_state is not None:
            status_text = f"on {status.queue_state.nodes} for {status.queue_state.elapsed_s} s"
        elif status.state == UNKNOWN:
            status_text = f"unknown: SLURM does not show it; {status.submission.user} can collect it"
        elif status.record is not None:
            status_text = f"{status.record['status']}: {describe_outcome(status.record)}"
        elif status.state == LOST:
            status_text = f"lost. {describe_last_output(status)}"
        table.add_row(
            Text(str(status.job_id)),
            Text(status.submitted_run.label),
            Text(status_text, style=STYLE_BY_STATE[status.state]),
        )
    if len(statuses) > MAX_TABLE_ROWS:
        table.add_row("", Text(f"and {len(statuses) - MAX_TABLE_ROWS} more"), "")
    return table
