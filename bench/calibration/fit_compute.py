"""From timings of one device to the few numbers that predictions need of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.fit_gpu import fit_gpu
from bench.calibration.fit_processor import fit_processor
from bench.calibration.parts import Parts, predicted
from bench.calibration.sample import ATTENTION, MATMUL, OPERATOR, OPTIMIZER, Sample
from bench.hardware import Hardware
from bench.hardware.speeds import Links, Outside, Speeds


@dataclass(frozen=True)
class Residual:
    """How well the fitted numbers explain one kind of samples: relative errors, absolute values."""

    count: int
    mean: float
    """Each timing weighs as much as it takes."""
    worst: float


@dataclass(frozen=True)
class ComputeFit:
    """What was fitted on one device's timings."""

    parts: Parts
    residuals: Mapping[str, Residual]
    """Per kind and format, as ``matmul bf16``."""

    @property
    def memory_bandwidth_gb_s(self) -> float:
        """For `Hardware.memory_bandwidth_gb_s`: the base's where it has one, else as measured."""
        return self.parts.memory_bandwidth_gb_s

    def speeds(self, links: Links, outside: Outside) -> Speeds:
        """The fitted numbers together with those that one device alone cannot show, for `Hardware.speeds`."""
        return self.parts.speeds(links, outside)


def fit_compute(samples: Sequence[Sample], base: Hardware) -> ComputeFit:
    """Fit everything of `Speeds` but `links` and `outside`.

    Parameters
    ----------
    samples: sequence of Sample
        As `bench.calibration.compute.measure_compute` makes them; collectives among them are passed over.
    base: Hardware
        What is known of the device on paper: peaks where a vendor gives them, ``conf/hardware/cpu.yaml`` for a CPU.

    Raises
    ------
    UsageError
        If no peak of a GPU is known.
    """
    parts = (fit_processor if base.device == "cpu" else fit_gpu)(samples, base)
    return ComputeFit(parts, _residuals(samples, parts, base))


def _residuals(samples: Sequence[Sample], parts: Parts, base: Hardware) -> dict[str, Residual]:
    """Of everything that is predicted one operator at a time."""
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        known = base.device == "cpu" or sample.format in base.peak_tflops or sample.kind == OPERATOR
        if sample.kind in (MATMUL, ATTENTION, OPERATOR) and known:
            groups[sample.kind, sample.format].append(sample)
    device = parts.device(base)
    found = {
        f"{kind} {format_}": _residual(predicted(group, device), group) for (kind, format_), group in groups.items()
    }
    updates = [sample for sample in samples if sample.kind == OPTIMIZER]
    if parts.processor is not None and updates:
        speed = parts.processor.updates
        seconds = [
            each.dims[0] * speed.tensor_us[each.name] * 1e-6 + each.bytes_moved / speed.gb_s[each.name] / 1e9
            for each in updates
        ]
        found[f"{OPTIMIZER} fp32"] = _residual(np.array(seconds), updates)
    return found


def _residual(seconds: np.ndarray, samples: Sequence[Sample]) -> Residual:
    measured = np.array([sample.median_s for sample in samples])
    errors = np.abs(seconds / measured - 1)
    return Residual(len(samples), float(np.average(errors, weights=measured)), float(errors.max()))
