"""The table of all runs: its columns, what they are sorted and filtered by, and what a row says without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.records import Record
from bench.reporting import labels
from bench.reporting.again import command

Row = Mapping[str, Any]
"""A row of the table with None for what is missing."""

TOKENS = "tokens_per_second_per_gpu"


@dataclass(frozen=True)
class Column:
    """One column: what it shows, and what it is sorted by where that is not the text."""

    title: str
    text: Callable[[Row], Any]
    """What a cell says; None for a value the run does not have."""
    value: Callable[[Row], Any] | None = None
    """The number (or word) that stands behind it."""
    number: bool = False
    choose: str = ""
    """What the choice is called by which readers filter this column; empty for none."""
    short: bool = True
    """Whether a cell stays on one line."""
    ranked: bool = False
    """Whether it is sorted by a rank that the page gives: strategies from replicated to sharded."""


@dataclass(frozen=True)
class Cell:
    """One cell, ready to be printed."""

    text: str
    value: str
    """What it is sorted by; empty for its text or, where there is nothing, for last."""
    kind: str
    """Classes."""


@dataclass(frozen=True)
class Run:
    """One line of the table."""

    link: str
    run_id: str
    name: str
    """What to call the run, for those who hear the table."""
    cells: list[Cell]
    brief: list[tuple[str, str]]
    """The most important details, for a page without scripts."""


def _asked(row: Row) -> str:
    asked = str(row["strategy"] or labels.MISSING)
    factor = row["sharding_factor"] is not None and asked in ("fsdp", "fsdp1")
    return f"{asked}, F={row['sharding_factor']}" if factor else asked


def _status(row: Row) -> str:
    return "degraded" if row["degraded"] and row["status"] == "ok" else str(row["status"])


def _outcome(row: Row) -> str:
    if row["first_nonfinite_loss_step"] is not None:
        return f"{_status(row)}: loss not finite from step {row['first_nonfinite_loss_step']}"
    return f"{_status(row)}: {row['fit']}" if row["fit"] else _status(row)


def _step(row: Row) -> str | None:
    if row["step_time_median_s"] is None:
        return None
    p95 = "" if row["step_time_p95_s"] is None else f" ({labels.seconds(row['step_time_p95_s'])})"
    return labels.seconds(row["step_time_median_s"]) + p95


def _settings(row: Row) -> str | None:
    return " · ".join(text for text in (row["limit"], row["settings"]) if text) or None


def _plain(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _shown(name: str, words: Callable[[Any], str]) -> Callable[[Row], Any]:
    return lambda row: None if row[name] is None else words(row[name])


def _memory(name: str) -> Callable[[Row], Any]:
    return _shown(name, labels.memory)


def _share(value: float) -> str:
    return f"{labels.number(100 * value)} %"


COLUMNS = (
    Column("Model", _plain("model"), _plain("model"), choose="Model", short=False),
    Column("Strategy", _plain("variant"), choose="Strategy", ranked=True, short=False),
    Column("Precision", _plain("precision"), choose="Precision"),
    Column("Ranks", _plain("world_size"), _plain("world_size"), number=True),
    Column("Status", _outcome, _status, choose="Status"),
    Column("TFLOP/s per rank", _shown("tflops_per_gpu", labels.number), _plain("tflops_per_gpu"), number=True),
    Column("Step median (p95)", _step, _plain("step_time_median_s"), number=True),
    Column("Peak allocated", _memory("peak_allocated_bytes"), _plain("peak_allocated_bytes"), number=True),
    Column("Peak reserved", _memory("peak_reserved_bytes"), _plain("peak_reserved_bytes"), number=True),
    Column("Driver", _memory("peak_device_used_bytes"), _plain("peak_device_used_bytes"), number=True),
    Column("MFU", _shown("mfu", _share), _plain("mfu"), number=True),
    Column("Tokens/s per rank", _shown(TOKENS, labels.number), _plain(TOKENS), number=True),
    Column("Batch × sequence", _shown("workload", str), _plain("batch_size_per_gpu")),
    Column("Limit, settings", _settings),
    Column("Evidence", _plain("evidence"), choose="Evidence"),
    Column("Parameters", _shown("parameters", labels.count), _plain("parameters"), number=True),
    Column("Asked for", _asked),
    Column("Device", _plain("place"), choose="Device", short=False),
    Column("Sweep", _plain("sweep"), choose="Sweep"),
    Column("Repeat", _plain("repeat"), _plain("repeat"), number=True),
    Column("Started", _shown("started_at", lambda time: str(time)[:16].replace("T", " ")), _plain("started_at")),
)
ALWAYS = ("Model", "Strategy", "Precision", "Ranks", "Status", "TFLOP/s per rank", "Step median (p95)", "Evidence")
"""Columns that are shown even if they are empty."""
ELSEWHERE = ("Device", "Sweep", "Repeat")
"""Columns that are left out if they are the same in every run: the summary says it once."""


def plain(frame: pd.DataFrame, *left_out: str) -> list[dict[str, Any]]:
    """Rows as dictionaries, with None for what is missing."""
    rows = frame.drop(columns=list(left_out)).astype(object).to_dict("records")
    return [{str(key): None if pd.isna(value) else value for key, value in row.items()} for row in rows]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that say something about these runs: those of `ALWAYS`, and the others that have a value."""
    return [column for column in COLUMNS if column.title in ALWAYS or _says_something(column, rows)]


def _says_something(column: Column, rows: Sequence[Row]) -> bool:
    found = {column.text(row) for row in rows} - {None, ""}
    return len(found) > (column.title in ELSEWHERE)


def run(row: Row, record: Record, shown: Sequence[Column], file: str, order: int) -> Run:
    """One line of the table.

    Parameters
    ----------
    order: int
        Place of the run's strategy from replicated to sharded, which that column is sorted by.
    """
    name = f"{row['variant']}, {row['precision']}, run {row['run_id']}"
    cells = [_cell(column, row, order) for column in shown]
    return Run(str(row["link"]), str(row["run_id"]), name, cells, _brief(record, file))


def _cell(column: Column, row: Row, order: int) -> Cell:
    text = column.text(row)
    value = column.value(row) if column.value else None
    if column.ranked:
        value = order
    if isinstance(value, float):
        value = repr(float(value))
    kinds = ["number" if column.number else "short" if column.short else "long"]
    if column.title == "Status":
        kinds.append(f"status-{_status(row)}")
    said = labels.MISSING if text is None or text == "" else str(text)
    return Cell(said, "" if value is None or str(value) == said else str(value), " ".join(kinds))


def _brief(record: Record, file: str) -> list[tuple[str, str]]:
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
    facts = {
        "Cause": record.get("error"),
        "Row": file,
        "Hosts": record.get("hosts"),
        "Software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "Commit": record.get("git_sha"),
        "Run it again": command(record),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
