"""The machines (and their software) that runs took place on.

What nothing ran for has no machine: predicted and published rows are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.records import Record
from bench.reporting import labels
from bench.reporting.cells import in_order

RAN = ("measured", "rehearsed")
MOST_MACHINES = 6
"""Machines that are compared: those with the most runs."""


@dataclass(frozen=True)
class Machine:
    """Runs of one device, host (or cluster) and software."""

    letter: str
    title: str
    rows: pd.DataFrame
    facts: dict[str, str]
    """What is known of it: name to value; several values of its runs stand behind each other."""
    topologies: tuple[str, ...] = ()


def machines(table: pd.DataFrame, records: Sequence[Record]) -> tuple[list[Machine], int]:
    """The machines with the most runs, and how many others there are.

    Two runs are of one machine if their device, versions and commit are the same, and their host; on a cluster, where
    the scheduler chooses among nodes, the name of its hosts without their numbers.
    """
    ran = in_order(table[table["evidence"].isin(RAN) & table["status"].isin(["ok", "oom"])])
    keys = pd.Series([_key(records[position]) for position in ran.index], index=ran.index, dtype=object)
    groups = [rows for _, rows in ran.groupby(keys, sort=False)]
    groups.sort(key=lambda rows: (-len(rows), str(rows["started_at"].min()), rows["run_id"].min()))
    chosen = sorted(groups[:MOST_MACHINES], key=lambda rows: (str(rows["started_at"].min()), rows["run_id"].min()))
    found = []
    for letter, rows in zip(string.ascii_uppercase, chosen, strict=False):
        several = [records[position] for position in rows.index]
        facts = _facts(several)
        topologies = tuple(dict.fromkeys(text for record in several if (text := _environment(record).get("topology"))))
        found.append(Machine(letter, _title(facts), rows, facts, topologies))
    return found, len(groups) - len(found)


def _environment(record: Record) -> Mapping[str, Any]:
    return record.get("environment") or {}


def _key(record: Record) -> str:
    environment = _environment(record)
    drivers = sorted({str(device.get("driver")) for device in _devices(record)})
    software = [environment.get(name) for name in ("python", "packages", "cuda", "nccl")]
    hosts = _hosts(record)
    if record.get("launcher") == "slurm":
        hosts = [re.sub(r"\d+$", "", host) for host in hosts]
    own = [record.get(name) for name in ("device", "gpu_name", "torch_version", "git_sha", "git_clean")]
    return json.dumps([own, sorted(set(hosts)), drivers, software], sort_keys=True, default=str)


def _hosts(record: Record) -> list[str]:
    return [host.strip() for host in str(record.get("hosts") or "").split(",") if host.strip()]


def _devices(record: Record) -> list[Mapping[str, Any]]:
    devices = _environment(record).get("devices") or {}
    return [device for device in devices.values() if isinstance(device, Mapping)]


def _facts(records: Sequence[Record]) -> dict[str, str]:
    """What is known of the machine of some runs, in the order a reader asks for it."""
    found: dict[str, list[str]] = {}

    def add(name: str, value: Any) -> None:
        if value is not None and value not in ("", {}):
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            if text not in found.setdefault(name, []):
                found[name].append(text)

    for record in records:
        environment, clean = _environment(record), record.get("git_clean")
        add("Device", record.get("gpu_name"))
        for device in _devices(record):
            for name, unit in (
                ("memory_bytes", ""),
                ("power_limit_w", "W"),
                ("sm_clock_max_mhz", "MHz"),
                ("threads", ""),
            ):
                if device.get(name) is not None:
                    value = (
                        labels.memory(device[name]) if name == "memory_bytes" else f"{device[name]:g} {unit}".strip()
                    )
                    add(DEVICE_FACTS[name], value)
            add("Driver", device.get("driver"))
        for host in _hosts(record):
            add("Hosts", host)
        add("Processor cores", environment.get("processor_cores"))
        add("Ranks per machine, at most", (record.get("config") or {}).get("gpus_per_node"))
        add("Topology", _fingerprint(environment.get("topology")))
        add("Kernel", environment.get("kernel"))
        add("CUDA", environment.get("cuda"))
        add("NCCL", environment.get("nccl"))
        add("Python", environment.get("python"))
        add("torch", record.get("torch_version"))
        for name, version in (environment.get("packages") or {}).items():
            if name != "torch":
                add(name, version)
        for name, value in (environment.get("variables") or {}).items():
            add(name, str(value))
        commit = str(record.get("git_sha") or "")[:10]
        add("Commit", commit + (" with uncommitted changes" if commit and clean is False else ""))
    return {name: labels.listing(values, 8) for name, values in found.items()}


DEVICE_FACTS = {
    "memory_bytes": "Device memory",
    "power_limit_w": "Power limit",
    "sm_clock_max_mhz": "Highest clock",
    "threads": "Threads per rank",
}


def _fingerprint(text: str | None) -> str | None:
    """A long text as something two columns of a table can be compared by."""
    return f"matrix {hashlib.sha256(text.encode()).hexdigest()[:8]}" if text else None


def _title(facts: Mapping[str, str]) -> str:
    torch = f"torch {facts['torch']}" if "torch" in facts else ""
    commit = f"commit {facts['Commit']}" if "Commit" in facts else ""
    parts = [facts.get("Hosts", "host not recorded"), facts.get("Device", "device not recorded"), torch, commit]
    return " · ".join(part for part in parts if part)


def side_by_side(found: Sequence[Machine]) -> list[tuple[str, list[str], bool]]:
    """Every fact with its value for each machine, and whether they differ."""
    names = dict.fromkeys(name for machine in found for name in machine.facts)
    values = {name: [machine.facts.get(name, labels.MISSING) for machine in found] for name in names}
    return [(name, several, len(set(several)) > 1) for name, several in values.items()]
