"""Intervals of predictions from residuals of published rows: how far from a prediction the truth lies 19 times of 20.

``results/predicted/intervals.json`` holds the factors. ``python -m bench.predict validate --fit-intervals`` writes it:
`bench.validation.interval_fit` says how they are chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.config.run_config import RunConfig
from bench.core.installation import DATA_FOLDER
from bench.core.option_files import find_option_file
from bench.hardware import Hardware
from bench.hardware.hardware_file import GROUP, read_hardware_file
from bench.prediction.cost.rank_speed import CALIBRATED_OPTIMIZERS
from bench.prediction.prediction import FITS, MemoryPrediction, PredictedRange, Prediction, TimePrediction
from bench.prediction.simulation.device_memory import predict_fit

INTERVALS_FILE = DATA_FOLDER / "results" / "predicted" / "intervals.json"

STEP_TIME, ALLOCATED, RESERVED, DEVICE_USED = "step time", "allocated", "reserved", "device used"
INTERVAL_METRICS = (STEP_TIME, ALLOCATED, RESERVED, DEVICE_USED)
"""What has an interval. Active memory has that of allocated memory."""

TRAINING_ROWS, MICROBENCHMARKS, DERIVED = "training rows", "microbenchmarks", "derived"
DEVICE_CLASSES = (TRAINING_ROWS, MICROBENCHMARKS, DERIVED)
"""How a device's speed is known: published training rows of this device were compared; only its kernels were measured;
or it is assumed or derived from another device."""

COMPLETE, ROUGH, UNKNOWN = "complete", "rough", "unknown source"
"""Whether everything that decides a row was stated, and was measured by somebody (`is_time_known`); a user's own
question is as if all were stated. Of rows of an unknown source nobody has looked up the software and the network."""

LAYOUTS, UNKNOWN_LAYOUTS = "layouts", "layouts of unknown sources"
"""Tensor, pipeline, context and expert parallelism have classes of their own, whatever was stated."""

MAX_LAUNCH_SHARE = 0.1
"""Of a step, waiting for the processor: with more, how fast that one is decides."""

ROUGH_FAMILIES = ("dhen",)
"""Models whose kernels nobody timed."""


def is_time_known(config: RunConfig, time: TimePrediction) -> bool:
    """Whether what decides a step's time was measured, by microbenchmarks or on training runs.

    Not known are the processor and the memory of the machine around a GPU, which differ by machine, kernels of TF32
    whose rows are not aligned and of TransformerEngine, optimizers that no calibration times, and `ROUGH_FAMILIES`. The
    interval of such a time is that of rough rows.
    """
    waited_s = 0.0 if is_layout(config) else time.bubble_s - time.retry_s
    return not (
        config.uses_host_memory
        or config.precision.tf32
        or config.precision.uses_transformer_engine
        or config.model.family in ROUGH_FAMILIES
        or config.optimizer.name not in CALIBRATED_OPTIMIZERS
        or waited_s > MAX_LAUNCH_SHARE * time.step_s.value
    )


@dataclass(frozen=True)
class IntervalFactors:
    """The truth lies between `low` and `high` times the prediction."""

    low: float
    high: float

    def widen(self, predicted: PredictedRange) -> PredictedRange:
        """The interval of a predicted value, at least as wide as it is by itself."""
        value = predicted.value
        return PredictedRange(value, min(predicted.low, value * self.low), max(predicted.high, value * self.high))


@functools.cache
def load_interval_file(path: Path = INTERVALS_FILE) -> Mapping[str, Any]:
    """The file as it was fitted."""
    return json.loads(path.read_text(encoding="utf-8"))


def classify_hardware(hardware: Hardware) -> str:
    """Which of `DEVICE_CLASSES` a device belongs to; with other peaks or bandwidth than its file says it is another."""
    efficiency_source = hardware.sources.get("speeds.matmul.efficiency", "assumed")
    if efficiency_source.startswith(("assumed", "derived")) or not _is_as_in_its_file(hardware):
        return DERIVED
    return TRAINING_ROWS if hardware.name in load_interval_file()["devices with training rows"] else MICROBENCHMARKS


def _is_as_in_its_file(hardware: Hardware) -> bool:
    """Whether peaks and bandwidth are those of the description of this name, if there is one."""
    described = _read_peaks_and_bandwidth(hardware.name)
    return described is None or described == (hardware.peak_tflops, hardware.memory_bandwidth_gb_s)


@functools.cache
def _read_peaks_and_bandwidth(name: str) -> tuple[dict[str, float], float | None] | None:
    file = find_option_file(GROUP, name)
    if not file.is_file():
        return None
    described = read_hardware_file(file)
    return described.peak_tflops, described.memory_bandwidth_gb_s


def is_layout(config: RunConfig) -> bool:
    """Whether a run's layers, sequences, experts or micro-batches are divided, beside or instead of its parameters."""
    return config.strategy.timetable is not None or config.strategy.build_tensor_parallel_split() is not None


def find_factors(
    metric: str, device_class: str, *, row_class: str = COMPLETE, is_layout: bool = False
) -> IntervalFactors:
    """The factors of one metric for a class of devices and of rows; where too few layouts are known those of others."""
    classes = load_interval_file()["factors"][metric][device_class]
    layout_class = UNKNOWN_LAYOUTS if row_class == UNKNOWN else LAYOUTS
    entry = classes[layout_class] if is_layout and layout_class in classes else classes[row_class]
    return IntervalFactors(entry["low"], entry["high"])


def add_intervals(config: RunConfig, prediction: Prediction) -> Prediction:
    """The same prediction with intervals that hold 19 times of 20, and the verdict that follows from them.

    A calibrated CPU keeps its own, which are those of measured runs.
    """
    if config.hardware.device == "cpu":
        return prediction
    device_class = classify_hardware(config.hardware)
    time = prediction.time
    if time is not None:
        row_class = COMPLETE if is_time_known(config, time) else ROUGH
        factors = find_factors(STEP_TIME, device_class, row_class=row_class, is_layout=is_layout(config))
        time = dataclasses.replace(time, step_s=factors.widen(time.step_s))
    memory = _add_memory_intervals(prediction.memory, device_class, row_class=COMPLETE, is_layout=is_layout(config))
    return dataclasses.replace(prediction, memory=memory, time=time)


def find_rough_verdict(config: RunConfig, memory: MemoryPrediction) -> str | None:
    """Whether a run fits of which something had to be assumed; also of an unknown source, by whose own interval hardly
    any run would surely fit."""
    if config.hardware.device == "cpu":
        return memory.verdict
    device_class = classify_hardware(config.hardware)
    return _add_memory_intervals(memory, device_class, row_class=ROUGH, is_layout=is_layout(config)).verdict


def _add_memory_intervals(
    memory: MemoryPrediction, device_class: str, *, row_class: str, is_layout: bool
) -> MemoryPrediction:
    allocated, reserved, device_used = (
        find_factors(metric, device_class, row_class=row_class, is_layout=is_layout)
        for metric in (ALLOCATED, RESERVED, DEVICE_USED)
    )
    finds_place = memory.verdict == FITS  # without an interval that is all that keeps what is allocated from fitting
    allocated_range, reserved_range = allocated.widen(memory.allocated), reserved.widen(memory.reserved)
    memory = dataclasses.replace(
        memory,
        allocated=allocated_range,
        active=allocated.widen(memory.active),
        reserved=dataclasses.replace(reserved_range, low=max(reserved_range.low, allocated_range.low)),
        device_used=device_used.widen(memory.device_used),
    )
    if memory.capacity is None or memory.is_host_memory_short:
        return memory
    verdict = predict_fit(memory.allocated, memory.capacity, memory.beside, finds_place=finds_place)
    return dataclasses.replace(memory, verdict=verdict)
