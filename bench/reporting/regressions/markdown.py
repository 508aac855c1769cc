"""A comparison as Markdown: a comment for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from bench.comparison.labels import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, STEP_TIME, VERDICTS, format_percent
from bench.comparison.result import ComparedConfiguration, OverallComparison, RunComparison
from bench.reporting.drawing.labels import format_plural
from bench.reporting.regressions import cells

VERDICT_EMOJI = {REGRESSION: "🔴", IMPROVEMENT: "🟢", NO_CHANGE: "⚪", CANNOT_TELL: "🟡"}
"""Beside the words, never instead of them."""

MAX_ROWS = 200
"""GitHub takes comments of up to 65,536 characters."""


def format_markdown(comparison: RunComparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    lines = [f"### {VERDICT_EMOJI[comparison.verdict]} {_escape_markdown(comparison.sentence)}", ""]
    lines += [f"Base `{base}`, candidate `{candidate}`.", ""]
    if comparison.machines:
        machines_note = "compared all the same" if comparison.settings.across_machines else "times are not compared"
        lines += [f"**The machines differ ({machines_note}):**", "", *_format_bullets(comparison.machines), ""]
    if comparison.software:
        lines += ["What changed:", "", *_format_bullets(comparison.software), ""]
    if comparison.rows:
        lines += [*_format_table(comparison), ""]
        reason_lines = [
            f"{row.name}: {cells.format_reasons(row)}" for row in comparison.rows if cells.format_reasons(row)
        ]
        lines += _format_details("Reasons and what was left out", reason_lines)
    unmatched_lines = [line.strip() for line in cells.list_unmatched(comparison)]
    num_unmatched = len(comparison.only_base) + len(comparison.only_candidate)
    lines += _format_details(f"{format_plural(num_unmatched, 'configuration')} on one side only", unmatched_lines)
    lines += [
        *(f"Note: {_escape_markdown(note)}.\n" for note in comparison.notes),
        f"<sub>{cells.format_settings(comparison)}</sub>",
    ]
    return "\n".join(lines) + "\n"


def _format_table(comparison: RunComparison) -> list[str]:
    shown_quantities = cells.list_shown_quantities(comparison)
    headings = ["", "configuration", "evidence", "runs", "status"]
    for quantity in shown_quantities:
        headings += [cells.COLUMN_HEADINGS[quantity]]
        headings += (
            [f"{format_percent(comparison.settings.confidence, signed=False)} interval"]
            if quantity == STEP_TIME.column
            else []
        )
    headings.append("verdict")
    lines = [_format_table_line(headings), _format_table_line(["---"] * 5 + ["--:"] * (len(headings) - 6) + ["---"])]
    verdict_order = {verdict: position for position, verdict in enumerate(VERDICTS)}
    rows = sorted(comparison.rows, key=lambda row: verdict_order[row.verdict])
    for overall in comparison.overall:
        first_cells = [
            VERDICT_EMOJI[overall.verdict],
            f"**all {overall.configurations} together**",
            overall.evidence,
            "",
            "",
        ]
        lines.append(
            _format_table_line([*first_cells, *_format_changes(overall, shown_quantities), f"**{overall.verdict}**"])
        )
    for row in rows[:MAX_ROWS]:
        first_cells = [
            VERDICT_EMOJI[row.verdict],
            row.name,
            row.evidence,
            cells.format_run_counts(row),
            cells.format_status(row),
        ]
        lines.append(_format_table_line([*first_cells, *_format_changes(row, shown_quantities), row.verdict]))
    if len(rows) > MAX_ROWS:
        lines.append(_format_table_line(["", f"and {len(rows) - MAX_ROWS} more", *[""] * (len(headings) - 2)]))
    return lines


def _format_changes(row: ComparedConfiguration | OverallComparison, quantities: Sequence[str]) -> list[str]:
    cell_texts = []
    for quantity in quantities:
        change = row.get(quantity)
        cell_texts += [cells.format_change(change)] + (
            [cells.format_interval(change)] if quantity == STEP_TIME.column else []
        )
    return cell_texts


def _format_table_line(parts: Sequence[str]) -> str:
    return (
        "| "
        + " | ".join(_escape_markdown(part).replace("|", "\\|") if "**" not in part else part for part in parts)
        + " |"
    )


def _format_bullets(items: Sequence[object]) -> list[str]:
    return [f"- {_escape_markdown(str(item))}" for item in items]


def _format_details(title: str, lines: Sequence[str]) -> list[str]:
    """A list that is folded away."""
    if not lines:
        return []
    return [f"<details><summary>{title}</summary>", "", *_format_bullets(lines[:MAX_ROWS]), "", "</details>", ""]


def _escape_markdown(text: str) -> str:
    """Text in which nothing is taken for markup."""
    one_line = " ".join(text.split())
    for character in "\\`*_<>[]":
        one_line = one_line.replace(character, "\\" + character)
    return one_line
