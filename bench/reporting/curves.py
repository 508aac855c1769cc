"""Figures of a calibration: what was timed as points, what the fitted numbers say of it as lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.calibration.expected import explained_seconds
from bench.calibration.fit_links import bus_bytes
from bench.calibration.sample import ATTENTION, COLLECTIVE, MATMUL, MEMORY, OPERATOR, OPTIMIZER, Sample
from bench.hardware import Hardware
from bench.reporting import style
from bench.reporting.drawing import Drawing, header, header_height_in, new_figure

PANEL_IN = 2.4
"""Height of a panel without its key."""
KEY_LINE_IN = 0.19
MOST_SERIES = 6
"""Curves of a panel: those that took longest."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#8a7a00")
"""Okabe & Ito's darker ones; markers and dashes say the same without colour."""
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)), (0, (1, 2)))

LONGEST_OF_THREE = 15
"""Letters of a name of which three fit side by side in a key."""


@dataclass(frozen=True)
class _Figure:
    """What one figure shows, and how."""

    kinds: tuple[str, ...]
    name: str
    title: str
    x_words: str
    y_words: str
    unit: str
    """Of work, to which ``G`` or ``T`` is added."""
    x: Callable[[Sample], float]
    work: Callable[[Sample], float]
    panel: Callable[[Sample], str]
    series: Callable[[Sample], str]


def _group_words(sample: Sample) -> str:
    nodes = -(-sample.ranks // sample.ranks_per_node)
    return f"{sample.ranks} ranks on {nodes} node{'s' * (nodes > 1)}"


FIGURES = (
    _Figure(
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
    _Figure(
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
    _Figure(
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
    _Figure(
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
    _Figure(
        (COLLECTIVE,),
        "collectives",
        "Collectives",
        "bytes of the whole message",
        "bus bandwidth, ",
        "B/s",
        lambda sample: sample.bytes_moved,
        bus_bytes,
        _group_words,
        lambda sample: sample.name,
    ),
)


def curves(samples: Sequence[Sample], hardware: Hardware, name: str, origin: str) -> list[Drawing]:
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
    found = []
    for figure in FIGURES:
        shown = [sample for sample in samples if sample.kind in figure.kinds and figure.work(sample) > 0]
        if shown:
            found.append(_drawn(figure, shown, hardware, name, origin))
    return found


def _drawn(figure: _Figure, samples: Sequence[Sample], hardware: Hardware, name: str, origin: str) -> Drawing:
    panels = {words: _longest(figure, samples, words) for words in dict.fromkeys(map(figure.panel, samples))}
    shown = [sample for inside in panels.values() for sample in inside]
    left_out = len({*map(figure.series, samples)} - {*map(figure.series, shown)})
    subtitle = f"{origin}\nPoints: measured (median). Lines: what the fitted numbers say."
    subtitle += f"\n{left_out} more took less time in all: see the JSON file." if left_out else ""
    names = [{*map(figure.series, inside)} for inside in panels.values()]
    keys = [-(-len(each) // _columns(each)) * KEY_LINE_IN for each in names]
    height = header_height_in(figure.title, subtitle, style.WIDTH_IN) + sum(PANEL_IN + key for key in keys)
    fastest = max(shown, key=lambda sample: figure.work(sample) / sample.median_s)
    best = figure.work(fastest) / fastest.median_s
    scale, unit = (1e12, f"T{figure.unit}") if best >= 1e12 else (1e9, f"G{figure.unit}")
    with style.context():
        drawing = new_figure(style.WIDTH_IN, height)
        grid = drawing.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (heading, inside) in zip(grid, panels.items(), strict=True):
            _panel(axes, figure, inside, hardware, scale)
            axes.set_title(heading, fontsize=8.5)
            axes.set_ylabel(figure.y_words + unit)
        grid[-1].set_xlabel(figure.x_words, loc="left")
        header(drawing, figure.title, subtitle)
    alt = (
        f"{figure.y_words}{unit} over {figure.x_words} of {len(shown)} measurements, in {len(panels)} panels. "
        f"Fastest: {figure.panel(fastest)} {figure.series(fastest)}, {best / scale:.3g} {unit}."
    )
    return Drawing(f"{name}-{figure.name}", figure.title, drawing, alt, alt)


def _longest(figure: _Figure, samples: Sequence[Sample], panel: str) -> list[Sample]:
    """The samples of a panel, of the curves that took longest."""
    inside = [sample for sample in samples if figure.panel(sample) == panel]
    spent: dict[str, float] = {}
    for sample in inside:
        spent[figure.series(sample)] = spent.get(figure.series(sample), 0.0) + sample.median_s
    kept = sorted(spent, key=lambda name: -spent[name])[:MOST_SERIES]
    return [sample for sample in inside if figure.series(sample) in kept]


def _panel(axes: Axes, figure: _Figure, samples: Sequence[Sample], hardware: Hardware, scale: float) -> None:
    names = list(dict.fromkeys(figure.series(sample) for sample in samples))
    key = []
    for name, colour, marker, dashes in zip(names, COLOURS, style.MARKERS, LINES, strict=False):
        inside = [sample for sample in samples if figure.series(sample) == name]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.0}
        look["markerfacecolor"] = style.lighter(colour, 0.35)
        x = [figure.x(sample) for sample in inside]
        y = [figure.work(sample) / sample.median_s / scale for sample in inside]
        axes.plot(x, y, linestyle="", markeredgewidth=0.8, zorder=3, **look)
        line = _line(figure, inside, hardware, scale)
        axes.plot(*line, color=colour, linewidth=1.1, linestyle=dashes, zorder=2)
        key.append(Line2D([], [], label=name, linestyle=dashes if line[0] else "", linewidth=1.1, **look))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _ticks(axes.xaxis, axes.get_xlim())
    _ticks(axes.yaxis, axes.get_ylim())
    axes.grid(visible=True)
    axes.tick_params(labelbottom=True)
    axes.legend(handles=key, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=_columns(names))


def _line(
    figure: _Figure, samples: Sequence[Sample], hardware: Hardware, scale: float
) -> tuple[list[float], list[float]]:
    """What the fitted numbers say, the geometric mean where several shapes are of one size."""
    at: dict[float, list[float]] = {}
    for sample in samples:
        seconds = explained_seconds(sample, hardware)
        if seconds is not None:
            at.setdefault(float(f"{figure.x(sample):.2g}"), []).append(math.log(figure.work(sample) / seconds / scale))
    return sorted(at), [math.exp(sum(at[x]) / len(at[x])) for x in sorted(at)]


def _columns(names: Iterable[str]) -> int:
    """Of a key that is no wider than the figure."""
    return 3 if max(map(len, names)) <= LONGEST_OF_THREE else 2


def _ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Few labels, and more than one."""
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if limits[1] / limits[0] < 100 else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    """A tick's value: ``1 k``, ``10 M``, ``0.01``."""
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:g} {unit}"
    return f"{value:g}"
