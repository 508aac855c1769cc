"""``python -m bench.track STORE [tracker.key=value …]``: send a store to a tracker, whenever there is a way to it.

Every attempt of every run goes, and the report if one lies in the store; what is there already is left alone, so the
command may be repeated, and interrupted, at any time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import progress as bars

from bench.core import command_line
from bench.core.command_line import PlainConsole, parse_path_argument
from bench.core.errors import UsageError
from bench.planning.request import parse_tracker
from bench.tracking import Tracker, TrackerClient
from bench.tracking.attempts import build_report_run, list_all_attempts


def main(arguments: Sequence[str] | None = None) -> int:
    """Send a store. Exit code 0 if everything in it is there, 1 if something could not be sent, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.track", description=__doc__)
    parser.add_argument(
        "store", type=parse_path_argument, metavar="STORE", help="a store of rows, or a folder of stores"
    )
    parser.add_argument("overrides", nargs="*", metavar="tracker.key=value", help="for example tracker.mode=offline")
    options = parser.parse_args(arguments)
    try:
        store = _require_store(options.store)
        tracker = parse_tracker(options.overrides)
        rows = list_all_attempts(store)
        if not rows:
            raise UsageError(f"The store {store} holds no rows to send.")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"{error.filename} cannot be read ({error.strerror}).", file=sys.stderr)
        return 2
    return _send_store(store, rows, tracker)


def _require_store(store: Path) -> Path:
    if not store.is_dir():
        raise UsageError(f"STORE={store} is not valid: choose a folder that a sweep wrote to.")
    return store


def _send_store(store: Path, rows: Sequence[Path], tracker: Tracker) -> int:
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


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
