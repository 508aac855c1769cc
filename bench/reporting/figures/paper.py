"""The FSDP paper's figures: its published points beside the rows of this store that were run as they were."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.reporting import lanes, marks, style
from bench.reporting.drawing import Drawing, Section, header, header_height_in, new_figure
from bench.reporting.labels import listing, number, slug
from bench.reporting.paper import COMPARISONS, Comparison, compare, deviations, ratios

TITLE = "The paper's figures"
HOW_TO_READ = (
    "Hollow diamonds are what the paper printed or, with a bar of their uncertainty, what was read off its plots; "
    "nobody ran them here. Circles and squares are rows of this store: filled where they were measured (a bar: range "
    "of repeats), hollow where they were predicted (a bar: the interval that holds 19 of 20). Only runs of the same "
    "model on the same GPU, with the knobs the paper states, stand beside its points. Speed is hardware TFLOP/s: what "
    "activation checkpointing computes again is counted, as the paper very probably does."
)
SOURCES = "A100 80 GB · FSDP paper (arXiv:2304.11277) and this store"
COLOURS = ("#004c78", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#8c564b")
"""The first two, which lines have, differ in darkness too."""
LANE_IN, VALUE_IN = 0.3, 0.62
PANEL_IN = 1.75
CUT_BELOW = 0.6
"""Where the lowest value is at least this share of the highest, an axis of lines does not start at zero."""

ALL = tuple(comparison.figure for comparison in COMPARISONS)

MARKERS = {"published": "D", "measured": "o", "predicted": "o"}


_SYMBOLS = (("○", "●"), ("□", "■"), ("△", "▲"))
_SHAPES = ("o", "s", "^")
"""Of the columns of a figure with lanes, and the last of them for all others."""


def select(table: pd.DataFrame, figures: Collection[str] = ALL) -> pd.DataFrame:
    """A row per point of every figure the store has rows for: those of `compare`, with ``figure`` and ``setting``."""
    found = [
        points.assign(figure=comparison.figure, setting=setting)
        for comparison in COMPARISONS
        if comparison.figure in figures
        for setting, points in compare(comparison, table)
    ]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["figure", "setting", "evidence"])


def section(table: pd.DataFrame, palette: dict[str, style.Mark], figures: Collection[str] = ALL) -> Section:
    """A figure for every one of the paper (of `figures`) that this store has rows beside."""
    result = Section("paper", TITLE, HOW_TO_READ)
    selected = select(table, figures)
    by_figure = {comparison.figure: comparison for comparison in COMPARISONS}
    for (figure, setting), points in selected.groupby(["figure", "setting"], sort=False):
        result.plan(_draw, by_figure[str(figure)], str(setting), points)
    if not result.planned:
        result.nothing = "No runs in this store are those of a figure of the FSDP paper."
    return result


def _draw(comparison: Comparison, setting: str, points: pd.DataFrame) -> Drawing:
    title = f"{comparison.figure}: {comparison.title}"
    inferred = "" if comparison.setting else "our inference: "
    subtitle = f"{SOURCES}\n{inferred}{setting}"
    key = _key(points)
    draw = _lanes if points["panel"].ne("").any() else _lines
    figure = draw(comparison, points, title, subtitle, key)
    agreement = _agreement(points) + _in_proportion(comparison, points)
    caption = f"{comparison.figure} of the FSDP paper and this store, {inferred}{setting}. {agreement}{comparison.note}"
    name = slug("paper", comparison.figure, "" if comparison.setting else setting)
    return Drawing(name, title, figure, caption, _alt(comparison, points))


def _agreement(points: pd.DataFrame) -> str:
    """How far rows are from the published points, in a sentence per kind of evidence; nothing where points are few."""
    words = ""
    for kind in ("measured", "predicted"):
        for quantity, shown in points.groupby("quantity", sort=False):
            errors = 100 * np.abs(deviations(shown, kind))
            if len(errors) > 1:
                words += (
                    f"{kind.capitalize()} {quantity}: {number(float(errors.mean()), 2)} % from the published points on "
                    f"average, at most {number(float(errors.max()), 2)} %. "
                )
    return words


def _in_proportion(comparison: Comparison, points: pd.DataFrame) -> str:
    """The ratio the figure is about, per kind of evidence, in a sentence."""
    found = ratios(comparison, points)
    if not found or comparison.ratio is None:
        return ""
    values: dict[str, list[str]] = {}
    for (_, kind, column, _), value in found.items():
        values.setdefault(f"{kind} {column}".strip(), []).append(number(value, 3))
    words = [f"{name} {', '.join(several)}" for name, several in values.items()]
    return f"{comparison.ratio[0].capitalize()} against {comparison.ratio[1].rpartition(' ')[2]}: {'; '.join(words)}. "


def _alt(comparison: Comparison, points: pd.DataFrame) -> str:
    """The figure's points in words."""
    parts = []
    for (panel, series, column, kind, quantity), line in points.groupby(
        ["panel", "series", "column", "evidence", "quantity"], sort=False
    ):
        names = [str(name) for name in (panel, series, column, kind) if name]
        values = ["out of memory" if row["out_of_memory"] else number(row["value"]) for _, row in line.iterrows()]
        parts.append(f"{' '.join(names)}, {quantity}: {listing(values, 12)}")
    return f"{comparison.figure}, {comparison.title}. " + "; ".join(parts) + "."


# ---- lines over the number of GPUs


def _lines(
    comparison: Comparison, points: pd.DataFrame, title: str, subtitle: str, key: Sequence[tuple[Artist, str]]
) -> Figure:
    panels = [quantity for quantity in comparison.quantities if (points["quantity"] == quantity.short).any()]
    series = list(dict.fromkeys(points["series"]))
    colours = dict(zip(sorted(series, key=series_order), COLOURS, strict=False))
    panel_in = PANEL_IN if len(panels) > 1 else 2.5
    height = panel_in * len(panels) + 0.5 + header_height_in(title, subtitle, style.WIDTH_IN) + lanes.legend_in(key)
    figure = new_figure(style.WIDTH_IN, height)
    header(figure, title, subtitle)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    sizes = sorted({int(size) for size in points["world_size"].dropna()})
    for axes, quantity in zip(all_axes, panels, strict=True):
        shown = points[points["quantity"] == quantity.short]
        cut = _set_limits(axes, shown)
        for (name, kind), line in shown.groupby(["series", "evidence"], sort=False):
            position = list(colours).index(str(name)) - (len(colours) - 1) / 2
            _line(axes, line, colours[str(name)], str(kind), position)
        _name_lines(axes, shown, colours, sizes[-1], 0.13 / panel_in)
        axes.grid(axis="y")
        axes.set_title(f"{quantity.axis}{cut}", size=8.5, weight="normal")
    last = all_axes[-1]
    last.set_xscale("log", base=2)
    last.set_xticks(sizes, [str(size) for size in sizes])
    last.minorticks_off()
    last.set_xlim(sizes[0] / 1.2, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.3)
    last.set_xlabel("GPUs (world size, logarithmic)", loc="left")
    lanes.legend(figure, key)
    return figure


def series_order(name: str) -> tuple[int, str]:
    """Series are ordered by the number in their name: batch 2 before batch 16."""
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name


def _set_limits(axes: Axes, shown: pd.DataFrame) -> str:
    """Limits of the y axis, and what to say beside its name where it does not start at zero."""
    low, high = float(shown["low"].min()), float(shown["high"].max())
    if shown["out_of_memory"].any() or low < CUT_BELOW * high:
        axes.set_ylim(0, high * 1.1)
        return ""
    axes.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    return " · cut axis"


def _line(axes: Axes, line: pd.DataFrame, colour: str, kind: str, position: float) -> None:
    """One series of one kind of evidence. Kinds and series stand a little beside each other, so that all are seen."""
    aside = {"published": 1.0, "measured": 1.03, "predicted": 1 / 1.03}[kind] * 1.012**position
    ran = line[line["value"].notna()].sort_values("world_size")
    x = ran["world_size"].astype(float) * aside
    look = style.EVIDENCE_STYLES[kind]
    axes.vlines(x, ran["low"], ran["high"], color=style.lighter(colour, 0.35), linewidth=1, zorder=2)
    axes.plot(
        x, ran["value"], color=colour, linestyle=look.line, marker=MARKERS[kind], linewidth=1.3, markersize=5,
        markerfacecolor=colour if look.filled else "white", zorder=3,
    )  # fmt: skip
    for at, (_, row) in zip(x, ran.iterrows(), strict=True):
        if row["degraded"]:
            axes.plot(at, row["value"], "<", markersize=10, markerfacecolor="none", markeredgecolor=style.INK, zorder=4)
    for size in line.loc[line["out_of_memory"], "world_size"].dropna().astype(float):
        marks.cross(axes, size * aside, 0, colour, kind)


def _name_lines(axes: Axes, shown: pd.DataFrame, colours: dict[str, str], last: int, gap: float) -> None:
    """The name of each series beside its last published point, a `gap` (share of the axis) above the one below."""
    printed = shown[shown["value"].notna() & (shown["evidence"] == "published")].sort_values("world_size")
    ends = printed.groupby("series")["value"].last().sort_values()
    low, high = axes.get_ylim()
    below = -np.inf
    for name, value in ends.items():
        below = max(float(value), below + gap * (high - low))
        axes.annotate(
            str(name), (last, below), xytext=(11, 0), textcoords="offset points", va="center",
            color=colours[str(name)], fontsize=8, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


# ---- one lane per configuration


def _lanes(
    comparison: Comparison, points: pd.DataFrame, title: str, subtitle: str, key: Sequence[tuple[Artist, str]]
) -> Figure:
    quantity = comparison.quantities[0]
    columns = list(dict.fromkeys(_column_name(row) for _, row in points.iterrows()))
    colours = dict(zip(columns, (style.INK, *COLOURS), strict=False))
    groups: list[tuple[str, list[str]]] = [
        (str(panel), sorted(set(rows["series"]), key=comparison.order.index))
        for panel, rows in points.groupby("panel", sort=False)
    ]
    tops, y = {}, 0.0
    ticks: dict[tuple[str, str], float] = {}
    for panel, names in groups:
        tops[panel] = y
        y += lanes.HEADING_IN + 0.04
        for name in names:
            ticks[panel, name] = y + LANE_IN / 2
            y += LANE_IN
        y += lanes.GAP_IN
    head_in = 0.36
    width = style.WIDTH_IN + 0.4
    figure = new_figure(width, y + head_in + 0.5 + header_height_in(title, subtitle, width) + lanes.legend_in(key))
    header(figure, title, subtitle)
    axes = figure.add_subplot()
    axes.set_ylim(y, -head_in)
    axes.set_yticks(list(ticks.values()), [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    most = float(points["high"].max())
    axes.set_xlim(-0.04 * most, most * 1.06)
    axes.set_xlabel(quantity.axis, loc="left")
    for panel, top in tops.items():
        axes.annotate(
            panel, (-0.04 * most, top + lanes.HEADING_IN / 2), xytext=(-6, 0), textcoords="offset points", ha="right",
            va="center", fontweight="bold", fontsize=8.5, annotation_clip=False,
        )  # fmt: skip
    for (panel, kind, column, _), value in ratios(comparison, points).items():
        place = columns.index(f"{kind} {column}".strip())
        axes.annotate(
            f"off/on {number(value, 2)}", (most * 1.06, tops[panel] + lanes.HEADING_IN / 2), ha="right", va="center",
            xytext=((0.12 + VALUE_IN * (place + 1)) * 72, 0), textcoords="offset points", fontsize=7,
            color=colours[columns[place]], annotation_clip=False,
        )  # fmt: skip
    for position, name in enumerate(columns):
        x_in = 0.12 + VALUE_IN * (position + 1)
        symbol = "◇" if name.startswith("published") else _SYMBOLS[_shape(position)][name.startswith("measured")]
        words = f"{symbol} " + name.replace("checkpointing ", "checkp. ").replace(" ", "\n")
        axes.annotate(
            words, (most * 1.06, -head_in), xytext=(x_in * 72, 0), textcoords="offset points", ha="right", va="top",
            fontsize=7, color=colours[name], annotation_clip=False, linespacing=1.0,
        )  # fmt: skip
    for (panel, name), at in ticks.items():
        lane = points[(points["panel"] == panel) & (points["series"] == name)]
        for _, row in lane.iterrows():
            column = _column_name(row)
            place = columns.index(column)
            dodge = at + (place - (len(columns) - 1) / 2) * 0.075
            _mark(axes, row, dodge, colours[column], _SHAPES[_shape(place)])
            words = "OOM" if row["out_of_memory"] else number(row["value"])
            axes.annotate(
                words, (most * 1.06, at), xytext=((0.12 + VALUE_IN * (place + 1)) * 72, 0), ha="right", va="center",
                textcoords="offset points", fontsize=7.5, color=colours[column], annotation_clip=False,
                fontweight="bold" if row["out_of_memory"] else "normal",
            )  # fmt: skip
    lanes.legend(figure, key)
    return figure


def _column_name(row: pd.Series) -> str:
    return f"{row['evidence']} {row['column']}".strip()


def _shape(place: int) -> int:
    """Which shape the marks of a column have: the first is that of what was published, which has its own."""
    return min(max(place - 1, 0), len(_SHAPES) - 1)


def _mark(axes: Axes, row: pd.Series, y: float, colour: str, shape: str) -> None:
    kind = row["evidence"]
    if row["out_of_memory"]:
        look = style.marker_style(colour, kind)
        axes.plot(0, y, "X", markersize=7, clip_on=False, zorder=5, **look)
        return
    filled = style.EVIDENCE_STYLES[kind].filled
    marker = MARKERS[kind] if kind == "published" else shape
    axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1, zorder=2)
    axes.plot(
        row["value"], y, marker, color=colour, markersize=4.5, markerfacecolor=colour if filled else "white", zorder=3
    )
    if row["degraded"]:
        axes.plot(row["value"], y, "<", markersize=8, markerfacecolor="none", markeredgecolor=style.INK, zorder=4)


# ---- legend


def _key(points: pd.DataFrame) -> list[tuple[Artist, str]]:
    """What occurs in the figure."""
    names = {"published": "published, ± uncertainty", "measured": "measured", "predicted": "predicted, 95 % interval"}
    entries: list[tuple[Artist, str]] = []
    for kind in reversed(style.evidence_in_order(points["evidence"])):
        look = style.EVIDENCE_STYLES[kind]
        line = look.line if points["panel"].eq("").all() else ""
        entries.append(
            (
                Line2D(
                    [], [], color=style.MUTED, marker=MARKERS[kind], linestyle=line, markersize=5, linewidth=1.3,
                    markerfacecolor=style.MUTED if look.filled else "white",
                ),
                names[kind],
            )
        )  # fmt: skip
    if points["out_of_memory"].any():
        entries.append((Line2D([], [], color=style.MUTED, marker="X", linestyle="", markersize=8), "out of memory"))
    if points["degraded"].any():
        triangle = Line2D([], [], color=style.INK, marker="<", linestyle="", markerfacecolor="white", markersize=8)
        entries.append((triangle, "degraded: the allocator retries"))
    return entries
