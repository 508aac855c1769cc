"""The simulated step of a row as a file: a picture, or a trace for a viewer."""

from __future__ import annotations

import json
from pathlib import Path

from bench.advice.ranking import Row
from bench.advice.words import overrides, strategy, untimed
from bench.errors import UsageError
from bench.reporting import labels, style
from bench.reporting.timeline import draw_timeline
from bench.reporting.trace import trace_events
from bench.simulate import predict as simulator


def write_timeline(row: Row, path: Path) -> None:
    """Write the step of a row to a file, in the form its ending says.

    Raises
    ------
    UsageError
        If there is no step to draw, or the file cannot be written.
    """
    config = row.config
    time = simulator.predict(config, timeline=True).time
    if time is None or not time.timeline:
        raise UsageError(f"timeline={path} cannot be drawn: {untimed(config)}.")
    title = f"One step of {config.model.name}, {strategy(config)}: {labels.seconds(time.step_s.value)}"
    subtitle = (
        f"Predicted, not measured · {labels.ranks(config.gpus, config.hardware.device)} {config.hardware.name} · "
        f"{config.precision.name} · batch {config.batch_size_per_gpu} × {config.sequence_length} · "
        f"checkpointing {config.activation_checkpointing} · limited by {time.limited_by}"
    )
    try:
        if path.suffix == ".json":
            facts = {"run_id": config.run_id, "overrides": overrides(row.settings), "step_s": time.step_s.value}
            path.write_text(json.dumps(trace_events(time.timeline, title, facts), allow_nan=False), encoding="utf-8")
            return
        with style.context():
            figure = draw_timeline(time.timeline, title, subtitle)
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise UsageError(f"timeline={path} cannot be written: {error.strerror or error}.") from None
