"""How many steps to warm up and to time, so that both last: a GPU's clocks and power settle in seconds, not in steps.

All ranks take the same number of steps. Rank 0 decides by its own clock and tells the others through the run's store,
between steps, never within a timed one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

STEPS_PER_S = 1000
"""Steps shorter than a millisecond are taken to last one: no run takes more steps than this for each second."""

MARGIN = 1.05
"""Steps once warm are a little faster than those that the number is estimated from."""

Agree = Callable[[int], int]
"""What rank 0 says, of what each rank says. All ranks call it together."""


@dataclass(frozen=True)
class WarmUp:
    """Steps before timing, and how many to time."""

    steps: int
    seconds: float
    """From the first to the end of the last, on the host's clock."""
    to_time: int


def warm_up(
    step: Callable[[], object],
    wait: Callable[[], object],
    agree: Agree,
    *,
    warmup_steps: int,
    steps: int,
    min_warmup_s: float,
    min_timed_s: float,
) -> WarmUp:
    """Take steps until they are `warmup_steps` and have lasted `min_warmup_s`.

    The first `warmup_steps` start libraries, compile and fill the allocator; they count as steps, but neither as
    seconds of warm-up nor for the estimate of a step's time.

    Parameters
    ----------
    wait: callable
        Returns once the device has finished all steps.
    min_warmup_s, min_timed_s: float
        With 0 for both nothing is waited for and nothing agreed on.

    Returns
    -------
    WarmUp
        With `steps` to time, or as many more as last `min_timed_s`.
    """
    began = time.perf_counter()
    for _ in range(warmup_steps):
        step()
    if not (min_warmup_s or min_timed_s):
        return WarmUp(warmup_steps, time.perf_counter() - began, steps)
    wait()
    taken, lasted, number = warmup_steps, 0.0, 1
    while number:
        start = time.perf_counter()
        for _ in range(number):
            step()
        wait()
        seconds = time.perf_counter() - start
        taken, lasted = taken + number, lasted + seconds
        each, number = seconds / number, agree(steps_for(min_warmup_s - lasted, seconds / number))
    to_time = agree(max(steps, steps_for(MARGIN * min_timed_s, each)))
    return WarmUp(taken, time.perf_counter() - began, to_time)


def steps_for(seconds: float, step_s: float) -> int:
    """Steps that last so long; none for no time."""
    return math.ceil(max(0.0, seconds) / max(step_s, 1 / STEPS_PER_S))
