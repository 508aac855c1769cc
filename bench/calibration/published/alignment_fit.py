"""What rows that do not begin at multiples of 16 bytes cost products of one device."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from bench.calibration.published import curves, points
from bench.calibration.published.curves import CurveErrors, round_number
from bench.calibration.published.device_fit import (
    PRODUCTS,
    DeviceFit,
    count_multiprocessors,
    get_16_bit_efficiency,
    get_efficiency,
)
from bench.calibration.published.devices import ALIGNMENT_MODELS, ALIGNMENT_POINTS, find_architecture
from bench.hardware.speeds import MatmulSpeed
from bench.prediction.trace.kernels import ALIGNED_ROW_BYTES

UNALIGNED_SHARE = "speeds.matmul.unaligned_share"
NUM_ALIGNMENTS = 3
"""2, 4 and 8 bytes."""

MIN_JUDGED_POINTS = 20
"""Of fewer none is held out."""


def fit_alignment(fit: DeviceFit) -> dict[str, float]:
    """What is left of products whose rows are not aligned, for alignments that were timed on this device."""
    assert fit.hardware.memory_bandwidth_gb_s is not None
    half_depth = fit.values["speeds.matmul.half_depth"]
    assert isinstance(half_depth, float)
    matmul = MatmulSpeed({"bf16": 1.0}, count_multiprocessors(fit), half_depth)
    device = (fit.peak_tflops, fit.hardware.memory_bandwidth_gb_s)
    timed = points.read_products_by_alignment([ALIGNMENT_POINTS[fit.hardware.name]])
    if len(timed) >= MIN_JUDGED_POINTS:
        kept, held_out = curves.hold_out_third(timed)
        trial_shares, efficiencies = curves.fit_unaligned_shares(kept, matmul, *device)
        trial = dataclasses.replace(matmul, unaligned_share=trial_shares)
        unaligned = held_out.query("row_bytes < @ALIGNED_ROW_BYTES and series in @efficiencies")
        fit.errors["not aligned products"] = CurveErrors.compare(
            curves.predict_products_by_alignment(unaligned, trial, efficiencies, *device),
            curves.count_product_seconds(unaligned),
        )
    shares, _ = curves.fit_unaligned_shares(timed, matmul, *device)
    num_unaligned = (timed.row_bytes < ALIGNED_ROW_BYTES).sum()
    address = timed.series.iloc[0].partition("/blob/")[0]
    suffix = "s" if num_unaligned > 1 else ""
    fit.sources[UNALIGNED_SHARE] = f"fitted: {num_unaligned} product{suffix} not aligned, {address} ({PRODUCTS})"
    return shares


def assume_alignment(fit: DeviceFit, fits: Mapping[str, DeviceFit], timed: Mapping[str, dict[str, float]]) -> None:
    """As on a device like it; what was not timed there is to what was as where all alignments were timed.

    On NVIDIA's GPUs such products are as fast per multiprocessor as there: they use nothing that newer ones add.

    Parameters
    ----------
    timed: mapping
        What was timed, by device.
    """
    architecture = find_architecture(fit.hardware.name)
    assert architecture is not None
    model_name = fit.hardware.name if fit.hardware.name in timed else ALIGNMENT_MODELS[architecture]
    complete_names = [
        name
        for name in (model_name, ALIGNMENT_MODELS[architecture], next(iter(ALIGNMENT_POINTS)))
        if len(timed.get(name, ())) == NUM_ALIGNMENTS
    ]
    if model_name not in timed or not complete_names:
        return
    complete_name = complete_names[0]
    shares, known = timed[model_name], timed[complete_name]
    relative = statistics.geometric_mean(shares[size] / known[size] for size in shares)
    completed = {size: shares.get(size, known[size] * relative) for size in known}
    if architecture.startswith("cdna"):
        speedup, extent = 1.0, "as"
    else:
        speedup = _compute_multiprocessor_speed(fit) / _compute_multiprocessor_speed(fits[model_name])
        extent = "as fast per multiprocessor as"
    source = fit.sources.get(UNALIGNED_SHARE, f"assumed: {extent} on {model_name}")
    if missing := [size for size in known if size not in shares]:
        source += f"; {', '.join(missing)} bytes assumed: to the others as on {complete_name}"
    completed = {size: round_number(min(1.0, share / speedup)) for size, share in completed.items()}
    fit.set(UNALIGNED_SHARE, completed, source)


def _compute_multiprocessor_speed(fit: DeviceFit) -> float:
    """What aligned products reach in short bursts, in TFLOP/s per multiprocessor."""
    return fit.peak_tflops * get_16_bit_efficiency(get_efficiency(fit)) / count_multiprocessors(fit)
