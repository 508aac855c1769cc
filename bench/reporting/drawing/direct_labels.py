"""Names beside what they name, where a legend would have more entries than a reader matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

MAX_LEGEND_ENTRIES = 8
"""Entries of a legend; with more, what is drawn is labelled directly."""
WIDE_FIGURE_IN = 7.2
"""Width of a figure with names at its right."""
LABEL_HEIGHT_IN = 0.15


@dataclass(frozen=True)
class DirectLabel:
    """A name and the point that it belongs to, in data coordinates."""

    text: str
    x: float
    y: float
    colour: str


def draw_direct_labels(axes: Axes, labels: Sequence[DirectLabel], axes_height_in: float) -> None:
    """Names at the right of the axes, each joined to its point by a thin line, in the order of the points' heights.

    The limits of the axes must be final. `axes_height_in` is at least `compute_labels_height_in`.
    """
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: (label.y, label.x))
    wanted = [(label.y - low) / (high - low) for label in ordered]
    heights = spread_apart(wanted, LABEL_HEIGHT_IN / axes_height_in)
    for label, height in zip(ordered, heights, strict=True):
        axes.annotate(
            label.text, (label.x, label.y), xytext=(1.03, height), textcoords="axes fraction", va="center", ha="left",
            fontsize=7, color=label.colour, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def compute_labels_height_in(count: int) -> float:
    """Inches of axes beside which so many names have room."""
    return LABEL_HEIGHT_IN * (count + 1)


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending positions between 0 and 1, moved so that neighbours are at least `gap` apart and the last is at most
    1."""
    spread: list[float] = []
    for position in positions:
        spread.append(max(position, spread[-1] + gap) if spread else max(position, 0.0))
    limit = 1.0
    for index in reversed(range(len(spread))):
        spread[index] = min(spread[index], limit)
        limit = spread[index] - gap
    return spread
