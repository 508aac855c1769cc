"""When the ranks of a pipeline compute, and when they wait: a timetable with the time of every stage.

Pure functions: no model, no hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.strategies.pipeline_schedule import BACKWARD, FORWARD, PipelineAction, Timetable


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch in one stage."""

    forward: float
    backward: float


@dataclass(frozen=True)
class RankTimeline:
    """What one rank does."""

    actions: tuple[PipelineAction, ...]
    action_spans: tuple[tuple[float, float], ...]
    """When it does each."""

    @property
    def busy_s(self) -> float:
        """Seconds in which it computes."""
        return sum(end - start for start, end in self.action_spans)

    @property
    def end_s(self) -> float:
        """When its last action is over."""
        return self.action_spans[-1][1]


def simulate_timetable(
    timetable: Timetable, stage_seconds: Sequence[StageSeconds], send_s: Sequence[float]
) -> list[RankTimeline]:
    """Each rank's actions as early as its own order and what it receives allow.

    Parameters
    ----------
    stage_seconds: sequence of StageSeconds
        Per stage.
    send_s: sequence of float
        Per stage but the last: seconds until what it sends is at the next one; gradients take as long back.
    """
    rank_actions = [timetable.list_actions(rank) for rank in range(timetable.ranks)]
    rank_spans: list[list[tuple[float, float]]] = [[] for _ in rank_actions]
    end_times: dict[PipelineAction, float] = {}
    last_stage = timetable.num_stages - 1
    waiting_ranks = set(range(timetable.ranks))
    while waiting_ranks:
        for rank in sorted(waiting_ranks):
            actions, own_spans = rank_actions[rank], rank_spans[rank]
            while len(own_spans) < len(actions):
                action = actions[len(own_spans)]
                ready_time = _find_ready_time(action, end_times, send_s, last_stage)
                if ready_time is None:
                    break
                seconds = stage_seconds[action.stage]
                start = max(ready_time, own_spans[-1][1] if own_spans else 0.0)
                end = start + (seconds.forward if action.kind == FORWARD else seconds.backward)
                own_spans.append((start, end))
                end_times[action] = end
            else:
                waiting_ranks.discard(rank)
    return [
        RankTimeline(tuple(actions), tuple(own_spans))
        for actions, own_spans in zip(rank_actions, rank_spans, strict=True)
    ]


def _find_ready_time(
    action: PipelineAction, end_times: dict[PipelineAction, float], send_s: Sequence[float], last_stage: int
) -> float | None:
    """When what an action needs is there; None while that is not known."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        previous_end = end_times.get(PipelineAction(FORWARD, stage - 1, micro_batch))
        return None if previous_end is None else previous_end + send_s[stage - 1]
    if stage == last_stage:
        return end_times.get(PipelineAction(FORWARD, stage, micro_batch))
    next_end = end_times.get(PipelineAction(BACKWARD, stage + 1, micro_batch))
    return None if next_end is None else next_end + send_s[stage]


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
