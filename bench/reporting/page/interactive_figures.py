"""Figures to hover over: the same points as the static ones, each with its numbers in words.

Colours, dashes and fills are those of `bench.reporting.drawing.style` and of the static figures.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bench.config.flop_conventions import format_tflops_label
from bench.core.presentation import format_memory, format_number, format_percent
from bench.core.units import GIB
from bench.reporting.drawing import style
from bench.reporting.figures import agreement, paper, sharding_factor
from bench.reporting.paper.comparisons import PAPER_COMPARISONS
from bench.reporting.tables.agreement import MEMORY, QUANTITY_UNITS, SPEED
from bench.reporting.tables.cells import iterate_groups


def build_paper_figure(points: pd.DataFrame, quantity: str) -> go.Figure:
    """One quantity of one of the paper's figures over the number of GPUs.

    Parameters
    ----------
    points: DataFrame
        Rows of one figure, as `bench.reporting.figures.paper.select` gives them.
    quantity: str
        Which of its quantities: ``TFLOP/s``, ``allocated``, ...
    """
    quantity_points = points[(points["quantity"] == quantity) & points["world_size"].notna()]
    series_names = sorted(set(quantity_points["series"]), key=paper.build_series_sort_key)
    comparison = next(candidate for candidate in PAPER_COMPARISONS if candidate.figure == points["figure"].iloc[0])
    y_label = next(candidate.axis_label for candidate in comparison.quantities if candidate.short_name == quantity)
    figure = _create_figure(f"{comparison.figure}: {comparison.title}", "GPUs (world size, logarithmic)", y_label)
    figure.update_xaxes(type="log", tickvals=sorted(set(quantity_points["world_size"])))
    for (series, evidence), series_points in iterate_groups(quantity_points, "series", "evidence"):
        series_points = series_points.sort_values("world_size")
        fitted_points = series_points[series_points["value"].notna()]
        colour = paper.SERIES_COLOURS[series_names.index(series) % len(paper.SERIES_COLOURS)]
        hover_texts = [
            f"<b>{series}, {evidence}</b><br>{int(row['world_size'])} GPUs: {format_number(row['value'], 4)}"
            f"<br>{format_number(row['low'], 4)} to {format_number(row['high'], 4)}"
            + ("<br>degraded" if row["degraded"] else "")
            for row in fitted_points.to_dict("records")
        ]
        figure.add_trace(
            go.Scatter(
                x=fitted_points["world_size"], y=fitted_points["value"], name=f"{series}, {evidence}",
                mode="lines+markers",
                error_y=_build_error_bars(fitted_points["value"], fitted_points["low"], fitted_points["high"], colour),
                hovertext=hover_texts, hoverinfo="text",
                line={"color": colour, "dash": style.get_plotly_dash(evidence)},
                marker=_build_marker(colour, paper.EVIDENCE_MARKERS[evidence], evidence),
            )
        )  # fmt: skip
        _add_oom_trace(
            figure,
            series_points[series_points["out_of_memory"]],
            "world_size",
            f"{series}, {evidence}: out of memory",
            colour,
        )
    return figure


def build_trade_off_figure(selected: pd.DataFrame) -> go.Figure:
    """Peak memory against speed, a line over the sharding factors.

    Parameters
    ----------
    selected: DataFrame
        As `bench.reporting.figures.sharding_factor.select` gives it, of one configuration.
    """
    noun = "process" if selected["device"].iloc[0] == "cpu" else "GPU"
    title = f"Memory against speed: {sharding_factor.describe_subject(selected)}"
    speed_label = format_tflops_label(selected["flop_convention"].iloc[0], noun)
    figure = _create_figure(title, f"peak memory per {noun} (GiB)", speed_label)
    figure.update_yaxes(rangemode="tozero")
    ticks = [step * 10**power for power in range(-3, 4) for step in (1, 2, 5)]
    figure.update_xaxes(type="log", tickvals=ticks, title=f"peak memory per {noun} (GiB, logarithmic)")
    for (strategy, series, evidence), series_points in iterate_groups(selected, "strategy", "series", "evidence"):
        series_points = series_points.sort_values("sharding_factor")
        fitted_points = series_points[series_points["tflops"].notna()]
        mark, factor_line = sharding_factor.find_line_style(strategy)
        colour = mark.colour
        hover_texts = [
            f"<b>{series}, F = {row['sharding_factor']}, {evidence}</b><br>{format_memory(row['memory'])} "
            f"({format_memory(row['memory_low'])} to "
            f"{format_memory(row['memory_high'])})<br>{format_number(row['tflops'])} TFLOP/s "
            f"({format_number(row['tflops_low'])} to {format_number(row['tflops_high'])})"
            + (
                ""
                if pd.isna(row["exposed"])
                else f"<br>{format_number(100 * row['exposed'], 2)} % communication not hidden"
            )
            + ("<br>degraded" if row["degraded"] else "")
            for row in fitted_points.to_dict("records")
        ]
        figure.add_trace(
            go.Scatter(
                x=fitted_points["memory"] / GIB, y=fitted_points["tflops"], name=f"{series}, {evidence}",
                mode="lines+markers+text",
                text=[f"F={factor}" for factor in fitted_points["sharding_factor"]],
                textposition="top center" if factor_line.offset_log2 > 0 else "bottom center",
                textfont={"size": 10, "color": colour}, hovertext=hover_texts, hoverinfo="text",
                line={"color": colour, "dash": style.get_plotly_dash(evidence)},
                marker=_build_marker(colour, mark.marker, evidence),
            )
        )  # fmt: skip
        oom_points = series_points[series_points["out_of_memory"] & series_points["memory"].notna()]
        points_with_memory = oom_points.assign(needed=oom_points["memory"] / GIB)
        _add_oom_trace(figure, points_with_memory, "needed", f"{series}, {evidence}: out of memory", colour)
    return figure


def build_deviation_figure(pairs: pd.DataFrame, quantity: str) -> go.Figure:
    """How far each estimate is off, over the value it is held against.

    Parameters
    ----------
    pairs: DataFrame
        As `bench.reporting.tables.agreement.build_pairs` gives them.
    quantity: str
        `bench.reporting.tables.agreement.SPEED` or `MEMORY`.
    """
    quantity_pairs = pairs[pairs["quantity"] == quantity]
    source_styles = agreement.assign_source_styles(quantity_pairs)
    figure = _create_figure(f"Deviation: {quantity}", QUANTITY_UNITS[quantity], "deviation of the estimate (%)")
    figure.update_xaxes(type="log")
    figure.add_hrect(y0=-100 * agreement.CLOSE_DEVIATION, y1=100 * agreement.CLOSE_DEVIATION,
    fillcolor=style.GRID_COLOUR, line_width=0,
                     layer="below")  # fmt: skip
    for (source, reference_evidence, evidence), group in iterate_groups(
        quantity_pairs, "source", "against", "evidence"
    ):
        colour, marker = source_styles[str(source)]
        hover_texts = [
            f"<b>{row['label']}</b><br>{reference_evidence}: {format_number(row['reference'], 4)} "
            f"({format_number(row['reference_low'], 4)} to {format_number(row['reference_high'], 4)})<br>{evidence}: "
            f"{format_number(row['value'], 4)} ({format_number(row['low'], 4)} to {format_number(row['high'], 4)})<br>"
            f"{format_percent(row['deviation'], signed=True)}" + ("<br>degraded" if row["degraded"] else "")
            for row in group.to_dict("records")
        ]
        deviation = 100 * group["deviation"]
        low, high = (100 * (group["value"] / group[f"reference_{end}"] - 1) for end in ("high", "low"))
        figure.add_trace(
            go.Scatter(
                x=group["reference"], y=deviation, name=f"{source}: {evidence} against {reference_evidence}",
                mode="markers",
                error_y=_build_error_bars(deviation, low, high, colour), hovertext=hover_texts, hoverinfo="text",
                marker=_build_marker(colour, marker, evidence),
            )
        )  # fmt: skip
    return figure


def _create_figure(title: str, x_label: str, y_label: str) -> go.Figure:
    """A figure in the project's style with nothing in it."""
    figure = go.Figure(layout=style.build_plotly_layout(x_label, y_label))
    title_font = {"size": 15, "weight": "bold"}
    figure.update_layout(title={"text": title, "font": title_font, "x": 0.01}, width=760, height=480)
    figure.update_layout(margin={"l": 60, "r": 20, "t": 60, "b": 60}, yaxis_rangemode="normal")
    return figure


def _build_marker(colour: str, marker: str, evidence: str) -> dict[str, Any]:
    return {
        "symbol": style.get_plotly_symbol(marker, evidence),
        "size": 9,
        "color": colour,
        "line": {"width": 1.5, "color": colour},
    }


def _build_error_bars(values: pd.Series, low: pd.Series, high: pd.Series, colour: str) -> dict[str, Any]:
    above, below = (high - values).clip(lower=0), (values - low).clip(lower=0)
    return {"type": "data", "array": above, "arrayminus": below, "color": colour, "thickness": 1, "width": 3}


def _add_oom_trace(figure: go.Figure, oom_points: pd.DataFrame, x_column: str, name: str, colour: str) -> None:
    """Runs out of memory, on the axis."""
    if len(oom_points):
        figure.add_trace(
            go.Scatter(
                x=oom_points[x_column], y=[0.0] * len(oom_points), name=name, mode="markers", hoverinfo="name+x",
                cliponaxis=False,
                marker={"symbol": "x", "size": 11, "color": colour, "line": {"width": 1, "color": style.INK_COLOUR}},
            )
        )  # fmt: skip


__all__ = ["MEMORY", "SPEED", "build_deviation_figure", "build_paper_figure", "build_trade_off_figure"]
