"""What a calibration leaves behind: the hardware file, the timings, the curves, and a table of it all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from bench.calibration.fit_compute import FitResidual
from bench.calibration.hardware_file import CalibrationProvenance
from bench.calibration.sample import CalibrationSample
from bench.hardware import Hardware
from bench.hardware.hardware_file import format_hardware_yaml
from bench.hardware.speeds import GlooSpeed
from bench.reporting.calibration.curves import draw_curves
from bench.reporting.drawing.drawing import save_drawing

MAX_LISTED_VALUES = 8
"""Numbers of one kind that a table gives one by one."""


def write_calibration(
    path: Path, hardware: Hardware, facts: CalibrationProvenance, samples: Sequence[CalibrationSample]
) -> list[Path]:
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
    timings_path = path.with_suffix(".json")
    values = {"facts": dataclasses.asdict(facts), "samples": [dataclasses.asdict(sample) for sample in samples]}
    timings_path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    picture_paths = []
    origin = f"{hardware.name}: {facts.device}, {facts.processes}, {facts.date}"
    for drawing in draw_curves(samples, hardware, path.stem, origin):
        save_drawing(drawing, path.parent)
        picture_paths += [path.parent / f"{drawing.name}{ending}" for ending in (".png", ".svg")]
    heading = f"Written by python -m bench.calibrate, {facts.date}. What was timed is in {timings_path.name}."
    with path.open("x", encoding="utf-8") as file:
        file.write(format_hardware_yaml(hardware, heading))
    return [path, timings_path, *picture_paths]


def build_calibration_tables(hardware: Hardware, residuals: Mapping[str, FitResidual]) -> list[RenderableType]:
    """What was found, how well it explains what was timed, and what was not measured."""
    speed_table = Table("measured", "", box=None, pad_edge=False)
    unmeasured_names = []
    for name, value in _list_speeds(hardware):
        source = hardware.sources.get(name, "")
        if source.startswith("measured"):
            speed_table.add_row(name, value)
        else:
            unmeasured_names.append(name)
    fit_table = Table("how far off the fit is", "mean", "worst", "timings", box=None, pad_edge=False)
    for operation, residual in residuals.items():
        fit_table.add_row(
            operation, f"{100 * residual.mean_error:.1f} %", f"{100 * residual.max_error:.0f} %", str(residual.count)
        )
    return [
        speed_table,
        "",
        fit_table,
        "",
        f"Not measured (the file says where they come from): {', '.join(unmeasured_names)}.",
    ]


def _list_speeds(hardware: Hardware) -> list[tuple[str, str]]:
    """Dotted names and values of what is known of a device's speed."""
    speeds = [("memory_bandwidth_gb_s", _format_value(hardware.memory_bandwidth_gb_s))]
    return [*speeds, *_flatten_section(hardware.speeds, "speeds")]


def _flatten_section(section: Any, prefix: str) -> list[tuple[str, str]]:
    speeds = []
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}.{field.name}"
        if isinstance(value, GlooSpeed):  # one source for all of it
            speeds.append((name, _format_value(dataclasses.asdict(value))))
        elif dataclasses.is_dataclass(value):
            speeds += _flatten_section(value, name)
        elif value is not None:
            speeds.append((name, _format_value(value)))
    return speeds


def _format_value(value: object) -> str:
    if isinstance(value, dict) and len(value) > MAX_LISTED_VALUES:
        return f"{len(value)}, from {min(value.values()):.3g} to {max(value.values()):.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(number)}" for name, number in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
