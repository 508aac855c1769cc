"""What a report begins with: sentences with a number, each with the runs that it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bench.reporting.tables.cells import compute_median, group_rows, list_known_values
from bench.reporting.tables.table import CELL_COLUMNS, COMPLETED_STATUSES

MAX_FINDINGS_PER_TOPIC = 4
"""Sentences on one question; how many more there would be is said."""


@dataclass(frozen=True)
class Finding:
    """One sentence."""

    text: str
    """With its numbers and their units."""
    run_links: tuple[str, ...]
    """Anchors on the page of the runs that the numbers come from (column ``link`` of the table)."""


@dataclass(frozen=True)
class FindingTopic:
    """What was found on one question."""

    title: str
    findings: tuple[Finding, ...]
    more_note: str = ""
    """What was left out, in words; empty if nothing was."""


def build_topic(title: str, findings: Sequence[Finding]) -> FindingTopic | None:
    """The first `MAX_FINDINGS_PER_TOPIC` of some findings, which stand in order of importance; None of none."""
    if not findings:
        return None
    left_out = len(findings) - MAX_FINDINGS_PER_TOPIC
    more_note = f"{left_out} more of the kind: the figures and tables below have them." if left_out > 0 else ""
    return FindingTopic(title, tuple(findings[:MAX_FINDINGS_PER_TOPIC]), more_note)


@dataclass(frozen=True)
class Configuration:
    """The repeats of one configuration."""

    row: Mapping[str, Any]
    """The first of them, which has in common with the others what tells configurations apart."""
    run_links: tuple[str, ...]
    tflops: tuple[float, ...]
    """Speeds per rank of the repeats whose time represents it, ascending."""
    peak_bytes: float
    """Median peak of allocated memory over repeats that fit; NaN where none did or it is unknown."""
    exposed_share: float
    """Median share of a step in exposed communication; NaN where it is unknown."""
    is_fitting: bool
    """Whether any repeat ran to its end."""
    is_out_of_memory: bool
    """Whether any repeat ran out of memory."""

    @property
    def variant(self) -> str:
        return str(self.row["variant"])

    @property
    def speed(self) -> float:
        """Median TFLOP/s per rank; NaN where there is none."""
        return compute_median(self.tflops)


ROW_COLUMNS = (
    *("heading", "device", "status", "degraded", "link", "fit", "memory_limit_bytes"),
    *("batch_size_per_gpu", "sequence_length", "nodes"),
    *("counted_tflops", "peak_allocated_bytes", "exposed_communication", "step_time_median_s"),
    *("step_time_ci_low_s", "step_time_ci_high_s", "variant_key", "activation_checkpointing"),
)

GROUP_COLUMNS = [column for column in CELL_COLUMNS if column != "variant"]
"""Columns that configurations share which differ in nothing but the strategy."""


def list_configurations(table: pd.DataFrame) -> list[Configuration]:
    """The configurations of a table (of `prepare_table`) that ran to an end or ran out of memory."""
    completed_rows = table[table["status"].isin(COMPLETED_STATUSES)]
    return [_build_configuration(rows) for rows in group_rows(completed_rows, CELL_COLUMNS, ROW_COLUMNS)]


def _build_configuration(rows: list[dict[str, Any]]) -> Configuration:
    fitting_rows = [row for row in rows if row["status"] == "ok"]
    timed_rows = [row for row in fitting_rows if row["degraded"] is None or not row["degraded"]]
    return Configuration(
        row=(fitting_rows or rows)[0],
        run_links=tuple(row["link"] for row in rows),
        tflops=tuple(sorted(float(value) for value in list_known_values(timed_rows, "counted_tflops"))),
        peak_bytes=compute_median(list_known_values(fitting_rows, "peak_allocated_bytes")),
        exposed_share=compute_median(list_known_values(timed_rows, "exposed_communication")),
        is_fitting=bool(fitting_rows),
        is_out_of_memory=len(fitting_rows) < len(rows),
    )


def group_configurations(
    configurations: Iterable[Configuration], columns: Sequence[str]
) -> dict[tuple[Any, ...], list[Configuration]]:
    """Configurations with the same values in some columns, in the order of the first of each group."""
    groups: dict[tuple[Any, ...], list[Configuration]] = {}
    for configuration in configurations:
        key = tuple(None if pd.isna(value) else value for value in (configuration.row[name] for name in columns))
        groups.setdefault(key, []).append(configuration)
    return groups


def list_links(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """The anchors of all runs of some configurations."""
    return tuple(link for configuration in configurations for link in configuration.run_links)


def join_words(names: Sequence[str], max_names: int = 4) -> str:
    """Names as a sentence lists them: ``DDP, FSDP2 hybrid and 3 more``."""
    shown_names = list(names) if len(names) <= max_names else [*names[: max_names - 1]]
    if len(shown_names) < len(names):
        shown_names.append(f"{len(names) - len(shown_names)} more")
    return " and ".join(filter(None, [", ".join(shown_names[:-1]), shown_names[-1]]))


def describe_source(place: str, evidence: str) -> str:
    """Of what a sentence speaks: ``measured, CPU · AMD EPYC``."""
    return f"{evidence}, {place}"


def is_known(value: float) -> bool:
    return bool(np.isfinite(value))
