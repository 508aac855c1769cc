"""What fits: model and batch across, strategy and sharding factor down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from bench.core.presentation import (
    build_slug,
    choose_memory_unit,
    format_list,
    format_number,
    format_ranks,
    get_rank_noun,
)
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection
from bench.reporting.tables.cells import (
    CLOSE_CALL,
    FAILED,
    FIT_COLUMNS,
    FITS,
    MIXED_REPEATS,
    OOM,
    SKIPPED,
    classify_outcome,
    group_rows,
    iterate_groups,
    list_first_known_values,
    list_known_values,
    sort_rows,
)
from bench.reporting.tables.frontier import find_frontier_rows

HOW_TO_READ = (
    "Read a row from left to right: the models (and batches) grow, until the strategy of that row runs out of memory. "
    "The further right the first OOM is, the larger the model that this strategy can train. Rows under one heading "
    "have the same precision and number of ranks. Under an OOM stands the phase of the step it struck in: init (the "
    "model alone does not fit), forward (activations), backward (gradients) or optimizer (its state, which first "
    "appears in the first step). A dotted cell is a prediction too close to the limit to call. A hatched cell was not "
    "run and says nothing."
)
FIGURE = ReportFigure(
    name="oom-map",
    page_position=60,
    title="What fits: the OOM map",
    how_to_read=HOW_TO_READ,
    empty_message="All runs are in the figures of the OOM frontier.",
    shows_all_trials=True,
)
MIN_COLUMNS, MAX_COLUMNS = 3, 12

NOT_RUN = "not run"
OUTCOME_COLUMNS = (*FIT_COLUMNS, "peak_allocated_overall_bytes")
"""What of a row its cell tells."""
CELL_STYLES: dict[str, dict[str, Any]] = {
    FITS: {"facecolor": "#cfe3f3", "edgecolor": "#4a7ba6"},
    OOM: {"facecolor": style.OOM_COLOUR, "edgecolor": style.OOM_COLOUR},
    MIXED_REPEATS: {"facecolor": "#f2cf66", "edgecolor": "#8a6d00"},
    CLOSE_CALL: {"facecolor": "#fbeecb", "edgecolor": "#8a6d00", "hatch": "...", "linewidth": 0.5},
    FAILED: {"facecolor": "#bdbdbd", "edgecolor": style.MUTED_COLOUR},
    SKIPPED: {"facecolor": "#ececec", "edgecolor": style.MUTED_COLOUR},
    NOT_RUN: {"facecolor": "white", "edgecolor": "#c4c4c4", "hatch": "////", "linewidth": 0.5},
}
"""Light, dark and hatched, so that the three that matter differ without colour."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell of every map, cells that were not run included.

    Returns
    -------
    DataFrame
        ``place``, ``evidence``, ``limit`` and ``settings`` say which map; ``heading`` (precision and ranks) and
        ``variant`` which line of it; ``column`` (model and workload) which column, with ``position`` its place from
        the left; ``outcome`` is one of the words of `CELL_STYLES`; ``peak_bytes`` the highest allocated peak of the
        repeats that fitted (NaN for none), ``phase`` where memory ran out, ``degraded`` whether any that fitted was.
    """
    ordered_rows = sort_rows(table)
    models_and_workloads = zip(ordered_rows["model"], ordered_rows["workload"], strict=True)
    heading_parts = zip(ordered_rows["precision"], ordered_rows["world_size"], ordered_rows["device"], strict=True)
    named = ordered_rows.assign(
        column=[f"{model} · {workload}".removesuffix(" · ") for model, workload in models_and_workloads],
        heading=[
            f"{precision} · {format_ranks(None if pd.isna(world_size) else int(world_size), device)}"
            for precision, world_size, device in heading_parts
        ],
    )
    map_cells = []
    for map_key, rows in iterate_groups(named, "place", "evidence", "limit", "settings"):
        rows_by_size = rows.sort_values(["parameters", "model", "batch_size_per_gpu", "sequence_length"], kind="stable")
        column_names = list(dict.fromkeys(rows_by_size["column"]))
        ordered_rows = rows.assign(_order=[variant.order for variant in rows["variant_key"]])
        ordered_rows = ordered_rows.sort_values(["precision", "world_size", "_order"], kind="stable")
        lane_rows = ordered_rows.drop_duplicates(["heading", "variant"])[["heading", "variant", "device"]]
        cell_keys = ("heading", "variant", "column")
        runs_by_cell = {
            tuple(runs[0][name] for name in cell_keys): runs for runs in group_rows(rows, cell_keys, OUTCOME_COLUMNS)
        }
        for lane_row, (position, column) in itertools.product(lane_rows.to_dict("records"), enumerate(column_names)):
            cell_runs = runs_by_cell.get((lane_row["heading"], lane_row["variant"], column))
            map_values = dict(zip(("place", "evidence", "limit", "settings"), map_key, strict=True))
            map_cells.append(
                {**map_values, **lane_row, "column": column, "position": position, **_describe_outcome(cell_runs)}
            )
    return pd.DataFrame(map_cells)


def _describe_outcome(runs: list[dict[str, Any]] | None) -> dict[str, object]:
    if runs is None:
        return {"outcome": NOT_RUN, "peak_bytes": float("nan"), "phase": None, "degraded": False}
    fitting_runs, oom_runs = ([run for run in runs if run["status"] == status] for status in ("ok", "oom"))
    peaks_bytes = list_first_known_values(fitting_runs, "peak_allocated_overall_bytes", "peak_allocated_bytes")
    oom_phases = list_known_values(oom_runs, "oom_phase")
    return {
        "outcome": classify_outcome(runs),
        "peak_bytes": float(max(peaks_bytes)) if peaks_bytes else float("nan"),
        "phase": oom_phases[0] if oom_phases else None,
        "degraded": any(list_known_values(fitting_runs, "degraded")),
    }


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """A map per place, kind of evidence, memory limit and set of settings, of what the frontier does not show."""
    rows = table[~find_frontier_rows(table)]
    if rows.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    map_cells = select(rows)
    for (place, evidence, limit, settings), cells in iterate_groups(
        map_cells, "place", "evidence", "limit", "settings"
    ):
        pages = [
            (groups, page_columns)
            for page_columns in _split_columns(list(cells["column"].unique()), MAX_COLUMNS)
            for groups in lanes.paginate_lanes(
                cells.drop_duplicates(["heading", "variant"]), lambda row: row["variant"], min_lane_height_in=0.3
            )
        ]
        subject_parts = [limit or "no memory limit set", settings, "" if evidence == "measured" else evidence]
        subject = " · ".join(part for part in subject_parts if part)
        for page_number, (groups, page_columns) in enumerate(pages, 1):
            page_suffix = f" ({page_number} of {len(pages)})" if len(pages) > 1 else ""
            section.plan_figure(_draw_map, groups, cells, page_columns, str(place), str(evidence), subject, page_suffix)
    return section


def _split_columns(columns: list[str], max_size: int) -> list[list[str]]:
    return [columns[start : start + max_size] for start in range(0, len(columns), max_size)]


def _draw_map(
    groups: list[lanes.LaneGroup], rows: pd.DataFrame, columns: Sequence[str], place: str, evidence: str, subject: str,
    page_suffix: str,
) -> Drawing:  # fmt: skip
    shown_cells = rows[rows["column"].isin(columns)]
    width_in = max(style.FIGURE_WIDTH_IN, 1.8 + 0.58 * len(columns))
    unit, unit_bytes = choose_memory_unit(
        shown_cells["peak_bytes"].max() if shown_cells["peak_bytes"].notna().any() else 2**30
    )
    title = f"What fits: {subject}{page_suffix}"
    cell_width_in = (width_in - 1.6) / max(len(columns), MIN_COLUMNS)
    has_upright_labels = cell_width_in < 0.75
    label_chars = 26 if has_upright_labels else int(cell_width_in / 0.068)
    column_labels = ["\n".join(lanes.wrap_label(part, label_chars) for part in name.split(" · ")) for name in columns]
    longest_line_chars = max(len(line) for name in column_labels for line in name.splitlines())
    labels_height_in = 0.2 + (
        0.075 * longest_line_chars if has_upright_labels else 0.14 * max(name.count("\n") + 1 for name in column_labels)
    )
    legend_entries = _build_legend(shown_cells, unit, get_rank_noun(str(shown_cells["device"].iloc[0])))
    subtitle = f"{place}\nEvidence: {evidence}"
    figure, axes = lanes.build_lane_axes(
        groups, title, subtitle, legend_entries, width_in=width_in, axis_height_in=labels_height_in
    )
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(-0.5, max(len(columns), MIN_COLUMNS) - 0.5)
    axes.set_xticks(range(len(columns)), column_labels, rotation=90 if has_upright_labels else 0)
    axes.tick_params(axis="x", length=0, labeltop=True, labelbottom=False, labelsize=7.5)
    cells_by_position = {
        (cell["heading"], cell["variant"], cell["column"]): cell for cell in shown_cells.to_dict("records")
    }
    for group in groups:
        for lane in group.lanes:
            for x, column in enumerate(columns):
                _draw_cell(
                    axes,
                    x,
                    lane.y,
                    pd.Series(cells_by_position[lane.row["heading"], lane.row["variant"], column]),
                    unit_bytes,
                )
    outcome_counts = shown_cells["outcome"].value_counts()
    alt_text = (
        f"Map of {len(columns)} models and batches ({format_list(list(columns), 4)}) against "
        f"{len(shown_cells.drop_duplicates(['heading', 'variant']))} strategies on {place}, {subject}: "
        + ", ".join(f"{count} {outcome}" for outcome, count in outcome_counts.items())
        + "."
    )
    caption = f"Evidence: {evidence}. {subject[0].upper()}{subject[1:]} on {place}."
    return Drawing(
        build_slug("oom-map", subject, page_suffix, place),
        title,
        figure,
        caption,
        alt_text,
        wide=width_in > style.FIGURE_WIDTH_IN,
    )


def _draw_cell(axes: Axes, x: float, y: float, cell: pd.Series, unit_bytes: int) -> None:
    axes.add_patch(Rectangle((x - 0.47, y - 0.135), 0.94, 0.27, zorder=2, **CELL_STYLES[cell["outcome"]]))
    cell_text = {
        FITS: format_number(cell["peak_bytes"] / unit_bytes, 2) if not pd.isna(cell["peak_bytes"]) else "fits",
        CLOSE_CALL: f"{format_number(cell['peak_bytes'] / unit_bytes, 2)}?" if not pd.isna(cell["peak_bytes"]) else "?",
        OOM: "OOM" if pd.isna(cell["phase"]) else f"OOM\n{cell['phase']}",
        MIXED_REPEATS: "mixed",
        FAILED: "failed",
        SKIPPED: "skipped",
        NOT_RUN: "",
    }[cell["outcome"]]
    if cell["degraded"]:
        axes.plot(x - 0.4, y, "<", markersize=4.5, markerfacecolor="white", markeredgecolor=style.INK_COLOUR, zorder=3)
    is_dark = cell["outcome"] == OOM
    axes.text(
        x, y, cell_text, ha="center", va="center", fontsize=6.8, linespacing=1.0, zorder=3,
        color="white" if is_dark else style.INK_COLOUR, fontweight="bold" if is_dark else "normal",
    )  # fmt: skip


def _build_legend(shown_cells: pd.DataFrame, unit: str, noun: str) -> list[tuple[Artist, str]]:
    outcome_labels = {FITS: f"fits (peak in {unit} per {noun})", OOM: "out of memory (phase)"}
    present_outcomes = set(shown_cells["outcome"])
    legend_entries: list[tuple[Artist, str]] = [
        (Patch(**patch_style), outcome_labels.get(outcome, outcome))
        for outcome, patch_style in CELL_STYLES.items()
        if outcome in present_outcomes
    ]
    return [*legend_entries, lanes.DEGRADED_LEGEND_ENTRY] if shown_cells["degraded"].any() else legend_entries
