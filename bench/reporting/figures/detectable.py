"""Curves of the slowdown that repeated runs can find, by their number and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.comparison import ComparisonSettings, compute_detectable_change
from bench.comparison.result import format_percent
from bench.core import presentation
from bench.core.presentation import build_slug, format_plural
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import Drawing, compute_header_height_in, create_figure, draw_header

DEFAULT_SPREADS = (0.005, 0.01, 0.02, 0.05)
DEFAULT_REPEATS = (2, 3, 4, 5, 6, 8, 10, 15, 20)
LABEL_HEIGHT_SHARE = 0.05
"""Share of the axis' height that a label takes."""

LINE_STYLES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)))
CURVE_COLOURS = ("#0072b2", "#009e73", "#000000", "#d55e00", "#cc79a7")


def build_detectable_table(
    repeats: Sequence[int] = DEFAULT_REPEATS,
    spreads: Sequence[float] = DEFAULT_SPREADS,
    configurations: int = 1,
    settings: ComparisonSettings | None = None,
) -> pd.DataFrame:
    """Slowdown found 95 times in 100: a row per number of runs on each side, a column per spread from run to run."""
    values = [
        [
            compute_detectable_change(num_repeats, spread, configurations=configurations, settings=settings)
            for spread in spreads
        ]
        for num_repeats in repeats
    ]
    return pd.DataFrame(values, index=pd.Index(repeats, name="repeats"), columns=pd.Index(spreads, name="spread"))


def draw_detectable_slowdowns(
    repeats: Sequence[int] = DEFAULT_REPEATS,
    spreads: Sequence[float] = DEFAULT_SPREADS,
    configurations: int = 1,
    settings: ComparisonSettings | None = None,
) -> Drawing:
    """Curves of detectable change against the number of repeated runs, one per spread from run to run."""
    settings = settings or ComparisonSettings()
    table = build_detectable_table(repeats, spreads, configurations, settings)
    title = "What slowdown can be found"
    configuration_text = "a single configuration" if configurations == 1 else f"one of {configurations} configurations"
    subtitle = (
        f"Smallest true slowdown of {configuration_text} that is called a regression "
        f"95 times in 100, while equal code raises a false alarm in at most "
        f"{format_percent(settings.false_alarms, signed=False)} of comparisons"
    )
    figure = create_figure(
        style.FIGURE_WIDTH_IN, 3.1 + compute_header_height_in(title, subtitle, style.FIGURE_WIDTH_IN)
    )
    draw_header(figure, title, subtitle)
    axes = figure.add_subplot()
    axis_ratio = float(np.nanmax(table.to_numpy(float))) / settings.threshold
    label_ys = _separate_labels(
        [100 * float(table[spread].iloc[-1]) for spread in spreads], max(axis_ratio, 1.0) ** LABEL_HEIGHT_SHARE
    )
    for position, spread in enumerate(spreads):
        values = 100 * table[spread].to_numpy(float)
        curve_style = {
            "color": CURVE_COLOURS[position % 5],
            "linestyle": LINE_STYLES[position % 5],
            "marker": style.MARKERS[position % 12],
        }
        axes.plot(table.index, values, linewidth=1.5, markersize=4.5, **curve_style)
        axes.annotate(
            f"spread {format_percent(spread, signed=False)}", (table.index[-1], label_ys[position]), xytext=(7, 0),
            textcoords="offset points", va="center", fontsize=8, color=curve_style["color"], annotation_clip=False,
        )  # fmt: skip
    axes.axhline(100 * settings.threshold, color=style.LIMIT_COLOUR, linewidth=1.0, linestyle="-", zorder=1)
    axes.annotate(
        f"smaller changes do not count: {format_percent(settings.threshold, signed=False)}",
        (1, 100 * settings.threshold), xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points",
        ha="right", va="top", fontsize=7.5, color=style.LIMIT_COLOUR,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(repeats)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    slowdowns = table.to_numpy(float)
    largest_percent = 100 * float(np.nanmax(slowdowns))
    axes.set_ylim(100 * settings.threshold / 1.6, largest_percent * 1.25)
    ticks = [
        tick
        for tick in (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)
        if settings.threshold * 60 <= tick <= largest_percent * 1.25
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.grid(axis="both")
    axes.set_xlabel("runs of each side (repeats)")
    axes.set_ylabel("detectable slowdown")
    slowdown_texts = []
    if 5 in table.index:
        slowdown_by_spread = dict(zip(spreads, table.loc[5].to_numpy(float), strict=True))
        slowdown_texts = [
            f"{format_percent(spread, signed=False)} spread and 5 runs: {format_percent(slowdown, signed=False)}"
            for spread, slowdown in slowdown_by_spread.items()
        ]
    alt_text = (
        "Curves of detectable slowdown against the number of runs, one per spread. "
        f"{presentation.format_list(slowdown_texts)}."
    )
    caption = f"{title}: {subtitle[0].lower()}{subtitle[1:]}. Spread: standard deviation of a run's median step time."
    return Drawing(
        build_slug("detectable", format_plural(configurations, "configuration")),
        title,
        figure,
        caption,
        alt_text,
        wide=False,
    )


def _separate_labels(values: Sequence[float], ratio: float) -> list[float]:
    """Heights of labels on a logarithmic axis, near their values; two of them are apart by at least a ratio."""
    label_ys = list(values)
    for lower, upper in pairwise(sorted(range(len(values)), key=lambda index: values[index])):
        label_ys[upper] = max(label_ys[upper], ratio * label_ys[lower])
    return label_ys
