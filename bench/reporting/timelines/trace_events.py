"""A simulated step in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("complete" and "metadata"
events). Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.prediction.prediction import TimelineSpan
from bench.reporting.timelines.timeline import list_streams

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
    """A metadata event."""
    return {"name": event_name, "ph": "M", "pid": SIMULATED_RANK_ID, "tid": thread_id, "args": event_arguments}
