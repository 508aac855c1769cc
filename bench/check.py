"""``python -m bench.check``: a few minutes on a new machine: is everything right before a sweep?"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path

from bench import command
from bench.checks.session import write_file
from bench.checks.show import show_check
from bench.errors import UsageError, bad_value
from bench.hardware import detect

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
        file = _read_output(options.overrides)
        device = detect()
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    for remark in device.remarks:
        print(remark)
    checked = show_check(device)
    write_file(checked, file)
    print(f"Everything in one file: {file}")
    return 0 if checked.passed else 1


def _read_output(overrides: list[str]) -> Path:
    """The file to write.

    Raises
    ------
    UsageError
        On anything but ``output=FILE``, or a file that is there already or cannot be written.
    """
    given = f"check-{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "output" or not value:
            raise UsageError(f"{override!r} is not valid: choose output=FILE.")
        given = value
    file = Path(given)
    try:
        with file.open("x"):
            pass
    except OSError as error:
        raise bad_value("output", given, f"a new file that can be written ({error.strerror})") from None
    return file


if __name__ == "__main__":
    sys.exit(command.execute(main))
