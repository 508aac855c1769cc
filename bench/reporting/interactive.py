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

from bench.reporting import labels, style
from bench.reporting.cells import by, in_order
from bench.reporting.figures import scaling
from bench.reporting.marks import is_degraded
from bench.reporting.packing import packed_text
from bench.reporting.table import CELL

SIZE, CROSS_SIZE = 9, 11
RING = {"symbol": "triangle-left-open", "size": 16, "color": style.INK, "line": {"width": 1.4}}
CROSSES_APART = 0.012
"""How far crosses of different strategies stand beside each other, as a share of their place."""
DEGRADED = "degraded: time not representative"
OOM = "out of memory"

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One interactive figure."""

    title: str
    group: str
    """Charts of one group stand in one frame of the page, where a list chooses among them."""
    spec: dict[str, Any]
    """``data`` and ``layout``, as `plotly.graph_objects.Figure` takes them; ``customdata`` of a point is the anchor of
    its run on the page."""
    alt: str


@functools.cache
def library() -> str:
    """The text of plotly.js."""
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@functools.cache
def packed_library() -> str:
    """plotly.js, compressed."""
    return packed_text(library())


# ---- throughput against memory


def explorer(table: pd.DataFrame, palette: dict[str, style.Mark]) -> list[Chart]:
    """A chart per place: throughput against peak memory, a point per run.

    Runs out of memory stand on the axis: where nothing ran at the memory they are predicted to need, else at the
    limit they hit, and at the right edge where no limit is known. The place with the most runs comes first.
    """
    places = sorted(by(in_order(table), "place"), key=lambda place: -len(place[1]))
    return [chart for (place,), rows in places if (chart := _explorer(str(place), rows, palette))]


def _explorer(place: str, rows: pd.DataFrame, palette: dict[str, style.Mark]) -> Chart | None:
    fitted = rows[(rows["status"] == "ok") & rows["tflops_per_gpu"].notna() & rows["peak_allocated_bytes"].notna()]
    lost = rows[rows["status"] == "oom"]
    if fitted.empty:
        return None
    at = lost["peak_allocated_bytes"].fillna(lost["memory_limit_bytes"]).astype("Float64")
    largest = max(float(values.max()) for values in (fitted["peak_allocated_bytes"], at.dropna()) if len(values))
    at = at.fillna(1.06 * largest)
    unit, size = labels.memory_unit(largest)
    noun = labels.rank_noun(rows["device"].iloc[0])
    traces: list[Trace] = []
    groups = list(by(in_order(pd.concat([fitted, lost])), "variant", "evidence"))
    for place_of, ((variant, kind), group) in enumerate(groups):
        mark = palette[str(variant)]
        ran, burst = group[group["status"] == "ok"], group[group["status"] == "oom"]
        common = {"name": _name(str(variant), str(kind)), "legendgroup": f"{variant} {kind}"}
        if len(ran):
            traces.append(
                {
                    **common,
                    **_points(ran, ran["peak_allocated_bytes"] / size, ran["tflops_per_gpu"], noun),
                    "marker": _marker(mark, str(kind)),
                }
            )
        if len(burst):
            aside = 1 + CROSSES_APART * (place_of - (len(groups) - 1) / 2)  # under one limit they would be one cross
            traces.append(
                {
                    **common,
                    **_points(burst, aside * at[burst.index] / size, [0.0] * len(burst), noun),
                    "marker": {**_marker(mark, str(kind)), "symbol": style.symbol("X", str(kind)), "size": CROSS_SIZE},
                    "cliponaxis": False,
                    "showlegend": not len(ran),
                }
            )
    degraded = fitted[fitted["degraded"].fillna(False)]
    if len(degraded):
        traces.append(_ring(degraded, degraded["peak_allocated_bytes"] / size, degraded["tflops_per_gpu"], noun))
    if len(lost):
        traces.append(_legend_only(OOM))
    layout = style.interactive_layout(f"peak allocated memory per {noun} ({unit})", f"model TFLOP/s per {noun}")
    layout["xaxis"]["rangemode"] = "tozero"
    fastest = fitted.iloc[int(fitted["tflops_per_gpu"].astype(float).argmax())]
    alt = (
        f"Scatter chart of {labels.counted(len(fitted), 'run')} on {place}: model TFLOP/s per {noun} against peak "
        f"allocated memory. Fastest: {fastest['variant']}, {fastest['heading']}, "
        f"{labels.number(float(fastest['tflops_per_gpu']))} TFLOP/s at "
        f"{labels.memory(fastest['peak_allocated_bytes'])}. "
        f"Out of memory: {len(lost)}. The same runs are in the table."
    )
    return Chart(place, "explorer", {"data": traces, "layout": layout}, alt)


def _name(variant: str, evidence: str) -> str:
    return html.escape(variant if evidence == "measured" else f"{variant} ({evidence})", quote=False)


def _marker(mark: style.Mark, evidence: str) -> dict[str, Any]:
    hollow = "open" in style.FILLS.get(evidence, "")
    line = {"width": 1.6} if hollow else {"width": 0.6, "color": style.INK}
    return {"color": mark.colour, "symbol": style.symbol(mark.marker, evidence), "size": SIZE, "line": line}


def _points(rows: pd.DataFrame, x: Any, y: Any, noun: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [round(float(value), 6) for value in x],
        "y": [float(value) for value in y],
        "customdata": list(rows["link"]),
        "text": [hover(row, noun) for row in rows.to_dict("records")],
        "hovertemplate": "%{text}<extra></extra>",
    }


def hover(row: dict[Any, Any], noun: str) -> str:
    """What a point says of its run: plotly's own markup, everything from the row escaped."""
    state = "degraded" if row["status"] == "ok" and is_degraded(row) else row["status"]
    ran = row["status"] == "ok"
    lines = [
        f"{row['variant']}, {row['precision']}",
        str(row["heading"]),
        f"{row['evidence']}: {state}"
        + (f" in {row['oom_phase']}" if row["status"] == "oom" and pd.notna(row["oom_phase"]) else ""),
    ]
    if ran:
        lines.append(f"{labels.number(float(row['tflops_per_gpu']))} TFLOP/s per {noun}")
        if pd.notna(row["step_time_median_s"]):
            lines.append(f"{labels.seconds(float(row['step_time_median_s']))} per step")
        lines.append(f"{labels.memory(float(row['peak_allocated_bytes']))} allocated at the peak")
    elif pd.notna(row["oom_bytes"]):
        lines.append(f"asked for {labels.memory(float(row['oom_bytes']))} more")
    head, *rest = (html.escape(line, quote=False) for line in lines)
    return "<br>".join([f"<b>{head}</b>", *rest])


def _ring(rows: pd.DataFrame, x: Any, y: Any, noun: str) -> Trace:
    """A large hollow triangle around points whose time is not representative."""
    return {**_points(rows, x, y, noun), "name": DEGRADED, "marker": RING}


def _legend_only(name: str) -> Trace:
    look = {"symbol": "x", "size": CROSS_SIZE, "color": style.MUTED}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": look}


# ---- lines over the number of ranks


def lines(table: pd.DataFrame, palette: dict[str, style.Mark]) -> list[Chart]:
    """A chart per model, precision and set of settings that was run on several numbers of ranks: see `scaling`."""
    selected = scaling.select(table)
    if selected.empty:
        return []
    anchors = {
        _cell_key(row): link
        for row, link in zip(table[::-1].to_dict("records"), table["link"][::-1], strict=True)
        if row["status"] in ("ok", "oom")
    }
    return [_lines(facet, palette, anchors) for _, facet in by(selected, *scaling.FACET)]


def _cell_key(row: dict[Any, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in CELL)


def _lines(facet: pd.DataFrame, palette: dict[str, style.Mark], anchors: dict[tuple[str, ...], str]) -> Chart:
    first = facet.iloc[0]
    noun, nouns = labels.rank_noun(first["device"]), labels.rank_nouns(first["device"])
    traces: list[Trace] = []
    for (series, kind), points in by(facet, "series", "evidence"):
        points = points.sort_values("world_size")
        mark, look = palette[str(series)], style.dash(str(kind))
        ran, lost = points[points["median"].notna()], points[points["out_of_memory"] > 0]
        common = {"name": _name(str(series), str(kind)), "legendgroup": f"{series} {kind}"}
        if len(ran):
            line = {"color": mark.colour, "dash": look, "width": 2}
            spread = {"type": "data", "symmetric": False, "thickness": 1.2, "color": style.INK}
            spread["array"] = [float(high - middle) for high, middle in zip(ran["high"], ran["median"], strict=True)]
            spread["arrayminus"] = [float(middle - low) for low, middle in zip(ran["low"], ran["median"], strict=True)]
            values = _cells(ran, ran["median"], noun, anchors)
            extra = {"error_y": spread} if any(len(several) > 1 for several in ran["points"]) else {}
            traces.append(
                {**common, **values, **extra, "mode": "lines+markers", "line": line, "marker": _marker(mark, str(kind))}
            )
        if len(lost):
            cross = {**_marker(mark, str(kind)), "symbol": style.symbol("X", str(kind)), "size": CROSS_SIZE}
            zeros = _cells(lost, [0.0] * len(lost), noun, anchors)
            traces.append({**common, **zeros, "marker": cross, "cliponaxis": False, "showlegend": not len(ran)})
    degraded = facet[facet["degraded"].astype(bool) & facet["median"].notna()]
    if len(degraded):
        traces.append({**_cells(degraded, degraded["median"], noun, anchors), "name": DEGRADED, "marker": RING})
    if (facet["out_of_memory"] > 0).any():
        traces.append(_legend_only(OOM))
    sizes = sorted({int(size) for size in facet["world_size"]})
    layout = style.interactive_layout(f"{nouns} (world size, logarithmic)", f"model TFLOP/s per {noun}")
    layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": [str(size) for size in sizes]}
    names = [first["model"], first["precision"], first["workload"], first["limit"], first["settings"], first["place"]]
    title = " · ".join(str(name) for name in names if name)
    alt = (
        f"Line chart of model TFLOP/s per {noun} of {title} at {labels.listing([str(size) for size in sizes], 12)} "
        f"{nouns} for {labels.listing(list(dict.fromkeys(facet['series'])), 12)}. The same runs are in the table."
    )
    return Chart(title, "lines", {"data": traces, "layout": layout}, alt)


def _cells(
    points: pd.DataFrame, y: Sequence[float] | pd.Series, noun: str, anchors: dict[tuple[str, ...], str]
) -> Trace:
    rows = points.to_dict("records")
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [int(size) for size in points["world_size"]],
        "y": [float(value) for value in y],
        "customdata": [anchors.get(_cell_key(row), "") for row in rows],
        "text": [_cell_hover(row, noun) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _cell_hover(row: dict[Any, Any], noun: str) -> str:
    words = [f"{row['series']}, {labels.ranks(int(row['world_size']), row['device'])}", str(row["evidence"])]
    if pd.isna(row["median"]):
        words.append("out of memory" + (f" in {row['oom_phase']}" if pd.notna(row["oom_phase"]) else ""))
    else:
        words.append(f"{labels.number(row['median'])} TFLOP/s per {noun}")
        if len(row["points"]) > 1:
            spread = f"{labels.number(row['low'])} to {labels.number(row['high'])}"
            words.append(f"median of {len(row['points'])} repeats, {spread}")
        if row["degraded"]:
            words.append(DEGRADED)
        if row["out_of_memory"]:
            words.append(f"{row['out_of_memory']} of the repeats out of memory")
    head, *rest = (html.escape(line, quote=False) for line in words)
    return "<br>".join([f"<b>{head}</b>", *rest])
