"""``python -m bench.claims``: what rows say of the claims of papers and notes; ``search`` looks for unstated settings.

Prints the verdict on every claim, from committed rows. ``search`` predicts the grids of Figures 6(a) and 8(c) anew, in
some minutes, and writes what they came to.
"""

from __future__ import annotations

import argparse
import sys

from bench.claims.page import assess_all, render_terminal
from bench.core.command_line import build_parser, parse_path_argument, report_usage_errors
from bench.core.errors import UsageError


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Print the verdicts, or search; returns the exit code."""
    options = _build_parser().parse_args(arguments)
    if options.action != "search":
        print(render_terminal(assess_all()), end="")
        return 0
    from bench.claims.settings_search import search_settings
    from bench.claims.unstated_settings import SEARCHES, get_result_path

    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output={options.output} cannot be made: {error.strerror}.") from None
    for build_search in SEARCHES.values():
        result = search_settings(build_search(), lambda message: print(message, file=sys.stderr, flush=True))
        path = get_result_path(result.name, options.output)
        result.write(path)
        print(path)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    from bench.claims.unstated_settings import RESULTS_FOLDER

    parser = build_parser("claims", __doc__)
    parser.add_argument("action", nargs="?", choices=("verdicts", "search"), default="verdicts")
    parser.add_argument(
        "--output", type=parse_path_argument, default=RESULTS_FOLDER, help="folder that search writes to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
