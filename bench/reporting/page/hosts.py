"""The machines (and their software) that runs took place on.

What nothing ran for has no machine: predicted and published rows are left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from bench.core import presentation
from bench.records import Record
from bench.records.matching import encode_config_key
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import VERSION_COLUMNS

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
                        presentation.format_memory(device[name])
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
    return {name: presentation.format_list(values, 8) for name, values in values_by_name.items()}


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
        name: [host_system.properties.get(name, presentation.MISSING) for host_system in host_systems] for name in names
    }
    return [(name, property_values, len(set(property_values)) > 1) for name, property_values in values.items()]


# --- What two machines differ in, and what became of the configurations that both ran.

HOST_FIELDS = ("hardware.name", "hardware.cpu_threads", "gpus_per_node")
"""What of a question is not what was asked, but what it was asked of."""

SOFTWARE_PREFIXES = tuple(f"{name}=" for name in VERSION_COLUMNS)
"""What a variant's name says of its software, where rows would otherwise share one: machines differ in it."""

MAX_SAME_PEAK_DIFFERENCE = 1e-9
"""Relative difference up to which two peaks of memory are the same."""


@dataclass(frozen=True)
class MatchedConfiguration:
    """One configuration that two machines ran."""

    name: str
    step_times_s: tuple[float, float]
    """Medians of the repeats' median steps, NaN where none is known or all are degraded."""
    peaks_bytes: tuple[float, float]
    run_anchors: tuple[tuple[str, ...], tuple[str, ...]]
    """Anchors of the repeats on the page."""
    notes: tuple[str, ...]

    @property
    def step_ratio(self) -> float:
        """The second machine's step against the first's."""
        return self.step_times_s[1] / self.step_times_s[0]

    @property
    def peak_ratio(self) -> float:
        """The second machine's peak of memory against the first's."""
        return self.peaks_bytes[1] / self.peaks_bytes[0] if self.peaks_bytes[0] else float("nan")


@dataclass(frozen=True)
class HostSystemPair:
    """Two machines, the second against the first."""

    first: HostSystem
    second: HostSystem
    matched: list[MatchedConfiguration]
    unmatched_counts: tuple[int, int]
    """Configurations that only one of them ran."""
    sentences: list[str] = field(default_factory=list)
    """What follows from the matched runs, and what does not."""

    @property
    def differing_properties(self) -> list[str]:
        """Names of the facts the two differ in."""
        names = dict.fromkeys((*self.first.properties, *self.second.properties))
        return [name for name in names if self.first.properties.get(name) != self.second.properties.get(name)]


def pair_host_systems(host_systems: Sequence[HostSystem]) -> list[HostSystemPair]:
    """Every two of the machines."""
    return [_compare_host_systems(first, second) for first, second in itertools.combinations(host_systems, 2)]


def _compare_host_systems(first: HostSystem, second: HostSystem) -> HostSystemPair:
    rows_by_question = [_group_by_question(host_system.rows) for host_system in (first, second)]
    shared_keys = [key for key in rows_by_question[0] if key in rows_by_question[1]]
    matched = [
        _match_configuration(rows_by_question[0][key], rows_by_question[1][key], (first.letter, second.letter))
        for key in shared_keys
    ]
    unmatched_counts = (len(rows_by_question[0]) - len(shared_keys), len(rows_by_question[1]) - len(shared_keys))
    pair = HostSystemPair(first, second, matched, unmatched_counts)
    pair.sentences.extend(_describe_pair(pair))
    return pair


def _group_by_question(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The repeats of each configuration, by what was asked."""
    rows_with_question = rows[rows["time_question"].notna()]
    keys = [
        f"{evidence} {encode_config_key(question, *HOST_FIELDS)}"
        for evidence, question in zip(rows_with_question["evidence"], rows_with_question["time_question"], strict=True)
    ]
    return {str(key): group for (key,), group in iterate_groups(rows_with_question.assign(_asked=keys), "_asked")}


def _match_configuration(first: pd.DataFrame, second: pd.DataFrame, letters: tuple[str, str]) -> MatchedConfiguration:
    first_row = first.iloc[0]
    notes = []
    outcomes = [_describe_outcome(rows) for rows in (first, second)]
    if outcomes[0] != outcomes[1]:
        notes.append(", ".join(f"{letter} {outcome}" for letter, outcome in zip(letters, outcomes, strict=True)))
    elif outcomes[0] != "ok":
        notes.append(f"both {outcomes[0]}")
    has_degraded = [bool((rows["degraded"].fillna(False) & (rows["status"] == "ok")).any()) for rows in (first, second)]
    if any(has_degraded):
        degraded_letters = [letter for letter, is_degraded in zip(letters, has_degraded, strict=True) if is_degraded]
        notes.append(f"degraded runs of {' and '.join(degraded_letters)} are not in the time")
    variant_parts = str(first_row["variant"]).split(" · ")
    variant = " · ".join(part for part in variant_parts if not part.startswith(SOFTWARE_PREFIXES))
    name = f"{variant} · {first_row['precision']} · {first_row['heading']}"
    return MatchedConfiguration(
        name=name if first_row["evidence"] == "measured" else f"{name} · {first_row['evidence']}",
        step_times_s=(_compute_step_time_s(first), _compute_step_time_s(second)),
        peaks_bytes=(_compute_peak_bytes(first), _compute_peak_bytes(second)),
        run_anchors=(tuple(first["link"]), tuple(second["link"])),
        notes=tuple(notes),
    )


def _describe_outcome(rows: pd.DataFrame) -> str:
    fitted_count = int((rows["status"] == "ok").sum())
    if fitted_count == len(rows):
        return "ok"
    return (
        "out of memory" if fitted_count == 0 else f"out of memory in {len(rows) - fitted_count} of {len(rows)} repeats"
    )


def _compute_step_time_s(rows: pd.DataFrame) -> float:
    representative_rows = rows[(rows["status"] == "ok") & ~rows["degraded"].fillna(False)]
    return _compute_median(representative_rows["step_time_median_s"])


def _compute_peak_bytes(rows: pd.DataFrame) -> float:
    return _compute_median(rows.loc[rows["status"] == "ok", "peak_allocated_bytes"])


def _compute_median(values: pd.Series) -> float:
    known_values = values.dropna().astype(float)
    return float(known_values.median()) if len(known_values) else float("nan")


def format_change(ratio: float) -> str:
    """A ratio as a change in percent: ``+3.1 %``, ``−20 %``; beyond a doubling as a factor."""
    if np.isnan(ratio):
        return presentation.MISSING
    if ratio > 2 or ratio < 0.5:
        return f"× {presentation.format_number(ratio, 2)}"
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0 %"
    return f"{percent:+.1f} %".replace("-", "−")


def _explain_no_match(first_system: HostSystem, second_system: HostSystem) -> str:
    """Why two machines have no configuration in common, where it is plain."""
    devices, evidence_kinds = (
        [set(host_system.rows[name]) for host_system in (first_system, second_system)]
        for name in ("device", "evidence")
    )
    if devices[0].isdisjoint(devices[1]):
        return " One is a CPU, the other a GPU: no run of one is a run of the other."
    if evidence_kinds[0].isdisjoint(evidence_kinds[1]):
        (first_kind,), (second_kind,) = evidence_kinds
        return (
            f" All rows of {first_system.letter} are {first_kind}, all of {second_system.letter} {second_kind}: that "
            "is no difference of machines."
        )
    return ""


def _describe_pair(pair: HostSystemPair) -> list[str]:
    first_system, second_system = pair.first, pair.second
    if not pair.matched:
        return [
            "No configuration ran in the same way on both, so nothing can be "
            f"compared.{_explain_no_match(first_system, second_system)}"
        ]
    step_ratios = np.array([configuration.step_ratio for configuration in pair.matched])
    peak_ratios = np.array([configuration.peak_ratio for configuration in pair.matched])
    sentences = [
        f"{presentation.format_plural(len(pair.matched), 'configuration')} ran on both; "
        f"{pair.unmatched_counts[0]} only on {first_system.letter}, "
        f"{pair.unmatched_counts[1]} only on {second_system.letter}: those are not compared."
    ]
    step_ratios, peak_ratios = step_ratios[~np.isnan(step_ratios)], peak_ratios[~np.isnan(peak_ratios)]
    if len(step_ratios):
        sentences.append(
            f"Step time of {second_system.letter} against {first_system.letter}: "
            f"{format_change(float(np.median(step_ratios)))} in the middle of "
            f"{presentation.format_plural(len(step_ratios), 'configuration')}, from "
            f"{format_change(float(step_ratios.min()))} to "
            f"{format_change(float(step_ratios.max()))}."
        )
    if len(peak_ratios):
        same_count = int((np.abs(peak_ratios - 1) <= MAX_SAME_PEAK_DIFFERENCE).sum())
        different_peaks = peak_ratios[np.abs(peak_ratios - 1) > MAX_SAME_PEAK_DIFFERENCE]
        range_note = (
            f", the others from {format_change(float(different_peaks.min()))} to "
            f"{format_change(float(different_peaks.max()))}"
            if len(different_peaks)
            else ""
        )
        sentences.append(
            f"Peak of allocated memory: the same to the byte in {same_count} of {len(peak_ratios)}{range_note}."
        )
    oom_on_one_count = sum(
        any("out of memory" in note and not note.startswith("both") for note in configuration.notes)
        for configuration in pair.matched
    )
    if oom_on_one_count:
        sentences.append(
            f"{presentation.format_plural(oom_on_one_count, 'configuration')} ran out of memory on one of them only."
        )
    repeat_counts = sorted(len(anchors) for configuration in pair.matched for anchors in configuration.run_anchors)
    if repeat_counts[0] == 1:
        sentences.append(
            "Where a configuration ran once on each, a change of time shows little: the next run may differ from this "
            "one as much. python -m bench.compare weighs repeated runs against each other."
        )
    differing_names = [name for name in pair.differing_properties if name != "Hosts"]
    if len(differing_names) > 1:
        sentences.append(
            f"The two differ in {presentation.format_list(differing_names, 12)}: which of these a change comes from, "
            "these runs do not say."
        )
    if (first_system.rows["device"] == "cpu").all():
        sentences.append(f"{presentation.CPU_NOTE}: what other work a processor had to do is in these times.")
    return sentences
