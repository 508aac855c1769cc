"""Everything that the points say of devices' kernels, and what is assumed where they say nothing."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from bench.calibration.published import curves, points
from bench.calibration.published.alignment_fit import assume_alignment, fit_alignment
from bench.calibration.published.attention_fit import assume_attention, fit_attention
from bench.calibration.published.curves import CurveErrors, round_number
from bench.calibration.published.device_fit import (
    MICRO,
    DeviceFit,
    count_multiprocessors,
    get_16_bit_efficiency,
    get_efficiency,
    take_median,
)
from bench.calibration.published.devices import (
    ALIGNMENT_POINTS,
    LINK_POINTS,
    PCIE_POINTS,
    PCIE_THROUGH_HOST,
    POINT_NAMES,
    POINT_PEAK_TFLOPS,
    find_architecture,
    find_chip,
    list_similar_devices,
)
from bench.hardware import Hardware
from bench.hardware.speeds import MANY_GPUS_SHARE, LinkSpeeds
from bench.hardware.sustained_clocks import compute_sustained_share, compute_typical_attention_share
from bench.prediction.cost.kernels import OPERATOR_BANDWIDTH_SHARES

MIN_POINTS = 20
"""For a curve with a shape of its own; of fewer, one number is fitted."""

GROUP_SIZES = ("2", "4", "8")
ASSUMED_FP32_EFFICIENCY = 0.85
ASSUMED_HALF_DEPTH = 64.0

MANY_GPUS_SOURCE = "fitted: rows of llm-foundry and the FSDP paper (results/predicted/ACCURACY.md)"


def fit_devices(all_hardware: Sequence[Hardware]) -> dict[str, DeviceFit]:
    """By name: every device of the table in `devices` that is described and has speeds.

    Numbers a device has no points for are the median over devices like it, and say so.
    """
    fits = {
        hardware.name: DeviceFit(hardware)
        for hardware in all_hardware
        if find_architecture(hardware.name) and hardware.speeds is not None and hardware.speeds.matmul is not None
    }
    for fit in fits.values():
        _fit_products(fit)
        _fit_memory(fit)
        fit_attention(fit)
        _fit_links(fit)
    for fit in fits.values():
        _assume_products(fit, fits)
        _assume_memory(fit, fits)
        assume_attention(fit, fits)
        _assume_links(fit, fits)
    timed_shares = {name: fit_alignment(fits[name]) for name in ALIGNMENT_POINTS if name in fits}
    for fit in fits.values():
        assume_alignment(fit, fits, timed_shares)
        _set_sustained_shares(fit)
        fit.set("speeds.many_gpus_share", MANY_GPUS_SHARE, MANY_GPUS_SOURCE)
    return fits


# --- Matrix products.


def _fit_products(fit: DeviceFit) -> None:
    hardware, names = fit.hardware, POINT_NAMES.get(fit.hardware.name, ())
    assert hardware.speeds is not None
    assert hardware.speeds.matmul is not None
    assert hardware.memory_bandwidth_gb_s is not None
    multiprocessors, bandwidth = hardware.speeds.matmul.multiprocessors, hardware.memory_bandwidth_gb_s
    bursts = points.read_burst_products(names)
    if len(bursts) >= MIN_POINTS:
        kept, held_out = curves.hold_out_third(bursts)
        trial, overhead_us = curves.fit_products(kept, multiprocessors, fit.peak_tflops, bandwidth)
        fit.errors["products"] = CurveErrors.compare(
            curves.predict_products(held_out, trial, fit.peak_tflops, bandwidth, overhead_us),
            curves.count_product_seconds(held_out),
        )
        matmul, _ = curves.fit_products(bursts, multiprocessors, fit.peak_tflops, bandwidth)
        source = (
            f"fitted: {len(bursts)} products in short bursts, https://github.com/ai-dynamo/aiconfigurator ({MICRO})"
        )
        fit.set("speeds.matmul.efficiency", {"bf16": round_number(matmul.efficiency["bf16"])}, source)
        fit.timed_formats.add("bf16")
        fit.set("speeds.matmul.half_depth", round_number(max(1.0, matmul.half_depth)), source)
    elif len(best := points.read_best_products(names, "bf16")):
        matmul = dataclasses.replace(hardware.speeds.matmul, half_depth=ASSUMED_HALF_DEPTH, sustained_share={})
        peak_tflops = POINT_PEAK_TFLOPS.get(best.gpu.iloc[0], fit.peak_tflops)
        efficiency = curves.fit_product_efficiency(best, matmul, peak_tflops, bandwidth)
        source = f"fitted: the fastest product of a search or sweep by others, {best.gpu.iloc[0]} ({MICRO})"
        fit.set("speeds.matmul.efficiency", {"bf16": round_number(efficiency)}, source)
        fit.timed_formats.add("bf16")
    if fp32_tflops := points.read_fp32_tflops(names):
        fit.timed_formats.add("fp32")
        get_efficiency(fit)["fp32"] = round_number(min(curves.MAX_SHARE, fp32_tflops / hardware.peak_tflops["fp32"]))
    if len(best := points.read_best_products(names, "fp8")) and "fp8" in hardware.peak_tflops:
        get_efficiency(fit)["fp8"] = round_number(float(best.tflops.max()) / hardware.peak_tflops["fp8"])


def _assume_products(fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> None:
    """Formats that were not timed, and half depth."""
    peaks, efficiency = fit.hardware.peak_tflops, get_efficiency(fit)
    if "bf16" not in efficiency:
        value, text = take_median(fit, fits, lambda other: _find_fitted_efficiency(other, "bf16"))
        efficiency["bf16"] = value if value is not None else 0.8
        fit.sources["speeds.matmul.efficiency"] = f"assumed: {text}"
    if "speeds.matmul.half_depth" not in fit.values:
        value, text = take_median(fit, fits, lambda other: other.values.get("speeds.matmul.half_depth"))
        fit.set("speeds.matmul.half_depth", value or ASSUMED_HALF_DEPTH, f"assumed: {text}")
    if "fp32" not in efficiency:
        value, _ = take_median(fit, fits, lambda other: _find_fitted_efficiency(other, "fp32"))
        efficiency["fp32"] = value if value is not None else ASSUMED_FP32_EFFICIENCY
    fp8_efficiency = efficiency.get("fp8", efficiency["bf16"])
    shares = {"fp32": efficiency["fp32"], "fp8": fp8_efficiency}
    fit.values["speeds.matmul.efficiency"] = {name: shares.get(name, efficiency["bf16"]) for name in peaks}


def _find_fitted_efficiency(fit: DeviceFit, format_: str) -> float | None:
    if format_ not in fit.timed_formats:
        return None
    efficiency = get_efficiency(fit)
    return efficiency.get(format_, efficiency.get("fp16"))


def _set_sustained_shares(fit: DeviceFit) -> None:
    """What the power limit leaves of products, and of each attention kernel."""
    power_w = fit.hardware.power_w
    if power_w is None:
        return
    efficiency, chip = get_efficiency(fit), find_chip(fit.hardware.name)
    product_tflops = fit.peak_tflops * get_16_bit_efficiency(efficiency)
    share = round_number(compute_sustained_share(power_w, product_tflops, chip))
    law = f"fitted: {power_w:g} W by the law of bench/hardware/sustained_clocks.py, fp8 and tf32 as 16-bit formats"
    # CUDA cores, which compute in fp32, draw less power than Tensor Cores do.
    fit.set("speeds.matmul.sustained_share", {name: 1.0 if name == "fp32" else share for name in efficiency}, law)
    kernels = fit.values.get("speeds.attention.kernels")
    assert isinstance(kernels, dict)
    for numbers in kernels.values():
        burst_tflops = fit.peak_tflops * compute_typical_attention_share(numbers)
        kept_up = compute_sustained_share(power_w, burst_tflops, chip, is_attention=True)
        numbers["sustained_share"] = round_number(kept_up)


# --- Memory.


def _fit_memory(fit: DeviceFit) -> None:
    assert fit.hardware.memory_bandwidth_gb_s is not None
    bandwidth, names = fit.hardware.memory_bandwidth_gb_s, POINT_NAMES.get(fit.hardware.name, ())
    if len(norms := points.read_streaming_norms(names)) >= MIN_POINTS / 2:
        kept, held_out = curves.hold_out_third(norms)
        trial_share, trial_us = curves.fit_streaming(kept, bandwidth)
        fit.errors["streaming kernels"] = CurveErrors.compare(
            curves.predict_streaming(held_out, trial_share, trial_us, bandwidth), held_out.seconds.to_numpy(dtype=float)
        )
        share, kernel_us = curves.fit_streaming(norms, bandwidth)
        source = f"fitted: {len(norms)} fused norms, https://github.com/NVIDIA/cudnn-frontend ({MICRO})"
        fit.set("speeds.memory_efficiency", round_number(share), source)
        fit.set("speeds.launch.kernel_us", round_number(kernel_us), source)
        relative = {
            name: round_number(min(1.0, rate / bandwidth / share))
            for name, rate in points.read_norm_bandwidths(names).items()
        }
        source = f"fitted: PyTorch's norms, https://github.com/NVIDIA/cudnn-frontend ({MICRO}); the others are rough"
        fit.set("speeds.operators", {**OPERATOR_BANDWIDTH_SHARES, **relative}, source)
    elif shares := points.read_best_bandwidth_shares(names):
        source = f"fitted: the best of {len(shares)} elementwise kernels or copies ({MICRO})"
        fit.set("speeds.memory_efficiency", round_number(max(shares)), source)


def _assume_memory(fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> None:
    for place in ("speeds.memory_efficiency", "speeds.launch.kernel_us"):
        if place in fit.values:
            continue
        groups = [*list_similar_devices(fit.hardware.name), tuple(fits)]
        value, text = take_median(fit, fits, functools.partial(_find_fitted, place), groups)
        if value is not None:
            fit.set(place, value, f"assumed: {text}")
    if "speeds.operators" not in fit.values:
        _assume_norms(fit, fits)


def _assume_norms(fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> None:
    """PyTorch's norms as fast per multiprocessor as where they were timed: they are not bound by memory."""
    assert fit.hardware.memory_bandwidth_gb_s is not None
    share = fit.values.get("speeds.memory_efficiency")
    timed = {name: points.read_norm_bandwidths(POINT_NAMES[name]) for name in fits if name in POINT_NAMES}
    rates_by_operator: dict[str, list[float]] = {}
    for name, rates in timed.items():
        for operator, rate in rates.items():
            rates_by_operator.setdefault(operator, []).append(rate / count_multiprocessors(fits[name]))
    if not rates_by_operator or not isinstance(share, float):
        return
    reachable = fit.hardware.memory_bandwidth_gb_s * share
    relative = {
        operator: round_number(min(1.0, statistics.median(rates) * count_multiprocessors(fit) / reachable))
        for operator, rates in rates_by_operator.items()
    }
    others = ", ".join(name for name, rates in timed.items() if rates)
    source = f"assumed: norms per multiprocessor as on {others}; the others are rough"
    fit.set("speeds.operators", {**OPERATOR_BANDWIDTH_SHARES, **relative}, source)


def _find_fitted(name: str, fit: DeviceFit) -> object:
    return None if fit.sources.get(name, "assumed").startswith("assumed") else fit.values[name]


# --- Collectives inside a node.


def _fit_links(fit: DeviceFit) -> None:
    name = LINK_POINTS.get(fit.hardware.name)
    if name is None:
        return
    assert fit.hardware.speeds is not None
    timed, links = points.read_collectives(name), fit.hardware.speeds.links
    kept, held_out = curves.hold_out_third(timed)
    fit.errors["collectives"] = CurveErrors.compare(
        curves.predict_collectives(held_out, curves.fit_links(kept, links)), held_out.seconds.to_numpy(dtype=float)
    )
    fitted: LinkSpeeds = curves.fit_links(timed, links)
    source = f"fitted: {len(timed)} collectives, https://github.com/ai-dynamo/aiconfigurator ({MICRO})"
    assert fitted.gpu_group_share is not None
    shares = {size: round_number(share) for size, share in fitted.gpu_group_share.items()}
    fit.set("speeds.links.gpu_group_share", shares, source)
    for key in ("gpu_efficiency", "gpu_latency", "gpu_all_reduce"):
        fit.set(f"speeds.links.{key}", round_number(getattr(fitted, key)), source)


def _assume_links(fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> None:
    """Shares by number of GPUs where no collective was timed; the bandwidth itself is as its file has it."""
    if fit.hardware.name in LINK_POINTS:
        return
    shares, source = dict.fromkeys(GROUP_SIZES, 1.0), "assumed: the same for any number of GPUs"
    timed = [fits[name].values["speeds.links.gpu_group_share"] for name in PCIE_POINTS if name in fits]
    if fit.hardware.name in PCIE_THROUGH_HOST and timed:
        for size in GROUP_SIZES:
            shares[size] = round_number(statistics.geometric_mean(by_size[size] for by_size in timed))  # type: ignore[index]
        source = f"assumed: the geometric mean of {' and '.join(PCIE_POINTS)}"
    fit.set("speeds.links.gpu_group_share", shares, source)
    fit.set("speeds.links.gpu_latency", 1.0, "assumed: NCCL's own model")
    fit.set("speeds.links.gpu_all_reduce", 1.0, "assumed: no switch adds anything up")
