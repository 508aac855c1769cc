"""From rows to marks: one entry per configuration, with the median over its repeats and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.reporting.style import EVIDENCE_STYLES
from bench.reporting.table import CELL

NUMBERS = ["parameters", "batch_size_per_gpu", "sequence_length", "memory_limit_bytes"]
ORDER = ["place", "precision", "memory_limit_bytes", "settings", "parameters", "model", "world_size", *NUMBERS[1:3]]
"""Figures list runs in this order (no limit first), then by variant and by kind of evidence."""


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or cells) in the order figures list them: sizes ascending, variants from replicated to sharded."""
    evidence = {kind: position for position, kind in enumerate(EVIDENCE_STYLES)}
    keys = frame.assign(_variant=[key.order for key in frame["variant_key"]], _evidence=frame["evidence"].map(evidence))
    repeats = [name for name in ("repeat",) if name in frame]
    return frame.loc[
        keys.sort_values([*ORDER, "_variant", "_evidence", *repeats], kind="stable", na_position="first").index
    ]


def cells(table: pd.DataFrame, value: str, *also: str) -> pd.DataFrame:
    """One row per configuration that ran to an end: fitted (``ok``) or ran out of memory (``oom``).

    Returns
    -------
    DataFrame
        The columns of `CELL`, ``heading``, ``device``, ``variant_key``, and: ``median``, ``low``, ``high`` and
        ``points`` of column `value` over the repeats that have it (NaN and empty if none has); the median of each
        column in `also`, under its name; ``fitted`` and ``out_of_memory``, numbers of repeats; ``oom_phase`` and
        ``oom_bytes`` of the first that ran out; ``degraded``, whether any was not representative.
    """
    done = table[table["status"].isin(["ok", "oom"])]
    needed = [*NUMBERS, "heading", "device", "variant_key", "status", "oom_phase", "oom_bytes", "degraded"]
    found = [_cell(rows, value, also) for rows in grouped(done, CELL, [*needed, value, *also])]
    if not found:
        return pd.DataFrame(columns=[*CELL, "heading", "median", "out_of_memory"])
    return in_order(pd.DataFrame(found)).reset_index(drop=True)


def grouped(frame: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> list[list[dict[str, Any]]]:
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


def known(rows: Iterable[Mapping[Any, Any]], name: str) -> list[Any]:
    """The values of a column that are there."""
    return [row[name] for row in rows if not pd.isna(row[name])]


def first_known(rows: Iterable[Mapping[Any, Any]], *names: str) -> list[Any]:
    """Of every row the first of some columns that is there, where one is."""
    return [values[0] for row in rows if (values := [row[name] for name in names if not pd.isna(row[name])])]


def _cell(rows: list[dict[str, Any]], value: str, also: tuple[str, ...]) -> dict[str, Any]:
    first = rows[0]
    fitted, out_of_memory = ([row for row in rows if row["status"] == status] for status in ("ok", "oom"))
    points = sorted(float(point) for point in known(fitted, value))
    oom = out_of_memory[0] if out_of_memory else None
    return {
        **{name: first[name] for name in dict.fromkeys((*CELL, *NUMBERS, "heading", "device", "variant_key"))},
        "median": median(points),
        "low": points[0] if points else float("nan"),
        "high": points[-1] if points else float("nan"),
        "points": points,
        **{name: median(known(fitted, name)) for name in also},
        "fitted": len(fitted),
        "out_of_memory": len(out_of_memory),
        "oom_phase": None if oom is None else oom["oom_phase"],
        "oom_bytes": None if oom is None or pd.isna(oom["oom_bytes"]) else int(oom["oom_bytes"]),
        "degraded": any(known(fitted, "degraded")),
    }


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return float(np.median(np.asarray(values, dtype=float))) if len(values) else float("nan")


def drawable(found: pd.DataFrame) -> pd.DataFrame:
    """The cells with something to draw: a value, or the fact that memory ran out."""
    return found[found["median"].notna() | (found["out_of_memory"] > 0)]


def by(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Groups in the order their first rows have."""
    yield from frame.groupby(list(columns), dropna=False, sort=False)
