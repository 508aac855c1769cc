"""``python -m bench.history STORE...``: times and memory over commits, and the commits that changed them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.comparison import ComparisonSettings, HistorySeries, build_histories
from bench.core import command_line
from bench.core.command_line import open_stdout_console, parse_path_argument
from bench.core.errors import UsageError
from bench.records import read_all_attempts
from bench.reporting.builder import read_store
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import save_drawing
from bench.reporting.drawing.labels import format_plural
from bench.reporting.figures.regression import draw_histories
from bench.reporting.regressions.data import format_history_json
from bench.reporting.regressions.files import write_texts
from bench.reporting.regressions.terminal import build_history_tables

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
    parser.add_argument(
        "stores", type=parse_path_argument, nargs="+", metavar="STORE", help="a store, or a folder of stores"
    )
    parser.add_argument("--output", type=parse_path_argument, metavar="DIR", help="folder for figures and history.json")
    options = parser.parse_args(arguments)
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    try:
        contents = [read_store(store, read_all_attempts) for store in options.stores]
        all_series = build_histories(
            [row for store_contents in contents for row in store_contents.records], ComparisonSettings()
        )
        if not all_series:
            raise UsageError("No configuration was run with two commits, or on two days: there is no history to show.")
        if options.output is not None:
            print(f"{format_plural(_write_history(all_series, options.output), 'figure')} in {options.output}")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    unreadable = [problem for store_contents in contents for problem in store_contents.unreadable]
    if unreadable:
        print(f"{format_plural(len(unreadable), 'file')} left out: {unreadable[0]}")
    console.print(build_history_tables(all_series), highlight=False)
    return 0


def _write_history(all_series: Sequence[HistorySeries], folder: Path) -> int:
    """Write the figures and the data; how many figures there are."""
    write_texts({folder / "history.json": format_history_json(all_series)})
    with style.apply_report_style():
        drawings = draw_histories(all_series)
    for drawing in drawings:
        save_drawing(drawing, folder)
    return len(drawings)


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
