"""Predict a run: trace the model, follow the strategy's plan, add up time and memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bench.config import RunConfig
from bench.hardware import Hardware
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
    scenes = _scenes(key, config.batch_size_per_gpu, Speed(config.hardware))
    layout = layout_of(config.model, getattr(config.strategy, "blocks_per_unit", 1), config.precision.scales_loss)
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
    play_step(
        machine,
        plan,
        layout,
        scenes,
        micro_batches=config.gradient_accumulation,
        synchronize_every_micro_batch=config.gradient_accumulation_sync,
        update=pace.update_of(config, plan.updated),
    )
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


class Speed:
    """Hardware as far as kernels' times depend on it: compared by its numbers, since it cannot be hashed itself."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._numbers = repr((hardware.peak_tflops, hardware.memory_bandwidth_gb_s, hardware.speeds))

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Speed) and self._numbers == other._numbers


@functools.lru_cache(maxsize=64)
def _scenes(key: TapeKey, batch_size: int, speed: Speed) -> tuple[Scene, ...]:
    """The reel's scenes at a batch size, with the time of everything on some hardware."""
    reel = _reel(key, batches_for(batch_size))
    weight = reel.weight(batch_size)
    kernels = [kernels_at(strip, weight) for strip in reel.strips]
    seconds = pace.kernel_times(speed.hardware, key.precision, kernels)
    return tuple(
        Scene(strip.phase, strip.micro_batch, strip.place, pieces(strip, weight, each))
        for strip, each in zip(reel.strips, seconds, strict=True)
    )
