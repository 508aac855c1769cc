"""How every figure looks: fonts, colours that survive colour blindness, hatches that survive a black-and-white printer.

Colour says how a variant shards, fill and line style say what kind of evidence a row is; a mark beside every colour
(a label, a marker, a word) says the same again.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from bench.core.presentation import Variant, get_strategy_presentation, split_finetune

FIGURE_WIDTH_IN = 4.7
"""Width of a figure: one column on a phone, half a page on a desk."""
MAX_FIGURE_HEIGHT_IN = 9.0
"""Height at which a figure is continued in another one, so that it fits a printed page."""

INK_COLOUR, MUTED_COLOUR, GRID_COLOUR = "#1a1a1a", "#595959", "#d9d9d9"
OOM_COLOUR = "#a63c00"
LIMIT_COLOUR = "#7a3b69"

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


# Strategies state their colours (`presentation`): those of the usual ones are Okabe & Ito's (2008), "Color Universal
# Design": distinct under protanopia, deuteranopia and tritanopia.
SPARE_COLOURS = ("#a63c7d", "#2f8fa3", "#6f7a12", "#7a5c8c")
SHADE_STEP, MAX_SHADE = 0.25, 0.6
"""White mixed into a colour for each further variant that has it, and for the last of many."""
MIN_COLOUR_DISTANCE = 0.15
"""Distance of two colours, as a share of that from black to white, below which they need different markers."""
MARKERS = ("o", "s", "D", "^", "v", "P", "<", ">", "p", "h", "*", "d")


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
    """A mark for every variant, by label.

    Variants that shard alike (hybrids of several factors, one knob on and off, all trained or adapters) share a hue in
    different shades; markers differ between all of them while there are markers left.
    """
    styles: dict[str, VariantStyle] = {}
    hues = {variant: _find_hue(variant.kind) for variant in sorted(set(variants))}
    variants_per_hue = Counter(hues.values())
    used_shades: Counter[str] = Counter()
    spare_colours: dict[str, str] = {}
    for position, (variant, hue) in enumerate(hues.items()):
        own_colour = find_strategy_colour(hue)
        if own_colour is None:
            spare_colours.setdefault(hue, SPARE_COLOURS[len(spare_colours) % len(SPARE_COLOURS)])
        shade_step = min(SHADE_STEP, MAX_SHADE / max(variants_per_hue[hue] - 1, 1))
        colour = lighten_colour(own_colour or spare_colours[hue], shade_step * used_shades[hue])
        used_shades[hue] += 1
        styles[variant.label] = VariantStyle(colour, MARKERS[position % len(MARKERS)])
    return styles


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
