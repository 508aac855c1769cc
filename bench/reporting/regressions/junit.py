"""A comparison as JUnit XML, which CI systems show as tests: one per configuration, and one for all together."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bench.comparison.result import (
    CANNOT_TELL,
    REGRESSION,
    ComparedConfiguration,
    OverallComparison,
    RunComparison,
)
from bench.reporting.regressions.files import (
    COLUMN_HEADINGS,
    format_change,
    format_interval,
    format_reasons,
    format_value,
    list_unmatched,
)

FORBIDDEN_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def format_junit_xml(comparison: RunComparison, base: str, candidate: str) -> str:
    """A regression is a failed test, what cannot be told a skipped one, or with `strict` a failed one; nothing
    comparable is an error.

    A suite has one test per configuration, so that its counts are those of the sentence; all of them together are a
    test in a suite of its own.
    """
    root = ElementTree.Element("testsuites")
    evidence_kinds = [overall.evidence for overall in comparison.overall] or ["none"]
    for evidence in evidence_kinds:
        _add_suite(root, comparison, evidence, {"base": base, "candidate": candidate})
    for overall in comparison.overall:
        suite = ElementTree.SubElement(
            root, "testsuite", name=f"bench.compare ({overall.evidence}), {overall.configurations} together"
        )
        _add_case(
            suite, "all configurations together", overall.evidence, overall, "", strict=comparison.settings.strict
        )
    for suite in root.findall("testsuite"):
        _set_counts(suite)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root.findall("testsuite"))))
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
    for row in comparison.rows:
        if row.evidence == evidence:
            _add_case(suite, row.name, evidence, row, format_reasons(row), strict=comparison.settings.strict)
    if not comparison.comparable:
        case = ElementTree.SubElement(suite, "testcase", classname=evidence, name="comparable", time="0")
        ElementTree.SubElement(
            case, "error", message=_replace_forbidden(comparison.sentence), type="nothing comparable"
        )
    output = ElementTree.SubElement(suite, "system-out")
    output.text = _replace_forbidden("\n".join([comparison.sentence, *list_unmatched(comparison)]))


def _set_counts(suite: ElementTree.Element) -> None:
    for tag in ("failure", "error", "skipped"):
        suite.set({"failure": "failures", "error": "errors"}.get(tag, tag), str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("time", "0")


def _add_case(
    suite: ElementTree.Element,
    name: str,
    evidence: str,
    row: ComparedConfiguration | OverallComparison,
    reasons: str,
    *,
    strict: bool,
) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_replace_forbidden(f"bench.compare.{evidence}"),
        name=_replace_forbidden(name),
        time="0",
    )
    change_texts = [
        f"{COLUMN_HEADINGS[quantity]} {format_change(row.get(quantity))}"
        for quantity in COLUMN_HEADINGS
        if row.get(quantity)
    ]
    message = "; ".join(part for part in (row.verdict, reasons, ", ".join(change_texts)) if part)
    if row.verdict == REGRESSION or (strict and row.verdict == CANNOT_TELL):
        failure = ElementTree.SubElement(case, "failure", message=_replace_forbidden(message), type=row.verdict)
        failure.text = _replace_forbidden("\n".join(_format_change_lines(row)))
    elif row.verdict == CANNOT_TELL:
        ElementTree.SubElement(case, "skipped", message=_replace_forbidden(message))
    else:
        ElementTree.SubElement(case, "system-out").text = _replace_forbidden(message)


def _format_change_lines(row: ComparedConfiguration | OverallComparison) -> list[str]:
    lines = []
    for change in row.changes:
        values_text = " → ".join(format_value(change.quantity, value) for value in (change.base, change.candidate))
        lines.append(
            f"{change.quantity}: {values_text}, {format_change(change)} ({format_interval(change)}): {change.verdict}"
        )
    return lines


def _replace_forbidden(text: str) -> str:
    return FORBIDDEN_CHARACTERS.sub("?", text)
