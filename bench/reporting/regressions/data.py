"""A comparison and a history as JSON: stable keys, null for what is not known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from bench.comparison.history import HistoryPoint, HistorySeries
from bench.comparison.result import FORMAT_VERSION, RunComparison


def format_comparison_json(comparison: RunComparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    values = {
        "format": FORMAT_VERSION,
        "base": base,
        "candidate": candidate,
        "exit_code": comparison.exit_code,
        **asdict(comparison),
    }
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def format_history_json(all_series: Sequence[HistorySeries]) -> str:
    """Every series with its points and change points."""
    return (
        json.dumps(
            {"format": FORMAT_VERSION, "series": [_describe_series(series) for series in all_series]},
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n"
    )


def _describe_series(series: HistorySeries) -> dict[str, Any]:
    return {
        "name": series.name,
        "evidence": series.evidence,
        "device": series.device,
        "quantity": series.quantity.column,
        "question": series.question,
        "points": [_describe_point(point) for point in series.points],
        "change_points": [asdict(change) for change in series.change_points],
    }


def _describe_point(point: HistoryPoint) -> dict[str, Any]:
    """All but the rows, which the store has."""
    return {field.name: getattr(point, field.name) for field in fields(point) if field.name != "rows"}
