"""``python -m bench.compare BASE CANDIDATE``: did the last upgrade make it slower, fatter, or fail?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.comparison.arguments import parse_compare_arguments, parse_run_arguments
from bench.comparison.interleaved_runs import run_in_turn
from bench.core.command_line import PlainConsole, open_stdout_console, report_usage_errors, run_main
from bench.reporting.regressions.command import compare_stores

WIDTH_WITHOUT_TERMINAL = 160


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what was asked for; with ``run`` in front, make the runs first.

    Returns
    -------
    int
        0 no regression, 1 regression (with --strict also what cannot be told), 2 nothing comparable or bad input.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"]:
        runs, request = parse_run_arguments(arguments[1:])
        run_in_turn(runs, PlainConsole(stderr=True))
    else:
        request = parse_compare_arguments(arguments, __doc__)
    comparison, records = compare_stores(request, open_stdout_console(WIDTH_WITHOUT_TERMINAL))
    if request.tracker is not None and comparison.comparable:
        from bench.dashboards.dashboard import send_alert

        names = str(request.base), str(request.candidate)
        send_alert(comparison, *names, records, request.tracker, lambda line: print(line, file=sys.stderr))
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(run_main(main))
