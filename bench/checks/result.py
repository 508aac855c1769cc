"""What a check found, as a line of a table and as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

STYLES = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}


@dataclass(frozen=True)
class Result:
    """One check: what was asked, what was found, and whether that is as it should be."""

    name: str
    status: str
    """passed, failed or not run."""
    found: str
    """In words, with the numbers; of a check that did not run, why."""
    expected: str = ""

    @classmethod
    def of(cls, name: str, passed: bool, found: str, expected: str) -> Result:
        """A check that ran."""
        return cls(name, PASSED if passed else FAILED, found, expected)

    @property
    def failed(self) -> bool:
        """Whether something is wrong with the machine; what did not run says nothing about it."""
        return self.status == FAILED

    def to_dict(self) -> dict[str, str]:
        """As plain values."""
        return dataclasses.asdict(self)


def results_table(results: Sequence[Result]) -> Table:
    """A row for each check."""
    table = Table("check", "", "found", "expected", box=None, pad_edge=False)
    for result in results:
        words = (result.name, result.found, result.expected)  # as they are: square brackets are no markup
        name, found, expected = map(Text, words)
        table.add_row(name, Text(result.status, style=STYLES[result.status]), found, expected)
    return table
