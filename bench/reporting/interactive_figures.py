"""Figures to hover over: the same points as the static ones, each with its numbers in words.

Colours, dashes and fills are those of `bench.reporting.style` and of the static figures.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bench.reporting import style
from bench.reporting.agreement import MEMORY, SPEED, UNITS
from bench.reporting.cells import by
from bench.reporting.figures import agreement, paper, sharding_factor
from bench.reporting.labels import GIB, memory, number
from bench.reporting.paper import COMPARISONS


def paper_figure(points: pd.DataFrame, quantity: str) -> go.Figure:
    """One quantity of one of the paper's figures over the number of GPUs.

    Parameters
    ----------
    points: DataFrame
        Rows of one figure, as `bench.reporting.figures.paper.select` gives them.
    quantity: str
        Which of its quantities: ``TFLOP/s``, ``allocated``, ...
    """
    shown = points[(points["quantity"] == quantity) & points["world_size"].notna()]
    names = sorted(set(shown["series"]), key=paper.series_order)
    comparison = next(one for one in COMPARISONS if one.figure == points["figure"].iloc[0])
    up = next(one.axis for one in comparison.quantities if one.short == quantity)
    figure = _empty(f"{comparison.figure}: {comparison.title}", "GPUs (world size, logarithmic)", up)
    figure.update_xaxes(type="log", tickvals=sorted(set(shown["world_size"])))
    for (series, kind), line in by(shown, "series", "evidence"):
        line = line.sort_values("world_size")
        ran = line[line["value"].notna()]
        colour = paper.COLOURS[names.index(series) % len(paper.COLOURS)]
        hover = [
            f"<b>{series}, {kind}</b><br>{int(row['world_size'])} GPUs: {number(row['value'], 4)}"
            f"<br>{number(row['low'], 4)} to {number(row['high'], 4)}" + ("<br>degraded" if row["degraded"] else "")
            for row in ran.to_dict("records")
        ]
        figure.add_trace(
            go.Scatter(
                x=ran["world_size"], y=ran["value"], name=f"{series}, {kind}", mode="lines+markers",
                error_y=_bars(ran["value"], ran["low"], ran["high"], colour), hovertext=hover, hoverinfo="text",
                line={"color": colour, "dash": style.dash(kind)},
                marker=_marker(colour, paper.MARKERS[kind], kind),
            )
        )  # fmt: skip
        _lost(figure, line[line["out_of_memory"]], "world_size", f"{series}, {kind}: out of memory", colour)
    return figure


def trade_off(selected: pd.DataFrame) -> go.Figure:
    """Peak memory against speed, a line over the sharding factors.

    Parameters
    ----------
    selected: DataFrame
        As `bench.reporting.figures.sharding_factor.select` gives it, of one configuration.
    """
    noun = "GPU" if selected["device"].iloc[0] == "cuda" else "process"
    title = f"Memory against speed: {sharding_factor.subject(selected)}"
    figure = _empty(title, f"peak memory per {noun} (GiB)", f"model TFLOP/s per {noun}")
    figure.update_yaxes(rangemode="tozero")
    ticks = [step * 10**power for power in range(-3, 4) for step in (1, 2, 5)]
    figure.update_xaxes(type="log", tickvals=ticks, title=f"peak memory per {noun} (GiB, logarithmic)")
    for (strategy, series, kind), line in by(selected, "strategy", "series", "evidence"):
        line = line.sort_values("sharding_factor")
        ran = line[line["tflops"].notna()]
        colour = sharding_factor.COLOURS[strategy]
        hover = [
            f"<b>{series}, F = {row['sharding_factor']}, {kind}</b><br>{memory(row['memory'])} "
            f"({memory(row['memory_low'])} to {memory(row['memory_high'])})<br>{number(row['tflops'])} TFLOP/s "
            f"({number(row['tflops_low'])} to {number(row['tflops_high'])})"
            + ("" if pd.isna(row["exposed"]) else f"<br>{number(100 * row['exposed'], 2)} % communication not hidden")
            + ("<br>degraded" if row["degraded"] else "")
            for row in ran.to_dict("records")
        ]
        figure.add_trace(
            go.Scatter(
                x=ran["memory"] / GIB, y=ran["tflops"], name=f"{series}, {kind}", mode="lines+markers+text",
                text=[f"F={factor}" for factor in ran["sharding_factor"]],
                textposition="top center" if strategy == "fsdp1" else "bottom center",
                textfont={"size": 10, "color": colour}, hovertext=hover, hoverinfo="text",
                line={"color": colour, "dash": style.dash(kind)},
                marker=_marker(colour, sharding_factor.MARKERS[strategy], kind),
            )
        )  # fmt: skip
        lost = line[line["out_of_memory"] & line["memory"].notna()]
        named = lost.assign(needed=lost["memory"] / GIB)
        _lost(figure, named, "needed", f"{series}, {kind}: out of memory", colour)
    return figure


def deviations(pairs: pd.DataFrame, quantity: str) -> go.Figure:
    """How far each estimate is off, over the value it is held against.

    Parameters
    ----------
    pairs: DataFrame
        As `bench.reporting.agreement.pairs` gives them.
    quantity: str
        `bench.reporting.agreement.SPEED` or `MEMORY`.
    """
    found = pairs[pairs["quantity"] == quantity]
    looks = agreement.look(found)
    figure = _empty(f"Deviation: {quantity}", UNITS[quantity], "deviation of the estimate (%)")
    figure.update_xaxes(type="log")
    figure.add_hrect(y0=-100 * agreement.BAND, y1=100 * agreement.BAND, fillcolor=style.GRID, line_width=0,
                     layer="below")  # fmt: skip
    for (source, against, kind), group in by(found, "source", "against", "evidence"):
        colour, marker = looks[str(source)]
        hover = [
            f"<b>{row['label']}</b><br>{against}: {number(row['reference'], 4)} "
            f"({number(row['reference_low'], 4)} to {number(row['reference_high'], 4)})<br>{kind}: "
            f"{number(row['value'], 4)} ({number(row['low'], 4)} to {number(row['high'], 4)})<br>"
            f"{agreement.percent(row['deviation'], sign=True)}" + ("<br>degraded" if row["degraded"] else "")
            for row in group.to_dict("records")
        ]
        deviation = 100 * group["deviation"]
        low, high = (100 * (group["value"] / group[f"reference_{end}"] - 1) for end in ("high", "low"))
        figure.add_trace(
            go.Scatter(
                x=group["reference"], y=deviation, name=f"{source}: {kind} against {against}", mode="markers",
                error_y=_bars(deviation, low, high, colour), hovertext=hover, hoverinfo="text",
                marker=_marker(colour, marker, kind),
            )
        )  # fmt: skip
    return figure


def _empty(title: str, across: str, up: str) -> go.Figure:
    """A figure in the project's style with nothing in it."""
    figure = go.Figure(layout=style.interactive_layout(across, up))
    title_font = {"size": 15, "weight": "bold"}
    figure.update_layout(title={"text": title, "font": title_font, "x": 0.01}, width=760, height=480)
    figure.update_layout(margin={"l": 60, "r": 20, "t": 60, "b": 60}, yaxis_rangemode="normal")
    return figure


def _marker(colour: str, marker: str, kind: str) -> dict[str, Any]:
    return {"symbol": style.symbol(marker, kind), "size": 9, "color": colour, "line": {"width": 1.5, "color": colour}}


def _bars(middle: pd.Series, low: pd.Series, high: pd.Series, colour: str) -> dict[str, Any]:
    above, below = (high - middle).clip(lower=0), (middle - low).clip(lower=0)
    return {"type": "data", "array": above, "arrayminus": below, "color": colour, "thickness": 1, "width": 3}


def _lost(figure: go.Figure, lost: pd.DataFrame, across: str, name: str, colour: str) -> None:
    """Runs out of memory, on the axis."""
    if len(lost):
        figure.add_trace(
            go.Scatter(
                x=lost[across], y=[0.0] * len(lost), name=name, mode="markers", hoverinfo="name+x", cliponaxis=False,
                marker={"symbol": "x", "size": 11, "color": colour, "line": {"width": 1, "color": style.INK}},
            )
        )  # fmt: skip


__all__ = ["MEMORY", "SPEED", "deviations", "paper_figure", "trade_off"]
