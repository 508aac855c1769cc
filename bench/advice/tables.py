"""The answer for people: the advice, a ranked table, what does not fit and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bench.advice.answer import AdviceAnswer, AdviceSection, RuleComparison
from bench.advice.budget import TrainingBudget
from bench.advice.cost_tables import CandidateColumn, build_cost_table, list_budget_columns
from bench.advice.layouts.sentence import describe_thresholds
from bench.advice.misfits import count_state_bytes, describe_misfit, is_too_large_at_any_batch, list_notes
from bench.advice.ranking import CandidateRanking, RankedCandidate
from bench.advice.sentence import describe_assumed_network, describe_not_given
from bench.advice.wording import (
    MEMORY_PART_LABELS,
    NO_RESHARD_SUFFIX,
    describe_missing_time,
    format_accumulation,
    format_batch,
    format_gib,
    format_overrides,
    format_percent,
    format_strategy,
    format_strategy_name,
)
from bench.config.flop_conventions import compute_convention_tflops
from bench.config.run_config import RunConfig
from bench.core import presentation
from bench.core.presentation import MISSING, format_interval, format_number, format_plural
from bench.prediction.prediction import FITS, TOO_CLOSE, PredictedRange
from bench.prediction.prediction import MEMORY_PARTS as ALL_PARTS

FIT_STYLES = {FITS: "green", TOO_CLOSE: "yellow"}


def build_answer_tables(
    answer: AdviceAnswer, budget: TrainingBudget, max_rows: int | None, flops: str = "model"
) -> RenderableType:
    """All sections, one below the other.

    Raises
    ------
    ImpossibleError
        If the formula of what `flops` says to count is not for a model.
    """
    renderables: list[RenderableType] = []
    for section in answer.sections:
        renderables += [*build_section_tables(section, budget, max_rows, flops), Text()]
    if budget.cost_terms.offers and len(answer.sections) > 1:
        renderables += [build_cost_table(answer.sections, budget), Text()]
    thresholds = describe_thresholds([(section.settings, section.layouts) for section in answer.sections])
    renderables += [item for sentence in thresholds for item in (Text(sentence), Text())]
    renderables += [
        Text(f"Not possible: {question}: {reason}", style="yellow") for question, reason in answer.skipped_sections
    ]
    return Group(*renderables) if answer.skipped_sections else Group(*renderables[:-1])


def build_section_tables(
    section: AdviceSection, budget: TrainingBudget, max_rows: int | None, flops: str = "model"
) -> list[RenderableType]:
    """What is assumed of the network, the heading, the advice and the tables of one section."""
    renderables: list[RenderableType] = [
        Text(describe_assumed_network(section.ranking.top_candidate.config, section.settings)),
        Text(_format_heading(section), style="bold"),
        Text(section.advice),
        *([Text(section.layouts_text)] if section.layouts_text else []),
    ]
    unique_notes = list(
        dict.fromkeys(note for candidate in section.ranking.possible for note in list_notes(candidate.config))
    )
    renderables += [Text(f"Note: {note}.", style="yellow") for note in (*section.warnings, *unique_notes)]
    if section.ranking.possible:
        renderables += [Text(), *_build_ranked_table(section.ranking.possible, budget, max_rows, flops)]
        config = section.ranking.top_candidate.config
        renderables += [Text(sentence, style="dim") for sentence in budget.describe(config)]
    if section.ranking.infeasible:
        renderables += [Text(), *_build_infeasible_lines(section.ranking, max_rows)]
    renderables += [
        Text(f"Not possible ({presentation.format_plural(count, 'candidate')}): {reason}", style="yellow")
        for reason, count in section.impossible_reasons.items()
    ]
    return renderables


def _format_heading(section: AdviceSection) -> str:
    config = section.ranking.top_candidate.config
    capacity = section.ranking.top_candidate.prediction.memory.capacity
    memory_text = "memory unknown" if capacity is None else f"{format_gib(capacity)} GiB each for the allocator"
    per_node_text = f", {config.gpus_per_node} per node" if config.nodes > 1 else ""
    return (
        f"{config.model.name}, {presentation.format_count(config.model.num_parameters)} parameters, on "
        f"{presentation.format_ranks(config.gpus, config.hardware.device)} {config.hardware.name} "
        f"({memory_text}{per_node_text}), "
        f"{config.sequence_length} tokens per sequence{describe_not_given(config, section.not_given)}"
    )


COLLAPSIBLE_COLUMNS = (
    "strategy",
    "F",
    "reshard",
    "offloaded",
    "precision",
    "checkpoint",
    "accumulate",
    "compile",
    "loss",
    "verdict",
    "limited by",
)
"""Columns that are no column where all rows say the same."""

OMITTED_WITH_LAYOUTS = ("TFLOP/s", "tokens/step", "largest")

OMITTED_VALUES = (("accumulate", "1"), ("compile", "false"), ("loss", "whole"))
"""What is not even told."""

MAX_REASON_LINES = 6
"""Lines on what does not fit, unless all are asked for."""

LARGEST_BATCH_NOTE = "Each at the largest batch that fits; batch_size_per_gpu=N compares all at one."
GLOBAL_BATCH_NOTE = "All at global_batch={batch}, each in the largest micro-batches of it that fit."


def _list_speed_columns(flops: str) -> list[CandidateColumn]:
    """TFLOP/s and MFU, named after what they count where that is not the suite's count of the model's FLOPs."""

    def compute(candidate: RankedCandidate) -> tuple[float | None, float | None]:
        time = candidate.prediction.time
        return (None, None) if time is None else compute_convention_tflops(flops, candidate.config, time.step_s.value)

    suffix = "" if flops == "model" else f" ({flops})"
    return [
        (f"TFLOP/s{suffix}", True, lambda candidate: format_number(compute(candidate)[0])),
        (f"MFU{suffix}", True, lambda candidate: _format_share(compute(candidate)[1])),
    ]


def _format_share(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _list_columns(budget: TrainingBudget, flops: str) -> list[CandidateColumn]:
    columns: list[CandidateColumn] = [
        ("strategy", False, lambda candidate: format_strategy_name(candidate.config)),
        ("F", True, lambda candidate: str(candidate.config.strategy.count_divided_ranks(candidate.config.gpus))),
        ("reshard", False, lambda candidate: format_reshard(candidate.config)),
        ("offloaded", False, lambda candidate: candidate.config.strategy.offloaded_state or MISSING),
        ("precision", False, lambda candidate: candidate.config.precision.name),
        ("checkpoint", False, lambda candidate: candidate.config.activation_checkpointing),
        ("accumulate", True, lambda candidate: format_accumulation(candidate.config)),
        ("compile", False, lambda candidate: str(candidate.config.compile).lower()),
        ("loss", False, lambda candidate: candidate.config.loss),
        ("batch", True, lambda candidate: format_batch(candidate.config)),
        (
            "largest",
            True,
            lambda candidate: MISSING if candidate.largest_batch is None else str(candidate.largest_batch),
        ),
        *_list_speed_columns(flops),
        ("tokens/s/GPU", True, lambda candidate: format_number(candidate.tokens_per_second_per_gpu)),
        ("tokens/s", True, lambda candidate: presentation.format_count(candidate.tokens_per_second)),
        (
            "tokens/step",
            True,
            lambda candidate: presentation.format_count(candidate.config.tokens_per_step),
        ),
        ("ms/step", True, _format_step_time),
        ("GiB", True, lambda candidate: format_gib(candidate.prediction.memory.reserved.value)),
        (
            "on host",
            True,
            lambda candidate: (
                format_gib(candidate.prediction.memory.host) if candidate.prediction.memory.host else MISSING
            ),
        ),
        ("free", True, _format_free_memory),
        ("verdict", False, lambda candidate: candidate.prediction.memory.verdict or MISSING),
        ("limited by", False, _format_limit),
    ]
    return [*columns, *list_budget_columns(budget)]


def format_reshard(config: RunConfig) -> str:
    """Whether gathered parameters are freed after forward; a dash where nothing is gathered."""
    reshard_after_forward = getattr(config.strategy, "reshard_after_forward", None)
    return (
        MISSING
        if reshard_after_forward is None or config.strategy.resolved_sharding_factor == 1
        else "yes"
        if reshard_after_forward
        else "no"
    )


def _format_step_time(candidate: RankedCandidate) -> str:
    time = candidate.prediction.time
    if time is None:
        return MISSING
    step_s = time.step_s
    return f"{format_number(step_s.value * 1e3)} {format_interval(step_s.value, step_s.low, step_s.high)}"


def _format_free_memory(candidate: RankedCandidate) -> str:
    capacity = candidate.prediction.memory.capacity
    return (
        MISSING
        if capacity is None or candidate.headroom_bytes is None
        else format_percent(candidate.headroom_bytes / capacity)
    )


def _format_limit(candidate: RankedCandidate) -> str:
    time = candidate.prediction.time
    return MISSING if time is None else time.limited_by + (", degraded" if time.degraded else "")


def _build_ranked_table(
    candidates: Sequence[RankedCandidate], budget: TrainingBudget, max_rows: int | None, flops: str
) -> list[RenderableType]:
    """The table; a column that says the same in every row is told once, below."""
    shown_candidates = candidates[:max_rows]
    shown_columns: list[CandidateColumn] = []
    constant_values: list[str] = []
    has_layouts = any(candidate.config.strategy.name == "mesh" for candidate in candidates)
    for column in _list_columns(budget, flops):
        heading, _, format_cell = column
        cells = {format_cell(candidate) for candidate in shown_candidates}
        if heading == "largest" and all(
            candidate.largest_batch in (None, candidate.config.batch_size_per_gpu) for candidate in candidates
        ):
            continue
        if cells == {MISSING} or (has_layouts and heading.partition(" ")[0] in OMITTED_WITH_LAYOUTS):
            continue
        if len(cells) > 1 or heading not in COLLAPSIBLE_COLUMNS:
            shown_columns.append(column)
        elif (heading, *cells) not in OMITTED_VALUES:
            constant_values.append(f"{heading} {cells.pop()}")
    table = Table(box=None, pad_edge=False)
    table.add_column("#", justify="right")
    for heading, is_number, _ in shown_columns:
        table.add_column(heading, no_wrap=True, justify="right" if is_number else "left")
    for rank, candidate in enumerate(shown_candidates, 1):
        style = FIT_STYLES.get(candidate.prediction.memory.verdict or "", "") if not candidate.does_fit else ""
        table.add_row(str(rank), *(format_cell(candidate) for _, _, format_cell in shown_columns), style=style)
    renderables: list[RenderableType] = [table]
    if constant_values:
        renderables.append(Text(f"In every row: {', '.join(constant_values)}.", style="dim"))
    if all(candidate.largest_batch == candidate.config.batch_size_per_gpu for candidate in candidates):
        global_batch = candidates[0].config.global_batch
        note = LARGEST_BATCH_NOTE if global_batch is None else GLOBAL_BATCH_NOTE.format(batch=global_batch.text)
        renderables.append(Text(note, style="dim"))
    if len(candidates) > len(shown_candidates):
        renderables.append(Text(f"{len(candidates) - len(shown_candidates)} more: top=all shows them.", style="dim"))
    return renderables


def _build_infeasible_lines(ranking: CandidateRanking, max_rows: int | None) -> list[RenderableType]:
    """What surely does not fit: first, in one line, what no batch would make fit; then a line per way to shard."""
    lines: list[RenderableType] = [Text("Does not fit:", style="yellow")]
    oversized_by_strategy: dict[str, RankedCandidate] = {}
    infeasible_by_strategy: dict[str, list[RankedCandidate]] = {}
    for candidate in ranking.infeasible:
        if is_too_large_at_any_batch(candidate):
            oversized_by_strategy.setdefault(
                format_strategy(candidate.config).removesuffix(NO_RESHARD_SUFFIX), candidate
            )
        else:
            infeasible_by_strategy.setdefault(format_strategy(candidate.config), []).append(candidate)
    fitting_strategies = {format_strategy(candidate.config) for candidate in ranking.possible}
    for strategy_label in (*fitting_strategies, *infeasible_by_strategy):
        oversized_by_strategy.pop(strategy_label, None)  # too large with some other knobs
    if oversized_by_strategy:
        capacity = ranking.infeasible[0].prediction.memory.capacity
        states_text = f"parameters, gradients and optimizer state alone, of {format_gib(capacity or 0)} GiB"
        sizes_text = ", ".join(
            f"{name} {format_gib(count_state_bytes(candidate))}" for name, candidate in oversized_by_strategy.items()
        )
        lines.append(Text(f"  at any batch, for {states_text}: {sizes_text}"))
    other_strategies = [
        strategy_label for strategy_label in infeasible_by_strategy if strategy_label not in fitting_strategies
    ]
    shown_strategies = list(infeasible_by_strategy) if max_rows is None else other_strategies[:MAX_REASON_LINES]
    for strategy_label in shown_strategies:
        candidate = infeasible_by_strategy[strategy_label][0]
        knobs_text = f"checkpointing {candidate.config.activation_checkpointing}, {candidate.config.precision.name}"
        more_text = (
            f"; {len(infeasible_by_strategy[strategy_label]) - 1} more with other knobs"
            if len(infeasible_by_strategy[strategy_label]) > 1
            else ""
        )
        lines.append(Text(f"  {strategy_label}, {knobs_text}: {describe_misfit(candidate)}{more_text}"))
    hidden_count = sum(
        len(candidates)
        for strategy_label, candidates in infeasible_by_strategy.items()
        if strategy_label not in shown_strategies
    )
    if hidden_count:
        lines.append(Text(f"  {format_plural(hidden_count, 'more combination')}: top=all.", style="dim"))
    return lines


# --- One prediction in full: where its memory and its time go, and what rules of thumb would have said.


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
    step_range = f"{presentation.format_seconds(time.step_s.low)} to {presentation.format_seconds(time.step_s.high)}"
    degraded_text = " The allocator flushes and retries: the time is degraded." if time.degraded else ""
    return [
        Text(f"Time: limited by {time.limited_by}; a step takes {step_range} (19 times of 20).{degraded_text}"),
        _indent_table(table),
        Text(
            f"  Of {presentation.format_seconds(time.communication_s)} of communication, "
            f"{presentation.format_seconds(hidden_communication_s)} are hidden."
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
        traced_gib = presentation.MISSING if memory is None else format_gib(memory.allocated.value)
        table.add_row(
            comparison.rule.name,
            comparison.rule.formula,
            format_gib(comparison.rule_bytes),
            traced_gib,
            comparison.explanation,
        )
    return [Text("Rules of thumb, per GPU (N: number of GPUs)"), _indent_table(table)]
