"""The time of a pipeline's step: every stage on its device, the timetable of all ranks, and what follows it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.prediction.cost import rank_speed
from bench.prediction.cost.collectives import (
    ALL_REDUCE,
    CollectiveGroup,
    compute_collective_seconds,
    compute_send_seconds,
)
from bench.prediction.cost.rank_groups import build_collective_group
from bench.prediction.pipeline.rank_timelines import (
    RankTimeline,
    StageSeconds,
    compute_idle_share,
    list_hidden_seconds,
    simulate_timetable,
)
from bench.prediction.pipeline.stages import SimulatedPipelineStage, list_run_shared_parameters
from bench.prediction.prediction import PredictedRange, TimelineSpan, TimePrediction
from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.prediction.simulation.step import OptimizerUpdate
from bench.strategies.pipeline.schedule import BACKWARD, FORWARD, Timetable
from bench.strategies.pipeline.step_plans import PlannedCollective, StagePlan
from bench.strategies.step_plan import PIPELINE_GROUP

PIPELINE_BUBBLE = "pipeline bubble"
"""What limits a step in which ranks mostly wait for other stages."""


@dataclass(frozen=True)
class StagePassSeconds:
    """Seconds of a stage's forward or backward pass alone."""

    computed: float
    """Of its kernels."""
    exchanged: float
    """In which it waits for ranks that share its layers."""
    tokens: float
    """Of `exchanged`, sending tokens to experts and back."""
    elapsed: float
    """In all."""

    def add_computation(self, seconds: float) -> StagePassSeconds:
        """The same with more to compute."""
        return dataclasses.replace(self, computed=self.computed + seconds, elapsed=self.elapsed + seconds)


def predict_pipeline_time(
    config: RunConfig,
    timetable: Timetable,
    stages: Sequence[SimulatedPipelineStage],
    plans: Sequence[StagePlan],
    *,
    timeline: bool,
) -> TimePrediction | None:
    """The time of a step, its parts as means over ranks; None where the hardware's speeds are unknown.

    Ranks allocate the same in every step, and nothing that they free is still used by another stream: the allocator
    need not retry.
    """
    if not rank_speed.is_speed_known(config.hardware, config.precision):
        return None
    speed = rank_speed.build_rank_speed(config)
    pass_cache: dict[tuple[tuple[int, ...], str], StagePassSeconds] = {}
    stage_passes, stage_seconds = [], []
    for index, stage in enumerate(stages):
        plan = plans[timetable.find_rank_of_stage(index)]
        passes = {phase: _simulate_stage_pass(stage, phase, speed, pass_cache) for phase in (FORWARD, BACKWARD)}
        backward_s = passes[BACKWARD].elapsed
        added_s = _compute_addition_seconds(plan, stage, speed)
        # The first micro-batch has nothing to add to, unless gradients of the last step became zero.
        first_has_none = not plan.keeps_gradients
        stage_seconds.append(
            StageSeconds(
                passes[FORWARD].elapsed,
                backward_s + added_s,
                min(stage.weight_s, backward_s) + added_s,
                additions=added_s if first_has_none else 0.0,
                forward_tokens=passes[FORWARD].tokens,
                backward_tokens=passes[BACKWARD].tokens,
            )
        )
        mean_added_s = added_s * (1 - 1 / timetable.micro_batches) if first_has_none else added_s
        stage_passes.append({**passes, BACKWARD: passes[BACKWARD].add_computation(mean_added_s)})
    send_s = [
        _compute_send_seconds(config, timetable, stage_index, stage.sent_bytes)
        for stage_index, stage in enumerate(stages[:-1])
    ]
    hidden_seconds = None
    if config.strategy.overlaps_experts:
        hidden_seconds = [
            list_hidden_seconds(timetable.list_actions(rank), stage_seconds, speed.overlap_loss)
            for rank in range(timetable.ranks)
        ]
    timelines = simulate_timetable(timetable, stage_seconds, send_s, hidden_seconds)
    timelines_without_sending = simulate_timetable(timetable, stage_seconds, [0.0] * len(send_s), hidden_seconds)
    updates = [
        rank_speed.add_clipping(config, plan, rank_speed.predict_device_update(config, plan.updated_tensors))
        for plan in plans
    ]
    norm_s = max(rank_speed.compute_update_collective_seconds(config, update) for update in updates)
    sync_seconds = [
        _compute_gradient_sync_seconds(config, timetable, stages, plans, stage_seconds, rank)
        for rank in range(timetable.ranks)
    ]
    split = config.strategy.build_tensor_parallel_split()
    num_parts = plans[0].num_shards * (1 if split is None else split.degree)
    tied_all_reduces = list_tied_all_reduces(config, timetable, num_parts)
    tied_s = _compute_mean(
        sum(all_reduce.seconds for all_reduce in tied_all_reduces if rank in all_reduce.ranks)
        for rank in range(timetable.ranks)
    )
    broadcast_seconds = [
        _sum_seconds(_list_collective_seconds(config, plan.list_update_broadcasts())) for plan in plans
    ]
    rank_ends = add_tied_all_reduces(
        [timeline.end_s + exposed for timeline, (exposed, _) in zip(timelines, sync_seconds, strict=True)],
        tied_all_reduces,
    )
    step_s = (
        max(
            end + _compute_update_seconds(update, speed) + broadcast_s
            for end, update, broadcast_s in zip(rank_ends, updates, broadcast_seconds, strict=True)
        )
        + norm_s
    )
    rank_passes = [
        [passes for stage_index in timetable.find_stages_of_rank(rank) for passes in stage_passes[stage_index].values()]
        for rank in range(timetable.ranks)
    ]
    computed_s = timetable.micro_batches * _compute_mean(
        sum(stage_pass.computed for stage_pass in passes) for passes in rank_passes
    )
    exchanged_s = timetable.micro_batches * _compute_mean(
        sum(stage_pass.exchanged for stage_pass in passes) for passes in rank_passes
    )
    busy_s = _compute_mean(timeline.busy_s for timeline in timelines)
    waited_s = max(timeline.end_s for timeline in timelines) - max(
        timeline.end_s for timeline in timelines_without_sending
    )
    broadcast_s = _compute_mean(broadcast_seconds)
    sync_s = max(0.0, waited_s) + _compute_mean(seconds for seconds, _ in sync_seconds) + tied_s + norm_s + broadcast_s
    optimizer_s = _compute_mean(update.seconds for update in updates)
    update_seconds = [_compute_update_seconds(update, speed) for update in updates]
    exposed_s = sync_s + exchanged_s - _compute_mean(map(sum, hidden_seconds or [[0.0]]))
    idle_s = step_s - busy_s - sync_s - _compute_mean(update_seconds)
    seconds_by_limit = {
        "compute": computed_s,
        "network": exposed_s,
        "memory bandwidth": optimizer_s,
        PIPELINE_BUBBLE: idle_s,
        "kernel launches": step_s - computed_s - exposed_s - optimizer_s - idle_s,
    }
    interval_share = rank_speed.find_time_interval_share(config)
    return TimePrediction(
        step_s=PredictedRange(step_s, step_s * (1 - interval_share), step_s * (1 + interval_share)),
        compute_s=computed_s,
        exposed_communication_s=exposed_s,
        optimizer_s=optimizer_s,
        bubble_s=step_s - computed_s - exposed_s - optimizer_s,
        communication_s=exchanged_s
        + _compute_mean_sent_seconds(timetable, send_s)
        + _compute_mean(total for _, total in sync_seconds)
        + tied_s
        + norm_s
        + broadcast_s,
        limited_by=max(seconds_by_limit, key=lambda name: seconds_by_limit[name]),
        degraded=False,
        idle_share=compute_idle_share(
            timelines,
            [exposed + seconds for (exposed, _), seconds in zip(sync_seconds, update_seconds, strict=True)],
            step_s,
        ),
        timeline=_build_timeline(timelines, updates, step_s) if timeline else (),
    )


def _compute_update_seconds(update: OptimizerUpdate, speed: RankSpeed) -> float:
    return update.seconds + update.num_kernels * speed.launch_s


def _simulate_stage_pass(
    stage: SimulatedPipelineStage,
    phase: str,
    speed: RankSpeed,
    pass_cache: dict[tuple[tuple[int, ...], str], StagePassSeconds],
) -> StagePassSeconds:
    """Stages that share their segments take equally long."""
    segments = [segment for segment, _, _ in stage.segments if (segment.phase == FORWARD) == (phase == FORWARD)]
    cache_key = (tuple(map(id, segments)), phase)
    if cache_key not in pass_cache:
        simulated_rank = SimulatedRank(speed)
        for segment in segments:
            for chunk in segment.chunks:
                simulated_rank.simulate_chunk(chunk, phase)
        simulated_rank.synchronize()
        spent = simulated_rank.spent_seconds
        token_s = sum(chunk.token_s for segment in segments for chunk in segment.chunks)
        pass_cache[cache_key] = StagePassSeconds(
            spent["compute"], spent["exposed"], token_s, simulated_rank.processor_time
        )
    return pass_cache[cache_key]


def _compute_addition_seconds(plan: StagePlan, stage: SimulatedPipelineStage, speed: RankSpeed) -> float:
    """Seconds in which a stage's gradients are added to those of earlier micro-batches, a kernel for each."""
    if plan.inputs.gradient_accumulation_fusion:
        return 0.0
    sizes = [plan.compute_added_bytes(parameter) for parameter in stage.units.parameters if parameter.is_trained]
    return len(sizes) * speed.min_kernel_s + sum(sizes) * speed.copy_s_per_byte


def _find_node_of_pipeline_rank(config: RunConfig, rank: int) -> int:
    """Of the first copy."""
    (dim,) = config.strategy.list_group_dims(PIPELINE_GROUP, config.gpus)
    return rank * dim.stride // min(config.gpus, config.gpus_per_node)


def count_concurrent_pipelines(config: RunConfig) -> int:
    """Copies whose ranks of one stage are in the same node, and send at the same time."""
    (dim,) = config.strategy.list_group_dims(PIPELINE_GROUP, config.gpus)
    return min(config.gpus, config.gpus_per_node, dim.stride)


def _compute_send_seconds(config: RunConfig, timetable: Timetable, stage_index: int, size: float) -> float:
    """From a rank of a stage to its neighbour of the next one."""
    assert config.hardware.speeds is not None
    ranks = [timetable.find_rank_of_stage(index) for index in (stage_index, stage_index + 1)]
    if ranks[0] == ranks[1]:
        return 0.0
    sender_node, receiver_node = (_find_node_of_pipeline_rank(config, rank) for rank in ranks)
    return compute_send_seconds(
        size,
        config.hardware.speeds.links,
        is_in_node=sender_node == receiver_node,
        concurrent_sends=count_concurrent_pipelines(config),
    )


def _compute_collective_seconds(config: RunConfig, kind: str, size: float, group: CollectiveGroup) -> float:
    assert config.hardware.speeds is not None
    return compute_collective_seconds(kind, size, group, config.hardware.speeds.links)


def _compute_mean_sent_seconds(timetable: Timetable, send_s: Sequence[float]) -> float:
    """Of all that a rank sends and receives in a step, mean over ranks: everything goes both ways, and has two ends."""
    return 4 * timetable.micro_batches * sum(send_s) / timetable.ranks


def _compute_mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _compute_gradient_sync_seconds(
    config: RunConfig,
    timetable: Timetable,
    stages: Sequence[SimulatedPipelineStage],
    plans: Sequence[StagePlan],
    stage_seconds: Sequence[StageSeconds],
    rank: int,
) -> tuple[float, float]:
    """Seconds of gathering and reducing among copies: those that nothing hides, and all.

    DDP's buckets go while the last backward runs, all but the last one. Under FSDP units are gathered as the first
    micro-batch comes to them, which hides all but the first of them, and reduced when the last backward is over.
    """
    plan = plans[rank]
    exposed_s = total_s = 0.0
    for stage_index in timetable.find_stages_of_rank(rank):
        units, seconds = stages[stage_index].units, stage_seconds[stage_index]
        gathers = _list_collective_seconds(config, plan.list_gathers(units))
        if gathers:
            exposed_s += gathers[0][0] + max(0.0, _sum_seconds(gathers) - gathers[0][0] - seconds.forward)
        planned = plan.list_reductions(units)
        hidden = _list_collective_seconds(config, [collective for collective in planned if collective.in_backward])
        late = _list_collective_seconds(config, [collective for collective in planned if not collective.in_backward])
        if hidden:
            exposed_s += max(hidden[-1][0], _sum_seconds(hidden) - seconds.backward)
        exposed_s += _sum_seconds(late)
        total_s += _sum_seconds(gathers) + _sum_seconds(hidden) + _sum_seconds(late)
    return exposed_s, total_s


def _list_collective_seconds(config: RunConfig, collectives: Sequence[PlannedCollective]) -> list[tuple[float, float]]:
    """Seconds of each, and how often it is carried out."""
    compute_seconds = functools.cache(
        lambda kind, size, group: _compute_collective_seconds(config, kind, size, build_collective_group(config, group))
    )
    return [
        (compute_seconds(collective.kind, collective.size, collective.group), collective.count)
        for collective in collectives
    ]


def _sum_seconds(counted_seconds: Sequence[tuple[float, float]]) -> float:
    return sum(count * seconds for seconds, count in counted_seconds)


@dataclass(frozen=True)
class TiedGradientAllReduce:
    """The all-reduce of a gradient that several ranks of a pipeline have."""

    ranks: tuple[int, ...]
    """Of the pipeline."""
    group: CollectiveGroup
    seconds: float


def list_tied_all_reduces(config: RunConfig, timetable: Timetable, num_parts: int) -> list[TiedGradientAllReduce]:
    """In the order of a step; the groups of all copies of the pipeline send at the same time.

    Parameters
    ----------
    num_parts: int
        Ranks that what is tied, such as the table of embeddings, is divided over by tensor parallelism and FSDP.
    """
    tied_all_reduces = []
    for numel, stages in list_run_shared_parameters(config, timetable).values():
        ranks = tuple(sorted({timetable.find_rank_of_stage(stage) for stage in stages}))
        if len(ranks) == 1:
            continue
        ranks_by_node = Counter(_find_node_of_pipeline_rank(config, rank) for rank in ranks)
        concurrent_groups = 1 if len(ranks_by_node) == 1 else count_concurrent_pipelines(config)
        group = CollectiveGroup(len(ranks), min(ranks_by_node.values()), concurrent_groups)
        size = numel / num_parts * config.precision.parameter_itemsize
        tied_all_reduces.append(
            TiedGradientAllReduce(ranks, group, _compute_collective_seconds(config, ALL_REDUCE, size, group))
        )
    return tied_all_reduces


def add_tied_all_reduces(rank_ends: Sequence[float], tied_all_reduces: Sequence[TiedGradientAllReduce]) -> list[float]:
    """When each rank is done with the gradients it shares with others, having waited for them."""
    delayed_ends = list(rank_ends)
    for all_reduce in tied_all_reduces:
        all_reduce_end = max(delayed_ends[rank] for rank in all_reduce.ranks) + all_reduce.seconds
        for rank in all_reduce.ranks:
            delayed_ends[rank] = all_reduce_end
    return delayed_ends


def _build_timeline(
    timelines: Sequence[RankTimeline], updates: Sequence[OptimizerUpdate], step_s: float
) -> tuple[TimelineSpan, ...]:
    """A lane per rank: what it computes, and the optimizer at the end."""
    spans = []
    for rank, (timeline, update) in enumerate(zip(timelines, updates, strict=True)):
        for action, start, end in zip(timeline.actions, timeline.starts_s, timeline.ends_s, strict=True):
            spans.append(TimelineSpan(f"rank {rank}", f"{action.kind} {action.micro_batch}", action.kind, start, end))
        spans.append(TimelineSpan(f"rank {rank}", "optimizer", "optimizer", step_s - update.seconds, step_s))
    return tuple(sorted(spans, key=lambda span: span.start_s))
