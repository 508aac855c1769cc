"""From rows to marks: one entry per configuration, with the median over its repeats and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.reporting.drawing.style import EVIDENCE_STYLES
from bench.reporting.tables.table import CELL_COLUMNS

NUMBER_COLUMNS = ["parameters", "batch_size_per_gpu", "sequence_length", "memory_limit_bytes"]
SORT_COLUMNS = [
    "place",
    "precision",
    "memory_limit_bytes",
    "settings",
    "parameters",
    "model",
    "world_size",
    *NUMBER_COLUMNS[1:3],
]
"""Figures list runs in this order (no limit first), then by variant and by kind of evidence."""


def sort_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or cells) in the order figures list them: sizes ascending, variants from replicated to sharded."""
    evidence_positions = {kind: position for position, kind in enumerate(EVIDENCE_STYLES)}
    sort_frame = frame.assign(
        _variant=[variant.order for variant in frame["variant_key"]],
        _evidence=frame["evidence"].map(evidence_positions),
    )
    repeat_columns = [name for name in ("repeat",) if name in frame]
    return frame.loc[
        sort_frame.sort_values(
            [*SORT_COLUMNS, "_variant", "_evidence", *repeat_columns], kind="stable", na_position="first"
        ).index
    ]


def build_cells(table: pd.DataFrame, value_column: str, *extra_columns: str) -> pd.DataFrame:
    """One row per configuration that ran to an end: fitted (``ok``) or ran out of memory (``oom``).

    Returns
    -------
    DataFrame
        The columns of `CELL_COLUMNS`, ``heading``, ``device``, ``variant_key``, and: ``median``, ``low``, ``high`` and
        ``points`` of column `value_column` over the repeats that have it (NaN and empty if none has); the median of
        each column in `extra_columns`, under its name; ``fitted`` and ``out_of_memory``, numbers of repeats;
        ``oom_phase`` and ``oom_bytes`` of the first that ran out; ``degraded``, whether any was not representative.
    """
    completed_rows = table[table["status"].isin(["ok", "oom"])]
    needed_columns = [
        *NUMBER_COLUMNS,
        "heading",
        "device",
        "variant_key",
        "status",
        "oom_phase",
        "oom_bytes",
        "degraded",
    ]
    cell_rows = [
        _build_cell(rows, value_column, extra_columns)
        for rows in group_rows(completed_rows, CELL_COLUMNS, [*needed_columns, value_column, *extra_columns])
    ]
    if not cell_rows:
        return pd.DataFrame(columns=[*CELL_COLUMNS, "heading", "median", "out_of_memory"])
    return sort_rows(pd.DataFrame(cell_rows)).reset_index(drop=True)


def group_rows(frame: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Some columns of the rows of every group, as dictionaries, in the order of the groups' first rows.

    Missing values (pandas' NA) are None, and equal as keys. Slicing a frame of a hundred columns for each of thousands
    of groups would take a hundred times as long.
    """
    names = list(dict.fromkeys((*keys, *columns)))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for values in zip(*(frame[name].astype(object) for name in names), strict=True):
        key = tuple(None if pd.isna(value) else value for value in values[: len(keys)])
        row = {name: None if value is pd.NA else value for name, value in zip(names, values, strict=True)}
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def list_known_values(rows: Iterable[Mapping[Any, Any]], column: str) -> list[Any]:
    """The values of a column that are there."""
    return [row[column] for row in rows if not pd.isna(row[column])]


def list_first_known_values(rows: Iterable[Mapping[Any, Any]], *columns: str) -> list[Any]:
    """Of every row the first of some columns that is there, where one is."""
    return [values[0] for row in rows if (values := [row[column] for column in columns if not pd.isna(row[column])])]


def _build_cell(rows: list[dict[str, Any]], value_column: str, extra_columns: tuple[str, ...]) -> dict[str, Any]:
    first_row = rows[0]
    fitted_rows, oom_rows = ([row for row in rows if row["status"] == status] for status in ("ok", "oom"))
    points = sorted(float(point) for point in list_known_values(fitted_rows, value_column))
    first_oom_row = oom_rows[0] if oom_rows else None
    return {
        **{
            name: first_row[name]
            for name in dict.fromkeys((*CELL_COLUMNS, *NUMBER_COLUMNS, "heading", "device", "variant_key"))
        },
        "median": compute_median(points),
        "low": points[0] if points else float("nan"),
        "high": points[-1] if points else float("nan"),
        "points": points,
        **{name: compute_median(list_known_values(fitted_rows, name)) for name in extra_columns},
        "fitted": len(fitted_rows),
        "out_of_memory": len(oom_rows),
        "oom_phase": None if first_oom_row is None else first_oom_row["oom_phase"],
        "oom_bytes": None
        if first_oom_row is None or pd.isna(first_oom_row["oom_bytes"])
        else int(first_oom_row["oom_bytes"]),
        "degraded": any(list_known_values(fitted_rows, "degraded")),
    }


def compute_median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return float(np.median(np.asarray(values, dtype=float))) if len(values) else float("nan")


def select_drawable_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with something to draw: a value, or the fact that memory ran out."""
    return cells[cells["median"].notna() | (cells["out_of_memory"] > 0)]


def iterate_groups(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Groups in the order their first rows have."""
    yield from frame.groupby(list(columns), dropna=False, sort=False)
