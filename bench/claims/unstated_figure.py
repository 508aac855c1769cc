"""How far the nearest settings of a search are off the points of a figure: a line per point, what counts shaded."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.claims.settings_search import TOLERANCE, SearchResult, SettingsSearch
from bench.claims.unstated_page import describe_settings, find_last_stage
from bench.reporting.drawing import style

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D")
"""Of the settings, the nearest first; the colours are Okabe & Ito's."""

LINE_HEIGHT_IN = 0.24


def draw_search_figure(search: SettingsSearch, result: SearchResult, path: Path) -> None:
    """The errors of the nearest settings at every point of the last group that any setting comes near, as a file."""
    stage = find_last_stage(result)
    points = list(stage.nearest[0].errors)
    shown = stage.nearest[: len(COLOURS)]
    with style.apply_report_style():
        height_in = LINE_HEIGHT_IN * (len(points) + len(shown)) + 1.0
        figure = Figure(figsize=(1.4 * style.FIGURE_WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color=style.GRID_COLOUR, linewidth=0, zorder=0)
        axes.axvline(0, color=style.INK_COLOUR, linewidth=0.8, zorder=1)
        for number, tried in enumerate(shown):
            offset = 0.15 * (number - (len(shown) - 1) / 2)
            axes.plot(
                [100 * tried.errors[point] for point in points],
                [position + offset for position in range(len(points))],
                linestyle="none",
                marker=MARKERS[number],
                markersize=4.5,
                markerfacecolor="white",
                color=COLOURS[number],
                label=describe_settings(search, tried.settings),
            )
        axes.set_yticks(range(len(points)), points)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.set_xlabel("predicted against published, %", loc="left")
        figure.legend(loc="outside lower left", ncols=1)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def describe_search_figure(search: SettingsSearch, result: SearchResult) -> str:
    """The caption."""
    stage = find_last_stage(result)
    num_shown = min(len(stage.nearest), len(COLOURS))
    return (
        f"The nearest {num_shown} of {search.num_settings:,} settings, predicted. The shaded part is within "
        f"{TOLERANCE:.0%}; {stage.num_reproducing} settings lie there at all these points."
    )
