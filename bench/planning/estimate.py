"""How long a run will take, to ask a cluster for time: steps as predicted, or roughly where no speed is known."""

from __future__ import annotations

import math

from bench.config import RunConfig
from bench.planning.forecast import forecasts
from bench.simulate.prediction import Prediction

GPU_TFLOPS = 20.0
"""Reached by a GPU nobody described; described ones are taken to reach `SHARE_OF_PEAK`."""
SHARE_OF_PEAK = 0.25
CPU_TFLOPS_PER_THREAD = 0.005
START_S = {"slurm": 60.0, "local": 2.5}
"""Per launcher. On a cluster Python, the libraries and a process group on a shared file system; on this machine a fork,
since they are imported once."""
GPU_START_S = 5.0
"""Of a process that starts to use a GPU, besides: assumed."""
COMPILE_S = 90.0
"""Assumed."""
GPU_BYTES_MADE_PER_S, CPU_BYTES_MADE_PER_S = 1e11, 0.4e9
"""Of parameters made at start, per rank: random numbers of a normal distribution. Of GPUs assumed."""
GPU_BYTES_MOVED_PER_S, CPU_BYTES_MOVED_PER_S = 10e9, 0.2e9
"""Of parameters gathered and gradients reduced in every step, per rank."""
RUNS_OF_A_SEARCH = 12
OBSERVED_STEPS = 3
"""Steps beyond warm-up that the harness takes for itself: memory, profile."""
SAFETY = 3.0
ROUNDED_TO_MIN = 5


def expected_s(config: RunConfig, *, search: bool = False, launcher: str = "slurm") -> float:
    """Seconds a run is expected to take, whether it fits or not.

    Parameters
    ----------
    search: bool
        The run is the first of a search for the largest batch.
    """
    timing = config.measurement
    on_gpu = config.hardware.device != "cpu"
    made_per_s = GPU_BYTES_MADE_PER_S if on_gpu else CPU_BYTES_MADE_PER_S
    once = START_S[launcher] + weight_bytes(config) / made_per_s
    once += (COMPILE_S if config.compile else 0.0) + (GPU_START_S if on_gpu else 0.0)
    step_s = predicted_step_s(config) or rough_step_s(config)
    warming_s = timing.warmup_steps * step_s + (timing.min_warmup_s or 0.0)
    timed_s = max(timing.steps * step_s, timing.min_timed_s or 0.0)
    return (once + warming_s + timed_s + OBSERVED_STEPS * step_s) * (RUNS_OF_A_SEARCH if search else 1)


def predicted_step_s(config: RunConfig) -> float | None:
    """Seconds per step as predicted, of a rehearsal without communication; None where no speed is known."""
    if config.hardware.speeds is None:
        return None
    (forecast,) = forecasts([config])
    if not isinstance(forecast, Prediction) or forecast.time is None:
        return None
    return forecast.time.step_s.value - (forecast.time.exposed_communication_s if config.rehearsed else 0.0)


def rough_step_s(config: RunConfig) -> float:
    """Seconds per step, from the run's FLOPs, its parameters and a speed any device reaches."""
    peak = config.hardware.peak_tflops.get(config.precision.peak)
    if config.hardware.device == "cpu":
        tflops, bytes_per_s = CPU_TFLOPS_PER_THREAD * config.hardware.cpu_threads, CPU_BYTES_MOVED_PER_S
    else:
        tflops, bytes_per_s = (peak * SHARE_OF_PEAK if peak else GPU_TFLOPS), GPU_BYTES_MOVED_PER_S
    count = config.trained.flops_per_sequence(config.sequence_length).hardware(config.activation_checkpointing)
    flops = count * config.batch_size_per_gpu * config.gradient_accumulation
    moved = 3 * weight_bytes(config) if config.devices > 1 else 0
    return flops / (tflops * 1e12) + moved / bytes_per_s


def weight_bytes(config: RunConfig) -> int:
    """Bytes of the weights that multiply tokens, from the FLOPs of a single one: nothing has to be built for it."""
    count = config.model.flops_per_sequence(1)
    return 4 * (count.blocks_linear + count.outside) // 2


def time_limit_min(seconds: float) -> int:
    """Minutes to ask for a run expected to take some seconds: several times as many, rounded up."""
    return ROUNDED_TO_MIN * math.ceil((SAFETY * seconds + 300) / 60 / ROUNDED_TO_MIN)
