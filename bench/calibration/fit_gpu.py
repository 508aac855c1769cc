"""Fit a GPU's speeds: shares of the peaks on paper, by the model of `bench.simulate.cost`."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.calibration.launch import KERNEL
from bench.calibration.least_squares import fitted
from bench.calibration.memory import ELEMENTWISE
from bench.calibration.parts import Parts, predicted
from bench.calibration.sample import ATTENTION, LAUNCH, MATMUL, MEMORY, OPERATOR, Sample
from bench.calibration.steps import STEP
from bench.errors import UsageError
from bench.hardware import Hardware
from bench.hardware.speeds import Attention, Launch, Matmul
from bench.simulate.cost import SLOW, operator_key

START_SHARE, START_WIDTH = 0.6, 64.0
"""Where fits begin: shares of a peak, and the sizes at which half the speed is reached."""

OVERLAP_LOSS, UNIT_US = 0.15, 120.0
"""As in conf/hardware of GPUs: nothing was measured beside communication, hooks of FSDP run in no single process."""

LARGE_BYTES = 2**24
"""From this size on an operator is bound by memory, not by its launch."""

SAME = 0.05
"""Operators that are within this share of the elementwise ones need no number of their own."""

DIGITS = 4


def fit_gpu(samples: Sequence[Sample], base: Hardware) -> Parts:
    """Numbers for the timings of a GPU. What `base` knows and timings do not show is kept.

    Raises
    ------
    UsageError
        If no peak is known of any format that was timed.
    """
    by_kind = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind].append(sample)
    products = [sample for sample in by_kind[MATMUL] if sample.format in base.peak_tflops]
    if not products:
        raise UsageError(
            f"hardware={base.name} has no peak_tflops, of which speeds are shares: describe the GPU under "
            "conf/hardware first, each peak with its source."
        )
    elementwise = max(sample.bytes_moved / sample.median_s for sample in by_kind[MEMORY] if sample.name == ELEMENTWISE)
    bandwidth = base.memory_bandwidth_gb_s * 1e9 if base.memory_bandwidth_gb_s else elementwise
    start = Parts(
        matmul=Matmul(
            dict.fromkeys(_formats(products), START_SHARE),
            _multiprocessors(by_kind[LAUNCH], base),
            64.0,
            _workspace_mib(base),
        ),
        attention=Attention(START_SHARE, START_SHARE, START_WIDTH),
        memory_bandwidth_gb_s=bandwidth / 1e9,
        memory_efficiency=_rounded(min(1.0, elementwise / bandwidth)),
        overlap_loss=base.speeds.overlap_loss if base.speeds else OVERLAP_LOSS,
        launch=_launch(by_kind[LAUNCH], base),
        operators=_operators(by_kind[OPERATOR], elementwise),
        processor=None,
    )
    with_products = _fit_products(products, start, base)
    timed = [sample for sample in by_kind[ATTENTION] if sample.format in base.peak_tflops]
    return _fit_attention(timed, with_products, base) if timed else with_products


def _workspace_mib(base: Hardware) -> float:
    """Nothing that is timed shows it."""
    known = base.speeds is not None and base.speeds.matmul is not None
    return base.speeds.matmul.workspace_mib if known else Matmul.workspace_mib  # type: ignore[union-attr]


def _fit_products(samples: Sequence[Sample], start: Parts, base: Hardware) -> Parts:
    """Efficiency of every format, and the inner dimension at which half of it is reached."""
    formats = _formats(samples)
    ordered = [sample for format_ in formats for sample in samples if sample.format == format_]
    assert start.matmul is not None
    matmul = start.matmul

    def parts(numbers: np.ndarray) -> Parts:
        shares = {name: _share(number) for name, number in zip(formats, numbers[:-1], strict=True)}
        fitted_matmul = dataclasses.replace(matmul, efficiency=shares, half_depth=float(numbers[-1]))
        return dataclasses.replace(start, matmul=fitted_matmul)

    def seconds(numbers: np.ndarray) -> np.ndarray:
        return _predicted_by_format(ordered, parts(numbers).device(base))

    found = fitted(seconds, [sample.median_s for sample in ordered], [START_SHARE] * len(formats) + [START_WIDTH])
    return parts(np.array([_rounded(number) for number in found]))


def _fit_attention(samples: Sequence[Sample], start: Parts, base: Hardware) -> Parts:
    """Shares of the peak forward and backward, and the head dimension at which half of them is reached."""
    ordered = sorted(samples, key=lambda sample: sample.format)

    def parts(numbers: np.ndarray) -> Parts:
        return dataclasses.replace(
            start, attention=Attention(_share(numbers[0]), _share(numbers[1]), float(numbers[2]))
        )

    def seconds(numbers: np.ndarray) -> np.ndarray:
        return _predicted_by_format(ordered, parts(numbers).device(base))

    found = fitted(seconds, [sample.median_s for sample in ordered], [START_SHARE, START_SHARE, START_WIDTH])
    return parts(np.array([_rounded(number) for number in found]))


def _predicted_by_format(ordered: Sequence[Sample], device: Hardware) -> np.ndarray:
    """Of samples that lie together by format."""
    formats = list(dict.fromkeys(sample.format for sample in ordered))
    groups = ([sample for sample in ordered if sample.format == format_] for format_ in formats)
    return np.concatenate([predicted(group, device) for group in groups])


def _launch(samples: Sequence[Sample], base: Hardware) -> Launch:
    """The shortest time between kernels, and that of an operator on the processor."""
    kernel = [sample.median_s for sample in samples if sample.name == KERNEL]
    operator = [sample.median_s / sample.dims[0] for sample in samples if sample.name.startswith(STEP)]
    return Launch(
        kernel_us=_rounded(statistics.fmean(kernel) * 1e6),
        operator_us=_rounded(statistics.fmean(operator) * 1e6),
        unit_us=base.speeds.launch.unit_us if base.speeds else UNIT_US,
    )


def _operators(samples: Sequence[Sample], elementwise: float) -> dict[str, float] | None:
    """Bandwidth of operators as multiples of the elementwise ones'; rough shares where nothing large was timed."""
    groups = defaultdict(list)
    for sample in samples:
        if sample.bytes_moved >= LARGE_BYTES:
            groups[operator_key(sample.name, sample.format)].append(sample.bytes_moved / sample.median_s)
    measured = {name: _rounded(statistics.median(rates) / elementwise) for name, rates in sorted(groups.items())}
    different = {name: share for name, share in measured.items() if abs(share - 1) > SAME}
    return {**{name: share for name, share in SLOW.items() if name not in measured}, **different} if measured else None


def _multiprocessors(samples: Sequence[Sample], base: Hardware) -> int:
    if base.speeds is not None and base.speeds.matmul is not None:
        return base.speeds.matmul.multiprocessors
    return next(sample.dims[1] for sample in samples if sample.name == KERNEL)


def _formats(samples: Sequence[Sample]) -> list[str]:
    return sorted({sample.format for sample in samples})


def _share(number: float) -> float:
    """A share of a peak: nothing is faster than on paper."""
    return min(1.0, float(number))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
