"""A comparison as JUnit XML, which CI systems show as tests: one per configuration, and one for all together."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bench.comparison.result import Comparison, Overall, Row
from bench.comparison.words import CANNOT_TELL, REGRESSION
from bench.reporting.regressions import cells

FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def junit(comparison: Comparison, base: str, candidate: str) -> str:
    """A regression is a failed test, what cannot be told a skipped one; nothing comparable is an error."""
    root = ElementTree.Element("testsuites")
    kinds = [overall.evidence for overall in comparison.overall] or ["none"]
    for kind in kinds:
        _suite(root, comparison, kind, {"base": base, "candidate": candidate})
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False, short_empty_elements=True).join(
        ('<?xml version="1.0" encoding="utf-8"?>\n', "\n")
    )


def _suite(root: ElementTree.Element, comparison: Comparison, kind: str, compared: dict[str, str]) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=f"bench.compare ({kind})")
    properties = ElementTree.SubElement(suite, "properties")
    told = [*compared.items(), ("verdict", comparison.verdict)]
    told += [(f"machine {each.name}", f"{each.base} → {each.candidate}") for each in comparison.machines]
    told += [(each.name, f"{each.base} → {each.candidate}") for each in comparison.software]
    for name, value in told:
        ElementTree.SubElement(properties, "property", name=_text(name), value=_text(value))
    for overall in comparison.overall:
        if overall.evidence == kind:
            _case(suite, "all configurations together", kind, overall, "")
    for row in comparison.rows:
        if row.evidence == kind:
            _case(suite, row.name, kind, row, cells.why(row))
    if not comparison.comparable:
        case = ElementTree.SubElement(suite, "testcase", classname=kind, name="comparable", time="0")
        ElementTree.SubElement(case, "error", message=_text(comparison.sentence), type="nothing comparable")
    for tag in ("failure", "error", "skipped"):
        suite.set({"failure": "failures", "error": "errors"}.get(tag, tag), str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("time", "0")
    output = ElementTree.SubElement(suite, "system-out")
    output.text = _text("\n".join([comparison.sentence, *cells.unmatched(comparison)]))


def _case(suite: ElementTree.Element, name: str, kind: str, row: Row | Overall, why: str) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_text(f"bench.compare.{kind}"), name=_text(name), time="0"
    )
    numbers = [f"{cells.COLUMNS[q]} {cells.change(row.get(q))}" for q in cells.COLUMNS if row.get(q)]
    message = "; ".join(part for part in (row.verdict, why, ", ".join(numbers)) if part)
    if row.verdict == REGRESSION:
        failure = ElementTree.SubElement(case, "failure", message=_text(message), type=REGRESSION)
        failure.text = _text("\n".join(_lines(row)))
    elif row.verdict == CANNOT_TELL:
        ElementTree.SubElement(case, "skipped", message=_text(message))
    else:
        ElementTree.SubElement(case, "system-out").text = _text(message)


def _lines(row: Row | Overall) -> list[str]:
    """A line per quantity."""
    lines = []
    for each in row.changes:
        values = " → ".join(cells.value(each.quantity, value) for value in (each.base, each.candidate))
        lines.append(f"{each.quantity}: {values}, {cells.change(each)} ({cells.interval(each)}): {each.verdict}")
    return lines


def _text(text: str) -> str:
    return FORBIDDEN.sub("?", text)
