"""Where a store's submissions stand, and the rows of jobs that could not write them themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import DelayedSubmission, JobPaths

from bench import records
from bench.launch.attempt import say, write_lost_row, write_unstarted_row
from bench.launch.slurm import ledger, queue
from bench.launch.slurm.ledger import Array, Entry, Submission
from bench.launch.slurm.queue import JobState
from bench.records import Record, claims
from bench.records.schema import FINISHED
from bench.tracking import Courier, load_tracker

QUEUED, RUNNING, DONE, FAILED, LOST = "queued", "running", "done", "failed", "lost"

LAST_LINES = 3

NOT_STARTED = ("CANCELLED", "PENDING")
"""What accounting calls a job that was taken out of the queue before it ran."""


@dataclass(frozen=True)
class Standing:
    """One task of a submission, and how far it is."""

    submission: Submission
    array: Array
    index: int
    entry: Entry
    job_id: str | None
    """None if its array was never submitted."""
    state: str
    """queued, running, done, failed, or lost: its job is gone and left no row."""
    record: Record | None
    """The newest row written since it was submitted."""
    live: JobState | None
    ended: list[JobState]
    """What accounting says of its job's incarnations."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours its job has taken so far."""
        elapsed = sum(state.elapsed_s for state in self.ended)
        if self.live is not None and not any(state.state == self.live.state for state in self.ended):
            elapsed += self.live.elapsed_s
        return elapsed * self.array.gpus / 3600

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.live is None and self.state not in (QUEUED, RUNNING)


def standings(store: Path, submissions: Sequence[Submission], *, accounts: bool = True) -> list[Standing]:
    """Where every task of some submissions stands.

    Parameters
    ----------
    accounts: bool
        Ask accounting too: for GPU-hours, and the ends of jobs.

    Raises
    ------
    SlurmError
        If SLURM cannot be asked what is alive.
    """
    if not submissions:
        return []
    alive = queue.alive()
    jobs = {(s.name, array.name): _job_id(s, array) for s in submissions for array in s.arrays}
    history = queue.history([job for job in jobs.values() if job]) if accounts else {}
    return [
        _standing(store, submission, array, index, jobs[submission.name, array.name], alive, history)
        for submission in submissions
        for array in submission.arrays
        for index in range(len(array.entries))
    ]


def _job_id(submission: Submission, array: Array) -> str | None:
    """SLURM's id of an array; found by name if whoever submitted it did not live to write it down."""
    job_id = submission.job_id(array)
    if job_id is None:
        with contextlib.suppress(queue.SlurmError):
            job_id = queue.by_name().get(array.job_name)
            if job_id is not None:
                submission.note_job_id(array, job_id)
    return job_id


def _standing(
    store: Path,
    submission: Submission,
    array: Array,
    index: int,
    job: str | None,
    alive: Mapping[str, JobState],
    history: Mapping[str, list[JobState]],
) -> Standing:
    entry = array.entries[index]
    job_id = array.element(job, index) if job else None
    live = alive.get(job_id) if job_id else None
    record = records.latest(store, entry.run_id)
    if record is not None and record["attempt"] < entry.attempts_before:
        record = None
    ended = history.get(job_id, []) if job_id else []
    recorded = record is not None and record["status"] in FINISHED
    searched = live is None and ended != [] and ended[-1].state == "COMPLETED"
    if searched if entry.search else recorded:
        state = DONE
    elif live is not None and live.state != "COMPLETING":
        state = QUEUED if live.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else RUNNING
    elif record is not None and claims.held(store, entry.run_id) is None:
        state = FAILED
    else:
        state = LOST if live is None else RUNNING
    return Standing(submission, array, index, entry, job_id, state, record, live, ended)


def underway(store: Path) -> dict[tuple[str, bool], Standing]:
    """Tasks that wait or run on the cluster, by run_id and whether they are a search.

    Empty where there are no open submissions, or no SLURM: then nothing can be known of them.

    Raises
    ------
    SlurmError
        If there is a SLURM that does not answer.
    """
    submissions = ledger.submissions(store)
    if not submissions or not queue.installed():
        return {}
    found = standings(store, submissions, accounts=False)
    return {(s.entry.run_id, s.entry.search): s for s in found if s.state in (QUEUED, RUNNING)}


def collect(store: Path, submissions: Sequence[Submission]) -> list[Standing]:
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
    found = standings(store, submissions)
    lost = [standing for standing in found if standing.state == LOST or _died_holding(store, standing)]
    if lost:
        history = queue.settled_history([standing.job_id for standing in lost if standing.job_id])
        for standing in lost:
            _write_down(store, dataclasses.replace(standing, ended=history.get(standing.job_id or "", [])))
        found = standings(store, submissions)
    for submission in submissions:
        own = [standing for standing in found if standing.submission is submission]
        if all(standing.over for standing in own):
            submission.close()
            if all(standing.state == DONE for standing in own):
                for array in submission.arrays:
                    shutil.rmtree(submission.folder / array.name, ignore_errors=True)
    return found


def track(store: Path, found: Sequence[Standing]) -> None:
    """Send what the jobs of submissions that are over could not send: nodes may have no way to a server."""
    for submission in {standing.submission.name: standing.submission for standing in found}.values():
        if submission.closed and submission.tracker is not None:
            courier = Courier(load_tracker(submission.tracker), store, say)
            courier.send_runs(s.entry.run_id for s in found if s.submission.name == submission.name)


def _died_holding(store: Path, standing: Standing) -> bool:
    """Whether its job is gone and still has the run: it wrote the row, and died before it gave the claim back."""
    if not standing.over:
        return False
    claim = claims.held(store, standing.entry.run_id)
    return claim is not None and claim.owner.get("job") == standing.job_id


def _write_down(store: Path, standing: Standing) -> None:
    claim = claims.held(store, standing.entry.run_id)
    if claim is not None and claim.owner.get("job") == standing.job_id:
        write_lost_row(claim, **queue.obituary(claim.owner))
        return
    if standing.record is not None or standing.entry.search:
        return
    config = None
    for paths in _submitted(standing):
        with contextlib.suppress(Exception):  # a pickle of code that is no longer there
            config = DelayedSubmission.load(paths.submitted_pickle).function.task.config
    if config is None:
        return
    end = standing.ended[-1] if standing.ended else None
    facts = {"launcher": "slurm", "job_id": standing.job_id, "sweep": standing.submission.sweep}
    if end is not None and end.state in NOT_STARTED:
        words = f"its job {standing.job_id} was cancelled before it came to run"
        write_unstarted_row(config, store, status="skipped", error=words, facts=facts)
        return
    said = f"{end.state}, exit code {end.reason}" if end is not None else "nothing of it"
    words = f"its job {standing.job_id} never came to the run: SLURM says {said}"
    if end is not None and end.reason.startswith(f"{queue.UNWRITABLE}:"):
        words = f"its job {standing.job_id} could not write to the store: it was full or read-only"
    last = last_words(standing)
    write_unstarted_row(config, store, status="error", error=words + (f"; {last}" if last else ""), facts=facts)


def last_words(standing: Standing) -> str:
    """The last lines a job printed, and where."""
    for paths in _submitted(standing):
        with contextlib.suppress(OSError):
            lines = paths.stdout.read_text(errors="replace").strip().splitlines()
            if lines:
                return f"the last of {paths.stdout}: {' / '.join(lines[-LAST_LINES:])[:500]}"
    return ""


def _submitted(standing: Standing) -> Iterator[JobPaths]:
    if standing.job_id is not None:
        yield JobPaths(standing.submission.folder / standing.array.name, job_id=standing.job_id, task_id=0)
