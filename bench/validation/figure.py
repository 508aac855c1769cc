"""Predicted against published, with the line on which they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.reporting.drawing import style
from bench.validation.metrics import SPEED
from bench.validation.scores import Score, pick_configurations

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")
"""Okabe & Ito, as everywhere."""

MARKERS = ("o", "s", "^", "D")
"""One for every eight sources."""

LEGEND_COLUMNS = 5

ERROR_BAND = 0.15


def draw_accuracy_figure(scores: Sequence[Score], path: Path) -> None:
    """Speeds on the left, relative to the first of a source's metric, memory on the right; rough rows are hollow."""
    counted = pick_configurations(score for score in scores if score.is_counted)
    with style.apply_report_style():
        figure, axes = plt.subplots(
            1, 2, figsize=(2 * style.FIGURE_WIDTH_IN, 1.1 * style.FIGURE_WIDTH_IN), layout="constrained"
        )
        panels = (
            ("step time, s", [score for score in counted if score.kind == SPEED]),
            ("memory, GB", [score for score in counted if score.kind != SPEED]),
        )
        sources = list(dict.fromkeys(score.reading.source for score in counted))
        for panel_axes, (title, panel_scores) in zip(axes, panels, strict=True):
            if panel_scores:
                _draw_panel(panel_axes, panel_scores, title, sources)
        for source in sources:
            axes[0].plot([], [], color=_get_colour(source, sources), label=source, **_build_point(source, sources))
        axes[0].plot([], [], color=style.GRID_COLOUR, linewidth=6, label=f"within {ERROR_BAND:.0%}")
        figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _compute_point(score: Score) -> tuple[float, float]:
    """Published and predicted, of speeds as seconds of a step."""
    if score.kind != SPEED:
        return score.quantity.value / 1e9, score.predicted_value / 1e9
    step_s = score.predicted_step_s or 1.0
    return step_s * (1 + score.error), step_s


def _draw_panel(axes: Axes, scores: Sequence[Score], title: str, sources: Sequence[str]) -> None:
    points = {id(score): _compute_point(score) for score in scores}
    values = [value for point in points.values() for value in point]
    limits = [0.8 * min(values), 1.25 * max(values)]
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    axes.set(title=title, xlabel="published", ylabel="predicted")
    low, high = ([share * limit for limit in limits] for share in (1 - ERROR_BAND, 1 + ERROR_BAND))
    axes.fill_between(limits, low, high, color=style.GRID_COLOUR, linewidth=0, zorder=1)
    axes.plot(limits, limits, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    for score in scores:
        colour = _get_colour(score.reading.source, sources)
        axes.plot(
            *points[id(score)],
            markeredgecolor=colour,
            markerfacecolor=colour if score.reading.is_complete else "white",
            zorder=3,
            **_build_point(score.reading.source, sources),
        )


def _get_colour(source: str, sources: Sequence[str]) -> str:
    return COLOURS[sources.index(source) % len(COLOURS)]


def _build_point(source: str, sources: Sequence[str]) -> dict[str, Any]:
    return {"marker": MARKERS[sources.index(source) // len(COLOURS)], "markersize": 4, "linestyle": "none"}
