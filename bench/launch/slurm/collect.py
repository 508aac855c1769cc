"""Where a store's submissions stand, and the rows of jobs that could not write them themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.errors import UsageError
from bench.launch.attempt import say, write_lost_row, write_unstarted_row
from bench.launch.slurm import endings, ledger, queue
from bench.launch.slurm.ledger import Array, Entry, Submission
from bench.launch.slurm.queue import JobState
from bench.records import Claim, Record, claims
from bench.records.encoding import shown
from bench.records.schema import FINISHED
from bench.tracking import Courier, load_tracker

QUEUED, RUNNING, DONE, FAILED, LOST = "queued", "running", "done", "failed", "lost"

UNSUBMITTED = "not submitted"
"""Whoever submitted the rest did not live to submit it."""

UNKNOWN = "unknown"
"""Somebody else's job that SLURM neither shows nor calls ended."""

UNDERWAY = (QUEUED, RUNNING, UNKNOWN)
"""Something may still come of these."""

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
    """queued, running, done, failed, or lost (its job is gone and left no row); or not submitted, or unknown."""
    record: Record | None
    """The newest row written since it was submitted."""
    live: JobState | None
    ended: list[JobState]
    """What accounting says of its job's incarnations."""
    accounted: bool = True
    """Whether accounting could be asked."""

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours its job has taken so far; None where SLURM keeps no accounts, or they cannot be asked."""
        if not self.accounted:
            return None
        elapsed = sum(state.elapsed_s for state in self.ended)
        if self.live is not None and not any(state.state == self.live.state for state in self.ended):
            elapsed += self.live.elapsed_s
        return elapsed * self.array.gpus / 3600

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.live is None and self.state not in UNDERWAY


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
    alive = queue.alive(everybody=not all(submission.own for submission in submissions))
    jobs = _job_ids(submissions)
    history = queue.history(filter(None, jobs.values())) if accounts else {}
    found = [
        _standing(store, submission, array, index, jobs[submission.name, array.name], alive, history)
        for submission in submissions
        for array in submission.arrays
        for index in range(len(array.entries))
    ]
    # Of somebody else's job that is not in the queue, which SLURM may only hide, what counts is its end.
    gone = [s.job_id for s in found if s.state in (LOST, FAILED) and not s.submission.own and s.job_id is not None]
    ends = endings.ends(gone) if gone else {}
    hidden = {job_id for job_id in gone if not queue.over(ends.get(job_id, []))}
    newest = {(s.entry.run_id, s.entry.search): s.submission for s in found}
    return [
        dataclasses.replace(s, state=UNKNOWN) if s.job_id in hidden else s
        for s in found
        # What a command did not live to submit, a later one did.
        if s.state != UNSUBMITTED or newest[s.entry.run_id, s.entry.search] is s.submission
    ]


def _job_ids(submissions: Sequence[Submission]) -> dict[tuple[str, str], str | None]:
    """SLURM's ids of arrays, by the names of submission and array; None if an array was never submitted.

    Where whoever submitted it did not live to write its id down, and it has not started, it is found by its name.
    """
    jobs = {(s.name, array.name): s.job_id(array) for s in submissions for array in s.arrays}
    unknown = {array.job_name: (s, array) for s in submissions for array in s.arrays if not jobs[s.name, array.name]}
    for name, job_id in queue.by_name(unknown).items():
        submission, array = unknown[name]
        submission.note_job_id(array, job_id)
        jobs[submission.name, array.name] = job_id
    return jobs


def _standing(
    store: Path,
    submission: Submission,
    array: Array,
    index: int,
    job: str | None,
    alive: Mapping[str, JobState],
    history: Mapping[str, list[JobState]] | None,
) -> Standing:
    entry = array.entries[index]
    job_id = array.element(job, index) if job else None
    live = alive.get(job_id) if job_id else None
    record = records.latest(store, entry.run_id)
    if record is not None and record["attempt"] < entry.attempts_before:
        record = None
    ended = (history or {}).get(job_id, []) if job_id else []
    recorded = record is not None and record["status"] in FINISHED
    searched = live is None and ended != [] and ended[-1].state == "COMPLETED"
    if searched if entry.search else recorded:
        state = DONE
    elif live is not None and live.state != "COMPLETING":
        state = QUEUED if live.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else RUNNING
    elif record is not None and claims.held(store, entry.run_id) is None:
        state = FAILED
    elif job_id is None:
        state = UNSUBMITTED
    else:
        state = LOST if live is None else RUNNING
    accounted = history is not None or job_id is None
    return Standing(submission, array, index, entry, job_id, state, record, live, ended, accounted)


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
    return {(s.entry.run_id, s.entry.search): s for s in found if s.state in UNDERWAY}


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
        ends = endings.settled_ends([standing.job_id for standing in lost if standing.job_id])
        for standing in lost:
            try:
                _write_down(store, dataclasses.replace(standing, ended=ends.get(standing.job_id or "", [])))
            except ValueError as error:  # what the store says of the run is no row
                say(f"no row can be written of {standing.entry.label}: {error}")
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
    """Send what the jobs of submissions that are over could not send: nodes may have no way to a server.

    A tracker of somebody's own is a module that only the store names here, so it is left to a command that names it.
    """
    for submission in {standing.submission.name: standing.submission for standing in found}.values():
        if submission.closed and submission.tracker is not None:
            name = submission.tracker.get("name")
            if not isinstance(name, str) or "." in name:
                say(f"tracker.name={shown(name)} is not one of the suite's: python -m bench.track sends to others")
                continue
            try:
                tracker = load_tracker(submission.tracker)
            except UsageError as error:  # an earlier or later version's
                say(f"nothing is sent of submission {submission.name}: {error}")
                continue
            courier = Courier(tracker, store, say)
            courier.send_runs(s.entry.run_id for s in found if s.submission.name == submission.name)


def _died_holding(store: Path, standing: Standing) -> bool:
    """Whether its job is gone and still has the run: it wrote the row, and died before it gave the claim back."""
    if not standing.over:
        return False
    return _own_claim(store, standing) is not None


def _own_claim(store: Path, standing: Standing) -> Claim | None:
    """The claim of a task's job on its run; None where it has none, or was never submitted."""
    claim = claims.held(store, standing.entry.run_id)
    mine = claim is not None and standing.job_id is not None and claim.owner.get("job") == standing.job_id
    return claim if mine else None


def _write_down(store: Path, standing: Standing) -> None:
    claim, cancelled = _own_claim(store, standing), standing.job_id in standing.submission.cancelled
    if claim is not None:
        known = {"status": "preempted", "error": f"its job {standing.job_id} was cancelled"}
        write_lost_row(claim, **(known if cancelled else endings.obituary(claim.owner)))
        return
    if standing.record is not None or standing.entry.search:
        return
    row = standing.entry.row  # the job's pickle would say it too, and execute whatever somebody put there
    if row is None:
        return
    end = standing.ended[-1] if standing.ended else None
    facts = {"launcher": "slurm", "job_id": standing.job_id, "sweep": standing.submission.sweep}
    if cancelled or (end is not None and end.state in NOT_STARTED):
        words = f"its job {standing.job_id} was cancelled before it came to run"
        write_unstarted_row(row, store, status="skipped", error=words, facts=facts)
        return
    last = last_words(standing)
    words = f"its job {standing.job_id} {_why_it_never_ran(store, end)}" + (f"; {last}" if last else "")
    write_unstarted_row(row, store, status="error", error=words, facts=facts)


def _why_it_never_ran(store: Path, end: JobState | None) -> str:
    if end is None:
        return "never came to the run, and why is unknown: SLURM knows nothing of it any more"
    if end.reason.startswith(f"{endings.UNWRITABLE}:"):
        return "could not write to the store: it was full or read-only"
    if end.reason == endings.NO_OUTPUT_FILE:
        where = f"{end.nodes or 'its nodes'} may not see store={store.resolve()}"
        return f"could not open the file for its output ({endings.described(end)}): {where}"
    return f"never came to the run: SLURM says {endings.described(end)}"


def last_words(standing: Standing) -> str:
    """The last lines a job printed, and where."""
    if standing.job_id is None:
        return ""
    log = standing.submission.folder / standing.array.name / f"{standing.job_id}_0_log.out"
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return f"the last of {log}: {' / '.join(lines[-LAST_LINES:])[:500]}"
    return ""
