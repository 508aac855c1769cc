"""The timeline of a step as an interactive figure that suits light and dark pages."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from bench.explorer.step_timeline import StepTimeline
from bench.reporting.timelines.timeline import SPAN_KIND_COLOURS

INK_COLOUR, GRID_COLOUR = "#7d7d7d", "rgba(128, 128, 128, 0.3)"
"""Greys that can be read on white and on black."""

OPTIMIZER_COLOUR = "#8e5bb5"
"""In place of black, which a dark page hides."""


def build_timeline_figure(timeline: StepTimeline) -> go.Figure:
    """A lane per stream, a trace per kind of span; times in milliseconds."""
    traces_by_kind: dict[str, dict[str, list[Any]]] = {}
    for lane, span in timeline.spans:
        trace = traces_by_kind.setdefault(span.kind, {"y": [], "base": [], "x": [], "customdata": []})
        trace["y"].append(lane)
        trace["base"].append(round(span.start_s * 1e3, 4))
        trace["x"].append(round((span.end_s - span.start_s) * 1e3, 4))
        trace["customdata"].append(span.name)
    figure = go.Figure()
    for kind, trace in traces_by_kind.items():
        colour = {**SPAN_KIND_COLOURS, "optimizer": OPTIMIZER_COLOUR, "wait": "#a9a9a9"}.get(kind, INK_COLOUR)
        figure.add_bar(
            **trace,
            name=kind,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{customdata}<br>%{x:.3f} ms from %{base:.3f} ms<extra></extra>",
        )
    figure.update_layout(
        barmode="overlay",
        bargap=0.25,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK_COLOUR, "size": 12},
        legend={"orientation": "h", "y": -0.35},
        xaxis={"title": "ms", "gridcolor": GRID_COLOUR, "zeroline": False},
        yaxis={
            "categoryorder": "array",
            "categoryarray": list(reversed(timeline.lanes)),
            "automargin": True,
            "fixedrange": True,
        },
        dragmode="zoom",
    )
    return figure
