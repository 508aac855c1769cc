"""`python -m bench.report STORE [--output DIR] [flops=NAME]`: figures and one self-contained HTML page of records."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.config.flop_conventions import add_flops_option, convert_speeds, read_flops_option
from bench.core.command_line import build_parser, parse_path_argument, report_usage_errors, run_main
from bench.core.errors import require_at_least
from bench.core.presentation import format_plural
from bench.reporting import read_store, write_report
from bench.reporting.builder import MAX_FIGURES


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 where the user must change something."""
    parser = build_parser("report", __doc__)
    parser.add_argument(
        "store", type=parse_path_argument, metavar="STORE", help="a store of rows, or a folder of stores"
    )
    parser.add_argument(
        "--output", type=parse_path_argument, metavar="DIR", help="folder for the report (default: STORE/report)"
    )
    parser.add_argument(
        "--no-interactive",
        dest="interactive",
        action="store_false",
        help="leave out the figures to hover over, whose library makes the page 2 MB larger",
    )
    parser.add_argument(
        "--figures",
        type=int,
        default=MAX_FIGURES,
        metavar="COUNT",
        help=f"the most static figures to draw, of all sections together (default: {MAX_FIGURES})",
    )
    add_flops_option(parser, "what TFLOP/s and MFU of the figures and tables count")
    options = parser.parse_args(read_flops_option(arguments))
    store = options.store
    output = options.output or (store if store.is_dir() else store.parent) / "report"
    require_at_least("--figures", options.figures, 0)
    contents = read_store(store)
    speeds = convert_speeds(options.flops, contents.records)
    page_path = write_report(
        contents, str(store), output, interactive=options.interactive, max_figures=options.figures, speeds=speeds
    )
    left_out_note = f", {format_plural(len(contents.unreadable), 'file')} left out:" if contents.unreadable else ""
    print(page_path)
    print(format_plural(len(contents.records), "run") + left_out_note)
    for problem in contents.unreadable:
        print(f"  {problem}")
    if speeds.note:
        print(speeds.note)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
