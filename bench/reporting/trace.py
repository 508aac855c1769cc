"""A simulated step in the Trace Event Format, which chrome://tracing and ui.perfetto.dev open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("complete" and "metadata"
events). Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.reporting.timeline import lanes
from bench.simulate.prediction import Span

MICROSECONDS = 1e6
RANK = 0
"""Ranks are alike: one is simulated."""


def trace_events(spans: Sequence[Span], title: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The step as one process, its streams as threads.

    Parameters
    ----------
    title: str
        Name of the process.
    facts: mapping
        What else to know of the run; kept in the file.
    """
    threads = {stream: number for number, stream in enumerate(lanes(spans))}
    events: list[dict[str, Any]] = [_about("process_name", 0, {"name": title})]
    for stream, number in threads.items():
        events.append(_about("thread_name", number, {"name": stream}))
        events.append(
            {"name": "thread_sort_index", "ph": "M", "pid": RANK, "tid": number, "args": {"sort_index": number}}
        )
    for span in sorted(spans, key=lambda span: (span.start_s, threads[span.stream])):
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": span.start_s * MICROSECONDS,
                "dur": (span.end_s - span.start_s) * MICROSECONDS,
                "pid": RANK,
                "tid": threads[span.stream],
                "args": {"kind": span.kind},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts)}


def _about(what: str, thread: int, facts: dict[str, Any]) -> dict[str, Any]:
    """A metadata event."""
    return {"name": what, "ph": "M", "pid": RANK, "tid": thread, "args": facts}
