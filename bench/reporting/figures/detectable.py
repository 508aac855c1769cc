"""Curves of the slowdown that repeated runs can find, by their number and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.comparison import Settings, detectable_change
from bench.comparison.words import percent
from bench.reporting import labels, style
from bench.reporting.drawing import Drawing, header, header_height_in, new_figure
from bench.reporting.labels import counted, slug

SPREADS = (0.005, 0.01, 0.02, 0.05)
REPEATS = (2, 3, 4, 5, 6, 8, 10, 15, 20)
LABEL_SHARE = 0.05
"""Share of the axis' height that a label takes."""

LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)))
CURVE_COLOURS = ("#0072b2", "#009e73", "#000000", "#d55e00", "#cc79a7")


def detectable_table(
    repeats: Sequence[int] = REPEATS,
    spreads: Sequence[float] = SPREADS,
    configurations: int = 1,
    settings: Settings | None = None,
) -> pd.DataFrame:
    """Slowdown found 95 times in 100: a row per number of runs on each side, a column per spread from run to run."""
    values = [
        [detectable_change(count, spread, configurations=configurations, settings=settings) for spread in spreads]
        for count in repeats
    ]
    return pd.DataFrame(values, index=pd.Index(repeats, name="repeats"), columns=pd.Index(spreads, name="spread"))


def detectable_drawing(
    repeats: Sequence[int] = REPEATS,
    spreads: Sequence[float] = SPREADS,
    configurations: int = 1,
    settings: Settings | None = None,
) -> Drawing:
    """Curves of detectable change against the number of repeated runs, one per spread from run to run."""
    settings = settings or Settings()
    table = detectable_table(repeats, spreads, configurations, settings)
    title = "What slowdown can be found"
    which = "a single configuration" if configurations == 1 else f"one of {configurations} configurations"
    subtitle = (
        f"Smallest true slowdown of {which} that is called a regression "
        f"95 times in 100, while equal code raises a false alarm in at most "
        f"{percent(settings.false_alarms, signed=False)} of comparisons"
    )
    figure = new_figure(style.WIDTH_IN, 3.1 + header_height_in(title, subtitle, style.WIDTH_IN))
    header(figure, title, subtitle)
    axes = figure.add_subplot()
    room = float(np.nanmax(table.to_numpy(float))) / settings.threshold
    heights = _apart([100 * float(table[spread].iloc[-1]) for spread in spreads], max(room, 1.0) ** LABEL_SHARE)
    for number, spread in enumerate(spreads):
        values = 100 * table[spread].to_numpy(float)
        look = {
            "color": CURVE_COLOURS[number % 5],
            "linestyle": LINES[number % 5],
            "marker": style.MARKERS[number % 12],
        }
        axes.plot(table.index, values, linewidth=1.5, markersize=4.5, **look)
        axes.annotate(
            f"spread {percent(spread, signed=False)}", (table.index[-1], heights[number]), xytext=(7, 0),
            textcoords="offset points", va="center", fontsize=8, color=look["color"], annotation_clip=False,
        )  # fmt: skip
    axes.axhline(100 * settings.threshold, color=style.LIMIT_COLOUR, linewidth=1.0, linestyle="-", zorder=1)
    axes.annotate(
        f"smaller changes do not count: {percent(settings.threshold, signed=False)}",
        (1, 100 * settings.threshold), xycoords=("axes fraction", "data"), xytext=(0, -3), textcoords="offset points",
        ha="right", va="top", fontsize=7.5, color=style.LIMIT_COLOUR,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(repeats)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    known = table.to_numpy(float)
    top = 100 * float(np.nanmax(known))
    axes.set_ylim(100 * settings.threshold / 1.6, top * 1.25)
    ticks = [
        tick
        for tick in (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)
        if settings.threshold * 60 <= tick <= top * 1.25
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.grid(axis="both")
    axes.set_xlabel("runs of each side (repeats)")
    axes.set_ylabel("detectable slowdown")
    told = []
    if 5 in table.index:
        found = dict(zip(spreads, table.loc[5].to_numpy(float), strict=True))
        told = [f"{percent(s, signed=False)} spread and 5 runs: {percent(f, signed=False)}" for s, f in found.items()]
    alt = f"Curves of detectable slowdown against the number of runs, one per spread. {labels.listing(told)}."
    caption = f"{title}: {subtitle[0].lower()}{subtitle[1:]}. Spread: standard deviation of a run's median step time."
    return Drawing(
        slug("detectable", counted(configurations, "configuration")), title, figure, caption, alt, wide=False
    )


def _apart(values: Sequence[float], ratio: float) -> list[float]:
    """Heights of labels on a logarithmic axis, near their values; two of them are apart by at least a ratio."""
    heights = list(values)
    for lower, upper in pairwise(sorted(range(len(values)), key=lambda number: values[number])):
        heights[upper] = max(heights[upper], ratio * heights[lower])
    return heights
