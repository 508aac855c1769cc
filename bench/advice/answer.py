"""The whole answer to a question: a section for every table, each ranked, with advice and rules of thumb."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.advice.budget import TrainingBudget
from bench.advice.candidates import CandidateSet, build_candidates
from bench.advice.layouts.comparison import (
    LayoutComparison,
    compare_layouts,
    find_gpu_threshold,
    plan_layouts,
)
from bench.advice.layouts.layouts import LayoutQuestion
from bench.advice.layouts.sentence import describe_layouts
from bench.advice.question import AdviceQuestion
from bench.advice.ranking import CandidateRanking, RankedCandidate, rank_candidates, rank_with_last_resort
from bench.advice.sentence import describe_advice, list_warnings
from bench.advice.wording import MEMORY_PART_LABELS, MODEL_STATE_PARTS, format_gib, format_strategy, join_items
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.planning.run_predictions import predict_configs
from bench.prediction.parameter_facts import recall_parameter_counts
from bench.prediction.prediction import MemoryPrediction, Prediction


@dataclass(frozen=True)
class AdviceSection:
    """What is ranked against each other: one model on one number of one kind of GPUs."""

    settings: RunSettings
    advice: str
    ranking: CandidateRanking
    impossible_reasons: dict[str, int]
    """Why some combinations cannot be, or cannot be predicted, and how many."""
    warnings: list[str]
    """What may make the comparison an unfair one."""
    not_given: tuple[str, ...] = ()
    """Settings that decide the answer and were not typed."""
    layouts: LayoutComparison | None = None
    """Where layouts were searched: the fastest beside FSDP alone."""
    layouts_text: str = ""
    """What that comes to, in sentences."""

    @functools.cached_property
    def rule_comparisons(self) -> list[RuleComparison]:
        """Rules of thumb beside the best row; predicted when they are asked for, as other runs than the ranked ones."""
        return compare_rules(self.ranking.top_candidate)


@dataclass(frozen=True)
class AdviceAnswer:
    """All sections, and those that came to nothing."""

    sections: list[AdviceSection]
    skipped_sections: list[tuple[str, str]]
    """What cannot be at all, of several things asked for, and why."""


def answer_question(
    question: AdviceQuestion, on_progress: Callable[[str], None] = lambda message: None
) -> AdviceAnswer:
    """Answer a question.

    Parameters
    ----------
    on_progress: callable
        Told what is being predicted.

    Raises
    ------
    UsageError
        If something is a mistake, or nothing that was asked for is possible.
    """
    plans: list[SectionPlan] = []
    skipped_sections = []
    for settings in question.list_sections():  # every mistake is found before anything is predicted
        try:
            plan = _plan_section(settings, question, plan_layouts(settings, question.knobs, question.layouts))
            question.budget.cost_terms.choose_offer(plan.subject)
            plans.append(plan)
        except ImpossibleError as error:
            skipped_sections.append((question.format_heading(settings), str(error)))
    if not plans:
        raise UsageError(skipped_sections[0][1])
    recall_parameter_counts(plan.subject.model for plan in plans)
    sections = []
    for plan in plans:
        on_progress(f"{question.format_heading(plan.settings)}: predicting {plan.describe()}")
        sections.append(_build_section(plan, question, finds_thresholds=len(plans) == 1))
    if question.rank == "cost":
        sections.sort(key=lambda section: _find_lowest_dollars(section, question.budget))
    return AdviceAnswer(sections, skipped_sections)


def _find_lowest_dollars(section: AdviceSection, budget: TrainingBudget) -> float:
    """Dollars per token of a section's best row, infinite where nothing may fit or no speed is known."""
    dollars = [budget.compute_unit_dollars(candidate) for candidate in section.ranking.possible]
    return min((value for value in dollars if value is not None), default=math.inf)


@dataclass(frozen=True)
class SectionPlan:
    """What is to be predicted for one table."""

    settings: RunSettings
    candidates: CandidateSet
    layouts: LayoutQuestion | None
    alone_reason: str
    """Why nothing but layouts can be, where that is so."""
    subject: RunConfig

    def describe(self) -> str:
        """How much there is to predict."""
        candidates = f"{len(self.candidates.to_predict)} candidates"
        return candidates if self.layouts is None else f"{candidates}, searching layouts"


def _plan_section(settings: RunSettings, question: AdviceQuestion, layouts: LayoutQuestion | None) -> SectionPlan:
    """Raises `ImpossibleError` where nothing can be."""
    if layouts is None:
        candidates = build_candidates(settings, question.knobs)
        return SectionPlan(settings, candidates, None, "", candidates.to_predict[0].config)
    try:
        candidates, reason = build_candidates(layouts.settings, question.knobs), ""
    except ImpossibleError as error:
        candidates, reason = CandidateSet(impossible_reasons={str(error): 1}), ALONE_IMPOSSIBLE
        if layouts.global_sequences >= layouts.gpus:
            reason = str(error).rstrip(".")
    subject = candidates.to_predict[0].config if candidates.to_predict else layouts.subject
    return SectionPlan(settings, candidates, layouts, reason, subject)


ALONE_IMPOSSIBLE = "the global batch has less than one sequence per GPU"


def _build_section(plan: SectionPlan, question: AdviceQuestion, *, finds_thresholds: bool) -> AdviceSection:
    settings = plan.settings if plan.layouts is None else plan.layouts.settings
    ranking = CandidateRanking()
    if plan.layouts is not None and plan.candidates.to_predict:
        ranking = rank_candidates(plan.candidates.to_predict)
    elif plan.candidates.to_predict:
        ranking = rank_with_last_resort(settings, question.knobs, plan.candidates)
    if plan.layouts is None and not any(candidate.does_fit for candidate in ranking.possible):
        section = _build_section_of_layouts(plan.settings, question, finds_thresholds=finds_thresholds)
        if section is not None and section.ranking.possible:
            return section
    comparison, layouts_text = None, ""
    if plan.layouts is not None:
        comparison = compare_layouts(plan.layouts, ranking, plan.alone_reason)
        threshold = find_gpu_threshold(comparison, question.knobs) if finds_thresholds else None
        layouts_text = describe_layouts(comparison, threshold)
        if not (ranking.possible or ranking.infeasible):
            raise UsageError(next(iter({**plan.candidates.impossible_reasons, **comparison.search.impossible_reasons})))
    impossible_reasons = {**plan.candidates.impossible_reasons, **ranking.unpredictable_reasons}
    return AdviceSection(
        plan.settings,
        describe_advice(ranking.possible, ranking.infeasible),
        ranking,
        impossible_reasons,
        list_warnings(ranking.possible),
        question.not_given,
        comparison,
        layouts_text,
    )


def _build_section_of_layouts(
    settings: RunSettings, question: AdviceQuestion, *, finds_thresholds: bool
) -> AdviceSection | None:
    """The section where nothing else fits; None where no layout can be."""
    try:
        layouts = plan_layouts(settings, question.knobs, question.layouts, is_forced=True)
        if layouts is None:
            return None
        plan = _plan_section(settings, question, layouts)
        return _build_section(plan, question, finds_thresholds=finds_thresholds)
    except UsageError:
        return None


# --- Rules of thumb for memory beside the prediction: what they say, what the trace says, and why they differ.

WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES = 2, 2, 12
"""Bytes per parameter: 16-bit weight, its gradient, Adam's two moments with an fp32 copy of the weight."""
LORA_TRAINED_SHARE = 1 / 64
"""Of the parameters, with LoRA."""
FOUR_BIT_WEIGHT_BYTES = 0.5
MIN_NAMED_SHARE = 0.02
"""Share of the difference below which a part is not named."""

FULL_SHARD_SETTINGS = {"strategy": "fsdp", "strategy.sharding_factor": "full"}


@dataclass(frozen=True)
class MemoryRule:
    """One rule: bytes per parameter and GPU, and the run of ours that it speaks about."""

    name: str
    formula: str
    bytes_per_parameter: Callable[[int], float]
    """Of the number of GPUs."""
    settings: Mapping[str, str] | None
    """What makes a run the one the rule is for; None where the suite has no such run."""
    note: str = ""
    """Why there is none, or what else to know."""
    counted_parts: tuple[str, ...] = MODEL_STATE_PARTS
    """The parts of a trace's peak that the rule counts."""
    finetune: str = "full"
    """What is trained: a rule for adapters is compared where the question is about them."""


MEMORY_RULES = (
    MemoryRule(
        "16 bytes per parameter",
        "2 + 2 + 12",
        lambda n: WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES,
        {"strategy": "ddp"},
    ),
    MemoryRule(
        "20 x the weights (fp32)",
        "20 x 4",
        lambda n: 20 * 4,
        {"strategy": "ddp", "precision": "fp32"},
        "16 bytes are the states; the other 64 stand for activations, whatever the batch",
    ),
    MemoryRule(
        "ZeRO-1",
        "4 + 12 / N",
        lambda n: WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES / n,
        {"strategy": "zero1"},
    ),
    MemoryRule(
        "ZeRO-2",
        "2 + 14 / N",
        lambda n: WEIGHT_BYTES + (GRADIENT_BYTES + ADAM_BYTES) / n,
        {**FULL_SHARD_SETTINGS, "strategy.reshard_after_forward": "false"},
        counted_parts=(*MODEL_STATE_PARTS, "gathered"),  # the whole 16-bit weights
    ),
    MemoryRule(
        "ZeRO-3",
        "16 / N",
        lambda n: (WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES) / n,
        {**FULL_SHARD_SETTINGS, "strategy.reshard_after_forward": "true"},
    ),
    MemoryRule(
        "4-bit weights, all trained",
        "0.5 + 14",
        lambda n: FOUR_BIT_WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES,
        None,
        "quantised weights are frozen here, with adapters that are trained",
    ),
    MemoryRule(
        "LoRA, 1/64 trained",
        "2 + 14 / 64",
        lambda n: WEIGHT_BYTES + (GRADIENT_BYTES + ADAM_BYTES) * LORA_TRAINED_SHARE,
        {"strategy": "ddp"},
        "ask with finetune=lora",
        finetune="lora",
    ),
    MemoryRule(
        "QLoRA, 1/64 trained",
        "0.5 + 14 / 64",
        lambda n: FOUR_BIT_WEIGHT_BYTES + (GRADIENT_BYTES + ADAM_BYTES) * LORA_TRAINED_SHARE,
        {"strategy": "ddp"},
        "ask with finetune=qlora",
        finetune="qlora",
    ),
)


@dataclass(frozen=True)
class RuleComparison:
    """A rule applied to a run, beside the prediction of the run that it speaks about."""

    rule: MemoryRule
    rule_bytes: float
    config: RunConfig | None
    memory: MemoryPrediction | None
    explanation: str
    """Why the two differ, or why there is nothing to compare with."""


def compare_rules(candidate: RankedCandidate) -> list[RuleComparison]:
    """All rules for a row's model, GPUs and batch."""
    parameters = candidate.config.model.num_parameters
    requested_finetune = candidate.config.finetune.name
    comparable_rules = [
        rule.settings is not None and rule.finetune in ("full", requested_finetune) for rule in MEMORY_RULES
    ]
    configs = [
        _build_rule_config(candidate, rule) if is_comparable else None
        for rule, is_comparable in zip(MEMORY_RULES, comparable_rules, strict=True)
    ]
    runnable_configs = [config for config in configs if config is not None]
    predictions = dict(
        zip((config.run_id for config in runnable_configs), predict_configs(runnable_configs), strict=True)
    )
    comparisons = []
    for rule, config, is_comparable in zip(MEMORY_RULES, configs, comparable_rules, strict=True):
        rule_bytes = rule.bytes_per_parameter(candidate.config.gpus) * parameters
        prediction = None if config is None else predictions[config.run_id]
        memory = prediction.memory if isinstance(prediction, Prediction) else None
        explanation = "not predicted: no such run is possible" if is_comparable else f"not predicted: {rule.note}"
        if memory is not None and config is not None:
            explanation = _describe_difference(rule, rule_bytes, memory, config)
        comparisons.append(RuleComparison(rule, rule_bytes, config, memory, explanation))
    return comparisons


def _build_rule_config(candidate: RankedCandidate, rule: MemoryRule) -> RunConfig | None:
    """The row's run with another strategy, and another precision where the rule is for one, or all of it trained."""
    rule_settings = rule.settings or {}
    replaced_groups = {"strategy", *rule_settings} | ({"finetune"} if rule.finetune == "full" else set())
    kept_settings = {
        key: value
        for key, value in candidate.settings.items()
        if key.lstrip("+").partition(".")[0] not in replaced_groups
    }
    single_setting = {"strategy": "single"} if candidate.config.gpus == 1 and rule_settings["strategy"] == "ddp" else {}
    try:
        return build_run_config(
            compose_config({**kept_settings, **rule_settings, **single_setting, "mode": candidate.config.mode})
        )
    except UsageError:
        return None


def _describe_difference(rule: MemoryRule, rule_bytes: float, memory: MemoryPrediction, config: RunConfig) -> str:
    """Why a rule and a trace differ, from the parts of the peak."""
    peak_bytes = memory.allocated.value
    counted_bytes = sum(memory.parts.get(name, 0) for name in rule.counted_parts)
    counted_labels = join_items([MEMORY_PART_LABELS[name] for name in rule.counted_parts])
    other_parts = {name: size for name, size in memory.parts.items() if name not in rule.counted_parts}
    large_parts = sorted(
        (name for name in other_parts if other_parts[name] > MIN_NAMED_SHARE * peak_bytes),
        key=lambda name: -other_parts[name],
    )
    other_parts_text = (
        join_items([f"{format_gib(other_parts[name])} GiB of {MEMORY_PART_LABELS[name]}" for name in large_parts])
        if large_parts
        else "little else"
    )
    if abs(counted_bytes - rule_bytes) <= MIN_NAMED_SHARE * rule_bytes:
        counted_text = f"{counted_labels} take the {format_gib(counted_bytes)} GiB it says"
    else:
        trains_all_parameters = config.finetune.name == "full"
        lacks_gradients = (
            trains_all_parameters and memory.parts.get("gradients", 0) < memory.parts.get("parameters", 0) / 2
        )
        reason_text = (
            "before most gradients are there" if lacks_gradients else f"parameters in {config.precision.parameters}"
        )
        reason_text += ", but those quantised in the blocks" if config.finetune.name == "qlora" else ""
        counted_text = (
            f"{counted_labels} take {format_gib(counted_bytes)} GiB at the peak in {memory.phase} ({reason_text})"
        )
    ratio_text = (
        f"{peak_bytes / rule_bytes:.2f} times the rule for {format_strategy(config)}, batch {config.batch_size_per_gpu}"
    )
    if config.finetune.name != "full":
        trained_parameters = sum(
            parameter.numel()
            for parameter in config.trained_model.build_model().parameters()
            if parameter.requires_grad
        )
        counted_text = (
            f"adapters are 1/{config.model.num_parameters / trained_parameters:.0f} of the parameters, and "
            f"{counted_text}"
        )
    return f"{ratio_text}: {counted_text}; beside them there is {other_parts_text}"
