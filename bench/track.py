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

from bench import command
from bench.errors import UsageError
from bench.paths import path
from bench.planning.request import read_tracker
from bench.terminal import Terminal
from bench.tracking import Courier, Tracker
from bench.tracking.attempts import all_attempts, report_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Send a store. Exit code 0 if everything in it is there, 1 if something could not be sent, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.track", description=__doc__)
    parser.add_argument("store", type=path, metavar="STORE", help="a store of rows, or a folder of stores")
    parser.add_argument("overrides", nargs="*", metavar="tracker.key=value", help="for example tracker.mode=offline")
    options = parser.parse_args(arguments)
    try:
        store = _store(options.store)
        tracker = read_tracker(options.overrides)
        rows = all_attempts(store)
        if not rows:
            raise UsageError(f"The store {store} holds no rows to send.")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return _send(store, rows, tracker)


def _store(store: Path) -> Path:
    if not store.is_dir():
        raise UsageError(f"STORE={store} is not valid: choose a folder that a sweep wrote to.")
    return store


def _send(store: Path, rows: Sequence[Path], tracker: Tracker) -> int:
    if not tracker.active:
        print(f"{tracker.name} is turned off in this environment: nothing is sent.", file=sys.stderr)
        return 1
    report = report_run(store, store.resolve().name)
    with bars.Progress(console=Terminal(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("sending", total=len(rows))
        courier = Courier(
            tracker,
            store,
            lambda line: print(line, file=sys.stderr),
            fall_back=False,
            progress=lambda run: bar.advance(task),
        )
        courier.send(rows, [report] if report else [])
    counts = courier.counts
    told = [f"{counts['sent']} sent", f"{counts['known']} there already"]
    missing = len(rows) + (report is not None) - counts["sent"] - counts["known"]
    print(", ".join(told + ([f"{missing} not sent"] if missing else [])))
    if courier.whereabouts:
        print(courier.summary())
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(command.execute(main))
