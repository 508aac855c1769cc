"""Writing what comes of a comparison, over nothing that was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.comparison.history import HistoryPoint, HistorySeries
from bench.comparison.result import (
    CANNOT_TELL,
    FORMAT_VERSION,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    STEP_TIME,
    VERDICTS,
    ComparedConfiguration,
    OverallComparison,
    RunComparison,
    format_percent,
)
from bench.core.errors import UsageError
from bench.records.packed_rows import ROWS_FILE
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN
from bench.reporting.drawing.labels import format_plural
from bench.reporting.regressions import cells


def format_comparison_json(comparison: RunComparison, base: str, candidate: str) -> str:
    """The whole comparison; `base` and `candidate` say what was compared."""
    values = {
        "format": FORMAT_VERSION,
        "base": base,
        "candidate": candidate,
        "exit_code": comparison.exit_code,
        **asdict(comparison),
    }
    return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def format_history_json(all_series: Sequence[HistorySeries]) -> str:
    """Every series with its points and change points."""
    return (
        json.dumps(
            {"format": FORMAT_VERSION, "series": [_describe_series(series) for series in all_series]},
            indent=1,
            ensure_ascii=False,
            allow_nan=False,
        )
        + "\n"
    )


def _describe_series(series: HistorySeries) -> dict[str, Any]:
    return {
        "name": series.name,
        "evidence": series.evidence,
        "device": series.device,
        "quantity": series.quantity.column,
        "question": series.question,
        "points": [_describe_point(point) for point in series.points],
        "change_points": [asdict(change) for change in series.change_points],
    }


def _describe_point(point: HistoryPoint) -> dict[str, Any]:
    """All but the rows, which the store has."""
    return {field.name: getattr(point, field.name) for field in fields(point) if field.name != "rows"}


# --- A comparison as JUnit XML, which CI systems show as tests: one per configuration, and one for all together.

FORBIDDEN_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def format_junit_xml(comparison: RunComparison, base: str, candidate: str) -> str:
    """A regression is a failed test, what cannot be told a skipped one; nothing comparable is an error."""
    root = ElementTree.Element("testsuites")
    evidence_kinds = [overall.evidence for overall in comparison.overall] or ["none"]
    for evidence in evidence_kinds:
        _add_suite(root, comparison, evidence, {"base": base, "candidate": candidate})
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False, short_empty_elements=True).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def _add_suite(
    root: ElementTree.Element, comparison: RunComparison, evidence: str, compared_names: dict[str, str]
) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=f"bench.compare ({evidence})")
    properties = ElementTree.SubElement(suite, "properties")
    property_items = [*compared_names.items(), ("verdict", comparison.verdict)]
    property_items += [
        (f"machine {difference.name}", f"{difference.base} → {difference.candidate}")
        for difference in comparison.machines
    ]
    property_items += [
        (difference.name, f"{difference.base} → {difference.candidate}") for difference in comparison.software
    ]
    for name, value in property_items:
        ElementTree.SubElement(properties, "property", name=_replace_forbidden(name), value=_replace_forbidden(value))
    for overall in comparison.overall:
        if overall.evidence == evidence:
            _add_case(suite, "all configurations together", evidence, overall, "")
    for row in comparison.rows:
        if row.evidence == evidence:
            _add_case(suite, row.name, evidence, row, cells.format_reasons(row))
    if not comparison.comparable:
        case = ElementTree.SubElement(suite, "testcase", classname=evidence, name="comparable", time="0")
        ElementTree.SubElement(
            case, "error", message=_replace_forbidden(comparison.sentence), type="nothing comparable"
        )
    for tag in ("failure", "error", "skipped"):
        suite.set({"failure": "failures", "error": "errors"}.get(tag, tag), str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("time", "0")
    output = ElementTree.SubElement(suite, "system-out")
    output.text = _replace_forbidden("\n".join([comparison.sentence, *cells.list_unmatched(comparison)]))


def _add_case(
    suite: ElementTree.Element, name: str, evidence: str, row: ComparedConfiguration | OverallComparison, reasons: str
) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_replace_forbidden(f"bench.compare.{evidence}"),
        name=_replace_forbidden(name),
        time="0",
    )
    change_texts = [
        f"{cells.COLUMN_HEADINGS[quantity]} {cells.format_change(row.get(quantity))}"
        for quantity in cells.COLUMN_HEADINGS
        if row.get(quantity)
    ]
    message = "; ".join(part for part in (row.verdict, reasons, ", ".join(change_texts)) if part)
    if row.verdict == REGRESSION:
        failure = ElementTree.SubElement(case, "failure", message=_replace_forbidden(message), type=REGRESSION)
        failure.text = _replace_forbidden("\n".join(_format_change_lines(row)))
    elif row.verdict == CANNOT_TELL:
        ElementTree.SubElement(case, "skipped", message=_replace_forbidden(message))
    else:
        ElementTree.SubElement(case, "system-out").text = _replace_forbidden(message)


def _format_change_lines(row: ComparedConfiguration | OverallComparison) -> list[str]:
    """A line per quantity."""
    lines = []
    for change in row.changes:
        values_text = " → ".join(
            cells.format_value(change.quantity, value) for value in (change.base, change.candidate)
        )
        lines.append(
            f"{change.quantity}: {values_text}, {cells.format_change(change)} ({cells.format_interval(change)}): "
            f"{change.verdict}"
        )
    return lines


def _replace_forbidden(text: str) -> str:
    return FORBIDDEN_CHARACTERS.sub("?", text)


# --- A comparison as Markdown: a comment for a pull request.

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


# --- Writing what comes of a comparison, over nothing that was measured.


def write_texts(texts: dict[Path, str]) -> None:
    """Write texts to files; folders are made.

    Raises
    ------
    UsageError
        If a file would replace a row, or cannot be written.
    """
    for path in texts:
        is_row = ATTEMPT_FILE_PATTERN.match(path.name) and RUN_ID_PATTERN.match(path.absolute().parent.name)
        if is_row or path.name == ROWS_FILE:
            raise UsageError(f"{path} is not valid: choose a file that is not the row of a run.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another file.") from None


def write_comparison(
    comparison: RunComparison,
    base_name: str,
    candidate_name: str,
    *,
    markdown_path: Path | None,
    json_path: Path | None,
    junit_path: Path | None,
) -> None:
    """Write a comparison in every form that a file was given for.

    Raises
    ------
    UsageError
        If a file cannot be written.
    """
    formatters = (
        (markdown_path, format_markdown),
        (json_path, format_comparison_json),
        (junit_path, format_junit_xml),
    )
    texts = {path: format_text(comparison, base_name, candidate_name) for path, format_text in formatters if path}
    write_texts(texts)
