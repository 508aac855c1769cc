"""``bench.calibrate`` as it is, but for one thing: it takes any machine to be quiet, also one that runs tests."""

from __future__ import annotations

import math
import sys

from bench import calibrate, command
from bench.calibration import noise


def limits_off() -> None:
    """Let everything scatter, drift and wait as it will."""
    noise.SPREAD_LIMIT.clear()
    noise.DRIFT_LIMIT.clear()
    noise.OTHER_SPREAD_LIMIT = noise.OTHER_DRIFT_LIMIT = noise.WAITING_LIMIT = math.inf


if __name__ == "__main__":
    limits_off()
    sys.exit(command.execute(calibrate.main))
