"""Predict a run whose model is cut into stages: every rank's memory, and the time of the whole timetable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.config import RunConfig
from bench.models.materialize import buffers_bytes
from bench.simulate import memory, pace
from bench.simulate.machine import Machine, Pace
from bench.simulate.pipeline_parts import Cast, casts_of
from bench.simulate.pipeline_time import time_of
from bench.simulate.prediction import Prediction
from bench.simulate.tape import TapeKey
from bench.strategies.pipeline_plan import RankPlan, gradients_of_stage
from bench.strategies.pipeline_schedule import FORWARD, ONE_F_ONE_B, Action, Timetable
from bench.strategies.plan import GRADIENTS, PARAMETERS, Setting, Unit

ACTIVATIONS = "activations"

STANDSTILL = Pace()
"""Memory is the same at any pace."""


def predicted(config: RunConfig, key: TapeKey, *, timeline: bool) -> Prediction:
    """Predict a run; memory is that of the rank that needs most."""
    timetable = config.strategy.timetable
    assert timetable is not None
    casts = casts_of(config, key, timetable)
    ranks = range(timetable.ranks)
    plans = [_plan(config, [casts[stage] for stage in timetable.stages_of(rank)]) for rank in ranks]
    machines = [_played(config, timetable, casts, plans[rank], rank) for rank in ranks]
    memories = [memory.memory_of(config, machine) for machine in machines]
    stalls = [
        _stalled_s(config, timetable, casts, plans[rank], rank) if memory.is_degraded(memories[rank]) else 0.0
        for rank in ranks
    ]
    found = memories[max(ranks, key=lambda rank: machines[rank].peak.size)]
    return Prediction(found, time_of(config, timetable, casts, plans, found, stalls, timeline=timeline))


def _plan(config: RunConfig, casts: Sequence[Cast]) -> RankPlan:
    setting = Setting(
        units=(),
        precision=config.precision,
        world_size=config.gpus,
        states_per_parameter=config.optimizer.states_per_parameter,
        micro_batches=1,
        keep_gradients=config.optimizer.keep_gradients,
        on_cpu=config.hardware.device == "cpu",
    )
    return config.strategy.rank_plan([cast.units for cast in casts], setting)


def _stalled_s(config: RunConfig, timetable: Timetable, casts: Sequence[Cast], plan: RankPlan, rank: int) -> float:
    """Seconds of a step in which a rank's allocator retries: at no pace at all, nothing else holds up its kernels."""
    return _played(config, timetable, casts, plan, rank, pace.retrying(STANDSTILL)).spent["launch"]


def _played(
    config: RunConfig,
    timetable: Timetable,
    casts: Sequence[Cast],
    plan: RankPlan,
    rank: int,
    speed: Pace = STANDSTILL,
) -> Machine:
    """Memory of one rank over a step."""
    machine = Machine(speed)
    on_cpu = config.hardware.device == "cpu"
    # On a CPU each share is a view of the whole batch.
    sequences = config.batch_size_per_gpu * (config.gpus if on_cpu else timetable.ranks)
    machine.hold("micro-batches", casts[0].inputs_bytes * sequences, ACTIVATIONS)
    machine.hold("model's buffers", buffers_bytes(config.model), PARAMETERS)
    plan.begin(machine)
    machine.note_initial()
    own = [casts[stage] for stage in timetable.stages_of(rank)]
    plan.begin_step(machine, ahead=timetable.virtual_stages > 1)
    exchanged = sum(cast.received_bytes + cast.sent_bytes for cast in own)
    machine.hold("received", timetable.micro_batches * exchanged, ACTIVATIONS)
    for action, number, is_last in _numbered(timetable, rank):
        cast = casts[action.stage]
        machine.phase, machine.module = action.kind, f"stage {action.stage}"
        if action.kind == FORWARD:
            _play_forward(machine, plan, cast, number)
            machine.release("logits")
        else:
            _play_backward(machine, plan, cast, number, last=is_last, on_cpu=on_cpu)
            _after_backward(machine, timetable, cast)
            if on_cpu:
                _hold_first_sent(machine, timetable, cast, timetable.warm_up(rank), number)
    machine.release("sent")
    machine.release("logits")
    machine.phase, machine.module = "optimizer", "optimizer"
    update = pace.update_of(config, plan.updated)
    machine.hold("optimizer temporaries", update.temporaries, "temporaries")
    machine.release("optimizer temporaries")
    plan.after_optimizer(machine)
    return machine


def _after_backward(machine: Machine, timetable: Timetable, cast: Cast) -> None:
    """What the schedules of torch 2.13 still hold: GPipe and interleaved ones all that they made and sent, until the
    step is over; 1F1B what it sent last, and the last stage's logits until the next micro-batch's are there."""
    if timetable.schedule == ONE_F_ONE_B:
        machine.hold("sent", cast.received_bytes, ACTIVATIONS)
        machine.hold("logits", cast.logits_bytes, ACTIVATIONS)
    else:
        machine.grow("sent", cast.received_bytes + cast.made_bytes, ACTIVATIONS)


def _hold_first_sent(machine: Machine, timetable: Timetable, cast: Cast, ahead: int, number: int) -> None:
    """After backward `number`: what 1F1B sent before its steady state, but for the last that it computed there, is held
    by gloo's work, and that by `Schedule1F1B` (``send_work``) until the steady state is over."""
    if timetable.schedule == ONE_F_ONE_B:
        steady = timetable.micro_batches - ahead
        machine.hold("first sent", cast.made_bytes if ahead - 2 <= number < steady else 0.0, ACTIVATIONS)


def _numbered(timetable: Timetable, rank: int) -> Iterator[tuple[Action, int, bool]]:
    """Actions, how many of the same kind and stage there were before, and whether there are no more."""
    counts: dict[tuple[str, int], int] = {}
    for action in timetable.actions(rank):
        number = counts.get(action[:2], 0)
        counts[action[:2]] = number + 1
        yield action, number, number == timetable.micro_batches - 1


def _play_forward(machine: Machine, plan: RankPlan, cast: Cast, number: int) -> None:
    if number > 0 or not plan.gathers:
        machine.play(cast.forward, FORWARD)
        return
    inside: Unit | None = None
    plan.before_unit(machine, cast.units, cast.units.units[0])
    for scene, unit, _ in cast.scenes:
        if scene.phase != FORWARD:
            continue
        if unit is not inside and not unit.is_root:
            plan.before_unit(machine, cast.units, unit)
        inside = unit
        for piece in scene.pieces:
            machine.play(piece, FORWARD)
    plan.after_first_forward(machine, cast.units)


def _play_backward(machine: Machine, plan: RankPlan, cast: Cast, number: int, *, last: bool, on_cpu: bool) -> None:
    own = gradients_of_stage(cast.units)
    if not plan.tells(last=last):
        piece, stays = cast.backward(plan, first=number == 0)
        machine.play(piece, "backward")
        if stays:
            machine.grow(own, stays, GRADIENTS)
    else:
        inside: Unit | None = None
        for scene, unit, parameters in cast.scenes:
            if scene.phase == FORWARD:
                continue
            if inside is not None and unit is not inside:
                _leave(machine, plan, cast, inside, adds=number > 0 and on_cpu)
            inside = unit
            for piece in scene.pieces:
                machine.play(piece, "backward")
                if piece.gradient is not None:
                    plan.gradient(machine, cast.units, unit, parameters[piece.gradient], first=number == 0)
        if inside is not None:
            _leave(machine, plan, cast, inside, adds=number > 0 and on_cpu)
    if last:
        plan.after_last_backward(machine, cast.units)


def _leave(machine: Machine, plan: RankPlan, cast: Cast, unit: Unit, *, adds: bool) -> None:
    if adds:
        machine.hold("converted", plan.added_bytes(unit), GRADIENTS)
        machine.release("converted")
    plan.after_unit(machine, cast.units, unit)
