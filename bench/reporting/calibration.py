"""What a calibration leaves behind: the hardware file, the timings, the curves, and a table of it all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from bench.calibration.facts import Facts
from bench.calibration.fit_compute import Residual
from bench.calibration.sample import Sample
from bench.hardware import Hardware
from bench.hardware.file import as_yaml
from bench.hardware.speeds import Gloo
from bench.reporting.curves import curves
from bench.reporting.drawing import save

MOST_LISTED = 8
"""Numbers of one kind that a table gives one by one."""


def write_calibration(path: Path, hardware: Hardware, facts: Facts, samples: Sequence[Sample]) -> list[Path]:
    """Write everything beside each other, the hardware file last: where it is, all is.

    Parameters
    ----------
    path: Path
        Of the hardware file, which must not exist.

    Returns
    -------
    list of Path
        The hardware file, the timings as JSON, the curves as PNG and SVG.
    """
    timings = path.with_suffix(".json")
    values = {"facts": dataclasses.asdict(facts), "samples": [dataclasses.asdict(sample) for sample in samples]}
    timings.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    pictures = []
    origin = f"{hardware.name}: {facts.device}, {facts.processes}, {facts.date}"
    for drawing in curves(samples, hardware, path.stem, origin):
        save(drawing, path.parent)
        pictures += [path.parent / f"{drawing.name}{ending}" for ending in (".png", ".svg")]
    heading = f"Written by python -m bench.calibrate, {facts.date}. What was timed is in {timings.name}."
    with path.open("x", encoding="utf-8") as file:
        file.write(as_yaml(hardware, heading))
    return [path, timings, *pictures]


def found_tables(hardware: Hardware, residuals: Mapping[str, Residual]) -> list[RenderableType]:
    """What was found, how well it explains what was timed, and what was not measured."""
    numbers = Table("measured", "", box=None, pad_edge=False)
    others = []
    for name, value in _numbers(hardware):
        source = hardware.sources.get(name, "")
        if source.startswith("measured"):
            numbers.add_row(name, value)
        else:
            others.append(name)
    fits = Table("how far off the fit is", "mean", "worst", "timings", box=None, pad_edge=False)
    for what, residual in residuals.items():
        fits.add_row(what, f"{100 * residual.mean:.1f} %", f"{100 * residual.worst:.0f} %", str(residual.count))
    return [numbers, "", fits, "", f"Not measured (the file says where they come from): {', '.join(others)}."]


def _numbers(hardware: Hardware) -> list[tuple[str, str]]:
    """Dotted names and values of what is known of a device's speed."""
    found = [("memory_bandwidth_gb_s", _short(hardware.memory_bandwidth_gb_s))]
    return [*found, *_flat(hardware.speeds, "speeds")]


def _flat(section: Any, prefix: str) -> list[tuple[str, str]]:
    found = []
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}.{field.name}"
        if isinstance(value, Gloo):  # one source for all of it
            found.append((name, _short(dataclasses.asdict(value))))
        elif dataclasses.is_dataclass(value):
            found += _flat(value, name)
        elif value is not None:
            found.append((name, _short(value)))
    return found


def _short(value: object) -> str:
    if isinstance(value, dict) and len(value) > MOST_LISTED:
        return f"{len(value)}, from {min(value.values()):.3g} to {max(value.values()):.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(number)}" for name, number in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
