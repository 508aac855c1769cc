"""Nodes that a cluster's health checks found wanting: what runs that are submitted again leave out."""

from __future__ import annotations

from collections.abc import Iterable

from bench.records import Record


def bad_nodes(attempts: Iterable[Record]) -> list[str]:
    """Hosts whose last health check failed: a node that was repaired passes the next one that it gets.

    Parameters
    ----------
    attempts: iterable of dict
        Every attempt of every run of a store.
    """
    failed: dict[str, bool] = {}
    for row in sorted(attempts, key=lambda row: str(row.get("finished_at") or "")):
        now = set(str(row.get("failed_nodes") or "").split(",")) - {""}
        checked = {str(rank["health"]["node"]) for rank in row.get("ranks") or [] if rank.get("health")}
        failed |= {host: host in now for host in checked | now}
    return sorted(host for host, bad in failed.items() if bad)


def excluding(exclude: str | None, nodes: Iterable[str]) -> str | None:
    """SLURM's list of nodes to leave out, with some more."""
    return ",".join([*([exclude] if exclude else []), *nodes]) or None
