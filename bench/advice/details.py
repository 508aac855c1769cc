"""One prediction in full: where its memory and its time go, and what rules of thumb would have said."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench.advice.ranking import RankedCandidate
from bench.advice.rules import RuleComparison
from bench.advice.sentence import (
    MEMORY_PART_LABELS,
    describe_missing_time,
    format_gib,
    format_overrides,
    format_percent,
    format_strategy,
)
from bench.advice.tables import format_reshard
from bench.prediction.prediction import MEMORY_PARTS as ALL_PARTS
from bench.prediction.prediction import PredictedRange
from bench.reporting.drawing import labels
from bench.reporting.drawing.labels import format_number


def build_candidate_details(
    candidate: RankedCandidate, rule_comparisons: Sequence[RuleComparison]
) -> list[RenderableType]:
    """Memory, time and rules of thumb of one row."""
    config = candidate.config
    reshard_text = {"yes": ", freed after forward", "no": ", kept until backward"}.get(format_reshard(config), "")
    title = (
        f"{format_strategy(config)}{reshard_text}, {config.precision.name}, checkpointing "
        f"{config.activation_checkpointing}, "
        f"batch {config.batch_size_per_gpu} x {config.sequence_length}"
    )
    return [
        Text(title, style="bold"),
        Text(
            "python -m bench.sweep " + " ".join(format_overrides(candidate.settings)),
            style="dim",
            no_wrap=True,
            overflow="ignore",
        ),
        Text(),
        *_build_memory_lines(candidate),
        Text(),
        *_build_time_lines(candidate),
        Text(),
        *_build_rules_lines(rule_comparisons),
    ]


def _build_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _indent_table(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2), expand=False)


def _build_memory_lines(candidate: RankedCandidate) -> list[RenderableType]:
    memory = candidate.prediction.memory
    peak_location = f"in {memory.phase}" + (f", {memory.module}" if memory.module else "")
    parts_table = _build_table("part at the peak", "GiB", "share")
    for name in ALL_PARTS:
        size = memory.parts.get(name, 0)
        parts_table.add_row(
            MEMORY_PART_LABELS[name], format_gib(size), format_percent(size / max(memory.allocated.value, 1))
        )
    phase_peaks = ", ".join(f"{name} {format_gib(size)}" for name, size in memory.phase_peaks.items())
    range_texts = ", ".join(
        f"{label} {_format_range(interval)}"
        for label, interval in (
            ("allocated", memory.allocated),
            ("reserved", memory.reserved),
            ("used on the device", memory.device_used),
        )
    )
    lines: list[RenderableType] = [Text(f"Memory: the peak is {peak_location}"), _indent_table(parts_table)]
    lines.append(Text(f"  GiB (19 times of 20 within): {range_texts}"))
    if phase_peaks:
        lines.append(Text(f"  GiB allocated at most in each phase: {phase_peaks}"))
    if memory.host:
        capacity_text = f" of {format_gib(memory.host_capacity)}" if memory.host_capacity is not None else ""
        lines.append(Text(f"  GiB kept in the machine's memory, per GPU: {format_gib(memory.host)}{capacity_text}"))
    if memory.others_bytes is not None:
        others_text = f"GPU 1 to {candidate.config.gpus - 1} allocate {format_gib(memory.others_bytes)} GiB each"
        lines.append(
            Text(f"  That is GPU 0, which keeps optimizer, all outputs and the sums of gradients; {others_text}.")
        )
    if memory.capacity is not None and candidate.headroom_bytes is not None:
        headroom_bytes = candidate.headroom_bytes
        headroom_label = "left" if headroom_bytes >= 0 else "too little"
        headroom_text = (
            f"{format_gib(abs(headroom_bytes))} GiB ({format_percent(abs(headroom_bytes) / memory.capacity)}) are "
            f"{headroom_label}"
        )
        largest_batch_text = (
            f"; the largest batch that fits is {candidate.largest_batch}" if candidate.largest_batch else ""
        )
        fit_label = "does not fit in the machine's memory" if memory.is_host_memory_short else memory.verdict
        lines.append(Text(f"  Of {format_gib(memory.capacity)} GiB, {headroom_text}: {fit_label}{largest_batch_text}."))
    return lines


def _format_range(interval: PredictedRange) -> str:
    return f"{format_gib(interval.value)} ({format_gib(interval.low)} to {format_gib(interval.high)})"


def _build_time_lines(candidate: RankedCandidate) -> list[RenderableType]:
    time = candidate.prediction.time
    if time is None:
        return [Text(f"Time: not predicted, {describe_missing_time(candidate.config)}.")]
    table = _build_table("part of a step", "ms", "share")
    for label, seconds in (
        ("compute", time.compute_s),
        ("exposed communication", time.exposed_communication_s),
        ("optimizer", time.optimizer_s),
        ("bubbles", time.bubble_s),
        ("step", time.step_s.value),
    ):
        table.add_row(label, format_number(seconds * 1e3), format_percent(seconds / time.step_s.value))
    hidden_communication_s = max(0.0, round(time.communication_s - time.exposed_communication_s, 12))
    step_range = f"{labels.format_seconds(time.step_s.low)} to {labels.format_seconds(time.step_s.high)}"
    degraded_text = " The allocator flushes and retries: the time is degraded." if time.degraded else ""
    return [
        Text(f"Time: limited by {time.limited_by}; a step takes {step_range} (19 times of 20).{degraded_text}"),
        _indent_table(table),
        Text(
            f"  Of {labels.format_seconds(time.communication_s)} of communication, "
            f"{labels.format_seconds(hidden_communication_s)} are hidden."
        ),
        Text(
            f"  {format_number(candidate.tflops_per_gpu)} TFLOP/s per GPU of the model's own "
            f"({format_number(candidate.hardware_tflops_per_gpu)} "
            f"with recomputation), {format_number(candidate.tokens_per_second_per_gpu)} tokens/s per GPU."
        ),
    ]


def _build_rules_lines(rule_comparisons: Sequence[RuleComparison]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False)
    table.add_column("rule of thumb", no_wrap=True)
    table.add_column("bytes per parameter", no_wrap=True)
    table.add_column("says GiB", justify="right", no_wrap=True)
    table.add_column("trace GiB", justify="right", no_wrap=True)
    table.add_column("why they differ")
    for comparison in rule_comparisons:
        memory = comparison.memory
        traced_gib = labels.MISSING if memory is None else format_gib(memory.allocated.value)
        table.add_row(
            comparison.rule.name,
            comparison.rule.formula,
            format_gib(comparison.rule_bytes),
            traced_gib,
            comparison.explanation,
        )
    return [Text("Rules of thumb, per GPU (N: number of GPUs)"), _indent_table(table)]
