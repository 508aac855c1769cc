"""Measured and published rows of the same question: what stands beside a prediction, and how each differs from it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.config.run_config import RunConfig
from bench.core.installation import DATA_FOLDER
from bench.core.presentation import build_variant, format_memory, format_number, format_percent, format_seconds
from bench.explorer.answer import find_best_candidate
from bench.explorer.state import ExplorerState
from bench.records import load
from bench.records.published import load_published

MAX_ROWS = 8

MAX_PARAMETER_DIFFERENCE = 0.03
"""Share of the parameters by which a published model may differ: papers round, and few say which model it was."""

COMPARED_COLUMNS = {
    "model": "model",
    "hardware": "device",
    "world_size": "GPUs",
    "effective_strategy": "strategy",
    "sharding_factor": "F",
    "precision": "precision",
    "activation_checkpointing": "checkpointing",
    "batch_size_per_gpu": "batch",
    "sequence_length": "sequence length",
}
"""Columns in which a row may differ from the question, and what they are called, the most telling first."""

RESULT_FORMATS = {
    "tflops_per_gpu": lambda value: f"{format_number(value)} TFLOP/s per GPU",
    "hardware_tflops_per_gpu": lambda value: f"{format_number(value)} TFLOP/s per GPU with recomputation",
    "mfu": lambda value: f"MFU {format_percent(value)}",
    "tokens_per_second_per_gpu": lambda value: f"{format_number(value)} tokens/s per GPU",
    "step_time_median_s": lambda value: f"{format_seconds(value)} per step",
    "peak_reserved_bytes": lambda value: f"{format_memory(value)} reserved",
    "peak_allocated_bytes": lambda value: f"{format_memory(value)} allocated",
}
"""Columns of what was found, and how each is told."""


@dataclass(frozen=True)
class RecordedRow:
    """One run that somebody made."""

    evidence: str
    """measured or published."""
    run: str
    """What it was: model, strategy, device."""
    result: str
    differences: tuple[str, ...]
    """In what it differs from the question; what the source leaves open is told as such."""
    source: str


def find_recorded_rows(state: ExplorerState) -> tuple[RecordedRow, ...]:
    """Rows of the same model, or of one of its size, those that differ least first.

    Raises
    ------
    UsageError
        If the state has no answer.
    """
    config = find_best_candidate(state).config
    wanted = {
        "model": config.model.name,
        "hardware": config.hardware.name,
        "world_size": config.gpus,
        "effective_strategy": config.effective_strategy,
        "sharding_factor": config.strategy.resolved_sharding_factor,
        "precision": config.precision.name,
        "activation_checkpointing": config.activation_checkpointing,
        "batch_size_per_gpu": config.batch_size_per_gpu,
        "sequence_length": config.sequence_length,
    }
    ranked_rows: list[tuple[int, int, RecordedRow]] = []
    for row in _select_rows(config):
        differences = list_differences(row, wanted)
        if result := _format_result(row):
            # of a row that differs in nothing else, one that leaves less open is the better one
            weight = sum(2 - difference.endswith("not stated") for difference in differences)
            ranked_rows.append((weight, len(ranked_rows), _build_row(row, result, differences)))
    distinct_rows = list(dict.fromkeys(row for *_, row in sorted(ranked_rows)))
    return tuple(distinct_rows[:MAX_ROWS])


def _select_rows(config: RunConfig) -> list[dict[Any, Any]]:
    measured, published = _load_measured(), _load_published()
    same_model = measured[(measured["model"] == config.model.name) & (measured["hardware"] == config.hardware.name)]
    parameters = published["parameters"].astype("Float64")
    is_near = ((parameters / config.model.num_parameters - 1).abs() <= MAX_PARAMETER_DIFFERENCE).fillna(False)
    same_size = published[is_near | (published["model"] == config.model.name).fillna(False)]
    return [*same_model.to_dict("records"), *same_size.to_dict("records")]


@functools.cache
def _load_measured() -> pd.DataFrame:
    return load(DATA_FOLDER / "results" / "measured").assign(evidence="measured")


@functools.cache
def _load_published() -> pd.DataFrame:
    """One row per configuration: a line of the file holds one number."""
    frame = load_published()
    identity = [*COMPARED_COLUMNS, "source_key", "source_url", "source_figure", "source_note", "source_sharding"]
    results = list(RESULT_FORMATS)
    merged = frame.groupby([*identity, "parameters"], dropna=False, sort=False)[[*results, "status"]].first()
    return merged.reset_index().assign(evidence="published")


def list_differences(row: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, ...]:
    """In what a row is not what was asked for: ``batch 8``, ``GPUs not stated``."""
    differences = []
    for column, label in COMPARED_COLUMNS.items():
        value = row.get(column)
        if _is_missing(value):
            differences.append(f"{label} not stated")
        elif str(value) != str(wanted[column]):
            differences.append(f"{label} {value}")
    return tuple(differences)


def _build_row(row: dict[str, Any], result: str, differences: tuple[str, ...]) -> RecordedRow:
    texts = {key: None if _is_missing(value) else value for key, value in row.items()}
    variant = build_variant(
        texts.get("strategy"),
        texts["effective_strategy"],
        texts["sharding_factor"],
        texts["world_size"],
    )
    run = f"{texts['model']}, {variant.label}"
    is_published = row["evidence"] == "published"
    source = (
        f"{texts['source_key']}, {texts['source_figure'] or texts['source_url']}"
        if is_published
        else "results/measured"
    )
    return RecordedRow(row["evidence"], run, result, differences, source)


def _format_result(row: dict[str, Any]) -> str:
    if row["status"] == "oom":
        return "out of memory"
    return ", ".join(
        format_value(row[column]) for column, format_value in RESULT_FORMATS.items() if not _is_missing(row.get(column))
    )


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
