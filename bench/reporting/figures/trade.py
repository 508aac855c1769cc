"""Memory against throughput: one point per strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.core.presentation import (
    CPU_NOTE,
    build_slug,
    choose_memory_unit,
    format_list,
    format_number,
    format_ranks,
    get_rank_noun,
)
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.direct_labels import (
    MAX_LEGEND_ENTRIES,
    WIDE_FIGURE_IN,
    DirectLabel,
    compute_labels_height_in,
    draw_direct_labels,
)
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection, create_figure, draw_header
from bench.reporting.tables.cells import build_cells, iterate_groups, select_drawable_cells
from bench.reporting.tables.table import COMPLETED_STATUSES, RowNeeds

MIN_STRATEGIES = 3
"""Strategies from which on there is something to choose from."""

HOW_TO_READ = (
    "One point per strategy, all with the same model, batch and number of ranks: further up is faster, further to the "
    "left needs less memory, so what has nothing above it and to its left is worth choosing. A vertical bar is the "
    "range of repeats. A cross on the axis, at its right end, is a strategy that ran out of memory."
)
FIGURE = ReportFigure(
    name="trade",
    page_position=40,
    title="Memory against throughput",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": COMPLETED_STATUSES}, min_rows=MIN_STRATEGIES),
    empty_message=f"No model was run with {MIN_STRATEGIES} strategies on one number of ranks.",
)
GROUP_COLUMNS = ["place", "model", "parameters", "world_size", "workload", "limit"]
FACET_COLUMNS = [*GROUP_COLUMNS, "among"]
"""What all points of a figure share. ``among`` is its precision: that of the rows, or of those they stand among."""
MEMORY_COLUMN = "peak_allocated_bytes"
SPEED_COLUMN = "tokens_per_second_per_gpu"
"""Not FLOPs, of which adapters need fewer for the same tokens."""
LEGEND_CHARS = 27
HEIGHT_IN = 5.0
"""Without the key."""
AXIS_MARGIN_FACTOR = 1.04
"""How far the axis goes on beyond the last cross, whose half it has room for."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per strategy and kind of evidence with a throughput and a peak of memory, or out of memory.

    Only groups (`FACET_COLUMNS`) of at least `MIN_STRATEGIES` strategies with both are kept. ``choice`` is what a point
    is called: strategies of one name whose settings differ are called by their settings, too. A precision that fewer
    than `MIN_STRATEGIES` ran in has no figure of its own: it is such a setting among those of the usual precision.
    """
    drawable_cells = select_drawable_cells(build_cells(table, SPEED_COLUMN, MEMORY_COLUMN))
    if drawable_cells.empty:
        return drawable_cells.assign(among="", choice="")
    usable_cells = drawable_cells[
        drawable_cells["median"].notna() & drawable_cells[MEMORY_COLUMN].notna() | (drawable_cells["out_of_memory"] > 0)
    ]
    kept_facets = [usable_cells.iloc[:0].assign(among="", choice="")]
    for _, group in iterate_groups(usable_cells, *GROUP_COLUMNS):
        if len(group) < MIN_STRATEGIES:
            continue
        for _, facet in iterate_groups(group.assign(among=_choose_precisions(group)), "among"):
            usual_settings = _find_usual_settings([str(text) for text in facet["settings"]])
            choices = [_format_choice(row, usual_settings) for _, row in facet.iterrows()]
            if len(set(choices)) >= MIN_STRATEGIES and facet["median"].notna().any():
                kept_facets.append(facet.assign(choice=choices))
    return pd.concat(kept_facets[1:] or kept_facets, ignore_index=True)


def _choose_precisions(rows: pd.DataFrame) -> list[str]:
    """Per row, the precision of the figure it stands in: its own, or if few ran in that the one most ran in."""
    strategy_counts = rows.drop_duplicates(["precision", "variant", "settings"])["precision"].value_counts(sort=False)
    usual_precision = str(strategy_counts.idxmax())
    return [
        precision if strategy_counts[precision] >= MIN_STRATEGIES else usual_precision
        for precision in rows["precision"]
    ]


def _find_usual_settings(settings_texts: list[str]) -> set[str]:
    """Settings that most of the rows have."""
    setting_counts = Counter(setting for text in settings_texts for setting in text.split(" · ") if setting)
    return {setting for setting, count in setting_counts.items() if 2 * count > len(settings_texts)}


def _format_choice(row: pd.Series, usual_settings: set[str]) -> str:
    own_settings = [row["precision"]] if row["precision"] != row["among"] else []
    own_settings += [
        setting for setting in str(row["settings"]).split(" · ") if setting and setting not in usual_settings
    ]
    return ", ".join([str(row["variant"]), *own_settings])


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """A figure per place, model, precision, world size and workload."""
    points = select(table)
    if points.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for _, facet in iterate_groups(points, *FACET_COLUMNS):
        section.plan_figure(_draw_trade_off, facet, palette)
    return section


def _draw_trade_off(facet: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> Drawing:
    first_row = facet.iloc[0]
    noun, ranks_label = get_rank_noun(first_row["device"]), format_ranks(first_row["world_size"], first_row["device"])
    unit, unit_bytes = choose_memory_unit(float(facet[MEMORY_COLUMN].max()))
    marks_by_choice = _assign_marks(facet, palette)
    legend_entries = _build_legend(facet, marks_by_choice)
    is_labelled = len(legend_entries) > MAX_LEGEND_ENTRIES
    if is_labelled:
        legend_entries = legend_entries[len(marks_by_choice) :]
    axes_height_in = max(HEIGHT_IN - 0.9, compute_labels_height_in(len(marks_by_choice) if is_labelled else 0))
    figure = create_figure(
        WIDE_FIGURE_IN if is_labelled else style.FIGURE_WIDTH_IN,
        axes_height_in + 0.9 + lanes.compute_legend_height_in(legend_entries),
    )
    axes = figure.add_subplot()
    labels: dict[str, DirectLabel] = {}
    right_edge = float(facet[MEMORY_COLUMN].max()) / unit_bytes * 1.12
    num_oom = 0
    for row in facet.to_dict("records"):
        if pd.notna(row["median"]):
            _draw_point(axes, row, marks_by_choice[row["choice"]], unit_bytes)
            x, y = float(row[MEMORY_COLUMN]) / unit_bytes, float(row["median"])
        else:
            x, y = right_edge * (1 - 0.04 * num_oom), 0.0
            lanes.draw_oom_cross(axes, x, y, marks_by_choice[row["choice"]].colour, row["evidence"])
            num_oom += 1
        label = DirectLabel(row["choice"], x, y, marks_by_choice[row["choice"]].colour)
        labels.setdefault(row["choice"], label)
    axes.set_xlim(0, right_edge * AXIS_MARGIN_FACTOR)
    axes.set_ylim(0, float(facet["high"].max()) * 1.15)
    axes.grid()
    axes.set_xlabel(f"peak allocated memory per {noun} ({unit})")
    axes.set_ylabel(f"tokens/s per {noun}")
    cpu_note = CPU_NOTE if first_row["device"] == "cpu" else ""
    title = f"Memory against throughput: {first_row['model']}, {first_row['among']}, {ranks_label}"
    detail = " · ".join(part for part in (first_row["workload"], first_row["limit"]) if part)
    draw_header(figure, title, "\n".join(part for part in (detail, first_row["place"], cpu_note) if part))
    if is_labelled:
        draw_direct_labels(axes, list(labels.values()), axes_height_in)
    lanes.draw_legend(figure, legend_entries)
    completed_rows = facet[facet["median"].notna()]
    fastest, leanest = (
        completed_rows.sort_values(column).iloc[position] for column, position in (("median", -1), (MEMORY_COLUMN, 0))
    )
    extremes_text = (
        f"Fastest: {fastest['choice']}, {format_number(fastest['median'])} tokens/s at "
        f"{format_number(fastest[MEMORY_COLUMN] / unit_bytes)} "
        f"{unit}. "
        f"Least memory: {leanest['choice']}, {format_number(leanest[MEMORY_COLUMN] / unit_bytes)} {unit} at "
        f"{format_number(leanest['median'])} tokens/s."
    )
    choices_text = format_list(list(dict.fromkeys(facet["choice"])), 20)
    alt_text = f"Scatter plot of tokens per second against peak memory for {choices_text}. {extremes_text}"
    name = build_slug(
        "trade",
        first_row["model"],
        first_row["among"],
        first_row["world_size"],
        first_row["workload"],
        first_row["limit"],
    )
    return Drawing(name, title, figure, f"{extremes_text} {cpu_note}".strip(), alt_text, wide=is_labelled)


def _assign_marks(facet: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> dict[str, style.VariantStyle]:
    """The mark of every choice's strategy; further choices of one strategy have its colour and other markers."""
    marks_by_choice: dict[str, style.VariantStyle] = {}
    for row in facet.to_dict("records"):
        if row["choice"] not in marks_by_choice:
            colour = palette[row["variant"]].colour
            marks = [*marks_by_choice.values(), *(palette[variant] for variant in set(facet["variant"]))]
            taken_markers = {mark.marker for mark in marks if style.is_similar_colour(mark.colour, colour)}
            first_marker = style.MARKERS.index(palette[row["variant"]].marker)
            markers = style.MARKERS[first_marker:] + style.MARKERS[:first_marker]
            is_first = row["variant"] not in {name.partition(", ")[0] for name in marks_by_choice}
            free_markers = markers if is_first else [marker for marker in markers if marker not in taken_markers]
            marks_by_choice[row["choice"]] = style.VariantStyle(colour, (*free_markers, markers[0])[0])
    return marks_by_choice


def _draw_point(axes: Axes, row: Mapping[Hashable, Any], mark: style.VariantStyle, unit_bytes: int) -> None:
    memory, speed = float(row[MEMORY_COLUMN]) / unit_bytes, float(row["median"])
    axes.plot([memory] * 2, [row["low"], row["high"]], color=style.INK_COLOUR, linewidth=1, zorder=2)
    axes.plot(
        memory, speed, color=mark.colour, marker=mark.marker, markersize=7, linestyle="", zorder=3,
        **style.build_marker_style(mark.colour, row["evidence"]),
    )  # fmt: skip
    if row["degraded"]:
        axes.plot(memory, speed, "<", markersize=11, markerfacecolor="none", markeredgecolor=style.INK_COLOUR, zorder=4)


def _build_legend(facet: pd.DataFrame, marks_by_choice: dict[str, style.VariantStyle]) -> list[tuple[Artist, str]]:
    evidence_kinds = list(style.sort_evidence(facet["evidence"]))
    legend_entries: list[tuple[Artist, str]] = [
        (_build_legend_handle(mark, evidence_kinds[0]), lanes.wrap_label(choice, LEGEND_CHARS))
        for choice, mark in marks_by_choice.items()
    ]
    if len(evidence_kinds) > 1:
        legend_entries += [
            (_build_legend_handle(style.VariantStyle(style.MUTED_COLOUR, "o"), evidence), evidence)
            for evidence in evidence_kinds
        ]
    return legend_entries + lanes.build_legend_entries(facet.assign(evidence="measured"))


def _build_legend_handle(mark: style.VariantStyle, evidence: str) -> Line2D:
    return Line2D(
        [], [], color=mark.colour, marker=mark.marker, linestyle="", markersize=6,
        **style.build_marker_style(mark.colour, evidence),
    )  # fmt: skip
