"""A comparison as Markdown: a comment for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from bench.comparison.result import Comparison, Overall, Row
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, TIME, VERDICTS, percent
from bench.reporting.labels import counted
from bench.reporting.regressions import cells

MARKS = {REGRESSION: "🔴", IMPROVEMENT: "🟢", NO_CHANGE: "⚪", CANNOT_TELL: "🟡"}
"""Beside the words, never instead of them."""

MOST_ROWS = 200
"""GitHub takes comments of up to 65,536 characters."""


def markdown(comparison: Comparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    lines = [f"### {MARKS[comparison.verdict]} {_plain(comparison.sentence)}", ""]
    lines += [f"Base `{base}`, candidate `{candidate}`.", ""]
    if comparison.machines:
        told = "compared all the same" if comparison.settings.across_machines else "times are not compared"
        lines += [f"**The machines differ ({told}):**", "", *_bullets(comparison.machines), ""]
    if comparison.software:
        lines += ["What changed:", "", *_bullets(comparison.software), ""]
    if comparison.rows:
        lines += [*_table(comparison), ""]
        reasons = [f"{row.name}: {cells.why(row)}" for row in comparison.rows if cells.why(row)]
        lines += _details("Reasons and what was left out", reasons)
    one_sided = [line.strip() for line in cells.unmatched(comparison)]
    total = len(comparison.only_base) + len(comparison.only_candidate)
    lines += _details(f"{counted(total, 'configuration')} on one side only", one_sided)
    lines += [
        *(f"Note: {_plain(note)}.\n" for note in comparison.notes),
        f"<sub>{cells.settings_sentence(comparison)}</sub>",
    ]
    return "\n".join(lines) + "\n"


def _table(comparison: Comparison) -> list[str]:
    shown = cells.shown(comparison)
    headings = ["", "configuration", "evidence", "runs", "status"]
    for quantity in shown:
        headings += [cells.COLUMNS[quantity]]
        headings += (
            [f"{percent(comparison.settings.confidence, signed=False)} interval"] if quantity == TIME.column else []
        )
    headings.append("verdict")
    lines = [_line(headings), _line(["---"] * 5 + ["--:"] * (len(headings) - 6) + ["---"])]
    order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    rows = sorted(comparison.rows, key=lambda row: order[row.verdict])
    for each in comparison.overall:
        start = [MARKS[each.verdict], f"**all {each.configurations} together**", each.evidence, "", ""]
        lines.append(_line([*start, *_numbers(each, shown), f"**{each.verdict}**"]))
    for row in rows[:MOST_ROWS]:
        start = [MARKS[row.verdict], row.name, row.evidence, cells.runs(row), cells.status(row)]
        lines.append(_line([*start, *_numbers(row, shown), row.verdict]))
    if len(rows) > MOST_ROWS:
        lines.append(_line(["", f"and {len(rows) - MOST_ROWS} more", *[""] * (len(headings) - 2)]))
    return lines


def _numbers(row: Row | Overall, shown: Sequence[str]) -> list[str]:
    found = []
    for quantity in shown:
        each = row.get(quantity)
        found += [cells.change(each)] + ([cells.interval(each)] if quantity == TIME.column else [])
    return found


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(part).replace("|", "\\|") if "**" not in part else part for part in parts) + " |"


def _bullets(items: Sequence[object]) -> list[str]:
    return [f"- {_plain(str(item))}" for item in items]


def _details(title: str, lines: Sequence[str]) -> list[str]:
    """A list that is folded away."""
    if not lines:
        return []
    return [f"<details><summary>{title}</summary>", "", *_bullets(lines[:MOST_ROWS]), "", "</details>", ""]


def _plain(text: str) -> str:
    """Text in which nothing is taken for markup."""
    one_line = " ".join(text.split())
    for special in "\\`*_<>[]":
        one_line = one_line.replace(special, "\\" + special)
    return one_line
