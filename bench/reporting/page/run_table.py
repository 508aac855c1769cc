"""The table of all runs: its columns, what they are sorted and filtered by, and what a row says without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from bench.core import presentation
from bench.records import Record
from bench.reporting.page.rerun_command import build_rerun_command

RowValues = Mapping[str, Any]
"""A row of the table with None for what is missing."""

TOKENS_COLUMN = "tokens_per_second_per_gpu"
RERUN_LABEL = "Run it again"


@dataclass(frozen=True)
class RunTableColumn:
    """One column: what it shows, and what it is sorted by where that is not the text."""

    title: str
    get_text: Callable[[RowValues], Any]
    """What a cell says; None for a value the run does not have."""
    get_sort_value: Callable[[RowValues], Any] | None = None
    """The number (or word) that stands behind it."""
    is_number: bool = False
    filter_name: str = ""
    """What the choice is called by which readers filter this column; empty for none."""
    is_short: bool = True
    """Whether a cell stays on one line."""
    is_ranked: bool = False
    """Whether it is sorted by a rank that the page gives: strategies from replicated to sharded."""


@dataclass(frozen=True)
class RunTableCell:
    """One cell, ready to be printed."""

    text: str
    sort_value: str
    """What it is sorted by; empty for its text or, where there is nothing, for last."""
    css_classes: str
    """Classes."""


@dataclass(frozen=True)
class RunTableRow:
    """One line of the table."""

    anchor: str
    run_id: str
    spoken_name: str
    """What to call the run, for those who hear the table."""
    cells: list[RunTableCell]
    brief_details: list[tuple[str, str]]
    """The most important details, for a page without scripts."""

    def pack(self) -> list[Any]:
        """As a script of the page reads it: anchor, run id, spoken name, what else the search finds it by, and per cell
        its text, or its text and what it is sorted by."""
        searched_text = " ".join(value for name, value in self.brief_details if name != RERUN_LABEL)
        cells = [[cell.text, cell.sort_value] if cell.sort_value else cell.text for cell in self.cells]
        return [self.anchor, self.run_id, self.spoken_name, searched_text, cells]


def _format_requested_strategy(row: RowValues) -> str:
    strategy = str(row["strategy"] or presentation.MISSING)
    has_factor = (
        row["sharding_factor"] is not None and presentation.get_strategy_presentation(strategy).is_sharded_by_factor
    )
    return f"{strategy}, F={row['sharding_factor']}" if has_factor else strategy


def _get_status(row: RowValues) -> str:
    return "degraded" if row["degraded"] and row["status"] == "ok" else str(row["status"])


def _describe_outcome(row: RowValues) -> str:
    if row["first_nonfinite_loss_step"] is not None:
        return f"{_get_status(row)}: loss not finite from step {row['first_nonfinite_loss_step']}"
    return f"{_get_status(row)}: {row['fit']}" if row["fit"] else _get_status(row)


def _format_step_time(row: RowValues) -> str | None:
    if row["step_time_median_s"] is None:
        return None
    p95_text = "" if row["step_time_p95_s"] is None else f" ({presentation.format_seconds(row['step_time_p95_s'])})"
    return presentation.format_seconds(row["step_time_median_s"]) + p95_text


def _format_settings(row: RowValues) -> str | None:
    return " · ".join(text for text in (row["limit"], row["settings"]) if text) or None


def _build_getter(column: str) -> Callable[[RowValues], Any]:
    return lambda row: row[column]


def _build_formatter(column: str, format_value: Callable[[Any], str]) -> Callable[[RowValues], Any]:
    return lambda row: None if row[column] is None else format_value(row[column])


def _build_memory_formatter(column: str) -> Callable[[RowValues], Any]:
    return _build_formatter(column, presentation.format_memory)


def _format_share(value: float) -> str:
    return f"{presentation.format_number(100 * value)} %"


RUN_TABLE_COLUMNS = (
    RunTableColumn("Model", _build_getter("model"), _build_getter("model"), filter_name="Model", is_short=False),
    RunTableColumn("Strategy", _build_getter("variant"), filter_name="Strategy", is_ranked=True, is_short=False),
    RunTableColumn(
        "Ranks", _build_getter("world_size"), _build_getter("world_size"), is_number=True, filter_name="Ranks"
    ),
    RunTableColumn(
        "Batch × sequence",
        _build_formatter("workload", lambda workload: str(workload).removeprefix("batch ")),
        _build_getter("batch_size_per_gpu"),
        filter_name="Batch",
    ),
    RunTableColumn("Checkpointing", _build_getter("activation_checkpointing"), filter_name="Checkpointing"),
    RunTableColumn("Evidence", _build_getter("evidence"), filter_name="Evidence"),
    RunTableColumn("Precision", _build_getter("precision"), filter_name="Precision"),
    RunTableColumn("Status", _describe_outcome, _get_status, filter_name="Status"),
    RunTableColumn(
        "TFLOP/s per rank",
        _build_formatter("counted_tflops", presentation.format_number),
        _build_getter("counted_tflops"),
        is_number=True,
    ),
    RunTableColumn("Step median (p95)", _format_step_time, _build_getter("step_time_median_s"), is_number=True),
    RunTableColumn(
        "Peak allocated",
        _build_memory_formatter("peak_allocated_bytes"),
        _build_getter("peak_allocated_bytes"),
        is_number=True,
    ),
    RunTableColumn(
        "Peak reserved",
        _build_memory_formatter("peak_reserved_bytes"),
        _build_getter("peak_reserved_bytes"),
        is_number=True,
    ),
    RunTableColumn(
        "Driver",
        _build_memory_formatter("peak_device_used_bytes"),
        _build_getter("peak_device_used_bytes"),
        is_number=True,
    ),
    RunTableColumn("MFU", _build_formatter("counted_mfu", _format_share), _build_getter("counted_mfu"), is_number=True),
    RunTableColumn(
        "Tokens/s per rank",
        _build_formatter(TOKENS_COLUMN, presentation.format_number),
        _build_getter(TOKENS_COLUMN),
        is_number=True,
    ),
    RunTableColumn("Limit, settings", _format_settings),
    RunTableColumn(
        "Parameters",
        _build_formatter("parameters", presentation.format_count),
        _build_getter("parameters"),
        is_number=True,
    ),
    RunTableColumn("Asked for", _format_requested_strategy),
    RunTableColumn("Device", _build_getter("place"), filter_name="Device", is_short=False),
    RunTableColumn("Sweep", _build_getter("sweep"), filter_name="Sweep"),
    RunTableColumn("Repeat", _build_getter("repeat"), _build_getter("repeat"), is_number=True),
    RunTableColumn(
        "Started",
        _build_formatter("started_at", lambda time: str(time)[:16].replace("T", " ")),
        _build_getter("started_at"),
    ),
)
ALWAYS_SHOWN_COLUMNS = (
    "Model",
    "Strategy",
    "Precision",
    "Ranks",
    "Status",
    "TFLOP/s per rank",
    "Step median (p95)",
    "Evidence",
)
"""Columns that are shown even if they are empty."""
SPEED_COLUMNS = ("TFLOP/s per rank", "MFU")
"""Columns that depend on which FLOPs are counted."""
SUMMARIZED_COLUMNS = ("Device", "Sweep", "Repeat")
"""Columns that are left out if they are the same in every run: the summary says it once."""


def list_plain_rows(frame: pd.DataFrame, *dropped_columns: str) -> list[dict[str, Any]]:
    """Rows as dictionaries, with None for what is missing."""
    rows = frame.drop(columns=list(dropped_columns)).astype(object).to_dict("records")
    return [{str(key): None if pd.isna(value) else value for key, value in row.items()} for row in rows]


def select_columns(rows: Sequence[RowValues]) -> list[RunTableColumn]:
    """The columns that say something about these runs: those of `ALWAYS_SHOWN_COLUMNS`, and the others that have a
    value. Speeds are named after the FLOPs that they count where these are not the model's own."""
    columns = [
        column for column in RUN_TABLE_COLUMNS if column.title in ALWAYS_SHOWN_COLUMNS or _has_information(column, rows)
    ]
    if {row["device"] for row in rows} <= {"cuda", "rocm"}:
        columns = [
            replace(column, title="GPUs", filter_name="GPUs") if column.title == "Ranks" else column
            for column in columns
        ]
    convention = next((row["flop_convention"] for row in rows), "model")
    if convention == "model":
        return columns
    return [
        replace(column, title=f"{column.title} ({convention})") if column.title in SPEED_COLUMNS else column
        for column in columns
    ]


def _has_information(column: RunTableColumn, rows: Sequence[RowValues]) -> bool:
    texts = {column.get_text(row) for row in rows} - {None, ""}
    return len(texts) > (column.title in SUMMARIZED_COLUMNS)


def build_run_row(
    row: RowValues, record: Record, columns: Sequence[RunTableColumn], row_file: str, strategy_position: int
) -> RunTableRow:
    """One line of the table.

    Parameters
    ----------
    strategy_position: int
        Place of the run's strategy from replicated to sharded, which that column is sorted by.
    """
    spoken_name = f"{row['variant']}, {row['precision']}, run {row['run_id']}"
    cells = [_build_cell(column, row, strategy_position) for column in columns]
    return RunTableRow(str(row["link"]), str(row["run_id"]), spoken_name, cells, _build_brief_details(record, row_file))


def _build_cell(column: RunTableColumn, row: RowValues, strategy_position: int) -> RunTableCell:
    text = column.get_text(row)
    sort_value = column.get_sort_value(row) if column.get_sort_value else None
    if column.is_ranked:
        sort_value = strategy_position
    if isinstance(sort_value, float):
        sort_value = repr(float(sort_value))
    css_classes = ["number" if column.is_number else "short" if column.is_short else "long"]
    if column.title == "Status":
        css_classes.append(f"status-{_get_status(row)}")
    shown_text = presentation.MISSING if text is None or text == "" else str(text)
    return RunTableCell(
        shown_text,
        "" if sort_value is None or str(sort_value) == shown_text else str(sort_value),
        " ".join(css_classes),
    )


def _build_brief_details(record: Record, row_file: str) -> list[tuple[str, str]]:
    """Where the row lies, why it failed, what it ran on and how to run it again."""
    environment = record.get("environment") or {}
    drivers = {str(device["driver"]) for device in (environment.get("devices") or {}).values() if device.get("driver")}
    versions = {
        "Python": environment.get("python"),
        "torch": record.get("torch_version"),
        "CUDA": environment.get("cuda"),
        "NCCL": environment.get("nccl"),
        "driver": ", ".join(sorted(drivers)),
    }
    details = {
        "Cause": record.get("error"),
        "Row": row_file,
        "Hosts": record.get("hosts"),
        "Software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": record.get("git_sha"),
        RERUN_LABEL: build_rerun_command(record),
    }
    return [(name, str(value)) for name, value in details.items() if value]
