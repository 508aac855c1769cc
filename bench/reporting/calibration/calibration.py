"""What a calibration leaves behind: the hardware file, the timings, the curves, and a table of it all."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import RenderableType
from rich.table import Table

from bench.calibration.expected import predict_sample_seconds
from bench.calibration.fit_compute import FitResidual
from bench.calibration.fit_links import count_bus_bytes
from bench.calibration.hardware_file import CalibrationProvenance
from bench.calibration.sample import ATTENTION, COLLECTIVE, MATMUL, MEMORY, OPERATOR, OPTIMIZER, CalibrationSample
from bench.hardware import Hardware
from bench.hardware.hardware_file import format_hardware_yaml
from bench.hardware.speeds import GlooSpeed
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import Drawing, compute_header_height_in, create_figure, draw_header, save_drawing

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


# --- Figures of a calibration: what was timed as points, what the fitted numbers say of it as lines.

PANEL_HEIGHT_IN = 2.4
"""Height of a panel without its key."""
LEGEND_LINE_HEIGHT_IN = 0.19
MAX_SERIES = 6
"""Curves of a panel: those that took longest."""

SERIES_COLOURS = ("#1a55f0", "#a44d1e", "#24a450", "#878787", "#a72bbd", "#ad7f24")
"""Readable on white and on black; markers and dashes say the same without colour."""
SERIES_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)), (0, (1, 2)))

MAX_THREE_COLUMN_CHARS = 15
"""Letters of a name of which three fit side by side in a key."""


@dataclass(frozen=True)
class _CurveFigure:
    """What one figure shows, and how."""

    kinds: tuple[str, ...]
    name: str
    title: str
    x_label: str
    y_label_prefix: str
    unit: str
    """Of work, to which ``G`` or ``T`` is added."""
    get_x: Callable[[CalibrationSample], float]
    get_work: Callable[[CalibrationSample], float]
    get_panel: Callable[[CalibrationSample], str]
    get_series: Callable[[CalibrationSample], str]


def _describe_collective_group(sample: CalibrationSample) -> str:
    nodes = -(-sample.ranks // sample.ranks_per_node)
    return f"{sample.ranks} ranks on {nodes} node{'s' * (nodes > 1)}"


CURVE_FIGURES = (
    _CurveFigure(
        (MATMUL,),
        "matmul",
        "Matrix products",
        "size of the product, (batch m n k)$^{1/3}$",
        "",
        "FLOP/s",
        lambda sample: float(sample.flops / 2) ** (1 / 3),
        lambda sample: sample.flops,
        lambda sample: sample.format,
        lambda sample: sample.name,
    ),
    _CurveFigure(
        (ATTENTION,),
        "attention",
        "Fused attention",
        "floating-point operations of one call",
        "",
        "FLOP/s",
        lambda sample: sample.flops,
        lambda sample: sample.flops,
        lambda sample: sample.format,
        lambda sample: sample.name,
    ),
    _CurveFigure(
        (MEMORY, OPERATOR),
        "memory",
        "Operators bound by memory",
        "bytes read and written by one call",
        "",
        "B/s",
        lambda sample: sample.bytes_moved,
        lambda sample: sample.bytes_moved,
        lambda sample: sample.format,
        lambda sample: sample.name,
    ),
    _CurveFigure(
        (OPTIMIZER,),
        "optimizer",
        "Optimizers",
        "bytes read and written by one step",
        "",
        "B/s",
        lambda sample: sample.bytes_moved,
        lambda sample: sample.bytes_moved,
        lambda sample: "",
        lambda sample: sample.name,
    ),
    _CurveFigure(
        (COLLECTIVE,),
        "collectives",
        "Collectives",
        "bytes of the whole message",
        "bus bandwidth, ",
        "B/s",
        lambda sample: sample.bytes_moved,
        count_bus_bytes,
        _describe_collective_group,
        lambda sample: sample.name,
    ),
)


def draw_curves(samples: Sequence[CalibrationSample], hardware: Hardware, name: str, origin: str) -> list[Drawing]:
    """A figure for each kind of measurement that there is.

    Parameters
    ----------
    hardware: Hardware
        With the fitted numbers, for the lines.
    name: str
        Beginning of the figures' file names.
    origin: str
        Where and when it was measured: a line below each title.
    """
    drawings = []
    for curve_figure in CURVE_FIGURES:
        figure_samples = [
            sample for sample in samples if sample.kind in curve_figure.kinds and curve_figure.get_work(sample) > 0
        ]
        if figure_samples:
            drawings.append(_draw_curve_figure(curve_figure, figure_samples, hardware, name, origin))
    return drawings


def _draw_curve_figure(
    curve_figure: _CurveFigure, samples: Sequence[CalibrationSample], hardware: Hardware, name: str, origin: str
) -> Drawing:
    panels = {
        panel_name: _select_longest_series(curve_figure, samples, panel_name)
        for panel_name in dict.fromkeys(map(curve_figure.get_panel, samples))
    }
    shown_samples = [sample for panel_samples in panels.values() for sample in panel_samples]
    left_out_count = len({*map(curve_figure.get_series, samples)} - {*map(curve_figure.get_series, shown_samples)})
    subtitle = f"{origin}\nPoints: measured (median). Lines: what the fitted numbers say."
    subtitle += f"\n{left_out_count} more took less time in all: see the JSON file." if left_out_count else ""
    names_by_panel = [{*map(curve_figure.get_series, panel_samples)} for panel_samples in panels.values()]
    legend_heights = [
        -(-len(panel_names) // _count_legend_columns(panel_names)) * LEGEND_LINE_HEIGHT_IN
        for panel_names in names_by_panel
    ]
    height = compute_header_height_in(curve_figure.title, subtitle, style.FIGURE_WIDTH_IN) + sum(
        PANEL_HEIGHT_IN + legend_height for legend_height in legend_heights
    )
    fastest_sample = max(shown_samples, key=lambda sample: curve_figure.get_work(sample) / sample.median_s)
    best_rate = curve_figure.get_work(fastest_sample) / fastest_sample.median_s
    scale, unit = (1e12, f"T{curve_figure.unit}") if best_rate >= 1e12 else (1e9, f"G{curve_figure.unit}")
    with style.apply_report_style():
        figure = create_figure(style.FIGURE_WIDTH_IN, height)
        panel_axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (heading, panel_samples) in zip(panel_axes, panels.items(), strict=True):
            _draw_panel(axes, curve_figure, panel_samples, hardware, scale)
            axes.set_title(heading, fontsize=8.5)
            axes.set_ylabel(curve_figure.y_label_prefix + unit)
        panel_axes[-1].set_xlabel(curve_figure.x_label, loc="left")
        draw_header(figure, curve_figure.title, subtitle)
    alt = (
        f"{curve_figure.y_label_prefix}{unit} over {curve_figure.x_label} of {len(shown_samples)} measurements, in "
        f"{len(panels)} panels. "
        f"Fastest: {curve_figure.get_panel(fastest_sample)} {curve_figure.get_series(fastest_sample)}, "
        f"{best_rate / scale:.3g} {unit}."
    )
    return Drawing(f"{name}-{curve_figure.name}", curve_figure.title, figure, alt, alt)


def _select_longest_series(
    curve_figure: _CurveFigure, samples: Sequence[CalibrationSample], panel_name: str
) -> list[CalibrationSample]:
    """The samples of a panel, of the curves that took longest."""
    panel_samples = [sample for sample in samples if curve_figure.get_panel(sample) == panel_name]
    spent_s: dict[str, float] = {}
    for sample in panel_samples:
        spent_s[curve_figure.get_series(sample)] = spent_s.get(curve_figure.get_series(sample), 0.0) + sample.median_s
    kept_series = sorted(spent_s, key=lambda name: -spent_s[name])[:MAX_SERIES]
    return [sample for sample in panel_samples if curve_figure.get_series(sample) in kept_series]


def _draw_panel(
    axes: Axes, curve_figure: _CurveFigure, samples: Sequence[CalibrationSample], hardware: Hardware, scale: float
) -> None:
    names = list(dict.fromkeys(curve_figure.get_series(sample) for sample in samples))
    legend_handles = []
    for name, colour, marker, dash in zip(names, SERIES_COLOURS, style.MARKERS, SERIES_DASHES, strict=False):
        series_samples = [sample for sample in samples if curve_figure.get_series(sample) == name]
        marker_options: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.0}
        marker_options["markerfacecolor"] = style.lighten_colour(colour, 0.35)
        x = [curve_figure.get_x(sample) for sample in series_samples]
        y = [curve_figure.get_work(sample) / sample.median_s / scale for sample in series_samples]
        axes.plot(x, y, linestyle="", markeredgewidth=0.8, zorder=3, **marker_options)
        fitted_line = _compute_fitted_line(curve_figure, series_samples, hardware, scale)
        axes.plot(*fitted_line, color=colour, linewidth=1.1, linestyle=dash, zorder=2)
        legend_handles.append(
            Line2D([], [], label=name, linestyle=dash if fitted_line[0] else "", linewidth=1.1, **marker_options)
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _set_ticks(axes.xaxis, axes.get_xlim())
    _set_ticks(axes.yaxis, axes.get_ylim())
    axes.grid(visible=True)
    axes.tick_params(labelbottom=True)
    axes.legend(
        handles=legend_handles, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=_count_legend_columns(names)
    )


def _compute_fitted_line(
    curve_figure: _CurveFigure, samples: Sequence[CalibrationSample], hardware: Hardware, scale: float
) -> tuple[list[float], list[float]]:
    """What the fitted numbers say, the geometric mean where several shapes are of one size."""
    log_rates_by_x: dict[float, list[float]] = {}
    for sample in samples:
        explained_s = predict_sample_seconds(sample, hardware)
        if explained_s is not None:
            log_rates_by_x.setdefault(float(f"{curve_figure.get_x(sample):.2g}"), []).append(
                math.log(curve_figure.get_work(sample) / explained_s / scale)
            )
    return sorted(log_rates_by_x), [
        math.exp(sum(log_rates_by_x[x]) / len(log_rates_by_x[x])) for x in sorted(log_rates_by_x)
    ]


def _count_legend_columns(names: Iterable[str]) -> int:
    """Of a key that is no wider than the figure."""
    return 3 if max(map(len, names)) <= MAX_THREE_COLUMN_CHARS else 2


def _set_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Few labels, and more than one."""
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if limits[1] / limits[0] < 100 else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _format_tick(value)))
    axis.set_minor_formatter(NullFormatter())


def _format_tick(value: float) -> str:
    """A tick's value: ``1 k``, ``10 M``, ``0.01``."""
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:g} {unit}"
    return f"{value:g}"
