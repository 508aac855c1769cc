"""The sharding factor: memory against speed and communication for F = 1 ... W, everything else equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.config.flop_conventions import format_tflops_label
from bench.core.presentation import (
    CPU_NOTE,
    MISSING,
    FactorLine,
    build_slug,
    choose_memory_unit,
    format_list,
    format_number,
    format_ranks,
    get_rank_noun,
    get_strategy_label,
    get_strategy_presentation,
)
from bench.core.units import GIB
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
from bench.reporting.tables.cells import (
    compute_median,
    group_rows,
    iterate_groups,
    list_first_known_values,
    list_known_values,
)
from bench.reporting.tables.table import CELL_COLUMNS, COMPLETED_STATUSES, RowNeeds

MIN_FACTORS = 3
"""Sharding factors of one strategy from which on there is a line to see."""

HOW_TO_READ = (
    "A copy of the model's parameters, gradients and optimizer state is spread over F ranks: to the left everybody "
    "keeps a whole copy, as DDP does, to the right one copy is spread over all. Going right, memory falls towards "
    "what cannot be sharded (activations, and the block that is gathered at the moment); what has to be sent grows, "
    "and beyond the vertical line it leaves the machine. A bar is the range of repeats, or the interval that holds "
    "19 of 20 for a prediction. A cross is a run out of memory: at the foot of the axis, and where it is known also at "
    "the memory that would have been needed."
)
FIGURE = ReportFigure(
    name="sharding-factor",
    page_position=70,
    title="The sharding factor",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(
        allowed_values={"status": COMPLETED_STATUSES}, min_distinct={"world_size": 1, "sharding_factor": MIN_FACTORS}
    ),
    empty_message="No configuration in this store was run at three sharding factors or more.",
)
FACET_COLUMNS = ["place", "model", "parameters", "precision", "workload", "limit", "settings", "world_size"]
"""Columns that all points of one figure share."""

ADAM_BYTES_PER_PARAMETER = 16
"""Per parameter with Adam in FP32: 4 for it, 4 for its gradient and 8 for two moments. ZeRO counts as many with 16-bit
weights (arXiv:1910.02054, section 3.1)."""
PANEL_HEIGHTS_IN = {"memory": 1.85, "tflops": 1.7, "exposed": 1.25}

VALUE_COLUMNS = ["tflops", "tflops_low", "tflops_high", "memory", "memory_low", "memory_high", "exposed"]


POINT_COLUMNS = (
    *("counted_tflops", "exposed_communication", "peak_reserved_bytes", "peak_allocated_bytes"),
    *("step_time_median_s", "step_time_ci_low_s", "step_time_ci_high_s"),
    *("peak_reserved_low_bytes", "peak_reserved_high_bytes"),
)
"""Columns that a point is made of."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration and sharding factor, of groups (`FACET_COLUMNS`) with at least three factors of one
    strategy.

    Returns
    -------
    DataFrame
        The columns of `FACET`, ``device``, ``flop_convention``, ``evidence``, ``strategy``, ``series`` (the line),
        ``sharding_factor``, ``nodes``; median TFLOP/s per rank (``tflops``), peak memory in bytes (``memory``:
        reserved, or allocated where that is all that is known; of a predicted run out of memory what it would need),
        each with ``_low`` and ``_high``; ``exposed``, the share of the step in exposed communication;
        ``out_of_memory`` and ``degraded``; ``links``, the anchors of the runs;
        ``states``, the bytes of one copy's parameters, gradients and Adam state where they follow; ``capacity``, the
        bytes of the device. What is unknown is NaN.
    """
    is_usable = table["status"].isin(["ok", "oom"]) & table["strategy"].map(_has_factor_line).astype(bool)
    rows = table[is_usable & table["sharding_factor"].notna() & table["world_size"].notna()]
    key_columns = [*CELL_COLUMNS, "strategy", "sharding_factor"]
    needed_columns = [
        "status",
        "device",
        "flop_convention",
        "fit_question",
        "optimizer",
        "parameter_dtype",
        "nodes",
        "degraded",
        "link",
        *POINT_COLUMNS,
    ]
    points = [_build_point(group) for group in group_rows(rows, key_columns, [*FACET_COLUMNS, *needed_columns])]
    if not points:
        return pd.DataFrame(columns=[*FACET_COLUMNS, "sharding_factor"])
    all_points = pd.DataFrame(points)
    kept_facets = [
        facet for _, facet in iterate_groups(all_points, *FACET_COLUMNS) if _count_factors(facet) >= MIN_FACTORS
    ]
    if not kept_facets:
        return all_points.iloc[:0]
    sort_columns = ["place", "parameters", "model", "precision", "settings", "series", "evidence", "sharding_factor"]
    return pd.concat(kept_facets).sort_values(sort_columns, kind="stable").reset_index(drop=True)


def _has_factor_line(strategy: Any) -> bool:
    return isinstance(strategy, str) and get_strategy_presentation(strategy).factor_line is not None


def find_line_style(strategy: str) -> tuple[style.VariantStyle, FactorLine]:
    """Colour, marker and line of a strategy that is compared over the sharding factor."""
    factor_line = get_strategy_presentation(strategy).factor_line
    assert factor_line is not None
    kind = f"{strategy}/{factor_line.kind}" if factor_line.kind else strategy
    colour = style.find_strategy_colour(kind) or style.MUTED_COLOUR
    return style.VariantStyle(colour, style.find_strategy_marker(kind)), factor_line


def _count_factors(facet: pd.DataFrame) -> int:
    return int(facet.groupby(["series", "evidence"])["sharding_factor"].nunique().max())


def _build_point(rows: list[dict[str, Any]]) -> dict[str, Any]:
    fitting_rows = [row for row in rows if row["status"] == "ok"]
    row = (fitting_rows or rows)[0]
    is_predicted = row["evidence"] == "predicted"
    fit_question = row["fit_question"]
    has_fp32_adam = row["optimizer"] == "adamw" and row["parameter_dtype"] == "fp32" and pd.notna(row["parameters"])
    tflops = _compute_median_and_range(list_known_values(fitting_rows, "counted_tflops"))
    if is_predicted and pd.notna(row["step_time_ci_high_s"]):
        step_s = row["step_time_median_s"]
        tflops = (tflops[0], *(tflops[0] * step_s / row[f"step_time_ci_{end}_s"] for end in ("high", "low")))
    memory_bytes = _compute_median_and_range(
        list_first_known_values(rows, "peak_reserved_bytes", "peak_allocated_bytes")
    )
    if is_predicted and pd.notna(row["peak_reserved_low_bytes"]):
        memory_bytes = (memory_bytes[0], float(row["peak_reserved_low_bytes"]), float(row["peak_reserved_high_bytes"]))
    return {
        **{name: row[name] for name in (*FACET_COLUMNS, "device", "flop_convention", "evidence", "strategy")},
        "series": get_strategy_label(row["strategy"])
        + row["variant"].partition(" · ")[1]
        + row["variant"].partition(" · ")[2],
        "sharding_factor": int(row["sharding_factor"]),
        "nodes": float("nan") if pd.isna(row["nodes"]) else float(row["nodes"]),
        **dict(
            zip(
                VALUE_COLUMNS,
                [
                    *tflops,
                    *memory_bytes,
                    _compute_median_and_range(list_known_values(fitting_rows, "exposed_communication"))[0],
                ],
                strict=True,
            )
        ),
        "out_of_memory": len(fitting_rows) < len(rows),
        "links": tuple(list_known_values(rows, "link")),
        "degraded": any(list_known_values(fitting_rows, "degraded")),
        "states": float(ADAM_BYTES_PER_PARAMETER * row["parameters"]) if has_fp32_adam else float("nan"),
        "capacity": float("nan") if fit_question is None else fit_question["memory_gib"] * GIB,
    }


def _compute_median_and_range(values: list[Any]) -> tuple[float, float, float]:
    if not values:
        return (float("nan"),) * 3
    return compute_median(values), float(min(values)), float(max(values))


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """A figure and a table per place, model, precision, set of settings and number of ranks."""
    points = select(table)
    if points.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for _, facet in iterate_groups(points, *FACET_COLUMNS):
        section.plan_figure(_draw_sharding_factor, facet)
        section.tables.append(_build_listing(facet))
    return section


def describe_subject(facet: pd.DataFrame) -> str:
    """Model, precision and ranks of a figure, in words."""
    first_row = facet.iloc[0]
    return (
        f"{first_row['model']}, {first_row['precision']}, "
        f"{format_ranks(int(first_row['world_size']), first_row['device'])}"
    )


def _draw_sharding_factor(facet: pd.DataFrame) -> Drawing:
    first_row = facet.iloc[0]
    noun = get_rank_noun(first_row["device"])
    cpu_note = CPU_NOTE if first_row["device"] == "cpu" else ""
    title = f"Sharding factor: {describe_subject(facet)}"
    detail = " · ".join(part for part in (first_row["workload"], first_row["limit"], first_row["settings"]) if part)
    subtitle = "\n".join(part for part in (detail, first_row["place"], cpu_note) if part)
    panel_names = [panel for panel in PANEL_HEIGHTS_IN if panel != "exposed" or facet["exposed"].notna().any()]
    legend_entries = _build_legend(facet)
    panel_heights_in = [PANEL_HEIGHTS_IN[panel] for panel in panel_names]
    header_in = compute_header_height_in(title, subtitle, style.FIGURE_WIDTH_IN)
    figure = create_figure(
        style.FIGURE_WIDTH_IN, sum(panel_heights_in) + 0.5 + header_in + lanes.compute_legend_height_in(legend_entries)
    )
    draw_header(figure, title, subtitle)
    panel_axes = figure.subplots(
        len(panel_names), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": panel_heights_in}
    )[:, 0]
    unit, unit_bytes = choose_memory_unit(float(facet["memory"].max()) if facet["memory"].notna().any() else 0.0)
    panel_titles = {
        "memory": f"peak memory per {noun} ({unit})",
        "tflops": format_tflops_label(first_row["flop_convention"], noun),
        "exposed": "communication not hidden (% of the step)",
    }
    for axes, panel in zip(panel_axes, panel_names, strict=True):
        scale = {"memory": 1 / unit_bytes, "tflops": 1.0, "exposed": 100.0}[panel]
        for (strategy, _, evidence), line_points in facet.groupby(["strategy", "series", "evidence"], sort=False):
            _draw_line(axes, line_points, panel, scale, str(strategy), str(evidence))
        if panel == "memory":
            _draw_references(axes, facet, unit_bytes)
        axes.set_title(panel_titles[panel], size=8.5, weight="normal")
        axes.set_ylim(0, _find_highest_point(axes) * (1.25 if panel == "memory" else 1.1))
        axes.grid(axis="y")
    _mark_host_boundary(panel_axes, facet)
    factors = sorted(set(facet["sharding_factor"]))
    panel_axes[-1].set_xscale("log", base=2)
    panel_axes[-1].set_xticks(factors, [str(factor) for factor in factors])
    panel_axes[-1].minorticks_off()
    panel_axes[-1].set_xlim(factors[0] / 1.35, factors[-1] * 1.35)
    panel_axes[-1].set_xlabel("sharding factor F (ranks that share one copy, logarithmic)", loc="left")
    lanes.draw_legend(figure, legend_entries)
    caption = (
        f"{describe_subject(facet)}, {detail or 'batch not stated'}, on {first_row['place']}. "
        f"{_format_line_ends(facet)}"
    )
    panel = build_slug("sharding-factor", first_row["model"], first_row["precision"], first_row["world_size"])
    return Drawing(
        panel, title, figure, f"{caption} {cpu_note}".strip() + ("." if cpu_note else ""), _format_alt_text(facet)
    )


def _find_highest_point(axes: Axes) -> float:
    """The highest point that was drawn."""
    return float(axes.dataLim.y1) if np.isfinite(axes.dataLim.y1) else 1.0


def _draw_line(axes: Axes, line_points: pd.DataFrame, panel: str, scale: float, strategy: str, evidence: str) -> None:
    """One strategy's points of one kind of evidence, and its runs out of memory."""
    line_points = line_points.sort_values("sharding_factor")
    evidence_style = style.EVIDENCE_STYLES[evidence]
    mark, factor_line = find_line_style(strategy)
    colour = mark.colour
    x_scale = 2**factor_line.offset_log2
    x = line_points["sharding_factor"].astype(float) * x_scale
    if f"{panel}_low" in line_points:
        axes.vlines(x, line_points[f"{panel}_low"] * scale, line_points[f"{panel}_high"] * scale,
        color=style.lighten_colour(colour, 0.35),
                    linewidth=1, zorder=2)  # fmt: skip
    axes.plot(
        x, line_points[panel] * scale, color=colour, linestyle=evidence_style.linestyle,
        marker=mark.marker, linewidth=1.3, markersize=5,
        markerfacecolor=colour if evidence_style.is_filled else "white", zorder=3,
    )  # fmt: skip
    oom_points = line_points[line_points["out_of_memory"] & (panel != "exposed")]
    for oom_x, oom_value in zip(oom_points["sharding_factor"] * x_scale, oom_points[panel] * scale, strict=True):
        for oom_y in {0.0} | ({float(oom_value)} if panel == "memory" and np.isfinite(oom_value) else set()):
            lanes.draw_oom_cross(axes, oom_x, oom_y, colour, evidence)
    if panel == "tflops":
        degraded_points = line_points[line_points["degraded"]]
        axes.plot(degraded_points["sharding_factor"] * x_scale, degraded_points[panel], "<",
        markersize=10,
                  markerfacecolor="none", markeredgecolor=style.INK_COLOUR, zorder=4)  # fmt: skip


def _draw_references(axes: Axes, facet: pd.DataFrame, unit_bytes: int) -> None:
    """What could be sharded of one copy over F, and the memory of the device if the points come near it."""
    factors = np.array(sorted(set(facet["sharding_factor"])), dtype=float)
    state_bytes = facet["states"].iloc[0]
    if np.isfinite(state_bytes):
        axes.plot(
            factors,
            state_bytes / unit_bytes / factors,
            color=style.MUTED_COLOUR,
            linestyle=(0, (1, 1)),
            linewidth=1.4,
            zorder=1,
        )
    capacity_bytes = facet["capacity"].iloc[0]
    if np.isfinite(capacity_bytes) and facet["memory"].max() > 0.5 * capacity_bytes:
        axes.axhline(capacity_bytes / unit_bytes, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.4, zorder=1)


def find_ranks_per_node(facet: pd.DataFrame) -> int | None:
    """Ranks of one machine, where there are several machines and it is known."""
    node_counts = facet["nodes"].dropna()
    if node_counts.empty or node_counts.iloc[0] <= 1:
        return None
    return int(facet["world_size"].iloc[0] // node_counts.iloc[0])


def _mark_host_boundary(panel_axes: np.ndarray, facet: pd.DataFrame) -> None:
    ranks_per_host = find_ranks_per_node(facet)
    factors = sorted(set(facet["sharding_factor"]))
    if ranks_per_host is None or not factors[0] <= ranks_per_host < factors[-1]:
        return
    boundary_x = ranks_per_host * 2**0.5
    for axes in panel_axes:
        axes.axvline(boundary_x, color=style.MUTED_COLOUR, linewidth=0.9, zorder=1)
    top_axes = panel_axes[0]
    for label, offset_points, alignment in (("within a machine", -4, "right"), ("across machines", 4, "left")):
        top_axes.annotate(
            label, (boundary_x, 1), xycoords=("data", "axes fraction"), xytext=(offset_points, -2),
            textcoords="offset points",
            ha=alignment, va="top", fontsize=7.5, color=style.MUTED_COLOUR,
        )  # fmt: skip


def _build_legend(facet: pd.DataFrame) -> list[tuple[Artist, str]]:
    evidence_kinds = style.sort_evidence(facet["evidence"])
    legend_entries: list[tuple[Artist, str]] = []
    for (strategy, series), _ in facet.groupby(["strategy", "series"], sort=False):
        mark, _ = find_line_style(str(strategy))
        legend_entries.append((Line2D([], [], color=mark.colour, marker=mark.marker, markersize=5), str(series)))
    for evidence in evidence_kinds:
        evidence_style = style.EVIDENCE_STYLES[evidence]
        handle = Line2D(
            [], [], color=style.MUTED_COLOUR, linestyle=evidence_style.linestyle, marker="o", markersize=5,
            markerfacecolor=style.MUTED_COLOUR if evidence_style.is_filled else "white",
        )  # fmt: skip
        legend_entries.append((handle, evidence + (", 95 % interval" if evidence == "predicted" else "")))
    if facet["states"].notna().any():
        reference_line = Line2D([], [], color=style.MUTED_COLOUR, linestyle=(0, (1, 1)), linewidth=1.4)
        legend_entries.append((reference_line, f"{ADAM_BYTES_PER_PARAMETER} bytes per parameter / F"))
    capacity_bytes = facet["capacity"].iloc[0]
    if np.isfinite(capacity_bytes) and facet["memory"].max() > 0.5 * capacity_bytes:
        legend_entries.append((Line2D([], [], color=style.LIMIT_COLOUR, linestyle="--"), "memory of the device"))
    if facet["out_of_memory"].any():
        legend_entries.append(
            (Line2D([], [], color=style.MUTED_COLOUR, marker="X", linestyle="", markersize=8), "out of memory")
        )
    if facet["degraded"].any():
        triangle_handle = Line2D(
            [], [], color=style.INK_COLOUR, marker="<", linestyle="", markerfacecolor="white", markersize=8
        )
        legend_entries.append((triangle_handle, "degraded: not representative"))
    return legend_entries


def _format_line_ends(facet: pd.DataFrame) -> str:
    """The ends of every line in words."""
    parts = []
    for (series, evidence), line_points in facet.groupby(["series", "evidence"], sort=False):
        completed_points = line_points[line_points["tflops"].notna()].sort_values("sharding_factor")
        if len(completed_points) > 1:
            first_point, last_point = completed_points.iloc[0], completed_points.iloc[-1]
            parts.append(
                f"{series} ({evidence}) from F = {first_point['sharding_factor']} to {last_point['sharding_factor']}: "
                f"{_format_memory(first_point['memory'])} to {_format_memory(last_point['memory'])}, "
                f"{format_number(first_point['tflops'])} to {format_number(last_point['tflops'])} TFLOP/s"
            )
    return "; ".join(parts) + "." if parts else ""


def _format_alt_text(facet: pd.DataFrame) -> str:
    parts = []
    for (series, evidence), line_points in facet.groupby(["series", "evidence"], sort=False):
        point_texts = [
            f"F={row['sharding_factor']} "
            + ("out of memory" if row["out_of_memory"] else _format_memory(row["memory"]))
            + ("" if pd.isna(row["tflops"]) else f" {format_number(row['tflops'])} TFLOP/s")
            for row in line_points.sort_values("sharding_factor").to_dict("records")
        ]  # fmt: skip
        parts.append(f"{series}, {evidence}: {format_list(point_texts, 12)}")
    return f"Memory and speed over the sharding factor, {describe_subject(facet)}. " + "; ".join(parts) + "."


def _format_memory(value: float) -> str:
    unit, unit_bytes = choose_memory_unit(value)
    return MISSING if pd.isna(value) else f"{format_number(value / unit_bytes)} {unit}"


def _build_listing(facet: pd.DataFrame) -> FigureTable:
    noun = get_rank_noun(facet["device"].iloc[0])
    speed_label = format_tflops_label(facet["flop_convention"].iloc[0], noun).removeprefix("model ")
    columns = ["Strategy", "F", "Evidence", f"Peak memory per {noun}", speed_label, "Not hidden", ""]
    rows = [
        [
            str(row["series"]),
            str(row["sharding_factor"]),
            str(row["evidence"]),
            _format_memory(row["memory"]),
            format_number(row["tflops"]),
            MISSING if pd.isna(row["exposed"]) else f"{format_number(100 * row['exposed'], 2)} %",
            "out of memory" if row["out_of_memory"] else "degraded" if row["degraded"] else "",
        ]
        for row in facet.to_dict("records")
    ]
    return FigureTable(f"As a table: {describe_subject(facet)}", columns, rows, frozenset(columns[1:2] + columns[3:6]))
