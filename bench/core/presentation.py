"""How a plug-in is called and coloured in reports: stated in its class, read here without importing it.

Reports are made without torch, whose import takes seconds. So the class attribute ``presentation`` is written as a call
of `Presentation` with literals alone, and read from the source of the suite's own files and of modules that installed
packages name as entry points. Names in a store are looked up, never imported: an unknown one is shown as it is.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.core.plugins import find_source_file, list_entry_points

BENCH_DIR = Path(__file__).resolve().parents[1]

LAST_POSITION = 1000
"""Position of whatever states none: after all others."""


@dataclass(frozen=True)
class FactorLine:
    """The line of a strategy in figures over the sharding factor."""

    marker: str
    kind: str = ""
    """Whose colour it has; empty for the strategy's own."""
    offset_log2: float = 0.0
    """How far, in powers of two, its points stand beside their factor, so that equal ones are all seen."""


@dataclass(frozen=True)
class Presentation:
    """Names and colours. Colours are ``#rrggbb``, chosen to differ for colour-blind readers."""

    label: str = ""
    """As figures and tables call it; empty: as its file is called."""
    position: int = LAST_POSITION
    """Among others in figures and tables, from a whole model on every rank to the most divided one."""
    colour: str = ""
    """Of every kind that has none of its own; empty: each gets a spare one."""
    kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Label and colour (empty: none) by what follows the slash in ``effective_strategy``, in their order."""
    mixed_precision: Mapping[str, str] = field(default_factory=dict)
    """Labels of its own ways of mixed precision, by what ``mixed_precision`` of a row says."""
    is_sharded_by_factor: bool = False
    """Whether the sharding factor is a choice, so that its kind follows from the factor alone."""
    factor_line: FactorLine | None = None
    """None: it is not compared over the sharding factor."""

    def __post_init__(self) -> None:
        for colour in (self.colour, *(kind_colour for _, kind_colour in self.kinds.values())):
            if colour and not re.fullmatch(r"#[0-9a-f]{6}", colour):
                raise ValueError(f"the colour {colour!r} is not of the form #rrggbb, in lower case")


PRESENTATION_CLASSES = {"Presentation": Presentation, "FactorLine": FactorLine}

_named_presentations: dict[str, Presentation] = {}
"""Of modules whose path the user typed, by that path and by its last part."""


def remember_presentation(module_path: str, presentation: Presentation) -> None:
    """Show a module that the user named as it says, in reports that this process makes."""
    for name in (module_path, module_path.rpartition(".")[2]):
        _named_presentations[name] = presentation


def get_presentation(package_name: str, name: str) -> Presentation:
    """How a file of a package, or what is installed or named beside it, is shown; an unknown one as it is called."""
    return read_presentations(package_name).get(name) or _named_presentations.get(name) or Presentation()


@functools.cache
def read_presentations(package_name: str) -> dict[str, Presentation]:
    """The presentations of all files of a package of the suite, and of installed modules, by name."""
    files: dict[str, Path | None] = {
        name: find_source_file(module_path) for name, module_path in list_entry_points(package_name).items()
    }
    folder = BENCH_DIR.joinpath(*package_name.split(".")[1:])
    files |= {file.stem: file for file in folder.glob("*.py")}
    files |= {file.parent.name: file for file in folder.glob("*/strategy.py")}
    presentations = {name: _read_presentation(file) for name, file in sorted(files.items()) if file is not None}
    return {name: presentation for name, presentation in presentations.items() if presentation is not None}


def _read_presentation(file: Path) -> Presentation | None:
    """What the class in a file states, None where there is nothing that can be read."""
    try:
        for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(statement, ast.ClassDef):
                continue
            for assignment in statement.body:
                if isinstance(assignment, ast.Assign) and [ast.unparse(name) for name in assignment.targets] == [
                    "presentation"
                ]:
                    presentation = _evaluate(assignment.value)
                    return presentation if isinstance(presentation, Presentation) else None
    except Exception:  # whatever is wrong with somebody's own file, it has no names then
        return None
    return None


def _evaluate(node: ast.expr) -> object:
    """A literal, or a call of one of `PRESENTATION_CLASSES` with literals.

    Raises
    ------
    ValueError, TypeError, KeyError
        If it is anything else.
    """
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    values = {keyword.arg or "": _evaluate(keyword.value) for keyword in node.keywords}
    return PRESENTATION_CLASSES[ast.unparse(node.func)](*map(_evaluate, node.args), **values)
