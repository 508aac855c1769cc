"""Fit a processor's speeds: everything adds up, so everything is linear."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from bench.calibration.kernels import BACKWARD, ELEMENTWISE_OPERATOR
from bench.calibration.parts import SingleDeviceSpeeds
from bench.calibration.sample import ATTENTION, LAUNCH, MATMUL, MEMORY, OPERATOR, OPTIMIZER, CalibrationSample
from bench.calibration.steps import CALL_SAMPLE, STEP_SAMPLE
from bench.hardware import Hardware
from bench.hardware.speeds import (
    LaunchOverhead,
    ProcessorAttentionSpeed,
    ProcessorMatmulSpeed,
    ProcessorOptimizerSpeed,
    ProcessorSpeed,
)
from bench.prediction.cost.kernels import build_operator_key, count_attention_work, count_matmul_operand_bytes

FloatArray = npt.NDArray[np.float64]

OUTLIER_RELATIVE_ERROR = 0.25
"""Relative error beyond which a timing pulls no harder: Huber's loss."""


def fit_least_squares(
    predict: Callable[[FloatArray], FloatArray], measured: Sequence[float], initial_parameters: Sequence[float]
) -> FloatArray:
    """The parameters at which predictions are closest to what was measured, in the logarithm.

    Parameters
    ----------
    predict: callable
        Parameters, all above 0, to predictions, all above 0.
    measured: sequence
        One value above 0 for each prediction.
    initial_parameters: sequence
        Where to begin: rough values of the parameters.
    """
    log_measured = np.log(np.asarray(measured, dtype=float))

    def compute_log_errors(log_parameters: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict(np.exp(log_parameters))) - log_measured, dtype=float)

    solution = least_squares(
        compute_log_errors,
        np.log(np.asarray(initial_parameters, dtype=float)),
        loss="huber",
        f_scale=OUTLIER_RELATIVE_ERROR,
    )
    return np.asarray(np.exp(solution.x), dtype=float)


# --- Times that are sums of a few kinds of work: how long a unit of each takes.


WEIGHT_POWER = 0.5
"""Weight of a timing is its inverse to this power: between errors in seconds (0) and relative ones (1). What is large
makes up a step, what is small shows what does not grow."""


def fit_seconds_per_unit(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Seconds per unit of each kind of work, none below 0.

    Parameters
    ----------
    work: sequence
        For each timing how much there was of each kind.
    seconds: sequence
        Each timing.
    """
    amounts, target_seconds = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    weights = target_seconds**-WEIGHT_POWER
    scale = np.maximum(amounts.max(axis=0), 1e-300)
    weighted_amounts, weighted_seconds = amounts / scale * weights[:, None], target_seconds * weights
    return np.asarray(nnls(weighted_amounts, weighted_seconds)[0] / scale, dtype=float)


# --- Fit a processor's speeds: everything adds up, so everything is linear.

DEFAULT_OVERLAP_LOSS = 0.0
"""Nothing was measured beside communication."""

DEFAULT_UNIT_US = 100.0
"""Of FSDP's hooks, which one process alone does not run: assumed."""

SIGNIFICANT_DIGITS = 4
"""Significant digits that are kept."""

MIN_OPERATOR_BYTES = 2**15
"""Below this an operator is its call, and says nothing about bytes."""

OPERATOR_TOLERANCE = 0.05
"""Operators that are within this share of the elementwise ones need no number of their own."""


def fit_processor(samples: Sequence[CalibrationSample], base: Hardware) -> SingleDeviceSpeeds:
    """Numbers for the timings of a CPU. What `base` knows of its hooks and of overlap is kept."""
    samples_by_kind = defaultdict(list)
    for sample in samples:
        samples_by_kind[sample.kind].append(sample)
    call_s = statistics.fmean(
        sample.median_s for sample in samples_by_kind[LAUNCH] if sample.name.startswith(CALL_SAMPLE)
    )
    operator_rates = _fit_operator_rates(samples_by_kind[OPERATOR], call_s)
    peak_bandwidth = max(
        sample.bytes_moved / sample.median_s
        for sample in samples_by_kind[MEMORY]
        if sample.name == ELEMENTWISE_OPERATOR
    )
    elementwise_bandwidth = min(operator_rates.pop(ELEMENTWISE_OPERATOR, peak_bandwidth), peak_bandwidth)
    processor = ProcessorSpeed(
        products=_fit_products(samples_by_kind[MATMUL], call_s),
        attention=_fit_attention(samples_by_kind[ATTENTION], call_s),
        updates=_fit_updates(samples_by_kind[OPTIMIZER]),
    )
    unit_us = base.speeds.launch.unit_us if base.speeds else DEFAULT_UNIT_US
    step_samples = [sample for sample in samples_by_kind[LAUNCH] if sample.name.startswith(STEP_SAMPLE)]
    overhead_s = _compute_overhead_s(step_samples, call_s, elementwise_bandwidth, processor)
    return SingleDeviceSpeeds(
        matmul=None,
        attention=None,
        memory_bandwidth_gb_s=_round_significant(peak_bandwidth / 1e9),
        memory_efficiency=_round_significant(elementwise_bandwidth / peak_bandwidth),
        overlap_loss=base.speeds.overlap_loss if base.speeds else DEFAULT_OVERLAP_LOSS,
        launch=LaunchOverhead(
            kernel_us=_round_significant(call_s * 1e6),
            operator_us=_round_significant(overhead_s * 1e6),
            unit_us=unit_us,
        ),
        operators={
            name: _round_significant(rate / elementwise_bandwidth)
            for name, rate in sorted(operator_rates.items())
            if abs(rate / elementwise_bandwidth - 1) > OPERATOR_TOLERANCE
        },
        processor=processor,
    )


def _fit_operator_rates(samples: Sequence[CalibrationSample], call_s: float) -> dict[str, float]:
    """Bytes per second of every operator."""
    samples_by_operator = defaultdict(list)
    for sample in samples:
        samples_by_operator[build_operator_key(sample.name, sample.format)].append(sample)
    rates = {}
    for name, group in samples_by_operator.items():
        work_samples = [
            sample for sample in group if sample.bytes_moved >= MIN_OPERATOR_BYTES and sample.median_s > 1.5 * call_s
        ]
        if work_samples:
            (seconds_per_byte,) = fit_seconds_per_unit(
                [[sample.bytes_moved] for sample in work_samples], [sample.median_s - call_s for sample in work_samples]
            )
            rates[name] = float(1 / seconds_per_byte)
    return rates


def _fit_products(samples: Sequence[CalibrationSample], call_s: float) -> ProcessorMatmulSpeed:
    rates_by_field: dict[str, dict[str, float]] = {field.name: {} for field in dataclasses.fields(ProcessorMatmulSpeed)}
    for format_ in _list_formats(samples):
        format_samples = [sample for sample in samples if sample.format == format_]
        dims = np.array([sample.dims for sample in format_samples], dtype=float)
        flops, is_transposed = np.array([sample.flops for sample in format_samples]), dims[:, 4]
        straight_flops = flops * (1 - is_transposed)
        work_amounts = np.stack(
            [
                np.ones(len(format_samples)),
                straight_flops,
                flops * is_transposed,
                *count_matmul_operand_bytes(dims, format_).T,
            ],
            axis=1,
        )
        seconds_per_unit = fit_seconds_per_unit(work_amounts.tolist(), _subtract_call_time(format_samples, call_s))
        rates_by_field["call_us"][format_] = _round_significant(seconds_per_unit[0] * 1e6)
        for rate_field, seconds in zip(PRODUCT_RATE_FIELDS, seconds_per_unit[1:], strict=True):
            rates_by_field[rate_field][format_] = _compute_rate(seconds)
    return ProcessorMatmulSpeed(**rates_by_field)


PRODUCT_RATE_FIELDS = ("gflops", "transposed_gflops", "copied_gb_s", "other_gb_s", "result_gb_s")
"""Of matrix products, in the order of the work they belong to."""


def _subtract_call_time(samples: Sequence[CalibrationSample], call_s: float) -> list[float]:
    """Seconds beyond what any operator takes."""
    return [max(sample.median_s - call_s, sample.median_s / 2) for sample in samples]


def _fit_attention(samples: Sequence[CalibrationSample], call_s: float) -> ProcessorAttentionSpeed:
    values_by_field: dict[str, dict[str, float]] = defaultdict(dict)
    for format_ in _list_formats(samples):
        for is_backward in (False, True):
            pass_samples = [
                sample for sample in samples if sample.format == format_ and (sample.name == BACKWARD) == is_backward
            ]
            block_counts, executed_flops = count_attention_work(
                np.array([sample.dims for sample in pass_samples], dtype=float),
                np.array([sample.flops for sample in pass_samples]),
                np.full(len(pass_samples), is_backward),
            )
            seconds_per_block, seconds_per_flop = fit_seconds_per_unit(
                np.stack([block_counts, executed_flops], axis=1).tolist(), _subtract_call_time(pass_samples, call_s)
            )
            pass_name = "backward" if is_backward else "forward"
            values_by_field[f"{pass_name}_block_us"][format_] = _round_significant(seconds_per_block * 1e6)
            values_by_field[f"{pass_name}_gflops"][format_] = _compute_rate(seconds_per_flop)
    return ProcessorAttentionSpeed(**values_by_field)


def _fit_updates(samples: Sequence[CalibrationSample]) -> ProcessorOptimizerSpeed:
    tensor_us, gb_s = {}, {}
    for name in sorted({sample.name for sample in samples}):
        optimizer_samples = [sample for sample in samples if sample.name == name]
        work_amounts = [[float(sample.dims[0]), sample.bytes_moved] for sample in optimizer_samples]
        seconds_per_tensor, seconds_per_byte = fit_seconds_per_unit(
            work_amounts, [sample.median_s for sample in optimizer_samples]
        )
        tensor_us[name], gb_s[name] = _round_significant(seconds_per_tensor * 1e6), _compute_rate(seconds_per_byte)
    return ProcessorOptimizerSpeed(tensor_us, gb_s)


def _compute_overhead_s(
    samples: Sequence[CalibrationSample], call_s: float, elementwise_bandwidth: float, processor: ProcessorSpeed
) -> float:
    """Seconds around the call of an operator: what the smallest steps take beyond their operators, per operator."""
    overheads_s = []
    for sample in samples:
        kernel_count, product_count, forward_blocks, backward_blocks = sample.dims
        operators_s = (
            kernel_count * call_s
            + product_count * processor.products.call_us[sample.format] * 1e-6
            + forward_blocks * processor.attention.forward_block_us[sample.format] * 1e-6
            + backward_blocks * processor.attention.backward_block_us[sample.format] * 1e-6
            + sample.bytes_moved / elementwise_bandwidth
        )
        overheads_s.append((sample.median_s - operators_s) / kernel_count)
    return max(statistics.fmean(overheads_s), 1e-7)


def _list_formats(samples: Sequence[CalibrationSample]) -> list[str]:
    return sorted({sample.format for sample in samples})


MAX_RATE = 1e6
"""Of a rate in 10^9 per second, where timings show no time at all for a kind of work."""


def _compute_rate(seconds: float) -> float:
    return _round_significant(min(MAX_RATE, 1e-9 / seconds)) if seconds > 0 else MAX_RATE


def _round_significant(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
