"""What people read: how plug-ins are called and coloured, names of variants, numbers with their units.

How a plug-in is called and coloured is stated in its class and read here without importing it.
Reports are made without torch, whose import takes seconds. So the class attribute ``presentation`` is written as a call
of `Presentation` with literals alone, and read from the source of the suite's own files and of modules that installed
packages name as entry points. Names in a store are looked up, never imported: an unknown one is shown as it is.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.core.plugins import find_source_file, list_entry_points
from bench.core.precision import AUTOCAST_MIXING
from bench.core.units import GIB, KIB, MIB

BENCH_DIR = Path(__file__).resolve().parents[1]

LAST_POSITION = 1000
"""Position of whatever states none: after all others."""


@dataclass(frozen=True)
class FactorLine:
    """The line of a strategy in figures over the sharding factor."""

    kind: str = ""
    """Whose colour and marker it has; empty for the strategy's own."""
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
    markers: Mapping[str, str] = field(default_factory=dict)
    """Markers of matplotlib by what follows the slash in ``effective_strategy`` (empty: of every kind that has none of
    its own); one that is not stated is chosen by the name. ``<`` and ``X`` mark degraded runs and those out of
    memory."""
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
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            for assignment in statement.body if isinstance(statement, ast.ClassDef) else ():
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


# --- Words and numbers for people: names of variants, quantities with their units.

MISSING = "–"
CPU_NOTE = "CPU processes: functional evidence, not scaling evidence"

TOO_CLOSE = "too close to call"
"""What `fit` says of a prediction that may go either way."""

STRATEGIES, FINETUNES = "bench.strategies", "bench.finetune"
"""Packages whose files state how they are presented."""

MIXING_LABELS = {AUTOCAST_MIXING: "autocast", "fsdp policy": "parameters"}
"""Ways of mixed precision that several strategies have, by what rows call them."""


@dataclass(frozen=True, order=True)
class Variant:
    """One way to spread a model over ranks, as figures and tables name it. Sorts from replicated to sharded."""

    order: tuple[int, int, int, str]
    label: str
    kind: str
    """``effective_strategy`` of the row, which decides the colour: ``ddp``, ``fsdp/full_shard``, ..."""


def build_variant(
    strategy: str | None, effective_strategy: str | None, sharding_factor: int | None, world_size: int | None
) -> Variant:
    """Name what a run really did; where the row does not say (it failed early), what it was asked to do.

    The sharding factor is part of the name only where it is a choice: more than 1 and less than the world size.
    """
    kind = effective_strategy or _infer_kind(strategy, sharding_factor, world_size)
    family, _, sharding = kind.partition("/")
    is_hybrid = sharding_factor is not None and world_size is not None and 1 < sharding_factor < world_size
    sharding, finetune = split_finetune(sharding)
    presentation = get_strategy_presentation(family)
    kind_label, _ = presentation.kinds.get(sharding, (sharding.replace("_", " "), ""))
    label_parts = [get_strategy_label(family), kind_label, get_finetune_labels().get(finetune, "")]
    label_parts += [f"(F={sharding_factor})"] if is_hybrid and sharding else []
    sort_order = (
        presentation.position,
        _find_position(sharding, list(presentation.kinds)),
        (sharding_factor or 0) if is_hybrid else 0,
        kind,
    )
    return Variant(sort_order, " ".join(part for part in label_parts if part), kind)


def get_strategy_presentation(name: str) -> Presentation:
    """How a strategy is shown, by its name or by what stands before the slash of an effective strategy."""
    return get_presentation(STRATEGIES, name)


def get_strategy_label(name: str) -> str:
    """What figures and tables call a strategy."""
    return get_strategy_presentation(name).label or name


def get_finetune_labels() -> dict[str, str]:
    """What figures and tables call ways to train a part of a model, by the ends of effective strategies."""
    return {name: presentation.label for name, presentation in read_presentations(FINETUNES).items()}


def format_precision(precision_name: str, mixed_precision: str | None) -> str:
    """A precision with its way of mixing, where something is mixed: ``bf16 autocast``."""
    label_by_mixing = dict(MIXING_LABELS)
    for presentation in read_presentations(STRATEGIES).values():
        label_by_mixing |= presentation.mixed_precision
    return f"{precision_name} {label_by_mixing.get(mixed_precision or '', '')}".strip()


def split_finetune(sharding: str) -> tuple[str, str]:
    """What of a kind says how a model is spread, and what says which part of it is trained."""
    base, _, suffix = sharding.rpartition("_")
    return (base, suffix) if suffix in get_finetune_labels() else (sharding, "")


OPTIONAL_SETTING_FORMATTERS: Mapping[str, Callable[[Any], str]] = {
    "gradient_clip_norm": lambda value: f"gradients clipped to {value:g}",
    "loss_chunks": lambda value: f"loss in {value} chunks",
    "compiled_loss": lambda _: "loss compiled",
    "activation_offload": lambda _: "activations offloaded",
    "expandable_segments": lambda _: "expandable segments",
}
"""Columns of what is done only where it is asked for, and what names say of it; of empty ones they say nothing."""


def format_optional_setting(column: str, value: Any) -> str:
    """What a name says of a column of `OPTIONAL_SETTING_FORMATTERS`; empty for what is not done."""
    return OPTIONAL_SETTING_FORMATTERS[column](value) if value else ""


def _infer_kind(strategy: str | None, sharding_factor: int | None, world_size: int | None) -> str:
    if strategy is None or not get_strategy_presentation(strategy).is_sharded_by_factor:
        return strategy or "strategy not stated"
    if world_size == 1:
        return f"{strategy}/unsharded"
    if sharding_factor is None or sharding_factor == world_size:
        return f"{strategy}/full_shard"
    return f"{strategy}/full_replication" if sharding_factor == 1 else f"{strategy}/hybrid_shard"


def _find_position(name: str, ordered_names: list[str]) -> int:
    return ordered_names.index(name) if name in ordered_names else len(ordered_names)


def format_number(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits, without an exponent where that can be read."""
    if value is None or math.isnan(value):
        return MISSING
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 0.0998 to 2 digits is 0.10, not 0.100
    magnitude = math.floor(math.log10(abs(rounded)))
    if magnitude < -4 or magnitude >= 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def format_percent(share: float, *, signed: bool = False) -> str:
    """A share in percent with two digits."""
    if math.isnan(share):
        return MISSING
    plus = "+" if signed and share > 0 else ""
    return f"{plus}{format_number(100 * share, 2)} %".replace("-", "−")


def format_interval(value: float, low: float, high: float) -> str:
    """Where the truth is expected, against a value: ``±10 %``, or ``−14/+32 %`` where that is not the same on either
    side."""
    below, above = (f"{100 * abs(bound / value - 1):.0f}" for bound in (low, high))
    return f"±{above} %" if below == above else f"−{below}/+{above} %"


def choose_memory_unit(largest_bytes: float) -> tuple[str, int]:
    """Name and size in bytes of the unit in which `largest_bytes` reads well."""
    if largest_bytes >= GIB / 10 or largest_bytes == 0:
        return "GiB", GIB
    return ("MiB", MIB) if largest_bytes >= MIB / 10 else ("KiB", KIB)


def format_memory(value: float | None) -> str:
    """Bytes with the unit that suits them."""
    if value is None or math.isnan(value):
        return MISSING
    unit, unit_bytes = choose_memory_unit(value)
    return f"{format_number(value / unit_bytes)} {unit}"


def format_seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one second."""
    if value is None or math.isnan(value):
        return MISSING
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(value * 1e3)} ms"


def format_count(value: float | None) -> str:
    """A large count with K, M, B or T."""
    if value is None or math.isnan(value):
        return MISSING
    for threshold, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= threshold:
            return f"{format_number(value / threshold)} {letter}"
    return f"{value:.0f}"


def format_ranks(world_size: int | None, device: str | None) -> str:
    """A world size in words: ``4 GPUs``, ``1 process``; a CPU process is never called a GPU."""
    return "world size not stated" if world_size is None else format_world_sizes([world_size], device)


def format_world_sizes(world_sizes: Sequence[int], device: str | None, max_items: int = 6) -> str:
    """Several of them: ``1, 2, 4 GPUs``."""
    noun = get_rank_noun(device) if list(world_sizes) == [1] else get_rank_nouns(device)
    return f"{format_list([str(size) for size in world_sizes], max_items)} {noun}"


def get_rank_noun(device: str | None) -> str:
    """What one rank is: ``GPU``, on a CPU ``process``, and ``rank`` where the row does not say."""
    return {"cuda": "GPU", "rocm": "GPU", "cpu": "process"}.get(device or "", "rank")


def get_rank_nouns(device: str | None) -> str:
    return {"cuda": "GPUs", "rocm": "GPUs", "cpu": "processes"}.get(device or "", "ranks")


def format_plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def build_slug(*parts: object) -> str:
    """A file name made of `parts`: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(str(part) for part in parts).lower()).strip("-")[:80].strip("-")


def format_list(items: Sequence[str], max_items: int = 6) -> str:
    """Items separated by commas; beyond `max_items`, how many more."""
    shown_items = ", ".join(items[:max_items])
    return shown_items if len(items) <= max_items else f"{shown_items} and {len(items) - max_items} more"
