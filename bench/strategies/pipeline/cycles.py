"""What a rank of a pipeline does over and over: with many micro-batches most of its step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.strategies.pipeline.schedule import BACKWARD, WEIGHT_BACKWARD, PipelineAction, Timetable

MIN_REPETITIONS = 5
"""From which on a cycle is worth being told of."""


class NumberedAction(NamedTuple):
    """An action of a rank, and where it stands among those of its kind and stage."""

    action: PipelineAction
    num_before: int
    is_last: bool


@dataclass(frozen=True)
class ActionCycle:
    """Actions that are done several times one after the other, but for their micro-batches."""

    actions: tuple[PipelineAction, ...]
    """Of all repetitions."""
    repetitions: int
    counts_before: Counter[tuple[str, int]]
    """Actions before the cycle, by their kind and stage."""
    micro_batches: int

    @property
    def length(self) -> int:
        """Actions of one repetition."""
        return len(self.actions) // self.repetitions

    def number_actions(self, repetition: int) -> list[NumberedAction]:
        """The actions of one repetition. Gradients of weights are numbered as whole backward passes are."""
        repeated = self.actions[repetition * self.length : (repetition + 1) * self.length]
        keys = [_build_key(action) for action in repeated]
        counts = {key: self.counts_before[key] + repetition * count for key, count in Counter(keys).items()}
        numbered = []
        for action, key in zip(repeated, keys, strict=True):
            numbered.append(NumberedAction(action, counts[key], counts[key] == self.micro_batches - 1))
            counts[key] += 1
        return numbered


def _build_key(action: PipelineAction) -> tuple[str, int]:
    return BACKWARD if action.kind == WEIGHT_BACKWARD else action.kind, action.stage


@functools.lru_cache(maxsize=128)
def list_cycles(timetable: Timetable, rank: int) -> tuple[ActionCycle, ...]:
    """The actions of a rank in order, divided into what repeats itself and what does not.

    First and last actions of their kind and stage differ from others: no cycle has them.
    """
    actions = timetable.list_actions(rank)
    keys = [_build_key(action) for action in actions]
    codes = _encode_actions(actions, keys)
    kinds_per_micro_batch = len(codes) // timetable.micro_batches
    lengths = sorted({1, kinds_per_micro_batch, kinds_per_micro_batch * timetable.round_length})
    cycles: list[ActionCycle] = []
    counts: Counter[tuple[str, int]] = Counter()

    def add_cycle(start: int, end: int, repetitions: int) -> None:
        if start < end:
            cycles.append(ActionCycle(actions[start:end], repetitions, counts.copy(), timetable.micro_batches))
            counts.update(keys[start:end])

    start = single_start = 0
    while start < len(codes):
        for length in lengths:
            repetitions = _count_repetitions(codes, start, length)
            if repetitions >= MIN_REPETITIONS:
                add_cycle(single_start, start, 1)
                end = start + repetitions * length
                add_cycle(start, end, repetitions)
                start = single_start = end
                break
        else:
            start += 1
    add_cycle(single_start, start, 1)
    return tuple(cycles)


def _encode_actions(actions: Sequence[PipelineAction], keys: Sequence[tuple[str, int]]) -> list[object]:
    """Equal for actions of one kind in one stage, but for the first and the last of them that are numbered alike."""
    codes: list[object] = [action[:2] for action in actions]
    last_indices = {key: index for index, key in enumerate(keys)}
    first_indices = {key: index for index, key in reversed([*enumerate(keys)])}
    for index in (*first_indices.values(), *last_indices.values()):
        codes[index] = index
    return codes


def _count_repetitions(codes: Sequence[object], start: int, length: int) -> int:
    """How often the codes from `start` on come one after the other."""
    if start + MIN_REPETITIONS * length > len(codes):
        return 1
    end = start + length
    while end < len(codes) and codes[end] == codes[end - length]:
        end += 1
    return (end - start) // length
