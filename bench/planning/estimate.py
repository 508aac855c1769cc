"""How long a run will take, roughly: enough to ask a cluster for time. Not a prediction."""

from __future__ import annotations

import math

from bench.config import RunConfig

GPU_TFLOPS = 20.0
"""Reached by a GPU nobody described; described ones are taken to reach `SHARE_OF_PEAK`."""
SHARE_OF_PEAK = 0.25
CPU_TFLOPS_PER_THREAD = 0.005
START_S = 60.0
"""Python, the libraries and a process group on a shared file system."""
COMPILE_S = 240.0
BYTES_MADE_PER_S = 2e9
"""Of parameters made at start, per rank."""
GPU_BYTES_MOVED_PER_S, CPU_BYTES_MOVED_PER_S = 10e9, 0.2e9
"""Of parameters gathered and gradients reduced in every step, per rank."""
RUNS_OF_A_SEARCH = 12
OBSERVED_STEPS = 3
"""Steps beyond warm-up that the harness takes for itself: memory, profile."""
SAFETY = 3.0
ROUNDED_TO_MIN = 5


def expected_s(config: RunConfig, *, search: bool = False) -> float:
    """Seconds a run is expected to take, from its FLOPs, its parameters and a speed any device reaches.

    Parameters
    ----------
    search: bool
        The run is the first of a search for the largest batch.
    """
    peak = config.hardware.peak_tflops.get(config.precision.peak)
    if config.hardware.device == "cpu":
        tflops, bytes_per_s = CPU_TFLOPS_PER_THREAD * config.hardware.cpu_threads, CPU_BYTES_MOVED_PER_S
    else:
        tflops, bytes_per_s = (peak * SHARE_OF_PEAK if peak else GPU_TFLOPS), GPU_BYTES_MOVED_PER_S
    count = config.model.flops_per_sequence(config.sequence_length).hardware(config.activation_checkpointing)
    flops = count * config.batch_size_per_gpu * config.gradient_accumulation
    parameter_bytes = 4 * config.model.num_parameters
    moved = 3 * parameter_bytes if config.gpus > 1 else 0
    step_s = flops / (tflops * 1e12) + moved / bytes_per_s
    steps = config.measurement.warmup_steps + config.measurement.steps + OBSERVED_STEPS
    once = START_S + (COMPILE_S if config.compile else 0.0) + parameter_bytes / BYTES_MADE_PER_S
    return (once + steps * step_s) * (RUNS_OF_A_SEARCH if search else 1)


def time_limit_min(seconds: float) -> int:
    """Minutes to ask for a run expected to take some seconds: several times as many, rounded up."""
    return ROUNDED_TO_MIN * math.ceil((SAFETY * seconds + 300) / 60 / ROUNDED_TO_MIN)
