"""``python -m bench.records pack STORE`` and ``unpack STORE --output FOLDER``: rows in one file, or in a file each.

Both are stores that every command reads. A packed one is for keeping rows under version control; sweeps write to both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.core.command_line import build_parser, parse_path_argument, report_usage_errors, run_main
from bench.records.packing import REPLACE_OPTION, pack_store, unpack_store


@report_usage_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 where the user must change something."""
    options = _build_parser().parse_args(arguments)
    if options.command == "pack":
        result = pack_store(options.store, options.output, replace_predictions=options.replace_predictions)
        unreadable = result.unreadable
        print(result.path)
        print(f"{result.num_rows} rows: {result.num_added} new, {result.num_removed} predictions replaced or dropped")
    else:
        num_rows, unreadable = unpack_store(options.store, options.output)
        print(options.output)
        print(f"{num_rows} rows")
    for problem in unreadable:
        print(f"left out: {problem}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = build_parser("records", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="pack | unpack")
    pack = commands.add_parser("pack", help="write all rows of a store to one file, rows.jsonl")
    unpack = commands.add_parser("unpack", help="write every row of a store to a file of its own")
    for command in (pack, unpack):
        command.add_argument("store", type=parse_path_argument, metavar="STORE", help="a store of rows")
    pack.add_argument(
        "--output",
        type=parse_path_argument,
        metavar="FOLDER",
        help="folder for the file (default: the store, whose row files are then removed)",
    )
    pack.add_argument(
        REPLACE_OPTION,
        dest="replace_predictions",
        action="store_true",
        help="replace packed predictions whose results are others, and drop those that STORE lacks",
    )
    unpack.add_argument(
        "--output", type=parse_path_argument, metavar="FOLDER", required=True, help="folder for the row files"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
