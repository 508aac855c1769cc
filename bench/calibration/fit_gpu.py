"""Fit a GPU's speeds: shares of the peaks on paper, by the model of `bench.prediction.cost.kernels`."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.calibration.fit_processor import fit_least_squares
from bench.calibration.kernels import ELEMENTWISE_OPERATOR, FORWARD, KERNEL_SAMPLE
from bench.calibration.parts import SingleDeviceSpeeds, predict_kernel_seconds
from bench.calibration.sample import ATTENTION, LAUNCH, MATMUL, MEMORY, OPERATOR, SUSTAINED, CalibrationSample
from bench.calibration.steps import STEP_SAMPLE
from bench.core.errors import UsageError
from bench.hardware import Hardware
from bench.hardware.attention_kernels import SDPA
from bench.hardware.speeds import AttentionKernelSpeed, AttentionSpeed, LaunchOverhead, MatmulSpeed
from bench.prediction.cost.kernels import OPERATOR_BANDWIDTH_SHARES, build_operator_key

INITIAL_PEAK_SHARE, INITIAL_HALF_SPEED_SIZE = 0.6, 64.0
"""Where fits begin: shares of a peak, and the sizes at which half the speed is reached."""

DEFAULT_OVERLAP_LOSS, DEFAULT_UNIT_US = 0.15, 800.0
"""As in conf/hardware of GPUs: nothing was measured beside communication, hooks of FSDP run in no single process."""

MIN_MEMORY_BOUND_BYTES = 2**24
"""From this size on an operator is bound by memory, not by its launch."""

OPERATOR_TOLERANCE = 0.05
"""Operators that are within this share of the elementwise ones need no number of their own."""

SIGNIFICANT_DIGITS = 4


def fit_gpu(samples: Sequence[CalibrationSample], base: Hardware) -> SingleDeviceSpeeds:
    """Numbers for the timings of a GPU. What `base` knows and timings do not show is kept.

    Raises
    ------
    UsageError
        If no peak is known of any format that was timed.
    """
    samples_by_kind = defaultdict(list)
    for sample in samples:
        samples_by_kind[sample.kind].append(sample)
    matmul_samples = [sample for sample in samples_by_kind[MATMUL] if sample.format in base.peak_tflops]
    if not matmul_samples:
        raise UsageError(
            f"hardware={base.name} has no peak_tflops, of which speeds are shares: describe the GPU under "
            "conf/hardware first, each peak with its source."
        )
    elementwise_bandwidth = max(
        sample.bytes_moved / sample.median_s
        for sample in samples_by_kind[MEMORY]
        if sample.name == ELEMENTWISE_OPERATOR
    )
    peak_bandwidth = base.memory_bandwidth_gb_s * 1e9 if base.memory_bandwidth_gb_s else elementwise_bandwidth
    initial_speeds = SingleDeviceSpeeds(
        matmul=MatmulSpeed(
            dict.fromkeys(_list_formats(matmul_samples), INITIAL_PEAK_SHARE),
            _find_multiprocessors(samples_by_kind[LAUNCH], base),
            64.0,
            _choose_workspace_mib(base),
            unaligned_share=dict(base.speeds.matmul.unaligned_share) if base.speeds and base.speeds.matmul else {},
        ),
        attention=_build_attention(INITIAL_PEAK_SHARE, INITIAL_PEAK_SHARE, INITIAL_HALF_SPEED_SIZE),
        memory_bandwidth_gb_s=peak_bandwidth / 1e9,
        memory_efficiency=_round_significant(min(1.0, elementwise_bandwidth / peak_bandwidth)),
        overlap_loss=base.speeds.overlap_loss if base.speeds else DEFAULT_OVERLAP_LOSS,
        launch=_fit_launch(samples_by_kind[LAUNCH], base),
        operators=_fit_operators(samples_by_kind[OPERATOR], elementwise_bandwidth),
        processor=None,
    )
    speeds_with_products = _fit_products(matmul_samples, initial_speeds, base)
    attention_samples = [sample for sample in samples_by_kind[ATTENTION] if sample.format in base.peak_tflops]
    burst_speeds = (
        _fit_attention(attention_samples, speeds_with_products, base) if attention_samples else speeds_with_products
    )
    return _set_sustained_shares(burst_speeds, samples)


def _set_sustained_shares(burst_speeds: SingleDeviceSpeeds, samples: Sequence[CalibrationSample]) -> SingleDeviceSpeeds:
    """The same with what is kept up of products, by their format, and of attention: of the speed of the same operation
    in short bursts."""
    burst_s = {
        (sample.kind, sample.format, sample.dims): sample.median_s for sample in samples if sample.name == FORWARD
    }
    shares: dict[str, dict[str, float]] = {MATMUL: {}, ATTENTION: {}}
    for sample in samples:
        if sample.kind == SUSTAINED:
            burst_share = burst_s[sample.name, sample.format, sample.dims] / sample.median_s
            shares[sample.name][sample.format] = _round_significant(min(1.0, burst_share))
    assert burst_speeds.matmul is not None
    attention = burst_speeds.attention
    if attention is not None and shares[ATTENTION]:
        kept_up = min(shares[ATTENTION].values())
        kernels = {
            name: dataclasses.replace(kernel, sustained_share=kept_up) for name, kernel in attention.kernels.items()
        }
        attention = dataclasses.replace(attention, kernels=kernels)
    matmul = dataclasses.replace(burst_speeds.matmul, sustained_share=shares[MATMUL])
    return dataclasses.replace(burst_speeds, matmul=matmul, attention=attention)


def _choose_workspace_mib(base: Hardware) -> float:
    """Nothing that is timed shows it."""
    is_known = base.speeds is not None and base.speeds.matmul is not None
    return base.speeds.matmul.workspace_mib if is_known else MatmulSpeed.workspace_mib  # type: ignore[union-attr]


def _fit_products(
    samples: Sequence[CalibrationSample], initial_speeds: SingleDeviceSpeeds, base: Hardware
) -> SingleDeviceSpeeds:
    """Efficiency of every format, and the inner dimension at which half of it is reached."""
    formats = _list_formats(samples)
    ordered_samples = [sample for format_ in formats for sample in samples if sample.format == format_]
    assert initial_speeds.matmul is not None
    initial_matmul = initial_speeds.matmul

    def build_speeds(parameters: np.ndarray) -> SingleDeviceSpeeds:
        efficiencies = {name: _limit_share(parameter) for name, parameter in zip(formats, parameters[:-1], strict=True)}
        fitted_matmul = dataclasses.replace(initial_matmul, efficiency=efficiencies, half_depth=float(parameters[-1]))
        return dataclasses.replace(initial_speeds, matmul=fitted_matmul)

    def predict_seconds(parameters: np.ndarray) -> np.ndarray:
        return _predict_by_format(ordered_samples, build_speeds(parameters).build_hardware(base))

    fitted_parameters = fit_least_squares(
        predict_seconds,
        [sample.median_s for sample in ordered_samples],
        [INITIAL_PEAK_SHARE] * len(formats) + [INITIAL_HALF_SPEED_SIZE],
    )
    return build_speeds(np.array([_round_significant(parameter) for parameter in fitted_parameters]))


def _fit_attention(
    samples: Sequence[CalibrationSample], initial_speeds: SingleDeviceSpeeds, base: Hardware
) -> SingleDeviceSpeeds:
    """Shares of the peak forward and backward, and the head dimension at which half of them is reached."""
    ordered_samples = sorted(samples, key=lambda sample: sample.format)

    def build_speeds(parameters: np.ndarray) -> SingleDeviceSpeeds:
        return dataclasses.replace(
            initial_speeds,
            attention=_build_attention(_limit_share(parameters[0]), _limit_share(parameters[1]), float(parameters[2])),
        )

    def predict_seconds(parameters: np.ndarray) -> np.ndarray:
        return _predict_by_format(ordered_samples, build_speeds(parameters).build_hardware(base))

    fitted_parameters = fit_least_squares(
        predict_seconds,
        [sample.median_s for sample in ordered_samples],
        [INITIAL_PEAK_SHARE, INITIAL_PEAK_SHARE, INITIAL_HALF_SPEED_SIZE],
    )
    return build_speeds(np.array([_round_significant(parameter) for parameter in fitted_parameters]))


def _build_attention(forward: float, backward: float, half_width: float) -> AttentionSpeed:
    """Speeds of the kernel that was timed, whichever it was."""
    return AttentionSpeed({SDPA: AttentionKernelSpeed(forward, backward, half_width)})


def _predict_by_format(ordered_samples: Sequence[CalibrationSample], hardware: Hardware) -> np.ndarray:
    """Of samples that lie together by format."""
    formats = list(dict.fromkeys(sample.format for sample in ordered_samples))
    format_groups = ([sample for sample in ordered_samples if sample.format == format_] for format_ in formats)
    return np.concatenate([predict_kernel_seconds(group, hardware) for group in format_groups])


def _fit_launch(samples: Sequence[CalibrationSample], base: Hardware) -> LaunchOverhead:
    """The shortest time between kernels, and that of an operator on the processor."""
    kernel_seconds = [sample.median_s for sample in samples if sample.name == KERNEL_SAMPLE]
    operator_seconds = [sample.median_s / sample.dims[0] for sample in samples if sample.name.startswith(STEP_SAMPLE)]
    return LaunchOverhead(
        kernel_us=_round_significant(statistics.fmean(kernel_seconds) * 1e6),
        operator_us=_round_significant(statistics.fmean(operator_seconds) * 1e6),
        unit_us=base.speeds.launch.unit_us if base.speeds else DEFAULT_UNIT_US,
    )


def _fit_operators(samples: Sequence[CalibrationSample], elementwise_bandwidth: float) -> dict[str, float] | None:
    """Bandwidth of operators as multiples of the elementwise ones'; rough shares where nothing large was timed."""
    rates_by_operator = defaultdict(list)
    for sample in samples:
        if sample.bytes_moved >= MIN_MEMORY_BOUND_BYTES:
            rates_by_operator[build_operator_key(sample.name, sample.format)].append(
                sample.bytes_moved / sample.median_s
            )
    relative_bandwidths = {
        name: _round_significant(statistics.median(rates) / elementwise_bandwidth)
        for name, rates in sorted(rates_by_operator.items())
    }
    differing_bandwidths = {
        name: share for name, share in relative_bandwidths.items() if abs(share - 1) > OPERATOR_TOLERANCE
    }
    return (
        {
            **{name: share for name, share in OPERATOR_BANDWIDTH_SHARES.items() if name not in relative_bandwidths},
            **differing_bandwidths,
        }
        if relative_bandwidths
        else None
    )


def _find_multiprocessors(samples: Sequence[CalibrationSample], base: Hardware) -> int:
    if base.speeds is not None and base.speeds.matmul is not None:
        return base.speeds.matmul.multiprocessors
    return next(sample.dims[1] for sample in samples if sample.name == KERNEL_SAMPLE)


def _list_formats(samples: Sequence[CalibrationSample]) -> list[str]:
    return sorted({sample.format for sample in samples})


def _limit_share(share: float) -> float:
    """A share of a peak: nothing is faster than on paper."""
    return min(1.0, float(share))


def _round_significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
