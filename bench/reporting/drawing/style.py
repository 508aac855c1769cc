"""How every figure looks: fonts, colours that survive colour blindness, hatches that survive a black-and-white printer.

Colour says how a variant shards, fill and line style say what kind of evidence a row is; a mark beside every colour
(a label, a marker, a word) says the same again.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from bench.core.presentation import (
    STRATEGIES,
    Variant,
    get_finetune_labels,
    get_strategy_presentation,
    read_presentations,
    split_finetune,
)

FIGURE_WIDTH_IN = 4.7
"""Width of a figure: one column on a phone, half a page on a desk."""
MAX_FIGURE_HEIGHT_IN = 9.0
"""Height at which a figure is continued in another one, so that it fits a printed page."""

INK_COLOUR, MUTED_COLOUR, GRID_COLOUR = "#1a1a1a", "#595959", "#d9d9d9"
OOM_COLOUR = "#b34700"
LIMIT_COLOUR = "#9a5587"

RC_PARAMS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 8.5,
    "axes.edgecolor": MUTED_COLOUR,
    "axes.labelcolor": INK_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": GRID_COLOUR,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK_COLOUR,
    "xtick.color": INK_COLOUR,
    "ytick.color": INK_COLOUR,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 160,
    "svg.hashsalt": "fsdp-bench",
    "svg.fonttype": "path",
}


@contextmanager
def apply_report_style() -> Iterator[None]:
    """Draw and save inside this, and nothing of the style leaks into the caller's figures.

    Rows may name a model or a device in characters that the font lacks: they are drawn as boxes, without a warning.
    """
    with mpl.rc_context(RC_PARAMS), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


# Strategies state their colours and markers (`presentation`). Every colour is readable on white and on black (contrasts
# of 3, WCAG 2.2, 1.4.11); those of the usual strategies differ under protanopia, deuteranopia and tritanopia, too, and
# markers tell the others apart.
SPARE_COLOURS = ("#a63c7d", "#2f8fa3", "#6f7a12", "#8a6aa0")
MIN_COLOUR_DISTANCE = 0.15
"""Distance of two colours, as a share of that from black to white, below which they need different markers."""
MARKERS = ("o", "s", "D", "^", "v", "P", ">", "p", "h", "*", "d")


@dataclass(frozen=True)
class EvidenceStyle:
    """How one kind of evidence is filled, hatched and dashed, so that it differs without colour too."""

    hatch: str
    is_filled: bool
    linestyle: Literal["-", "--", ":", "-."]
    marker_fill: Literal["full", "left", "none", "top"]
    """How much of a marker is filled."""


EVIDENCE_STYLES = {
    "measured": EvidenceStyle("", True, "-", "full"),
    "rehearsed": EvidenceStyle("/////", False, "--", "left"),
    "predicted": EvidenceStyle("", False, ":", "none"),
    "published": EvidenceStyle("xxxxx", False, "-.", "top"),
}


@dataclass(frozen=True)
class VariantStyle:
    """Colour and marker of one variant, the same in every figure of a report."""

    colour: str
    marker: str


def build_palette(variants: Iterable[Variant]) -> dict[str, VariantStyle]:
    """A mark for every variant, by label: the same in every report and figure.

    Variants that shard alike (hybrids of several factors, one knob on and off, all trained or adapters) have one
    colour, and their markers follow from their names; only of two whose names come to one marker the second has
    another.
    """
    styles: dict[str, VariantStyle] = {}
    for variant in sorted(set(variants)):
        hue = _find_hue(variant.kind)
        colour = find_strategy_colour(hue) or SPARE_COLOURS[_compute_checksum(hue) % len(SPARE_COLOURS)]
        first = MARKERS.index(find_strategy_marker(hue))
        if factor := SHARDING_FACTOR.search(variant.label):
            first += int(factor[1]).bit_length() - 2  # 0 for F = 2, 1 for F = 4, ...
        own_kind = split_finetune(variant.kind.partition("/")[2])[0] if "/" not in hue else ""
        detail = f"{own_kind} {find_detail(variant.label)}".strip()
        markers = [MARKERS[(first + offset) % len(MARKERS)] for offset in range(len(MARKERS))]
        if detail:
            start = 1 + _compute_checksum(detail) % (len(MARKERS) - 1)
            marks = [*list_stated_marks().values(), *(mark for mark in styles.values() if mark.colour == colour)]
            taken = {mark.marker for mark in marks if is_similar_colour(mark.colour, colour)}
            markers = [marker for marker in (*markers[start:], *markers[:start]) if marker not in taken] or markers
        styles[variant.label] = VariantStyle(colour, markers[0])
    return styles


SHARDING_FACTOR = re.compile(r"\(F=(\d+)\)")
"""In a variant's label, where the factor is a choice."""


@functools.cache
def list_stated_marks() -> dict[str, VariantStyle]:
    """The marks of all kinds of strategies that state a colour of their own, by kind."""
    marks = {}
    for name, shown in read_presentations(STRATEGIES).items():
        colours = {kind: colour for kind, (_, colour) in shown.kinds.items() if colour}
        colours |= {"": shown.colour} if shown.colour else {}
        for kind, colour in colours.items():
            full_kind = f"{name}/{kind}".removesuffix("/")
            marks[full_kind] = VariantStyle(colour, find_strategy_marker(full_kind))
    return marks


def find_detail(label: str) -> str:
    """What a variant's label says beyond how the model is sharded: its knobs, or the part that is trained."""
    knobs = label.partition(" · ")[2]
    finetunes = [name for name in get_finetune_labels().values() if name and f" {name}" in label]
    return " ".join([*finetunes, knobs]).strip()


def _compute_checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def find_strategy_marker(kind: str) -> str:
    """The marker that a strategy states for a kind, or for all its kinds; else one that follows from the name."""
    family, _, sharding = kind.partition("/")
    markers = get_strategy_presentation(family).markers
    stated = markers.get(sharding) or markers.get("")
    return stated if stated in MARKERS else MARKERS[_compute_checksum(kind) % len(MARKERS)]


def _find_hue(kind: str) -> str:
    """The kind whose colour a variant of some kind has: its own, whatever part of the model is trained, or a family's.

    A kind that neither has a colour is its own, and gets a spare one.
    """
    family, _, sharding = kind.partition("/")
    sharding = split_finetune(sharding)[0]
    presentation = get_strategy_presentation(family)
    has_own_colour = bool(presentation.kinds.get(sharding, ("", ""))[1])
    return family if not sharding or (presentation.colour and not has_own_colour) else f"{family}/{sharding}"


def find_strategy_colour(kind: str) -> str | None:
    """The colour that a strategy states for a kind, or for all its kinds; None where it states none."""
    family, _, sharding = kind.partition("/")
    presentation = get_strategy_presentation(family)
    return presentation.kinds.get(sharding, ("", ""))[1] or (presentation.colour if not sharding else "") or None


def is_similar_colour(first: str, second: str) -> bool:
    """Whether two colours are told apart with difficulty: by less than `MIN_COLOUR_DISTANCE` between black and
    white."""
    return math.dist(to_rgb(first), to_rgb(second)) < MIN_COLOUR_DISTANCE * math.sqrt(3)


def lighten_colour(colour: str, amount: float) -> str:
    """`colour` mixed with white: 0 leaves it, 1 is white."""
    red, green, blue = (channel + (1 - channel) * amount for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def build_bar_style(colour: str, evidence: str) -> dict[str, Any]:
    """Keyword arguments of a bar for one kind of evidence."""
    evidence_style = EVIDENCE_STYLES.get(evidence, EVIDENCE_STYLES["measured"])
    return {
        "facecolor": colour if evidence_style.is_filled else lighten_colour(colour, 0.85),
        "edgecolor": colour,
        "hatch": evidence_style.hatch,
        "linewidth": 1.0,
        "linestyle": "-" if evidence_style.is_filled or evidence_style.hatch else "--",
    }


def build_marker_style(colour: str, evidence: str) -> dict[str, Any]:
    """Keyword arguments of a line's or point's marker for one kind of evidence: full, half full or hollow."""
    evidence_style = EVIDENCE_STYLES.get(evidence, EVIDENCE_STYLES["measured"])
    return {
        "fillstyle": "full" if evidence_style.marker_fill == "none" else evidence_style.marker_fill,
        "markerfacecolor": "white" if evidence_style.marker_fill == "none" else colour,
        "markerfacecoloralt": "white",
        "markeredgecolor": colour,
    }


def sort_evidence(kinds: Iterable[str]) -> Sequence[str]:
    """The kinds present, from what is most real to what is only quoted."""
    present_kinds = set(kinds)
    return [kind for kind in EVIDENCE_STYLES if kind in present_kinds]


# ---- the same style for interactive figures (plotly), which a page draws in the browser

PLOTLY_SYMBOLS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
    "X": "x",
}  # fmt: skip
"""Plotly's names of the markers."""

PLOTLY_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
PLOTLY_FILL_SUFFIXES = {"measured": "", "rehearsed": "-open-dot", "predicted": "-open", "published": "-dot"}
"""What is appended to a symbol's name for a kind of evidence: filled, hollow with a dot, hollow, filled with a dot."""


def get_plotly_symbol(marker: str, evidence: str) -> str:
    """Plotly's symbol for a marker and a kind of evidence."""
    return PLOTLY_SYMBOLS[marker] + PLOTLY_FILL_SUFFIXES.get(evidence, "")


def get_plotly_dash(evidence: str) -> str:
    """Plotly's dash for a kind of evidence."""
    return PLOTLY_DASHES[EVIDENCE_STYLES.get(evidence, EVIDENCE_STYLES["measured"]).linestyle]


def build_plotly_layout(x_title: str, y_title: str) -> dict[str, Any]:
    """The layout that interactive figures start from."""
    axis = {
        "gridcolor": GRID_COLOUR,
        "linecolor": MUTED_COLOUR,
        "zeroline": False,
        "automargin": True,
        "ticks": "outside",
    }
    return {
        "font": {"family": "system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif", "size": 13, "color": INK_COLOUR},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "white",
            "bordercolor": MUTED_COLOUR,
            "font": {"color": INK_COLOUR, "size": 13},
            "align": "left",
        },
        "legend": {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top", "font": {"size": 12}, "maxheight": 2000},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 8}, "rangemode": "tozero"},
    }
