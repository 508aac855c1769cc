"""Fit a processor's speeds: everything adds up, so everything is linear."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.calibration.attention import BACKWARD
from bench.calibration.linear import per_unit
from bench.calibration.memory import ELEMENTWISE
from bench.calibration.parts import Parts
from bench.calibration.sample import ATTENTION, LAUNCH, MATMUL, MEMORY, OPERATOR, OPTIMIZER, Sample
from bench.calibration.steps import CALL, STEP
from bench.hardware import Hardware
from bench.hardware.processor import FusedAttention, Processor, Products, Updates
from bench.hardware.speeds import Launch
from bench.simulate.cost import operator_key
from bench.simulate.processor_cost import attention_work, product_bytes

OVERLAP_LOSS = 0.0
"""Nothing was measured beside communication."""

UNIT_US = 100.0
"""Of FSDP's hooks, which one process alone does not run: assumed."""

DIGITS = 4
"""Significant digits that are kept."""

LEAST_BYTES = 2**15
"""Below this an operator is its call, and says nothing about bytes."""

SAME = 0.05
"""Operators that are within this share of the elementwise ones need no number of their own."""


def fit_processor(samples: Sequence[Sample], base: Hardware) -> Parts:
    """Numbers for the timings of a CPU. What `base` knows of its hooks and of overlap is kept."""
    by_kind = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind].append(sample)
    call_s = statistics.fmean(sample.median_s for sample in by_kind[LAUNCH] if sample.name.startswith(CALL))
    rates = _rates(by_kind[OPERATOR], call_s)
    bandwidth = max(sample.bytes_moved / sample.median_s for sample in by_kind[MEMORY] if sample.name == ELEMENTWISE)
    elementwise = min(rates.pop(ELEMENTWISE, bandwidth), bandwidth)
    processor = Processor(
        products=_products(by_kind[MATMUL], call_s),
        attention=_attention(by_kind[ATTENTION], call_s),
        updates=_updates(by_kind[OPTIMIZER]),
    )
    known = base.speeds.launch.unit_us if base.speeds else UNIT_US
    steps = [sample for sample in by_kind[LAUNCH] if sample.name.startswith(STEP)]
    around_s = _around_s(steps, call_s, elementwise, processor)
    return Parts(
        matmul=None,
        attention=None,
        memory_bandwidth_gb_s=_rounded(bandwidth / 1e9),
        memory_efficiency=_rounded(elementwise / bandwidth),
        overlap_loss=base.speeds.overlap_loss if base.speeds else OVERLAP_LOSS,
        launch=Launch(kernel_us=_rounded(call_s * 1e6), operator_us=_rounded(around_s * 1e6), unit_us=known),
        operators={
            name: _rounded(rate / elementwise)
            for name, rate in sorted(rates.items())
            if abs(rate / elementwise - 1) > SAME
        },
        processor=processor,
    )


def _rates(samples: Sequence[Sample], call_s: float) -> dict[str, float]:
    """Bytes per second of every operator."""
    groups = defaultdict(list)
    for sample in samples:
        groups[operator_key(sample.name, sample.format)].append(sample)
    rates = {}
    for name, group in groups.items():
        work = [sample for sample in group if sample.bytes_moved >= LEAST_BYTES and sample.median_s > 1.5 * call_s]
        if work:
            (each,) = per_unit([[sample.bytes_moved] for sample in work], [s.median_s - call_s for s in work])
            rates[name] = float(1 / each)
    return rates


def _products(samples: Sequence[Sample], call_s: float) -> Products:
    found: dict[str, dict[str, float]] = {field.name: {} for field in dataclasses.fields(Products)}
    for format_ in _formats(samples):
        here = [sample for sample in samples if sample.format == format_]
        dims = np.array([sample.dims for sample in here], dtype=float)
        flops, transposed = np.array([sample.flops for sample in here]), dims[:, 4]
        straight = flops * (1 - transposed)
        work = np.stack([np.ones(len(here)), straight, flops * transposed, *product_bytes(dims, format_).T], axis=1)
        each = per_unit(work.tolist(), _beyond(here, call_s))
        found["call_us"][format_] = _rounded(each[0] * 1e6)
        for name, seconds in zip(RATES, each[1:], strict=True):
            found[name][format_] = _rate(seconds)
    return Products(**found)


RATES = ("gflops", "transposed_gflops", "copied_gb_s", "other_gb_s", "result_gb_s")
"""Of matrix products, in the order of the work they belong to."""


def _beyond(samples: Sequence[Sample], call_s: float) -> list[float]:
    """Seconds beyond what any operator takes."""
    return [max(sample.median_s - call_s, sample.median_s / 2) for sample in samples]


def _attention(samples: Sequence[Sample], call_s: float) -> FusedAttention:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for format_ in _formats(samples):
        for backward in (False, True):
            here = [each for each in samples if each.format == format_ and (each.name == BACKWARD) == backward]
            blocks, executed = attention_work(
                np.array([sample.dims for sample in here], dtype=float),
                np.array([sample.flops for sample in here]),
                np.full(len(here), backward),
            )
            block, flop = per_unit(np.stack([blocks, executed], axis=1).tolist(), _beyond(here, call_s))
            name = "backward" if backward else "forward"
            found[f"{name}_block_us"][format_] = _rounded(block * 1e6)
            found[f"{name}_gflops"][format_] = _rate(flop)
    return FusedAttention(**found)


def _updates(samples: Sequence[Sample]) -> Updates:
    tensor_us, gb_s = {}, {}
    for name in sorted({sample.name for sample in samples}):
        here = [sample for sample in samples if sample.name == name]
        work = [[float(sample.dims[0]), sample.bytes_moved] for sample in here]
        tensor, byte = per_unit(work, [sample.median_s for sample in here])
        tensor_us[name], gb_s[name] = _rounded(tensor * 1e6), _rate(byte)
    return Updates(tensor_us, gb_s)


def _around_s(samples: Sequence[Sample], call_s: float, elementwise: float, processor: Processor) -> float:
    """Seconds around the call of an operator: what the smallest steps take beyond their operators, per operator."""
    found = []
    for sample in samples:
        kernels, products, forward, backward = sample.dims
        within = (
            kernels * call_s
            + products * processor.products.call_us[sample.format] * 1e-6
            + forward * processor.attention.forward_block_us[sample.format] * 1e-6
            + backward * processor.attention.backward_block_us[sample.format] * 1e-6
            + sample.bytes_moved / elementwise
        )
        found.append((sample.median_s - within) / kernels)
    return max(statistics.fmean(found), 1e-7)


def _formats(samples: Sequence[Sample]) -> list[str]:
    return sorted({sample.format for sample in samples})


FASTEST = 1e6
"""Of a rate in 10^9 per second, where timings show no time at all for a kind of work."""


def _rate(seconds: float) -> float:
    return _rounded(min(FASTEST, 1e-9 / seconds)) if seconds > 0 else FASTEST


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
