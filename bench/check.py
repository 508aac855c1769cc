"""``python -m bench.check``: a few minutes on a new machine: is everything right before a sweep?"""

from __future__ import annotations

import sys

from bench.checks.before_sweep import show_check
from bench.checks.session import open_report_file, write_report
from bench.core.command_line import build_parser, report_usage_errors, run_main
from bench.hardware import detect_device

EPILOG = """\
Trains small T5 and GPT models with every strategy on this machine's GPUs (without any: on its CPU) and compares their
losses with those of one CPU process; runs out of memory on purpose; compares clocks, and peaks of memory with rehearsed
and predicted ones. Prints a table and writes a file that holds the table and every row.

exit code: 0 everything that could run passed, 1 something failed, 2 bad input.
"""


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Check this machine; returns the exit code."""
    parser = build_parser("check", __doc__, EPILOG)
    parser.add_argument("overrides", nargs="*", metavar="output=FILE", help="default: check-HOST-DATE.json")
    report_path = open_report_file(parser.parse_args(arguments).overrides)
    device = detect_device()
    for message in device.messages:
        print(message)
    report = show_check(device)
    write_report(report, report_path)
    print(f"Everything in one file: {report_path}")
    return 0 if report.has_passed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
