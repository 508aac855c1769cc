"""Many equal blocks of a model: the first ones are simulated until each changes the rank's state alike, and the last.

The state before a block is compared with those before the two previous blocks. If both blocks have changed the same
bytes by the same numbers and all times by the same seconds, the state after the next `n` blocks is the present one plus
`n` such changes. Names that hold the number of a unit (``all-gather 7``) have the next number in every block.

This holds until one time overtakes another: what a rank computes depends on its times by sums and by the later of two
alone, so as long as their order stays, all move on as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.prediction.simulation.parameter_layout import ParameterLayout
from bench.prediction.simulation.plan_state import PlanState, copy_plan_state
from bench.prediction.simulation.simulated_rank import RankState, SimulatedRank
from bench.prediction.simulation.state_change import TIME_TOLERANCE, StateChange, find_state_change
from bench.prediction.trace.chunks import SegmentAtBatch
from bench.prediction.trace.trace import LOSS_PLACE, BlockPlace
from bench.strategies.step_plan import StepPlan

MAX_PERIOD = 8
"""Blocks that take turns, at most."""

NUM_LAST = 4
"""Blocks, or periods of them, that are simulated at the end: plans gather the next units early, which may differ."""

MIN_REPETITIONS = 24
"""Of fewer blocks the states cost as much to compare as the blocks to simulate: measured with T5 (24 blocks per list)
and GPT (96)."""

MAX_COMPARED = 12
"""Blocks that are compared; if no three states are alike by then, all blocks are simulated."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """A block that others like it follow, or the first of several that take turns."""

    period: int
    """Blocks after which they repeat."""
    num_left: int
    """Periods from this block on."""
    is_first: bool


def find_repeated_blocks(
    passes: Sequence[tuple[SegmentAtBatch, BlockPlace]], layout: ParameterLayout
) -> dict[int, RepeatedBlocks]:
    """Where equal blocks follow each other: by the position of the pass at which each period of them begins.

    Parameters
    ----------
    passes: sequence of (SegmentAtBatch, place)
        Of a micro-batch, in order.
    """
    kinds = _list_pass_kinds(passes, layout)
    repeated: dict[int, RepeatedBlocks] = {}
    position = 0
    while position < len(passes):
        period, end = _find_period(kinds, position)
        for start in range(position, end - period + 1, period) if period else ():
            repeated[start] = RepeatedBlocks(period, (end - start) // period, start == position)
        position = end if period else position + 1
    return repeated


def _list_pass_kinds(
    passes: Sequence[tuple[SegmentAtBatch, BlockPlace]], layout: ParameterLayout
) -> list[tuple[object, ...] | None]:
    """What makes passes alike: the segment, and the parameters of the units; None outside of blocks."""
    kinds: list[tuple[object, ...] | None] = []
    previous_unit = None
    for segment, place in passes:
        unit = layout.unit_by_place.get(place)
        if unit is None or place is None or place == LOSS_PLACE:
            kinds.append(None)
        else:
            layers = [(name, layer.parameters) for name, layer in layout.layer_units.get(place, {}).items()]
            kinds.append((id(segment), place[0], unit is previous_unit, unit.parameters, *layers))
        previous_unit = unit
    return kinds


def _find_period(kinds: Sequence[tuple[object, ...] | None], start: int) -> tuple[int, int]:
    """After how many passes those from a position on repeat, and the position behind the last that does; 0 if they do
    not repeat often enough."""
    if kinds[start] is None:
        return 0, start
    for period in range(1, MAX_PERIOD + 1):
        end = start + period
        while end < len(kinds) and kinds[end] is not None and kinds[end] == kinds[end - period]:
            end += 1
        if end - start >= MIN_REPETITIONS * period:
            return period, end
    return 0, start


class BlockRepetition:
    """Consecutive blocks that are alike, in one phase of a micro-batch, on a rank that follows a plan.

    Memory changes by as much in each of them, so that it is at its highest in the first or in the last ones, which are
    simulated.
    """

    def __init__(self, simulated_rank: SimulatedRank, plan: StepPlan) -> None:
        self._simulated_rank, self._plan = simulated_rank, plan
        self._states: list[tuple[RankState, PlanState]] = []
        self._is_over = not simulated_rank.is_state_whole

    def leave_out(self, num_left: int) -> int:
        """Before a block, or before several that take turns: move rank and plan on by blocks that are still to come.

        Parameters
        ----------
        num_left: int
            Times that such blocks are still to come.

        Returns
        -------
        int
            How many of these times are left out.
        """
        if self._is_over or num_left <= NUM_LAST:
            return 0
        plan_state = copy_plan_state(self._plan)
        if plan_state is None:
            self._is_over = True
            return 0
        self._states.append((self._simulated_rank.get_state(), plan_state))
        if len(self._states) < 3:
            return 0
        self._is_over = len(self._states) >= MAX_COMPARED
        (first, first_plan), (second, second_plan), (third, third_plan) = self._states[-3:]
        change = find_state_change(first, second, third)
        if change is None:
            return 0
        count = _count_until_overtaking(third, change, num_left - NUM_LAST)
        plan_change = third_plan.find_change(first_plan, second_plan) if count > 0 else None
        if plan_change is None:
            return 0
        self._simulated_rank.set_state(change.extrapolate(third, count))
        plan_change.apply(self._plan, count)
        self._is_over = count == num_left - NUM_LAST
        self._states = []
        return count


def _count_until_overtaking(state: RankState, change: StateChange, most: int) -> int:
    """Passes, `most` at most, in which no time comes up to one that moves on slower: within a pass each lies between
    what it is at the beginning and what it is at the end."""
    times, moves = change.list_moving_times(state)
    faster_by = moves[:, None] - moves[None, :]
    is_faster = faster_by > moves.max(initial=0.0) * TIME_TOLERANCE
    ahead_by = times[:, None] - times[None, :]
    is_behind = is_faster & (ahead_by < moves[None, :])
    num_passes = (-moves[:, None] - ahead_by)[is_behind] / faster_by[is_behind]
    return max(0, int(num_passes.min(initial=most)))
