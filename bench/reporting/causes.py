"""What failed and why: runs that ended for one reason, together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.reporting import labels
from bench.reporting.cells import in_order

NUMBERS = re.compile(r"0x[0-9a-f]+|\d[\d.,]*")
"""What differs between two messages of one cause: addresses, sizes, ranks, ports."""

MEANINGS = {
    "oom": "ran out of memory",
    "error": "failed",
    "timeout": "took longer than allowed",
    "preempted": "taken off its machine",
    "skipped": "not started",
}
PREDICTED_OOM = "predicted not to fit"


@dataclass(frozen=True)
class Cause:
    """Runs that did not end well, for one reason."""

    status: str
    happened: str
    """What became of them, in words."""
    why: str
    which: str
    """Strategies, models and ranks, in words."""
    place: str
    runs: tuple[tuple[str, str], ...]
    """Their ids, and the page's anchors of them."""

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.runs)


def causes(table: pd.DataFrame) -> list[Cause]:
    """The causes, out of memory first, then by the number of runs.

    Runs that ran out of memory are together if they did so in one phase and under one limit; others if their messages
    differ in nothing but numbers.
    """
    ended = in_order(table[table["status"] != "ok"])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, row in enumerate(ended.to_dict("records")):
        groups.setdefault(_key(row), []).append(position)
    found = [_cause(ended.iloc[positions]) for positions in groups.values()]
    order = list(MEANINGS)
    return sorted(found, key=lambda cause: (order.index(cause.status), -cause.count))


def _key(row: dict[Any, Any]) -> tuple[Any, ...]:
    if row["status"] == "oom":
        return "oom", row["evidence"], row["place"], _known(row["oom_phase"]), row["limit"]
    return row["status"], row["evidence"], row["place"], NUMBERS.sub("#", _known(row["error"]))


def _known(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _cause(rows: pd.DataFrame) -> Cause:
    first = rows.iloc[0]
    status, predicted = str(first["status"]), first["evidence"] == "predicted"
    happened = PREDICTED_OOM if status == "oom" and predicted else MEANINGS[status]
    if first["evidence"] in ("rehearsed", "published"):
        happened += f" ({first['evidence']})"
    return Cause(
        status=status,
        happened=happened,
        why=_why_oom(rows) if status == "oom" else _why(rows),
        which=_which(rows),
        place=str(first["place"]),
        runs=tuple(zip(rows["run_id"].astype(str), rows["link"], strict=True)),
    )


def _why_oom(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    phase = f"in {first['oom_phase']}" if pd.notna(first["oom_phase"]) else "in a phase not recorded"
    limit = first["limit"].replace("limit ", "limit of ") or "no limit set: the device's own memory"
    asked = rows["oom_bytes"].dropna()
    sizes = "" if asked.empty else f"; asked for {_range(labels.memory(float(size)) for size in sorted(asked))} more"
    return f"{phase}, {limit}{sizes}"


def _range(texts: Iterable[str]) -> str:
    """The first and the last of some texts, or the one they all are."""
    several = list(dict.fromkeys(texts))
    return several[0] if len(several) == 1 else f"{several[0]} to {several[-1]}"


def _why(rows: pd.DataFrame) -> str:
    messages = list(dict.fromkeys(_known(error) for error in rows["error"]))
    others = (
        f" (and {labels.counted(len(messages) - 1, 'message')} that differ only in numbers)" if messages[1:] else ""
    )
    return (messages[0] or "no cause recorded") + others


def _which(rows: pd.DataFrame) -> str:
    """Strategies with how many runs each, and of which models on how many ranks."""
    variants = rows["variant"].value_counts(sort=False)
    names = [str(name) if count == 1 else f"{name} × {count}" for name, count in variants.items()]
    models = labels.listing(list(dict.fromkeys(rows["model"].astype(str))), 4)
    sizes = sorted({int(size) for size in rows["world_size"].dropna()})
    device = rows["device"].iloc[0]
    ranks = f", {labels.listing([str(size) for size in sizes], 6)} {labels.rank_nouns(device)}" if sizes else ""
    return f"{labels.listing(names, 6)}; {models}{ranks}"
