"""The guide's answer for people: a page with the path, the leaf, what it names, and the ranking beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.advice.reasons import why_not
from bench.advice.words import gib
from bench.guide.guide import Guidance
from bench.guide.names import NAMES
from bench.guide.title import title
from bench.guide.tree import SOURCE, worded
from bench.guide.weighing import Weighed
from bench.reporting.labels import MISSING, number


def pages(found: Sequence[Guidance]) -> RenderableType:
    """A page per case, one below the other, and where the tree is from."""
    parts: list[RenderableType] = []
    for guidance in found:
        parts += [*page(guidance), Text()]
    parts.append(Text(f"The tree's general advice is that of {SOURCE}; every number is predicted.", style="dim"))
    return Group(*parts)


def page(guidance: Guidance) -> list[RenderableType]:
    """The page of one case."""
    return [
        Text(title(guidance.case), style="bold"),
        Text(),
        _steps(guidance),
        Text(),
        Text.assemble(
            "→ ", (guidance.leaf.key, "bold"), ". ", worded(guidance.leaf.advice, guidance.case.config.hardware.device)
        ),
        Text(),
        _ways(guidance.ways, guidance.case.config.hardware.device),
        Text(),
        Text.assemble(("Ranked prediction: ", "bold"), guidance.advice),
        Text.assemble(("Tree and ranking: ", "bold"), guidance.agreement),
        *_commands(guidance),
    ]


def names_table() -> RenderableType:
    """Every name of the field, and what it is here."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "here", "when"):
        table.add_column(heading, overflow="fold")
    for name in NAMES:
        table.add_row(Text(name.name, style="bold"), name.here or name.instead, name.when)
    return table


def _steps(guidance: Guidance) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    device = guidance.case.config.hardware.device
    for taken in guidance.path:
        found = taken.answered
        answer = (f"→ {worded(found.answer, device)}" + (" (assumed)" if found.assumed else ""), "bold cyan")
        text = Text.assemble((worded(taken.step.question, device), "bold"), " ", answer, "\n", found.because, ".\n")
        text.append(found.source, style="dim")
        table.add_row(f"{taken.number}.", text)
    return table


def _ways(ways: Sequence[Weighed], device: str) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    table.add_column("what the tree names", overflow="fold")
    for heading in ("batch", "GiB", "tokens/s/GPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("predicted", overflow="fold")
    for each in ways:
        name = Text(each.way.name)
        name.append(f" – {worded(each.way.remark, device)}" if each.way.remark else "", style="dim")
        row = each.row
        if row is None:
            table.add_row(name, MISSING, MISSING, MISSING, each.why_none)
            continue
        memory = row.prediction.memory
        verdict = memory.verdict or "memory unknown"
        speed = number(row.tokens_per_second_per_gpu) if row.prediction.time is not None and row.possible else MISSING
        note = f"{verdict}, checkpointing {row.config.activation_checkpointing}"
        note += f", precision {row.config.precision.name}" if "precision" in each.settings else ""
        note += "" if row.prediction.time is not None else "; time not predicted"
        note += f": {why_not(row)}" if memory.host_is_short else ""
        table.add_row(name, str(row.config.batch_size_per_gpu), gib(memory.reserved.value), speed, note)
    return table


def _commands(guidance: Guidance) -> list[RenderableType]:
    """What to type for each way; commands are never broken, so that they can be copied."""
    parts: list[RenderableType] = []
    for each in guidance.ways:
        surely_not = each.row is not None and not each.row.possible
        typed = {"run": each.sweep(guidance.case), "predict": each.predict(guidance.case)}
        commands = {verb: command for verb, command in typed.items() if command is not None and not surely_not}
        if commands:
            parts += [Text(), Text(f"{each.way.name}: {', and '.join(f'to {verb} it' for verb in commands)},")]
            parts += [Text(f"  {command}", no_wrap=True, overflow="ignore") for command in commands.values()]
    return parts
