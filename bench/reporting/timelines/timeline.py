"""A picture of a simulated step: a lane per stream; above the whole step, below a closer look at some blocks.

Of a pipeline: a lane per rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from bench.prediction.prediction import TimelineSpan
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import compute_header_height_in, create_figure, draw_header

STREAM_LABELS = {
    "compute": "compute",
    "gather": "all-gather",
    "reduce": "reduce",
    "replicate": "replicas",
    "cpu": "CPU",
}
"""Streams in the order of their lanes, and what stands beside them."""

TRANSFER = "transfer"

# Okabe & Ito (2008): distinct for colour-blind readers; lightness differs between neighbours in print too.
SPAN_KIND_COLOURS = {
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
HATCHED_KINDS = ("wait",)
DARK_KINDS = ("backward", "recompute", "optimizer", "reduce-scatter", TRANSFER)
"""Kinds that are labelled in white."""

TIMELINE_WIDTH_IN, LANE_HEIGHT_IN, HEAD_HEIGHT_IN, FOOT_HEIGHT_IN = 9.4, 0.3, 0.45, 0.4
CLOSEUP_BLOCKS = 3
"""Blocks that a closer look shows."""
CLOSEUP_POSITION = 0.75
"""How far into forward that is: in a decoder, where there is one."""
MAX_INVISIBLE_GAP = 0.001
"""Gap, as a share of the step, that separates nothing."""
MAX_NARROW_WIDTH_IN = 0.03
CHARACTER_WIDTH_IN = 0.075
"""Width of a character of a label."""


@dataclass(frozen=True)
class TimeWindow:
    """A part of the step that is drawn larger."""

    title: str
    start_s: float
    end_s: float


def list_streams(spans: Iterable[TimelineSpan]) -> list[str]:
    """Streams that have spans, in the order of their lanes."""
    present_streams = dict.fromkeys(span.stream for span in spans)
    return [stream for stream in STREAM_LABELS if stream in present_streams] + [
        name for name in present_streams if name not in STREAM_LABELS
    ]


def get_lane_name(stream: str, spans: Iterable[TimelineSpan]) -> str:
    """What stands beside a lane: the name of its stream, or of the one thing that it is used for instead."""
    kinds = {span.kind for span in spans if span.stream == stream}
    return TRANSFER if kinds == {TRANSFER} else STREAM_LABELS.get(stream, stream)


def draw_timeline(spans: Sequence[TimelineSpan], title: str, subtitle: str) -> Figure:
    """Draw a step, times in milliseconds. Draw and save inside `style.apply_report_style()`."""
    spans = merge_spans(spans)
    streams = list_streams(spans)
    windows = find_closeup_windows(spans)
    row_count = 2 if windows else 1
    row_height_in = HEAD_HEIGHT_IN + FOOT_HEIGHT_IN + LANE_HEIGHT_IN * len(streams)
    height_in = compute_header_height_in(title, subtitle, TIMELINE_WIDTH_IN) + row_count * row_height_in + 0.35
    figure = create_figure(TIMELINE_WIDTH_IN, height_in)
    draw_header(figure, title, subtitle)
    grid = figure.add_gridspec(row_count, max(len(windows), 1))
    overview_axes = figure.add_subplot(grid[0, :])
    end_s = max(span.end_s for span in spans)
    _draw_lanes(
        overview_axes,
        spans,
        streams,
        TimeWindow("the whole step", 0.0, end_s),
        TIMELINE_WIDTH_IN,
        show_labels=not windows,
    )
    for column, window in enumerate(windows):
        closeup_axes = figure.add_subplot(grid[1, column])
        _draw_lanes(closeup_axes, spans, streams, window, TIMELINE_WIDTH_IN / len(windows), show_lane_names=column == 0)
        _draw_zoom_lines(figure, overview_axes, closeup_axes, window, len(streams))
    kinds = [
        kind for kind in (*SPAN_KIND_COLOURS, *_list_other_kinds(spans)) if any(span.kind == kind for span in spans)
    ]
    figure.legend(handles=[_build_legend_patch(kind) for kind in kinds], loc="outside lower center", ncols=len(kinds))
    return figure


def merge_spans(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Spans of one stream that follow each other as good as at once and have the same name are one."""
    gap_s = MAX_INVISIBLE_GAP * max(span.end_s for span in spans)
    merged_spans: list[TimelineSpan] = []
    last_indices: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        previous_index = last_indices.get(span.stream)
        if (
            previous_index is not None
            and merged_spans[previous_index].name == span.name
            and span.start_s - merged_spans[previous_index].end_s < gap_s
        ):
            merged_spans[previous_index] = dataclasses.replace(
                merged_spans[previous_index], end_s=max(span.end_s, merged_spans[previous_index].end_s)
            )
        else:
            last_indices[span.stream] = len(merged_spans)
            merged_spans.append(span)
    return merged_spans


def find_closeup_windows(spans: Sequence[TimelineSpan]) -> list[TimeWindow]:
    """Some blocks of forward, and the same of backward; none where lanes are the ranks of a pipeline."""
    windows: list[TimeWindow] = []
    if not any(span.stream in STREAM_LABELS for span in spans):
        return windows
    for title, kinds, position in (
        ("forward", ("forward",), CLOSEUP_POSITION),
        ("backward", ("recompute", "backward"), 1 - CLOSEUP_POSITION),
    ):
        kind_spans = sorted((span for span in spans if span.kind in kinds), key=lambda span: span.start_s)
        block_labels = list(dict.fromkeys(format_span_label(span) for span in kind_spans))
        if len(block_labels) <= CLOSEUP_BLOCKS:
            continue
        first_block = round((len(block_labels) - CLOSEUP_BLOCKS) * position)
        chosen_spans = [
            span
            for span in kind_spans
            if format_span_label(span) in block_labels[first_block : first_block + CLOSEUP_BLOCKS]
        ]
        start_s, end_s = min(span.start_s for span in chosen_spans), max(span.end_s for span in chosen_spans)
        if end_s - start_s < max(span.end_s for span in spans) / 2:
            windows.append(TimeWindow(f"in {title}", start_s, end_s))
    return windows


def format_span_label(span: TimelineSpan) -> str:
    """What a span is about, without its kind: ``decoder.block.3``."""
    return re.sub(rf"^(launch )?({'|'.join(SPAN_KIND_COLOURS)}) ", "", span.name)


def _draw_lanes(
    axes: Axes,
    spans: Sequence[TimelineSpan],
    streams: Sequence[str],
    window: TimeWindow,
    width_in: float,
    *,
    show_lane_names: bool = True,
    show_labels: bool = True,
) -> None:
    seconds_per_inch = (window.end_s - window.start_s) / (0.85 * width_in)
    for span in spans:
        start, end = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
        if end <= start:
            continue
        y = streams.index(span.stream)
        face_colour = SPAN_KIND_COLOURS.get(span.kind, style.MUTED_COLOUR)
        # A white edge would hide a narrow bar; one of its own colour keeps it visible.
        edge_colour = (
            style.MUTED_COLOUR
            if span.kind in HATCHED_KINDS
            else "white"
            if (end - start) / seconds_per_inch > MAX_NARROW_WIDTH_IN
            else face_colour
        )
        axes.add_patch(
            Rectangle(
                (start * 1e3, y - 0.38),
                (end - start) * 1e3,
                0.76,
                facecolor=face_colour,
                edgecolor=edge_colour,
                hatch="////" if span.kind in HATCHED_KINDS else None,
                linewidth=0.4,
            )
        )
        text = _shorten_label(format_span_label(span), (end - start) / seconds_per_inch) if show_labels else ""
        if text:
            colour = "white" if span.kind in DARK_KINDS else style.INK_COLOUR
            middle = (start + end) / 2 * 1e3
            axes.text(middle, y, text, ha="center", va="center", size=7, color=colour, clip_on=True)
    axes.set_xlim(window.start_s * 1e3, window.end_s * 1e3)
    axes.set_ylim(len(streams) - 0.5, -0.5)
    axes.set_yticks(
        range(len(streams)),
        [get_lane_name(name, spans) for name in streams] if show_lane_names else [""] * len(streams),
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title(window.title, loc="center", size=8.5, weight="normal")


def _shorten_label(text: str, width_in: float) -> str:
    """As much of a label as a bar has room for: the whole, its last parts, or nothing."""
    parts = text.split(".")
    candidate_labels = [".".join(parts[start:]) for start in range(len(parts))]
    return next(
        (candidate for candidate in candidate_labels if candidate and len(candidate) * CHARACTER_WIDTH_IN <= width_in),
        "",
    )


def _draw_zoom_lines(
    figure: Figure, overview_axes: Axes, closeup_axes: Axes, window: TimeWindow, lane_count: int
) -> None:
    """Lines from the part of the step that is drawn larger to its larger drawing."""
    left, right = window.start_s * 1e3, window.end_s * 1e3
    overview_axes.add_patch(
        Rectangle(
            (left, -0.48),
            right - left,
            lane_count - 0.04,
            fill=False,
            edgecolor=style.INK_COLOUR,
            linewidth=0.9,
            zorder=3,
        )
    )
    for x in (left, right):
        line = ConnectionPatch(
            (x, lane_count - 0.5),
            (x, -0.5),
            "data",
            "data",
            axesA=overview_axes,
            axesB=closeup_axes,
            color=style.MUTED_COLOUR,
            linewidth=0.6,
        )
        line.set_in_layout(False)
        figure.add_artist(line)


def _list_other_kinds(spans: Iterable[TimelineSpan]) -> list[str]:
    return list(dict.fromkeys(span.kind for span in spans if span.kind not in SPAN_KIND_COLOURS))


def _build_legend_patch(kind: str) -> Patch:
    return Patch(
        facecolor=SPAN_KIND_COLOURS.get(kind, style.MUTED_COLOUR),
        edgecolor=style.MUTED_COLOUR if kind in HATCHED_KINDS else "white",
        hatch="////" if kind in HATCHED_KINDS else None,
        label=kind,
    )


# --- A simulated step in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

MICROSECONDS_PER_SECOND = 1e6
SIMULATED_RANK_ID = 0
"""Ranks are alike: one is simulated."""


def build_trace_events(spans: Sequence[TimelineSpan], title: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The step as one process, its streams as threads.

    Parameters
    ----------
    title: str
        Name of the process.
    metadata: mapping
        What else to know of the run; kept in the file.
    """
    thread_ids = {stream: thread_id for thread_id, stream in enumerate(list_streams(spans))}
    events: list[dict[str, Any]] = [_build_metadata_event("process_name", 0, {"name": title})]
    for stream, thread_id in thread_ids.items():
        events.append(_build_metadata_event("thread_name", thread_id, {"name": stream}))
        events.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": SIMULATED_RANK_ID,
                "tid": thread_id,
                "args": {"sort_index": thread_id},
            }
        )
    for span in sorted(spans, key=lambda span: (span.start_s, thread_ids[span.stream])):
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_s * MICROSECONDS_PER_SECOND,
                "dur": (span.end_s - span.start_s) * MICROSECONDS_PER_SECOND,
                "pid": SIMULATED_RANK_ID,
                "tid": thread_ids[span.stream],
                "args": {"kind": span.kind},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(metadata)}


def _build_metadata_event(event_name: str, thread_id: int, event_arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": event_name, "ph": "M", "pid": SIMULATED_RANK_ID, "tid": thread_id, "args": event_arguments}
