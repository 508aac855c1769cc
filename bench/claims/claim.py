"""A claim of a paper or of course notes: its words, its source, the rows it needs, and the verdict that follows."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.core.installation import DATA_FOLDER
from bench.records import Record, read_latest_attempts, read_published_records
from bench.records.published import PUBLISHED_CSV

HOLDS, HOLDS_IN_PART, DOES_NOT_HOLD = "holds", "holds in part", "does not hold"
CANNOT_TELL = "cannot be told from here"
VERDICTS = (HOLDS, HOLDS_IN_PART, DOES_NOT_HOLD, CANNOT_TELL)

RESULTS = DATA_FOLDER / "results"
PUBLISHED, MICROBENCHMARKS = "published", "published/micro.csv"
"""Stores that are no folders: published numbers as rows, and the lines of the microbenchmarks."""

FSDP_PAPER = "Zhao et al., VLDB 2023, arXiv:2304.11277"
ZERO_PAPER = "Rajbhandari et al., SC 2020, arXiv:1910.02054"
COURSE_NOTES = "course notes"


@dataclass(frozen=True)
class RowQuery:
    """Rows of a store with some values."""

    store: str
    """A folder of ``results``, or `PUBLISHED` or `MICROBENCHMARKS`."""
    where: Mapping[str, Any]
    """By column, or by the path of a nested value with dots: the value, or a tuple of values that all count."""

    def describe(self) -> str:
        """In words: which rows, of which store."""
        values = ", ".join(f"{path}={value}" for path, value in self.where.items())
        return f"{self.store}: {values}"


ClaimRows = Mapping[str, Sequence[Record]]
"""The rows of each query of a claim, by the query's name; none of them empty."""


@dataclass(frozen=True)
class EvidenceStatement:
    """What rows of one kind say."""

    kind: str
    """measured, rehearsed, predicted or published."""
    text: str
    """A sentence with its numbers."""


@dataclass(frozen=True)
class Assessment:
    """What rows say of a claim."""

    verdict: str
    """One of `VERDICTS`."""
    reason: str
    """Why, in a sentence."""
    evidence: tuple[EvidenceStatement, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the verdict follows from."""


@dataclass(frozen=True)
class PaperClaim:
    """One claim."""

    key: str
    text: str
    """What is claimed, in our words."""
    source: str
    needs: Mapping[str, RowQuery]
    """The rows that are held against it, by a name."""
    assess: Callable[[ClaimRows], Assessment]
    caveat: str = ""
    """What the evidence does not show, and what would."""
    is_from_same_source: bool = False
    """Whether predicted rows among its evidence depend on constants that were chosen with rows of the claim's own
    source in sight."""


ReadStore = Callable[[str], Sequence[Record]]


def assess_claim(claim: PaperClaim, read_store: ReadStore | None = None) -> Assessment:
    """The verdict on a claim; that it cannot be told where rows are missing."""
    read = read_store or read_evidence
    rows = {name: select_rows(read(query.store), query.where) for name, query in claim.needs.items()}
    missing = [claim.needs[name].describe() for name, found in rows.items() if not found]
    if missing:
        return Assessment(CANNOT_TELL, f"There are no rows of {'; '.join(missing)}.", ())
    return claim.assess(rows)


@functools.cache
def read_evidence(store: str) -> Sequence[Record]:
    """The rows of a store."""
    if store == PUBLISHED:
        more = PUBLISHED_CSV.with_name("published_more.csv")
        return [*read_published_records(), *read_published_records(more)]
    if store == MICROBENCHMARKS:
        with (RESULTS / store).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    return read_latest_attempts(RESULTS / store).records


def get_value(row: Record, path: str) -> Any:
    """A column, or what lies below one; None where there is nothing."""
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def select_rows(rows: Sequence[Record], where: Mapping[str, Any]) -> list[Record]:
    """Those that have the values."""
    return [row for row in rows if all(_has_value(get_value(row, path), value) for path, value in where.items())]


def _has_value(found: Any, wanted: Any) -> bool:
    return found in wanted if isinstance(wanted, tuple) else found == wanted


def get_row(rows: Sequence[Record], **where: Any) -> Record:
    """The one row with these values of columns.

    Raises
    ------
    LookupError
        If there is none, or several.
    """
    found = select_rows(rows, where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {where}")
    return found[0]


# --- Numbers of rows that several claims need.

STATE_PARTS = ("parameters", "gradients", "optimizer")


def count_state_bytes_per_parameter(row: Record) -> float:
    """Of a predicted row: parameters, gradients and optimizer state at the peak."""
    parts = row["prediction"]["memory"]["parts_bytes"]
    return sum(parts[name] for name in STATE_PARTS) / row["parameters"]


def count_sent_elements(row: Record) -> float:
    """Elements that a rank sends in a step per parameter of the model, by algorithms that send least.

    Of a profiled row. Among n ranks an all-reduce of M elements sends 2 M (n - 1) / n from each, an all-gather or a
    reduce-scatter of parts of M elements (n - 1) M (Thakur et al. 2005, doi:10.1177/1094342005051521), a tensor of M
    that is broadcast M (n - 1) / n on average. Replicas of what F of W ranks share reduce among W / F.
    """
    world_size, factor = row["world_size"], row["sharding_factor"]
    collectives = row["ranks"][0]["collectives"]
    reducing = world_size // factor if "reduce_scatter" in collectives else world_size
    sent_per_element = {
        "all_reduce": 2 * (reducing - 1) / reducing,
        "broadcast": (world_size - 1) / world_size,
        "all_gather": factor - 1,
        "reduce_scatter": factor - 1,
    }
    return sum(sent_per_element[name] * count["elements"] for name, count in collectives.items()) / row["parameters"]


def format_share(share: float, digits: int = 1) -> str:
    """A share as a percentage, with its sign."""
    return f"{100 * share:+.{digits}f} %"
