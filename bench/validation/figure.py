"""Predicted against published, source by source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.reporting.drawing import style
from bench.validation.metrics import SPEED
from bench.validation.score_summaries import pick_configurations
from bench.validation.scores import Score

ERROR_BAND = 0.15
POINT_COLOUR = "#0072b2"
ROW_HEIGHT_IN, MARGIN_IN = 0.24, 1.2
RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Where the axis has ticks."""

PANELS = (("Step time, predicted / published", True), ("Memory, predicted / published", False))
"""Title, and whether it is speeds that it shows."""


def draw_accuracy_figure(scores: Sequence[Score], path: Path) -> None:
    """Draw and save the figure of `build_accuracy_figure`."""
    with style.apply_report_style():
        figure = build_accuracy_figure(scores)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def build_accuracy_figure(scores: Sequence[Score]) -> Figure:
    """A row per source, the least wrong on top: speeds as times of a step on the left, memory on the right. A row whose
    setting is stated in full is a dot, another a hollow one."""
    counted = pick_configurations(score for score in scores if score.is_counted)
    panels = [(title, [score for score in counted if (score.kind == SPEED) is is_speed]) for title, is_speed in PANELS]
    most_sources = max(len({score.reading.source for score in panel_scores}) for _, panel_scores in panels)
    size_in = 2.2 * style.FIGURE_WIDTH_IN, MARGIN_IN + ROW_HEIGHT_IN * max(most_sources, 4)
    figure, axes = plt.subplots(1, 2, figsize=size_in, layout="constrained")
    for panel_axes, (title, panel_scores) in zip(axes, panels, strict=True):
        _draw_panel(panel_axes, panel_scores, title)
    figure.supxlabel(
        f"● setting stated in full   ○ part of it assumed   grey: within {ERROR_BAND:.0%}   "
        "beside each source: rows, mean error",
        fontsize=8,
    )
    return figure


def _compute_ratio(score: Score) -> float:
    """Predicted against published, of speeds as seconds of a step."""
    return 1 / (1 + score.error) if score.kind == SPEED else 1 + score.error


def _draw_panel(axes: Axes, scores: Sequence[Score], title: str) -> None:
    by_source: dict[str, list[Score]] = {}
    for score in scores:
        by_source.setdefault(score.reading.source, []).append(score)
    errors = {source: fmean(abs(score.error) for score in rows) for source, rows in by_source.items()}
    sources = sorted(by_source, key=lambda source: errors[source])
    axes.axvspan(1 - ERROR_BAND, 1 + ERROR_BAND, color=style.GRID_COLOUR, linewidth=0, zorder=1)
    axes.axvline(1, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    for position, source in enumerate(sources):
        for score in by_source[source]:
            axes.plot(
                _compute_ratio(score),
                position,
                marker="o",
                markersize=3.5,
                markeredgecolor=POINT_COLOUR,
                markeredgewidth=0.7,
                markerfacecolor=POINT_COLOUR if score.reading.is_complete else "none",
                zorder=3,
            )
    ratios = [_compute_ratio(score) for score in scores]
    axes.set(xscale="log", xlim=(0.9 * min([0.7, *ratios]), 1.1 * max([1.4, *ratios])), title=title)
    axes.set_ylim(len(sources) - 0.5, -0.5)
    axes.set_yticks(
        range(len(sources)), [f"{source}  {len(by_source[source])}, {errors[source]:.1%}" for source in sources]
    )
    axes.xaxis.set_major_locator(FixedLocator(RATIOS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
