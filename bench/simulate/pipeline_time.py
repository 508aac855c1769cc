"""The time of a pipeline's step: every stage on its device, the timetable of all ranks, and what follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.simulate import pace
from bench.simulate.machine import Machine, Pace
from bench.simulate.memory import is_degraded
from bench.simulate.network import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Group, collective_seconds
from bench.simulate.pipeline_clock import Run, StageSeconds, idle_share, run
from bench.simulate.pipeline_parts import Cast, shared_by
from bench.simulate.prediction import MemoryPrediction, Range, Span, TimePrediction
from bench.simulate.step import Update
from bench.strategies.pipeline_plan import RankPlan
from bench.strategies.pipeline_schedule import FORWARD, Timetable
from bench.strategies.plan import Parameter

BUBBLE = "pipeline bubble"
"""What limits a step in which ranks mostly wait for other stages."""


@dataclass(frozen=True)
class Pass:
    """Seconds of a stage's forward or backward pass alone: of its kernels, and in all."""

    computed: float
    elapsed: float


def time_of(
    config: RunConfig,
    timetable: Timetable,
    casts: Sequence[Cast],
    plans: Sequence[RankPlan],
    found: MemoryPrediction,
    stalls: Sequence[float],
    *,
    timeline: bool,
) -> TimePrediction | None:
    """The time of a step, its parts as means over ranks; None where the hardware's speeds are unknown.

    Parameters
    ----------
    stalls: sequence of float
        Per rank: seconds in which its allocator retries. All wait for the rank that stands still longest.
    """
    if not pace.is_known(config.hardware, config.precision):
        return None
    speed = pace.pace_of(config)
    known: dict[tuple[tuple[int, ...], str], Pass] = {}
    passes = [{phase: _pass(cast, phase, speed, known) for phase in (FORWARD, "backward")} for cast in casts]
    seconds = [StageSeconds(each[FORWARD].elapsed, each["backward"].elapsed) for each in passes]
    send_s = [_send_seconds(config, timetable, stage, cast.sent_bytes) for stage, cast in enumerate(casts[:-1])]
    runs = run(timetable, seconds, send_s)
    without_sending = run(timetable, seconds, [0.0] * len(send_s))
    updates = [pace.update_of(config, plan.updated) for plan in plans]
    reduced = [_reduction(config, timetable, casts, seconds, rank) for rank in range(timetable.ranks)]
    tied = all_tied(config, timetable)
    tied_s = _mean(sum(each.seconds for each in tied if rank in each.ranks) for rank in range(timetable.ranks))
    stalled_s = max(stalls)
    ends = with_tied([each.end_s + exposed for each, (exposed, _) in zip(runs, reduced, strict=True)], tied)
    step = max(end + _seconds(update, speed) for end, update in zip(ends, updates, strict=True)) + stalled_s
    computed = _mean(sum(passes[each.stage][each.kind].computed for each in own.actions) for own in runs)
    busy = _mean(own.busy_s for own in runs)
    waited = max(each.end_s for each in runs) - max(each.end_s for each in without_sending)
    exposed = max(0.0, waited) + _mean(hidden for hidden, _ in reduced) + tied_s
    optimizer = _mean(update.seconds for update in updates)
    updating = [_seconds(update, speed) for update in updates]
    idle = step - busy - exposed - _mean(updating) - stalled_s
    parts = {
        "compute": computed,
        "network": exposed,
        "memory bandwidth": optimizer,
        BUBBLE: idle,
        "kernel launches": step - computed - exposed - optimizer - idle - stalled_s,
    }
    degraded = is_degraded(found)
    return TimePrediction(
        step_s=Range(step, step * (1 - pace.TIME_SHARE), step * (1 + pace.TIME_SHARE)),
        compute_s=computed,
        exposed_communication_s=exposed,
        optimizer_s=optimizer,
        bubble_s=step - computed - exposed - optimizer,
        communication_s=_sent_seconds(timetable, send_s) + _mean(total for _, total in reduced) + tied_s,
        limited_by="allocator" if degraded else max(parts, key=lambda name: parts[name]),
        degraded=degraded,
        idle_share=idle_share(runs, [a + b + c for (a, _), b, c in zip(reduced, updating, stalls, strict=True)], step),
        timeline=_timeline(runs, updates, step) if timeline else (),
    )


def _seconds(update: Update, speed: Pace) -> float:
    return update.seconds + update.kernels * speed.launch_s


def _pass(cast: Cast, phase: str, speed: Pace, known: dict[tuple[tuple[int, ...], str], Pass]) -> Pass:
    """Stages that share their scenes take equally long."""
    scenes = [scene for scene, _, _ in cast.scenes if (scene.phase == FORWARD) == (phase == FORWARD)]
    name = (tuple(map(id, scenes)), phase)
    if name not in known:
        machine = Machine(speed)
        for scene in scenes:
            for piece in scene.pieces:
                machine.play(piece, phase)
        machine.synchronize()
        known[name] = Pass(machine.spent["compute"], machine.processor)
    return known[name]


def _copies(config: RunConfig, timetable: Timetable) -> int:
    return config.gpus // timetable.ranks


def _send_seconds(config: RunConfig, timetable: Timetable, stage: int, size: float) -> float:
    """From a rank of a stage to its neighbour of the next one: what a broadcast among two takes."""
    copies, per_node = _copies(config, timetable), min(config.gpus, config.gpus_per_node)
    here, there = (index % timetable.ranks * copies // per_node for index in (stage, stage + 1))
    group = Group(2, 2) if here == there else Group(2, 1, min(per_node, copies))
    return _collective(config, BROADCAST, size, group)


def _collective(config: RunConfig, kind: str, size: float, group: Group) -> float:
    assert config.hardware.speeds is not None
    return collective_seconds(kind, size, group, config.hardware.speeds.links)


def _sent_seconds(timetable: Timetable, send_s: Sequence[float]) -> float:
    """Of all that a rank sends and receives in a step, mean over ranks: everything goes both ways, and has two ends."""
    return 4 * timetable.micro_batches * sum(send_s) / timetable.ranks


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _reduction(
    config: RunConfig, timetable: Timetable, casts: Sequence[Cast], seconds: Sequence[StageSeconds], rank: int
) -> tuple[float, float]:
    """Seconds of gathering and reducing among copies: those that nothing hides, and all.

    DDP's buckets go while the last backward runs, all but the last one. Under FSDP units are gathered as the first
    micro-batch comes to them, which hides all but the first of them, and reduced when the last backward is over.
    """
    copies = _copies(config, timetable)
    if copies == 1:
        return 0.0, 0.0
    group = Group(copies, min(copies, config.gpus_per_node), 1)
    exposed = total = 0.0
    for stage in timetable.stages_of(rank):
        units = casts[stage].units
        if not _is_sharded(config):
            size = units.numel * config.precision.parameter_dtype.itemsize
            buckets = max(1.0, size / BUCKET_BYTES)
            reduced = buckets * _collective(config, ALL_REDUCE, size / buckets, group)
            exposed += max(reduced / buckets, reduced - seconds[stage].backward)
            total += reduced
            continue
        gathers = [
            _collective(config, ALL_GATHER, _numel(unit.parameters) * config.precision.compute_dtype.itemsize, group)
            for unit in units.units
        ]
        scatters = [
            _collective(config, REDUCE_SCATTER, _numel(unit.parameters) * config.precision.reduce_dtype.itemsize, group)
            for unit in units.units
        ]
        exposed += gathers[0] + max(0.0, sum(gathers[1:]) - seconds[stage].forward) + sum(scatters)
        total += sum(gathers) + sum(scatters)
    return exposed, total


def _is_sharded(config: RunConfig) -> bool:
    """Whether copies of a stage share it, by FSDP."""
    return getattr(config.strategy, "data_parallel", None) == "fsdp"


BUCKET_BYTES = 25 * 2**20
"""Of DDP, torch's default."""


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters)


@dataclass(frozen=True)
class Tied:
    """The all-reduce of a gradient that several ranks of a pipeline have."""

    ranks: tuple[int, ...]
    """Of the pipeline."""
    group: Group
    seconds: float


def all_tied(config: RunConfig, timetable: Timetable) -> list[Tied]:
    """In the order of a step; the groups of all copies of the pipeline send at the same time."""
    copies, per_node = _copies(config, timetable), min(config.gpus, config.gpus_per_node)
    shards = copies if _is_sharded(config) else 1
    found = []
    for numel, stages in shared_by(config.model, timetable.num_stages).values():
        ranks = tuple(sorted({stage % timetable.ranks for stage in stages}))
        if len(ranks) == 1:
            continue
        in_nodes = Counter(rank * copies // per_node for rank in ranks)
        sharing = 1 if len(in_nodes) == 1 else min(per_node, copies)
        group = Group(len(ranks), min(in_nodes.values()), sharing)
        size = numel / shards * config.precision.parameter_dtype.itemsize
        found.append(Tied(ranks, group, _collective(config, ALL_REDUCE, size, group)))
    return found


def with_tied(ends: Sequence[float], tied: Sequence[Tied]) -> list[float]:
    """When each rank is done with the gradients it shares with others, having waited for them."""
    found = list(ends)
    for each in tied:
        over = max(found[rank] for rank in each.ranks) + each.seconds
        for rank in each.ranks:
            found[rank] = over
    return found


def _timeline(runs: Sequence[Run], updates: Sequence[Update], step_s: float) -> tuple[Span, ...]:
    """A lane per rank: what it computes, and the optimizer at the end."""
    spans = []
    for rank, (found, update) in enumerate(zip(runs, updates, strict=True)):
        for action, (start, end) in zip(found.actions, found.spans, strict=True):
            spans.append(Span(f"rank {rank}", f"{action.kind} {action.micro_batch}", action.kind, start, end))
        spans.append(Span(f"rank {rank}", "optimizer", "optimizer", step_s - update.seconds, step_s))
    return tuple(sorted(spans, key=lambda span: span.start_s))
