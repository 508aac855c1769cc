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

from bench.core import presentation
from bench.core.presentation import (
    CPU_NOTE,
    MISSING,
    build_slug,
    format_number,
    format_percent,
    format_plural,
    format_seconds,
)
from bench.records.matching import encode_config_key
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, FigureTable, ReportFigure, ReportSection
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import RowNeeds

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
FIGURE = ReportFigure(
    name="communication",
    page_position=80,
    title="Exposed communication",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(
        allowed_values={"status": ("ok",), "evidence": ("measured", "rehearsed")},
        present=("time_question", "step_time_median_s"),
        min_distinct={"evidence": 2},
    ),
    empty_message="No run in this store was both measured and rehearsed on the same hardware.",
)
CPU_CAVEAT = (
    "On a CPU the processes of a measured run share caches, memory and, if there are more of them than cores, the "
    "cores; a rehearsal has them to itself. That contention is in the difference, not in the profiler's figure."
)

NAME_COLUMNS = ["place", "device", "precision", "limit", "heading", "variant"]
VALUE_COLUMNS = [
    f"{name}{suffix}_s" for name in ("measured", "rehearsed", "exposed") for suffix in ("", "_low", "_high")
]
SHARE_COLUMNS = ["share", "share_low", "share_high", "profiled", "predicted"]


@dataclass(frozen=True)
class ValueWithInterval:
    """A value with its 95 % interval; NaN at its ends where there is none."""

    value: float
    low: float
    high: float


def compute_difference(first: ValueWithInterval, second: ValueWithInterval) -> ValueWithInterval:
    """The difference of two independent estimates and its interval.

    From the two intervals alone, symmetric or not, as Zou and Donner recover the variances they imply ("Construction of
    confidence limits about effect measures: a general approach", Statistics in Medicine 27, 2008, equation 2): the
    distances from each value to the end of its interval that counts are added in quadrature.
    """
    value = first.value - second.value
    distance_below = math.hypot(first.value - first.low, second.high - second.value)
    distance_above = math.hypot(first.high - first.value, second.value - second.low)
    return ValueWithInterval(value, value - distance_below, value + distance_above)


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
    is_usable = (table["status"] == "ok") & table["time_question"].notna() & ~table["degraded"].fillna(False)
    rows = sort_rows(table[is_usable & table["step_time_median_s"].notna()])
    question_keys = pd.Series(
        [encode_config_key(question) for question in rows["time_question"]], index=rows.index, dtype=object
    )
    shared_keys = set.intersection(
        *(set(question_keys[rows["evidence"] == evidence]) for evidence in ("measured", "rehearsed"))
    )
    rows, question_keys = rows[question_keys.isin(shared_keys)], question_keys[question_keys.isin(shared_keys)]
    pairs = [_build_pair(group) for _, group in rows.groupby(question_keys, sort=False)]
    return pd.DataFrame(
        [pair for pair in pairs if pair is not None], columns=[*NAME_COLUMNS, *VALUE_COLUMNS, *SHARE_COLUMNS]
    )


def _build_pair(rows: pd.DataFrame) -> dict[str, Any] | None:
    """One configuration; None if it was not both measured and rehearsed on one device."""
    rows_by_evidence = {
        evidence: rows[rows["evidence"] == evidence] for evidence in ("measured", "rehearsed", "predicted")
    }
    if not len(rows_by_evidence["measured"]) or not len(rows_by_evidence["rehearsed"]):
        return None
    if set(rows_by_evidence["measured"]["gpu_name"].dropna()).isdisjoint(
        rows_by_evidence["rehearsed"]["gpu_name"].dropna()
    ):
        return None
    measured, rehearsed = (
        _compute_step_time(rows_by_evidence["measured"]),
        _compute_step_time(rows_by_evidence["rehearsed"]),
    )
    exposed = compute_difference(measured, rehearsed)
    first_row = rows_by_evidence["measured"].iloc[0]
    return {
        **{name: first_row[name] for name in NAME_COLUMNS},
        **{f"measured{suffix}": value for suffix, value in _list_interval_columns(measured, "_s")},
        **{f"rehearsed{suffix}": value for suffix, value in _list_interval_columns(rehearsed, "_s")},
        **{f"exposed{suffix}": value for suffix, value in _list_interval_columns(exposed, "_s")},
        **{f"share{suffix}": value / measured.value for suffix, value in _list_interval_columns(exposed, "")},
        "profiled": _compute_median(rows_by_evidence["measured"]["exposed_communication"]),
        "predicted": _compute_median(rows_by_evidence["predicted"]["exposed_communication"]),
    }


def _list_interval_columns(value: ValueWithInterval, unit: str) -> list[tuple[str, float]]:
    return [(unit, value.value), (f"_low{unit}", value.low), (f"_high{unit}", value.high)]


def _compute_step_time(rows: pd.DataFrame) -> ValueWithInterval:
    """The median step of the repeats, with the widest of their intervals; none where one has none."""
    medians = rows["step_time_median_s"].astype(float)
    lows, highs = (rows[f"step_time_ci_{end}_s"] for end in ("low", "high"))
    if lows.isna().any() or highs.isna().any():
        return ValueWithInterval(float(np.median(medians)), math.nan, math.nan)
    return ValueWithInterval(float(np.median(medians)), float(lows.min()), float(highs.max()))


def _compute_median(values: pd.Series) -> float:
    known_values = values.dropna().astype(float)
    return float(known_values.median()) if len(known_values) else float("nan")


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per place, precision and memory limit, and a table of the same."""
    pairs = select(table)
    if pairs.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for (place,), place_pairs in iterate_groups(pairs, "place"):
        for subject, groups in lanes.paginate_by_precision(place_pairs, lambda row: row["variant"]):
            section.plan_figure(_draw_communication, groups, str(place), subject, palette)
        section.tables.append(_build_listing(str(place), place_pairs))
    return section


def _draw_communication(
    groups: list[lanes.LaneGroup], place: str, subject: str, palette: dict[str, style.VariantStyle]
) -> Drawing:
    shown_pairs = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    is_on_cpu = shown_pairs["device"].iloc[0] == "cpu"
    title = f"Exposed communication, {subject}"
    cpu_note = CPU_NOTE if is_on_cpu else ""
    figure, axes = lanes.build_lane_axes(groups, title, f"{place}\n{cpu_note}", _build_legend(shown_pairs))
    shares = shown_pairs[["share", "share_low", "share_high", "profiled", "predicted"]].to_numpy(float)
    low, high = min(0.0, float(np.nanmin(shares))), max(0.1, float(np.nanmax(shares)))
    if low < 0:
        axes.axvspan(100 * low - 100, 0, color="#efefef", zorder=0)
    axes.axvline(0, color=style.MUTED_COLOUR, linewidth=1.0, zorder=1)
    for group in groups:
        for lane in group.lanes:
            _draw_lane(axes, lane, palette[lane.row["variant"]])
    axis_span = high - low
    axes.set_xlim(100 * (low - 0.05 * axis_span if low < 0 else 0.0), 100 * (high + 0.45 * axis_span))
    axes.set_xticks([tick for tick in axes.get_xticks() if 100 * low <= tick <= max(100.0, 100 * high)])
    axes.set_xlabel("share of the measured step (%)")
    share_texts = [
        f"{row['variant']}, {row['heading']}: {format_number(100 * row['share'], 2)} %"
        for row in shown_pairs.to_dict("records")
    ]
    alt_text = f"Exposed communication of {format_plural(len(shown_pairs), 'configuration')} in {subject} on {place}. "
    alt_text += presentation.format_list(share_texts, 4) + "."
    caption = f"Measured step less rehearsed step, as a share of the measured one, in {subject} on {place}."
    caption += f" {CPU_CAVEAT} {cpu_note}." if is_on_cpu else ""
    return Drawing(build_slug("communication", subject, place), title, figure, caption, alt_text)


def _draw_lane(axes: Axes, lane: lanes.Lane, mark: style.VariantStyle) -> None:
    row = lane.row
    axes.plot(
        [100 * row["share_low"], 100 * row["share_high"]], [lane.y] * 2, color=mark.colour, linewidth=1.4, zorder=2
    )
    axes.plot(100 * row["share"], lane.y, "o", color=mark.colour, markersize=6, zorder=4)
    if not pd.isna(row["profiled"]):
        axes.plot(
            100 * row["profiled"], lane.y, "x", color=style.INK_COLOUR, markersize=6, markeredgewidth=1.6, zorder=5
        )
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
    right_end = np.nanmax([row["share"], row["share_high"], row["profiled"], row["predicted"]])
    text = f"{format_seconds(row['exposed_s']).replace('-', '−')} of {format_seconds(row['measured_s'])}"
    axes.annotate(text, (100 * right_end, lane.y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=7.5)


def _build_legend(shown_pairs: pd.DataFrame) -> list[tuple[Artist, str]]:
    legend_entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=style.MUTED_COLOUR, marker="o", markersize=6), "measured − rehearsed, 95 % interval")
    ]
    if shown_pairs["profiled"].notna().any():
        cross_handle = Line2D(
            [], [], color=style.INK_COLOUR, marker="x", linestyle="", markeredgewidth=1.6, markersize=6
        )
        legend_entries.append((cross_handle, "profiler"))
    if shown_pairs["predicted"].notna().any():
        ring_handle = Line2D(
            [], [], color=style.MUTED_COLOUR, marker="o", linestyle="", markerfacecolor="white", markersize=6
        )
        legend_entries.append((ring_handle, "predicted"))
    return legend_entries


def _build_listing(place: str, pairs: pd.DataFrame) -> FigureTable:
    """The figures of one place as a table."""
    rows = [
        [
            row["heading"],
            row["variant"],
            row["precision"],
            *(_format_interval(row, name) for name in ("measured", "rehearsed", "exposed")),
            *(format_percent(row[name]) for name in ("share", "profiled", "predicted")),
        ]
        for row in pairs.to_dict("records")
    ]
    number_columns = ["Measured step, ms", "Rehearsed step, ms", "Difference, ms", "Share", "Profiler", "Predicted"]
    columns = ["Configuration", "Strategy", "Precision", *number_columns]
    return FigureTable(f"Exposed communication as a table: {place}", columns, rows, frozenset(number_columns))


def _format_interval(row: dict[Any, Any], name: str) -> str:
    value, low, high = (format_number(1000 * row[f"{name}{suffix}_s"]) for suffix in ("", "_low", "_high"))
    return value if MISSING in (low, high) else f"{value} ({low} to {high})"
