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
from bench.reporting.drawing import labels
from bench.reporting.tables.cells import sort_rows

RAN_EVIDENCE = ("measured", "rehearsed")
MAX_HOST_SYSTEMS = 6
"""Machines that are compared: those with the most runs."""


@dataclass(frozen=True)
class HostSystem:
    """Runs of one device, host (or cluster) and software."""

    letter: str
    title: str
    rows: pd.DataFrame
    properties: dict[str, str]
    """What is known of it: name to value; several values of its runs stand behind each other."""
    topologies: tuple[str, ...] = ()


def find_host_systems(table: pd.DataFrame, records: Sequence[Record]) -> tuple[list[HostSystem], int]:
    """The machines with the most runs, and how many others there are.

    Two runs are of one machine if their device, versions and commit are the same, and their host; on a cluster, where
    the scheduler chooses among nodes, the name of its hosts without their numbers.
    """
    rows_that_ran = sort_rows(table[table["evidence"].isin(RAN_EVIDENCE) & table["status"].isin(["ok", "oom"])])
    system_keys = pd.Series(
        [_build_system_key(records[position]) for position in rows_that_ran.index],
        index=rows_that_ran.index,
        dtype=object,
    )
    groups = [rows for _, rows in rows_that_ran.groupby(system_keys, sort=False)]
    groups.sort(key=lambda rows: (-len(rows), str(rows["started_at"].min()), rows["run_id"].min()))
    chosen_groups = sorted(
        groups[:MAX_HOST_SYSTEMS], key=lambda rows: (str(rows["started_at"].min()), rows["run_id"].min())
    )
    host_systems = []
    for letter, rows in zip(string.ascii_uppercase, chosen_groups, strict=False):
        system_records = [records[position] for position in rows.index]
        properties = _collect_properties(system_records)
        topologies = tuple(
            dict.fromkeys(text for record in system_records if (text := _get_environment(record).get("topology")))
        )
        host_systems.append(HostSystem(letter, _format_title(properties), rows, properties, topologies))
    return host_systems, len(groups) - len(host_systems)


def _get_environment(record: Record) -> Mapping[str, Any]:
    return record.get("environment") or {}


def _build_system_key(record: Record) -> str:
    environment = _get_environment(record)
    drivers = sorted({str(device.get("driver")) for device in _list_devices(record)})
    software = [environment.get(name) for name in ("python", "packages", "cuda", "nccl")]
    hosts = _list_hosts(record)
    if record.get("launcher") == "slurm":
        hosts = [re.sub(r"\d+$", "", host) for host in hosts]
    record_values = [record.get(name) for name in ("device", "gpu_name", "torch_version", "git_sha", "git_clean")]
    return json.dumps([record_values, sorted(set(hosts)), drivers, software], sort_keys=True, default=str)


def _list_hosts(record: Record) -> list[str]:
    return [host.strip() for host in str(record.get("hosts") or "").split(",") if host.strip()]


def _list_devices(record: Record) -> list[Mapping[str, Any]]:
    devices = _get_environment(record).get("devices") or {}
    return [device for device in devices.values() if isinstance(device, Mapping)]


def _collect_properties(records: Sequence[Record]) -> dict[str, str]:
    """What is known of the machine of some runs, in the order a reader asks for it."""
    values_by_name: dict[str, list[str]] = {}

    def add_value(name: str, value: Any) -> None:
        if value is not None and value not in ("", {}):
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            if text not in values_by_name.setdefault(name, []):
                values_by_name[name].append(text)

    for record in records:
        environment, is_clean = _get_environment(record), record.get("git_clean")
        add_value("Device", record.get("gpu_name"))
        for device in _list_devices(record):
            for name, unit in (
                ("memory_bytes", ""),
                ("power_limit_w", "W"),
                ("sm_clock_max_mhz", "MHz"),
                ("threads", ""),
            ):
                if device.get(name) is not None:
                    value = (
                        labels.format_memory(device[name])
                        if name == "memory_bytes"
                        else f"{device[name]:g} {unit}".strip()
                    )
                    add_value(DEVICE_PROPERTY_LABELS[name], value)
            add_value("Driver", device.get("driver"))
        for host in _list_hosts(record):
            add_value("Hosts", host)
        add_value("Processor cores", environment.get("processor_cores"))
        add_value("Ranks per machine, at most", (record.get("config") or {}).get("gpus_per_node"))
        add_value("Topology", _hash_text(environment.get("topology")))
        add_value("Kernel", environment.get("kernel"))
        add_value("CUDA", environment.get("cuda"))
        add_value("NCCL", environment.get("nccl"))
        add_value("Python", environment.get("python"))
        add_value("torch", record.get("torch_version"))
        for name, version in (environment.get("packages") or {}).items():
            if name != "torch":
                add_value(name, version)
        for name, value in (environment.get("variables") or {}).items():
            add_value(name, str(value))
        commit = str(record.get("git_sha") or "")[:10]
        add_value("Commit", commit + (" with uncommitted changes" if commit and is_clean is False else ""))
    return {name: labels.format_list(values, 8) for name, values in values_by_name.items()}


DEVICE_PROPERTY_LABELS = {
    "memory_bytes": "Device memory",
    "power_limit_w": "Power limit",
    "sm_clock_max_mhz": "Highest clock",
    "threads": "Threads per rank",
}


def _hash_text(text: str | None) -> str | None:
    """A long text as something two columns of a table can be compared by."""
    return f"matrix {hashlib.sha256(text.encode()).hexdigest()[:8]}" if text else None


def _format_title(properties: Mapping[str, str]) -> str:
    torch = f"torch {properties['torch']}" if "torch" in properties else ""
    commit = f"commit {properties['Commit']}" if "Commit" in properties else ""
    parts = [
        properties.get("Hosts", "host not recorded"),
        properties.get("Device", "device not recorded"),
        torch,
        commit,
    ]
    return " · ".join(part for part in parts if part)


def build_comparison_rows(host_systems: Sequence[HostSystem]) -> list[tuple[str, list[str], bool]]:
    """Every fact with its value for each machine, and whether they differ."""
    names = dict.fromkeys(name for host_system in host_systems for name in host_system.properties)
    values = {
        name: [host_system.properties.get(name, labels.MISSING) for host_system in host_systems] for name in names
    }
    return [(name, property_values, len(set(property_values)) > 1) for name, property_values in values.items()]
