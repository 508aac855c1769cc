"""Predict runs: trace the model, follow the strategy's plan, add up time and memory."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence

from bench import processes
from bench.config import RunConfig
from bench.models.materialize import buffers_bytes
from bench.simulate import cache, host, memory, one_process, pace, pipeline, pipeline_parts
from bench.simulate.layout import Layout, layout_of
from bench.simulate.machine import Machine
from bench.simulate.network import Group
from bench.simulate.prediction import Prediction, from_plain, to_plain
from bench.simulate.reel import Reel, Scene, batches_for, kernels_at, pieces
from bench.simulate.stage_tape import StageKey
from bench.simulate.step import play_step
from bench.simulate.tape import TapeKey
from bench.simulate.traces import Speed, prepare_traces, reel_of, remember_traces, traces_in_memory
from bench.simulate.version import remembered_as
from bench.strategies.plan import PARAMETERS, TENSOR, Plan, Setting

WORTH_SHARING = 40
"""Runs from which on it pays to share the work among processes."""

CHUNK = 32
"""Runs a process takes at a time."""


def predict(config: RunConfig, *, timeline: bool = False) -> Prediction:
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
        return _predicted(config, timeline=True)
    return predict_all([config])[0]


def predict_all(configs: Sequence[RunConfig]) -> list[Prediction]:
    """Predict many runs: traces are shared, the work is shared among the processors, results are remembered.

    Raises
    ------
    ImpossibleError
        If a strategy states no plan.
    """
    keys = [remembered_as(identity(config), config.model, config.strategy) for config in configs]
    known = {key: from_plain(value) for key, value in cache.read("prediction", dict.fromkeys(keys)).items()}
    missing = {key: config for key, config in zip(keys, configs, strict=True) if key not in known}
    if missing:
        made = dict(zip(missing, _predict_new(list(missing.values())), strict=True))
        cache.write("prediction", {key: to_plain(prediction) for key, prediction in made.items()})
        known |= made
    return [known[key] for key in keys]


def identity(config: RunConfig) -> str:
    """What tells one prediction from another, whatever mode the run is in."""
    return config.run_id if config.mode == "predict" else dataclasses.replace(config, mode="predict").run_id


def _predict_new(configs: list[RunConfig]) -> list[Prediction]:
    prepare_traces(list({trace: None for config in configs for trace in _traces_for(config)}))
    workers = os.cpu_count() or 1
    if workers == 1 or len(configs) < WORTH_SHARING:
        return [_predicted(config) for config in configs]
    order = sorted(range(len(configs)), key=lambda index: repr((tape_key(configs[index]), configs[index].hardware)))
    with processes.worker_pool(workers, remember_traces, (traces_in_memory(),)) as pool:
        made = pool.map(_predicted, [configs[index] for index in order], chunksize=CHUNK)
        return [prediction for _, prediction in sorted(zip(order, made, strict=True), key=lambda pair: pair[0])]


def _traces_for(config: RunConfig) -> list[tuple[TapeKey | StageKey, int]]:
    """Tapes and batch sizes that a run's prediction is made from."""
    if config.strategy.timetable is not None:
        return pipeline_parts.traces_for(config, tape_key(config))
    sizes = {config.sequences_per_device, config.sequences_per_rank}
    return [(tape_key(config), size) for batch in sizes for size in set(batches_for(batch))]


def _predicted(config: RunConfig, *, timeline: bool = False) -> Prediction:
    """Predict a run by playing its step; once more if memory is so short that the allocator has to retry."""
    if config.strategy.timetable is not None:
        return pipeline.predicted(config, tape_key(config), timeline=timeline)
    machine, plan = _played(config, pace.pace_of(config), timeline)
    found = memory.memory_of(config, machine, plan.host_bytes)
    if config.devices_per_process > 1:
        found = dataclasses.replace(found, others_bytes=round(_played_beside(config).peak.size))
    if not host.is_known(config):
        return Prediction(found, None)
    if memory.is_degraded(found):
        machine, _ = _played(config, pace.retrying(pace.pace_of(config)), timeline)
    return Prediction(found, pace.time_of(config, machine, found))


def _played(config: RunConfig, speed: pace.Pace, timeline: bool) -> tuple[Machine, Plan]:
    """The machine after a step, and the plan that was followed."""
    key = tape_key(config)
    reel = reel_of(key, batches_for(config.sequences_per_device))
    plan = config.strategy.plan(_setting(config, reel))
    machine = Machine(host.with_transfers(config, speed), timeline=timeline)
    machine.hold("micro-batches", memory.inputs_bytes(config, reel), "activations")
    machine.hold("model's buffers", buffers_bytes(config.trained), PARAMETERS)
    group = _tensor_group(config)
    scenes = _scenes(key, config.sequences_per_device, Speed(config.hardware), group)
    if config.devices_per_process > 1:
        of_all = _scenes(key, config.sequences_per_rank, Speed(config.hardware), group)
        scenes = one_process.of_first(scenes, of_all, config.devices_per_process)
    _play(config, machine, plan, scenes)
    return machine, plan


def _played_beside(config: RunConfig) -> Machine:
    """A device after the first of a process that drives several, its time left out."""
    key = tape_key(config)
    reel = reel_of(key, batches_for(config.sequences_per_device))
    plan = config.strategy.plan_beside_first(_setting(config, reel))
    assert plan is not None
    machine = Machine(pace.Pace())
    scenes = _scenes(key, config.sequences_per_device, Speed(config.hardware), _tensor_group(config))
    _play(config, machine, plan, one_process.of_other(scenes))
    return machine


def _setting(config: RunConfig, reel: Reel) -> Setting:
    """What the strategy's plan is told of a run."""
    weight = reel.weight(config.sequences_per_device)
    return Setting(
        units=_layout(config).units,
        order=_layout(config).order,
        precision=config.precision,
        casts=not config.strategy.uses_autocast(config.precision),
        world_size=config.gpus,
        states_per_parameter=config.optimizer.states_per_parameter,
        micro_batches=config.gradient_accumulation,
        keep_gradients=config.optimizer.keep_gradients,
        outputs_bytes=reel.outputs[0] + weight * reel.outputs[1],
        logits_bytes=reel.logits[0] + weight * reel.logits[1],
        on_cpu=config.hardware.device == "cpu",
    )


def _layout(config: RunConfig) -> Layout:
    blocks_per_unit = getattr(config.strategy, "blocks_per_unit", None) or 1
    return layout_of(
        config.trained,
        blocks_per_unit,
        config.precision.scales_loss,
        config.strategy.split(),
        fp32_apart=tape_key(config).fp32_apart,
    )


def _play(config: RunConfig, machine: Machine, plan: Plan, scenes: Sequence[Scene]) -> None:
    plan.begin(machine)
    machine.note_initial()
    play_step(
        machine,
        plan,
        _layout(config),
        scenes,
        micro_batches=config.gradient_accumulation,
        synchronize_every_micro_batch=config.gradient_accumulation_sync,
        update=host.update_of(config, plan),
    )


def tape_key(config: RunConfig) -> TapeKey:
    """What of a run its tape depends on."""
    return TapeKey(
        family=config.trained,
        sequence_length=config.sequence_length,
        precision=dataclasses.replace(config.precision, mixing=None),
        autocast=config.strategy.uses_autocast(config.precision),
        activation_checkpointing=config.activation_checkpointing,
        micro_batches=min(config.gradient_accumulation, 2),
        device=config.hardware.device,
        compile=config.compile,
        widens_outputs=config.strategy.widens_outputs(config.precision),
        split=config.strategy.split(),
        autocast_caches=config.strategy.autocast_caches,
        fp32_apart=config.precision.scales_loss
        and not config.strategy.uses_autocast(config.precision)
        and config.strategy.shards_fp32_apart,
    )


def _tensor_group(config: RunConfig) -> Group | None:
    """Where the ranks are that share layers; None where layers are whole."""
    return None if config.strategy.split() is None else pace.group_of(config, TENSOR)


@functools.lru_cache(maxsize=256)
def _scenes(key: TapeKey, batch_size: int, speed: Speed, tensor: Group | None) -> tuple[Scene, ...]:
    """The reel's scenes at a batch size, with the time of everything on some hardware.

    Parameters
    ----------
    tensor: Group or None
        Where the ranks are that share layers; None where layers are whole.
    """
    reel = reel_of(key, batches_for(batch_size))
    weight = reel.weight(batch_size)
    kernels = [kernels_at(strip, weight) for strip in reel.strips]
    seconds = pace.kernel_times(speed.hardware, key.precision, kernels)
    lengths = layout_of(key.family, 1, key.precision.scales_loss, key.split).lengths
    exchange = pace.exchange_of(speed.hardware, key.precision, tensor)
    return tuple(
        Scene(strip.phase, strip.micro_batch, strip.place, pieces(strip, weight, each, lengths, exchange))
        for strip, each in zip(reel.strips, seconds, strict=True)
    )
