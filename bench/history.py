"""``python -m bench.history STORE...``: times and memory over commits, and the commits that changed them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.comparison import ComparisonSettings, build_histories
from bench.core.command_line import (
    build_parser,
    open_stdout_console,
    parse_path_argument,
    report_usage_errors,
    run_main,
)
from bench.core.errors import UsageError
from bench.core.presentation import format_plural
from bench.records import read_all_attempts
from bench.reporting.builder import read_store
from bench.reporting.regressions.history_page import write_history
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


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Find the changes, print them and draw them. Returns 0, or 2 where the user must change something."""
    parser = build_parser("history", __doc__, EPILOG)
    store_help, output_help = "a store, or a folder of stores", "folder for a page to browse, figures and history.json"
    parser.add_argument("stores", type=parse_path_argument, nargs="+", metavar="STORE", help=store_help)
    parser.add_argument("--output", type=parse_path_argument, metavar="DIR", help=output_help)
    options = parser.parse_args(arguments)
    contents = [read_store(store, read_all_attempts) for store in options.stores]
    all_series = build_histories([row for store in contents for row in store.records], ComparisonSettings())
    if not all_series:
        raise UsageError("No configuration was run with two commits, or on two days: there is no history to show.")
    if options.output is not None:
        print(write_history(all_series, options.output, options.stores))
    unreadable = [problem for store in contents for problem in store.unreadable]
    if unreadable:
        print(f"{format_plural(len(unreadable), 'file')} left out: {unreadable[0]}")
    open_stdout_console(WIDTH_WITHOUT_TERMINAL).print(build_history_tables(all_series), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
