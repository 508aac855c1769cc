"""Predicted and rehearsed against measured and published: on one scale, and how far each is off."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.core.presentation import format_list, format_percent, format_plural
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import (
    Drawing,
    FigureTable,
    ReportFigure,
    ReportSection,
    compute_header_height_in,
    create_figure,
    draw_header,
)
from bench.reporting.tables import agreement
from bench.reporting.tables.agreement import MEMORY, QUANTITY_UNITS, SPEED, compute_log_limits
from bench.reporting.tables.table import COMPLETED_STATUSES, RowNeeds

HOW_TO_READ = (
    "Every mark is one number that somebody measured or published (across) and what was predicted or rehearsed for the "
    "same run (up). On the line both are equal, in the grey band they differ by at most a twentieth. Below, the same "
    "marks as a deviation in percent: above zero is too fast, or too much memory. The dark bar of a mark is the "
    "uncertainty of what it is held against: the half-width to which a point can be read off a plot, or the range of "
    "repeats; the light bar is the interval that a prediction says holds 19 of 20. Triangles mark points that are "
    "degraded in either: the allocator was flushing, so the time is not representative."
)
FIGURE = ReportFigure(
    name="agreement",
    page_position=120,
    title="Predicted against measured and published",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": COMPLETED_STATUSES}, min_rows=2),
    empty_message="No run in this store was predicted or rehearsed and also measured or published.",
)
CLOSE_DEVIATION = 0.05
"""Share within which an estimate is called close."""
SOURCE_COLOURS = ("#1a55f0", "#a44d1e", "#24a450", "#a72bbd", "#878787", "#ad7f24", "#2083a4")
"""Readable on white and on black; markers say the same without colour."""
SCATTER_HEIGHT_IN, DEVIATION_HEIGHT_IN = 3.3, 1.9
MAX_NAMED_PAIRS = 3


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per pair: see `bench.reporting.tables.agreement.build_pairs`."""
    return agreement.build_pairs(table)


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """A figure for speed, one for memory, and a table of how far each kind of evidence is off."""
    pairs = select(table)
    if pairs.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for quantity in (SPEED, MEMORY):
        quantity_pairs = pairs[pairs["quantity"] == quantity]
        if len(quantity_pairs):
            section.plan_figure(_draw_agreement, quantity, quantity_pairs)
    section.tables.append(_build_listing(pairs))
    return section


def assign_source_styles(pairs: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and marker of every source."""
    sources = list(dict.fromkeys(pairs["source"]))
    return {
        str(source): (SOURCE_COLOURS[position % len(SOURCE_COLOURS)], style.MARKERS[position % len(style.MARKERS)])
        for position, source in enumerate(sources)
    }


def _draw_agreement(quantity: str, pairs: pd.DataFrame) -> Drawing:
    source_styles = assign_source_styles(pairs)
    evidence_kinds = style.sort_evidence(pairs["evidence"])
    reference_kinds = style.sort_evidence(pairs["against"])
    title = f"{' and '.join(evidence_kinds).capitalize()} against {' and '.join(reference_kinds)}: {quantity}"
    subtitle = f"{format_plural(len(pairs), 'pair')} of one configuration each"
    legend_entries = _build_legend(pairs, source_styles)
    header_in = compute_header_height_in(title, subtitle, style.FIGURE_WIDTH_IN)
    figure = create_figure(
        style.FIGURE_WIDTH_IN,
        SCATTER_HEIGHT_IN + DEVIATION_HEIGHT_IN + 0.7 + header_in + lanes.compute_legend_height_in(legend_entries),
    )
    draw_header(figure, title, subtitle)
    scatter_axes, deviation_axes = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (SCATTER_HEIGHT_IN, DEVIATION_HEIGHT_IN)}
    )
    x_limits = compute_log_limits(pairs[["reference", "reference_low", "reference_high"]])
    _draw_scatter(scatter_axes, pairs, source_styles, x_limits, quantity)
    _draw_deviations(deviation_axes, pairs, source_styles, x_limits)
    deviation_axes.set_xlabel(f"{' or '.join(reference_kinds)}: {QUANTITY_UNITS[quantity]}", loc="left")
    lanes.draw_legend(figure, legend_entries)
    return Drawing(f"agreement-{quantity}", title, figure, _format_caption(pairs), _format_alt_text(quantity, pairs))


def _draw_scatter(
    axes: Axes,
    pairs: pd.DataFrame,
    source_styles: dict[str, tuple[str, str]],
    x_limits: tuple[float, float],
    quantity: str,
) -> None:
    axes.set(xscale="log", yscale="log", xlim=x_limits, ylim=compute_log_limits(pairs[["value", "low", "high"]]))
    axes.fill_between(x_limits, [(1 - CLOSE_DEVIATION) * x for x in x_limits],
    [(1 + CLOSE_DEVIATION) * x for x in x_limits], color=style.GRID_COLOUR,
                      linewidth=0, zorder=1)  # fmt: skip
    axes.plot(x_limits, x_limits, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    x_ratio = x_limits[1] / x_limits[0]
    tick_multiples = (
        (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if x_ratio < 5 else (1.0, 2.0, 5.0) if x_ratio < 50 else (1.0,)
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=tick_multiples, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    for (source, evidence), source_pairs in pairs.groupby(["source", "evidence"], sort=False):
        colour = source_styles[str(source)][0]
        axes.vlines(
            source_pairs["reference"],
            source_pairs["low"],
            source_pairs["high"],
            color=style.lighten_colour(colour, 0.6),
            linewidth=1.0,
        )
        axes.hlines(
            source_pairs["value"],
            source_pairs["reference_low"],
            source_pairs["reference_high"],
            color=colour,
            linewidth=1.2,
        )
        _draw_markers(axes, source_pairs, source_pairs["value"], source_styles[str(source)], str(evidence))
    axes.set_title(f"estimated {QUANTITY_UNITS[quantity]}", size=8.5, weight="normal")


def _draw_deviations(
    axes: Axes, pairs: pd.DataFrame, source_styles: dict[str, tuple[str, str]], x_limits: tuple[float, float]
) -> None:
    axes.fill_between(
        x_limits, -100 * CLOSE_DEVIATION, 100 * CLOSE_DEVIATION, color=style.GRID_COLOUR, linewidth=0, zorder=1
    )
    axes.axhline(0, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    for (source, evidence), source_pairs in pairs.groupby(["source", "evidence"], sort=False):
        colour, reference = source_styles[str(source)][0], source_pairs["reference"]
        low, high = (100 * (source_pairs[end] / reference - 1) for end in ("low", "high"))
        axes.vlines(reference, low, high, color=style.lighten_colour(colour, 0.6), linewidth=1.0, zorder=2)
        low, high = (100 * (source_pairs["value"] / source_pairs[f"reference_{end}"] - 1) for end in ("high", "low"))
        axes.vlines(reference, low, high, color=colour, linewidth=1.6, zorder=3)
        _draw_markers(axes, source_pairs, 100 * source_pairs["deviation"], source_styles[str(source)], str(evidence))
    axes.set_title("deviation of the estimate (%)", size=8.5, weight="normal")
    axes.grid(axis="y")


def _draw_markers(
    axes: Axes, source_pairs: pd.DataFrame, y_values: pd.Series, source_style: tuple[str, str], evidence: str
) -> None:
    axes.plot(source_pairs["reference"], y_values, **_build_marker_style(*source_style, evidence), zorder=4)
    is_degraded = source_pairs["degraded"].astype(bool)
    axes.plot(
        source_pairs["reference"][is_degraded], y_values[is_degraded], "<", markersize=10, markerfacecolor="none",
        markeredgecolor=style.INK_COLOUR, zorder=5,
    )  # fmt: skip


def _build_marker_style(colour: str, marker: str, evidence: str) -> dict[str, Any]:
    return {"marker": marker, "markersize": 5, "linestyle": "none", **style.build_marker_style(colour, evidence)}


def _build_legend(pairs: pd.DataFrame, source_styles: dict[str, tuple[str, str]]) -> list[tuple[Artist, str]]:
    legend_entries: list[tuple[Artist, str]] = []
    evidence_kinds = style.sort_evidence(pairs["evidence"])
    for source, source_pairs in pairs.groupby("source", sort=False):
        colour, marker = source_styles[str(source)]
        reference_kind = source_pairs["against"].iloc[0]
        label = (
            f"{source}, {reference_kind}"
            if reference_kind == "published"
            else f"{reference_kind}: {str(source).split(' · ')[0]}"
        )
        legend_entries.append(
            (
                Line2D(
                    [],
                    [],
                    **_build_marker_style(
                        colour, marker, evidence_kinds[0] if len(evidence_kinds) == 1 else "measured"
                    ),
                ),
                label,
            )
        )
    legend_entries += [
        (Line2D([], [], **_build_marker_style(style.MUTED_COLOUR, "o", evidence)), f"estimate: {evidence}")
        for evidence in evidence_kinds
    ]
    legend_entries.append((Patch(facecolor=style.GRID_COLOUR), f"within {CLOSE_DEVIATION:.0%}"))
    if pairs["degraded"].any():
        triangle = Line2D(
            [], [], color=style.INK_COLOUR, marker="<", linestyle="", markerfacecolor="white", markersize=8
        )
        legend_entries.append((triangle, "degraded: not representative"))
    return legend_entries


def _format_caption(pairs: pd.DataFrame) -> str:
    parts = []
    for row in agreement.summarize_pairs(pairs).to_dict("records"):
        parts.append(
            f"{row['source']}: {row['evidence']} against {row['against']}, {format_plural(row['pairs'], 'pair')}, "
            f"{format_percent(row['mean'])} off on average, {format_percent(row['worst'], signed=True)} at worst"
        )
    return "; ".join(parts) + "." + (" Degraded points are not counted." if pairs["degraded"].any() else "")


def _format_alt_text(quantity: str, pairs: pd.DataFrame) -> str:
    worst_pairs = pairs.reindex(pairs["deviation"].abs().sort_values(ascending=False).index).head(MAX_NAMED_PAIRS)
    deviation_texts = [
        f"{row['label']} {format_percent(row['deviation'], signed=True)}" for row in worst_pairs.to_dict("records")
    ]
    return (
        f"Scatter of {format_plural(len(pairs), 'pair')} of {quantity}. {_format_caption(pairs)} Furthest off: "
        f"{format_list(deviation_texts)}."
    )


def _build_listing(pairs: pd.DataFrame) -> FigureTable:
    columns = ["Quantity", "Against", "Evidence", "Pairs", "Mean", "Worst", "Bias", "Within its interval"]
    rows = [
        [
            str(row["quantity"]),
            f"{row['source']} ({row['against']})",
            str(row["evidence"]),
            str(row["pairs"]),
            format_percent(row["mean"]),
            format_percent(row["worst"], signed=True),
            format_percent(row["bias"], signed=True),
            format_percent(row["inside"]),
        ]
        for row in agreement.summarize_pairs(pairs).to_dict("records")
    ]
    return FigureTable("How far off estimates are", columns, rows, frozenset(columns[3:]))
