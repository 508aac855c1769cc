"""Grouped bars, as the FSDP paper draws its Figures 6(a) and 6(c): its bars beside those of this store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import compute_header_height_in, create_figure, draw_header
from bench.reporting.paper.comparisons import PaperComparison
from bench.reporting.paper.deviations import list_errors
from bench.reporting.tables.cells import iterate_groups

WIDTH_IN, PANEL_HEIGHT_IN = 7.2, 2.1
SERIES_GAP, GROUP_GAP = 0.35, 1.0
"""Between the bars of two series, and of two groups, in bars."""


def draw_bars(
    comparison: PaperComparison,
    points: pd.DataFrame,
    title: str,
    subtitle: str,
    marks: Mapping[str, style.VariantStyle],
) -> Figure:
    """A panel for every way in which this store ran what the paper does not state, each with the paper's bars.

    Parameters
    ----------
    points: DataFrame
        As `bench.reporting.paper.paper.compare_with_paper` gives them: a group of bars per ``panel``, one bar per
        ``series`` and kind of evidence; ``column`` says how the store's rows were run.
    marks: mapping
        The colour of every series.
    """
    published = points[points["evidence"] == "published"]
    columns = list(iterate_groups(points[points["evidence"] != "published"], "column"))
    legend_entries = _build_legend(points, comparison.lane_order, marks)
    figure = create_figure(
        WIDTH_IN,
        PANEL_HEIGHT_IN * len(columns)
        + compute_header_height_in(title, subtitle, WIDTH_IN)
        + compute_legend_height_in(legend_entries),
    )
    draw_header(figure, title, subtitle)
    top = float(points["high"].max())
    all_axes = figure.subplots(len(columns), 1, sharey=True, squeeze=False)[:, 0]
    for axes, ((column,), of_column) in zip(all_axes, columns, strict=True):
        _draw_panel(axes, comparison, pd.concat([published, of_column], ignore_index=True), marks, top)
        axes.set_title(f"{column}{describe_errors(of_column, published)}", size=8.5, weight="normal")
        axes.set_ylabel(comparison.quantities[0].bar_label)
    handles = [handle for handle, _ in legend_entries]
    names = [name for _, name in legend_entries]
    figure.legend(handles, names, loc="outside lower center", ncols=LEGEND_COLUMNS)
    return figure


LEGEND_COLUMNS = 3


def compute_legend_height_in(legend_entries: Sequence[tuple[Artist, str]]) -> float:
    """Inches of the legend below the panels."""
    return 0.17 + 0.175 * -(-len(legend_entries) // LEGEND_COLUMNS)


def describe_errors(store_points: pd.DataFrame, published: pd.DataFrame) -> str:
    """How far every kind of evidence is from the paper's bars, in words; empty where none has both."""
    texts = []
    for (evidence,), of_evidence in iterate_groups(store_points, "evidence"):
        errors = [error for error in list_errors(of_evidence, published) if np.isfinite(error)]
        if errors:
            text = f"{evidence} {np.mean(np.abs(errors)):.0%} off on average".replace("%", " %")
            if len(errors) > 1:
                text += f" ({format_error(min(errors))} to {format_error(max(errors))})"
            texts.append(text)
    return f": {', '.join(texts)}" if texts else ""


def format_error(share: float) -> str:
    """A signed share in whole percent: ``+12 %``."""
    return f"{100 * share:+.0f} %".replace("-", "−")


def _draw_panel(
    axes: Axes,
    comparison: PaperComparison,
    points: pd.DataFrame,
    marks: Mapping[str, style.VariantStyle],
    top: float,
) -> None:
    evidence_kinds = [kind for kind in ("published", "measured", "predicted") if (points["evidence"] == kind).any()]
    published = points[points["evidence"] == "published"]
    groups = list(dict.fromkeys(points["panel"]))
    x, centres = 0.0, []
    for group in groups:
        of_group = points[points["panel"] == group]
        start = x
        for series in sorted(set(of_group["series"]), key=comparison.lane_order.index):
            for kind in evidence_kinds:
                is_bar = (of_group["series"] == series) & (of_group["evidence"] == kind)
                for _, point in of_group[is_bar].iterrows():
                    _draw_bar(axes, x, point, marks[series].colour, top)
                    if kind != "published" and np.isfinite(point["value"]):
                        _draw_error(axes, x, point, published, top)
                x += 1
            x += SERIES_GAP
        centres.append((start + x - 1 - SERIES_GAP) / 2)
        x += GROUP_GAP
    axes.set_xticks(centres, groups)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-1, x - GROUP_GAP - SERIES_GAP)
    axes.set_ylim(0, top * 1.42)
    axes.grid(axis="y")


def _draw_bar(axes: Axes, x: float, point: pd.Series, colour: str, top: float) -> None:
    if point["out_of_memory"]:
        axes.plot(x, 0.04 * top, "X", markersize=6.5, zorder=5, **style.build_marker_style(colour, point["evidence"]))
        return
    axes.bar(x, point["value"], 0.86, zorder=2, **style.build_bar_style(colour, point["evidence"]))
    if point["high"] > point["low"]:
        axes.plot([x, x], [point["low"], point["high"]], color=style.INK_COLOUR, linewidth=1, zorder=3)
    if point["degraded"]:
        axes.plot(
            x,
            point["value"],
            "<",
            markersize=8,
            markerfacecolor="none",
            markeredgecolor=style.INK_COLOUR,
            zorder=4,
        )


def _draw_error(axes: Axes, x: float, point: pd.Series, published: pd.DataFrame, top: float) -> None:
    """Above a bar, how far it is from the paper's."""
    (error,) = list_errors(point.to_frame().T, published) or (float("nan"),)
    if np.isfinite(error):
        gap = 0.11 if point["degraded"] else 0.03
        axes.text(
            x, max(point["value"], point["high"]) + gap * top, format_error(error), rotation=90, ha="center",
            va="bottom", fontsize=6.5, zorder=6,
        )  # fmt: skip


def _build_legend(
    points: pd.DataFrame, order: Sequence[str], marks: Mapping[str, style.VariantStyle]
) -> list[tuple[Artist, str]]:
    labels = {"published": "published, ± uncertainty", "measured": "measured", "predicted": "predicted, 95 % interval"}
    entries: list[tuple[Artist, str]] = [
        (Patch(color=marks[series].colour), series) for series in sorted(set(points["series"]), key=order.index)
    ]
    entries += [
        (Patch(**style.build_bar_style(style.MUTED_COLOUR, kind)), labels[kind])
        for kind in reversed(style.sort_evidence(points["evidence"]))
    ]
    if points["out_of_memory"].any():
        entries.append((Line2D([], [], color=style.MUTED_COLOUR, marker="X", linestyle="", markersize=8), "OOM"))
    if points["degraded"].any():
        entries.append((lanes.DEGRADED_LEGEND_ENTRY[0], "degraded: the allocator retries"))
    return entries
