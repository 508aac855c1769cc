"""The simulated step of the best row as spans for a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.explorer.answer import find_best_candidate
from bench.explorer.state import ExplorerState
from bench.prediction.prediction import TimelineSpan
from bench.prediction.predictor import predict_run
from bench.reporting.timelines.timeline import get_lane_name, list_streams, merge_spans

MAX_SPANS = 600
"""Of a figure; of longer steps the beginning is shown."""


@dataclass(frozen=True)
class StepTimeline:
    """What occupies the streams of one rank during one step."""

    lanes: tuple[str, ...]
    """Names of streams, from top to bottom."""
    spans: tuple[tuple[str, TimelineSpan], ...]
    """Name of the lane, and the span."""
    is_cut: bool
    """Whether the end of the step is left out."""


def simulate_timeline(state: ExplorerState) -> StepTimeline | None:
    """Simulate the step once more, keeping its spans; None where no speed is known.

    Raises
    ------
    UsageError
        If the state has no answer.
    """
    time = predict_run(find_best_candidate(state).config, timeline=True).time
    if time is None or not time.timeline:
        return None
    spans: Sequence[TimelineSpan] = sorted(merge_spans(time.timeline), key=lambda span: span.start_s)
    lane_names = {stream: get_lane_name(stream, spans) for stream in list_streams(spans)}
    shown_spans = tuple((lane_names[span.stream], span) for span in spans[:MAX_SPANS])
    return StepTimeline(tuple(lane_names.values()), shown_spans, len(spans) > MAX_SPANS)
