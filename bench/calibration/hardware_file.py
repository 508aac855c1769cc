"""What was fitted as a description of hardware: every number with where it comes from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.calibration.facts import Facts
from bench.calibration.fit_compute import ComputeFit, Residual
from bench.calibration.fit_links import LinksFit
from bench.hardware import Hardware, Speeds
from bench.hardware.speeds import Links, Outside

GIB = 2**30

CALIBRATION = "calibration"
"""Key of `Hardware.sources` for when, where and with what it was made."""


@dataclass(frozen=True)
class Known:
    """What is taken for what was not measured."""

    hardware: Hardware
    """The description that the calibration begins with."""
    speeds: Speeds | None
    """Its speeds, or those of a similar device; None where nobody knows."""
    name: str
    """How to name where `speeds` comes from."""


MEASURED = "measured, see calibration"

ASSUMED = {
    "speeds.launch.unit_us": "assumed: FSDP's hooks, which one process alone does not run",
    "speeds.overlap_loss": "assumed: nothing was measured beside communication",
    "speeds.outside.device_gib": "as the operating system says",
    "speeds.outside.context_gib": "a processor has none",
    "speeds.outside.communicator_gib": "not counted on a processor",
}
"""What is said of numbers that a calibration sets where nothing is known of them, and does not measure."""


def calibrated(name: str, known: Known, compute: ComputeFit | None, links: LinksFit | None, facts: Facts) -> Hardware:
    """The complete description of a device that was calibrated.

    Parameters
    ----------
    name: str
        Of the description.
    compute, links: ComputeFit, LinksFit or None
        What was fitted; None where nothing was measured and `known` has to do.

    Raises
    ------
    ValueError
        If `known` has no speeds and not everything was measured.
    """
    base, speeds = known.hardware, known.speeds
    if speeds is None and (compute is None or links is None):
        raise ValueError("nothing is known of what was not measured")
    fitted_links = links.links if links else speeds.links if speeds else None
    assert fitted_links is not None
    changes: dict[str, Any] = {}
    if compute is not None:
        speeds = compute.speeds(fitted_links, _outside(known))
        changes["memory_bandwidth_gb_s"] = compute.memory_bandwidth_gb_s
    assert speeds is not None
    speeds = dataclasses.replace(speeds, links=fitted_links)
    sources = _sources(base.sources, speeds, known)
    if base.memory_bandwidth_gb_s is None and compute is not None:
        sources["memory_bandwidth_gb_s"] = MEASURED
    sources |= {f"speeds.links.{field}": words for field, words in (links.sources if links else {}).items()}
    sources[CALIBRATION] = str(facts)
    residuals: Mapping[str, Residual] = {**(compute.residuals if compute else {}), **(links.residuals if links else {})}
    sources |= {f"residual of {what}": explained(residual) for what, residual in residuals.items()}
    return dataclasses.replace(base, name=name, speeds=speeds, sources=sources, **changes)


def explained(residual: Residual) -> str:
    """How well the numbers explain what was measured, in words."""
    return f"mean {100 * residual.mean:.1f} %, worst {100 * residual.worst:.0f} % of {residual.count} timings"


def _outside(known: Known) -> Outside:
    """Memory outside the allocator: what is known of the device, or a processor's, where there is nothing of it."""
    if known.speeds is not None:
        return known.speeds.outside
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Outside(device_gib=round(memory / GIB, 1), context_gib=0.0, communicator_gib=0.0)


def _sources(given: Mapping[str, str], speeds: Speeds, known: Known) -> dict[str, str]:
    """Where each number of the speeds comes from; what is not as it was known has been measured."""
    before = _numbers(known.speeds) if known.speeds else {}
    after = _numbers(speeds)
    kept = {field for field, value in after.items() if field in before and before[field] == value}
    sources = {
        field: f"not measured: as in {known.name}" if words == MEASURED else words
        for field, words in given.items()
        if not any(number == field or number.startswith(f"{field}.") for number in after.keys() - kept)
    }
    if CALIBRATION in sources:
        sources[f"{CALIBRATION} of {known.name}"] = sources[CALIBRATION]
    for field in after:
        if field in kept and not any(f"{field}.".startswith(f"{said}.") for said in sources):
            sources[field] = f"not measured: as in {known.name}"
        elif field not in kept:
            sources[field] = ASSUMED.get(field, MEASURED)
    return sources


def _numbers(section: Any, prefix: str = "speeds") -> dict[str, Any]:
    """Every field of nested dataclasses by its dotted name, links left out, which have sources of their own."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}.{field.name}"
        if isinstance(value, Links):
            continue
        if dataclasses.is_dataclass(value):
            found |= _numbers(value, name)
        elif value is not None:
            found[name] = value
    return found
