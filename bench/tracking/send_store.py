"""A whole store to a tracker."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import progress as bars

from bench.core.command_line import PlainConsole
from bench.core.errors import UsageError
from bench.tracking.attempts import build_report_run, list_all_attempts
from bench.tracking.base import Tracker
from bench.tracking.client import TrackerClient


def send_store(store: Path, tracker: Tracker) -> int:
    """Send every attempt of every run, and the report if one lies in the store, to a tracker.

    Returns
    -------
    int
        0 if everything is there, 1 if something could not be sent.

    Raises
    ------
    UsageError
        If there is nothing to send.
    """
    if not store.is_dir():
        raise UsageError(f"STORE={store} is not valid: choose a folder that a sweep wrote to.")
    try:
        rows = list_all_attempts(store)
    except PermissionError as error:
        raise UsageError(f"{error.filename} cannot be read ({error.strerror}).") from None
    if not rows:
        raise UsageError(f"The store {store} holds no rows to send.")
    if not tracker.is_active:
        print(f"{tracker.name} is turned off in this environment: nothing is sent.", file=sys.stderr)
        return 1
    report = build_report_run(store, store.resolve().name)
    with bars.Progress(
        console=PlainConsole(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress_bar:
        task = progress_bar.add_task("sending", total=len(rows))
        tracker_client = TrackerClient(
            tracker,
            store,
            lambda line: print(line, file=sys.stderr),
            fall_back=False,
            on_run_sent=lambda run: progress_bar.advance(task),
        )
        tracker_client.send(rows, [report] if report else [])
    counts = tracker_client.counts
    messages = [f"{counts['sent']} sent", f"{counts['known']} there already"]
    num_missing = len(rows) + (report is not None) - counts["sent"] - counts["known"]
    print(", ".join(messages + ([f"{num_missing} not sent"] if num_missing else [])))
    if tracker_client.location:
        print(tracker_client.format_summary())
    return 1 if num_missing else 0
