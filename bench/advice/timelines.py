"""The simulated step of a row as a file: a picture, or a trace for a viewer."""

from __future__ import annotations

import json
from pathlib import Path

from bench.advice.ranking import RankedCandidate
from bench.advice.wording import describe_missing_time, format_overrides, format_strategy
from bench.core import presentation
from bench.core.errors import UsageError
from bench.prediction.predictor import predict_run
from bench.reporting.drawing import style
from bench.reporting.timelines.timeline import build_trace_events, draw_timeline


def write_timeline(candidate: RankedCandidate, path: Path) -> None:
    """Write the step of a row to a file, in the form its ending says.

    Raises
    ------
    UsageError
        If there is no step to draw, or the file cannot be written.
    """
    config = candidate.config
    time = predict_run(config, timeline=True).time
    if time is None or not time.timeline:
        raise UsageError(f"timeline={path} cannot be drawn: {describe_missing_time(config)}.")
    title = (
        f"One step of {config.model.name}, {format_strategy(config)}: {presentation.format_seconds(time.step_s.value)}"
    )
    subtitle = (
        f"Predicted, not measured · {presentation.format_ranks(config.gpus, config.hardware.device)} "
        f"{config.hardware.name} · "
        f"{config.precision.name} · batch {config.batch_size_per_gpu} × {config.sequence_length} · "
        f"checkpointing {config.activation_checkpointing} · limited by {time.limited_by}"
    )
    try:
        if path.suffix == ".json":
            metadata = {
                "run_id": config.run_id,
                "overrides": format_overrides(candidate.settings),
                "step_s": time.step_s.value,
            }
            path.write_text(
                json.dumps(build_trace_events(time.timeline, title, metadata), allow_nan=False), encoding="utf-8"
            )
            return
        with style.apply_report_style():
            figure = draw_timeline(time.timeline, title, subtitle)
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UsageError(f"timeline={path} cannot be written: {error.strerror or error}.") from None
