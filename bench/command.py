"""What every ``python -m bench.NAME`` does around its `main`: end quietly when it is interrupted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

INTERRUPTED_EXIT_CODE = 130
"""Exit code of what Ctrl-C ended, as shells have it."""


def end_silently_on_interrupt() -> None:
    """Have Ctrl-C end this process silently, while it has nothing to clean up yet: for the seconds of imports.

    KeyboardInterrupt would be printed, and lost where an import happens to run a callback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where whoever started it has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_main(main: Callable[[], int]) -> int:
    """Run a command's `main`; Ctrl-C ends it in order, with no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end takes a moment, and a second Ctrl-C would be printed
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
