"""What a rank of a pipeline does over and over: with many micro-batches most of its step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.strategies.pipeline.schedule import BACKWARD, WEIGHT_BACKWARD, PipelineAction, Timetable

MIN_REPETITIONS = 5
"""From which on a cycle is worth being told of."""


@dataclass(frozen=True)
class NumberedAction:
    """An action of a rank, and where it stands among those of its kind and stage."""

    action: PipelineAction
    num_before: int
    is_last: bool


@dataclass(frozen=True)
class ActionCycle:
    """Actions that are done several times one after the other, but for their micro-batches."""

    actions: Sequence[NumberedAction]
    """Of all repetitions."""
    length: int
    """Of one repetition."""


def number_actions(timetable: Timetable, rank: int) -> list[NumberedAction]:
    """The actions of a rank in order. Gradients of weights are numbered as whole backward passes are."""
    counts: dict[tuple[str, int], int] = {}
    numbered = []
    for action in timetable.list_actions(rank):
        key = (BACKWARD if action.kind == WEIGHT_BACKWARD else action.kind, action.stage)
        num_before = counts.get(key, 0)
        counts[key] = num_before + 1
        numbered.append(NumberedAction(action, num_before, num_before == timetable.micro_batches - 1))
    return numbered


def iterate_cycles(timetable: Timetable, rank: int) -> Iterator[ActionCycle]:
    """The actions of a rank in order, divided into what repeats itself and what does not.

    First and last actions of their kind and stage differ from others: no cycle has them.
    """
    numbered = number_actions(timetable, rank)
    codes = [(each.action.kind, each.action.stage, each.num_before == 0, each.is_last) for each in numbered]
    kinds_per_micro_batch = len(codes) // timetable.micro_batches
    lengths = sorted({1, kinds_per_micro_batch, kinds_per_micro_batch * timetable.round_length})
    start = single_start = 0
    while start < len(codes):
        for length in lengths:
            repetitions = _count_repetitions(codes, start, length)
            if repetitions >= MIN_REPETITIONS:
                if single_start < start:
                    yield ActionCycle(numbered[single_start:start], start - single_start)
                end = start + repetitions * length
                yield ActionCycle(numbered[start:end], length)
                start = single_start = end
                break
        else:
            start += 1
    if single_start < start:
        yield ActionCycle(numbered[single_start:], start - single_start)


def _count_repetitions(codes: Sequence[tuple[str, int, bool, bool]], start: int, length: int) -> int:
    """How often the codes from `start` on come one after the other."""
    if start + MIN_REPETITIONS * length > len(codes):
        return 1
    end = start + length
    while end < len(codes) and codes[end] == codes[end - length]:
        end += 1
    return (end - start) // length
