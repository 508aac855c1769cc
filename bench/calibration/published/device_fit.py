"""What is fitted and assumed of one device's kernels, each number with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.calibration.published.curves import CurveErrors, round_number
from bench.calibration.published.devices import list_similar_devices
from bench.hardware import Hardware

MICRO = "results/published/micro.csv"
PRODUCTS = "results/published/micro_products.csv"


@dataclass
class DeviceFit:
    """Fitted and assumed numbers of one device, by their place in its description, each with its source."""

    hardware: Hardware
    values: dict[str, object] = field(default_factory=dict)
    """By dotted name, as ``speeds.matmul.half_depth``; mappings are replaced as a whole."""
    sources: dict[str, str] = field(default_factory=dict)
    errors: dict[str, CurveErrors] = field(default_factory=dict)
    """Of points held out from a fit on the others: by ``products``, ``attention KERNEL`` and ``collectives``."""

    timed_formats: set[str] = field(default_factory=set)
    """Formats whose products were timed; ``bf16`` for both 16-bit ones."""

    def set(self, name: str, value: object, source: str) -> None:
        """A number with its source."""
        self.values[name], self.sources[name] = value, source

    @property
    def peak_tflops(self) -> float:
        """Of 16-bit products."""
        return get_peak_tflops(self.hardware)


def get_peak_tflops(hardware: Hardware) -> float:
    """Dense 16-bit peak."""
    return hardware.peak_tflops.get("bf16") or hardware.peak_tflops["fp16"]


def get_efficiency(fit: DeviceFit) -> dict[str, float]:
    efficiency = fit.values.setdefault("speeds.matmul.efficiency", {})
    assert isinstance(efficiency, dict)
    return efficiency


def get_16_bit_efficiency(efficiency: Mapping[str, float]) -> float:
    return efficiency["bf16"] if "bf16" in efficiency else efficiency["fp16"]


def count_multiprocessors(fit: DeviceFit) -> int:
    assert fit.hardware.speeds is not None
    assert fit.hardware.speeds.matmul is not None
    return fit.hardware.speeds.matmul.multiprocessors


def get_kernels(fit: DeviceFit) -> dict[str, dict[str, float]]:
    kernels = fit.values["speeds.attention.kernels"]
    assert isinstance(kernels, dict)
    return kernels


def take_median(
    fit: DeviceFit,
    fits: Mapping[str, DeviceFit],
    find: Callable[[DeviceFit], object],
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[float | None, str]:
    """Of devices of the same architecture that have points, else of the nearest one's."""
    for group in list_similar_devices(fit.hardware.name) if groups is None else groups:
        others = [(fits[name], find(fits[name])) for name in group if name in fits and name != fit.hardware.name]
        known = [(other, value) for other, value in others if isinstance(value, float)]
        if known:
            value = round_number(float(np.median([value for _, value in known])))
            return value, f"the median of {', '.join(other.hardware.name for other, _ in known)}"
    return None, "no device like it was timed"
