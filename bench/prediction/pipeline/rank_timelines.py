"""When the ranks of a pipeline compute, and when they wait: a timetable with the time of every stage."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.strategies.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    PipelineAction,
    Timetable,
)


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch in one stage."""

    forward: float
    backward: float
    weights: float = 0.0
    """Of `backward`, gradients of weights: what comes later where a schedule splits backward."""
    additions: float = 0.0
    """Of `weights`, adding them to those of earlier micro-batches, which the first backward has not."""
    forward_tokens: float = 0.0
    """Of `forward`, sending tokens to experts and back."""
    backward_tokens: float = 0.0
    """The same of `backward`, where it is split of its first part."""

    def find_first(self, kind: str) -> float:
        """Seconds of an action of some kind, of the micro-batch that every stage runs backward first."""
        return self.find(kind) - (self.additions if kind in (BACKWARD, WEIGHT_BACKWARD) else 0.0)

    def find(self, kind: str) -> float:
        """Seconds of an action of some kind of any other."""
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            INPUT_BACKWARD: self.backward - self.weights,
            WEIGHT_BACKWARD: self.weights,
        }[kind]

    def find_tokens(self, kind: str) -> float:
        """Of those seconds, sending tokens to experts and back."""
        return {FORWARD: self.forward_tokens, WEIGHT_BACKWARD: 0.0}.get(kind, self.backward_tokens)

    def find_without_tokens(self, kind: str) -> float:
        """Seconds of an action of some kind, without sending tokens."""
        return self.find(kind) - self.find_tokens(kind)


@dataclass(frozen=True)
class RankTimeline:
    actions: tuple[PipelineAction, ...]
    starts_s: list[float]
    """When it begins each."""
    ends_s: list[float]
    """When each is over."""

    @property
    def busy_s(self) -> float:
        """Seconds in which it computes."""
        return sum(map(operator.sub, self.ends_s, self.starts_s))

    @property
    def end_s(self) -> float:
        """When its last action is over."""
        return self.ends_s[-1]


ReadyTimes = list[list[float | None]]


def list_hidden_seconds(
    actions: Sequence[PipelineAction], stage_seconds: Sequence[StageSeconds], overlap_loss: float
) -> list[float]:
    """What every action of a rank takes less where tokens go to experts beside another micro-batch's computation.

    A forward pass and the backward pass behind it are carried out together, layer by layer: tokens of one are sent
    while the other computes (Megatron's ``combined_1f1b.py``, and DualPipe's pairs of chunks, arXiv:2412.19437, figure
    4). Of the last stage both are of the same micro-batch here; such a rank is one forward pass ahead instead, which
    changes nothing of what a pair takes.

    Parameters
    ----------
    overlap_loss: float
        Share of its speed that computation loses meanwhile.
    """
    hidden_seconds = [0.0] * len(actions)
    for index, (forward, backward) in enumerate(itertools.pairwise(actions)):
        if forward.kind != FORWARD or backward.kind not in (BACKWARD, INPUT_BACKWARD):
            continue
        for number, action, other in ((index, forward, backward), (index + 1, backward, forward)):
            sent_s = stage_seconds[action.stage].find_tokens(action.kind)
            other_s = stage_seconds[other.stage].find_without_tokens(other.kind)
            hidden_seconds[number] = min(sent_s, other_s) * (1 - overlap_loss)
    return hidden_seconds


def simulate_timetable(
    timetable: Timetable,
    stage_seconds: Sequence[StageSeconds],
    send_s: Sequence[float],
    hidden_seconds: Sequence[Sequence[float]] | None = None,
) -> list[RankTimeline]:
    """Each rank's actions as early as its own order and what it receives allow.

    Parameters
    ----------
    stage_seconds: sequence of StageSeconds
        Per stage.
    send_s: sequence of float
        Per stage but the last: seconds until what it sends is at the next one; gradients take as long back.
    hidden_seconds: sequence of sequences of float, optional
        Per rank and action, what it takes less; nothing where they are not given.
    """
    steps = _list_steps(timetable, stage_seconds, send_s)
    first_micro_batch = find_first_backward(timetable)
    rank_actions = [timetable.list_actions(rank) for rank in range(timetable.ranks)]
    timelines = [RankTimeline(actions, [], []) for actions in rank_actions]
    remaining_actions = [iter(actions) for actions in rank_actions]
    next_actions = [next(actions, None) for actions in remaining_actions]
    waiting_ranks = list(range(timetable.ranks))
    while waiting_ranks:
        has_moved = False
        for rank in waiting_ranks:
            starts, ends = timelines[rank].starts_s, timelines[rank].ends_s
            hidden = None if hidden_seconds is None else hidden_seconds[rank]
            end, remaining, action = ends[-1] if ends else 0.0, remaining_actions[rank], next_actions[rank]
            while action is not None:
                kind, stage, micro_batch = action
                ready_times, first_seconds, seconds, times_elsewhere, delay = steps[kind][stage]
                start = ready_times[micro_batch]
                if start is None:
                    break
                if end > start:
                    start = end
                end = start + (first_seconds if micro_batch == first_micro_batch else seconds)
                if hidden is not None:
                    end -= hidden[len(ends)]
                starts.append(start)
                ends.append(end)
                if times_elsewhere is not None:
                    times_elsewhere[micro_batch] = end + delay
                action = next(remaining, None)
            has_moved = has_moved or action is not next_actions[rank]
            next_actions[rank] = action
        if not has_moved:
            raise ValueError(f"ranks wait for each other in {timetable}")
        # What one rank sends others wait for in both directions: forward to those behind it, gradients back.
        waiting_ranks = [rank for rank in reversed(waiting_ranks) if next_actions[rank] is not None]
    return timelines


def find_first_backward(timetable: Timetable) -> int:
    """The micro-batch that every stage runs backward before all others."""
    return next(action.micro_batch for action in timetable.list_actions(0) if action.kind != FORWARD)


class _Step(NamedTuple):
    """What all micro-batches have in common in an action of one kind in one stage."""

    ready_times: list[float | None]
    """When what it needs is there, per micro-batch; None while that is not known."""
    first_seconds: float
    """Of the micro-batch that every stage runs backward first."""
    seconds: float
    """Of the others."""
    times_elsewhere: list[float | None] | None
    """The same of the action that waits for this one; None where none does."""
    delay: float
    """Seconds until what this one makes is there."""


def _list_steps(
    timetable: Timetable, stage_seconds: Sequence[StageSeconds], send_s: Sequence[float]
) -> dict[str, list[_Step]]:
    """By kind of action and stage."""
    num_micro_batches, last_stage = timetable.micro_batches, timetable.num_stages - 1
    at_once: list[float | None] = [0.0] * num_micro_batches
    forward_times: ReadyTimes = [[None] * num_micro_batches for _ in stage_seconds]
    gradient_times: ReadyTimes = [[None] * num_micro_batches for _ in stage_seconds]
    forward_times[0] = at_once
    steps: dict[str, list[_Step]] = {kind: [] for kind in (FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)}
    for stage, seconds in enumerate(stage_seconds):
        is_last = stage == last_stage
        steps[FORWARD].append(
            _Step(
                forward_times[stage],
                seconds.find_first(FORWARD),
                seconds.find(FORWARD),
                gradient_times[stage] if is_last else forward_times[stage + 1],
                0.0 if is_last else send_s[stage],
            )
        )
        for kind in (BACKWARD, INPUT_BACKWARD):
            sent_times, delay = (gradient_times[stage - 1], send_s[stage - 1]) if stage else (None, 0.0)
            steps[kind].append(
                _Step(gradient_times[stage], seconds.find_first(kind), seconds.find(kind), sent_times, delay)
            )
        # The rank itself has made what gradients of weights need, in an action before.
        weight_seconds = seconds.find_first(WEIGHT_BACKWARD), seconds.find(WEIGHT_BACKWARD)
        steps[WEIGHT_BACKWARD].append(_Step(at_once, *weight_seconds, None, 0.0))
    return steps


def compute_idle_share(
    timelines: Sequence[RankTimeline], other_busy_s: Sequence[float] = (), step_s: float | None = None
) -> float:
    """Share of a step in which a rank is in no stage and in no optimizer, on average over ranks, as runs measure it.

    Parameters
    ----------
    other_busy_s: sequence of float
        Per rank: what it does beside its actions, such as the optimizer's step; nothing where it is not given.
    step_s: float or None
        Of the step; until the last action is over where it is not given.
    """
    step_seconds = max(timeline.end_s for timeline in timelines) if step_s is None else step_s
    return 1 - (sum(timeline.busy_s for timeline in timelines) + sum(other_busy_s)) / (len(timelines) * step_seconds)
