"""``python -m bench.track STORE [tracker.key=value …]``: send a store to a tracker, whenever there is a way to it.

Every attempt of every run goes, and the report if one lies in the store; what is there already is left alone, so the
command may be repeated, and interrupted, at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.core.command_line import build_parser, parse_path_argument, report_usage_errors, run_main
from bench.planning.request import parse_tracker
from bench.tracking.client import send_store


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Send a store. Exit code 0 if everything in it is there, 1 if something could not be sent, 2 on bad input."""
    parser = build_parser("track", __doc__)
    parser.add_argument(
        "store", type=parse_path_argument, metavar="STORE", help="a store of rows, or a folder of stores"
    )
    parser.add_argument("overrides", nargs="*", metavar="tracker.key=value", help="for example tracker.mode=offline")
    options = parser.parse_args(arguments)
    return send_store(options.store, parse_tracker(options.overrides))


if __name__ == "__main__":
    sys.exit(run_main(main))
