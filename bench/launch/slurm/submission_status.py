"""Where a store's submissions stand, and the rows of jobs that could not write them themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.core.errors import UsageError
from bench.core.files import format_value
from bench.launch.attempt import print_safely, write_lost_row, write_unstarted_row
from bench.launch.slurm import job_end, queue
from bench.launch.slurm.queue import JobState
from bench.launch.slurm.submissions import JobArray, Submission, SubmittedRun, list_submissions
from bench.records import Claim, Record, claims
from bench.records.schema import FINISHED_STATUSES
from bench.tracking import TrackerClient, load_tracker

QUEUED, RUNNING, DONE, FAILED, LOST = "queued", "running", "done", "failed", "lost"

UNSUBMITTED = "not submitted"
"""Whoever submitted the rest did not live to submit it."""

UNKNOWN = "unknown"
"""Somebody else's job that SLURM neither shows nor calls ended."""

UNFINISHED_STATES = (QUEUED, RUNNING, UNKNOWN)
"""Something may still come of these."""

MAX_OUTPUT_LINES = 3

UNSTARTED_STATES = ("CANCELLED", "PENDING")
"""What accounting calls a job that was taken out of the queue before it ran."""


@dataclass(frozen=True)
class SubmittedRunStatus:
    """One task of a submission, and how far it is."""

    submission: Submission
    array: JobArray
    index: int
    submitted_run: SubmittedRun
    job_id: str | None
    """None if its array was never submitted."""
    state: str
    """queued, running, done, failed, or lost (its job is gone and left no row); or not submitted, or unknown."""
    record: Record | None
    """The newest row written since it was submitted."""
    queue_state: JobState | None
    incarnations: list[JobState]
    """What accounting says of its job's incarnations."""
    has_accounting: bool = True
    """Whether accounting could be asked."""

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours its job has taken so far; None where SLURM keeps no accounts, or they cannot be asked."""
        if not self.has_accounting:
            return None
        elapsed_s = sum(incarnation.elapsed_s for incarnation in self.incarnations)
        if self.queue_state is not None and not any(
            incarnation.state == self.queue_state.state for incarnation in self.incarnations
        ):
            elapsed_s += self.queue_state.elapsed_s
        return elapsed_s * self.array.gpus / 3600

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.queue_state is None and self.state not in UNFINISHED_STATES


def list_run_statuses(
    store: Path, submissions: Sequence[Submission], *, with_accounting: bool = True
) -> list[SubmittedRunStatus]:
    """Where every task of some submissions stands.

    Parameters
    ----------
    with_accounting: bool
        Ask accounting too: for GPU-hours, and the ends of jobs.

    Raises
    ------
    SlurmError
        If SLURM cannot be asked what is alive.
    """
    if not submissions:
        return []
    live_jobs = queue.list_live_jobs(all_users=not all(submission.is_own for submission in submissions))
    job_ids = _find_job_ids(submissions)
    history = queue.query_accounting(filter(None, job_ids.values())) if with_accounting else {}
    statuses = [
        _build_run_status(store, submission, array, index, job_ids[submission.name, array.name], live_jobs, history)
        for submission in submissions
        for array in submission.arrays
        for index in range(len(array.entries))
    ]
    # Of somebody else's job that is not in the queue, which SLURM may only hide, what counts is its end.
    gone_job_ids = [
        status.job_id
        for status in statuses
        if status.state in (LOST, FAILED) and not status.submission.is_own and status.job_id is not None
    ]
    incarnations_by_job = job_end.find_job_incarnations(gone_job_ids) if gone_job_ids else {}
    hidden_job_ids = {job_id for job_id in gone_job_ids if not queue.has_job_ended(incarnations_by_job.get(job_id, []))}
    newest_submission = {
        (status.submitted_run.run_id, status.submitted_run.search): status.submission for status in statuses
    }
    return [
        dataclasses.replace(status, state=UNKNOWN) if status.job_id in hidden_job_ids else status
        for status in statuses
        # What a command did not live to submit, a later one did.
        if status.state != UNSUBMITTED
        or newest_submission[status.submitted_run.run_id, status.submitted_run.search] is status.submission
    ]


def _find_job_ids(submissions: Sequence[Submission]) -> dict[tuple[str, str], str | None]:
    """SLURM's ids of arrays, by the names of submission and array; None if an array was never submitted.

    Where whoever submitted it did not live to write its id down, and it has not started, it is found by its name.
    """
    job_ids = {
        (submission.name, array.name): submission.read_job_id(array)
        for submission in submissions
        for array in submission.arrays
    }
    unknown_arrays = {
        array.job_name: (submission, array)
        for submission in submissions
        for array in submission.arrays
        if not job_ids[submission.name, array.name]
    }
    for name, job_id in queue.find_job_ids_by_name(unknown_arrays).items():
        submission, array = unknown_arrays[name]
        submission.write_job_id(array, job_id)
        job_ids[submission.name, array.name] = job_id
    return job_ids


def _build_run_status(
    store: Path,
    submission: Submission,
    array: JobArray,
    index: int,
    array_job_id: str | None,
    live_jobs: Mapping[str, JobState],
    history: Mapping[str, list[JobState]] | None,
) -> SubmittedRunStatus:
    submitted_run = array.entries[index]
    job_id = array.build_element_id(array_job_id, index) if array_job_id else None
    queue_state = live_jobs.get(job_id) if job_id else None
    record = records.read_latest_row(store, submitted_run.run_id)
    if record is not None and record["attempt"] < submitted_run.attempts_before:
        record = None
    incarnations = (history or {}).get(job_id, []) if job_id else []
    is_recorded = record is not None and record["status"] in FINISHED_STATUSES
    is_search_done = queue_state is None and incarnations != [] and incarnations[-1].state == "COMPLETED"
    if is_search_done if submitted_run.search else is_recorded:
        state = DONE
    elif queue_state is not None and queue_state.state != "COMPLETING":
        state = QUEUED if queue_state.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else RUNNING
    elif record is not None and claims.find_claim(store, submitted_run.run_id) is None:
        state = FAILED
    elif job_id is None:
        state = UNSUBMITTED
    else:
        state = LOST if queue_state is None else RUNNING
    has_accounting = history is not None or job_id is None
    return SubmittedRunStatus(
        submission, array, index, submitted_run, job_id, state, record, queue_state, incarnations, has_accounting
    )


def find_unfinished_runs(store: Path) -> dict[tuple[str, bool], SubmittedRunStatus]:
    """Tasks that wait or run on the cluster, by run_id and whether they are a search.

    Empty where there are no open submissions, or no SLURM: then nothing can be known of them.

    Raises
    ------
    SlurmError
        If there is a SLURM that does not answer.
    """
    submissions = list_submissions(store)
    if not submissions or not queue.is_slurm_installed():
        return {}
    statuses = list_run_statuses(store, submissions, with_accounting=False)
    return {
        (status.submitted_run.run_id, status.submitted_run.search): status
        for status in statuses
        if status.state in UNFINISHED_STATES
    }


def collect_submissions(store: Path, submissions: Sequence[Submission]) -> list[SubmittedRunStatus]:
    """Write the rows of jobs that are gone and left none, take back their claims, and close submissions that are over.

    Returns
    -------
    list of Standing
        As they are afterwards.

    Raises
    ------
    SlurmError
        If SLURM cannot be asked what is alive.
    """
    statuses = list_run_statuses(store, submissions)
    lost_statuses = [status for status in statuses if status.state == LOST or _has_orphaned_claim(store, status)]
    if lost_statuses:
        incarnations_by_job = job_end.wait_for_job_incarnations(
            [status.job_id for status in lost_statuses if status.job_id]
        )
        for status in lost_statuses:
            try:
                _write_missing_row(
                    store, dataclasses.replace(status, incarnations=incarnations_by_job.get(status.job_id or "", []))
                )
            except ValueError as error:  # what the store says of the run is no row
                print_safely(f"no row can be written of {status.submitted_run.label}: {error}")
        statuses = list_run_statuses(store, submissions)
    for submission in submissions:
        submission_statuses = [status for status in statuses if status.submission is submission]
        if all(status.is_over for status in submission_statuses):
            submission.close()
            if all(status.state == DONE for status in submission_statuses):
                for array in submission.arrays:
                    shutil.rmtree(submission.folder / array.name, ignore_errors=True)
    return statuses


def send_closed_submissions(store: Path, statuses: Sequence[SubmittedRunStatus]) -> None:
    """Send what the jobs of submissions that are over could not send: nodes may have no way to a server.

    A tracker of somebody's own is a module that only the store names here, so it is left to a command that names it.
    """
    for submission in {status.submission.name: status.submission for status in statuses}.values():
        if submission.is_closed and submission.tracker is not None:
            name = submission.tracker.get("name")
            if not isinstance(name, str) or "." in name:
                print_safely(
                    f"tracker.name={format_value(name)} is not one of the suite's: python -m bench.track sends to "
                    "others"
                )
                continue
            try:
                tracker = load_tracker(submission.tracker)
            except UsageError as error:  # an earlier or later version's
                print_safely(f"nothing is sent of submission {submission.name}: {error}")
                continue
            tracker_client = TrackerClient(tracker, store, print_safely)
            tracker_client.send_runs(
                status.submitted_run.run_id for status in statuses if status.submission.name == submission.name
            )


def _has_orphaned_claim(store: Path, status: SubmittedRunStatus) -> bool:
    """Whether its job is gone and still has the run: it wrote the row, and died before it gave the claim back."""
    if not status.is_over:
        return False
    return _find_own_claim(store, status) is not None


def _find_own_claim(store: Path, status: SubmittedRunStatus) -> Claim | None:
    """The claim of a task's job on its run; None where it has none, or was never submitted."""
    claim = claims.find_claim(store, status.submitted_run.run_id)
    is_own = claim is not None and status.job_id is not None and claim.owner.get("job") == status.job_id
    return claim if is_own else None


def _write_missing_row(store: Path, status: SubmittedRunStatus) -> None:
    claim, was_cancelled = _find_own_claim(store, status), status.job_id in status.submission.cancelled_job_ids
    if claim is not None:
        cancelled_outcome = {"status": "preempted", "error": f"its job {status.job_id} was cancelled"}
        write_lost_row(claim, **(cancelled_outcome if was_cancelled else job_end.find_exit_record(claim.owner)))
        return
    if status.record is not None or status.submitted_run.search:
        return
    row = status.submitted_run.row  # the job's pickle would say it too, and execute whatever somebody put there
    if row is None:
        return
    last_incarnation = status.incarnations[-1] if status.incarnations else None
    launch_columns = {"launcher": "slurm", "job_id": status.job_id, "sweep": status.submission.sweep}
    if was_cancelled or (last_incarnation is not None and last_incarnation.state in UNSTARTED_STATES):
        error = f"its job {status.job_id} was cancelled before it came to run"
        write_unstarted_row(row, store, status="skipped", error=error, launch_columns=launch_columns)
        return
    last_output = describe_last_output(status)
    error = f"its job {status.job_id} {_describe_unstarted_reason(store, last_incarnation)}" + (
        f"; {last_output}" if last_output else ""
    )
    write_unstarted_row(row, store, status="error", error=error, launch_columns=launch_columns)


def _describe_unstarted_reason(store: Path, last_incarnation: JobState | None) -> str:
    if last_incarnation is None:
        return "never came to the run, and why is unknown: SLURM knows nothing of it any more"
    if last_incarnation.reason.startswith(f"{job_end.UNWRITABLE_EXIT_CODE}:"):
        return "could not write to the store: it was full or read-only"
    if last_incarnation.reason == job_end.NO_OUTPUT_FILE_EXIT_CODE:
        store_hint = f"{last_incarnation.nodes or 'its nodes'} may not see store={store.resolve()}"
        return f"could not open the file for its output ({job_end.describe_job_end(last_incarnation)}): {store_hint}"
    return f"never came to the run: SLURM says {job_end.describe_job_end(last_incarnation)}"


def describe_last_output(status: SubmittedRunStatus) -> str:
    """The last lines a job printed, and where."""
    if status.job_id is None:
        return ""
    log_path = status.submission.folder / status.array.name / f"{status.job_id}_0_log.out"
    with contextlib.suppress(OSError):
        lines = log_path.read_text(errors="replace").strip().splitlines()
        if lines:
            return f"the last of {log_path}: {' / '.join(lines[-MAX_OUTPUT_LINES:])[:500]}"
    return ""
