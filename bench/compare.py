"""``python -m bench.compare BASE CANDIDATE``: did the last upgrade make it slower, fatter, or fail?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.comparison import compare_records
from bench.comparison.arguments import parse_compare_arguments
from bench.config.flop_conventions import convert_speeds, replace_speeds
from bench.core.command_line import open_stdout_console, report_usage_errors, run_main
from bench.reporting.builder import describe_unreadable, read_store
from bench.reporting.regressions.files import write_comparison
from bench.reporting.regressions.terminal import build_comparison_tables

WIDTH_WITHOUT_TERMINAL = 160


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what was asked for.

    Returns
    -------
    int
        0 no regression, 1 regression, 2 nothing comparable or bad input.
    """
    request = parse_compare_arguments(arguments, __doc__)
    base, candidate = read_store(request.base), read_store(request.candidate)
    speeds = convert_speeds(request.flops, [*base.records, *candidate.records])
    records = replace_speeds([*base.records, *candidate.records], speeds)
    base_count = len(base.records)
    comparison = compare_records(records[:base_count], records[base_count:], request.settings)
    if speeds.note:
        comparison = replace(comparison, notes=(*comparison.notes, speeds.note.removesuffix(".")))
    store_names = str(request.base), str(request.candidate)
    write_comparison(
        comparison,
        *store_names,
        markdown_path=request.markdown_path,
        json_path=request.json_path,
        junit_path=request.junit_path,
    )
    for message in (*describe_unreadable(base, "base"), *describe_unreadable(candidate, "candidate")):
        print(message)
    tables = build_comparison_tables(comparison, show_all=request.shows_all)
    open_stdout_console(WIDTH_WITHOUT_TERMINAL).print(tables, highlight=False, soft_wrap=not comparison.rows)
    if request.tracker is not None and comparison.comparable:
        from bench.dashboards.dashboard import send_alert

        all_records = [*base.records, *candidate.records]
        send_alert(comparison, *store_names, all_records, request.tracker, lambda line: print(line, file=sys.stderr))
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(run_main(main))
