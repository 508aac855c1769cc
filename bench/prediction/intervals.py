"""Intervals of predictions from the residuals of published rows: how far from a prediction the truth lies 19 times of 20.

``results/predicted/intervals.json`` holds the factors. ``python -m bench.predict validate --fit-intervals`` writes it:
`bench.validation.interval_fit` says how they are chosen.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.installation import DATA_FOLDER
from bench.hardware import Hardware
from bench.prediction.prediction import PredictedRange

INTERVALS_FILE = DATA_FOLDER / "results" / "predicted" / "intervals.json"

STEP_TIME, ALLOCATED, RESERVED, DEVICE_USED = "step time", "allocated", "reserved", "device used"
INTERVAL_METRICS = (STEP_TIME, ALLOCATED, RESERVED, DEVICE_USED)
"""What has an interval. Active memory has that of allocated memory."""

TRAINING_ROWS, MICROBENCHMARKS, DERIVED = "training rows", "microbenchmarks", "derived"
DEVICE_CLASSES = (TRAINING_ROWS, MICROBENCHMARKS, DERIVED)
"""How a device's speed is known: published training rows of this device were compared; only its kernels were measured;
or it is assumed or derived from another device."""

COMPLETE, ROUGH = "complete", "rough"
"""Whether everything that decides a row was stated; a user's own question is complete."""


@dataclass(frozen=True)
class IntervalFactors:
    """The truth lies between `low` and `high` times the prediction."""

    low: float
    high: float

    def apply_to(self, value: float) -> PredictedRange:
        """The interval of a predicted value."""
        return PredictedRange(value, value * self.low, value * self.high)


@functools.cache
def load_interval_file(path: Path = INTERVALS_FILE) -> Mapping[str, Any]:
    """The file as it was fitted."""
    return json.loads(path.read_text(encoding="utf-8"))


def classify_hardware(hardware: Hardware) -> str:
    """Which of `DEVICE_CLASSES` a device belongs to."""
    if hardware.name in load_interval_file()["devices with training rows"]:
        return TRAINING_ROWS
    matmul_sources = [text for key, text in hardware.sources.items() if key.startswith("speeds.matmul")]
    if not matmul_sources or any(text.startswith(("assumed", "derived")) for text in matmul_sources):
        return DERIVED
    return MICROBENCHMARKS


def find_factors(metric: str, device_class: str, *, is_complete: bool = True) -> IntervalFactors:
    """The factors of one metric for a class of devices and of rows."""
    entry = load_interval_file()["factors"][metric][device_class][COMPLETE if is_complete else ROUGH]
    return IntervalFactors(entry["low"], entry["high"])
