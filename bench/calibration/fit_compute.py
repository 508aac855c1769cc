"""From timings of one device to the few numbers that predictions need of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.fit_gpu import fit_gpu
from bench.calibration.fit_processor import fit_processor
from bench.calibration.parts import SingleDeviceSpeeds, predict_kernel_seconds
from bench.calibration.sample import ATTENTION, MATMUL, OPERATOR, OPTIMIZER, CalibrationSample
from bench.hardware import Hardware
from bench.hardware.speeds import HardwareSpeeds, LinkSpeeds, MemoryOutsideAllocator


@dataclass(frozen=True)
class FitResidual:
    """How well the fitted numbers explain one kind of samples: relative errors, absolute values."""

    count: int
    mean_error: float
    """Each timing weighs as much as it takes."""
    max_error: float


@dataclass(frozen=True)
class ComputeFit:
    """What was fitted on one device's timings."""

    device_speeds: SingleDeviceSpeeds
    residuals: Mapping[str, FitResidual]
    """Per kind and format, as ``matmul bf16``."""

    @property
    def memory_bandwidth_gb_s(self) -> float:
        """For `Hardware.memory_bandwidth_gb_s`: the base's where it has one, else as measured."""
        return self.device_speeds.memory_bandwidth_gb_s

    def build_speeds(self, links: LinkSpeeds, outside: MemoryOutsideAllocator) -> HardwareSpeeds:
        """The fitted numbers together with those that one device alone cannot show, for `Hardware.speeds`."""
        return self.device_speeds.build_speeds(links, outside)


def fit_compute(samples: Sequence[CalibrationSample], base: Hardware) -> ComputeFit:
    """Fit everything of `HardwareSpeeds` but `links` and `outside`.

    Parameters
    ----------
    samples: sequence of Sample
        As `bench.calibration.session.measure_compute` makes them; collectives among them are passed over.
    base: Hardware
        What is known of the device on paper: peaks where a vendor gives them, ``conf/hardware/cpu.yaml`` for a CPU.

    Raises
    ------
    UsageError
        If no peak of a GPU is known.
    """
    device_speeds = (fit_processor if base.device == "cpu" else fit_gpu)(samples, base)
    return ComputeFit(device_speeds, _compute_residuals(samples, device_speeds, base))


def _compute_residuals(
    samples: Sequence[CalibrationSample], device_speeds: SingleDeviceSpeeds, base: Hardware
) -> dict[str, FitResidual]:
    """Of everything that is predicted one operator at a time."""
    sample_groups: dict[tuple[str, str], list[CalibrationSample]] = defaultdict(list)
    for sample in samples:
        is_predictable = base.device == "cpu" or sample.format in base.peak_tflops or sample.kind == OPERATOR
        if sample.kind in (MATMUL, ATTENTION, OPERATOR) and is_predictable:
            sample_groups[sample.kind, sample.format].append(sample)
    fitted_hardware = device_speeds.build_hardware(base)
    residuals = {
        f"{kind} {format_}": _compute_residual(predict_kernel_seconds(group, fitted_hardware), group)
        for (kind, format_), group in sample_groups.items()
    }
    optimizer_samples = [sample for sample in samples if sample.kind == OPTIMIZER]
    if device_speeds.processor is not None and optimizer_samples:
        update_speeds = device_speeds.processor.updates
        predicted_seconds = [
            sample.dims[0] * update_speeds.tensor_us[sample.name] * 1e-6
            + sample.bytes_moved / update_speeds.gb_s[sample.name] / 1e9
            for sample in optimizer_samples
        ]
        residuals[f"{OPTIMIZER} fp32"] = _compute_residual(np.array(predicted_seconds), optimizer_samples)
    return residuals


def _compute_residual(predicted_seconds: np.ndarray, samples: Sequence[CalibrationSample]) -> FitResidual:
    measured_seconds = np.array([sample.median_s for sample in samples])
    relative_errors = np.abs(predicted_seconds / measured_seconds - 1)
    return FitResidual(
        len(samples), float(np.average(relative_errors, weights=measured_seconds)), float(relative_errors.max())
    )
