"""How many steps to warm up and to time, so that both last: a GPU's clocks and power settle in seconds, not in steps.

All ranks take the same number of steps. Rank 0 decides by its own clock and tells the others through the run's store,
between steps, never within a timed one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_STEPS_PER_S = 1000
"""Steps shorter than a millisecond are taken to last one: no run takes more steps than this for each second."""

STEP_COUNT_MARGIN = 1.05
"""Steps once warm are a little faster than those that the number is estimated from."""

AgreeOnSteps = Callable[[int], int]
"""What rank 0 says, of what each rank says. All ranks call it together."""


@dataclass(frozen=True)
class WarmUpResult:
    """Steps before timing, and how many to time."""

    steps: int
    duration_s: float
    """From the first to the end of the last, on the host's clock."""
    timed_steps: int


def run_warm_up(
    step: Callable[[], object],
    synchronize: Callable[[], object],
    agree_on_steps: AgreeOnSteps,
    *,
    warmup_steps: int,
    steps: int,
    min_warmup_s: float,
    min_timed_s: float,
) -> WarmUpResult:
    """Take steps until they are `warmup_steps` and have lasted `min_warmup_s`.

    The first `warmup_steps` start libraries, compile and fill the allocator; they count as steps, but neither as
    seconds of warm-up nor for the estimate of a step's time.

    Parameters
    ----------
    synchronize: callable
        Returns once the device has finished all steps.
    min_warmup_s, min_timed_s: float
        With 0 for both nothing is waited for and nothing agreed on.

    Returns
    -------
    WarmUp
        With `steps` to time, or as many more as last `min_timed_s`.
    """
    started_at = time.perf_counter()
    for _ in range(warmup_steps):
        step()
    if not (min_warmup_s or min_timed_s):
        return WarmUpResult(warmup_steps, time.perf_counter() - started_at, steps)
    synchronize()
    steps_taken, elapsed_s, num_steps = warmup_steps, 0.0, 1
    while num_steps:
        round_started_at = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        round_s = time.perf_counter() - round_started_at
        steps_taken, elapsed_s = steps_taken + num_steps, elapsed_s + round_s
        step_time_s, num_steps = (
            round_s / num_steps,
            agree_on_steps(count_steps(min_warmup_s - elapsed_s, round_s / num_steps)),
        )
    timed_steps = agree_on_steps(max(steps, count_steps(STEP_COUNT_MARGIN * min_timed_s, step_time_s)))
    return WarmUpResult(steps_taken, time.perf_counter() - started_at, timed_steps)


def count_steps(duration_s: float, step_time_s: float) -> int:
    """Steps that last so long; none for no time."""
    return math.ceil(max(0.0, duration_s) / max(step_time_s, 1 / MAX_STEPS_PER_S))
