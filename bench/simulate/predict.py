"""Predict a run: trace the model, follow the strategy's plan, add up time and memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bench.config import RunConfig
from bench.simulate import memory, pace
from bench.simulate.layout import layout_of
from bench.simulate.machine import Machine
from bench.simulate.prediction import Prediction
from bench.simulate.reel import Reel, Scene, batches_for, kernels_at, make_reel, pieces
from bench.simulate.step import play_step
from bench.simulate.tape import TapeKey
from bench.strategies.plan import Setting


def predict(config: RunConfig, *, timeline: bool = False) -> Prediction:
    """Predict one run.

    Parameters
    ----------
    timeline: bool
        Keep every span of the simulated step.
    """
    key = tape_key(config)
    reel = _reel(key, batches_for(config.batch_size_per_gpu))
    scenes = _scenes(config, key, reel)
    layout = layout_of(
        config.model, getattr(config.strategy, "blocks_per_unit", 1), config.precision.scales_loss
    )
    setting = Setting(
        units=layout.units,
        precision=config.precision,
        world_size=config.gpus,
        states_per_parameter=config.optimizer.states_per_parameter,
        micro_batches=config.gradient_accumulation,
    )
    plan = config.strategy.plan(setting)
    machine = Machine(pace.pace_of(config), timeline=timeline)
    machine.hold("micro-batches", memory.inputs_bytes(config, reel), "activations")
    plan.begin(machine)
    update = pace.update_of(config, plan.updated)
    for step in range(2):  # the first shows what a step leaves behind
        machine.start_over()
        play_step(
            machine,
            plan,
            layout,
            scenes,
            micro_batches=config.gradient_accumulation,
            synchronize_every_micro_batch=config.gradient_accumulation_sync,
            update=update,
        )
        del step
    predicted = memory.memory_of(config, machine)
    return Prediction(predicted, pace.time_of(config, machine, predicted))


def predict_all(configs: Sequence[RunConfig]) -> list[Prediction]:
    """Predict many runs: traces are shared, results are cached between processes."""
    return [predict(config) for config in configs]


def tape_key(config: RunConfig) -> TapeKey:
    """What of a run its tape depends on."""
    return TapeKey(
        family=config.model,
        sequence_length=config.sequence_length,
        precision=config.precision,
        autocast=config.strategy.uses_autocast,
        activation_checkpointing=config.activation_checkpointing,
        micro_batches=min(config.gradient_accumulation, 2),
        device=config.hardware.device,
    )


@functools.lru_cache(maxsize=64)
def _reel(key: TapeKey, batches: tuple[int, int]) -> Reel:
    return make_reel(key, batches)


def _scenes(config: RunConfig, key: TapeKey, reel: Reel) -> tuple[Scene, ...]:
    del key
    weight = reel.weight(config.batch_size_per_gpu)
    scenes = []
    for strip in reel.strips:
        seconds = pace.kernel_times(config, kernels_at(strip, weight))
        scenes.append(Scene(strip.phase, strip.micro_batch, strip.place, pieces(strip, weight, seconds)))
    return tuple(scenes)
