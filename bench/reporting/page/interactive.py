"""Figures to hover over, as specifications for plotly, which draws them in the reader's browser.

They show what the static figures show and follow the same rules: places never share axes, colour and shape say how a
run shards, fill and line what kind of evidence it is, a run out of memory stands on the axis.
"""

from __future__ import annotations

import functools
import html
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.config.flop_conventions import format_tflops_label
from bench.core import presentation
from bench.reporting.drawing import style
from bench.reporting.drawing.direct_labels import MAX_LEGEND_ENTRIES
from bench.reporting.drawing.lanes import is_degraded
from bench.reporting.figures import scaling
from bench.reporting.page.packing import compress_text
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import CELL_COLUMNS

MARKER_SIZE_PX, CROSS_SIZE_PX = 9, 11
DEGRADED_MARKER = {"symbol": "triangle-left-open", "size": 16, "color": style.INK_COLOUR, "line": {"width": 1.4}}
CROSS_SPACING = 0.012
"""How far crosses of different strategies stand beside each other, as a share of their place."""
DEGRADED_LABEL = "degraded: time not representative"
OOM_LABEL = "out of memory"

PlotlyTrace = dict[str, Any]


@dataclass(frozen=True)
class InteractiveChart:
    title: str
    group: str
    """Charts of one group stand in one frame of the page, where a list chooses among them."""
    spec: dict[str, Any]
    """``data`` and ``layout``, as `plotly.graph_objects.Figure` takes them; ``customdata`` of a point is the anchor of
    its run on the page."""
    alt: str


@functools.cache
def load_plotly_js() -> str:
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@functools.cache
def compress_plotly_js() -> str:
    return compress_text(load_plotly_js())


# ---- throughput against memory


def build_explorer_charts(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> list[InteractiveChart]:
    """A chart per place: throughput against peak memory, a point per run.

    Runs out of memory stand on the axis: where nothing ran at the memory they are predicted to need, else at the
    limit they hit, and at the right edge where no limit is known. The place with the most runs comes first.
    """
    groups_by_place = sorted(iterate_groups(sort_rows(table), "place"), key=lambda group: -len(group[1]))
    return [chart for (place,), rows in groups_by_place if (chart := _build_explorer_chart(str(place), rows, palette))]


def _build_explorer_chart(
    place: str, rows: pd.DataFrame, palette: dict[str, style.VariantStyle]
) -> InteractiveChart | None:
    fitted_rows = rows[(rows["status"] == "ok") & rows["counted_tflops"].notna() & rows["peak_allocated_bytes"].notna()]
    oom_rows = rows[rows["status"] == "oom"]
    if fitted_rows.empty:
        return None
    oom_memory_bytes = oom_rows["peak_allocated_bytes"].fillna(oom_rows["memory_limit_bytes"]).astype("Float64")
    largest_bytes = max(
        float(values.max())
        for values in (fitted_rows["peak_allocated_bytes"], oom_memory_bytes.dropna())
        if len(values)
    )
    oom_memory_bytes = oom_memory_bytes.fillna(1.06 * largest_bytes)
    unit, unit_bytes = presentation.choose_memory_unit(largest_bytes)
    noun = presentation.get_rank_noun(rows["device"].iloc[0])
    speed_label = format_tflops_label(rows["flop_convention"].iloc[0], noun)
    traces: list[PlotlyTrace] = []
    groups = list(iterate_groups(sort_rows(pd.concat([fitted_rows, oom_rows])), "variant", "evidence"))
    for group_index, ((variant, evidence), group) in enumerate(groups):
        variant_style = palette[str(variant)]
        fitted_group, oom_group = group[group["status"] == "ok"], group[group["status"] == "oom"]
        common_options = {
            "name": _format_trace_name(str(variant), str(evidence)),
            "legendgroup": f"{variant} {evidence}",
        }
        if len(fitted_group):
            traces.append(
                {
                    **common_options,
                    **_build_point_trace(
                        fitted_group,
                        fitted_group["peak_allocated_bytes"] / unit_bytes,
                        fitted_group["counted_tflops"],
                        noun,
                    ),
                    "marker": _build_marker(variant_style, str(evidence)),
                }
            )
        if len(oom_group):
            offset = 1 + CROSS_SPACING * (
                group_index - (len(groups) - 1) / 2
            )  # under one limit they would be one cross
            traces.append(
                {
                    **common_options,
                    **_build_point_trace(
                        oom_group, offset * oom_memory_bytes[oom_group.index] / unit_bytes, [0.0] * len(oom_group), noun
                    ),
                    "marker": {
                        **_build_marker(variant_style, str(evidence)),
                        "symbol": style.get_plotly_symbol("X", str(evidence)),
                        "size": CROSS_SIZE_PX,
                    },
                    "cliponaxis": False,
                    "showlegend": not len(fitted_group),
                }
            )
    degraded_rows = fitted_rows[fitted_rows["degraded"].fillna(False)]
    if len(degraded_rows):
        traces.append(
            _build_degraded_trace(
                degraded_rows, degraded_rows["peak_allocated_bytes"] / unit_bytes, degraded_rows["counted_tflops"], noun
            )
        )
    if len(oom_rows):
        traces.append(_build_legend_trace(OOM_LABEL))
    _shorten_legend(traces)
    layout = style.build_plotly_layout(f"peak allocated memory per {noun} ({unit})", speed_label)
    layout["xaxis"]["rangemode"] = "tozero"
    fastest_row = fitted_rows.iloc[int(fitted_rows["counted_tflops"].astype(float).argmax())]
    alt = (
        f"Scatter chart of {presentation.format_plural(len(fitted_rows), 'run')} on {place}: {speed_label} "
        "against peak "
        f"allocated memory. Fastest: {fastest_row['variant']}, {fastest_row['heading']}, "
        f"{presentation.format_number(float(fastest_row['counted_tflops']))} TFLOP/s at "
        f"{presentation.format_memory(fastest_row['peak_allocated_bytes'])}. "
        f"Out of memory: {len(oom_rows)}. The same runs are in the table."
    )
    return InteractiveChart(place, "explorer", {"data": traces, "layout": layout}, alt)


def _shorten_legend(traces: list[PlotlyTrace]) -> None:
    """Leave in the legend what has the most points where it would have more than `MAX_LEGEND_ENTRIES` entries; every
    point says its name when it is hovered over."""
    entries = [trace for trace in traces if trace.get("showlegend", True)]
    entries.sort(key=lambda trace: (trace["name"] not in (OOM_LABEL, DEGRADED_LABEL), -len(trace["x"])))
    for trace in entries[MAX_LEGEND_ENTRIES:]:
        trace["showlegend"] = False


def _format_trace_name(variant: str, evidence: str) -> str:
    return html.escape(variant if evidence == "measured" else f"{variant} ({evidence})", quote=False)


def _build_marker(variant_style: style.VariantStyle, evidence: str) -> dict[str, Any]:
    is_hollow = "open" in style.PLOTLY_FILL_SUFFIXES.get(evidence, "")
    line = {"width": 1.6} if is_hollow else {"width": 0.6, "color": style.INK_COLOUR}
    return {
        "color": variant_style.colour,
        "symbol": style.get_plotly_symbol(variant_style.marker, evidence),
        "size": MARKER_SIZE_PX,
        "line": line,
    }


def _build_point_trace(rows: pd.DataFrame, x: Any, y: Any, noun: str) -> PlotlyTrace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [round(float(value), 6) for value in x],
        "y": [float(value) for value in y],
        "customdata": list(rows["link"]),
        "text": [format_hover(row, noun) for row in rows.to_dict("records")],
        "hovertemplate": "%{text}<extra></extra>",
    }


def format_hover(row: dict[Any, Any], noun: str) -> str:
    """What a point says of its run: plotly's own markup, everything from the row escaped."""
    status_text = "degraded" if row["status"] == "ok" and is_degraded(row) else row["status"]
    is_ok = row["status"] == "ok"
    lines = [
        f"{row['variant']}, {row['precision']}",
        str(row["heading"]),
        f"{row['evidence']}: {status_text}"
        + (f" in {row['oom_phase']}" if row["status"] == "oom" and pd.notna(row["oom_phase"]) else ""),
    ]
    if is_ok:
        lines.append(f"{presentation.format_number(float(row['counted_tflops']))} TFLOP/s per {noun}")
        if pd.notna(row["step_time_median_s"]):
            lines.append(f"{presentation.format_seconds(float(row['step_time_median_s']))} per step")
        lines.append(f"{presentation.format_memory(float(row['peak_allocated_bytes']))} allocated at the peak")
    elif pd.notna(row["oom_bytes"]):
        lines.append(f"asked for {presentation.format_memory(float(row['oom_bytes']))} more")
    first_line, *other_lines = (html.escape(line, quote=False) for line in lines)
    return "<br>".join([f"<b>{first_line}</b>", *other_lines])


def _build_degraded_trace(rows: pd.DataFrame, x: Any, y: Any, noun: str) -> PlotlyTrace:
    """A large hollow triangle around points whose time is not representative."""
    return {**_build_point_trace(rows, x, y, noun), "name": DEGRADED_LABEL, "marker": DEGRADED_MARKER}


def _build_legend_trace(name: str) -> PlotlyTrace:
    marker = {"symbol": "x", "size": CROSS_SIZE_PX, "color": style.MUTED_COLOUR}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker}


# ---- lines over the number of ranks


def build_scaling_charts(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> list[InteractiveChart]:
    """A chart per model, precision and set of settings that was run on several numbers of ranks: see `scaling`."""
    if not scaling.FIGURE.needs.are_met_by(table):
        return []
    selected = scaling.select(table)
    anchors = {
        _build_cell_key(row): link
        for row, link in zip(table[::-1].to_dict("records"), table["link"][::-1], strict=True)
        if row["status"] in ("ok", "oom")
    }
    return [
        _build_scaling_chart(facet, palette, anchors) for _, facet in iterate_groups(selected, *scaling.FACET_COLUMNS)
    ]


def _build_cell_key(row: dict[Any, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in CELL_COLUMNS)


def _build_scaling_chart(
    facet: pd.DataFrame, palette: dict[str, style.VariantStyle], anchors: dict[tuple[str, ...], str]
) -> InteractiveChart:
    first_row = facet.iloc[0]
    noun, nouns = presentation.get_rank_noun(first_row["device"]), presentation.get_rank_nouns(first_row["device"])
    speed_label = format_tflops_label(first_row["flop_convention"], noun)
    traces: list[PlotlyTrace] = []
    for (series, evidence), points in iterate_groups(facet, "series", "evidence"):
        points = points.sort_values("world_size")
        variant_style, dash = palette[str(series)], style.get_plotly_dash(str(evidence))
        fitted_points, oom_points = points[points["median"].notna()], points[points["out_of_memory"] > 0]
        common_options = {"name": _format_trace_name(str(series), str(evidence)), "legendgroup": f"{series} {evidence}"}
        if len(fitted_points):
            line = {"color": variant_style.colour, "dash": dash, "width": 2}
            error_bars = {"type": "data", "symmetric": False, "thickness": 1.2, "color": style.INK_COLOUR}
            error_bars["array"] = [
                float(high - median)
                for high, median in zip(fitted_points["high"], fitted_points["median"], strict=True)
            ]
            error_bars["arrayminus"] = [
                float(median - low) for low, median in zip(fitted_points["low"], fitted_points["median"], strict=True)
            ]
            trace_values = _build_cell_trace(fitted_points, fitted_points["median"], noun, anchors)
            error_options = (
                {"error_y": error_bars}
                if any(len(repeat_values) > 1 for repeat_values in fitted_points["points"])
                else {}
            )
            traces.append(
                {
                    **common_options,
                    **trace_values,
                    **error_options,
                    "mode": "lines+markers",
                    "line": line,
                    "marker": _build_marker(variant_style, str(evidence)),
                }
            )
        if len(oom_points):
            cross_marker = {
                **_build_marker(variant_style, str(evidence)),
                "symbol": style.get_plotly_symbol("X", str(evidence)),
                "size": CROSS_SIZE_PX,
            }
            oom_trace = _build_cell_trace(oom_points, [0.0] * len(oom_points), noun, anchors)
            traces.append(
                {
                    **common_options,
                    **oom_trace,
                    "marker": cross_marker,
                    "cliponaxis": False,
                    "showlegend": not len(fitted_points),
                }
            )
    degraded_points = facet[facet["degraded"].astype(bool) & facet["median"].notna()]
    if len(degraded_points):
        traces.append(
            {
                **_build_cell_trace(degraded_points, degraded_points["median"], noun, anchors),
                "name": DEGRADED_LABEL,
                "marker": DEGRADED_MARKER,
            }
        )
    if (facet["out_of_memory"] > 0).any():
        traces.append(_build_legend_trace(OOM_LABEL))
    _shorten_legend(traces)
    world_sizes = sorted({int(size) for size in facet["world_size"]})
    layout = style.build_plotly_layout(f"{nouns} (world size, logarithmic)", speed_label)
    layout["xaxis"] |= {"type": "log", "tickvals": world_sizes, "ticktext": [str(size) for size in world_sizes]}
    title_parts = [
        first_row["model"],
        first_row["precision"],
        first_row["workload"],
        first_row["limit"],
        first_row["settings"],
        first_row["place"],
    ]
    title = " · ".join(str(name) for name in title_parts if name)
    alt = (
        f"Line chart of {speed_label} of {title} at "
        f"{presentation.format_world_sizes(world_sizes, first_row['device'], 12)} "
        f"for {presentation.format_list(list(dict.fromkeys(facet['series'])), 12)}. "
        "The same runs are in the table."
    )
    return InteractiveChart(title, "lines", {"data": traces, "layout": layout}, alt)


def _build_cell_trace(
    points: pd.DataFrame, y: Sequence[float] | pd.Series, noun: str, anchors: dict[tuple[str, ...], str]
) -> PlotlyTrace:
    rows = points.to_dict("records")
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [int(size) for size in points["world_size"]],
        "y": [float(value) for value in y],
        "customdata": [anchors.get(_build_cell_key(row), "") for row in rows],
        "text": [_format_cell_hover(row, noun) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _format_cell_hover(row: dict[Any, Any], noun: str) -> str:
    hover_lines = [
        f"{row['series']}, {presentation.format_ranks(int(row['world_size']), row['device'])}",
        str(row["evidence"]),
    ]
    if pd.isna(row["median"]):
        hover_lines.append("out of memory" + (f" in {row['oom_phase']}" if pd.notna(row["oom_phase"]) else ""))
    else:
        hover_lines.append(f"{presentation.format_number(row['median'])} TFLOP/s per {noun}")
        if len(row["points"]) > 1:
            range_text = f"{presentation.format_number(row['low'])} to {presentation.format_number(row['high'])}"
            hover_lines.append(f"median of {len(row['points'])} repeats, {range_text}")
        if row["degraded"]:
            hover_lines.append(DEGRADED_LABEL)
        if row["out_of_memory"]:
            hover_lines.append(f"{row['out_of_memory']} of the repeats out of memory")
    first_line, *other_lines = (html.escape(line, quote=False) for line in hover_lines)
    return "<br>".join([f"<b>{first_line}</b>", *other_lines])
