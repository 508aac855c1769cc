"""How far the nearest settings of a search are off the points of a figure: a line per point, what counts shaded."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.claims.settings_search import TOLERANCE, SearchResult, SettingsSearch
from bench.claims.unstated_page import describe_settings, find_differing_axes, find_last_stage
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
    differing = find_differing_axes(search, [tried.settings for tried in shown])
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
                label=describe_settings(search, tried.settings, differing),
            )
        axes.set_yticks(range(len(points)), points)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(points) - 0.5, -0.5)
        limit = 1.2 * max(100 * TOLERANCE, *(100 * tried.worst_error for tried in shown))
        axes.set_xlim(-limit, limit)
        axes.set_xlabel("predicted against published, %", loc="left")
        figure.legend(loc="outside lower left", ncols=1)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def describe_search_figure(search: SettingsSearch, result: SearchResult) -> str:
    """The caption."""
    stage = find_last_stage(result)
    shown = stage.nearest[: len(COLOURS)]
    differing = find_differing_axes(search, [tried.settings for tried in shown])
    common = describe_settings(search, shown[0].settings, [name for name in search.axes if name not in differing])
    return (
        f"The nearest {len(shown)} of {search.num_settings:,} settings, predicted. The shaded part is within "
        f"{100 * TOLERANCE:.0f} %; {stage.num_reproducing} settings lie there at all these points. All shown have "
        f"{common}."
    )
