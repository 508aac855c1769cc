"""What schedules can be asked for: stages per rank and numbers of micro-batches that torch would refuse."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.strategies.pipeline.schedule import (
    DUAL_PIPE_V,
    INTERLEAVED,
    ONE_F_ONE_B,
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    ZERO_BUBBLE,
    Timetable,
)


def choose_virtual_stages(schedule: str) -> int:
    """Stages per rank where nothing is said."""
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


def check_schedule(timetable: Timetable) -> None:
    """Raise `ImpossibleError` where a schedule cannot have so many stages per rank, or micro-batches."""
    _check_virtual_stages(timetable)
    schedule, ranks = timetable.schedule, timetable.ranks
    if schedule == ONE_F_ONE_B and timetable.micro_batches < ranks:
        raise _build_micro_batches_error(timetable, f"at least one per stage, {ranks}, or strategy.schedule=gpipe")
    if schedule == DUAL_PIPE_V and timetable.micro_batches < timetable.num_stages:
        raise _build_micro_batches_error(timetable, f"at least one per stage, {timetable.num_stages}")
    if schedule == INTERLEAVED and timetable.micro_batches < ranks:
        raise _build_micro_batches_error(
            timetable, f"at least one per rank of the pipeline, {ranks}, or strategy.schedule=gpipe"
        )
    if schedule in (INTERLEAVED, ZERO_BUBBLE) and not timetable.has_equal_rounds:
        fewer, more = _find_nearest_micro_batches(timetable, -1), _find_nearest_micro_batches(timetable, 1)
        raise _build_micro_batches_error(
            timetable, f"{fewer} or {more}, say, for micro_batches // {ranks} rounds of equal size"
        )


def check_stage_blocks(timetable: Timetable, num_blocks: int) -> None:
    """Raise `ImpossibleError` where the first or the last stage has no block left."""
    for field, stage in (("first_stage_less_blocks", 0), ("last_stage_less_blocks", -1)):

        def has_blocks(less_blocks: int, field: str = field, stage: int = stage) -> bool:
            changed: Any = {field: less_blocks}
            return bool(dataclasses.replace(timetable, **changed).split_blocks(num_blocks)[stage])

        if not has_blocks(getattr(timetable, field)):
            most = next(less_blocks for less_blocks in itertools.count() if not has_blocks(less_blocks + 1))
            raise invalid_value_error(
                f"strategy.{field}",
                getattr(timetable, field),
                f"at most {most}, which leaves that stage one of the model's {num_blocks} blocks in "
                f"{timetable.num_stages} stages",
                ImpossibleError,
            )


def _check_virtual_stages(timetable: Timetable) -> None:
    schedule, virtual_stages = timetable.schedule, timetable.virtual_stages
    if schedule in SINGLE_STAGE_SCHEDULES and virtual_stages > 1:
        valid = f"1, or strategy.schedule={INTERLEAVED}"
    elif schedule in V_SCHEDULES and virtual_stages != 2:
        valid = "2, or null"
    elif schedule not in SINGLE_STAGE_SCHEDULES and virtual_stages < 2:
        valid = "2 or more, or null"
    else:
        return
    raise invalid_value_error(
        "strategy.virtual_stages",
        virtual_stages,
        f"{valid}: strategy.schedule={schedule} is asked for",
        ImpossibleError,
    )


def _find_nearest_micro_batches(timetable: Timetable, direction: int) -> int:
    """The nearest number of micro-batches that makes rounds of equal size: fewer (-1) or more (1)."""
    while not timetable.has_equal_rounds:
        timetable = dataclasses.replace(timetable, micro_batches=timetable.micro_batches + direction)
    return timetable.micro_batches


def _build_micro_batches_error(timetable: Timetable, valid: str) -> Exception:
    return invalid_value_error(
        "strategy.micro_batches",
        timetable.micro_batches,
        f"{valid}: strategy.schedule={timetable.schedule} is asked for",
        ImpossibleError,
    )
