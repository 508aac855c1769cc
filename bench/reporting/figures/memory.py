"""Peak memory per rank by strategy: allocated, active and reserved."""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, cells, drawable
from bench.reporting.drawing import Drawing, Section
from bench.reporting.labels import memory_unit, number, rank_noun, slug

TITLE = "Memory"
HOW_TO_READ = (
    "Shorter fits on a smaller device. The solid bar is the peak of allocated tensor memory in a training step after "
    "warm-up, of the rank that needed most: parameters, gradients, optimizer state, activations and, under FSDP, the "
    "blocks that are gathered at that moment. The tick is the peak of active memory (freed, but still in use by a "
    "stream); the hatched end is what the caching allocator held on top (reserved), which is what must fit on the "
    "device. A CPU does not cache, so there all three are one. Sharding divides parameters, gradients and optimizer "
    "state by the factor F, never the activations."
)


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration: peak allocated bytes (``median``, ``low``, ``high``, ``points``), the medians
    ``peak_active_bytes`` and ``peak_reserved_bytes``, ``memory_limit_bytes`` (NaN for none), or out of memory.
    """
    found = drawable(cells(table, "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes"))
    limits = {limit: size for limit, size in zip(table["limit"], table["memory_limit_bytes"], strict=True) if limit}
    return found.assign(memory_limit_bytes=[float(limits.get(limit, float("nan"))) for limit in found["limit"]])


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per place, precision and memory limit."""
    result = Section("memory", TITLE, HOW_TO_READ)
    selected = select(table)
    if selected["median"].notna().sum() == 0:
        result.nothing = "No run in this store has a memory peak."
    for (place,), here in by(selected, "place"):
        for _, comparable in by(here, "limit"):
            largest = comparable[["high", "peak_reserved_bytes", "memory_limit_bytes"]].max().max()
            largest_bytes = 0.0 if pd.isna(largest) else float(largest)
            for subject, groups in lanes.pages(comparable, marks.label):
                result.plan(_draw, groups, str(place), subject, largest_bytes, palette)
    return result


def _draw(
    groups: list[lanes.Group], place: str, subject: str, largest: float, palette: dict[str, style.Mark]
) -> Drawing:
    shown = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    device = shown["device"].iloc[0]
    noun = rank_noun(device)
    unit, size = memory_unit(largest)
    title = f"Peak memory per {noun}, {subject}"
    figure, axes = lanes.axes_for(groups, title, place, marks.key(shown, _key(shown)))
    axes.set_xlim(0, largest / size * 1.25 or 1.0)
    for group in groups:
        for lane in group.lanes:
            _lane(axes, lane, palette[lane.row["variant"]], size)
        limit = group.lanes[0].row["memory_limit_bytes"]
        if not pd.isna(limit):
            top = group.top + len(group.lines) * lanes.HEADING_IN
            axes.plot([limit / size] * 2, [top, group.bottom], color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.5)
    axes.set_xlabel(f"peak memory per {noun} ({unit})")
    alt = (
        f"Bar chart of peak allocated and reserved memory per {noun} for {len(shown)} configurations in {subject} on "
        f"{place}. Out of memory: {int((shown['out_of_memory'] > 0).sum())}."
    )
    caption = f"Peak memory per {noun} in {subject} on {place}."
    return Drawing(slug("memory", subject, place), title, figure, caption, alt)


def _lane(axes: Axes, lane: lanes.Lane, mark: style.Mark, size: int) -> None:
    row = lane.row
    if pd.isna(row["median"]):
        marks.out_of_memory(axes, lane, asked_for=True)
        return
    allocated, reserved = row["median"] / size, row["peak_reserved_bytes"] / size
    end, words = row["high"] / size, number(allocated)
    if reserved > allocated * 1.001:
        look = {**style.bar_style(mark.colour, "rehearsed"), "facecolor": "white", "hatch": "....", "linewidth": 0.8}
        axes.barh(lane.y, reserved - allocated, marks.BAR_IN, left=allocated, zorder=2, **look)
        end, words = max(end, reserved), f"{words}, {number(reserved)} reserved"
    marks.bar(axes, lane, allocated, mark)
    active = row["peak_active_bytes"] / size
    if active > allocated * 1.001:
        axes.plot([active] * 2, [lane.y - marks.BAR_IN * 0.75, lane.y + marks.BAR_IN * 0.75], color=style.INK, zorder=3)
    marks.repeats(axes, lane, size)
    words += marks.partly_oom(row)
    if row["degraded"]:
        marks.degraded(axes, lane, end)
        words = f" {words} degraded"
    marks.note(axes, lane, end, words)


def _key(shown: pd.DataFrame) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    if (shown["peak_reserved_bytes"] > shown["median"] * 1.001).any():
        reserved = Patch(facecolor="white", edgecolor=style.MUTED, hatch="....")
        entries += [(Patch(color=style.MUTED), "allocated"), (reserved, "reserved on top")]
    if (shown["peak_active_bytes"] > shown["median"] * 1.001).any():
        entries.append((Line2D([], [], color=style.INK, marker="|", linestyle="", markersize=9), "active"))
    if shown["memory_limit_bytes"].notna().any():
        entries.append((Line2D([], [], color=style.LIMIT_COLOUR, linestyle="--"), "memory limit"))
    return entries
