"""Names are the words of docs/glossary.md: one word means one thing, and none is private."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter

from tests.conftest import ROOT

NOT_THE_FIELDS_WORDS = {
    *("tape", "reel", "scene", "pace", "crew", "ledger", "obituary", "courier", "hurry", "whereabouts", "remarks"),
    *("forecast", "untold", "foretold", "outlook", "weighing", "told", "asked", "found"),
}
"""What was once said for trace, scaled trace, cost model, coordinator, submission record, exit record, prediction."""


@functools.cache
def list_definitions() -> list[ast.ClassDef | ast.FunctionDef]:
    return [
        node
        for path in (ROOT / "bench").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]


def test_no_two_classes_have_one_name() -> None:
    names = Counter(node.name for node in list_definitions() if isinstance(node, ast.ClassDef))
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_names_have_no_private_words() -> None:
    words = {
        node.name: {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", node.name)} for node in list_definitions()
    }
    assert [name for name, name_words in words.items() if name_words & NOT_THE_FIELDS_WORDS] == []
