"""The answer for people: the advice, a ranked table, what does not fit and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.advice.answer import Answer, Section
from bench.advice.ranking import Ranking, Row
from bench.advice.reasons import hopeless, notes, states_bytes, why_not
from bench.advice.words import UNSHARDED, gib, percent, strategy
from bench.config import RunConfig
from bench.reporting import labels
from bench.reporting.labels import MISSING, number
from bench.simulate.prediction import FITS, TOO_CLOSE

STYLES = {FITS: "green", TOO_CLOSE: "yellow"}

ASSUMED = ("model", "hardware", "gpus", "sequence_length")
"""What a person is told where it was not given."""


def answer_tables(answer: Answer, tokens: float | None, top: int | None) -> RenderableType:
    """All sections, one below the other."""
    parts: list[RenderableType] = []
    for section in answer.sections:
        parts += [*section_tables(section, tokens, top), Text()]
    parts += [Text(f"Not possible: {question}: {reason}", style="yellow") for question, reason in answer.left_out]
    return Group(*parts) if answer.left_out else Group(*parts[:-1])


def section_tables(section: Section, tokens: float | None, top: int | None) -> list[RenderableType]:
    """The heading, the advice and the tables of one section."""
    parts: list[RenderableType] = [Text(_heading(section), style="bold"), Text(section.advice)]
    notices = list(dict.fromkeys(note for row in section.ranking.possible for note in notes(row.config)))
    parts += [Text(f"Note: {note}.", style="yellow") for note in notices]
    if section.ranking.possible:
        parts += [Text(), *_ranked(section.ranking.possible, tokens, top)]
    if section.ranking.infeasible:
        parts += [Text(), *_infeasible(section.ranking, top)]
    parts += [
        Text(f"Not possible ({labels.counted(count, 'candidate')}): {reason}", style="yellow")
        for reason, count in section.impossible.items()
    ]
    return parts


def _heading(section: Section) -> str:
    config = section.ranking.first.config
    capacity = section.ranking.first.prediction.memory.capacity
    memory = "memory unknown" if capacity is None else f"{gib(capacity)} GiB each for the allocator"
    per_node = f", {config.gpus_per_node} per node" if config.nodes > 1 else ""
    said = {key.partition(".")[0] for key in section.settings}
    assumed = [key for key in ("sequence_length", "gpus") if key not in said]
    default = f" (not given: {' and '.join(assumed)})" if assumed else ""
    return (
        f"{config.model.name}, {labels.count(config.model.num_parameters)} parameters, on "
        f"{labels.ranks(config.gpus, config.hardware.device)} {config.hardware.name} ({memory}{per_node}), "
        f"{config.sequence_length} tokens per sequence{default}"
    )


TOLD_ONCE = (
    "strategy",
    "F",
    "reshard",
    "offloaded",
    "precision",
    "checkpoint",
    "accumulate",
    "compile",
    "verdict",
    "limited by",
)
"""Columns that are no column where all rows say the same."""

UNREMARKABLE = (("accumulate", "1"), ("compile", "false"))
"""What is not even told."""

MOST_REASONS = 6
"""Lines on what does not fit, unless all are asked for."""

LARGEST = "Each at the largest batch that fits; batch_size_per_gpu=N compares all at one."

Column = tuple[str, bool, Callable[[Row], str]]
"""Heading, whether it is a number, and the text of a row."""


def _columns(tokens: float | None) -> list[Column]:
    columns: list[Column] = [
        ("strategy", False, lambda row: row.config.strategy.name),
        ("F", True, lambda row: str(row.config.strategy.factor)),
        ("reshard", False, lambda row: reshard(row.config)),
        ("offloaded", False, lambda row: row.config.strategy.offloaded or MISSING),
        ("precision", False, lambda row: row.config.precision.name),
        ("checkpoint", False, lambda row: row.config.activation_checkpointing),
        ("accumulate", True, lambda row: str(row.config.gradient_accumulation)),
        ("compile", False, lambda row: str(row.config.compile).lower()),
        ("batch", True, lambda row: str(row.config.batch_size_per_gpu)),
        ("largest", True, lambda row: MISSING if row.largest_batch is None else str(row.largest_batch)),
        ("TFLOP/s", True, lambda row: number(row.tflops_per_gpu)),
        ("MFU", True, lambda row: MISSING if row.mfu is None else f"{row.mfu:.1%}"),
        ("tokens/s/GPU", True, lambda row: number(row.tokens_per_second_per_gpu)),
        ("tokens/s", True, lambda row: labels.count(row.tokens_per_second)),
        ("tokens/step", True, lambda row: labels.count(row.tokens_per_step * row.config.gpus)),
        ("ms/step", True, _step),
        ("GiB", True, lambda row: gib(row.prediction.memory.reserved.value)),
        ("on host", True, lambda row: gib(row.prediction.memory.host) if row.prediction.memory.host else MISSING),
        ("free", True, _free),
        ("verdict", False, lambda row: row.prediction.memory.verdict or MISSING),
        ("limited by", False, _limit),
    ]
    if tokens is not None:
        columns += [
            ("GPU-hours", True, lambda row: number(row.gpu_hours(tokens))),
            ("days", True, lambda row: number(row.days(tokens))),
        ]
    return columns


def reshard(config: RunConfig) -> str:
    """Whether gathered parameters are freed after forward; a dash where nothing is gathered."""
    value = getattr(config.strategy, "reshard_after_forward", None)
    return MISSING if value is None or config.strategy.factor == 1 else "yes" if value else "no"


def _step(row: Row) -> str:
    time = row.prediction.time
    if time is None:
        return MISSING
    uncertain = (time.step_s.high - time.step_s.low) / 2 / time.step_s.value
    return f"{number(time.step_s.value * 1e3)} ±{percent(uncertain)}"


def _free(row: Row) -> str:
    capacity = row.prediction.memory.capacity
    return MISSING if capacity is None or row.headroom_bytes is None else percent(row.headroom_bytes / capacity)


def _limit(row: Row) -> str:
    time = row.prediction.time
    return MISSING if time is None else time.limited_by + (", degraded" if time.degraded else "")


def _ranked(rows: Sequence[Row], tokens: float | None, top: int | None) -> list[RenderableType]:
    """The table; a column that says the same in every row is told once, below."""
    shown = rows[:top]
    kept: list[Column] = []
    told: list[str] = []
    for column in _columns(tokens):
        heading, _, cell = column
        cells = {cell(row) for row in shown}
        if heading == "largest" and all(row.largest_batch == row.config.batch_size_per_gpu for row in rows):
            continue
        if cells == {MISSING}:
            continue
        if len(cells) > 1 or heading not in TOLD_ONCE:
            kept.append(column)
        elif (heading, *cells) not in UNREMARKABLE:
            told.append(f"{heading} {cells.pop()}")
    table = Table(box=None, pad_edge=False)
    table.add_column("#", justify="right")
    for heading, is_number, _ in kept:
        table.add_column(heading, no_wrap=True, justify="right" if is_number else "left")
    for rank, row in enumerate(shown, 1):
        style = STYLES.get(row.prediction.memory.verdict or "", "") if not row.fits else ""
        table.add_row(str(rank), *(cell(row) for _, _, cell in kept), style=style)
    parts: list[RenderableType] = [table]
    if told:
        parts.append(Text(f"In every row: {', '.join(told)}.", style="dim"))
    if all(row.largest_batch == row.config.batch_size_per_gpu for row in rows):
        parts.append(Text(LARGEST, style="dim"))
    if len(rows) > len(shown):
        parts.append(Text(f"{len(rows) - len(shown)} more: top=all shows them.", style="dim"))
    return parts


def _infeasible(ranking: Ranking, top: int | None) -> list[RenderableType]:
    """What surely does not fit: first, in one line, what no batch would make fit; then a line per way to shard."""
    lines: list[RenderableType] = [Text("Does not fit:", style="yellow")]
    never: dict[str, Row] = {}
    ways: dict[str, list[Row]] = {}
    for row in ranking.infeasible:
        if hopeless(row):
            never.setdefault(strategy(row.config).removesuffix(UNSHARDED), row)
        else:
            ways.setdefault(strategy(row.config), []).append(row)
    if never:
        capacity = ranking.infeasible[0].prediction.memory.capacity
        what = f"parameters, gradients and optimizer state alone, of {gib(capacity or 0)} GiB"
        named = ", ".join(f"{name} {gib(states_bytes(row))}" for name, row in never.items())
        lines.append(Text(f"  at any batch, for {what}: {named}"))
    fitting = {strategy(row.config) for row in ranking.possible}
    others = [way for way in ways if way not in fitting]
    shown = list(ways) if top is None else others[:MOST_REASONS]
    for way in shown:
        row = ways[way][0]
        knobs = f"checkpointing {row.config.activation_checkpointing}, {row.config.precision.name}"
        more = f"; {len(ways[way]) - 1} more with other knobs" if len(ways[way]) > 1 else ""
        lines.append(Text(f"  {way}, {knobs}: {why_not(row)}{more}"))
    left = sum(len(rows) for way, rows in ways.items() if way not in shown)
    if left:
        lines.append(Text(f"  {left} more combinations: top=all.", style="dim"))
    return lines
