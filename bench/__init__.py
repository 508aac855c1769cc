"""Reference benchmark suite for FSDP against DDP: measure, compare and report training runs."""

import sys

from bench.command import listen_from_the_start

if sys.argv[:1] == ["-m"]:  # python -m bench.NAME, of which this package is imported first
    listen_from_the_start()
