"""How much the steps of a run differ from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, in_order
from bench.reporting.drawing import Drawing, Section
from bench.reporting.labels import CPU_NOTE, counted, listing, number, seconds, slug

TITLE = "Step-time spread"
HOW_TO_READ = (
    "One lane is one run, one dot one timed step: how much longer or shorter it took than the run's median, which is "
    "printed at the right. A step takes as long as its slowest rank. The box holds the middle half of the steps. A "
    "narrow lane is a steady run; dots far to the right are stragglers (another job, the allocator flushing, the "
    "network). A narrow lane does not make a comparison certain: steps of one run agree with each other more than "
    "with the next run, so compare strategies over repeated runs."
)
KEY: list[tuple[Artist, str]] = [
    (Line2D([], [], color=style.MUTED, marker="o", linestyle="", markersize=3.5), "a step"),
    (Patch(color="#c9c9c9"), "middle half of the steps"),
]
WIDEST_PERCENT = 60.0
"""Steps further from the median than this stand at the edge with their value, so that one does not hide the rest."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per run that kept its step times.

    Returns
    -------
    DataFrame
        The table's columns and ``median_s``, ``deviations`` (percent from the median, one per step), ``low`` and
        ``high`` (their quartiles) and ``repeats`` (how many runs of the same configuration there are).
    """
    ran = table[(table["status"] == "ok") & (table["steps"].map(len) > 0)]
    if ran.empty:
        return ran.assign(median_s=[], deviations=[])
    medians = [float(np.median(steps)) for steps in ran["steps"]]
    deviations = [100 * (steps / median - 1) for steps, median in zip(ran["steps"], medians, strict=True)]
    twins = ran.groupby([ran[name] for name in ("place", "evidence", "precision", "heading", "variant")], dropna=False)
    return in_order(
        ran.assign(
            median_s=medians,
            deviations=deviations,
            low=[np.percentile(steps, 25) for steps in deviations],
            high=[np.percentile(steps, 75) for steps in deviations],
            repeats=twins["run_id"].transform("size"),
        )
    )


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per place, precision and memory limit."""
    result = Section("spread", TITLE, HOW_TO_READ)
    selected = select(table)
    lost = table[(table["status"] == "oom") & table["evidence"].isin(["measured", "rehearsed"])]
    if selected.empty:
        result.nothing = "No run in this store kept the times of its steps."
    elif len(lost):
        which = listing([f"{name} × {count}" for name, count in lost["variant"].value_counts(sort=False).items()])
        result.nothing = f"Out of memory, so without timed steps: {counted(len(lost), 'run')} ({which})."
    for (place,), here in by(selected, "place"):
        every = np.concatenate(list(here["deviations"]))
        limits = (max(every.min() * 1.1 - 1, -WIDEST_PERCENT), min(every.max() * 1.1 + 1, WIDEST_PERCENT))
        for subject, groups in lanes.pages(here, _label):
            result.plan(_draw, groups, str(place), subject, limits, palette)
    return result


def _label(row: Mapping[Any, Any] | pd.Series) -> str:
    numbered = row["repeats"] > 1 and not pd.isna(row["repeat"])
    return marks.label(row) + (f" #{row['repeat']}" if numbered else "")


def _draw(
    groups: list[lanes.Group], place: str, subject: str, limits: tuple[float, float], palette: dict[str, style.Mark]
) -> Drawing:
    shown = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    note = CPU_NOTE if shown["device"].iloc[0] == "cpu" else ""
    title = f"Step times around their median, {subject}"
    figure, axes = lanes.axes_for(groups, title, f"{place}\n{note}", _key(shown))
    for group in groups:
        for lane in group.lanes:
            _lane(axes, lane, palette[lane.row["variant"]].colour, limits)
    low, high = limits
    axes.set_xlim(low, high + 0.25 * (high - low))
    axes.axvline(0, color=style.MUTED, linewidth=0.8, zorder=1)
    axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else f"{value:+g}")
    axes.set_xlabel("step time against the run's median (%)", loc="left")
    widest = shown.iloc[int(np.argmax(shown["high"] - shown["low"]))]
    alt = (
        f"Dots and boxes of the step times of {len(shown)} runs in {subject} on {place}, in percent of each run's "
        f"median. Widest middle half: {marks.label(widest)}, {widest['heading']}, {widest['low']:+.1f} to "
        f"{widest['high']:+.1f} percent."
    )
    caption = f"Step times of {len(shown)} runs in {subject} on {place}. " + (f"{note}." if note else "")
    return Drawing(slug("spread", subject, place), title, figure, caption.strip(), alt)


def _key(shown: pd.DataFrame) -> list[tuple[Artist, str]]:
    degraded = any(marks.is_degraded(row) for row in shown.to_dict("records"))
    return [*KEY, marks.DEGRADED] if degraded else KEY


def _lane(axes: Axes, lane: lanes.Lane, colour: str, limits: tuple[float, float]) -> None:
    row, steps = lane.row, lane.row["deviations"]
    look = {**style.bar_style(colour, row["evidence"]), "alpha": 0.45}
    axes.barh(lane.y, row["high"] - row["low"], marks.BAR_IN, left=row["low"], zorder=2, **look)
    inside = steps[(steps >= limits[0]) & (steps <= limits[1])]
    jitter = lane.y + 0.035 * np.sin(2.4 * np.arange(len(inside)))  # golden angle: even, and the same every time
    axes.plot(inside, jitter, "o", markersize=2.4, color=colour, markeredgewidth=0, zorder=3, rasterized=True)
    words = seconds(row["median_s"])
    if marks.is_degraded(row):
        marks.degraded(axes, lane, row["high"])
        words += " degraded"
    beyond = steps[steps > limits[1]]
    if len(beyond):
        axes.plot(limits[1], lane.y, ">", markersize=6, color=colour, zorder=4)
        words += f", {len(beyond)} step{'s' * (len(beyond) != 1)} to {number(float(beyond.max()), 2)} %"
    axes.annotate(
        words, (limits[1], lane.y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=7.5, zorder=5
    )
