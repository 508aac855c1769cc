"""``python -m bench.jobs watch|collect|cancel|nodes [STORE]``: follow what was submitted; compare its nodes."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench import command, records
from bench.errors import UsageError
from bench.launch.slurm import ledger, queue
from bench.launch.slurm.collect import (
    DONE,
    FAILED,
    LOST,
    QUEUED,
    RUNNING,
    UNDERWAY,
    UNKNOWN,
    UNSUBMITTED,
    Standing,
    collect,
    last_words,
    standings,
    track,
)
from bench.launch.slurm.ledger import Submission
from bench.launch.verdict import describe
from bench.paths import path
from bench.records import Record
from bench.reporting.nodes import nodes_table
from bench.terminal import output

POLL_S = 5.0
SILENCE_S = 600.0
"""How long a watch goes on without hearing from SLURM: controllers are restarted."""
MOST_LINES = 20
STATES = (QUEUED, RUNNING, UNKNOWN, DONE, FAILED, LOST, UNSUBMITTED)
STYLES = {QUEUED: "dim", RUNNING: "cyan", UNKNOWN: "dim", DONE: "green", FAILED: "red", LOST: "red"}


def main(arguments: list[str] | None = None) -> int:
    """Follow submissions. Exit code 0 if all runs are done, 1 if some are not (yet), 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    what = (
        "follow until all is over; write down what is over and say how far the rest is; cancel the rest; compare the "
    )
    what += "nodes that rows were measured on"
    parser.add_argument("action", choices=("watch", "collect", "cancel", "nodes"), help=what)
    parser.add_argument(
        "store", nargs="?", type=path, default=Path("runs"), help="the store of the sweep (default: runs)"
    )
    parser.add_argument("--submission", metavar="NAME", help="only this one, as collect names it (default: all open)")
    options = parser.parse_args(arguments)
    console = output(140)
    try:
        store = options.store
        if options.action == "nodes":
            console.print(nodes_table(_rows(store)), soft_wrap=True)
            return 0
        submissions = _submissions(store, options.submission)
        if not submissions:
            print(f"Nothing submitted from {store} is open.")
            return 0
        if options.action == "watch":
            _watch(store, submissions, console)
        elif options.action == "cancel":
            _cancel(store, submissions)
        found = _collect(store, submissions)
        track(store, found)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except queue.SlurmError as error:
        print(f"SLURM cannot be asked: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"store={options.store} cannot be written: {error.strerror or error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The jobs go on.")
        return command.INTERRUPTED
    console.print(_report(store, found), soft_wrap=True)
    return 0 if all(standing.state == DONE for standing in found) else 1


def _rows(store: Path) -> list[Record]:
    """Every attempt of every run.

    Raises
    ------
    UsageError
        If there is no store.
    """
    if not store.is_dir():
        raise UsageError(f"store={store} is not valid: choose a folder that a sweep wrote to.")
    return records.read_attempts(store).records


def _submissions(store: Path, name: str | None) -> list[Submission]:
    if not store.is_dir():
        raise UsageError(f"store={store} is not valid: choose a folder that a sweep wrote to.")
    known = ledger.submissions(store, closed=True)
    if name is None:
        return [submission for submission in known if not submission.closed]
    chosen = [submission for submission in known if submission.name == name]
    if not chosen:
        names = ", ".join(submission.name for submission in known) or "none: nothing was submitted from this store"
        raise UsageError(f"--submission={name} is not valid: choose {names}.")
    return chosen


def _refuse_others(submissions: Sequence[Submission]) -> list[Submission]:
    """Those of some submissions that this account may cancel.

    Raises
    ------
    UsageError
        If there are none.
    """
    own = [submission for submission in submissions if submission.own]
    others = ", ".join(f"{submission.name} of {submission.user}" for submission in submissions if not submission.own)
    if not own:
        raise UsageError(f"Only who submitted jobs can cancel them, and nothing here is yours: {others}.")
    if others:
        print(f"Left alone: {others}.")
    return own


def _collect(store: Path, submissions: Sequence[Submission]) -> list[Standing]:
    with ledger.submitting(store):  # not while a sweep is about to submit: its jobs would look lost
        return collect(store, submissions)


def _cancel(store: Path, submissions: Sequence[Submission]) -> None:
    """Cancel what waits or runs, and wait until none of it is left."""
    found = standings(store, _refuse_others(submissions), accounts=False)
    alive = [standing for standing in found if standing.live is not None and standing.job_id is not None]
    for submission in submissions:
        own = [standing.job_id for standing in alive if standing.submission is submission and standing.job_id]
        if own:
            submission.note_cancelled(own)
    jobs = [standing.job_id for standing in alive if standing.job_id]
    queue.cancel(jobs)
    deadline = time.monotonic() + SILENCE_S
    while set(jobs) & set(queue.alive()) and time.monotonic() < deadline:
        time.sleep(1)
    print(f"Cancelled {len(jobs)} job(s).")


def _watch(store: Path, submissions: Sequence[Submission], console: Console) -> None:
    """Show how far the submissions are until they are over."""
    heard = time.monotonic()
    told: set[tuple[str, int, int]] = set()
    with bars.Progress(
        bars.BarColumn(bar_width=30),
        bars.TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("asking SLURM", total=sum(len(a.entries) for s in submissions for a in s.arrays))
        said = ""
        while True:
            try:
                found = standings(store, submissions)
                heard = time.monotonic()
            except queue.SlurmError as error:
                if time.monotonic() - heard > SILENCE_S:
                    raise
                bar.update(task, description=f"SLURM does not answer: {error}")
                time.sleep(POLL_S)
                continue
            for standing in found:
                _tell(standing, told, console)
            line = _line(found)
            bar.update(task, description=line, completed=sum(s.state in (DONE, FAILED, LOST) for s in found))
            if not console.is_terminal and line != said:
                console.print(line)
                said = line
            if all(standing.over for standing in found):
                return
            time.sleep(POLL_S)


def _tell(standing: Standing, told: set[tuple[str, int, int]], console: Console) -> None:
    """Print a line for each new row."""
    record = standing.record
    if record is None:
        return
    key = (standing.entry.run_id, standing.index, record["attempt"])
    if key not in told:
        told.add(key)
        console.print(f"{record['status']:9} {standing.entry.label}: {describe(record)}", soft_wrap=True, markup=False)


def _line(found: Sequence[Standing]) -> str:
    """How far the submissions are: ``3 queued, 1 running, 4 done, 0.2 GPU-hours so far``."""
    counts = Counter(standing.state for standing in found)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state] or state == DONE]
    hours = [standing.gpu_hours for standing in found]
    known = [number for number in hours if number is not None]
    spent = (
        f"{sum(known):.2f} GPU-hours so far"
        if len(known) == len(hours)
        else "GPU-hours unknown (sacct does not answer)"
    )
    return ", ".join([*parts, spent])


def _report(store: Path, found: Sequence[Standing]) -> RenderableType:
    """Every submission in a line, what failed and why, and what to type next."""
    parts: list[RenderableType] = []
    for submission in dict.fromkeys(standing.submission.name for standing in found):
        own = [standing for standing in found if standing.submission.name == submission]
        over = "over" if all(standing.over for standing in own) else "open"
        of = "" if own[0].submission.own else f" of {own[0].submission.user}"
        parts.append(Text(f"{submission}{of} ({own[0].submission.sweep}), {over}: {_line(own)}"))
    waiting = [s for s in found if s.state in UNDERWAY]
    failed = [s for s in found if s.state in (FAILED, LOST)]
    for title, chosen in (("Not over", waiting), ("Failed", failed)):
        if chosen:
            parts.append(_table(title, chosen))
    if failed or any(standing.state == UNSUBMITTED for standing in found):
        parts.append(Text("The same sweep command submits again what has no result."))
    if not waiting:
        parts.append(Text(f"Report: python -m bench.report {shlex.quote(str(store))}"))
    return Group(*parts)


def _table(title: str, standings: Sequence[Standing]) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=False)
    for standing in standings[:MOST_LINES]:
        words = standing.state
        if standing.state == QUEUED and standing.live is not None:
            held = queue.HELD.get(standing.live.reason, standing.live.reason)
            words = f"waits: {held.format(job=standing.job_id)}"
        elif standing.state == RUNNING and standing.live is not None:
            words = f"on {standing.live.nodes} for {standing.live.elapsed_s} s"
        elif standing.state == UNKNOWN:
            words = f"unknown: SLURM does not show it; {standing.submission.user} can collect it"
        elif standing.record is not None:
            words = f"{standing.record['status']}: {describe(standing.record)}"
        elif standing.state == LOST:
            words = f"lost. {last_words(standing)}"
        table.add_row(Text(str(standing.job_id)), Text(standing.entry.label), Text(words, style=STYLES[standing.state]))
    if len(standings) > MOST_LINES:
        table.add_row("", Text(f"and {len(standings) - MOST_LINES} more"), "")
    return table


if __name__ == "__main__":
    sys.exit(command.execute(main))
