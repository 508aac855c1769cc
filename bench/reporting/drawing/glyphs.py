"""The marks that lane figures share: bars with their repeats, runs out of memory, and the legend that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.reporting.drawing import labels, style
from bench.reporting.drawing.lanes import Lane

MAX_SHORT_NOTE_CHARS = 20
"""Characters that fit behind every bar."""

LONG_BAR = 0.55
"""Share of the axis from which on no longer note fits behind a bar."""

BAR_HEIGHT_IN = 0.13
DEGRADED_LEGEND_ENTRY: tuple[Artist, str] = (
    Line2D([], [], color=style.INK_COLOUR, marker="<", linestyle="", markerfacecolor="white", markersize=7),
    "degraded: time not representative",
)
"""The legend's entry for runs whose time does not represent the speed."""


def format_lane_label(row: Mapping[Any, Any] | pd.Series) -> str:
    """A lane's label: the variant, and what kind of evidence it is unless it was measured."""
    return str(row["variant"]) if row["evidence"] == "measured" else f"{row['variant']} ({row['evidence']})"


def draw_bar(axes: Axes, lane: Lane, value: float, variant_style: style.VariantStyle, *, left: float = 0.0) -> None:
    """The bar of one lane, filled as its kind of evidence asks."""
    axes.barh(
        lane.y,
        value - left,
        BAR_HEIGHT_IN,
        left=left,
        zorder=2,
        **style.build_bar_style(variant_style.colour, lane.row["evidence"]),
    )


def draw_repeats(axes: Axes, lane: Lane, unit_size: float = 1.0) -> None:
    """Points of the repeats and a whisker from the lowest to the highest, where there is more than one."""
    points = [point / unit_size for point in lane.row["points"]]
    if len(points) > 1:
        axes.plot([points[0], points[-1]], [lane.y] * 2, color=style.INK_COLOUR, linewidth=1.2, zorder=3)
        axes.plot(points, [lane.y] * len(points), "|", color=style.INK_COLOUR, markersize=7, zorder=3)


def draw_note(axes: Axes, lane: Lane, x: float, text: str) -> None:
    """Words beside the end of a lane's bar: before it where nothing would fit behind it, within the limits of x."""
    is_before_end = x > LONG_BAR * axes.get_xlim()[1] and len(text) > MAX_SHORT_NOTE_CHARS
    axes.annotate(
        text, (x, lane.y), xytext=(-5 if is_before_end else 5, 0), textcoords="offset points", va="center",
        ha="right" if is_before_end else "left", fontsize=7.5, zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
    )  # fmt: skip


def is_degraded(row: Mapping[Any, Any] | pd.Series) -> bool:
    """Whether a row (or cell) ran, and its time does not represent the speed."""
    return bool(pd.notna(row["degraded"]) and row["degraded"])


def draw_degraded_marker(axes: Axes, lane: Lane, x: float) -> None:
    """A hollow triangle at the end of the bar: the time is not representative."""
    axes.plot(x, lane.y, "<", markersize=7, markerfacecolor="white", markeredgecolor=style.INK_COLOUR, zorder=4)


def draw_oom_cross(axes: Axes, x: float, y: float, colour: str, evidence: str) -> None:
    """A run out of memory, on the axis: filled if it was measured, hollow or half filled if it was not."""
    marker_options = style.build_marker_style(colour, evidence)
    edge_options = {"markeredgecolor": style.INK_COLOUR} if evidence == "measured" else {"markeredgewidth": 1.4}
    axes.plot(x, y, "X", markersize=9, clip_on=False, zorder=5, **{**marker_options, **edge_options})


def draw_oom_lane(axes: Axes, lane: Lane, show_requested: bool = False) -> None:
    """A cross on the axis and where memory ran out, in words."""
    row = lane.row
    marker_options = style.build_marker_style(style.OOM_COLOUR, row["evidence"])
    edge_options = {"markeredgecolor": "white"} if row["evidence"] == "measured" else {"markeredgewidth": 1.2}
    axes.plot(0, lane.y, "X", markersize=8, clip_on=False, zorder=5, **{**marker_options, **edge_options})
    text = format_oom_phase(row)
    if show_requested and pd.notna(row["oom_bytes"]):
        text += f", asked for {labels.format_memory(row['oom_bytes'])}"
    annotation = axes.annotate(
        text, (0, lane.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7.5,
        color=style.OOM_COLOUR, fontweight="bold", zorder=5,
    )  # fmt: skip
    annotation.set_in_layout(False)


def format_oom_phase(row: Mapping[Any, Any] | pd.Series) -> str:
    """``OOM in forward``."""
    return f"OOM in {row['oom_phase']}" if pd.notna(row["oom_phase"]) else "OOM"


def format_partial_oom(row: Mapping[Any, Any] | pd.Series) -> str:
    """What to say beside a value when some repeats ran out of memory: ``(1 of 3 repeats OOM)``; else nothing."""
    repeat_count = row["fitted"] + row["out_of_memory"]
    return f" ({row['out_of_memory']} of {repeat_count} repeats OOM)" if row["out_of_memory"] else ""


def build_legend_entries(
    cells: pd.DataFrame, extra_entries: Iterable[tuple[Artist, str]] = ()
) -> list[tuple[Artist, str]]:
    """Legend entries for what occurs in `cells`, and only that."""
    entries: list[tuple[Artist, str]] = []
    kinds = style.sort_evidence(cells["evidence"])
    if list(kinds) != ["measured"]:
        entries += [(Patch(**style.build_bar_style(style.MUTED_COLOUR, kind)), kind) for kind in kinds]
    entries += extra_entries
    if any(len(points) > 1 for points in cells["points"]):
        entries.append((Line2D([], [], color=style.INK_COLOUR, marker="|", linewidth=1.2), "repeats: range and median"))
    if (cells["out_of_memory"] > 0).any():
        cross_marker = Line2D(
            [], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8
        )
        entries.append((cross_marker, "out of memory"))
    if any(is_degraded(row) for row in cells.to_dict("records")):
        entries.append(DEGRADED_LEGEND_ENTRY)
    return entries
