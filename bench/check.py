"""``python -m bench.check``: a few minutes on a new machine: is everything right before a sweep?"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

from bench.checks.session import write_report
from bench.checks.terminal import show_check
from bench.core import command_line
from bench.core.errors import UsageError, invalid_value_error
from bench.hardware import detect_device

EPILOG = """\
Trains small T5 and GPT models with every strategy on this machine's GPUs (without any: on its CPU) and compares their
losses with those of one CPU process; runs out of memory on purpose; compares clocks, and peaks of memory with rehearsed
and predicted ones. Prints a table and writes a file that holds the table and every row.

exit code: 0 everything that could run passed, 1 something failed, 2 bad input.
"""


def main(arguments: list[str] | None = None) -> int:
    """Check this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.check",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="output=FILE", help="default: check-HOST-DATE.json")
    options = parser.parse_args(arguments)
    try:
        report_path = _parse_output(options.overrides)
        device = detect_device()
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    for message in device.messages:
        print(message)
    report = show_check(device)
    write_report(report, report_path)
    print(f"Everything in one file: {report_path}")
    return 0 if report.has_passed else 1


def _parse_output(overrides: list[str]) -> Path:
    """The file to write.

    Raises
    ------
    UsageError
        On anything but ``output=FILE``, or a file that is there already or cannot be written.
    """
    path_text = f"check-{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "output" or not value:
            raise UsageError(f"{override!r} is not valid: choose output=FILE.")
        path_text = value
    report_path = Path(path_text)
    try:
        with report_path.open("x"):
            pass
    except OSError as error:
        raise invalid_value_error("output", path_text, f"a new file that can be written ({error.strerror})") from None
    return report_path


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
