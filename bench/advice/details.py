"""One prediction in full: where its memory and its time go, and what rules of thumb would have said."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench.advice.ranking import Row
from bench.advice.rules import Compared
from bench.advice.tables import reshard
from bench.advice.words import PARTS, gib, overrides, percent, strategy, untimed
from bench.reporting import labels
from bench.reporting.labels import number
from bench.simulate.prediction import PARTS as ALL_PARTS
from bench.simulate.prediction import Range


def row_details(row: Row, rules: Sequence[Compared]) -> list[RenderableType]:
    """Memory, time and rules of thumb of one row."""
    config = row.config
    gathered = {"yes": ", freed after forward", "no": ", kept until backward"}.get(reshard(config), "")
    title = (
        f"{strategy(config)}{gathered}, {config.precision.name}, checkpointing {config.activation_checkpointing}, "
        f"batch {config.batch_size_per_gpu} x {config.sequence_length}"
    )
    return [
        Text(title, style="bold"),
        Text(
            "python -m bench.sweep " + " ".join(overrides(row.settings)), style="dim", no_wrap=True, overflow="ignore"
        ),
        Text(),
        *_memory(row),
        Text(),
        *_time(row),
        Text(),
        *_rules(rules),
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _indented(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2), expand=False)


def _memory(row: Row) -> list[RenderableType]:
    memory = row.prediction.memory
    where = f"in {memory.phase}" + (f", {memory.module}" if memory.module else "")
    parts = _table("part at the peak", "GiB", "share")
    for name in ALL_PARTS:
        size = memory.parts.get(name, 0)
        parts.add_row(PARTS[name], gib(size), percent(size / max(memory.allocated.value, 1)))
    phases = ", ".join(f"{name} {gib(size)}" for name, size in memory.phase_peaks.items())
    ranges = ", ".join(
        f"{words} {_range(values)}"
        for words, values in (
            ("allocated", memory.allocated),
            ("reserved", memory.reserved),
            ("used on the device", memory.device_used),
        )
    )
    lines: list[RenderableType] = [Text(f"Memory: the peak is {where}"), _indented(parts)]
    lines.append(Text(f"  GiB (19 times of 20 within): {ranges}"))
    if phases:
        lines.append(Text(f"  GiB allocated at most in each phase: {phases}"))
    if memory.host:
        of = f" of {gib(memory.host_capacity)}" if memory.host_capacity is not None else ""
        lines.append(Text(f"  GiB kept in the machine's memory, per GPU: {gib(memory.host)}{of}"))
    if memory.others_bytes is not None:
        others = f"GPU 1 to {row.config.gpus - 1} allocate {gib(memory.others_bytes)} GiB each"
        lines.append(Text(f"  That is GPU 0, which keeps optimizer, all outputs and the sums of gradients; {others}."))
    if memory.capacity is not None and row.headroom_bytes is not None:
        left = row.headroom_bytes
        how = "left" if left >= 0 else "too little"
        free = f"{gib(abs(left))} GiB ({percent(abs(left) / memory.capacity)}) are {how}"
        largest = f"; the largest batch that fits is {row.largest_batch}" if row.largest_batch else ""
        verdict = "does not fit in the machine's memory" if memory.host_is_short else memory.verdict
        lines.append(Text(f"  Of {gib(memory.capacity)} GiB, {free}: {verdict}{largest}."))
    return lines


def _range(values: Range) -> str:
    return f"{gib(values.value)} ({gib(values.low)} to {gib(values.high)})"


def _time(row: Row) -> list[RenderableType]:
    time = row.prediction.time
    if time is None:
        return [Text(f"Time: not predicted, {untimed(row.config)}.")]
    table = _table("part of a step", "ms", "share")
    for words, value in (
        ("compute", time.compute_s),
        ("exposed communication", time.exposed_communication_s),
        ("optimizer", time.optimizer_s),
        ("bubbles", time.bubble_s),
        ("step", time.step_s.value),
    ):
        table.add_row(words, number(value * 1e3), percent(value / time.step_s.value))
    hidden = max(0.0, round(time.communication_s - time.exposed_communication_s, 12))
    step = f"{labels.seconds(time.step_s.low)} to {labels.seconds(time.step_s.high)}"
    degraded = " The allocator flushes and retries: the time is degraded." if time.degraded else ""
    return [
        Text(f"Time: limited by {time.limited_by}; a step takes {step} (19 times of 20).{degraded}"),
        _indented(table),
        Text(f"  Of {labels.seconds(time.communication_s)} of communication, {labels.seconds(hidden)} are hidden."),
        Text(
            f"  {number(row.tflops_per_gpu)} TFLOP/s per GPU of the model's own ({number(row.hardware_tflops_per_gpu)} "
            f"with recomputation), {number(row.tokens_per_second_per_gpu)} tokens/s per GPU."
        ),
    ]


def _rules(rules: Sequence[Compared]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False)
    table.add_column("rule of thumb", no_wrap=True)
    table.add_column("bytes per parameter", no_wrap=True)
    table.add_column("says GiB", justify="right", no_wrap=True)
    table.add_column("trace GiB", justify="right", no_wrap=True)
    table.add_column("why they differ")
    for compared in rules:
        memory = compared.memory
        traced = labels.MISSING if memory is None else gib(memory.allocated.value)
        table.add_row(compared.rule.name, compared.rule.formula, gib(compared.says_bytes), traced, compared.why)
    return [Text("Rules of thumb, per GPU (N: number of GPUs)"), _indented(table)]
