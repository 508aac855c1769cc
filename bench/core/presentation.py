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


# --- What the guide says of a way to train: its names in the field, and the leaves of the decision tree that name it.

NODE_GPUS_PLACEHOLDER, NODES_PLACEHOLDER, GPUS_PLACEHOLDER = "{node}", "{nodes}", "{gpus}"
"""In a value: GPUs of a node, number of nodes, all GPUs."""

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage of a pipeline that is to be busy: idle (P - 1) / (4 P + P - 1) of a step, a fifth."""

GPU_MICRO_BATCHES_PLACEHOLDER, NODE_MICRO_BATCHES_PLACEHOLDER = "{micro-batches of gpus}", "{micro-batches of nodes}"
"""In a value: micro-batches that fill a pipeline of as many stages."""


@dataclass(frozen=True)
class TrainingTerm:
    """One name of the field. Several strategies may state the same one: their settings are then alternatives."""

    name: str
    typed_settings: tuple[str, ...]
    """What is typed for it here: alternatives, each one or more settings. Empty where the suite does not offer it."""
    when_to_use: str
    """When to take it."""
    missing_reason: str = ""
    """Why it is not offered."""
    divides: tuple[str, ...] = ()
    """What is divided among ranks: parameters, gradients, optimizer state, layers, activations … beside the batch."""

    @property
    def settings_text(self) -> str:
        return ", or ".join(self.typed_settings)


@dataclass(frozen=True)
class TrainingOption:
    """One way to train that the decision tree ends at."""

    name: str
    """As the field calls it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What is typed for it; NODE, NODES and GPUS are filled in."""
    note: str = ""
    """What to know before taking it."""
    leaves: Mapping[str, int] = field(default_factory=dict)
    """Keys of the tree's leaves that name it (`bench.advice.tree.tree`), and its place among what each names."""

    @property
    def trains_adapters(self) -> bool:
        """Whether it leaves the model's weights as they are."""
        return "finetune" in self.settings

    def fill_settings(self, gpus: int, gpus_per_node: int, requested_batch: int | None) -> dict[str, str]:
        """The settings for some GPUs, and a batch of so many sequences per GPU; None for one that is to be searched."""
        nodes = -(-gpus // gpus_per_node)
        number_by_placeholder = {
            NODE_GPUS_PLACEHOLDER: min(gpus, gpus_per_node),
            NODES_PLACEHOLDER: nodes,
            GPUS_PLACEHOLDER: gpus,
        }
        number_by_placeholder |= {
            GPU_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(gpus, requested_batch),
            NODE_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(nodes, requested_batch),
        }
        text_by_placeholder = {placeholder: str(number) for placeholder, number in number_by_placeholder.items()}
        return {key: text_by_placeholder.get(value, value) for key, value in self.settings.items()}


def _choose_micro_batches(stages: int, requested_batch: int | None) -> int:
    """Micro-batches of a pipeline: `MICRO_BATCHES_PER_STAGE` per stage, or as near to it as divides the sequences of
    one copy."""
    sequences = stages * (requested_batch or MICRO_BATCHES_PER_STAGE)
    return max(count for count in range(1, MICRO_BATCHES_PER_STAGE * stages + 1) if sequences % count == 0)
