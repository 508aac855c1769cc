"""Passes over a rank that change it by the same each: all but the last of them need not be simulated.

So it is with several passes that take turns: what they ask of the caching allocator can come to lie in one of two
places, and in the other one the next time.

What a rank computes next depends on its times by sums and by the later of two alone. Where every time of its state has
moved on by as much in one pass as in the pass before, it will in the next: what moves on slower than the rest, such as
a processor that launches faster than the device computes, falls back further and decides nothing.
"""

from __future__ import annotations

import numpy as np

from bench.prediction.simulation.simulated_rank import RankState, SimulatedRank

TIME_TOLERANCE = 1e-9
"""Of the longest move within a pass: by how much moves that are called equal may differ."""


MAX_PERIOD = 4
"""Passes that take turns, at most."""


class Repetition:
    """What a rank was like after each of some passes that are alike."""

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
            if not _are_evenly_spaced(first, second, third):
                continue
            num_periods = num_left // period
            if not np.array_equal(third.sizes, second.sizes):  # something grows
                num_periods -= 1
            if num_periods:
                self._simulated_rank.set_state(third.extrapolate(second, num_periods))
                self._states = []
                return num_periods * period
        return 0


def _are_evenly_spaced(first: RankState, second: RankState, third: RankState) -> bool:
    """Whether the third differs from the second as the second from the first; bytes exactly, and none are fewer."""
    if not first.names == second.names == third.names:
        return False
    grown_bytes = third.sizes - second.sizes
    if not np.array_equal(grown_bytes, second.sizes - first.sizes) or (grown_bytes[: third.num_levels] < 0).any():
        return False
    moves, earlier_moves = third.seconds - second.seconds, second.seconds - first.seconds
    return bool((np.abs(moves - earlier_moves) <= TIME_TOLERANCE * moves.max()).all())
