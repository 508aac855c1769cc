"""``python -m bench.history STORE...``: times and memory over commits, and the commits that changed them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import command
from bench.comparison import Series, Settings, history
from bench.errors import UsageError
from bench.paths import path
from bench.records import read_attempts
from bench.reporting import style
from bench.reporting.drawing import save
from bench.reporting.figures.regression import history_drawings
from bench.reporting.labels import counted
from bench.reporting.reading import read_store
from bench.reporting.regressions.data import history_json
from bench.reporting.regressions.files import write_all
from bench.reporting.regressions.terminal import history_tables
from bench.terminal import output

EPILOG = """\
STORE is a store, a folder of stores, or both of several. All attempts count: a run that was forced again with another
commit is another point. The runs of one configuration with one commit, one version of torch and on one day are one
point; points are in order of time. A change is named by the first commit that was run with the new level, beside the
last with the old one. Of times it takes two points at each level (three where there are 25 or more, four from 75 on);
what the newest commit alone changed is for bench.compare to find.

exit code: 0, or 2 for bad input and where no configuration was run more than once.
"""

WIDTH_WITHOUT_TERMINAL = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the changes, print them and draw them. Returns 0, or 2 where the user must change something."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.history",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stores", type=path, nargs="+", metavar="STORE", help="a store, or a folder of stores")
    parser.add_argument("--output", type=path, metavar="DIR", help="folder for figures and history.json")
    options = parser.parse_args(arguments)
    console = output(WIDTH_WITHOUT_TERMINAL)
    try:
        contents = [read_store(store, read_attempts) for store in options.stores]
        found = history([row for each in contents for row in each.records], Settings())
        if not found:
            raise UsageError("No configuration was run with two commits, or on two days: there is no history to show.")
        if options.output is not None:
            print(f"{counted(_draw(found, options.output), 'figure')} in {options.output}")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    unreadable = [problem for each in contents for problem in each.unreadable]
    if unreadable:
        print(f"{counted(len(unreadable), 'file')} left out: {unreadable[0]}")
    console.print(history_tables(found), highlight=False)
    return 0


def _draw(found: Sequence[Series], folder: Path) -> int:
    """Write the figures and the data; how many figures there are."""
    write_all({folder / "history.json": history_json(found)})
    with style.context():
        drawings = history_drawings(found)
    for drawing in drawings:
        save(drawing, folder)
    return len(drawings)


if __name__ == "__main__":
    sys.exit(command.execute(main))
