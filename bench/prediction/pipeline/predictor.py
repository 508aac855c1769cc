"""Predict a run whose model is cut into stages: every rank's memory, and the time of the whole timetable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError
from bench.prediction.cost import rank_speed
from bench.prediction.pipeline.stages import SimulatedPipelineStage, build_pipeline_stages
from bench.prediction.pipeline.time import predict_pipeline_time
from bench.prediction.prediction import Prediction
from bench.prediction.simulation.device_memory import predict_memory
from bench.prediction.simulation.other_loop import (
    HELD_LOGITS_NAME,
    RECEIVED_NAME,
    SENT_NAME,
    LossMemory,
    replace_loss_memory,
)
from bench.prediction.simulation.rank_memory import ACTIVATION_MEMORY
from bench.prediction.simulation.repetition import Repetition
from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.prediction.trace.chunks import Chunk
from bench.prediction.trace.trace import TraceKey
from bench.strategies.pipeline.cycles import ActionCycle, NumberedAction, list_cycles
from bench.strategies.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    ONE_F_ONE_B,
    WEIGHT_BACKWARD,
    Timetable,
    repeats_recomputation,
)
from bench.strategies.pipeline.step_plans import StagePlan, name_stage_gradients
from bench.strategies.plan_inputs import PlanInputs, ShardingUnit
from bench.strategies.step_plan import GRADIENT_MEMORY, PARAMETER_MEMORY, PIPELINE_GROUP

UNTIMED_SPEED = RankSpeed()
"""Memory is the same at any pace."""


def predict_pipeline(config: RunConfig, key: TraceKey, *, timeline: bool) -> Prediction:
    """Predict a run; memory is that of the rank that needs most, or of the one that is rehearsed."""
    timetable = config.strategy.timetable
    assert timetable is not None
    stages = build_pipeline_stages(config, key, timetable)
    ranks = range(timetable.ranks)
    plans = _build_plans(config, timetable, stages)
    simulated_ranks = [
        _simulate_rank(config, timetable, stages, plans[rank], rank, SimulatedRank(UNTIMED_SPEED)) for rank in ranks
    ]
    memories = [predict_memory(config, simulated_rank) for simulated_rank in simulated_ranks]
    position = find_rehearsed_position(config)
    if position is None:
        position = max(ranks, key=lambda rank: simulated_ranks[rank].peak.size)
    return Prediction(
        memories[position],
        predict_pipeline_time(config, timetable, stages, plans, timeline=timeline),
    )


def find_rehearsed_position(config: RunConfig) -> int | None:
    """Where the rank that is rehearsed is in its pipeline; None where none is rehearsed, or there is no pipeline."""
    if not config.is_rehearsed or config.strategy.timetable is None:
        return None
    (dim,) = config.strategy.list_group_dims(PIPELINE_GROUP, config.gpus)
    return config.strategy.find_rehearsed_rank(config.rehearse.rank, config.gpus) // dim.stride % dim.size


def simulate_other_loop(
    config: RunConfig,
    key: TraceKey,
    loss: LossMemory | None,
    build_rank: Callable[[], SimulatedRank],
) -> list[SimulatedRank]:
    """Every rank after a step in which another software's loss is computed.

    Parameters
    ----------
    build_rank: callable
        A rank before the step.
    """
    timetable = config.strategy.timetable
    assert timetable is not None
    *stages, last_stage = build_pipeline_stages(config, key, timetable)
    if loss is not None:
        # What a schedule of torch holds of them longer is held by none of the others.
        num_logits = last_stage.logits_bytes / config.precision.compute_itemsize
        segments = replace_loss_memory(
            [segment for segment, _, _ in last_stage.segments], loss, num_logits, last_stage.logits_bytes
        )
        last_stage = dataclasses.replace(last_stage.replace_segments(segments), logits_bytes=0.0)
    stages.append(last_stage)
    return [
        _simulate_rank(config, timetable, stages, plan, rank, build_rank())
        for rank, plan in enumerate(_build_plans(config, timetable, stages))
    ]


def _build_plans(config: RunConfig, timetable: Timetable, stages: Sequence[SimulatedPipelineStage]) -> list[StagePlan]:
    """Of every rank of a pipeline.

    Raises
    ------
    ImpossibleError
        Where blocks are computed again more than once (`repeats_recomputation`).
    """
    if repeats_recomputation(timetable.schedule, config.activation_checkpointing):
        raise ImpossibleError(
            f"activation_checkpointing={config.activation_checkpointing} is not valid with mode=predict and "
            f"strategy.schedule={timetable.schedule}, which splits backward into that of inputs and of weights: torch "
            "would compute a block again for each group of its weights and keep all of it. Choose none, another "
            "schedule, or mode=measure."
        )
    return [
        _build_rank_plan(config, [stages[stage_index] for stage_index in timetable.find_stages_of_rank(rank)])
        for rank in range(timetable.ranks)
    ]


def _build_rank_plan(config: RunConfig, stages: Sequence[SimulatedPipelineStage]) -> StagePlan:
    plan_inputs = PlanInputs(
        units=(),
        precision=config.precision,
        world_size=config.gpus,
        optimizer=config.optimizer,
        num_micro_batches=1,
        keep_gradients=config.optimizer.keep_gradients,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        is_on_cpu=config.hardware.device == "cpu",
    )
    return config.strategy.plan_stages([stage.units for stage in stages], plan_inputs)


def _simulate_rank(
    config: RunConfig,
    timetable: Timetable,
    stages: Sequence[SimulatedPipelineStage],
    plan: StagePlan,
    rank: int,
    simulated_rank: SimulatedRank,
) -> SimulatedRank:
    """Memory of one rank over a step."""
    from bench.models.materialize import count_buffer_bytes

    on_cpu = config.hardware.device == "cpu"
    # On a CPU each share is a view of the whole batch.
    num_sequences = config.batch_size_per_gpu * config.batch_groups if on_cpu else config.sequences_per_rank
    simulated_rank.allocate("micro-batches", stages[0].sequence_bytes * num_sequences, ACTIVATION_MEMORY)
    simulated_rank.allocate("selected tokens", _compute_selected_bytes(config, stages[0]), ACTIVATION_MEMORY)
    simulated_rank.allocate("model's buffers", count_buffer_bytes(config.model), PARAMETER_MEMORY)
    plan.allocate_persistent_state(simulated_rank)
    simulated_rank.early_bytes = sum(plan.early_sizes)
    simulated_rank.note_initial_bytes()
    own_stage_indices = timetable.find_stages_of_rank(rank)
    own_stages = [stages[stage_index] for stage_index in own_stage_indices]
    plan.begin_step(simulated_rank, gathers_ahead=timetable.virtual_stages > 1)
    exchanged_bytes = sum(stage.received_bytes + stage.sent_bytes for stage in own_stages)
    simulated_rank.allocate(RECEIVED_NAME, timetable.micro_batches * exchanged_bytes, ACTIVATION_MEMORY)
    labels = {stage_index: config.strategy.label_stage(stage_index) for stage_index in own_stage_indices}

    def simulate_action(numbered: NumberedAction) -> None:
        action, num_before, is_last = numbered.action, numbered.num_before, numbered.is_last
        stage = stages[action.stage]
        simulated_rank.phase = FORWARD if action.kind == FORWARD else BACKWARD
        simulated_rank.module = labels[action.stage]
        if action.kind == FORWARD:
            _simulate_forward(simulated_rank, plan, stage, num_before)
            simulated_rank.free(HELD_LOGITS_NAME)
        elif action.kind == INPUT_BACKWARD:
            simulated_rank.simulate_chunk(stage.get_input_backward_chunk(plan), BACKWARD)
            _keep_sent_buffers(simulated_rank, timetable, stage)
        elif action.kind == WEIGHT_BACKWARD:
            _simulate_weight_backward(simulated_rank, plan, stage, num_before, is_last=is_last)
        else:
            _simulate_backward(simulated_rank, plan, stage, num_before, is_last=is_last, on_cpu=on_cpu)
            _keep_sent_buffers(simulated_rank, timetable, stage)
            if on_cpu:
                _keep_first_sent(simulated_rank, timetable, stage, timetable.count_warm_up_forwards(rank), num_before)

    for cycle in list_cycles(timetable, rank):
        # On a CPU what is held depends on how far the step is (`_keep_first_sent`).
        _simulate_cycle(simulated_rank, cycle, simulate_action, leaves_out=not on_cpu)
    simulated_rank.free(SENT_NAME)
    simulated_rank.free(HELD_LOGITS_NAME)
    simulated_rank.phase, simulated_rank.module = "optimizer", "optimizer"
    update = rank_speed.predict_device_update(config, plan.updated_tensors)
    simulated_rank.allocate("optimizer temporaries", update.temporary_bytes, "temporaries")
    simulated_rank.free("optimizer temporaries")
    plan.after_optimizer_step(simulated_rank)
    return simulated_rank


def _compute_selected_bytes(config: RunConfig, first_stage: SimulatedPipelineStage) -> float:
    """Of a rank's part of every sequence, with positions beside tokens and labels; nothing where it has whole ones."""
    split = config.strategy.build_tensor_parallel_split()
    if split is None or split.context_degree == 1:
        return 0.0
    return 3 / 2 * config.sequences_per_rank * first_stage.sequence_bytes / split.context_degree


def _keep_sent_buffers(simulated_rank: SimulatedRank, timetable: Timetable, stage: SimulatedPipelineStage) -> None:
    """What the schedules of torch 2.13 still hold: GPipe and interleaved ones all that they made and sent, until the
    step is over; 1F1B what it sent last, and the last stage's logits until the next micro-batch's are there."""
    if timetable.schedule == ONE_F_ONE_B:
        simulated_rank.allocate(SENT_NAME, stage.received_bytes, ACTIVATION_MEMORY)
        simulated_rank.allocate(HELD_LOGITS_NAME, stage.logits_bytes, ACTIVATION_MEMORY)
    else:
        simulated_rank.grow_allocation(SENT_NAME, stage.received_bytes + stage.produced_bytes, ACTIVATION_MEMORY)


def _keep_first_sent(
    simulated_rank: SimulatedRank,
    timetable: Timetable,
    stage: SimulatedPipelineStage,
    num_warm_up: int,
    num_before: int,
) -> None:
    """After backward `num_before`: what 1F1B sent before its steady state, but for the last that it computed there, is
    held by gloo's work, and that by `Schedule1F1B` (``send_work``) until the steady state is over."""
    if timetable.schedule == ONE_F_ONE_B:
        steady_start = timetable.micro_batches - num_warm_up
        simulated_rank.allocate(
            "first sent",
            stage.produced_bytes if num_warm_up - 2 <= num_before < steady_start else 0.0,
            ACTIVATION_MEMORY,
        )


def _simulate_cycle(
    simulated_rank: SimulatedRank,
    cycle: ActionCycle,
    simulate_action: Callable[[NumberedAction], None],
    *,
    leaves_out: bool,
) -> None:
    """All repetitions of a cycle, but for those that need not be simulated."""
    repetition = Repetition(simulated_rank)
    number = 0
    while number < cycle.repetitions:
        for numbered in cycle.number_actions(number):
            simulate_action(numbered)
        number += 1
        if leaves_out:
            number += repetition.leave_out(cycle.repetitions - number)


def _simulate_weight_backward(
    simulated_rank: SimulatedRank, plan: StagePlan, stage: SimulatedPipelineStage, num_before: int, *, is_last: bool
) -> None:
    """The gradients of a stage's weights, and an end of what its forward pass has left."""
    kept_bytes = stage.get_backward_chunk(plan, is_first=num_before == 0)[1]
    if kept_bytes:
        simulated_rank.grow_allocation(name_stage_gradients(stage.units), kept_bytes, GRADIENT_MEMORY)
    simulated_rank.simulate_chunk(stage.get_weight_backward_chunk(plan), BACKWARD)
    # Gradients of another format than they are reduced in; later ones are added to the first.
    if num_before == 0 and plan.takes_each_gradient(is_last_backward=False):
        for units, parameters in stage.list_backward_units():
            for parameter in parameters:
                unit = units[-1] if parameter.is_expert else units[0]
                plan.after_gradient(simulated_rank, stage.units, unit, parameter, is_first_micro_batch=True)
            for unit in units:
                plan.after_unit_backward(simulated_rank, stage.units, unit)
    if is_last:
        plan.after_stage_last_backward(simulated_rank, stage.units)


def _simulate_forward(
    simulated_rank: SimulatedRank, plan: StagePlan, stage: SimulatedPipelineStage, num_before: int
) -> None:
    if num_before > 0 or not plan.gathers_units:
        simulated_rank.simulate_chunk(stage.forward_chunk, FORWARD)
        return
    current_units: tuple[ShardingUnit, ...] | None = None
    plan.before_unit_first_forward(simulated_rank, stage.units, stage.units.units[0])
    for segment, units, _ in stage.segments:
        if segment.phase != FORWARD:
            continue
        if units is not current_units and not units[0].is_root:
            for unit in units:
                plan.before_unit_first_forward(simulated_rank, stage.units, unit)
        current_units = units
        for chunk in segment.chunks:
            simulated_rank.simulate_chunk(chunk, FORWARD)
    plan.after_stage_first_forward(simulated_rank, stage.units)


def _simulate_backward(
    simulated_rank: SimulatedRank,
    plan: StagePlan,
    stage: SimulatedPipelineStage,
    num_before: int,
    *,
    is_last: bool,
    on_cpu: bool,
) -> None:
    gradients_name = name_stage_gradients(stage.units)
    if plan.takes_each_gradient(is_last_backward=False) and num_before > 0:
        # All but the first add to what is there: they are alike.
        simulated_rank.simulate_chunk(_build_adding_chunk(plan, stage, on_cpu=on_cpu), BACKWARD)
        if is_last:
            plan.after_stage_last_backward(simulated_rank, stage.units)
        return
    if not plan.takes_each_gradient(is_last_backward=is_last):
        chunk, kept_bytes = stage.get_backward_chunk(plan, is_first=num_before == 0)
        simulated_rank.simulate_chunk(chunk, "backward")
        if kept_bytes:
            simulated_rank.grow_allocation(gradients_name, kept_bytes, GRADIENT_MEMORY)
    else:
        _simulate_units_backward(simulated_rank, plan, stage, num_before, on_cpu=on_cpu)
    if is_last:
        plan.after_stage_last_backward(simulated_rank, stage.units)


def _build_adding_chunk(plan: StagePlan, stage: SimulatedPipelineStage, *, on_cpu: bool) -> Chunk:
    """A backward whose gradients are converted unit by unit and added to those of earlier micro-batches, as one."""

    def build() -> Chunk:
        scratch = SimulatedRank(UNTIMED_SPEED)
        _simulate_units_backward(scratch, plan, stage, 1, on_cpu=on_cpu)
        peak, whole_chunk = scratch.peak, stage.get_backward_chunk(plan, is_first=False)[0]
        return dataclasses.replace(
            whole_chunk,
            peak_bytes=peak.size,
            lasting_bytes_at_peak=peak.parts[ACTIVATION_MEMORY],
            gradient_bytes_at_peak=peak.parts[GRADIENT_MEMORY],
        )

    return stage.remember_chunk("adding", build)


def _simulate_units_backward(
    simulated_rank: SimulatedRank, plan: StagePlan, stage: SimulatedPipelineStage, num_before: int, *, on_cpu: bool
) -> None:
    """Gradient by gradient, unit by unit."""
    current_units: tuple[ShardingUnit, ...] = ()
    adds_gradients = num_before > 0 and on_cpu
    for segment, units, parameters in stage.segments:
        if segment.phase == FORWARD:
            continue
        if units is not current_units:
            _leave_units(simulated_rank, plan, stage, current_units, adds_gradients=adds_gradients)
        current_units = units
        for chunk in segment.chunks:
            simulated_rank.simulate_chunk(chunk, "backward")
            if chunk.completed_gradient is not None:
                parameter = parameters[chunk.completed_gradient]
                plan.after_gradient(
                    simulated_rank,
                    stage.units,
                    units[-1] if parameter.is_expert else units[0],
                    parameter,
                    is_first_micro_batch=num_before == 0,
                )
    _leave_units(simulated_rank, plan, stage, current_units, adds_gradients=adds_gradients)


def _leave_units(
    simulated_rank: SimulatedRank,
    plan: StagePlan,
    stage: SimulatedPipelineStage,
    units: Sequence[ShardingUnit],
    *,
    adds_gradients: bool,
) -> None:
    for unit in reversed(units):
        if adds_gradients:
            simulated_rank.allocate("converted", plan.compute_accumulation_bytes(unit), GRADIENT_MEMORY)
            simulated_rank.free("converted")
        plan.after_unit_backward(simulated_rank, stage.units, unit)
