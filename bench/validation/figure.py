"""Predicted against published, with the line on which they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.reporting.drawing import style
from bench.validation.metrics import SPEED
from bench.validation.scores import Score, group_by, pick_configurations

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")
"""Okabe & Ito, as everywhere."""

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
        for panel_axes, (title, panel_scores) in zip(axes, panels, strict=True):
            if panel_scores:
                _draw_panel(panel_axes, panel_scores, title)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _compute_point(score: Score) -> tuple[float, float]:
    """Published and predicted, of speeds as seconds of a step."""
    if score.kind != SPEED:
        return score.quantity.value / 1e9, score.predicted_value / 1e9
    step_s = score.predicted_step_s or 1.0
    return step_s * (1 + score.error), step_s


def _draw_panel(axes: Axes, scores: Sequence[Score], title: str) -> None:
    points = {id(score): _compute_point(score) for score in scores}
    values = [value for point in points.values() for value in point]
    limits = [0.8 * min(values), 1.25 * max(values)]
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    axes.set(title=title, xlabel="published", ylabel="predicted")
    low, high = ([share * limit for limit in limits] for share in (1 - ERROR_BAND, 1 + ERROR_BAND))
    axes.fill_between(limits, low, high, color=style.GRID_COLOUR, linewidth=0, zorder=1)
    axes.plot(limits, limits, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    groups = group_by(scores, lambda score: score.reading.source)
    for index, (source, group) in enumerate(groups.items()):
        colour = COLOURS[index % len(COLOURS)]
        for score in group:
            axes.plot(
                *points[id(score)],
                marker="o",
                markersize=4,
                markeredgecolor=colour,
                markerfacecolor=colour if score.reading.is_complete else "white",
                linestyle="none",
                zorder=3,
            )
        axes.plot([], [], marker="o", color=colour, linestyle="none", label=source)
    axes.plot([], [], color=style.GRID_COLOUR, linewidth=6, label=f"within {ERROR_BAND:.0%}")
    axes.legend(loc="upper left")
