"""The FSDP paper's figures: its published points beside the rows of this store that were run as they were."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.core.presentation import build_slug, format_list, format_number
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import (
    Drawing,
    ReportFigure,
    ReportSection,
    compute_header_height_in,
    create_figure,
    draw_header,
)
from bench.reporting.figures import paper_bars
from bench.reporting.paper.comparisons import PAPER_COMPARISONS, PAPER_FILTERS, PAPER_SHARDING_LABELS, PaperComparison
from bench.reporting.paper.deviations import compute_deviations, compute_ratios, list_errors
from bench.reporting.paper.paper import compare_with_paper
from bench.reporting.tables.cells import iterate_groups
from bench.reporting.tables.table import RowNeeds

HOW_TO_READ = (
    "Hollow diamonds are what the paper printed or, with a bar of their uncertainty, what was read off its plots; "
    "nobody ran them here. Circles are rows of this store: filled where they were measured (a bar: range of repeats), "
    "hollow where they were predicted (a bar: the interval that is stated to hold 19 of 20; every figure says how many "
    "published points it holds). Figures 6(a) and 6(c) are bars, as in the paper: hatched ones are the paper's, and "
    "above the others stands how far they are off. Only runs of the same model on the same GPU, with the knobs the "
    "paper states, stand beside its points. Speed is hardware TFLOP/s: what activation checkpointing computes again is "
    "counted, as the paper very probably does."
)
FIGURE = ReportFigure(
    name="paper",
    page_position=10,
    title="The paper's figures",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values=PAPER_FILTERS, min_rows=2),
    empty_message="No runs in this store are those of a figure of the FSDP paper.",
)
SOURCES_LABEL = "A100 80 GB · FSDP paper (arXiv:2304.11277) and this store"
SERIES_COLOURS = ("#1a55f0", "#a44d1e", "#24a450", "#a72bbd", "#ad7f24", "#2083a4")
"""Readable on white and on black, and different for colour-blind readers, as those of strategies."""
PANEL_HEIGHT_IN = 1.75
CUT_AXIS_MIN_RATIO = 0.6
"""Where the lowest value is at least this share of the highest, an axis of lines does not start at zero."""

ALL_FIGURES = tuple(comparison.figure for comparison in PAPER_COMPARISONS)

EVIDENCE_MARKERS = {"published": "D", "measured": "o", "predicted": "o"}


def select(table: pd.DataFrame, figures: Collection[str] = ALL_FIGURES) -> pd.DataFrame:
    """A row per point of every figure the store has rows for: those of `compare_with_paper`, with ``figure`` and
    ``setting``."""
    figure_points = [
        points.assign(figure=comparison.figure, setting=setting)
        for comparison in PAPER_COMPARISONS
        if comparison.figure in figures
        for setting, points in compare_with_paper(comparison, table)
    ]
    return (
        pd.concat(figure_points, ignore_index=True)
        if figure_points
        else pd.DataFrame(columns=["figure", "setting", "evidence"])
    )


def build_section(
    table: pd.DataFrame, palette: dict[str, style.VariantStyle], figures: Collection[str] = ALL_FIGURES
) -> ReportSection:
    """A figure for every one of the paper (of `figures`) that this store has rows beside."""
    all_points = select(table, figures)
    if all_points.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    comparisons_by_figure = {comparison.figure: comparison for comparison in PAPER_COMPARISONS}
    for (figure, setting), points in all_points.groupby(["figure", "setting"], sort=False):
        section.plan_figure(_draw_paper_figure, comparisons_by_figure[str(figure)], str(setting), points)
    return section


def _draw_paper_figure(comparison: PaperComparison, setting: str, points: pd.DataFrame) -> Drawing:
    title = f"{comparison.figure}: {comparison.title}"
    inferred_note = "" if comparison.setting else "our inference: "
    subtitle = f"{SOURCES_LABEL}\n{inferred_note}{setting}"
    if points["panel"].ne("").any():
        figure = paper_bars.draw_bars(comparison, points, title, subtitle, _assign_marks(comparison))
        is_wide = True
    else:
        subtitle += "".join(f"\n{line}" for line in _list_agreement(points))
        figure, is_wide = _draw_lines(comparison, points, title, subtitle, _build_legend(points)), False
    agreement_text = _format_agreement(points) + _format_ratios(comparison, points)
    caption = (
        f"{comparison.figure} of the FSDP paper and this store, {inferred_note}{setting}. "
        f"{agreement_text}{comparison.note}"
    )
    name = build_slug("paper", comparison.figure, "" if comparison.setting else setting)
    return Drawing(name, title, figure, caption, _format_alt_text(comparison, points), wide=is_wide)


def _assign_marks(comparison: PaperComparison) -> dict[str, style.VariantStyle]:
    """The colours of bars: of strategies their own, as everywhere; of other series those of lines."""
    kinds = {label: kind for kind, label in PAPER_SHARDING_LABELS.items()}
    return {
        series: style.VariantStyle(style.find_strategy_colour(kinds.get(series, "")) or colour, "o")
        for series, colour in zip(comparison.lane_order, itertools.cycle(SERIES_COLOURS), strict=False)
    }


def _list_agreement(points: pd.DataFrame) -> list[str]:
    """A line per kind of evidence and quantity: how far it is off, and how many published points its intervals hold."""
    lines = []
    published = points[points["evidence"] == "published"]
    store_points = points[(points["evidence"] != "published") & points["value"].notna()]
    for (evidence, quantity), group in iterate_groups(store_points, "evidence", "quantity"):
        errors = pd.Series(list_errors(group, published), index=group.index)
        compared = group[errors.notna()]
        if compared.empty:
            continue
        known = errors.dropna()
        line = f"{evidence} {quantity}: {np.mean(np.abs(known)):.1%} off on average".replace("%", " %")
        line += f" ({paper_bars.format_error(float(known.min()))} to {paper_bars.format_error(float(known.max()))})"
        with_interval = compared[compared["high"] > compared["low"]]
        if evidence == "predicted" and len(with_interval):
            inside = sum(_is_inside(point, published) for point in with_interval.to_dict("records"))
            line += f"; intervals hold {inside} of {len(with_interval)} published points"
        lines.append(line)
    return lines


def _is_inside(point: dict[Hashable, Any], published: pd.DataFrame) -> bool:
    """Whether the published point beside a prediction, with its own uncertainty, lies within the prediction's
    interval."""
    keys = ["panel", "series", "quantity", "world_size"]
    beside = published[(published[keys] == [point[key] for key in keys]).all(axis=1)]
    return bool(((beside["low"] <= point["high"]) & (point["low"] <= beside["high"])).any())


def _format_agreement(points: pd.DataFrame) -> str:
    """How far rows are from the published points, in a sentence per kind of evidence; nothing where points are few."""
    text = ""
    for evidence in ("measured", "predicted"):
        for quantity, quantity_points in points.groupby("quantity", sort=False):
            errors_percent = 100 * np.abs(compute_deviations(quantity_points, evidence))
            if len(errors_percent) > 1:
                text += (
                    f"{evidence.capitalize()} {quantity}: {format_number(float(errors_percent.mean()), 2)} % from the "
                    "published points on "
                    f"average, at most {format_number(float(errors_percent.max()), 2)} %. "
                )
    return text


def _format_ratios(comparison: PaperComparison, points: pd.DataFrame) -> str:
    """The ratio the figure is about, per kind of evidence, in a sentence."""
    ratio_values = compute_ratios(comparison, points)
    if not ratio_values or comparison.ratio_series is None:
        return ""
    ratio_texts: dict[str, list[str]] = {}
    for (_, evidence, column, _), value in ratio_values.items():
        ratio_texts.setdefault(f"{evidence} {column}".strip(), []).append(format_number(value, 3))
    ratio_lists = [f"{name} {', '.join(texts)}" for name, texts in ratio_texts.items()]
    return (
        f"{comparison.ratio_series[0].capitalize()} against {comparison.ratio_series[1].rpartition(' ')[2]}: "
        f"{'; '.join(ratio_lists)}. "
    )


def _format_alt_text(comparison: PaperComparison, points: pd.DataFrame) -> str:
    """The figure's points in words."""
    parts = []
    for (panel, series, column, evidence, quantity), line_points in points.groupby(
        ["panel", "series", "column", "evidence", "quantity"], sort=False
    ):
        name_parts = [str(name) for name in (panel, series, column, evidence) if name]
        value_texts = [
            "out of memory" if row["out_of_memory"] else format_number(row["value"])
            for _, row in line_points.iterrows()
        ]
        parts.append(f"{' '.join(name_parts)}, {quantity}: {format_list(value_texts, 12)}")
    return f"{comparison.figure}, {comparison.title}. " + "; ".join(parts) + "."


# ---- lines over the number of GPUs


def _draw_lines(
    comparison: PaperComparison,
    points: pd.DataFrame,
    title: str,
    subtitle: str,
    legend_entries: Sequence[tuple[Artist, str]],
) -> Figure:
    panel_quantities = [
        quantity for quantity in comparison.quantities if (points["quantity"] == quantity.short_name).any()
    ]
    series_names = list(dict.fromkeys(points["series"]))
    colours = dict(zip(sorted(series_names, key=build_series_sort_key), SERIES_COLOURS, strict=False))
    panel_height_in = PANEL_HEIGHT_IN if len(panel_quantities) > 1 else 2.5
    height_in = (
        panel_height_in * len(panel_quantities)
        + 0.5
        + compute_header_height_in(title, subtitle, style.FIGURE_WIDTH_IN)
        + lanes.compute_legend_height_in(legend_entries)
    )
    figure = create_figure(style.FIGURE_WIDTH_IN, height_in)
    draw_header(figure, title, subtitle)
    all_axes = figure.subplots(len(panel_quantities), 1, sharex=True, squeeze=False)[:, 0]
    world_sizes = sorted({int(world_size) for world_size in points["world_size"].dropna()})
    for axes, quantity in zip(all_axes, panel_quantities, strict=True):
        panel_points = points[points["quantity"] == quantity.short_name]
        cut_note = _set_y_limits(axes, panel_points)
        for (name, evidence), line_points in panel_points.groupby(["series", "evidence"], sort=False):
            position = list(colours).index(str(name)) - (len(colours) - 1) / 2
            _draw_line(axes, line_points, colours[str(name)], str(evidence), position)
        _label_lines(axes, panel_points, colours, world_sizes[-1], 0.13 / panel_height_in)
        axes.grid(axis="y")
        axes.set_title(f"{quantity.axis_label}{cut_note}", size=8.5, weight="normal")
    bottom_axes = all_axes[-1]
    bottom_axes.set_xscale("log", base=2)
    bottom_axes.set_xticks(world_sizes, [str(world_size) for world_size in world_sizes])
    bottom_axes.minorticks_off()
    bottom_axes.set_xlim(world_sizes[0] / 1.2, world_sizes[-1] * (world_sizes[-1] / world_sizes[0]) ** 0.3)
    bottom_axes.set_xlabel("GPUs (world size, logarithmic)", loc="left")
    lanes.draw_legend(figure, legend_entries)
    return figure


def build_series_sort_key(name: str) -> tuple[int, str]:
    """Series are ordered by the number in their name: batch 2 before batch 16."""
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name


def _set_y_limits(axes: Axes, panel_points: pd.DataFrame) -> str:
    """Limits of the y axis, and what to say beside its name where it does not start at zero."""
    low, high = float(panel_points["low"].min()), float(panel_points["high"].max())
    if panel_points["out_of_memory"].any() or low < CUT_AXIS_MIN_RATIO * high:
        axes.set_ylim(0, high * 1.1)
        return ""
    axes.set_ylim(low - 0.15 * (high - low), high + 0.15 * (high - low))
    return " · cut axis"


def _draw_line(axes: Axes, line_points: pd.DataFrame, colour: str, evidence: str, position: float) -> None:
    """One series of one kind of evidence. Kinds and series stand a little beside each other, so that all are seen."""
    x_factor = {"published": 1.0, "measured": 1.03, "predicted": 1 / 1.03}[evidence] * 1.012**position
    completed_points = line_points[line_points["value"].notna()].sort_values("world_size")
    x = completed_points["world_size"].astype(float) * x_factor
    evidence_style = style.EVIDENCE_STYLES[evidence]
    axes.vlines(
        x,
        completed_points["low"],
        completed_points["high"],
        color=style.lighten_colour(colour, 0.35),
        linewidth=1,
        zorder=2,
    )
    axes.plot(
        x, completed_points["value"], color=colour, linestyle=evidence_style.linestyle,
        marker=EVIDENCE_MARKERS[evidence], linewidth=1.3, markersize=5,
        markerfacecolor=colour if evidence_style.is_filled else "white", zorder=3,
    )  # fmt: skip
    for point_x, (_, row) in zip(x, completed_points.iterrows(), strict=True):
        if row["degraded"]:
            axes.plot(
                point_x,
                row["value"],
                "<",
                markersize=10,
                markerfacecolor="none",
                markeredgecolor=style.INK_COLOUR,
                zorder=4,
            )
    for world_size in line_points.loc[line_points["out_of_memory"], "world_size"].dropna().astype(float):
        lanes.draw_oom_cross(axes, world_size * x_factor, 0, colour, evidence)


def _label_lines(
    axes: Axes, panel_points: pd.DataFrame, colours: dict[str, str], last_world_size: int, gap: float
) -> None:
    """The name of each series beside its last published point, a `gap` (share of the axis) above the one below."""
    published_points = panel_points[
        panel_points["value"].notna() & (panel_points["evidence"] == "published")
    ].sort_values("world_size")
    last_values = published_points.groupby("series")["value"].last().sort_values()
    low, high = axes.get_ylim()
    label_y = -np.inf
    for name, value in last_values.items():
        label_y = max(float(value), label_y + gap * (high - low))
        axes.annotate(
            str(name), (last_world_size, label_y), xytext=(11, 0), textcoords="offset points", va="center",
            color=colours[str(name)], fontsize=8, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


# ---- legend


def _build_legend(points: pd.DataFrame) -> list[tuple[Artist, str]]:
    """What occurs in the figure."""
    evidence_labels = {
        "published": "published, ± uncertainty",
        "measured": "measured",
        "predicted": "predicted, 95 % interval",
    }
    legend_entries: list[tuple[Artist, str]] = []
    for evidence in reversed(style.sort_evidence(points["evidence"])):
        evidence_style = style.EVIDENCE_STYLES[evidence]
        line_style = evidence_style.linestyle if points["panel"].eq("").all() else ""
        legend_entries.append(
            (
                Line2D(
                    [], [], color=style.MUTED_COLOUR, marker=EVIDENCE_MARKERS[evidence], linestyle=line_style,
                    markersize=5, linewidth=1.3,
                    markerfacecolor=style.MUTED_COLOUR if evidence_style.is_filled else "white",
                ),
                evidence_labels[evidence],
            )
        )  # fmt: skip
    if points["out_of_memory"].any():
        legend_entries.append(
            (Line2D([], [], color=style.MUTED_COLOUR, marker="X", linestyle="", markersize=8), "out of memory")
        )
    if points["degraded"].any():
        triangle_handle = Line2D(
            [], [], color=style.INK_COLOUR, marker="<", linestyle="", markerfacecolor="white", markersize=8
        )
        legend_entries.append((triangle_handle, "degraded: the allocator retries"))
    return legend_entries
