"""The marks that lane figures share: bars with their repeats, runs out of memory, and the legend that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.reporting import labels, style
from bench.reporting.lanes import Lane

SHORT_NOTE = 20
"""Characters that fit behind every bar."""

LONG_BAR = 0.55
"""Share of the axis from which on no longer note fits behind a bar."""

BAR_IN = 0.13
DEGRADED: tuple[Artist, str] = (
    Line2D([], [], color=style.INK, marker="<", linestyle="", markerfacecolor="white", markersize=7),
    "degraded: time not representative",
)
"""The legend's entry for runs whose time does not represent the speed."""


def label(row: Mapping[Any, Any] | pd.Series) -> str:
    """A lane's label: the variant, and what kind of evidence it is unless it was measured."""
    return str(row["variant"]) if row["evidence"] == "measured" else f"{row['variant']} ({row['evidence']})"


def bar(axes: Axes, lane: Lane, value: float, mark: style.Mark, *, left: float = 0.0) -> None:
    """The bar of one lane, filled as its kind of evidence asks."""
    axes.barh(lane.y, value - left, BAR_IN, left=left, zorder=2, **style.bar_style(mark.colour, lane.row["evidence"]))


def repeats(axes: Axes, lane: Lane, size: float = 1.0) -> None:
    """Points of the repeats and a whisker from the lowest to the highest, where there is more than one."""
    points = [point / size for point in lane.row["points"]]
    if len(points) > 1:
        axes.plot([points[0], points[-1]], [lane.y] * 2, color=style.INK, linewidth=1.2, zorder=3)
        axes.plot(points, [lane.y] * len(points), "|", color=style.INK, markersize=7, zorder=3)


def note(axes: Axes, lane: Lane, x: float, text: str) -> None:
    """Words beside the end of a lane's bar: before it where nothing would fit behind it, within the limits of x."""
    before = x > LONG_BAR * axes.get_xlim()[1] and len(text) > SHORT_NOTE
    axes.annotate(
        text, (x, lane.y), xytext=(-5 if before else 5, 0), textcoords="offset points", va="center",
        ha="right" if before else "left", fontsize=7.5, zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
    )  # fmt: skip


def is_degraded(row: Mapping[Any, Any] | pd.Series) -> bool:
    """Whether a row (or cell) ran, and its time does not represent the speed."""
    return bool(pd.notna(row["degraded"]) and row["degraded"])


def degraded(axes: Axes, lane: Lane, x: float) -> None:
    """A hollow triangle at the end of the bar: the time is not representative."""
    axes.plot(x, lane.y, "<", markersize=7, markerfacecolor="white", markeredgecolor=style.INK, zorder=4)


def cross(axes: Axes, x: float, y: float, colour: str, evidence: str) -> None:
    """A run out of memory, on the axis: filled if it was measured, hollow or half filled if it was not."""
    look = style.marker_style(colour, evidence)
    edge = {"markeredgecolor": style.INK} if evidence == "measured" else {"markeredgewidth": 1.4}
    axes.plot(x, y, "X", markersize=9, clip_on=False, zorder=5, **{**look, **edge})


def out_of_memory(axes: Axes, lane: Lane, asked_for: bool = False) -> None:
    """A cross on the axis and where memory ran out, in words."""
    row = lane.row
    look = style.marker_style(style.OOM_COLOUR, row["evidence"])
    edge = {"markeredgecolor": "white"} if row["evidence"] == "measured" else {"markeredgewidth": 1.2}
    axes.plot(0, lane.y, "X", markersize=8, clip_on=False, zorder=5, **{**look, **edge})
    text = oom_words(row)
    if asked_for and pd.notna(row["oom_bytes"]):
        text += f", asked for {labels.memory(row['oom_bytes'])}"
    annotation = axes.annotate(
        text, (0, lane.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7.5,
        color=style.OOM_COLOUR, fontweight="bold", zorder=5,
    )  # fmt: skip
    annotation.set_in_layout(False)


def oom_words(row: Mapping[Any, Any] | pd.Series) -> str:
    """``OOM in forward``."""
    return f"OOM in {row['oom_phase']}" if pd.notna(row["oom_phase"]) else "OOM"


def partly_oom(row: Mapping[Any, Any] | pd.Series) -> str:
    """What to say beside a value when some repeats ran out of memory: ``(1 of 3 repeats OOM)``; else nothing."""
    runs = row["fitted"] + row["out_of_memory"]
    return f" ({row['out_of_memory']} of {runs} repeats OOM)" if row["out_of_memory"] else ""


def key(cells: pd.DataFrame, extra: Iterable[tuple[Artist, str]] = ()) -> list[tuple[Artist, str]]:
    """Legend entries for what occurs in `cells`, and only that."""
    entries: list[tuple[Artist, str]] = []
    kinds = style.evidence_in_order(cells["evidence"])
    if list(kinds) != ["measured"]:
        entries += [(Patch(**style.bar_style(style.MUTED, kind)), kind) for kind in kinds]
    entries += extra
    if any(len(points) > 1 for points in cells["points"]):
        entries.append((Line2D([], [], color=style.INK, marker="|", linewidth=1.2), "repeats: range and median"))
    if (cells["out_of_memory"] > 0).any():
        cross = Line2D([], [], color=style.OOM_COLOUR, marker="X", linestyle="", markeredgecolor="white", markersize=8)
        entries.append((cross, "out of memory"))
    if any(is_degraded(row) for row in cells.to_dict("records")):
        entries.append(DEGRADED)
    return entries
