"""Communication that computation does not hide: what a step takes beyond its rehearsal, where both exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.records.matching import identity
from bench.reporting import labels, lanes, style
from bench.reporting.cells import by, in_order
from bench.reporting.drawing import Drawing, Listing, Section
from bench.reporting.labels import CPU_NOTE, MISSING, counted, number, seconds, slug

TITLE = "Exposed communication"
HOW_TO_READ = (
    "A rehearsal is one real rank of the job whose collectives move nothing, so what a measured step takes beyond the "
    "rehearsed one is communication that computation did not hide, and waiting for other ranks. The filled point is "
    "that difference as a share of the measured step, with a 95 % interval that follows from those of the two medians; "
    "beside it stand the milliseconds. The cross is the share of a step that the profiler saw in collectives while "
    "nothing was computed (in a pass of its own, which profiling slows), the open point what is predicted. Below zero, "
    "in the shaded part, the rehearsed step was the slower one: what the two runs differ by for other reasons is more "
    "than what communication costs, so take it for none. The points of one rank, which talks to nobody, show how large "
    "such other reasons are. Rows whose time does not represent the speed (degraded) are left out."
)
ON_CPU = (
    "On a CPU the processes of a measured run share caches, memory and, if there are more of them than cores, the "
    "cores; a rehearsal has them to itself. That contention is in the difference, not in the profiler's figure."
)
NOTHING = "No run in this store was both measured and rehearsed on the same hardware."

NAMES = ["place", "device", "precision", "limit", "heading", "variant"]
VALUES = [f"{name}{end}_s" for name in ("measured", "rehearsed", "exposed") for end in ("", "_low", "_high")]
SHARES = ["share", "share_low", "share_high", "profiled", "predicted"]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; NaN at its ends where there is none."""

    value: float
    low: float
    high: float


def difference(first: Estimate, second: Estimate) -> Estimate:
    """The difference of two independent estimates and its interval.

    From the two intervals alone, symmetric or not, as Zou and Donner recover the variances they imply ("Construction of
    confidence limits about effect measures: a general approach", Statistics in Medicine 27, 2008, equation 2): the
    distances from each value to the end of its interval that counts are added in quadrature.
    """
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(value, value - below, value + above)


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration that was both measured and rehearsed on the same hardware, and not degraded.

    Returns
    -------
    DataFrame
        ``place``, ``precision``, ``limit``, ``heading`` and ``variant`` name it. ``measured_s``, ``rehearsed_s`` and
        their difference ``exposed_s``, each with ``_low_s`` and ``_high_s``: medians over repeats of the median step,
        with the widest of the repeats' intervals (NaN where one has too few steps for it). ``share`` (with ``_low``,
        ``_high``) is the difference over the
        measured median, ``profiled`` the share the profiler saw and ``predicted`` the predicted one (NaN for none).
    """
    usable = (table["status"] == "ok") & table["time_question"].notna() & ~table["degraded"].fillna(False)
    rows = in_order(table[usable & table["step_time_median_s"].notna()])
    keys = pd.Series([identity(question) for question in rows["time_question"]], index=rows.index, dtype=object)
    both = set.intersection(*(set(keys[rows["evidence"] == kind]) for kind in ("measured", "rehearsed")))
    rows, keys = rows[keys.isin(both)], keys[keys.isin(both)]
    found = [_pair(group) for _, group in rows.groupby(keys, sort=False)]
    return pd.DataFrame([pair for pair in found if pair is not None], columns=[*NAMES, *VALUES, *SHARES])


def _pair(rows: pd.DataFrame) -> dict[str, Any] | None:
    """One configuration; None if it was not both measured and rehearsed on one device."""
    kinds = {kind: rows[rows["evidence"] == kind] for kind in ("measured", "rehearsed", "predicted")}
    if not len(kinds["measured"]) or not len(kinds["rehearsed"]):
        return None
    if set(kinds["measured"]["gpu_name"].dropna()).isdisjoint(kinds["rehearsed"]["gpu_name"].dropna()):
        return None
    measured, rehearsed = _step(kinds["measured"]), _step(kinds["rehearsed"])
    exposed = difference(measured, rehearsed)
    first = kinds["measured"].iloc[0]
    return {
        **{name: first[name] for name in NAMES},
        **{f"measured{end}": value for end, value in _ends(measured, "_s")},
        **{f"rehearsed{end}": value for end, value in _ends(rehearsed, "_s")},
        **{f"exposed{end}": value for end, value in _ends(exposed, "_s")},
        **{f"share{end}": value / measured.value for end, value in _ends(exposed, "")},
        "profiled": _median(kinds["measured"]["exposed_communication"]),
        "predicted": _median(kinds["predicted"]["exposed_communication"]),
    }


def _ends(estimate: Estimate, unit: str) -> list[tuple[str, float]]:
    return [(unit, estimate.value), (f"_low{unit}", estimate.low), (f"_high{unit}", estimate.high)]


def _step(rows: pd.DataFrame) -> Estimate:
    """The median step of the repeats, with the widest of their intervals; none where one has none."""
    medians = rows["step_time_median_s"].astype(float)
    lows, highs = (rows[f"step_time_ci_{end}_s"] for end in ("low", "high"))
    if lows.isna().any() or highs.isna().any():
        return Estimate(float(np.median(medians)), math.nan, math.nan)
    return Estimate(float(np.median(medians)), float(lows.min()), float(highs.max()))


def _median(values: pd.Series) -> float:
    known = values.dropna().astype(float)
    return float(known.median()) if len(known) else float("nan")


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per place, precision and memory limit, and a table of the same."""
    result = Section("communication", TITLE, HOW_TO_READ)
    selected = select(table)
    if not len(selected):
        result.nothing = NOTHING
    for (place,), here in by(selected, "place"):
        for subject, groups in lanes.pages(here, lambda row: row["variant"]):
            result.plan(_draw, groups, str(place), subject, palette)
        result.listings.append(_listing(str(place), here))
    return result


def _draw(groups: list[lanes.Group], place: str, subject: str, palette: dict[str, style.Mark]) -> Drawing:
    shown = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    on_cpu = shown["device"].iloc[0] == "cpu"
    title = f"Exposed communication, {subject}"
    note = CPU_NOTE if on_cpu else ""
    figure, axes = lanes.axes_for(groups, title, f"{place}\n{note}", _key(shown))
    values = shown[["share", "share_low", "share_high", "profiled", "predicted"]].to_numpy(float)
    low, high = min(0.0, float(np.nanmin(values))), max(0.1, float(np.nanmax(values)))
    if low < 0:
        axes.axvspan(100 * low - 100, 0, color="#efefef", zorder=0)
    axes.axvline(0, color=style.MUTED, linewidth=1.0, zorder=1)
    for group in groups:
        for lane in group.lanes:
            _lane(axes, lane, palette[lane.row["variant"]])
    room = high - low
    axes.set_xlim(100 * (low - 0.05 * room if low < 0 else 0.0), 100 * (high + 0.45 * room))
    axes.set_xticks([tick for tick in axes.get_xticks() if 100 * low <= tick <= max(100.0, 100 * high)])
    axes.set_xlabel("share of the measured step (%)")
    told = [
        f"{row['variant']}, {row['heading']}: {number(100 * row['share'], 2)} %" for row in shown.to_dict("records")
    ]
    alt = f"Exposed communication of {counted(len(shown), 'configuration')} in {subject} on {place}. "
    alt += labels.listing(told, 4) + "."
    caption = f"Measured step less rehearsed step, as a share of the measured one, in {subject} on {place}."
    caption += f" {ON_CPU} {note}." if on_cpu else ""
    return Drawing(slug("communication", subject, place), title, figure, caption, alt)


def _lane(axes: Axes, lane: lanes.Lane, mark: style.Mark) -> None:
    row = lane.row
    axes.plot(
        [100 * row["share_low"], 100 * row["share_high"]], [lane.y] * 2, color=mark.colour, linewidth=1.4, zorder=2
    )
    axes.plot(100 * row["share"], lane.y, "o", color=mark.colour, markersize=6, zorder=4)
    if not pd.isna(row["profiled"]):
        axes.plot(100 * row["profiled"], lane.y, "x", color=style.INK, markersize=6, markeredgewidth=1.6, zorder=5)
    if not pd.isna(row["predicted"]):
        axes.plot(
            100 * row["predicted"],
            lane.y,
            "o",
            markerfacecolor="white",
            markeredgecolor=mark.colour,
            markersize=6,
            zorder=3,
        )
    end = np.nanmax([row["share"], row["share_high"], row["profiled"], row["predicted"]])
    text = f"{seconds(row['exposed_s']).replace('-', '−')} of {seconds(row['measured_s'])}"
    axes.annotate(text, (100 * end, lane.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7.5)


def _key(shown: pd.DataFrame) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=style.MUTED, marker="o", markersize=6), "measured − rehearsed, 95 % interval")
    ]
    if shown["profiled"].notna().any():
        cross = Line2D([], [], color=style.INK, marker="x", linestyle="", markeredgewidth=1.6, markersize=6)
        entries.append((cross, "profiler"))
    if shown["predicted"].notna().any():
        ring = Line2D([], [], color=style.MUTED, marker="o", linestyle="", markerfacecolor="white", markersize=6)
        entries.append((ring, "predicted"))
    return entries


def _listing(place: str, pairs: pd.DataFrame) -> Listing:
    """The figures of one place as a table."""
    rows = [
        [
            row["heading"],
            row["variant"],
            row["precision"],
            *(_interval(row, name) for name in ("measured", "rehearsed", "exposed")),
            *(_percent(row[name]) for name in ("share", "profiled", "predicted")),
        ]
        for row in pairs.to_dict("records")
    ]
    figures = ["Measured step, ms", "Rehearsed step, ms", "Difference, ms", "Share", "Profiler", "Predicted"]
    columns = ["Configuration", "Strategy", "Precision", *figures]
    return Listing(f"Exposed communication as a table: {place}", columns, rows, frozenset(figures))


def _interval(row: dict[Any, Any], name: str) -> str:
    value, low, high = (number(1000 * row[f"{name}{end}_s"]) for end in ("", "_low", "_high"))
    return value if MISSING in (low, high) else f"{value} ({low} to {high})"


def _percent(share: float) -> str:
    return MISSING if pd.isna(share) else f"{number(100 * share, 2)} %"
