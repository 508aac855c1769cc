"""Reference benchmark suite for FSDP against DDP: measure, compare and report training runs."""

import sys

from bench.core.command_line import end_silently_on_interrupt

if sys.argv[:1] == ["-m"]:  # python -m bench.NAME, of which this package is imported first
    end_silently_on_interrupt()
