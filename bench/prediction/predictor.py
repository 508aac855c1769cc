"""Predict runs: trace the model, follow the strategy's plan, add up time and memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from bench.config.rehearsal import Rehearsal
from bench.config.run_config import RunConfig
from bench.core import processes
from bench.core.progress import track_progress
from bench.models.checkpointing import find_block_period
from bench.prediction import cache
from bench.prediction.cache import build_cache_key
from bench.prediction.cost import rank_speed
from bench.prediction.cost.rank_groups import LayerGroups, list_layer_groups
from bench.prediction.intervals import add_intervals
from bench.prediction.pipeline import predictor, stages
from bench.prediction.prediction import (
    Prediction,
    TimePrediction,
    prediction_from_plain,
    prediction_to_plain,
)
from bench.prediction.run_inputs import build_plan_inputs, build_run_layout, build_trace_key, list_traced_sizes
from bench.prediction.simulation.allocator_replay import AllocatorReplay
from bench.prediction.simulation.caching_allocator import AllocatorFullError, CachingAllocator
from bench.prediction.simulation.device_memory import (
    ReplayedMemory,
    compute_inputs_bytes,
    compute_workspace_bytes,
    is_replay_needed,
    predict_memory,
    predict_retries,
)
from bench.prediction.simulation.other_loop import LossMemory, replace_loss_memory
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.simulation.simulated_rank import SimulatedRank, round_parts
from bench.prediction.simulation.step import (
    build_first_device_segments,
    build_other_device_segments,
    simulate_step,
)
from bench.prediction.trace.chunks import (
    SegmentAtBatch,
    build_chunks,
    count_segment_repetitions,
    find_segment_block_positions,
)
from bench.prediction.trace.scaled_trace import (
    ScaledTrace,
    compute_offloaded_bytes,
    list_traced_batch_sizes,
    scale_kernels,
)
from bench.prediction.trace.trace import TraceKey
from bench.prediction.trace.trace_cache import (
    HashableHardware,
    add_loaded_traces,
    get_loaded_traces,
    load_scaled_trace,
    load_traces,
)
from bench.prediction.trace.traced_blocks import StageTraceKey
from bench.strategies.step_plan import PARAMETER_MEMORY, StepPlan

MIN_BLOCKS_FOR_PROCESSES = 1280
"""Blocks of all runs' models together, from which on it pays to share the work among processes: a simulated step takes
longer the more blocks there are, and `REPLAY_WEIGHT` times as long where the allocator may be replayed."""

UNFORKED_START_WEIGHT = 8
"""Times as many where processes are not forked from this one: each imports what builds models first, which took 2.3 s
on two cores, in which one process predicts about so many blocks."""

REPLAY_WEIGHT = 4

NUM_REPLAYED_STEPS = 2
"""The first makes optimizer state and fills the allocator's cache; the second is like all later ones, but for what a
plan holds in it alone."""

MAX_RUNS_PER_TASK = 32
"""Runs a process takes at a time; fewer where each process would not have `MIN_TASKS_PER_PROCESS` times as many."""

MIN_TASKS_PER_PROCESS = 4


def predict_run(config: RunConfig, *, timeline: bool = False) -> Prediction:
    """Predict one run.

    Parameters
    ----------
    timeline: bool
        Keep every span of the simulated step.

    Raises
    ------
    ImpossibleError
        If the strategy states no plan.
    """
    if timeline:
        return add_intervals(config, _simulate_run(config, timeline=True))
    return predict_runs([config])[0]


def predict_runs(configs: Sequence[RunConfig], *, replay_allocator: bool = True) -> list[Prediction]:
    """Predict many runs: traces are shared, the work is shared among the processors, results are remembered.

    Parameters
    ----------
    replay_allocator: bool
        Where memory may be short, play the step through the model of the caching allocator, which takes several times
        as long as all else. Without, what is allocated decides whether a run fits.

    Raises
    ------
    ImpossibleError
        If a strategy states no plan.
    """
    kind = "prediction" if replay_allocator else "prediction without allocator"
    keys = [
        build_cache_key(compute_prediction_id(config), config.model, config.strategy, config.finetune)
        for config in configs
    ]
    predictions = {
        key: prediction_from_plain(value) for key, value in cache.read_entries(kind, dict.fromkeys(keys)).items()
    }
    missing_configs = {key: config for key, config in zip(keys, configs, strict=True) if key not in predictions}
    if missing_configs:
        predicted = _predict_uncached(list(missing_configs.values()), replay_allocator)
        new_predictions = dict(zip(missing_configs, predicted, strict=True))
        cache.write_entries(kind, {key: prediction_to_plain(value) for key, value in new_predictions.items()})
        predictions |= new_predictions
    return [add_intervals(config, predictions[key]) for key, config in zip(keys, configs, strict=True)]


def compute_prediction_id(config: RunConfig) -> str:
    """What tells one prediction from another, whatever mode the run is in."""
    if config.mode == "predict":
        return config.run_id
    run_id = dataclasses.replace(config, mode="predict", rehearse=Rehearsal()).run_id
    position = predictor.find_rehearsed_position(config)
    return run_id if position is None else f"{run_id} rank {position} of a pipeline"


def _predict_uncached(configs: list[RunConfig], replay_allocator: bool) -> list[Prediction]:
    simulate = functools.partial(_simulate_run, replay_allocator=replay_allocator)
    load_traces(list({trace: None for config in configs for trace in _list_traces(config)}))
    num_workers = processes.count_workers()
    work = sum(config.trained_model.num_blocks or 1 for config in configs) * (REPLAY_WEIGHT if replay_allocator else 1)
    min_work = MIN_BLOCKS_FOR_PROCESSES * (1 if processes.forks_children() else UNFORKED_START_WEIGHT)
    if num_workers == 1 or work < min_work:
        return [simulate(config) for config in track_progress(configs, len(configs), "simulating steps")]
    sorted_indices = sorted(
        range(len(configs)), key=lambda index: repr((build_trace_key(configs[index]), configs[index].hardware))
    )
    processes.preload_if_forking(sorted({name for config in configs for name in config.trained_model.preload_modules}))
    for config in configs:
        if config.strategy.timetable is not None:  # of a whole model: those that are forked remember it
            stages.list_run_shared_parameters(config, config.strategy.timetable)
    with processes.open_worker_pool(num_workers, add_loaded_traces, (get_loaded_traces(),)) as pool:
        runs_per_task = max(1, min(MAX_RUNS_PER_TASK, len(configs) // (MIN_TASKS_PER_PROCESS * num_workers)))
        predictions = pool.map(simulate, [configs[index] for index in sorted_indices], chunksize=runs_per_task)
        counted_predictions = track_progress(predictions, len(configs), "simulating steps")
        return [
            prediction
            for _, prediction in sorted(zip(sorted_indices, counted_predictions, strict=True), key=lambda pair: pair[0])
        ]


def _list_traces(config: RunConfig) -> list[tuple[TraceKey | StageTraceKey, int]]:
    """Traces and batch sizes that a run's prediction is made from."""
    if config.strategy.timetable is not None:
        return stages.list_stage_traces(config, build_trace_key(config))
    batch_sizes = {config.sequences_per_device, config.sequences_per_rank}
    return [
        (build_trace_key(config), traced_size)
        for batch_size in batch_sizes
        for traced_size in set(list_traced_batch_sizes(batch_size, is_compiled=config.has_compiled_parts))
    ]


def _simulate_run(config: RunConfig, *, timeline: bool = False, replay_allocator: bool = True) -> Prediction:
    """Predict a run by simulating its step; once more if memory is so short that the allocator has to retry."""
    if config.strategy.timetable is not None:
        return predictor.predict_pipeline(config, build_trace_key(config), timeline=timeline)
    simulated_steps = _simulate_period(config, rank_speed.build_rank_speed(config), timeline)
    largest_step = max(simulated_steps, key=lambda step: step.simulated_rank.peak.size)
    host_bytes = max(step.plan.host_bytes for step in simulated_steps) + _compute_offloaded_bytes(config)
    memory_prediction = predict_memory(config, largest_step.simulated_rank, host_bytes)
    if replay_allocator and memory_prediction.capacity is not None and is_replay_needed(config, memory_prediction):
        replayed = replay_memory(config, memory_prediction.capacity)
        memory_prediction = predict_memory(config, largest_step.simulated_rank, host_bytes, replayed)
    phase_peaks = [round_parts(step.simulated_rank.phase_peaks) for step in simulated_steps]
    memory_prediction = dataclasses.replace(
        memory_prediction,
        phase_peaks={phase: max(peaks[phase] for peaks in phase_peaks) for phase in memory_prediction.phase_peaks},
    )
    if config.devices_per_process > 1:
        memory_prediction = dataclasses.replace(
            memory_prediction, others_bytes=round(_simulate_other_device(config).peak.size)
        )
    if not rank_speed.is_host_speed_known(config):
        return Prediction(memory_prediction, None)
    time_prediction = _predict_time(config, simulated_steps)
    retries = predict_retries(memory_prediction, largest_step.simulated_rank)
    if time_prediction is not None and retries.high_share:
        retrying_speed = rank_speed.add_allocator_retries(rank_speed.build_rank_speed(config))
        retrying_time = _predict_time(config, _simulate_period(config, retrying_speed, timeline))
        assert retrying_time is not None
        time_prediction = rank_speed.blend_retries(time_prediction, retrying_time, retries)
    return Prediction(memory_prediction, time_prediction)


def _predict_time(config: RunConfig, simulated_steps: Sequence[SimulatedStep]) -> TimePrediction | None:
    return rank_speed.predict_time(config, [(step.count, step.simulated_rank) for step in simulated_steps])


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """A step that was simulated, for all steps of a period that are like it."""

    count: int
    simulated_rank: SimulatedRank
    """After the step."""
    plan: StepPlan
    """That was followed."""


def _simulate_period(config: RunConfig, speed: rank_speed.RankSpeed, timeline: bool) -> list[SimulatedStep]:
    """The different steps of a period, each by itself."""
    scaled_trace = load_scaled_trace(
        build_trace_key(config),
        list_traced_sizes(config),
    )
    counted_plans = config.strategy.plan_period(build_plan_inputs(config, scaled_trace))
    return [
        SimulatedStep(count, _simulate_rank(config, speed, timeline, scaled_trace, plan), plan)
        for count, plan in counted_plans
        if count
    ]


def replay_memory(config: RunConfig, capacity: int) -> ReplayedMemory:
    """What the model of the allocator makes of a run with so many bytes, cuBLAS's workspaces among them."""
    available_bytes = round(capacity - compute_workspace_bytes(config))
    try:
        replay = replay_steps(config, available_bytes)
    except AllocatorFullError:
        return ReplayedMemory(available_bytes, fits=False)
    return ReplayedMemory(available_bytes if replay.num_retries else replay.allocator.peak_reserved, fits=True)


def replay_steps(config: RunConfig, capacity: float = math.inf, num_steps: int = NUM_REPLAYED_STEPS) -> AllocatorReplay:
    """The allocator after some steps, its peaks and counts those of the last one.

    Parameters
    ----------
    capacity: float
        Bytes it may have of the device.

    Raises
    ------
    AllocatorFullError
        If that is too little even when all that is cached is given back.
    """
    speed = rank_speed.build_rank_speed(config)
    key = build_trace_key(config)
    scaled_trace = load_scaled_trace(key, list_traced_sizes(config))
    replay = AllocatorReplay(
        CachingAllocator(capacity, expandable_segments=config.expandable_segments),
        find_segment_block_positions(scaled_trace.segments, build_run_layout(config).block_counts, key.block_period),
    )
    for step_index in range(num_steps):
        (_, plan) = config.strategy.plan_period(build_plan_inputs(config, scaled_trace))[-1]
        replay.begin_step(plan.updated_numels, plan.early_sizes if step_index == 1 else ())
        simulated_rank = _simulate_rank(config, speed, False, scaled_trace, plan, replay)
        replay.end_step(simulated_rank.processor_time)
    return replay


def _simulate_rank(
    config: RunConfig,
    speed: rank_speed.RankSpeed,
    timeline: bool,
    scaled_trace: ScaledTrace,
    plan: StepPlan,
    replay: AllocatorReplay | None = None,
) -> SimulatedRank:
    """The rank after a step that follows a plan."""
    speed = rank_speed.add_host_transfers(config, speed)
    return simulate_planned_rank(config, SimulatedRank(speed, timeline=timeline, replay=replay), scaled_trace, plan)


def simulate_planned_rank(
    config: RunConfig,
    simulated_rank: SimulatedRank,
    scaled_trace: ScaledTrace,
    plan: StepPlan,
    loss: LossMemory | None = None,
) -> SimulatedRank:
    """A rank after a step that follows a plan, with another software's loss where one is given."""
    from bench.models.materialize import count_buffer_bytes

    key = build_trace_key(config)
    simulated_rank.allocate("micro-batches", compute_inputs_bytes(config, scaled_trace), "activations")
    simulated_rank.allocate("model's buffers", count_buffer_bytes(config.trained_model, config.gpus), PARAMETER_MEMORY)
    layer_groups = list_layer_groups(config)
    hardware = rank_speed.build_hashable_hardware(config)
    segments = build_segments(key, config.sequences_per_device, hardware, layer_groups, _find_transfer_speed(config))
    if loss is not None:
        logits_bytes = build_plan_inputs(config, scaled_trace).logits_bytes
        itemsize = 4 if key.widens_outputs else config.precision.compute_itemsize
        segments = replace_loss_memory(segments, loss, logits_bytes / itemsize, logits_bytes)
    if config.devices_per_process > 1:
        batch_segments = build_segments(key, config.sequences_per_rank, hardware, layer_groups)
        segments = build_first_device_segments(segments, batch_segments, config.devices_per_process)
    _simulate_planned_step(config, simulated_rank, plan, segments)
    return simulated_rank


def _simulate_other_device(config: RunConfig) -> SimulatedRank:
    """A device after the first of a process that drives several, its time left out."""
    key = build_trace_key(config)
    scaled_trace = load_scaled_trace(key, list_traced_sizes(config))
    plan = config.strategy.plan_other_devices(build_plan_inputs(config, scaled_trace))
    assert plan is not None
    simulated_rank = SimulatedRank(rank_speed.RankSpeed())
    segments = build_segments(
        key,
        config.sequences_per_device,
        rank_speed.build_hashable_hardware(config),
        list_layer_groups(config),
    )
    _simulate_planned_step(config, simulated_rank, plan, build_other_device_segments(segments))
    return simulated_rank


def _simulate_planned_step(
    config: RunConfig, simulated_rank: SimulatedRank, plan: StepPlan, segments: Sequence[SegmentAtBatch]
) -> None:
    plan.allocate_persistent_state(simulated_rank)
    simulated_rank.early_bytes = sum(plan.early_sizes)
    simulated_rank.note_initial_bytes()
    simulate_step(
        simulated_rank,
        plan,
        build_run_layout(config),
        segments,
        block_period=find_block_period(config.trained_model, config.activation_checkpointing),
        num_micro_batches=config.gradient_accumulation,
        synchronize_every_micro_batch=config.gradient_accumulation_sync,
        update=rank_speed.predict_optimizer_update(config, plan),
    )


def _find_transfer_speed(config: RunConfig) -> float:
    """Seconds per byte of activations that are offloaded."""
    if not config.activation_offload or config.hardware.device == "cpu":
        return 0.0
    return rank_speed.add_host_transfers(config, rank_speed.RankSpeed()).transfer_s_per_byte


def _compute_offloaded_bytes(config: RunConfig) -> float:
    """Of activations on the host."""
    key, batch_size = build_trace_key(config), config.sequences_per_device
    scaled_trace = load_scaled_trace(key, list_traced_batch_sizes(batch_size, is_compiled=config.has_compiled_parts))
    positions = find_segment_block_positions(
        scaled_trace.segments,
        build_run_layout(config).block_counts,
        key.block_period,
    )
    return compute_offloaded_bytes(scaled_trace, batch_size, positions)


@functools.lru_cache(maxsize=256)
def build_segments(
    key: TraceKey,
    batch_size: int,
    hashable_hardware: HashableHardware,
    layer_groups: LayerGroups,
    transfer_s_per_byte: float = 0.0,
) -> tuple[SegmentAtBatch, ...]:
    """The scaled trace's segments at a batch size, with the time of everything on some hardware.

    Parameters
    ----------
    layer_groups: LayerGroups
        Where the ranks are that share layers.
    transfer_s_per_byte: float
        Of a copy between device and host.
    """
    scaled_trace = load_scaled_trace(key, list_traced_batch_sizes(batch_size, is_compiled=key.has_compiled_parts))
    batch_weight = scaled_trace.compute_batch_weight(batch_size)
    segment_kernels = [scale_kernels(scaled_segment, batch_weight) for scaled_segment in scaled_trace.segments]
    block_counts = build_parameter_layout(key.family, 1, key.precision.scales_loss, key.split).block_counts
    block_positions = find_segment_block_positions(scaled_trace.segments, block_counts, key.block_period)
    segment_seconds = rank_speed.compute_seconds_per_segment(
        hashable_hardware.hardware,
        key.precision,
        segment_kernels,
        key.family.count_expert_tokens(key.sequence_length),
        count_segment_repetitions(scaled_trace.segments, block_positions),
    )
    time_collective = rank_speed.build_layer_collective_timer(
        hashable_hardware.hardware, key.precision, layer_groups, transfer_s_per_byte
    )
    return tuple(
        SegmentAtBatch(
            scaled_segment.phase,
            scaled_segment.micro_batch,
            scaled_segment.place,
            build_chunks(scaled_segment, batch_weight, kernel_seconds, block_positions, time_collective),
        )
        for scaled_segment, kernel_seconds in zip(scaled_trace.segments, segment_seconds, strict=True)
    )
