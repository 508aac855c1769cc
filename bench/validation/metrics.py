"""What published rows measure: the names of metrics, units, and what a prediction says of the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.core.errors import UsageError, invalid_value_error
from bench.records.published import PublishedLine
from bench.validation.overrides import NotExpressibleError
from bench.validation.printed_numbers import (
    NoNumberError,
    is_blank,
    parse_bytes,
    parse_percent,
    parse_rate,
    parse_seconds,
)

KINDS = ("speed", "allocated", "active", "reserved", "device used", "between steps", "fit")
"""What errors are summed up by: speed; peaks of memory; memory between steps; whether a run fits."""
SPEED, ALLOCATED, ACTIVE, RESERVED, DEVICE_USED, BETWEEN_STEPS, FIT = KINDS


@dataclass(frozen=True)
class Metric:
    """How a metric's values are read, and what they are of."""

    kind: str
    parse: Callable[[str, str], float]
    """Value and unit as printed to a number: bytes, seconds, rates per second, shares."""
    is_time: bool = False
    """Less is faster."""
    flops: str = "model"
    """What is counted, where the source does not say."""
    is_assumed: bool = False
    """Whether the name leaves open what is measured."""


METRICS: Mapping[str, Metric] = {
    "tokens_per_second_per_gpu": Metric(SPEED, parse_rate),
    "tokens_per_second": Metric(SPEED, parse_rate),
    "samples_per_second": Metric(SPEED, parse_rate),
    "samples_per_second_per_gpu": Metric(SPEED, parse_rate),
    "steps_per_second": Metric(SPEED, parse_rate),
    "step_time": Metric(SPEED, parse_seconds, is_time=True),
    "tflops_per_gpu": Metric(SPEED, parse_rate),
    "hardware_tflops_per_gpu": Metric(SPEED, parse_rate, flops="hardware"),
    "mfu": Metric(SPEED, parse_percent),
    "hfu": Metric(SPEED, parse_percent, flops="hardware"),
    "peak_memory_allocated": Metric(ALLOCATED, parse_bytes),
    "peak_memory_active": Metric(ACTIVE, parse_bytes),
    "peak_memory_reserved": Metric(RESERVED, parse_bytes),
    "peak_memory": Metric(RESERVED, parse_bytes, is_assumed=True),
    "peak_memory_device_used": Metric(DEVICE_USED, parse_bytes),
    "device_used_all_gpus": Metric(DEVICE_USED, parse_bytes),
    "allocated_between_steps": Metric(BETWEEN_STEPS, parse_bytes),
    "outcome": Metric(FIT, lambda text, unit: float(_is_out_of_memory(text))),
    "max_batch_size_per_gpu": Metric(FIT, lambda text, unit: 0.0),
}
"""Metrics that one run comes to."""

METRIC_NAMES = {
    **dict.fromkeys(("iteration_time", "step_time_s", "step_time_median_s", "time_per_step"), "step_time"),
    **dict.fromkeys(
        ("iteration_time_s", "median_latency_per_batch", "seconds_per_step", "time_per_iteration"), "step_time"
    ),
    **dict.fromkeys(
        ("tokens_per_sec_per_gpu", "tokens_per_gpu_per_second", "tps_per_gpu", "tgs", "wps"),
        "tokens_per_second_per_gpu",
    ),
    **dict.fromkeys(
        ("tokens/s/gpu", "tokens_s_gpu", "tps", "tokens_per_second_per_device"), "tokens_per_second_per_gpu"
    ),
    **dict.fromkeys(
        ("tokens_per_sec", "tokens/s", "throughput_tokens", "total_tokens_per_second"), "tokens_per_second"
    ),
    **dict.fromkeys(
        ("samples_per_sec", "sequences_per_second", "throughput_samples", "samples/s"), "samples_per_second"
    ),
    **dict.fromkeys(
        ("tflops", "tflop/s/gpu", "model_tflops_per_gpu", "tflops/gpu", "tflop_s_per_gpu"), "tflops_per_gpu"
    ),
    **dict.fromkeys(("peak_fraction", "hardware_utilization"), "hfu"),
    **dict.fromkeys(
        ("max_memory_allocated", "peak_allocated", "peak_allocated_bytes", "peak_memory_alloc"), "peak_memory_allocated"
    ),
    **dict.fromkeys(("max_memory_reserved", "peak_reserved", "peak_reserved_bytes"), "peak_memory_reserved"),
    **dict.fromkeys(("peak_active", "peak_active_bytes"), "peak_memory_active"),
    **dict.fromkeys(("memory_per_gpu", "memory", "max_memory", "gpu_memory", "peak_gpu_memory"), "peak_memory"),
    **dict.fromkeys(("memory_used", "nvidia_smi_memory", "device_used", "peak_memory_used"), "peak_memory_device_used"),
    **dict.fromkeys(("memory_all_gpus",), "device_used_all_gpus"),
    **dict.fromkeys(("status", "fits", "oom"), "outcome"),
    **dict.fromkeys(("max_batch_size", "largest_batch"), "max_batch_size_per_gpu"),
}
"""Other names of theirs."""

OOM_PATTERN = r"\boom\b|out[ -]?of[ -]?memory|does not fit|doesn't fit|cuda error: out"
RAN_PATTERN = r"\bok\b|\bfits?\b|success|\bran\b|\bruns?\b|\btrains?\b|\byes\b|completed"


@dataclass(frozen=True)
class Quantity:
    """A published value of a metric."""

    metric: str
    """A key of `METRICS`."""
    value: float
    """Bytes, seconds, rates per second or shares; of `outcome` 1 for out of memory."""
    uncertainty: float = 0.0
    """In the same unit."""

    @property
    def kind(self) -> str:
        return METRICS[self.metric].kind

    @property
    def ran(self) -> bool:
        """Whether the row says that its configuration ran."""
        return self.kind != FIT or self.value == 0


def read_quantity(row: int, line: PublishedLine, renamed_metrics: Mapping[str, str]) -> Quantity:
    """What a row measured.

    Raises
    ------
    NotExpressibleError
        If its metric is none that a single run comes to, or it holds a bound, a range or nothing.
    UsageError
        If its value should be a number and is none, naming the row.
    """
    name = (line.get("metric") or "").strip()
    metric = renamed_metrics.get(name, name)
    metric = renamed_metrics.get(
        metric, METRIC_NAMES.get(metric.lower().replace(" ", "_"), metric.lower().replace(" ", "_"))
    )
    value, unit = (line.get("value") or "").strip(), line.get("unit") or ""
    if is_blank(name):
        raise NotExpressibleError("the metric is not stated")
    if metric not in METRICS:
        raise NotExpressibleError(f"metric {name} is nothing that one run comes to")
    if METRICS[metric].kind != FIT and re.search(OOM_PATTERN, value.lower()):
        return Quantity("outcome", 1.0)
    try:
        number = METRICS[metric].parse(value, unit)
        uncertainty = _read_uncertainty(line, metric, number)
    except (NoNumberError, NotExpressibleError) as error:
        raise NotExpressibleError(f"value: {error}") from None
    except ValueError as error:
        raise invalid_value_error("value", value, f"a number in row {row} ({error})") from None
    if METRICS[metric].kind != FIT and number <= 0:
        raise UsageError(f"value={value} is not valid in row {row}: choose a number above 0.")
    return Quantity(metric, number, uncertainty)


def _read_uncertainty(line: PublishedLine, metric: str, number: float) -> float:
    text = (line.get("uncertainty") or "").strip()
    if is_blank(text) or METRICS[metric].kind == FIT:
        return 0.0
    try:
        return abs(METRICS[metric].parse(text, line.get("unit") or ""))
    except ValueError:
        return 0.0


def _is_out_of_memory(text: str) -> bool:
    if "probably" in text.lower():
        raise NoNumberError("a run that failed, it is not said why")
    if re.search(OOM_PATTERN, text.lower()):
        return True
    if re.search(RAN_PATTERN, text.lower()):
        return False
    raise NoNumberError(f"{text} says neither that the run fits nor that it does not")
