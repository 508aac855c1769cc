"""Memory against throughput: one point per strategy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, cells, drawable
from bench.reporting.drawing import Drawing, Section, header, new_figure
from bench.reporting.labels import CPU_NOTE, listing, memory_unit, number, rank_noun, rank_nouns, slug

TITLE = "Memory against throughput"
HOW_TO_READ = (
    "One point per strategy, all with the same model, batch and number of ranks: further up is faster, further to the "
    "left needs less memory, so what has nothing above it and to its left is worth choosing. A vertical bar is the "
    "range of repeats. A cross on the axis, at its right end, is a strategy that ran out of memory."
)
GROUP = ["place", "model", "parameters", "world_size", "workload", "limit"]
FACET = [*GROUP, "among"]
"""What all points of a figure share. ``among`` is its precision: that of the rows, or of those they stand among."""
MEMORY = "peak_allocated_bytes"
SPEED = "tokens_per_second_per_gpu"
"""Not FLOPs, of which adapters need fewer for the same tokens."""
KEY_CHARS = 27
HEIGHT_IN = 5.0
"""Without the key."""
MARGIN = 1.04
"""How far the axis goes on beyond the last cross, whose half it has room for."""
LEAST = 3
"""Strategies from which on there is something to choose from."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per strategy and kind of evidence with a throughput and a peak of memory, or out of memory.

    Only groups (`FACET`) of at least `LEAST` strategies with both are kept. ``choice`` is what a point is called:
    strategies of one name whose settings differ are called by their settings, too. A precision that fewer than
    `LEAST` strategies ran in has no figure of its own: it is such a setting among those of the usual precision.
    """
    found = drawable(cells(table, SPEED, MEMORY))
    if found.empty:
        return found.assign(among="", choice="")
    drawn = found[found["median"].notna() & found[MEMORY].notna() | (found["out_of_memory"] > 0)]
    kept = [drawn.iloc[:0].assign(among="", choice="")]
    for _, group in by(drawn, *GROUP):
        if len(group) < LEAST:
            continue
        for _, facet in by(group.assign(among=_among(group)), "among"):
            usual = _usual([str(text) for text in facet["settings"]])
            choices = [_choice(row, usual) for _, row in facet.iterrows()]
            if len(set(choices)) >= LEAST and facet["median"].notna().any():
                kept.append(facet.assign(choice=choices))
    return pd.concat(kept[1:] or kept, ignore_index=True)


def _among(rows: pd.DataFrame) -> list[str]:
    """Per row, the precision of the figure it stands in: its own, or if few ran in that the one most ran in."""
    strategies = rows.drop_duplicates(["precision", "variant", "settings"])["precision"].value_counts(sort=False)
    usual = str(strategies.idxmax())
    return [own if strategies[own] >= LEAST else usual for own in rows["precision"]]


def _usual(settings: list[str]) -> set[str]:
    """Settings that most of the rows have which have that setting at all."""
    values = Counter(part for text in settings for part in text.split(" · ") if part)
    names = Counter(_name(part) for part in values.elements())
    return {part for part, count in values.items() if 2 * count > names[_name(part)]}


def _name(setting: str) -> str:
    """What a setting sets: the knob of ``knob=value``, the first word of ``checkpointing none``."""
    return re.split(r"[= ]", setting)[0]


def _choice(row: pd.Series, usual: set[str]) -> str:
    own = [row["precision"]] if row["precision"] != row["among"] else []
    own += [part for part in str(row["settings"]).split(" · ") if part and part not in usual]
    return ", ".join([str(row["variant"]), *own])


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """A figure per place, model, precision, world size and workload."""
    result = Section("trade", TITLE, HOW_TO_READ)
    for _, facet in by(select(table), *FACET):
        result.plan(_draw, facet, palette)
    if not result.planned:
        result.nothing = f"No model was run with {LEAST} strategies on one number of ranks."
    return result


def _draw(facet: pd.DataFrame, palette: dict[str, style.Mark]) -> Drawing:
    first = facet.iloc[0]
    noun, ranks = rank_noun(first["device"]), f"{first['world_size']} {rank_nouns(first['device'])}"
    unit, size = memory_unit(float(facet[MEMORY].max()))
    looks = _marks(facet, palette)
    entries = _key(facet, looks)
    figure = new_figure(style.WIDTH_IN, HEIGHT_IN + lanes.legend_in(entries))
    axes = figure.add_subplot()
    edge = float(facet[MEMORY].max()) / size * 1.12
    lost = 0
    for row in facet.to_dict("records"):
        if pd.notna(row["median"]):
            _point(axes, row, looks[row["choice"]], size)
        else:
            marks.cross(axes, edge * (1 - 0.04 * lost), 0, looks[row["choice"]].colour, row["evidence"])
            lost += 1
    axes.set_xlim(0, edge * MARGIN)
    axes.set_ylim(0, float(facet["high"].max()) * 1.15)
    axes.grid()
    axes.set_xlabel(f"peak allocated memory per {noun} ({unit})")
    axes.set_ylabel(f"tokens/s per {noun}")
    note = CPU_NOTE if first["device"] == "cpu" else ""
    title = f"Memory against throughput: {first['model']}, {first['among']}, {ranks}"
    detail = " · ".join(part for part in (first["workload"], first["limit"]) if part)
    header(figure, title, "\n".join(part for part in (detail, first["place"], note) if part))
    lanes.legend(figure, entries)
    ran = facet[facet["median"].notna()]
    fastest, leanest = (ran.sort_values(column).iloc[place] for column, place in (("median", -1), (MEMORY, 0)))
    extremes = (
        f"Fastest: {fastest['choice']}, {number(fastest['median'])} tokens/s at {number(fastest[MEMORY] / size)} "
        f"{unit}. "
        f"Least memory: {leanest['choice']}, {number(leanest[MEMORY] / size)} {unit} at "
        f"{number(leanest['median'])} tokens/s."
    )
    choices = listing(list(dict.fromkeys(facet["choice"])), 20)
    alt = f"Scatter plot of tokens per second against peak memory for {choices}. {extremes}"
    name = slug("trade", first["model"], first["among"], first["world_size"], first["workload"], first["limit"])
    return Drawing(name, title, figure, f"{extremes} {note}".strip(), alt)


def _marks(facet: pd.DataFrame, palette: dict[str, style.Mark]) -> dict[str, style.Mark]:
    """Every choice's own marker, or one of another colour's; choices of one strategy share its colour in shades."""
    found: dict[str, style.Mark] = {}
    shades: dict[str, int] = {}
    for row in facet.to_dict("records"):
        if row["choice"] not in found:
            shade = shades.get(row["variant"], 0)
            shades[row["variant"]] = shade + 1
            colour = style.lighter(palette[row["variant"]].colour, min(0.3 * shade, 0.6))
            taken = {mark.marker for mark in found.values() if style.alike(mark.colour, colour)}
            turn = len(found) % len(style.MARKERS)
            markers = style.MARKERS[turn:] + style.MARKERS[:turn]
            found[row["choice"]] = style.Mark(colour, next((free for free in markers if free not in taken), markers[0]))
    return found


def _point(axes: Axes, row: Mapping[Hashable, Any], mark: style.Mark, size: int) -> None:
    memory, speed = float(row[MEMORY]) / size, float(row["median"])
    axes.plot([memory] * 2, [row["low"], row["high"]], color=style.INK, linewidth=1, zorder=2)
    axes.plot(
        memory, speed, color=mark.colour, marker=mark.marker, markersize=7, linestyle="", zorder=3,
        **style.marker_style(mark.colour, row["evidence"]),
    )  # fmt: skip
    if row["degraded"]:
        axes.plot(memory, speed, "<", markersize=11, markerfacecolor="none", markeredgecolor=style.INK, zorder=4)


def _key(facet: pd.DataFrame, looks: dict[str, style.Mark]) -> list[tuple[Artist, str]]:
    kinds = list(style.evidence_in_order(facet["evidence"]))
    entries: list[tuple[Artist, str]] = [
        (_handle(mark, kinds[0]), lanes.wrap(choice, KEY_CHARS)) for choice, mark in looks.items()
    ]
    if len(kinds) > 1:
        entries += [(_handle(style.Mark(style.MUTED, "o"), kind), kind) for kind in kinds]
    return entries + marks.key(facet.assign(evidence="measured"))


def _handle(mark: style.Mark, evidence: str) -> Line2D:
    return Line2D(
        [], [], color=mark.colour, marker=mark.marker, linestyle="", markersize=6,
        **style.marker_style(mark.colour, evidence),
    )  # fmt: skip
