"""Which nodes are slow, as ``bench.jobs nodes`` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.comparison.hosts import (
    MIN_HOSTS,
    MIN_SAMPLES,
    MIN_SLOWDOWN,
    SIGNIFICANCE_LEVEL,
    HostComparison,
    compare_matmul_times,
    compare_step_times,
)
from bench.core.errors import UsageError
from bench.records import Record, read_all_attempts

TOO_FEW_SAMPLES = f"too few samples: {MIN_SAMPLES} of the node and of the others are needed, and {MIN_HOSTS} nodes"


def load_nodes_table(store: Path) -> RenderableType:
    """`build_nodes_table` of every attempt of every run in a store.

    Raises
    ------
    UsageError
        If there is no store.
    """
    if not store.is_dir():
        raise UsageError(f"store={store} is not valid: choose a folder that a sweep wrote to.")
    return build_nodes_table(read_all_attempts(store).records)


def build_nodes_table(rows: Sequence[Record]) -> RenderableType:
    """Every host by its step times and by its health checks, and the ones that failed those."""
    parts: list[RenderableType] = [
        _build_host_table(
            "Step times, against runs of the same configuration on other nodes", compare_step_times(rows)
        ),
        _build_host_table("Matrix products of the health checks, against other nodes", compare_matmul_times(rows)),
    ]
    failure_counts: dict[str, int] = {}
    for row in rows:
        for host in str(row.get("failed_nodes") or "").split(","):
            if host:
                failure_counts[host] = failure_counts.get(host, 0) + 1
    if failure_counts:
        failures_text = ", ".join(f"{host} ({count} times)" for host, count in sorted(failure_counts.items()))
        parts.append(Text(f"Failed the health check before a run: {failures_text}"))
    parts.append(
        Text(
            f"slow: by {MIN_SLOWDOWN:.0%} or more, with p of at most {SIGNIFICANCE_LEVEL:g} (Mann-Whitney, Holm's "
            "correction)"
        )
    )
    return Group(*parts)


def _build_host_table(title: str, host_times: Sequence[HostComparison]) -> RenderableType:
    if not host_times:
        return Text(f"{title}: no rows to compare.")
    table = Table("node", "samples", "others", "slower by", "p", "", box=None, pad_edge=False, title=title)
    table.title_justify = "left"
    for times in sorted(host_times, key=lambda times: -(times.slowdown or 0.0)):
        if times.slowdown is None or times.p_value is None:
            cells = ("", "", TOO_FEW_SAMPLES)
        else:
            cells = (f"{times.slowdown:+.1%}", f"{times.p_value:.2g}", "slow" if times.is_slow else "")
        table.add_row(Text(times.host), str(times.num_samples), str(times.num_other_samples), *cells)
    return table
