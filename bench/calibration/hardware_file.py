"""What was fitted as a description of hardware: every number with where it comes from."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.calibration.fit_compute import ComputeFit, FitResidual
from bench.calibration.fit_links import LinksFit
from bench.core.units import GIB
from bench.hardware import Hardware, HardwareSpeeds
from bench.hardware.speeds import LinkSpeeds, MemoryOutsideAllocator
from bench.rank import environment


@dataclass(frozen=True)
class CalibrationProvenance:
    """What a reader must know to trust a calibration, or to repeat it. No part of any run's identity."""

    date: str
    host: str
    device: str
    """As it calls itself."""
    processes: str
    """Who communicated, in words."""
    versions: dict[str, str]
    commit: str

    @classmethod
    def from_environment(cls, device: torch.device, processes: str) -> CalibrationProvenance:
        """Of this process, here and now."""
        software, commit, device_report = (
            environment.describe_software(),
            environment.find_commit(),
            environment.describe_devices([device]),
        )
        versions = {
            "torch": software["torch"],
            "transformers": software["packages"]["transformers"],
            "CUDA": software["cuda"],
            "NCCL": software["nccl"],
            "driver": device_report.get("driver"),
            "Python": software["python"],
        }
        changed_suffix = ", changed since" if commit["git_clean"] is False else ""
        return cls(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            host=environment.get_host_name(),
            device=str(device_report["name"]),
            processes=processes,
            versions={name: str(version) for name, version in versions.items() if version},
            commit=f"{commit['git_sha'] or 'unknown'}{changed_suffix}",
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date} on host {self.host} ({self.device}), {self.processes}; {versions}; commit {self.commit}"


# --- What was fitted as a description of hardware: every number with where it comes from.

CALIBRATION_KEY = "calibration"
"""Key of `Hardware.sources` for when, where and with what it was made."""


@dataclass(frozen=True)
class BaselineHardware:
    """What is taken for what was not measured."""

    hardware: Hardware
    """The description that the calibration begins with."""
    speeds: HardwareSpeeds | None
    """Its speeds, or those of a similar device; None where nobody knows."""
    name: str
    """How to name where `speeds` comes from."""


MEASURED_SOURCE = "measured, see calibration"

ASSUMED_SOURCES = {
    "speeds.launch.unit_us": "assumed: FSDP's hooks, which one process alone does not run",
    "speeds.overlap_loss": "assumed: nothing was measured beside communication",
    "speeds.outside.device_gib": "as the operating system says",
    "speeds.outside.context_gib": "a processor has none",
    "speeds.outside.communicator_gib": "not counted on a processor",
}
"""What is said of numbers that a calibration sets where nothing is known of them, and does not measure."""


def build_calibrated_hardware(
    name: str,
    baseline: BaselineHardware,
    compute_fit: ComputeFit | None,
    links_fit: LinksFit | None,
    provenance: CalibrationProvenance,
) -> Hardware:
    """The complete description of a device that was calibrated.

    Parameters
    ----------
    name: str
        Of the description.
    compute_fit, links_fit: ComputeFit, LinksFit or None
        What was fitted; None where nothing was measured and `baseline` has to do.

    Raises
    ------
    ValueError
        If `baseline` has no speeds and not everything was measured.
    """
    base_hardware, speeds = baseline.hardware, baseline.speeds
    if speeds is None and (compute_fit is None or links_fit is None):
        raise ValueError("nothing is known of what was not measured")
    fitted_links = links_fit.links if links_fit else speeds.links if speeds else None
    assert fitted_links is not None
    changes: dict[str, Any] = {}
    if compute_fit is not None:
        speeds = compute_fit.build_speeds(fitted_links, _choose_outside(baseline))
        changes["memory_bandwidth_gb_s"] = compute_fit.memory_bandwidth_gb_s
    assert speeds is not None
    speeds = dataclasses.replace(speeds, links=fitted_links)
    sources = _list_sources(base_hardware.sources, speeds, baseline)
    if base_hardware.memory_bandwidth_gb_s is None and compute_fit is not None:
        sources["memory_bandwidth_gb_s"] = MEASURED_SOURCE
    sources |= {f"speeds.links.{field}": source for field, source in (links_fit.sources if links_fit else {}).items()}
    sources[CALIBRATION_KEY] = str(provenance)
    residuals: Mapping[str, FitResidual] = {
        **(compute_fit.residuals if compute_fit else {}),
        **(links_fit.residuals if links_fit else {}),
    }
    sources |= {
        f"residual of {residual_name}": format_residual(residual) for residual_name, residual in residuals.items()
    }
    return dataclasses.replace(base_hardware, name=name, speeds=speeds, sources=sources, **changes)


def format_residual(residual: FitResidual) -> str:
    """How well the numbers explain what was measured, in words."""
    return f"mean {100 * residual.mean_error:.1f} %, worst {100 * residual.max_error:.0f} % of {residual.count} timings"


def _choose_outside(baseline: BaselineHardware) -> MemoryOutsideAllocator:
    """Memory outside the allocator: what is known of the device, or a processor's, where there is nothing of it."""
    if baseline.speeds is not None:
        return baseline.speeds.outside
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryOutsideAllocator(device_gib=round(memory_bytes / GIB, 1), context_gib=0.0, communicator_gib=0.0)


def _list_sources(
    base_sources: Mapping[str, str], speeds: HardwareSpeeds, baseline: BaselineHardware
) -> dict[str, str]:
    """Where each number of the speeds comes from; what is not as it was known has been measured."""
    base_numbers = _flatten_numbers(baseline.speeds) if baseline.speeds else {}
    fitted_numbers = _flatten_numbers(speeds)
    kept_fields = {
        field for field, value in fitted_numbers.items() if field in base_numbers and base_numbers[field] == value
    }
    sources = {
        field: f"not measured: as in {baseline.name}" if source == MEASURED_SOURCE else source
        for field, source in base_sources.items()
        if not any(
            changed_field == field or changed_field.startswith(f"{field}.")
            for changed_field in fitted_numbers.keys() - kept_fields
        )
    }
    if CALIBRATION_KEY in sources:
        sources[f"{CALIBRATION_KEY} of {baseline.name}"] = sources[CALIBRATION_KEY]
    for field in fitted_numbers:
        if field in kept_fields and not any(f"{field}.".startswith(f"{sourced_field}.") for sourced_field in sources):
            sources[field] = f"not measured: as in {baseline.name}"
        elif field not in kept_fields:
            sources[field] = ASSUMED_SOURCES.get(field, MEASURED_SOURCE)
    return sources


def _flatten_numbers(instance: Any, prefix: str = "speeds") -> dict[str, Any]:
    """Every field of nested dataclasses by its dotted name, links left out, which have sources of their own."""
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(instance):
        value, name = getattr(instance, field.name), f"{prefix}.{field.name}"
        if isinstance(value, LinkSpeeds):
            continue
        if dataclasses.is_dataclass(value):
            numbers |= _flatten_numbers(value, name)
        elif value is not None:
            numbers[name] = value
    return numbers
