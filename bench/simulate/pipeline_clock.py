"""When the ranks of a pipeline compute, and when they wait: a timetable with the time of every stage.

Pure functions: no model, no hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.strategies.pipeline_schedule import BACKWARD, FORWARD, Action, Timetable


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch in one stage."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Run:
    """What one rank does."""

    actions: tuple[Action, ...]
    spans: tuple[tuple[float, float], ...]
    """When it does each."""

    @property
    def busy_s(self) -> float:
        """Seconds in which it computes."""
        return sum(end - start for start, end in self.spans)

    @property
    def end_s(self) -> float:
        """When its last action is over."""
        return self.spans[-1][1]


def run(timetable: Timetable, stages: Sequence[StageSeconds], send_s: Sequence[float]) -> list[Run]:
    """Each rank's actions as early as its own order and what it receives allow.

    Parameters
    ----------
    stages: sequence of StageSeconds
        Per stage.
    send_s: sequence of float
        Per stage but the last: seconds until what it sends is at the next one; gradients take as long back.
    """
    orders = [timetable.actions(rank) for rank in range(timetable.ranks)]
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    done: dict[Action, float] = {}
    last = timetable.num_stages - 1
    waiting = set(range(timetable.ranks))
    while waiting:
        for rank in sorted(waiting):
            order, own = orders[rank], spans[rank]
            while len(own) < len(order):
                action = order[len(own)]
                ready = _ready(action, done, send_s, last)
                if ready is None:
                    break
                seconds = stages[action.stage]
                start = max(ready, own[-1][1] if own else 0.0)
                end = start + (seconds.forward if action.kind == FORWARD else seconds.backward)
                own.append((start, end))
                done[action] = end
            else:
                waiting.discard(rank)
    return [Run(tuple(order), tuple(own)) for order, own in zip(orders, spans, strict=True)]


def _ready(action: Action, done: dict[Action, float], send_s: Sequence[float], last: int) -> float | None:
    """When what an action needs is there; None while that is not known."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        before = done.get(Action(FORWARD, stage - 1, micro_batch))
        return None if before is None else before + send_s[stage - 1]
    if stage == last:
        return done.get(Action(FORWARD, stage, micro_batch))
    behind = done.get(Action(BACKWARD, stage + 1, micro_batch))
    return None if behind is None else behind + send_s[stage]


def idle_share(runs: Sequence[Run], beside_s: Sequence[float] = (), step_s: float | None = None) -> float:
    """Share of a step in which a rank is in no stage and in no optimizer, on average over ranks, as runs measure it.

    Parameters
    ----------
    beside_s: sequence of float
        Per rank: what it does beside its actions, such as the optimizer's step; nothing where it is not given.
    step_s: float or None
        Of the step; until the last action is over where it is not given.
    """
    step = max(each.end_s for each in runs) if step_s is None else step_s
    return 1 - (sum(each.busy_s for each in runs) + sum(beside_s)) / (len(runs) * step)
