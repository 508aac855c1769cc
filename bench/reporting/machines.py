"""The machines (and their software) that runs took place on, and what two of them differ in.

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

from bench.records import Record
from bench.records.matching import identity
from bench.reporting import labels
from bench.reporting.cells import by, in_order

RAN = ("measured", "rehearsed")
MOST_MACHINES = 6
"""Machines that are compared: those with the most runs."""

THE_MACHINES_OWN = ("hardware.name", "hardware.cpu_threads", "gpus_per_node")
"""What of a question is not what was asked, but what it was asked of."""

SOFTWARE = ("torch_version=", "git_sha=")
"""What a variant's name says of its software, where rows would otherwise share one: machines differ in it."""

SAME_BYTES = 1e-9
"""Relative difference up to which two peaks of memory are the same."""


@dataclass(frozen=True)
class Machine:
    """Runs of one device, host (or cluster) and software."""

    letter: str
    title: str
    rows: pd.DataFrame
    facts: dict[str, str]
    """What is known of it: name to value; several values of its runs stand behind each other."""
    topologies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matched:
    """One configuration that two machines ran."""

    name: str
    steps_s: tuple[float, float]
    """Medians of the repeats' median steps, NaN where none is known or all are degraded."""
    peaks_bytes: tuple[float, float]
    runs: tuple[tuple[str, ...], tuple[str, ...]]
    """Anchors of the repeats on the page."""
    notes: tuple[str, ...]

    @property
    def step_ratio(self) -> float:
        """The second machine's step against the first's."""
        return self.steps_s[1] / self.steps_s[0]

    @property
    def peak_ratio(self) -> float:
        """The second machine's peak of memory against the first's."""
        return self.peaks_bytes[1] / self.peaks_bytes[0] if self.peaks_bytes[0] else float("nan")


@dataclass(frozen=True)
class Pair:
    """Two machines, the second against the first."""

    first: Machine
    second: Machine
    matched: list[Matched]
    only: tuple[int, int]
    """Configurations that only one of them ran."""
    sentences: list[str] = field(default_factory=list)
    """What follows from the matched runs, and what does not."""

    @property
    def differing(self) -> list[str]:
        """Names of the facts the two differ in."""
        names = dict.fromkeys((*self.first.facts, *self.second.facts))
        return [name for name in names if self.first.facts.get(name) != self.second.facts.get(name)]


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


def pairs(found: Sequence[Machine]) -> list[Pair]:
    """Every two of the machines."""
    return [_pair(first, second) for first, second in itertools.combinations(found, 2)]


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


def _pair(first: Machine, second: Machine) -> Pair:
    groups = [_questions(machine.rows) for machine in (first, second)]
    shared = [key for key in groups[0] if key in groups[1]]
    matched = [_matched(groups[0][key], groups[1][key], (first.letter, second.letter)) for key in shared]
    only = (len(groups[0]) - len(shared), len(groups[1]) - len(shared))
    pair = Pair(first, second, matched, only)
    pair.sentences.extend(_sentences(pair))
    return pair


def _questions(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The repeats of each configuration, by what was asked."""
    asked = rows[rows["time_question"].notna()]
    keys = [
        f"{evidence} {identity(question, *THE_MACHINES_OWN)}"
        for evidence, question in zip(asked["evidence"], asked["time_question"], strict=True)
    ]
    return {str(key): group for (key,), group in by(asked.assign(_asked=keys), "_asked")}


def _matched(first: pd.DataFrame, second: pd.DataFrame, letters: tuple[str, str]) -> Matched:
    row = first.iloc[0]
    notes = []
    outcomes = [_outcome(rows) for rows in (first, second)]
    if outcomes[0] != outcomes[1]:
        notes.append(", ".join(f"{letter} {outcome}" for letter, outcome in zip(letters, outcomes, strict=True)))
    elif outcomes[0] != "ok":
        notes.append(f"both {outcomes[0]}")
    degraded = [bool((rows["degraded"].fillna(False) & (rows["status"] == "ok")).any()) for rows in (first, second)]
    if any(degraded):
        which = [letter for letter, one in zip(letters, degraded, strict=True) if one]
        notes.append(f"degraded runs of {' and '.join(which)} are not in the time")
    parts = str(row["variant"]).split(" · ")
    variant = " · ".join(part for part in parts if not part.startswith(SOFTWARE))
    name = f"{variant} · {row['precision']} · {row['heading']}"
    return Matched(
        name=name if row["evidence"] == "measured" else f"{name} · {row['evidence']}",
        steps_s=(_step(first), _step(second)),
        peaks_bytes=(_peak(first), _peak(second)),
        runs=(tuple(first["link"]), tuple(second["link"])),
        notes=tuple(notes),
    )


def _outcome(rows: pd.DataFrame) -> str:
    fitted = int((rows["status"] == "ok").sum())
    if fitted == len(rows):
        return "ok"
    return "out of memory" if fitted == 0 else f"out of memory in {len(rows) - fitted} of {len(rows)} repeats"


def _step(rows: pd.DataFrame) -> float:
    representative = rows[(rows["status"] == "ok") & ~rows["degraded"].fillna(False)]
    return _middle(representative["step_time_median_s"])


def _peak(rows: pd.DataFrame) -> float:
    return _middle(rows.loc[rows["status"] == "ok", "peak_allocated_bytes"])


def _middle(values: pd.Series) -> float:
    known = values.dropna().astype(float)
    return float(known.median()) if len(known) else float("nan")


def change(ratio: float) -> str:
    """A ratio as a change in percent: ``+3.1 %``, ``−20 %``; beyond a doubling as a factor."""
    if np.isnan(ratio):
        return labels.MISSING
    if ratio > 2 or ratio < 0.5:
        return f"× {labels.number(ratio, 2)}"
    percent = 100 * (ratio - 1)
    if abs(percent) < 0.05:
        return "0 %"
    return f"{percent:+.1f} %".replace("-", "−")


def _why_nothing(a: Machine, b: Machine) -> str:
    """Why two machines have no configuration in common, where it is plain."""
    devices, kinds = ([set(machine.rows[name]) for machine in (a, b)] for name in ("device", "evidence"))
    if devices[0].isdisjoint(devices[1]):
        return " One is a CPU, the other a GPU: no run of one is a run of the other."
    if kinds[0].isdisjoint(kinds[1]):
        (first,), (second,) = kinds
        return f" All rows of {a.letter} are {first}, all of {b.letter} {second}: that is no difference of machines."
    return ""


def _sentences(pair: Pair) -> list[str]:
    a, b = pair.first, pair.second
    if not pair.matched:
        return [f"No configuration ran in the same way on both, so nothing can be compared.{_why_nothing(a, b)}"]
    times = np.array([one.step_ratio for one in pair.matched])
    peaks = np.array([one.peak_ratio for one in pair.matched])
    sentences = [
        f"{labels.counted(len(pair.matched), 'configuration')} ran on both; {pair.only[0]} only on {a.letter}, "
        f"{pair.only[1]} only on {b.letter}: those are not compared."
    ]
    times, peaks = times[~np.isnan(times)], peaks[~np.isnan(peaks)]
    if len(times):
        sentences.append(
            f"Step time of {b.letter} against {a.letter}: {change(float(np.median(times)))} in the middle of "
            f"{labels.counted(len(times), 'configuration')}, from {change(float(times.min()))} to "
            f"{change(float(times.max()))}."
        )
    if len(peaks):
        same = int((np.abs(peaks - 1) <= SAME_BYTES).sum())
        others = peaks[np.abs(peaks - 1) > SAME_BYTES]
        span = (
            f", the others from {change(float(others.min()))} to {change(float(others.max()))}" if len(others) else ""
        )
        sentences.append(f"Peak of allocated memory: the same to the byte in {same} of {len(peaks)}{span}.")
    fates = sum(
        any("out of memory" in note and not note.startswith("both") for note in one.notes) for one in pair.matched
    )
    if fates:
        sentences.append(f"{labels.counted(fates, 'configuration')} ran out of memory on one of them only.")
    repeats = sorted(len(runs) for one in pair.matched for runs in one.runs)
    if repeats[0] == 1:
        sentences.append(
            "Where a configuration ran once on each, a change of time shows little: the next run may differ from this "
            "one as much. python -m bench.compare weighs repeated runs against each other."
        )
    several = [name for name in pair.differing if name != "Hosts"]
    if len(several) > 1:
        sentences.append(
            f"The two differ in {labels.listing(several, 12)}: which of these a change comes from, these runs do not "
            "say."
        )
    if (a.rows["device"] == "cpu").all():
        sentences.append(f"{labels.CPU_NOTE}: what other work a processor had to do is in these times.")
    return sentences


def side_by_side(found: Sequence[Machine]) -> list[tuple[str, list[str], bool]]:
    """Every fact with its value for each machine, and whether they differ."""
    names = dict.fromkeys(name for machine in found for name in machine.facts)
    values = {name: [machine.facts.get(name, labels.MISSING) for machine in found] for name in names}
    return [(name, several, len(set(several)) > 1) for name, several in values.items()]
