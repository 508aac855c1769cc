"""Which nodes are slow, as ``bench.jobs nodes`` shows it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.comparison.nodes import (
    LEAST_HOSTS,
    LEAST_SAMPLES,
    LEVEL,
    SLOW_FROM,
    HostTimes,
    compare_products,
    compare_step_times,
)
from bench.records import Record

TOO_FEW = f"too few samples: {LEAST_SAMPLES} of the node and of the others are needed, and {LEAST_HOSTS} nodes"


def nodes_table(rows: Sequence[Record]) -> RenderableType:
    """Every host by its step times and by its health checks, and the ones that failed those."""
    parts: list[RenderableType] = [
        _table("Step times, against runs of the same configuration on other nodes", compare_step_times(rows)),
        _table("Matrix products of the health checks, against other nodes", compare_products(rows)),
    ]
    failed: dict[str, int] = {}
    for row in rows:
        for host in str(row.get("failed_nodes") or "").split(","):
            if host:
                failed[host] = failed.get(host, 0) + 1
    if failed:
        words = ", ".join(f"{host} ({times} times)" for host, times in sorted(failed.items()))
        parts.append(Text(f"Failed the health check before a run: {words}"))
    parts.append(
        Text(f"slow: by {SLOW_FROM:.0%} or more, with p of at most {LEVEL:g} (Mann-Whitney, Holm's correction)")
    )
    return Group(*parts)


def _table(title: str, found: Sequence[HostTimes]) -> RenderableType:
    if not found:
        return Text(f"{title}: no rows to compare.")
    table = Table("node", "samples", "others", "slower by", "p", "", box=None, pad_edge=False, title=title)
    table.title_justify = "left"
    for times in sorted(found, key=lambda times: -(times.slower or 0.0)):
        if times.slower is None or times.p_value is None:
            cells = ("", "", TOO_FEW)
        else:
            cells = (f"{times.slower:+.1%}", f"{times.p_value:.2g}", "slow" if times.slow else "")
        table.add_row(Text(times.host), str(times.samples), str(times.others), *cells)
    return table
