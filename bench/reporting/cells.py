"""From rows to marks: one entry per configuration, with the median over its repeats and what became of each."""

from __future__ import annotations

from collections.abc import Iterator
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
    found = [_cell(group, value, also) for _, group in done.groupby(CELL, dropna=False, sort=False)]
    if not found:
        return pd.DataFrame(columns=[*CELL, "heading", "median", "out_of_memory"])
    return in_order(pd.DataFrame(found)).reset_index(drop=True)


def _cell(group: pd.DataFrame, value: str, also: tuple[str, ...]) -> dict[str, Any]:
    first = group.iloc[0]
    fitted, out_of_memory = group[group["status"] == "ok"], group[group["status"] == "oom"]
    points = sorted(float(point) for point in fitted[value].dropna())
    oom = out_of_memory.iloc[0] if len(out_of_memory) else None
    return {
        **{name: first[name] for name in dict.fromkeys((*CELL, *NUMBERS, "heading", "device", "variant_key"))},
        "median": float(np.median(points)) if points else float("nan"),
        "low": points[0] if points else float("nan"),
        "high": points[-1] if points else float("nan"),
        "points": points,
        **{name: float(fitted[name].dropna().astype(float).median()) for name in also},
        "fitted": len(fitted),
        "out_of_memory": len(out_of_memory),
        "oom_phase": None if oom is None else oom["oom_phase"],
        "oom_bytes": None if oom is None or pd.isna(oom["oom_bytes"]) else int(oom["oom_bytes"]),
        "degraded": bool(fitted["degraded"].fillna(False).any()),
    }


def drawable(found: pd.DataFrame) -> pd.DataFrame:
    """The cells with something to draw: a value, or the fact that memory ran out."""
    return found[found["median"].notna() | (found["out_of_memory"] > 0)]


def by(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Groups in the order their first rows have."""
    yield from frame.groupby(list(columns), dropna=False, sort=False)
