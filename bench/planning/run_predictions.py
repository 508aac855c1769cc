"""What the predictor says of planned runs: all at once, each once, and one sentence where it cannot tell."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.prediction.prediction import PredictedRange, Prediction
from bench.prediction.predictor import predict_runs


@dataclass(frozen=True)
class Unpredictable:
    """There is no prediction of a run."""

    reason: str
    """One sentence."""
    is_impossible: bool
    """The question is impossible; else the predictor failed."""


RunPrediction = Prediction | Unpredictable

_predictions: dict[tuple[str, bool], RunPrediction] = {}
"""By run_id, and whether the allocator was replayed."""


def predict_configs(configs: Sequence[RunConfig], *, replay_allocator: bool = True) -> list[RunPrediction]:
    """Predict runs, whatever their mode; `predict_runs` says what replaying the allocator is."""
    configs_by_key = {(config.run_id, replay_allocator): config for config in configs}
    new_configs = {key: config for key, config in configs_by_key.items() if key not in _predictions}
    _predictions.update(zip(new_configs, _predict_new_runs(list(new_configs.values()), replay_allocator), strict=True))
    return [_predictions[config.run_id, replay_allocator] for config in configs]


def add_predictions(configs: Sequence[RunConfig], predictions: Sequence[RunPrediction]) -> None:
    """Have what another process predicted of runs, the allocator replayed, for what this one predicted."""
    _predictions.update(
        ((config.run_id, True), prediction) for config, prediction in zip(configs, predictions, strict=True)
    )


def _predict_new_runs(configs: list[RunConfig], replay_allocator: bool) -> list[RunPrediction]:
    """All at once; where that fails one by one, so that one run costs the others nothing."""
    try:
        predictions = predict_runs(configs, replay_allocator=replay_allocator) if configs else []
        return [_reject_non_finite(prediction) for prediction in predictions]
    except Exception as error:
        if len(configs) > 1:
            return [prediction for config in configs for prediction in _predict_new_runs([config], replay_allocator)]
        if isinstance(error, UsageError):
            return [Unpredictable(str(error), is_impossible=True)]
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        description = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":").rstrip(".")
        return [
            Unpredictable(
                f"the predictor failed: {description} ({last_frame.name}, line {last_frame.lineno}).",
                is_impossible=False,
            )
        ]


def _reject_non_finite(prediction: Prediction) -> RunPrediction:
    """The prediction, unless there is a number in it that is none."""
    memory, time = prediction.memory, prediction.time
    values = [*vars(memory).values(), *(vars(time).values() if time else ())]
    range_values = [number for value in values if isinstance(value, PredictedRange) for number in vars(value).values()]
    if all(
        math.isfinite(number) for number in (*range_values, *(value for value in values if isinstance(value, float)))
    ):
        return prediction
    return Unpredictable("the predictor failed: it came to no number.", is_impossible=False)


# --- How long a run will take, to ask a cluster for time: steps as predicted, or roughly where no speed is known.

DEFAULT_GPU_TFLOPS = 20.0
"""Reached by a GPU nobody described; described ones are taken to reach `ASSUMED_PEAK_SHARE`."""
ASSUMED_PEAK_SHARE = 0.25
CPU_TFLOPS_PER_THREAD = 0.005
LAUNCHER_STARTUP_S = {"slurm": 60.0, "local": 2.5}
"""Per launcher. On a cluster Python, the libraries and a process group on a shared file system; on this machine a fork,
since they are imported once."""
GPU_STARTUP_S = 5.0
"""Of a process that starts to use a GPU, besides: assumed."""
COMPILATION_S = 90.0
"""Assumed."""
GPU_INIT_BYTES_PER_S, CPU_INIT_BYTES_PER_S = 1e11, 0.4e9
"""Of parameters made at start, per rank: random numbers of a normal distribution. Of GPUs assumed."""
GPU_COMMUNICATION_BYTES_PER_S, CPU_COMMUNICATION_BYTES_PER_S = 10e9, 0.2e9
"""Of parameters gathered and gradients reduced in every step, per rank."""
RUNS_PER_BATCH_SEARCH = 12
OBSERVATION_STEPS = 3
"""Steps beyond warm-up that the harness takes for itself: memory, profile."""
TIME_LIMIT_SAFETY_FACTOR = 3.0
TIME_LIMIT_GRANULARITY_MIN = 5


def predict_duration_s(config: RunConfig, *, search: bool = False, launcher: str = "slurm") -> float:
    """Seconds a run is expected to take, whether it fits or not.

    Parameters
    ----------
    search: bool
        The run is the first of a search for the largest batch.
    """
    measurement = config.measurement
    on_gpu = config.hardware.device != "cpu"
    init_bytes_per_s = GPU_INIT_BYTES_PER_S if on_gpu else CPU_INIT_BYTES_PER_S
    startup_s = LAUNCHER_STARTUP_S[launcher] + count_weight_bytes(config) / init_bytes_per_s
    startup_s += (COMPILATION_S if config.compiling_setting else 0.0) + (GPU_STARTUP_S if on_gpu else 0.0)
    step_s = predict_step_s(config) or compute_rough_step_s(config)
    warmup_s = measurement.warmup_steps * step_s + (measurement.min_warmup_s or 0.0)
    timed_s = max(measurement.steps * step_s, measurement.min_timed_s or 0.0)
    return (startup_s + warmup_s + timed_s + OBSERVATION_STEPS * step_s) * (RUNS_PER_BATCH_SEARCH if search else 1)


def predict_step_s(config: RunConfig) -> float | None:
    """Seconds per step as predicted, of a rehearsal without communication; None where no speed is known."""
    if config.hardware.speeds is None:
        return None
    (prediction,) = predict_configs([config])
    if not isinstance(prediction, Prediction) or prediction.time is None:
        return None
    return prediction.time.step_s.value - (prediction.time.exposed_communication_s if config.is_rehearsed else 0.0)


def compute_rough_step_s(config: RunConfig) -> float:
    """Seconds per step, from the run's FLOPs, its parameters and a speed any device reaches."""
    peak_tflops = config.hardware.peak_tflops.get(config.precision.peak)
    if config.hardware.device == "cpu":
        tflops, bytes_per_s = CPU_TFLOPS_PER_THREAD * config.hardware.cpu_threads, CPU_COMMUNICATION_BYTES_PER_S
    else:
        tflops, bytes_per_s = (
            (peak_tflops * ASSUMED_PEAK_SHARE if peak_tflops else DEFAULT_GPU_TFLOPS),
            GPU_COMMUNICATION_BYTES_PER_S,
        )
    flops = config.hardware_flops_per_sequence * config.sequences_per_gpu
    communicated_bytes = 3 * count_weight_bytes(config) if config.active_devices > 1 else 0
    return flops / (tflops * 1e12) + communicated_bytes / bytes_per_s


def count_weight_bytes(config: RunConfig) -> int:
    """Bytes of the weights that multiply tokens, from the FLOPs of a single one: nothing has to be built for it."""
    flop_count = config.model.count_flops_per_sequence(1)
    return 4 * (flop_count.blocks_linear + flop_count.outside_blocks) // 2


def compute_time_limit_min(seconds: float) -> int:
    """Minutes to ask for a run expected to take some seconds: several times as many, rounded up."""
    return TIME_LIMIT_GRANULARITY_MIN * math.ceil(
        (TIME_LIMIT_SAFETY_FACTOR * seconds + 300) / 60 / TIME_LIMIT_GRANULARITY_MIN
    )
