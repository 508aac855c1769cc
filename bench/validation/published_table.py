"""Tables of published rows from files that nobody here has seen: read, or refused in one sentence."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.core.errors import UsageError, shorten_text
from bench.records.published import PublishedLine

REQUIRED_COLUMNS = (
    *("model", "strategy", "precision", "gpu", "gpu_count", "sequence_length", "batch_size_per_gpu"),
    *("activation_checkpointing", "metric", "value", "unit"),
)
"""Columns without which no row says what was run and measured. Cells may be empty."""

OPTIONAL_COLUMNS = (
    *("source_key", "source_url", "figure_or_table", "parameters", "sharding", "uncertainty", "provenance", "note"),
    "torch_version",
)


def read_published_table(path: Path) -> list[PublishedLine]:
    """The rows of a CSV file in the columns of ``results/published/published.csv``; other columns are left out.

    Raises
    ------
    UsageError
        If there is no such file, it is no CSV in UTF-8, lacks a column or has no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            columns = {str(name).strip().lower(): name for name in header}
            _check_columns(path, list(columns))
            lines: list[PublishedLine] = [
                {name: _clean(row.get(columns[name])) if name in columns else "" for name in _ALL_COLUMNS}
                for row in reader
            ]
    except OSError as error:
        raise UsageError(f"--published={path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"--published={path} is not valid: choose a CSV file in UTF-8 ({shorten_text(str(error))})."
        ) from None
    lines = [line for line in lines if any(line.values())]
    if not lines:
        raise UsageError(f"--published={path} is not valid: choose a file with at least one row below its header.")
    return lines


_ALL_COLUMNS = (*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS)


def _check_columns(path: Path, columns: list[str]) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if len(missing) == len(REQUIRED_COLUMNS):
        raise UsageError(
            f"--published={path} is not valid: choose a CSV file whose first line has the columns "
            f"{', '.join(REQUIRED_COLUMNS)}."
        )
    if missing:
        raise UsageError(
            f"--published={path} is not valid: choose a file that also has the column{'s' * (len(missing) > 1)} "
            f"{', '.join(missing)}."
        )


def _clean(cell: object) -> str:
    return cell.strip() if isinstance(cell, str) else ""
