"""Fused attention: what the points say of a device's kernels, and what is assumed where they say nothing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from bench.calibration.published import curves, points
from bench.calibration.published.curves import CurveErrors, round_number
from bench.calibration.published.device_fit import (
    MICRO,
    DeviceFit,
    count_multiprocessors,
    get_16_bit_efficiency,
    get_efficiency,
    get_kernels,
)
from bench.calibration.published.devices import (
    ALIGNMENT_POINTS,
    ATTENTION_KERNELS_BY_ARCHITECTURE,
    POINT_NAMES,
    find_architecture,
    list_similar_devices,
)
from bench.hardware.attention_kernels import AOTRITON, EFFICIENT, FLASH_2, TRITON_2022
from bench.hardware.speeds import AttentionKernelSpeed

TRITON_2022_SLOWDOWN = 1.8
"""FlashAttention-2 against the kernel in Triton: 1.3 to 2.5 times faster, here the geometric mean (arXiv:2307.08691,
section 4.1)."""

MEASURED_DEVICE, MEASURED_POINTS = "h200", "results/calibration/h200_kernels.csv"
"""Where the memory-efficient kernel was timed with the bias that it is there for."""

SDPA_SOURCE = (
    "https://github.com/pytorch/pytorch/issues/169849 (what PyTorch picks: bench/hardware/attention_kernels.py)"
)


def fit_attention(fit: DeviceFit) -> None:
    architecture, names = find_architecture(fit.hardware.name), POINT_NAMES.get(fit.hardware.name, ())
    assert architecture is not None
    assert fit.hardware.speeds is not None
    assert fit.hardware.speeds.matmul is not None
    multiprocessors = fit.hardware.speeds.matmul.multiprocessors
    timed = points.read_attention(names)
    kernels: dict[str, dict[str, float]] = {}
    for name in ATTENTION_KERNELS_BY_ARCHITECTURE[architecture]:
        own = timed[timed.kernel == name].reset_index(drop=True)
        if own.empty or (own.is_engine.all() and name != ATTENTION_KERNELS_BY_ARCHITECTURE[architecture][0]):
            continue
        kept, held_out = curves.hold_out_third(own)
        trial, overhead_us = curves.fit_attention(kept, multiprocessors, fit.peak_tflops)
        fit.errors[f"attention {name}"] = CurveErrors.compare(
            curves.predict_attention(held_out, trial, multiprocessors, fit.peak_tflops, overhead_us),
            curves.count_attention_seconds(held_out),
        )
        speed, _ = curves.fit_attention(own, multiprocessors, fit.peak_tflops)
        kernels[name] = _round_kernel(speed)
        if not own.is_backward.any():
            del kernels[name]["backward"]
        urls = sorted({_shorten_url(url) for url in own.source_url})
        fit.sources[f"speeds.attention.kernels.{name}"] = f"fitted: {len(own)} timings, {', '.join(urls)} ({MICRO})"
    fit.values["speeds.attention.kernels"] = kernels


def _shorten_url(url: str) -> str:
    """A repository's address; others as they are."""
    return "/".join(url.split("/")[:5]) if "/blob/" in url else url


def _round_kernel(speed: AttentionKernelSpeed) -> dict[str, float]:
    return {name: round_number(value) for name, value in dataclasses.asdict(speed).items() if name != "sustained_share"}


def assume_attention(fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> None:
    """Kernels and passes that were not timed on the device."""
    architecture = find_architecture(fit.hardware.name)
    assert architecture is not None
    own = get_kernels(fit)
    complete: dict[str, dict[str, float]] = {}
    for name in ATTENTION_KERNELS_BY_ARCHITECTURE[architecture]:
        place = f"speeds.attention.kernels.{name}"
        if name in own and "backward" in own[name]:
            complete[name] = own[name]
        elif name in own:
            ratio, text = _find_backward_ratio(name, fits)
            complete[name] = {**own[name], "backward": round_number(own[name]["forward"] * ratio)}
            fit.sources[place] += f"; backward assumed: its ratio to forward on {text}"
        else:
            complete[name], fit.sources[place] = _assume_kernel(name, fit, fits, complete)
    # By name on devices without FlashAttention, whose description may be like that of one that has it.
    choice = "auto" if FLASH_2 in complete else next(iter(complete))
    fit.set("speeds.attention.kernel", choice, SDPA_SOURCE)
    fit.values["speeds.attention.kernels"] = {
        name: {key: numbers[key] for key in ("forward", "backward", "half_width", "half_length")}
        for name, numbers in complete.items()
    }


def _assume_kernel(
    name: str, fit: DeviceFit, fits: Mapping[str, DeviceFit], known: Mapping[str, dict[str, float]]
) -> tuple[dict[str, float], str]:
    if name in (EFFICIENT, TRITON_2022, AOTRITON):
        base, text = (known[FLASH_2], "here") if FLASH_2 in known else _take_kernel_median(FLASH_2, fit, fits)
        forward, backward, reason = 1.0, 1.0, "AMD's share of the peak is that of FlashAttention-2"
        is_like_measured = find_architecture(fit.hardware.name) == find_architecture(MEASURED_DEVICE)
        if name == EFFICIENT and is_like_measured and MEASURED_DEVICE in fits:
            forward, backward = _measure_efficient_ratios(base, fits[MEASURED_DEVICE])
            reason = f"ratio to FlashAttention-2 of T5's kernels on an H200 ({MEASURED_POINTS})"
        elif name == EFFICIENT:
            forward, backward = points.read_efficient_ratios()
            reason = "ratio to FlashAttention-2, https://github.com/Dao-AILab/flash-attention/issues/416"
        elif name == TRITON_2022:
            forward = backward = 1 / TRITON_2022_SLOWDOWN
            reason = "FlashAttention-2 is 1.3 to 2.5 times faster, arXiv:2307.08691"
        scaled = {
            "forward": round_number(base["forward"] * forward),
            "backward": round_number(base["backward"] * backward),
        }
        return {**base, **scaled}, f"assumed: {reason}, which is as {text}"
    numbers, text = _take_kernel_median(name, fit, fits)
    return numbers, f"assumed: as {text}"


def _measure_efficient_ratios(flash: Mapping[str, float], measured: DeviceFit) -> tuple[float, float]:
    """Speed of the memory-efficient kernel forward and backward, as a multiple of what FlashAttention-2 would reach."""
    timed = points.read_attention([ALIGNMENT_POINTS[MEASURED_DEVICE]])
    flash_seconds = curves.predict_attention(
        timed, AttentionKernelSpeed(**flash), count_multiprocessors(measured), measured.peak_tflops
    )
    ratios = flash_seconds / curves.count_attention_seconds(timed)
    forward, backward = (float(ratios[timed.is_backward == is_backward].mean()) for is_backward in (False, True))
    return forward, backward


def _take_kernel_median(name: str, fit: DeviceFit, fits: Mapping[str, DeviceFit]) -> tuple[dict[str, float], str]:
    """Of devices like this one, else of all that have the kernel; slower as products are, where they are slower."""
    for group in [*list_similar_devices(fit.hardware.name), tuple(fits)]:
        others = [fits[other] for other in group if other in fits and _is_kernel_fitted(fits[other], name)]
        if others:
            kernels = [get_kernels(other)[name] for other in others]
            numbers = {key: statistics.median(kernel[key] for kernel in kernels) for key in kernels[0]}
            theirs = statistics.median(get_16_bit_efficiency(get_efficiency(other)) for other in others)
            slowdown = min(1.0, get_16_bit_efficiency(get_efficiency(fit)) / theirs)
            numbers |= {key: numbers[key] * slowdown for key in ("forward", "backward")}
            return (
                {key: round_number(value) for key, value in numbers.items()},
                f"on {', '.join(other.hardware.name for other in others)}, less what products lose against theirs",
            )
    raise ValueError(f"no described device has timings of the attention kernel {name}")


def _find_backward_ratio(name: str, fits: Mapping[str, DeviceFit]) -> tuple[float, str]:
    others = [fit for fit in fits.values() if _is_kernel_fitted(fit, name)]
    ratios = [get_kernels(fit)[name]["backward"] / get_kernels(fit)[name]["forward"] for fit in others]
    return statistics.median(ratios), ", ".join(fit.hardware.name for fit in others)


def _is_kernel_fitted(fit: DeviceFit, name: str) -> bool:
    source = fit.sources.get(f"speeds.attention.kernels.{name}", "assumed")
    return source.startswith("fitted") and "assumed" not in source and "backward" in get_kernels(fit)[name]
