"""A quantity of one configuration over commits and dates: levels, change points, degraded and failed runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench.comparison import ChangePoint, Series
from bench.comparison.words import ALLOCATED, QUANTITIES, RESERVED, TFLOPS, TIME, Quantity, percent
from bench.reporting import labels, lanes, style
from bench.reporting.drawing import Drawing, header, header_height_in, new_figure
from bench.reporting.figures.verdicts import LOOKS
from bench.reporting.labels import counted, slug

MOST_TICKS = 9
MOST_WORDS = 5
"""Lines of words on changes, one below the other."""


def history_drawings(found: Sequence[Series], quantities: Sequence[Quantity] = QUANTITIES) -> list[Drawing]:
    """One figure per configuration and quantity; reserved memory only where it is not the same as allocated."""
    allocated = {(s.evidence, s.device, s.name): s for s in found if s.quantity == ALLOCATED}
    drawings = []
    for series in found:
        other = allocated.get((series.evidence, series.device, series.name))
        same = other is not None and [p.value for p in other.points] == [p.value for p in series.points]
        if series.quantity in quantities and not (series.quantity == RESERVED and same):
            drawings.append(history_drawing(series))
    taken: dict[str, int] = {}
    for drawing in drawings:
        taken[drawing.name] = taken.get(drawing.name, 0) + 1
        drawing.name += f"-{taken[drawing.name]}" if taken[drawing.name] > 1 else ""
    return drawings


def history_drawing(series: Series) -> Drawing:
    """A quantity over commits in order of time: ranges of the runs, levels, change points, degraded and failed runs."""
    quantity = series.quantity
    size, unit = _unit(series)
    title = f"{quantity.title[0].upper()}{quantity.title[1:]}: {series.name}"
    subtitle = f"{series.device}, {series.evidence}; from {series.points[0].date} to {series.points[-1].date}"
    width = style.WIDTH_IN
    key = _history_key(series)
    height = 2.9 + header_height_in(title, subtitle, width) + lanes.legend_in(key)
    figure = new_figure(width, height)
    header(figure, title, subtitle)
    axes = figure.add_subplot()
    _history_points(axes, series, size)
    _levels(axes, series, size)
    values = [v / size for p in series.points for v in (p.low, p.high, p.degraded_value) if v is not None]
    low, high = min(values), max(values)
    room = max(high - low, 0.04 * high)
    axes.set_ylim(low - 0.35 * room, high + (0.3 + 0.12 * min(len(series.change_points), MOST_WORDS)) * room)
    _change_words(axes, series)
    bottom = axes.get_ylim()[0]
    for index, point in enumerate(series.points):
        if point.status != "ok":
            axes.plot(
                index,
                bottom,
                "X",
                markersize=8,
                color=style.OOM_COLOUR,
                markeredgecolor="white",
                clip_on=False,
                zorder=5,
            )
    _commit_axis(axes, series)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel(f"{quantity.title} ({unit})")
    axes.grid(axis="y")
    lanes.legend(figure, key)
    told = [_change_sentence(change) for change in series.change_points] or ["no change of level"]
    failed = sum(point.status != "ok" for point in series.points)
    alt = f"{quantity.title} of {series.name} over {len(series.points)} commits or dates: {'; '.join(told)}."
    alt += f" {counted(failed, 'point')} out of memory or failed, marked on the axis." if failed else ""
    caption = f"{title}, over commits in order of time; {series.evidence}. Changes: {'; '.join(told)}."
    name = slug("history", quantity.title, series.evidence, series.name)
    return Drawing(
        name, title, figure, caption, alt, notes=[_change_sentence(change) for change in series.change_points]
    )


def _unit(series: Series) -> tuple[float, str]:
    largest = max((v for p in series.points for v in (p.high, p.degraded_value) if v is not None), default=1.0)
    if series.quantity == TIME:
        return (1.0, "s") if largest >= 1 else (1e-3, "ms")
    if series.quantity == TFLOPS:
        return (1.0, "TFLOP/s") if largest >= 1 else (1e-3, "GFLOP/s")
    unit, size = labels.memory_unit(largest)
    return float(size), unit


def _history_points(axes: Axes, series: Series, size: float) -> None:
    line = style.EVIDENCE_STYLES[series.evidence].line
    known = [(index, point) for index, point in enumerate(series.points) if point.value is not None]
    axes.plot(
        [i for i, _ in known],
        [(p.value or 0) / size for _, p in known],
        color=style.GRID,
        linewidth=1.0,
        linestyle=line,
    )
    for index, point in known:
        if point.low is not None and point.high is not None and point.high > point.low:
            axes.plot([index] * 2, [point.low / size, point.high / size], color=style.MUTED, linewidth=1.2, zorder=2)
        axes.plot(index, (point.value or 0) / size, "o", color=style.INK, markersize=4.5, zorder=3)
    for index, point in enumerate(series.points):
        if point.degraded_value is not None:
            axes.plot(
                index, point.degraded_value / size, "v", markersize=7, markerfacecolor="white",
                markeredgecolor=style.INK, zorder=4,
            )  # fmt: skip


def _levels(axes: Axes, series: Series, size: float) -> None:
    """A line at every level, from one change to the next."""
    changes = [change for change in series.change_points if change.change is not None]
    edges = [0, *(change.index for change in changes), len(series.points)]
    for number, (start, end) in enumerate(pairwise(edges)):
        level = changes[number - 1].after if number else changes[0].before if changes else None
        if isinstance(level, float | int):
            axes.plot([start - 0.4, end - 0.6], [level / size] * 2, color="#0072b2", linewidth=2.0, alpha=0.6, zorder=1)


def _change_words(axes: Axes, series: Series) -> None:
    for number, change in enumerate(series.change_points):
        look = LOOKS[change.verdict]
        axes.axvline(change.index - 0.5, color=look["color"], linewidth=1.2, linestyle="--", zorder=1)
        left = change.index > len(series.points) / 2
        at = change.index - 0.5, 0.99 - 0.075 * (number % MOST_WORDS)
        axes.annotate(
            _short(change), at, xycoords=("data", "axes fraction"),
            xytext=(-4 if left else 4, 0), textcoords="offset points", ha="right" if left else "left", va="top",
            fontsize=7.5, fontweight="bold", color=look["color"],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85},
        )  # fmt: skip


def _short(change: ChangePoint) -> str:
    what = f"{change.before} → {change.after}" if change.change is None else percent(change.change)
    return f"{change.commit}: {what}" + (" (other machine)" if change.machines else "")


def _change_sentence(change: ChangePoint) -> str:
    what = f"{change.before} to {change.after}" if change.change is None else percent(change.change)
    also = [str(each) for each in (*change.machines, *change.software) if each.name != "commit"]
    told = f"; also changed: {'; '.join(also)}" if also else ""
    return f"{change.commit} of {change.date} (after {change.previous}): {what}, {change.verdict}{told}"


def _commit_axis(axes: Axes, series: Series) -> None:
    """Commits with their dates; with many points only some are named, those at which something changed always."""
    count = len(series.points)
    every = max(1, math.ceil(count / MOST_TICKS))
    wanted = [*sorted({change.index for change in series.change_points}), *range(0, count, every)]
    shown: list[int] = []
    for index in wanted:
        if all(abs(index - other) >= max(1.0, count / 14) for other in shown):
            shown.append(index)
    points = [series.points[index] for index in sorted(shown)]
    axes.set_xticks(
        sorted(shown), [f"{point.commit}\n{point.date}" for point in points], rotation=45, ha="right", fontsize=7
    )
    axes.set_xlim(-0.7, count - 0.3)
    axes.set_xlabel("commit and date, in order of time")


def _history_key(series: Series) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=style.INK, marker="o", markersize=4.5, linestyle=""), "mean of the runs")
    ]
    if any(p.low is not None and p.high is not None and p.high > p.low for p in series.points):
        entries[0] = (
            Line2D([], [], color=style.MUTED, marker="o", markersize=4.5, markerfacecolor=style.INK),
            "runs: range and mean",
        )
    if any(change.change is not None for change in series.change_points):
        entries.append((Line2D([], [], color="#0072b2", linewidth=2.0, alpha=0.6), "level"))
    for verdict in dict.fromkeys(change.verdict for change in series.change_points):
        entries.append(
            (Line2D([], [], color=LOOKS[verdict]["color"], linewidth=1.2, linestyle="--"), f"change: {verdict}")
        )
    if any(point.degraded_value is not None for point in series.points):
        triangle = Line2D([], [], color=style.INK, marker="v", linestyle="", markerfacecolor="white", markersize=7)
        entries.append((triangle, "degraded: not representative"))
    if any(point.status != "ok" for point in series.points):
        cross = Line2D([], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8)
        failed = sorted({point.status for point in series.points} - {"ok"})
        entries.append((cross, " or ".join("out of memory" if status == "oom" else status for status in failed)))
    return entries
