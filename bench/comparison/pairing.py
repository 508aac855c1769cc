"""Which rows of base and candidate are runs of the same configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.records import Record
from bench.records.matching import ConfigKey, build_run_key, encode_config_key

PUBLISHED = "published"


@dataclass(frozen=True)
class ConfigurationRuns:
    """The runs of one configuration; those of a side that does not have it are none."""

    question: ConfigKey
    evidence: str
    base: tuple[Record, ...]
    candidate: tuple[Record, ...]

    @property
    def representative_row(self) -> Record:
        """A row that names the configuration: one that knows most, as a run that failed early knows little."""
        return max((*self.candidate, *self.base), key=lambda row: sum(value is not None for value in row.values()))


def pair_runs(base: Iterable[Record], candidate: Iterable[Record]) -> list[ConfigurationRuns]:
    """Every configuration of either side, in the order it is first met.

    Rows match that have the same kind of evidence and ask the same (`matching.build_run_key`). Where a side has such
    rows of several devices, they match device by device if the other side has any of them: rows of an A100 and an H100
    are not repeats of one another.
    """
    sides = [_group_by_question(rows) for rows in (base, candidate)]
    pairs = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        rows = [side.get(key, []) for side in sides]
        question = build_run_key((rows[0] or rows[1])[0])
        assert question is not None
        for base_rows, candidate_rows in _match_devices(*rows):
            pairs.append(ConfigurationRuns(question, key[0], tuple(base_rows), tuple(candidate_rows)))
    return pairs


def select_matchable_rows(records: Iterable[Record]) -> list[Record]:
    """The rows that have a configuration to match by, each once though two folders may hold it, in order of time."""
    rows_by_attempt = {
        (row["run_id"], row.get("attempt"), row.get("started_at")): row
        for row in records
        if row["evidence"] != PUBLISHED and build_run_key(row) is not None
    }
    return sorted(rows_by_attempt.values(), key=lambda row: (row.get("started_at") or "", row.get("repeat") or 0))


def _group_by_question(rows: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Rows by kind of evidence and what they ask, in order of time."""
    rows_by_question: dict[tuple[str, str], list[Record]] = {}
    for row in select_matchable_rows(rows):
        rows_by_question.setdefault((row["evidence"], encode_config_key(build_run_key(row) or {})), []).append(row)
    return rows_by_question


def _match_devices(base: list[Record], candidate: list[Record]) -> list[tuple[list[Record], list[Record]]]:
    """The rows of both sides, device by device where they share some and there is more than one."""
    rows_by_device = [group_by_device(rows) for rows in (base, candidate)]
    shared_devices = [device for device in rows_by_device[0] if device in rows_by_device[1]]
    if not shared_devices or len(rows_by_device[0]) == len(rows_by_device[1]) == 1:
        return [(base, candidate)]
    no_rows: list[Record] = []
    base_only = [(rows, no_rows) for device, rows in rows_by_device[0].items() if device not in shared_devices]
    candidate_only = [(no_rows, rows) for device, rows in rows_by_device[1].items() if device not in shared_devices]
    return (
        [(rows_by_device[0][device], rows_by_device[1][device]) for device in shared_devices]
        + base_only
        + candidate_only
    )


def group_by_device(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """Rows by device; one that does not say (it failed early) joins the only device of its hardware description."""
    device_names: dict[str, set[str]] = {}
    for row in rows:
        if row.get("gpu_name"):
            device_names.setdefault(str(row.get("hardware")), set()).add(row["gpu_name"])
    rows_by_device: dict[str, list[Record]] = {}
    for row in rows:
        hardware = str(row.get("hardware"))
        known_names = device_names.get(hardware, set())
        device = row.get("gpu_name") or (next(iter(known_names)) if len(known_names) == 1 else hardware)
        rows_by_device.setdefault(device, []).append(row)
    return rows_by_device
