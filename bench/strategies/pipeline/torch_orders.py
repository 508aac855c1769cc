"""The order in which torch's further schedules run the stages of a rank, asked of torch itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.strategies.pipeline.schedule import (
    BACKWARD,
    DUAL_PIPE_V,
    FORWARD,
    GPIPE,
    INPUT_BACKWARD,
    INTERLEAVED,
    LOOPED_BFS,
    ONE_F_ONE_B,
    WEIGHT_BACKWARD,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    PipelineAction,
)

if TYPE_CHECKING:
    from bench.strategies.pipeline.schedule import Timetable

TORCH_SCHEDULE_NAMES = {
    GPIPE: "GPipe",
    ONE_F_ONE_B: "1F1B",
    INTERLEAVED: "Interleaved1F1B",
    LOOPED_BFS: "LoopedBFS",
    ZERO_BUBBLE: "InterleavedZeroBubble",
    ZERO_BUBBLE_V: "ZBVZeroBubble",
    DUAL_PIPE_V: "DualPipeV",
}

KIND_BY_LETTER = {"F": FORWARD, "B": BACKWARD, "I": INPUT_BACKWARD, "W": WEIGHT_BACKWARD}
"""What torch writes for each kind of computation."""


def find_torch_schedule(schedule: str) -> Any:
    """torch's class for one of the suite's schedules."""
    from torch.distributed.pipelining.schedules import get_schedule_class  # brings the compiler along: half a second

    return get_schedule_class(TORCH_SCHEDULE_NAMES[schedule])


def list_torch_actions(timetable: Timetable, rank: int) -> tuple[PipelineAction, ...]:
    """What a rank computes in a step, in its order: as ``_calculate_single_rank_operations`` of torch 2.13 gives it.

    Slots that torch leaves empty are left out, as they are when it runs a schedule. A forward and a backward that may
    overlap follow each other, as torch runs them unless it is given a function that does both.
    """
    schedule_class = find_torch_schedule(timetable.schedule)
    num_rounds = max(1, timetable.micro_batches // timetable.ranks)
    schedule = SimpleNamespace(
        pp_group_size=timetable.ranks,
        num_stages=timetable.num_stages,
        n_local_stages=timetable.virtual_stages,
        microbatches_per_round=timetable.micro_batches // num_rounds,
        _n_microbatches=timetable.micro_batches,
        _stages=[None] * timetable.virtual_stages,
    )
    operations = schedule_class._calculate_single_rank_operations(schedule, rank)
    actions = [
        part for operation in operations if operation is not None for part in operation.sub_actions or [operation]
    ]
    return tuple(
        PipelineAction(KIND_BY_LETTER[action.computation_type.value], action.stage_index, action.microbatch_index)
        for action in actions
    )
