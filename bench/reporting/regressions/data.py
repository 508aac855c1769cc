"""A comparison and a history as JSON: stable keys, null for what is not known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from bench.comparison.history import Point, Series
from bench.comparison.result import FORMAT_VERSION, Comparison


def comparison_json(comparison: Comparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    values = {
        "format": FORMAT_VERSION,
        "base": base,
        "candidate": candidate,
        "exit_code": comparison.exit_code,
        **asdict(comparison),
    }
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def history_json(found: Sequence[Series]) -> str:
    """Every series with its points and change points."""
    return (
        json.dumps(
            {"format": FORMAT_VERSION, "series": [_series(series) for series in found]},
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n"
    )


def _series(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "evidence": series.evidence,
        "device": series.device,
        "quantity": series.quantity.column,
        "question": series.question,
        "points": [_point(point) for point in series.points],
        "change_points": [asdict(change) for change in series.change_points],
    }


def _point(point: Point) -> dict[str, Any]:
    """All but the rows, which the store has."""
    return {each.name: getattr(point, each.name) for each in fields(point) if each.name != "rows"}
