"""A picture of a simulated step: a lane per stream; above the whole step, below a closer look at some blocks.

Of a pipeline: a lane per rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from bench.reporting import style
from bench.reporting.drawing import header, header_height_in, new_figure
from bench.simulate.prediction import Span

STREAMS = {
    "compute": "compute",
    "gather": "all-gather",
    "reduce": "reduce",
    "replicate": "replicas",
    "cpu": "CPU",
}
"""Streams in the order of their lanes, and what stands beside them."""

TRANSFER = "transfer"

# Okabe & Ito (2008): distinct for colour-blind readers; lightness differs between neighbours in print too.
KINDS = {
    "forward": "#56b4e9",
    "recompute": "#009e73",
    "backward": "#0072b2",
    "optimizer": "#1a1a1a",
    "all-gather": "#e69f00",
    "reduce-scatter": "#d55e00",
    "all-reduce": "#cc79a7",
    "exchange": "#f0e442",
    TRANSFER: "#8f6b4a",
    "launch": "#8c8c8c",
    "wait": "#ffffff",
}
HATCHED = ("wait",)
DARK = ("backward", "recompute", "optimizer", "reduce-scatter", TRANSFER)
"""Kinds that are labelled in white."""

WIDTH_IN, LANE_IN, HEAD_IN, FOOT_IN = 9.4, 0.3, 0.45, 0.4
BLOCKS_CLOSER = 3
"""Blocks that a closer look shows."""
LATER = 0.75
"""How far into forward that is: in a decoder, where there is one."""
INVISIBLE = 0.001
"""Gap, as a share of the step, that separates nothing."""
NARROW_IN = 0.03
CHARACTER_IN = 0.075
"""Width of a character of a label."""


@dataclass(frozen=True)
class Window:
    """A part of the step that is drawn larger."""

    title: str
    start_s: float
    end_s: float


def lanes(spans: Iterable[Span]) -> list[str]:
    """Streams that have spans, in the order of their lanes."""
    present = dict.fromkeys(span.stream for span in spans)
    return [stream for stream in STREAMS if stream in present] + [name for name in present if name not in STREAMS]


def lane_name(stream: str, spans: Iterable[Span]) -> str:
    """What stands beside a lane: the name of its stream, or of the one thing that it is used for instead."""
    kinds = {span.kind for span in spans if span.stream == stream}
    return TRANSFER if kinds == {TRANSFER} else STREAMS.get(stream, stream)


def draw_timeline(spans: Sequence[Span], title: str, subtitle: str) -> Figure:
    """Draw a step, times in milliseconds. Draw and save inside `style.context()`."""
    spans = joined(spans)
    streams = lanes(spans)
    windows = closer_looks(spans)
    rows = 2 if windows else 1
    body_in = HEAD_IN + FOOT_IN + LANE_IN * len(streams)
    height_in = header_height_in(title, subtitle, WIDTH_IN) + rows * body_in + 0.35
    figure = new_figure(WIDTH_IN, height_in)
    header(figure, title, subtitle)
    grid = figure.add_gridspec(rows, max(len(windows), 1))
    whole = figure.add_subplot(grid[0, :])
    end_s = max(span.end_s for span in spans)
    _draw_lanes(whole, spans, streams, Window("the whole step", 0.0, end_s), WIDTH_IN, labelled=not windows)
    for column, window in enumerate(windows):
        closer = figure.add_subplot(grid[1, column])
        _draw_lanes(closer, spans, streams, window, WIDTH_IN / len(windows), named=column == 0)
        _point_out(figure, whole, closer, window, len(streams))
    kinds = [kind for kind in (*KINDS, *_other_kinds(spans)) if any(span.kind == kind for span in spans)]
    figure.legend(handles=[_patch(kind) for kind in kinds], loc="outside lower center", ncols=len(kinds))
    return figure


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans of one stream that follow each other as good as at once and have the same name are one."""
    gap_s = INVISIBLE * max(span.end_s for span in spans)
    result: list[Span] = []
    last: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        before = last.get(span.stream)
        if before is not None and result[before].name == span.name and span.start_s - result[before].end_s < gap_s:
            result[before] = dataclasses.replace(result[before], end_s=max(span.end_s, result[before].end_s))
        else:
            last[span.stream] = len(result)
            result.append(span)
    return result


def closer_looks(spans: Sequence[Span]) -> list[Window]:
    """Some blocks of forward, and the same of backward; none where lanes are the ranks of a pipeline."""
    windows: list[Window] = []
    if not any(span.stream in STREAMS for span in spans):
        return windows
    for title, kinds, at in (("forward", ("forward",), LATER), ("backward", ("recompute", "backward"), 1 - LATER)):
        passed = sorted((span for span in spans if span.kind in kinds), key=lambda span: span.start_s)
        blocks = list(dict.fromkeys(label(span) for span in passed))
        if len(blocks) <= BLOCKS_CLOSER:
            continue
        first = round((len(blocks) - BLOCKS_CLOSER) * at)
        chosen = [span for span in passed if label(span) in blocks[first : first + BLOCKS_CLOSER]]
        start_s, end_s = min(span.start_s for span in chosen), max(span.end_s for span in chosen)
        if end_s - start_s < max(span.end_s for span in spans) / 2:
            windows.append(Window(f"in {title}", start_s, end_s))
    return windows


def label(span: Span) -> str:
    """What a span is about, without its kind: ``decoder.block.3``."""
    return re.sub(rf"^(launch )?({'|'.join(KINDS)}) ", "", span.name)


def _draw_lanes(
    axes: Axes,
    spans: Sequence[Span],
    streams: Sequence[str],
    window: Window,
    width_in: float,
    *,
    named: bool = True,
    labelled: bool = True,
) -> None:
    per_in = (window.end_s - window.start_s) / (0.85 * width_in)
    for span in spans:
        start, end = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
        if end <= start:
            continue
        y = streams.index(span.stream)
        face = KINDS.get(span.kind, style.MUTED)
        # A white edge would hide a narrow bar; one of its own colour keeps it visible.
        edge = style.MUTED if span.kind in HATCHED else "white" if (end - start) / per_in > NARROW_IN else face
        axes.add_patch(
            Rectangle(
                (start * 1e3, y - 0.38),
                (end - start) * 1e3,
                0.76,
                facecolor=face,
                edgecolor=edge,
                hatch="////" if span.kind in HATCHED else None,
                linewidth=0.4,
            )
        )
        text = _fitting(label(span), (end - start) / per_in) if labelled else ""
        if text:
            colour = "white" if span.kind in DARK else style.INK
            middle = (start + end) / 2 * 1e3
            axes.text(middle, y, text, ha="center", va="center", size=7, color=colour, clip_on=True)
    axes.set_xlim(window.start_s * 1e3, window.end_s * 1e3)
    axes.set_ylim(len(streams) - 0.5, -0.5)
    axes.set_yticks(range(len(streams)), [lane_name(name, spans) for name in streams] if named else [""] * len(streams))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title(window.title, loc="center", size=8.5, weight="normal")


def _fitting(text: str, width_in: float) -> str:
    """As much of a label as a bar has room for: the whole, its last parts, or nothing."""
    parts = text.split(".")
    shorter = [".".join(parts[start:]) for start in range(len(parts))]
    return next((short for short in shorter if short and len(short) * CHARACTER_IN <= width_in), "")


def _point_out(figure: Figure, whole: Axes, closer: Axes, window: Window, height: int) -> None:
    """Lines from the part of the step that is drawn larger to its larger drawing."""
    left, right = window.start_s * 1e3, window.end_s * 1e3
    whole.add_patch(
        Rectangle((left, -0.48), right - left, height - 0.04, fill=False, edgecolor=style.INK, linewidth=0.9, zorder=3)
    )
    for x in (left, right):
        line = ConnectionPatch(
            (x, height - 0.5), (x, -0.5), "data", "data", axesA=whole, axesB=closer, color=style.MUTED, linewidth=0.6
        )
        line.set_in_layout(False)
        figure.add_artist(line)


def _other_kinds(spans: Iterable[Span]) -> list[str]:
    return list(dict.fromkeys(span.kind for span in spans if span.kind not in KINDS))


def _patch(kind: str) -> Patch:
    return Patch(
        facecolor=KINDS.get(kind, style.MUTED),
        edgecolor=style.MUTED if kind in HATCHED else "white",
        hatch="////" if kind in HATCHED else None,
        label=kind,
    )
