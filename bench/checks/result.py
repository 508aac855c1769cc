"""What a check found, as a line of a table and as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

STATUS_STYLES = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """One check: what was asked, what was found, and whether that is as it should be."""

    name: str
    status: str
    """passed, failed or not run."""
    found: str
    """In words, with the numbers; of a check that did not run, why."""
    expected: str = ""

    @classmethod
    def from_outcome(cls, name: str, passed: bool, found: str, expected: str) -> CheckResult:
        """A check that ran."""
        return cls(name, PASSED if passed else FAILED, found, expected)

    @property
    def has_failed(self) -> bool:
        """Whether something is wrong with the machine; what did not run says nothing about it."""
        return self.status == FAILED

    def to_dict(self) -> dict[str, str]:
        """As plain values."""
        return dataclasses.asdict(self)


def build_results_table(results: Sequence[CheckResult]) -> Table:
    """A row for each check."""
    table = Table("check", "", "found", "expected", box=None, pad_edge=False)
    for result in results:
        texts = (result.name, result.found, result.expected)  # as they are: square brackets are no markup
        name, found, expected = map(Text, texts)
        table.add_row(name, Text(result.status, style=STATUS_STYLES[result.status]), found, expected)
    return table
