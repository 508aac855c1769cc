"""Which rows of base and candidate are runs of the same configuration. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.records import Record
from bench.records.matching import Question, identity, run_question

PUBLISHED = "published"


@dataclass(frozen=True)
class Pair:
    """The runs of one configuration; those of a side that does not have it are none."""

    question: Question
    evidence: str
    base: tuple[Record, ...]
    candidate: tuple[Record, ...]

    @property
    def any(self) -> Record:
        """A row that names the configuration: one that knows most, as a run that failed early knows little."""
        return max((*self.candidate, *self.base), key=lambda row: sum(value is not None for value in row.values()))


def pairs(base: Iterable[Record], candidate: Iterable[Record]) -> list[Pair]:
    """Every configuration of either side, in the order it is first met.

    Rows match that have the same kind of evidence and ask the same (`matching.run_question`). Where a side has such
    rows of several devices, they match device by device if the other side has any of them: rows of an A100 and an H100
    are not repeats of one another.
    """
    sides = [_questions(rows) for rows in (base, candidate)]
    found = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        rows = [side.get(key, []) for side in sides]
        run_of = run_question((rows[0] or rows[1])[0])
        assert run_of is not None
        for one, other in _device_by_device(*rows):
            found.append(Pair(run_of, key[0], tuple(one), tuple(other)))
    return found


def unpublished(records: Iterable[Record]) -> list[Record]:
    """The rows that have a configuration to match by, each once though two folders may hold it, in order of time."""
    once = {
        (row["run_id"], row.get("attempt"), row.get("started_at")): row
        for row in records
        if row["evidence"] != PUBLISHED and run_question(row) is not None
    }
    return sorted(once.values(), key=lambda row: (row.get("started_at") or "", row.get("repeat") or 0))


def _questions(rows: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Rows by kind of evidence and what they ask, in order of time."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in unpublished(rows):
        found.setdefault((row["evidence"], identity(run_question(row) or {})), []).append(row)
    return found


def _device_by_device(base: list[Record], candidate: list[Record]) -> list[tuple[list[Record], list[Record]]]:
    """The rows of both sides, device by device where they share some and there is more than one."""
    devices = [by_device(rows) for rows in (base, candidate)]
    shared = [device for device in devices[0] if device in devices[1]]
    if not shared or len(devices[0]) == len(devices[1]) == 1:
        return [(base, candidate)]
    nothing: list[Record] = []
    alone = [(rows, nothing) for device, rows in devices[0].items() if device not in shared]
    new = [(nothing, rows) for device, rows in devices[1].items() if device not in shared]
    return [(devices[0][device], devices[1][device]) for device in shared] + alone + new


def by_device(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """Rows by device; one that does not say (it failed early) joins the only device of its hardware description."""
    named: dict[str, set[str]] = {}
    for row in rows:
        if row.get("gpu_name"):
            named.setdefault(str(row.get("hardware")), set()).add(row["gpu_name"])
    found: dict[str, list[Record]] = {}
    for row in rows:
        hardware = str(row.get("hardware"))
        others = named.get(hardware, set())
        device = row.get("gpu_name") or (next(iter(others)) if len(others) == 1 else hardware)
        found.setdefault(device, []).append(row)
    return found
