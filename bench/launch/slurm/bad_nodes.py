"""Nodes that a cluster's health checks found wanting: what runs that are submitted again leave out."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import Record


def find_bad_nodes(attempt_rows: Iterable[Record]) -> list[str]:
    """Hosts whose last health check failed: a node that was repaired passes the next one that it gets.

    Parameters
    ----------
    attempt_rows: iterable of dict
        Every attempt of every run of a store.
    """
    is_bad_by_host: dict[str, bool] = {}
    for row in sorted(attempt_rows, key=lambda row: str(row.get("finished_at") or "")):
        failed_hosts = set(str(row.get("failed_nodes") or "").split(",")) - {""}
        checked_hosts = {
            str(rank_row["health"]["node"]) for rank_row in row.get("ranks") or [] if rank_row.get("health")
        }
        is_bad_by_host |= {host: host in failed_hosts for host in checked_hosts | failed_hosts}
    return sorted(host for host, is_bad in is_bad_by_host.items() if is_bad)


def format_exclude_list(exclude: str | None, nodes: Iterable[str]) -> str | None:
    """SLURM's list of nodes to leave out, with some more."""
    return ",".join([*([exclude] if exclude else []), *nodes]) or None
