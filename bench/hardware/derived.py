"""Hardware like another one: what differs is said, the rest is derived and says so."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.hardware.description import Hardware
from bench.hardware.speeds import NUMBER_FORMATS
from bench.hardware.sustained_clocks import compute_sustained_share, compute_typical_attention_share

LIKE_PREFIX = "like:"
"""Of a value of ``hardware`` that names a description to begin with: ``like:a100_80gb``."""

LIKE_FIELD = "like"
"""Field of a file that says the same."""

GIVEN_SOURCE = "given"
"""Source of a number that somebody set without one."""

ASSUMED_PREFIXES = ("assumed:", "derived:")
"""Of sources of numbers that nobody measured or published for this device."""

REFERENCE_FORMATS = ("bf16", "fp16", "fp32")
"""Formats whose ratio of peaks stands for that of formats that are not given, the first that both devices have."""

NUMERIC_SECTIONS = ("peak_tflops", "memory_gb", "memory_bandwidth_gb_s", "power_w", "speeds", "host")
"""Fields of `Hardware` that hold numbers of the device and of the machine around it."""

MATMUL, SUSTAINED_SHARE = "matmul", "sustained_share"

NAMING_FIELDS = ("name", "gpu_names", LIKE_FIELD)
"""Fields that are never those of the other description."""


def derive_hardware_values(own: Mapping[str, Any], base: Mapping[str, Any], base_name: str) -> dict[str, Any]:
    """A complete description from what differs from another one, all as plain values, none of them changed.

    Formats whose peak is not given have the base's in the ratio of the peaks of the first of `REFERENCE_FORMATS` that
    both have; null in `own` leaves a format out. Where `memory_gb` is given and not what of it the device reports, the
    latter is the same share. Shares per format cover the formats there are. All else is the base's.

    Parameters
    ----------
    own: mapping
        Fields of `Hardware`, as few as differ, and their ``sources``.
    base: mapping
        The other description, complete.
    base_name: str
        Its name, for sources.
    """
    own_sources = dict(own.get("sources") or {})
    values = _merge_over(
        {key: value for key, value in base.items() if key not in (*NAMING_FIELDS, "sources")},
        {key: value for key, value in own.items() if key not in (LIKE_FIELD, "sources")},
    )
    values = {"name": own.get("name") or f"like_{base_name}", **values}
    values.setdefault("gpu_names", [])
    own_names = {name for name, _ in list_leaves(own)}
    sources = _mark_base_sources(base, own_names, base_name) | own_sources
    sources |= {name: GIVEN_SOURCE for name in own_names if _is_numeric(name) and not find_source(own_sources, name)}
    sources |= _derive_peaks(values, own, base, base_name)
    sources |= _derive_device_memory(values, own, base, base_name)
    sources |= _cover_formats(values, base_name)
    if not any(SUSTAINED_SHARE in name for name in own_names):
        sources |= derive_sustained_shares(values, base)
    return {**values, "sources": sources}


def _merge_over(base: Any, own: Any) -> Any:
    """Values put over others, sections field by field."""
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    return {**base, **{key: _merge_over(base.get(key), value) for key, value in own.items()}}


def _mark_base_sources(base: Mapping[str, Any], own_names: set[str], base_name: str) -> dict[str, str]:
    """The sources of what is taken from the base, each as an assumption about this device."""
    base_leaves = [name for name, _ in list_leaves(base) if _is_numeric(name)]
    marked = {}
    for key, text in (base.get("sources") or {}).items():
        covered = [name for name in base_leaves if name == key or name.startswith(f"{key}.")]
        if covered and all(name in own_names for name in covered):
            continue
        is_network = text.startswith("network=")
        marked[key] = text if is_network else f"assumed: as {base_name}, {text.removeprefix('assumed: ')}"
    return marked


def _derive_peaks(
    values: dict[str, Any], own: Mapping[str, Any], base: Mapping[str, Any], base_name: str
) -> dict[str, str]:
    """Set the peaks of formats that are not given; returns their sources."""
    own_peaks, base_peaks = own.get("peak_tflops") or {}, base.get("peak_tflops") or {}
    sources = {}
    values["peak_tflops"] = {name: peak for name, peak in (values.get("peak_tflops") or {}).items() if peak is not None}
    with contextlib.suppress(TypeError, ArithmeticError):  # as typed: some may be no numbers
        reference = next(
            (name for name in REFERENCE_FORMATS if own_peaks.get(name) is not None and name in base_peaks), None
        )
        for name in base_peaks:
            if reference is None or name in own_peaks:
                continue
            values["peak_tflops"][name] = base_peaks[name] * own_peaks[reference] / base_peaks[reference]
            sources[f"peak_tflops.{name}"] = f"derived: {base_name}'s in the ratio of {reference}"
    return sources


def _derive_device_memory(
    values: dict[str, Any], own: Mapping[str, Any], base: Mapping[str, Any], base_name: str
) -> dict[str, str]:
    """Set the memory a device reports where only the nominal one is given; returns its source."""
    own_outside = (own.get("speeds") or {}).get("outside") or {}
    if own.get("memory_gb") is None or "device_gib" in own_outside:
        return {}
    with contextlib.suppress(KeyError, TypeError, ArithmeticError):
        share = base["speeds"]["outside"]["device_gib"] / base["memory_gb"]
        outside = {**values["speeds"]["outside"], "device_gib": own["memory_gb"] * share}
        values["speeds"] = {**values["speeds"], "outside": outside}
        return {"speeds.outside.device_gib": f"derived: {base_name}'s share of its memory_gb"}
    return {}


def _cover_formats(values: dict[str, Any], base_name: str) -> dict[str, str]:
    """Have shares per format cover exactly the formats there are; returns the sources of those that were added."""
    formats = list(values["peak_tflops"])
    matmul = (values.get("speeds") or {}).get("matmul")
    sources: dict[str, str] = {}
    if not isinstance(matmul, dict) or not formats:
        return sources
    covered_matmul = dict(matmul)
    for field, shares in matmul.items():
        if not isinstance(shares, dict) or not shares or not set(shares) <= set(NUMBER_FORMATS):
            continue
        usual = next(shares[name] for name in (*REFERENCE_FORMATS, *shares) if name in shares)
        covered_matmul[field] = {name: shares.get(name, usual) for name in formats}
        sources |= {
            f"speeds.matmul.{field}.{name}": "derived: the share of the other formats"
            for name in formats
            if name not in shares
        }
    values["speeds"] = {**values["speeds"], "matmul": covered_matmul}
    return sources


def derive_sustained_shares(values: dict[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """Set the shares of their burst speeds that products and attention keep up, where power differs from the base's.

    They change as the law of `bench.hardware.sustained_clocks` does; that of fp32, whose units draw less, does not.

    Returns
    -------
    dict
        The sources of what was set, by dotted name.
    """
    with contextlib.suppress(KeyError, TypeError, ArithmeticError):  # as typed: some may be no numbers
        power_w, base_power_w = values["power_w"], base["power_w"]
        if power_w == base_power_w:
            return {}
        bursts, base_bursts = _list_burst_tflops(values), _list_burst_tflops(base)
        ratios = {
            name: compute_sustained_share(power_w, tflops, is_attention=name != MATMUL)
            / compute_sustained_share(base_power_w, base_bursts.get(name, tflops), is_attention=name != MATMUL)
            for name, tflops in bursts.items()
        }

        def scale(share: float, name: str) -> float:
            return round(min(1.0, share * ratios[name]), 4)

        speeds = values["speeds"]
        matmul, attention = speeds["matmul"], speeds["attention"]
        matmul_shares = {
            name: share if name == "fp32" else scale(share, MATMUL) for name, share in matmul[SUSTAINED_SHARE].items()
        }
        kernels = {
            name: {**kernel, SUSTAINED_SHARE: scale(kernel[SUSTAINED_SHARE], name)}
            for name, kernel in attention["kernels"].items()
        }
        values["speeds"] = {
            **speeds,
            "matmul": {**matmul, SUSTAINED_SHARE: matmul_shares},
            "attention": {**attention, "kernels": kernels},
        }
        law = f"derived: {power_w:g} W instead of {base_power_w:g}, by the law of bench/hardware/sustained_clocks.py"
        names = ["matmul", *(f"attention.kernels.{name}" for name in kernels)]
        return {f"speeds.{name}.{SUSTAINED_SHARE}": law for name in names}
    return {}


def _list_burst_tflops(values: Mapping[str, Any]) -> dict[str, float]:
    """16-bit TFLOP/s in short bursts of products, and of each attention kernel by its name."""
    peak_tflops, speeds = _find_16_bit(values["peak_tflops"]), values["speeds"]
    bursts = {MATMUL: peak_tflops * _find_16_bit(speeds["matmul"]["efficiency"])}
    for name, kernel in speeds["attention"]["kernels"].items():
        bursts[name] = peak_tflops * compute_typical_attention_share(kernel)
    return bursts


def _find_16_bit(values: Mapping[str, float]) -> float:
    """That of a 16-bit format, or of fp32. KeyError where there is none of them."""
    return values[next((name for name in REFERENCE_FORMATS if name in values), REFERENCE_FORMATS[0])]


# --- Which numbers of a description nobody measured or published.


MIN_ASSUMED_SHARE = 0.5
"""Share of a description's numbers above which answers say how many are assumed."""

LIKENESS_PATTERN = re.compile(r"assumed: as (\w+), |derived: (\w+)'s ")
"""In sources, the description that a number was taken from."""


def list_numbers(hardware: Hardware) -> list[str]:
    """Dotted names of the numbers of a description, without those that are what PyTorch or NCCL has everywhere."""
    return [name for name in _list_own_numbers(hardware) if _is_numeric(name)]


def _list_own_numbers(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the numbers in a section that are not at their default."""
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _list_own_numbers(value, f"{name}.")
        elif isinstance(value, dict):
            yield from (f"{name}.{key}" for key, number in value.items() if type(number) in (int, float))
        elif type(value) in (int, float) and value != field.default:
            yield name


def list_assumed_fields(hardware: Hardware) -> list[str]:
    """Dotted names of the numbers of a description that are assumed or derived, or have no source at all."""
    return [
        name
        for name in list_numbers(hardware)
        if (find_source(hardware.sources, name) or ASSUMED_PREFIXES[0]).startswith(ASSUMED_PREFIXES)
    ]


def describe_assumed_share(hardware: Hardware) -> str | None:
    """How much of a description nobody measured or published, in a sentence without a full stop; None where that is
    less than `MIN_ASSUMED_SHARE` and nothing is derived."""
    numbers, assumed = list_numbers(hardware), list_assumed_fields(hardware)
    is_derived = any(text.startswith("derived:") for text in hardware.sources.values())
    if not assumed or (len(assumed) < MIN_ASSUMED_SHARE * len(numbers) and not is_derived):
        return None
    matches = map(LIKENESS_PATTERN.match, hardware.sources.values())
    base_names = sorted({match[1] or match[2] for match in matches if match is not None})
    like_text = f", from {' and '.join(base_names)}" if base_names else ""
    return f"{len(assumed)} of the {len(numbers)} numbers of hardware={hardware.name} are assumed or derived{like_text}"


def find_source(sources: Mapping[str, str], name: str) -> str | None:
    """The source of a number: its own, or that of the innermost section it is in; None where there is none."""
    while name not in sources:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return sources[name]


def _is_numeric(name: str) -> bool:
    return name.partition(".")[0] in NUMERIC_SECTIONS


def list_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all that is no section in nested values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from list_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
