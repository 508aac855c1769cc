"""What two machines differ in, and what became of the configurations that both ran."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from bench.records.matching import identity
from bench.reporting import labels
from bench.reporting.cells import by
from bench.reporting.machines import Machine
from bench.reporting.table import VERSIONS

THE_MACHINES_OWN = ("hardware.name", "hardware.cpu_threads", "gpus_per_node")
"""What of a question is not what was asked, but what it was asked of."""

SOFTWARE = tuple(f"{name}=" for name in VERSIONS)
"""What a variant's name says of its software, where rows would otherwise share one: machines differ in it."""

SAME_BYTES = 1e-9
"""Relative difference up to which two peaks of memory are the same."""


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


def pairs(found: Sequence[Machine]) -> list[Pair]:
    """Every two of the machines."""
    return [_pair(first, second) for first, second in itertools.combinations(found, 2)]


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
