"""Predicted and rehearsed against measured and published: on one scale, and how far each is off."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.reporting import agreement, lanes, style
from bench.reporting.agreement import MEMORY, SPEED, UNITS, geometric_ends
from bench.reporting.drawing import Drawing, Listing, Section, header, header_height_in, new_figure
from bench.reporting.labels import MISSING, counted, listing, number

TITLE = "Predicted against measured and published"
HOW_TO_READ = (
    "Every mark is one number that somebody measured or published (across) and what was predicted or rehearsed for the "
    "same run (up). On the line both are equal, in the grey band they differ by at most a twentieth. Below, the same "
    "marks as a deviation in percent: above zero is too fast, or too much memory. The dark bar of a mark is the "
    "uncertainty of what it is held against: the half-width to which a point can be read off a plot, or the range of "
    "repeats; the light bar is the interval that a prediction says holds 19 of 20. Triangles mark points that are "
    "degraded in either: the allocator was flushing, so the time is not representative."
)
NOTHING = "No run in this store was predicted or rehearsed and also measured or published."
BAND = 0.05
"""Share within which an estimate is called close."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#8a7a00", "#56b4e9")
"""Okabe & Ito (2008); markers say the same without colour."""
SCATTER_IN, DEVIATION_IN = 3.3, 1.9
WORST_TOLD = 3


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per pair: see `bench.reporting.agreement.pairs`."""
    return agreement.pairs(table)


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """A figure for speed, one for memory, and a table of how far each kind of evidence is off."""
    result = Section("agreement", TITLE, HOW_TO_READ)
    selected = select(table)
    if selected.empty:
        result.nothing = NOTHING
        return result
    for quantity in (SPEED, MEMORY):
        found = selected[selected["quantity"] == quantity]
        if len(found):
            result.plan(_draw, quantity, found)
    result.listings.append(_listing(selected))
    return result


def look(found: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Colour and marker of every source."""
    sources = list(dict.fromkeys(found["source"]))
    return {
        str(source): (COLOURS[at % len(COLOURS)], style.MARKERS[at % len(style.MARKERS)])
        for at, source in enumerate(sources)
    }


def _draw(quantity: str, found: pd.DataFrame) -> Drawing:
    looks = look(found)
    kinds = style.evidence_in_order(found["evidence"])
    against = style.evidence_in_order(found["against"])
    title = f"{' and '.join(kinds).capitalize()} against {' and '.join(against)}: {quantity}"
    subtitle = f"{counted(len(found), 'pair')} of one configuration each"
    key = _key(found, looks)
    head = header_height_in(title, subtitle, style.WIDTH_IN)
    figure = new_figure(style.WIDTH_IN, SCATTER_IN + DEVIATION_IN + 0.7 + head + lanes.legend_in(key))
    header(figure, title, subtitle)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (SCATTER_IN, DEVIATION_IN)})
    ends = geometric_ends(found[["reference", "reference_low", "reference_high"]])
    _scatter(above, found, looks, ends, quantity)
    _deviations(below, found, looks, ends)
    below.set_xlabel(f"{' or '.join(against)}: {UNITS[quantity]}", loc="left")
    lanes.legend(figure, key)
    return Drawing(f"agreement-{quantity}", title, figure, _caption(found), _alt(quantity, found))


def _scatter(
    axes: Axes, found: pd.DataFrame, looks: dict[str, tuple[str, str]], ends: tuple[float, float], quantity: str
) -> None:
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=geometric_ends(found[["value", "low", "high"]]))
    axes.fill_between(ends, [(1 - BAND) * end for end in ends], [(1 + BAND) * end for end in ends], color=style.GRID,
                      linewidth=0, zorder=1)  # fmt: skip
    axes.plot(ends, ends, color=style.INK, linewidth=0.8, zorder=2)
    span = ends[1] / ends[0]
    subs = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if span < 5 else (1.0, 2.0, 5.0) if span < 50 else (1.0,)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    for (source, kind), group in found.groupby(["source", "evidence"], sort=False):
        colour = looks[str(source)][0]
        axes.vlines(group["reference"], group["low"], group["high"], color=style.lighter(colour, 0.6), linewidth=1.0)
        axes.hlines(group["value"], group["reference_low"], group["reference_high"], color=colour, linewidth=1.2)
        _marks(axes, group, group["value"], looks[str(source)], str(kind))
    axes.set_title(f"estimated {UNITS[quantity]}", size=8.5, weight="normal")


def _deviations(axes: Axes, found: pd.DataFrame, looks: dict[str, tuple[str, str]], ends: tuple[float, float]) -> None:
    axes.fill_between(ends, -100 * BAND, 100 * BAND, color=style.GRID, linewidth=0, zorder=1)
    axes.axhline(0, color=style.INK, linewidth=0.8, zorder=2)
    for (source, kind), group in found.groupby(["source", "evidence"], sort=False):
        colour, reference = looks[str(source)][0], group["reference"]
        low, high = (100 * (group[end] / reference - 1) for end in ("low", "high"))
        axes.vlines(reference, low, high, color=style.lighter(colour, 0.6), linewidth=1.0, zorder=2)
        low, high = (100 * (group["value"] / group[f"reference_{end}"] - 1) for end in ("high", "low"))
        axes.vlines(reference, low, high, color=colour, linewidth=1.6, zorder=3)
        _marks(axes, group, 100 * group["deviation"], looks[str(source)], str(kind))
    axes.set_title("deviation of the estimate (%)", size=8.5, weight="normal")
    axes.grid(axis="y")


def _marks(axes: Axes, group: pd.DataFrame, heights: pd.Series, mark: tuple[str, str], kind: str) -> None:
    axes.plot(group["reference"], heights, **_look(*mark, kind), zorder=4)
    degraded = group["degraded"].astype(bool)
    axes.plot(
        group["reference"][degraded], heights[degraded], "<", markersize=10, markerfacecolor="none",
        markeredgecolor=style.INK, zorder=5,
    )  # fmt: skip


def _look(colour: str, marker: str, kind: str) -> dict[str, Any]:
    return {"marker": marker, "markersize": 5, "linestyle": "none", **style.marker_style(colour, kind)}


def _key(found: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    kinds = style.evidence_in_order(found["evidence"])
    for source, group in found.groupby("source", sort=False):
        colour, marker = looks[str(source)]
        against = group["against"].iloc[0]
        name = f"{source}, {against}" if against == "published" else f"{against}: {str(source).split(' · ')[0]}"
        entries.append((Line2D([], [], **_look(colour, marker, kinds[0] if len(kinds) == 1 else "measured")), name))
    entries += [(Line2D([], [], **_look(style.MUTED, "o", kind)), f"estimate: {kind}") for kind in kinds]
    entries.append((Patch(facecolor=style.GRID), f"within {BAND:.0%}"))
    if found["degraded"].any():
        triangle = Line2D([], [], color=style.INK, marker="<", linestyle="", markerfacecolor="white", markersize=8)
        entries.append((triangle, "degraded: not representative"))
    return entries


def _caption(found: pd.DataFrame) -> str:
    parts = []
    for row in agreement.summary(found).to_dict("records"):
        parts.append(
            f"{row['source']}: {row['evidence']} against {row['against']}, {counted(row['pairs'], 'pair')}, "
            f"{percent(row['mean'])} off on average, {percent(row['worst'], sign=True)} at worst"
        )
    return "; ".join(parts) + "." + (" Degraded points are not counted." if found["degraded"].any() else "")


def _alt(quantity: str, found: pd.DataFrame) -> str:
    worst = found.reindex(found["deviation"].abs().sort_values(ascending=False).index).head(WORST_TOLD)
    told = [f"{row['label']} {percent(row['deviation'], sign=True)}" for row in worst.to_dict("records")]
    return f"Scatter of {counted(len(found), 'pair')} of {quantity}. {_caption(found)} Furthest off: {listing(told)}."


def percent(share: float, *, sign: bool = False) -> str:
    """A share in percent with two digits."""
    if pd.isna(share):
        return MISSING
    plus = "+" if sign and share > 0 else ""
    return f"{plus}{number(100 * share, 2)} %".replace("-", "−")


def _listing(found: pd.DataFrame) -> Listing:
    columns = ["Quantity", "Against", "Evidence", "Pairs", "Mean", "Worst", "Bias", "Within its interval"]
    rows = [
        [
            str(row["quantity"]),
            f"{row['source']} ({row['against']})",
            str(row["evidence"]),
            str(row["pairs"]),
            percent(row["mean"]),
            percent(row["worst"], sign=True),
            percent(row["bias"], sign=True),
            percent(row["inside"]),
        ]
        for row in agreement.summary(found).to_dict("records")
    ]
    return Listing("How far off estimates are", columns, rows, frozenset(columns[3:]))
