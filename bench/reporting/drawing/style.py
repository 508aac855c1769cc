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

from bench.reporting.drawing.labels import Variant, split_finetune

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


# Okabe & Ito (2008), "Color Universal Design": distinct under protanopia, deuteranopia and tritanopia.
STRATEGY_COLOURS = {
    "single": "#000000",
    "data_parallel": "#7f4f24",
    "ddp": "#d55e00",
    "zero1": "#332288",
    "fsdp/full_replication": "#e69f00",
    "fsdp/hybrid_shard": "#009e73",
    "fsdp/full_shard": "#0072b2",
    "fsdp/shard_grad_op": "#56b4e9",
    "fsdp/unsharded": "#6b6b6b",
    "fsdp/hybrid_shard_grad_op": "#8a7a00",
    "fsdp1/no_shard": "#f0c05a",
    "fsdp1/hybrid_shard": "#6cc5a8",
    "fsdp1/full_shard": "#cc79a7",
    "fsdp1/shard_grad_op": "#e3a6c6",
    "fsdp1/hybrid_shard_grad_op": "#a9c76c",
    "deepspeed/stage_0": "#9a5b2e",
    "deepspeed/stage_1": "#b0a000",
    "deepspeed/stage_2": "#4b8f6b",
    "deepspeed/stage_3": "#3b4fa8",
    # Pipelines: a hue per schedule, lighter with DDP among the copies, darker with FSDP.
    "pipeline/gpipe": "#7b3294",
    "pipeline/gpipe+ddp": "#b07cc6",
    "pipeline/gpipe+fsdp": "#4d1a60",
    "pipeline/1f1b": "#a6004f",
    "pipeline/1f1b+ddp": "#d96a9e",
    "pipeline/1f1b+fsdp": "#6b0033",
    "pipeline/interleaved_1f1b": "#1b7837",
    "pipeline/interleaved_1f1b+ddp": "#76b58a",
    "pipeline/interleaved_1f1b+fsdp": "#0d4620",
    "naive_pipeline": "#878787",
    "naive_pipeline/+ddp": "#b5b5b5",
    "naive_pipeline/+fsdp": "#545454",
    # Frameworks: the colour of what they wrap, Accelerate lighter, Lightning darker.
    "accelerate/ddp": "#e8915c",
    "accelerate/full_shard": "#5b9fc9",
    "accelerate/fsdp1_full_shard": "#dfabc8",
    "lightning/ddp": "#8f3f00",
    "lightning/full_shard": "#004a75",
    "lightning/fsdp1_full_shard": "#8c5273",
    "tensor_parallel": "#7f4fc9",  # at every degree
}
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
        if hue not in STRATEGY_COLOURS:
            spare_colours.setdefault(hue, SPARE_COLOURS[len(spare_colours) % len(SPARE_COLOURS)])
        shade_step = min(SHADE_STEP, MAX_SHADE / max(variants_per_hue[hue] - 1, 1))
        colour = lighten_colour(STRATEGY_COLOURS.get(hue) or spare_colours[hue], shade_step * used_shades[hue])
        used_shades[hue] += 1
        styles[variant.label] = VariantStyle(colour, MARKERS[position % len(MARKERS)])
    return styles


def _find_hue(kind: str) -> str:
    """The kind whose colour a variant of some kind has: its own, whatever part of the model is trained, or a family's.

    A kind that neither has a colour is its own, and gets a spare one.
    """
    family, _, sharding = kind.partition("/")
    kind = "/".join(part for part in (family, split_finetune(sharding)[0]) if part)
    return family if family in STRATEGY_COLOURS and kind not in STRATEGY_COLOURS else kind


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
