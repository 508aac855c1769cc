"""Passes over a rank that change it by the same each: all but the last of them need not be simulated.

The passes are micro-batches, or cycles of a pipeline's timetable. They may take turns: what they ask of the caching
allocator can come to lie in one of two places, and in the other one the next time.

What a rank computes next depends on its times by sums and by the later of two alone. Where every time of its state has
moved on by as much in one pass as in the pass before, it will in the next: what moves on slower than the rest, such as
a processor that launches faster than the device computes, falls back further and decides nothing.
"""

from __future__ import annotations

from bench.prediction.simulation.simulated_rank import RankState, SimulatedRank
from bench.prediction.simulation.state_change import find_state_change

MAX_PERIOD = 4
"""Passes that take turns, at most."""


class Repetition:
    """What a rank was like after each of some passes."""

    def __init__(self, simulated_rank: SimulatedRank) -> None:
        self._simulated_rank = simulated_rank
        self._states: list[RankState] = []

    def leave_out(self, num_left: int) -> int:
        """After a pass: move the rank on by passes that are still to come, if they need not be simulated.

        Where memory grows, one is left to be simulated, or, where several take turns, one of each: memory is at its
        highest in these, since none is left out where any of it shrinks.

        Returns
        -------
        int
            Passes that are left out.
        """
        if num_left < 1 or self._simulated_rank.is_recorded:
            return 0
        self._states = [*self._states[-2 * MAX_PERIOD :], self._simulated_rank.get_state()]
        for period in range(1, min(MAX_PERIOD, num_left, (len(self._states) - 1) // 2) + 1):
            first, second, third = (self._states[-1 - turns * period] for turns in (2, 1, 0))
            change = find_state_change(first, second, third)
            if change is None or change.shrinks or not change.keeps_names:
                continue
            num_periods = num_left // period - change.grows
            if num_periods:
                self._simulated_rank.set_state(change.extrapolate(third, num_periods))
                self._states = []
                return num_periods * period
        return 0
