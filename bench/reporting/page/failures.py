"""What failed and why: runs that ended for one reason, together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.reporting.drawing import labels
from bench.reporting.tables.cells import sort_rows

NUMBER_PATTERN = re.compile(r"0x[0-9a-f]+|\d[\d.,]*")
"""What differs between two messages of one cause: addresses, sizes, ranks, ports."""

STATUS_LABELS = {
    "oom": "ran out of memory",
    "error": "failed",
    "timeout": "took longer than allowed",
    "preempted": "taken off its machine",
    "skipped": "not started",
}
PREDICTED_OOM_LABEL = "predicted not to fit"


@dataclass(frozen=True)
class FailureGroup:
    """Runs that did not end well, for one reason."""

    status: str
    outcome: str
    """What became of them, in words."""
    reason: str
    configurations: str
    """Strategies, models and ranks, in words."""
    place: str
    runs: tuple[tuple[str, str], ...]
    """Their ids, and the page's anchors of them."""

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.runs)


def group_failures(table: pd.DataFrame) -> list[FailureGroup]:
    """The causes, out of memory first, then by the number of runs.

    Runs that ran out of memory are together if they did so in one phase and under one limit; others if their messages
    differ in nothing but numbers.
    """
    failed_rows = sort_rows(table[table["status"] != "ok"])
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, row in enumerate(failed_rows.to_dict("records")):
        groups.setdefault(_build_group_key(row), []).append(position)
    failure_groups = [_build_failure_group(failed_rows.iloc[positions]) for positions in groups.values()]
    status_order = list(STATUS_LABELS)
    return sorted(
        failure_groups, key=lambda failure_group: (status_order.index(failure_group.status), -failure_group.count)
    )


def _build_group_key(row: dict[Any, Any]) -> tuple[Any, ...]:
    if row["status"] == "oom":
        return "oom", row["evidence"], row["place"], _format_or_empty(row["oom_phase"]), row["limit"]
    return row["status"], row["evidence"], row["place"], NUMBER_PATTERN.sub("#", _format_or_empty(row["error"]))


def _format_or_empty(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _build_failure_group(rows: pd.DataFrame) -> FailureGroup:
    first_row = rows.iloc[0]
    status, is_predicted = str(first_row["status"]), first_row["evidence"] == "predicted"
    outcome = PREDICTED_OOM_LABEL if status == "oom" and is_predicted else STATUS_LABELS[status]
    if first_row["evidence"] in ("rehearsed", "published"):
        outcome += f" ({first_row['evidence']})"
    return FailureGroup(
        status=status,
        outcome=outcome,
        reason=_describe_oom(rows) if status == "oom" else _describe_error(rows),
        configurations=_describe_configurations(rows),
        place=str(first_row["place"]),
        runs=tuple(zip(rows["run_id"].astype(str), rows["link"], strict=True)),
    )


def _describe_oom(rows: pd.DataFrame) -> str:
    first_row = rows.iloc[0]
    phase = f"in {first_row['oom_phase']}" if pd.notna(first_row["oom_phase"]) else "in a phase not recorded"
    limit = first_row["limit"].replace("limit ", "limit of ") or "no limit set: the device's own memory"
    requested_bytes = rows["oom_bytes"].dropna()
    requested_text = (
        ""
        if requested_bytes.empty
        else f"; asked for {_format_range(labels.format_memory(float(size)) for size in sorted(requested_bytes))} more"
    )
    return f"{phase}, {limit}{requested_text}"


def _format_range(texts: Iterable[str]) -> str:
    """The first and the last of some texts, or the one they all are."""
    distinct_texts = list(dict.fromkeys(texts))
    return distinct_texts[0] if len(distinct_texts) == 1 else f"{distinct_texts[0]} to {distinct_texts[-1]}"


def _describe_error(rows: pd.DataFrame) -> str:
    messages = list(dict.fromkeys(_format_or_empty(error) for error in rows["error"]))
    others_note = (
        f" (and {labels.format_plural(len(messages) - 1, 'message')} that differ only in numbers)"
        if messages[1:]
        else ""
    )
    return (messages[0] or "no cause recorded") + others_note


def _describe_configurations(rows: pd.DataFrame) -> str:
    """Strategies with how many runs each, and of which models on how many ranks."""
    variants = rows["variant"].value_counts(sort=False)
    variant_texts = [str(name) if count == 1 else f"{name} × {count}" for name, count in variants.items()]
    models = labels.format_list(list(dict.fromkeys(rows["model"].astype(str))), 4)
    world_sizes = sorted({int(size) for size in rows["world_size"].dropna()})
    device = rows["device"].iloc[0]
    ranks_text = (
        f", {labels.format_list([str(size) for size in world_sizes], 6)} {labels.get_rank_nouns(device)}"
        if world_sizes
        else ""
    )
    return f"{labels.format_list(variant_texts, 6)}; {models}{ranks_text}"
