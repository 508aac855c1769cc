"""When layouts are searched, at which global batch, and how they compare with FSDP alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.advice.candidates import COMPARED_BUDGETS, build_candidates, choose_default_precision, require_peak
from bench.advice.layouts.layouts import Layout, LayoutQuestion, list_layouts
from bench.advice.layouts.search import LayoutPredictor, LayoutSearch, search_layouts
from bench.advice.ranking import (
    TRAINING_STATE_BYTES,
    CandidateRanking,
    RankedCandidate,
    list_faster_candidates,
    rank_candidates,
)
from bench.config.compose import compose_config
from bench.config.global_batch import MAX_ACCUMULATION, parse_global_batch
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.models.base import BUDGET
from bench.models.checkpointing import CHECKPOINTING_MODES
from bench.prediction.parameter_facts import find_parameter_facts
from bench.strategies.mesh.strategy import MeshStrategy

MIN_GPUS = 65
"""From which on layouts are searched."""

MAX_STATE_SHARE = 0.5
"""Of a GPU's memory: layouts are searched where training state, sharded over all GPUs, takes more."""

MAX_SEQUENCES_PER_GPU = 256
"""Of a global batch where none is asked for: short sequences would come to more micro-batches than a step may have."""

DEFAULT_STEP_TOKENS = 4 * 2**20
"""Of a global batch where none is asked for: what large models are trained with (Llama 3 405B: 4M at first, Llama Team
2024, arXiv:2407.21783, section 3.4.1)."""

UNSEARCHED_KNOBS = ("strategy", "batch_size_per_gpu", "gradient_accumulation", "compile", "loss")
"""What decides how a run is laid out, or what most layouts cannot have."""


@dataclass(frozen=True)
class LayoutComparison:
    """The fastest layout beside the fastest of the ways to shard that have no other parallelism."""

    search: LayoutSearch
    best_layout: RankedCandidate | None
    best_alone: RankedCandidate | None
    alone_reason: str
    """Why there is no `best_alone`."""

    @property
    def is_layout_best(self) -> bool:
        if self.best_layout is None:
            return False
        return self.best_alone is None or self.best_layout.step_s < self.best_alone.step_s


def plan_layouts(
    settings: RunSettings, knobs: Mapping[str, Sequence[str]], choice: str, *, is_forced: bool = False
) -> LayoutQuestion | None:
    """What layouts to search for a table of an answer, None for none.

    Parameters
    ----------
    choice: str
        ``auto``, ``all`` or ``none``.
    is_forced: bool
        Whether they are searched although `choice` is ``auto`` and there are few GPUs: nothing else fits.

    Raises
    ------
    UsageError
        If ``all`` was asked for together with what leaves nothing to search.
    """
    fixed = [key for key in knobs if key.lstrip("+").partition(".")[0] in UNSEARCHED_KNOBS]
    if choice == "all" and fixed:
        raise UsageError(
            f"layouts=all is not valid with {fixed[0]}={','.join(knobs[fixed[0]])}, which a search of layouts varies: "
            "leave one of them out."
        )
    if choice == "none" or fixed:
        return None
    try:
        subject = _build_subject(settings, knobs)
    except ImpossibleError:
        return None
    is_predicted = subject.hardware.speeds is not None and subject.hardware.device != "cpu"
    if not is_predicted or subject.finetune.name not in MeshStrategy.supported_finetunes:
        if choice == "all":
            raise UsageError(
                f"layouts=all is not valid with hardware={subject.hardware.name} and finetune={subject.finetune.name}: "
                "choose a GPU whose speeds are described, and "
                f"finetune={' or '.join(MeshStrategy.supported_finetunes)}."
            )
        return None
    tokens_per_sequence = subject.model.count_tokens_per_sequence(subject.sequence_length)
    text = settings.get("global_batch")
    sequences = (
        _choose_global_sequences(subject.gpus, tokens_per_sequence)
        if text in (None, "null")
        else _count_sequences(str(text), tokens_per_sequence)
    )
    is_wanted = choice == "all" or is_forced or subject.gpus >= MIN_GPUS or sequences < subject.gpus
    if not is_wanted and not _is_state_large(subject):
        return None
    modes = [
        mode
        for asked in knobs.get("activation_checkpointing", CHECKPOINTING_MODES)
        for mode in (COMPARED_BUDGETS if asked == BUDGET else (asked,))
    ]
    question = LayoutQuestion(
        {**settings, "precision": subject.precision.name, "global_batch": str(sequences)},
        subject.model,
        subject.gpus,
        subject.gpus_per_node,
        subject.sequence_length,
        sequences,
        tuple(modes),
        subject,
    )
    if next(list_layouts(question), None) is not None:
        return question
    if choice == "all":
        raise UsageError(
            f"layouts=all is not valid for model={subject.model.name} on gpus={subject.gpus} at a global batch of "
            f"{sequences} sequences, which nothing divides: choose other gpus, another global_batch or layouts=none."
        )
    return None


def _build_subject(settings: RunSettings, knobs: Mapping[str, Sequence[str]]) -> RunConfig:
    """A run of what is asked about, at batch 1. Raises `ImpossibleError` where the device has no such format."""
    composed = compose_config({key: value for key, value in settings.items() if key != "global_batch"})
    precision = knobs.get("precision", [choose_default_precision(composed["hardware"])])[0]
    run = {key: value for key, value in settings.items() if key != "global_batch"}
    subject = build_run_config(
        compose_config(
            {**run, "precision": precision, "strategy": "fsdp", "batch_size_per_gpu": "1", "mode": "predict"}
        )
    )
    require_peak(subject.hardware, subject.precision)
    return subject


def _choose_global_sequences(gpus: int, tokens_per_sequence: int) -> int:
    """As many as come to `DEFAULT_STEP_TOKENS`, within `MAX_SEQUENCES_PER_GPU`; a whole number for each GPU where
    that is one at least."""
    sequences = max(1, min(DEFAULT_STEP_TOKENS // tokens_per_sequence, MAX_SEQUENCES_PER_GPU * gpus))
    return sequences // gpus * gpus if sequences >= gpus else sequences


def _count_sequences(text: str, tokens_per_sequence: int) -> int:
    global_batch = parse_global_batch(text)
    if not global_batch.counts_tokens:
        return global_batch.count
    if global_batch.count % tokens_per_sequence:
        global_batch.compute_accumulation(1, 1, tokens_per_sequence)
    return global_batch.count // tokens_per_sequence


def _is_state_large(subject: RunConfig) -> bool:
    memory_gb = subject.hardware.memory_gb
    trains_all = subject.finetune.name == "full"
    bytes_per_parameter = TRAINING_STATE_BYTES if trains_all else subject.precision.parameter_itemsize
    state_gb = bytes_per_parameter * find_parameter_facts(subject.model).count / subject.gpus / 1e9
    return memory_gb is not None and state_gb > MAX_STATE_SHARE * memory_gb


def compare_layouts(question: LayoutQuestion, ranking: CandidateRanking, alone_reason: str = "") -> LayoutComparison:
    """Search layouts, and add what was predicted of them to a ranking at the same global batch.

    Parameters
    ----------
    alone_reason: str
        Why there is nothing in the ranking, where there is nothing.
    """
    best_alone = find_fastest(ranking.possible)
    search = search_layouts(question, float("inf") if best_alone is None else best_alone.step_s)
    ranking.possible += [candidate for candidate in search.predicted if candidate.can_fit]
    ranking.possible.sort(key=lambda candidate: candidate.step_s)
    if not ranking.possible:
        ranking.infeasible += search.predicted
    reason = alone_reason or "it does not fit"
    return LayoutComparison(search, search.best, best_alone, "" if best_alone else reason)


def find_fastest(candidates: Sequence[RankedCandidate]) -> RankedCandidate | None:
    """Of those that are predicted to fit."""
    fitting = [candidate for candidate in candidates if candidate.does_fit]
    return min(fitting, key=lambda candidate: candidate.step_s, default=None)


# --- The same layouts on other numbers of GPUs.

NUM_OTHER_COUNTS = 3
"""Doublings or halvings of the number of GPUs that are looked at."""

NUM_RESCALED = 8
"""Fastest layouts that are."""


@dataclass(frozen=True)
class GpuThreshold:
    """Where FSDP alone stops being the best, as the number of GPUs grows."""

    tried: tuple[int, ...]
    """Ascending."""
    first_layout: int | None
    """From which on a layout is the best of all that were tried; None where it is nowhere."""
    global_sequences: int


def find_gpu_threshold(comparison: LayoutComparison, knobs: Mapping[str, Sequence[str]]) -> GpuThreshold | None:
    """Predict the fastest layouts again, with more or fewer copies of the model, beside FSDP alone on as many GPUs and
    at the same global batch: fewer GPUs where a layout is the best, else more.

    None where there is no layout to look at.
    """
    question = comparison.search.question
    if comparison.best_layout is None:
        return None
    is_best_by_count = {question.gpus: comparison.is_layout_best}
    for power in range(1, NUM_OTHER_COUNTS + 1):
        gpus = question.gpus // 2**power if comparison.is_layout_best else question.gpus * 2**power
        if gpus < 2 or (question.gpus % gpus and gpus % question.gpus):
            break
        is_best = _is_layout_best_at(gpus, comparison.search, knobs)
        if is_best is None:
            break
        is_best_by_count[gpus] = is_best
        if is_best != comparison.is_layout_best:
            break
    counts = sorted(is_best_by_count)
    first = next((count for index, count in enumerate(counts) if all(map(is_best_by_count.get, counts[index:]))), None)
    return GpuThreshold(tuple(counts), first, question.global_sequences)


def _is_layout_best_at(gpus: int, search: LayoutSearch, knobs: Mapping[str, Sequence[str]]) -> bool | None:
    """None where neither fits."""
    question = dataclasses.replace(search.question, gpus=gpus, settings={**search.question.settings, "gpus": str(gpus)})
    rescaled = [layout for layout in (_rescale(item, question) for item in search.fastest) if layout is not None]
    other = LayoutSearch(question)
    LayoutPredictor(question).predict(rescaled[:NUM_RESCALED], other)
    try:
        alone_knobs = {**knobs, "precision": [question.settings["precision"]]}
        candidates = build_candidates(question.settings, alone_knobs).to_predict
        if other.best is not None:
            candidates = list_faster_candidates(candidates, other.best.step_s)
        alone = find_fastest(rank_candidates(candidates).possible) if candidates else None
    except UsageError:
        alone = None
    if other.best is None:
        return None if alone is None else False
    return alone is None or other.best.step_s < alone.step_s


def _rescale(layout: Layout, question: LayoutQuestion) -> Layout | None:
    """The layout with as many copies as other GPUs hold; None where the batch does not divide, or into too many
    micro-batches."""
    ranks_per_copy = layout.tensor * layout.pipeline * layout.context
    copies, rest = divmod(question.gpus, ranks_per_copy * layout.expert)
    is_whole_sharding = layout.replicas == 1 and layout.data == "fsdp"
    shards = copies if is_whole_sharding else layout.shards
    all_copies = copies * layout.expert
    if rest or not copies or copies % shards or question.global_sequences % (all_copies * layout.micro_batch):
        return None
    micro_batches = question.global_sequences // (all_copies * layout.micro_batch)
    if micro_batches > MAX_ACCUMULATION:
        return None
    return dataclasses.replace(
        layout,
        shards=shards,
        replicas=copies // shards,
        micro_batches=micro_batches,
        synchronizes=layout.synchronizes and micro_batches > 1,
    )
