"""What a search of layouts comes to, in sentences: which layout beats FSDP alone, by how much, and from where on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from bench.advice.candidates import build_candidates
from bench.advice.layouts.comparison import (
    GpuThreshold,
    LayoutComparison,
    compare_layouts,
    find_gpu_threshold,
    plan_layouts,
)
from bench.advice.layouts.search import KEPT_SLOWDOWN, LayoutSearch
from bench.advice.ranking import CandidateRanking, RankedCandidate, rank_candidates
from bench.advice.wording import format_strategy
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig
from bench.core import presentation
from bench.core.errors import ImpossibleError
from bench.core.presentation import format_percent
from bench.models.checkpointing import describe_checkpointing
from bench.strategies.mesh.layout import CONTEXT, EXPERT, PIPELINE, TENSOR
from bench.strategies.mesh.strategy import MeshStrategy

ALONE = "FSDP alone"
"""FSDP in every form that is compared, and DDP: what divides parameters at most."""

NOTHING_FITS = "nothing fits"


def name_layout_kind(config: RunConfig) -> str:
    """What of a model is divided beside parameters: ``tensor x pipeline``; `ALONE` for nothing."""
    if not isinstance(config.strategy, MeshStrategy):
        return ALONE
    layout = config.strategy.layout
    return " x ".join(name for name in (TENSOR, PIPELINE, CONTEXT, EXPERT) if layout.get_degree(name) > 1)


def describe_layout(candidate: RankedCandidate) -> str:
    """``tensor 8 x pipeline 4 x FSDP 16 (1f1b, 32 micro-batches) with full checkpointing``."""
    config = candidate.config
    strategy, checkpointing = config.strategy, describe_checkpointing(config.activation_checkpointing)
    if not isinstance(strategy, MeshStrategy):
        reduces_often = config.gradient_accumulation_sync and config.gradient_accumulation > 1
        suffix = ", gradients reduced after every micro-batch" if reduces_often else ""
        return f"{format_strategy(config)} with {checkpointing}{suffix}"
    layout = strategy.layout
    degrees = [f"{name} {degree}" for name, degree in reversed(layout.degrees) if degree > 1 and name in DIVIDED_DIMS]
    copies = config.gpus // layout.get_degree(*DIVIDED_DIMS)
    degrees += [f"{DATA_LABELS[strategy.data]} {copies}"] if copies > 1 else []
    micro_batches = strategy.micro_batches or config.gradient_accumulation
    count = "1 micro-batch" if micro_batches == 1 else f"{micro_batches:,} micro-batches"
    details = [strategy.schedule, count] if strategy.timetable is not None else [count]
    return f"{' x '.join(degrees)} ({', '.join(details)}) with {checkpointing}"


DIVIDED_DIMS = (PIPELINE, EXPERT, CONTEXT, TENSOR)
DATA_LABELS = {"fsdp": "FSDP", "ddp": "DDP", "zero1": "ZeRO-1", "none": "copies"}


def describe_layouts(comparison: LayoutComparison, threshold: GpuThreshold | None) -> str:
    """What the search found, from where on that holds, and how many layouts were looked at."""
    question = comparison.search.question
    tokens = question.global_sequences * question.model.count_tokens_per_sequence(question.sequence_length)
    batch = f"At a global batch of {presentation.format_count(tokens)} tokens ({question.global_sequences:,} sequences)"
    parts = [f"{batch}, {_describe_difference(comparison)}."]
    parts += [] if threshold is None else [_describe_gpu_threshold(threshold)]
    return " ".join([*parts, _describe_search(comparison.search)])


def answer_with_layouts(
    settings: RunSettings, knobs: Mapping[str, Sequence[str]], choice: str, ranking: CandidateRanking
) -> str:
    """The same for a question whose ranking is not at one global batch; empty where layouts are not searched.

    Parameters
    ----------
    ranking: CandidateRanking
        Of FSDP alone: where nothing of it fits, layouts are searched on few GPUs, too.
    """
    does_fit = any(candidate.does_fit for candidate in ranking.possible)
    question = plan_layouts(settings, knobs, choice, is_forced=not does_fit)
    if question is None:
        return ""
    try:
        alone, reason = rank_candidates(build_candidates(question.settings, knobs).to_predict), ""
    except ImpossibleError as error:
        alone, reason = CandidateRanking(), str(error).rstrip(".")
    comparison = compare_layouts(question, alone, reason)
    return describe_layouts(comparison, find_gpu_threshold(comparison, knobs))


def _describe_difference(comparison: LayoutComparison) -> str:
    layout, alone = comparison.best_layout, comparison.best_alone
    if layout is None:
        return f"no layout fits{'' if alone is None else f', and {ALONE} is the best'}"
    if alone is None:
        return f"{ALONE} is not possible, since {comparison.alone_reason}: {describe_layout(layout)} is the best layout"
    difference = alone.step_s / layout.step_s - 1
    certainty = "within" if do_intervals_overlap(layout, alone) else "beyond"
    uncertainty = f"{certainty} the predictor's uncertainty ({_format_interval(layout)})"
    if difference > 0:
        return (
            f"{ALONE} is not the best: {describe_layout(layout)} is {format_percent(difference)} faster than "
            f"{describe_layout(alone)}, {uncertainty}"
        )
    return (
        f"{ALONE} is the best ({describe_layout(alone)}): the fastest layout, {describe_layout(layout)}, takes "
        f"{format_percent(layout.step_s / alone.step_s - 1)} longer, {uncertainty}"
    )


def do_intervals_overlap(first: RankedCandidate, second: RankedCandidate) -> bool:
    """Of the step times."""
    assert first.prediction.time is not None
    assert second.prediction.time is not None
    one, other = first.prediction.time.step_s, second.prediction.time.step_s
    return one.low <= other.high and other.low <= one.high


def _format_interval(candidate: RankedCandidate) -> str:
    assert candidate.prediction.time is not None
    step_s = candidate.prediction.time.step_s
    return presentation.format_interval(step_s.value, step_s.low, step_s.high)


def _describe_gpu_threshold(threshold: GpuThreshold) -> str:
    tried = f"{threshold.tried[0]:,} to {threshold.tried[-1]:,} GPUs"
    if len(threshold.tried) == 1:
        return ""
    if threshold.first_layout is None:
        return f"The same layouts at this batch on {tried}: {ALONE} is the best on all."
    if threshold.first_layout == threshold.tried[0]:
        return f"The same layouts at this batch on {tried}: {ALONE} is the best on none."
    reason = ", which are more than there are sequences" if threshold.first_layout > threshold.global_sequences else ""
    return (
        f"The same layouts at this batch on {tried}: from {threshold.first_layout:,} GPUs on{reason}, {ALONE} is no "
        "longer the best."
    )


def _describe_search(search: LayoutSearch) -> str:
    """How many layouts there are, and why most were not predicted."""
    reasons = []
    if search.num_too_large:
        reasons.append(f"{search.num_too_large:,} need more memory than there is")
    if search.num_too_slow:
        reasons.append(
            f"{search.num_too_slow:,} are more than {KEPT_SLOWDOWN:.0%} slower than the best, by lower bounds"
        )
    num_impossible = sum(search.impossible_reasons.values())
    reasons += [f"{num_impossible:,} cannot be"] if num_impossible else []
    others = f"; of the others {', '.join(reasons)}" if reasons else ""
    return f"{len(search.predicted):,} of {search.num_layouts:,} layouts were predicted{others}."


# --- From where on, of several tables that differ in one setting.


def describe_thresholds(
    comparisons: Sequence[tuple[Mapping[str, str], LayoutComparison | None]], asked_keys: Sequence[str] = ()
) -> list[str]:
    """``hardware=h100_80gb model=llama3_70b: from gpus=256 on FSDP alone is no longer the best`` for every setting that
    takes several values, the others being equal; in ascending order of GPUs, of parameters and of the network.

    Parameters
    ----------
    comparisons: sequence of (settings, comparison)
        Of every table.
    asked_keys: sequence of str
        Settings to look at; none for all.
    """
    known = [
        (settings, comparison)
        for settings, comparison in comparisons
        if comparison is not None and (comparison.best_layout is not None or comparison.best_alone is not None)
    ]
    keys = [key for key in THRESHOLD_KEYS if len({settings.get(key) for settings, _ in known}) > 1]
    sentences = []
    for key in [key for key in keys if not asked_keys or key in asked_keys]:
        others = [other for other in keys if other != key]
        groups: dict[tuple[str, ...], list[tuple[Mapping[str, str], LayoutComparison]]] = {}
        for settings, comparison in known:
            groups.setdefault(tuple(f"{other}={settings[other]}" for other in others), []).append(
                (settings, comparison)
            )
        for name, group in groups.items():
            ordered = sorted(group, key=lambda entry: THRESHOLD_KEYS[key](entry[1]))
            sentences.append(_describe_threshold(key, " ".join(name), ordered))
    return sentences


def _find_node_bandwidth(config: RunConfig) -> float:
    """Of a node's adapters, GB/s."""
    assert config.hardware.speeds is not None
    return config.hardware.speeds.links.node_gb_s


THRESHOLD_KEYS: dict[str, Callable[[LayoutComparison], float]] = {
    "gpus": lambda comparison: comparison.search.question.gpus,
    "model": lambda comparison: comparison.search.question.model.num_parameters,
    "network": lambda comparison: -_find_node_bandwidth(comparison.search.question.subject),
}
"""Settings with an order, and by what: networks from the fastest down."""


def _describe_threshold(key: str, name: str, ordered: Sequence[tuple[Mapping[str, str], LayoutComparison]]) -> str:
    prefix = f"{name}: " if name else ""
    is_best = [comparison.is_layout_best for _, comparison in ordered]
    values = [settings[key] for settings, _ in ordered]
    if not any(is_best):
        return f"{prefix}{ALONE} is the best at every {key}={','.join(values)}."
    if all(is_best):
        return f"{prefix}{ALONE} is not the best at any of {key}={','.join(values)}."
    changes = [index for index, (one, other) in enumerate(itertools.pairwise(is_best), 1) if one != other]
    if len(changes) == 1 and is_best[-1]:
        return f"{prefix}from {key}={values[changes[0]]} on {ALONE} is no longer the best."
    best_values = [value for value, layout_best in zip(values, is_best, strict=True) if layout_best]
    return f"{prefix}{ALONE} is not the best at {key}={','.join(best_values)}."
