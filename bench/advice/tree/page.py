"""The guide's answer for people: a page with the path, the leaf, what it names, and the ranking beside it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.advice.budget import TrainingBudget
from bench.advice.candidates import CandidateSet, build_candidates, choose_default_precision
from bench.advice.cost_tables import list_budget_columns
from bench.advice.json_csv import build_candidate_values, build_subject_values
from bench.advice.layouts.sentence import answer_with_layouts
from bench.advice.misfits import describe_misfit
from bench.advice.question import AdviceQuestion
from bench.advice.ranking import rank_with_last_resort
from bench.advice.sentence import describe_advice, describe_assumed_network, describe_not_given, list_warnings
from bench.advice.tree.agreement import RankedOption, describe_agreement, rank_options
from bench.advice.tree.answers import DecisionStep, walk_tree
from bench.advice.tree.options import GuideCase
from bench.advice.tree.tree import TREE_SOURCE, TreeLeaf, adapt_to_device
from bench.advice.wording import format_gib, format_overrides, join_items
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.core import presentation
from bench.core.errors import UsageError, invalid_value_error
from bench.core.presentation import MISSING, TrainingTerm, format_number
from bench.finetune import list_finetunes
from bench.models.checkpointing import CHECKPOINTING_MODES
from bench.prediction.parameter_facts import recall_parameter_counts
from bench.strategies import Strategy, list_strategies


def build_pages(guidances: Sequence[CaseGuidance]) -> RenderableType:
    """A page per case, one below the other, and where the tree is from."""
    renderables: list[RenderableType] = []
    for guidance in guidances:
        renderables += [*build_page(guidance), Text()]
    renderables.append(
        Text(f"The tree's general advice is that of {TREE_SOURCE}; every number is predicted.", style="dim")
    )
    return Group(*renderables)


def build_page(guidance: CaseGuidance) -> list[RenderableType]:
    """The page of one case; what is assumed of the network comes first."""
    return [
        Text(describe_assumed_network(guidance.case.config, guidance.case.settings)),
        Text(format_title(guidance.case, guidance.not_given), style="bold"),
        Text(),
        _build_steps_table(guidance),
        Text(),
        Text.assemble(
            "→ ",
            (guidance.leaf.key, "bold"),
            ". ",
            adapt_to_device(guidance.leaf.advice, guidance.case.config.hardware.device),
        ),
        Text(),
        _build_options_table(guidance),
        *(Text(text, style="dim") for text in guidance.budget.describe(guidance.case.config)),
        Text(),
        Text.assemble(("Ranked prediction: ", "bold"), guidance.ranking_advice),
        *(Text(f"Note: {warning}.", style="yellow") for warning in list_warnings(guidance.case.ranking.possible)),
        *([Text.assemble(("Layouts: ", "bold"), guidance.layouts_text)] if guidance.layouts_text else []),
        Text.assemble(("Tree and ranking: ", "bold"), guidance.agreement_text),
        *_build_command_lines(guidance),
    ]


def build_terms_table() -> RenderableType:
    """Every name of the field, and what it is here."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "here", "when"):
        table.add_column(heading, overflow="fold")
    for term in list_training_terms():
        table.add_row(
            Text(term.name, style="bold"),
            term.settings_text or term.missing_reason,
            term.when_to_use + (f"; divides {join_items(list(term.divides))}" if term.divides else ""),
        )
    return table


def _build_steps_table(guidance: CaseGuidance) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    device = guidance.case.config.hardware.device
    for step in guidance.decision_path:
        node_answer = step.answer
        styled_answer = (
            f"→ {adapt_to_device(node_answer.text, device)}" + (" (assumed)" if node_answer.is_assumed else ""),
            "bold cyan",
        )
        text = Text.assemble(
            (adapt_to_device(step.node.question, device), "bold"), " ", styled_answer, "\n", node_answer.reason, ".\n"
        )
        text.append(node_answer.source, style="dim")
        table.add_row(f"{step.number}.", text)
    return table


def _build_options_table(guidance: CaseGuidance) -> RenderableType:
    device = guidance.case.config.hardware.device
    budget_columns = list_budget_columns(guidance.budget)
    table = Table(box=None, pad_edge=False)
    table.add_column("what the tree names", overflow="fold")
    for heading in ("batch", "GiB", "tokens/s/GPU", *(heading for heading, _, _ in budget_columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("predicted", overflow="fold")
    for option in guidance.ranked_options:
        option_text = Text(option.training_option.name)
        option_text.append(
            f" – {adapt_to_device(option.training_option.note, device)}" if option.training_option.note else "",
            style="dim",
        )
        candidate = option.candidate
        if candidate is None:
            table.add_row(option_text, *[MISSING] * (3 + len(budget_columns)), option.missing_reason)
            continue
        memory = candidate.prediction.memory
        fit_label = memory.verdict or "memory unknown"
        speed_text = (
            format_number(candidate.tokens_per_second_per_gpu)
            if candidate.prediction.time is not None and candidate.can_fit
            else MISSING
        )
        prediction_text = f"{fit_label}, checkpointing {candidate.config.activation_checkpointing}"
        prediction_text += f", precision {candidate.config.precision.name}" if "precision" in option.settings else ""
        prediction_text += "" if candidate.prediction.time is not None else "; time not predicted"
        prediction_text += f": {describe_misfit(candidate)}" if memory.is_host_memory_short else ""
        table.add_row(
            option_text,
            str(candidate.config.batch_size_per_gpu),
            format_gib(memory.reserved.value),
            speed_text,
            *(format_cell(candidate) if candidate.can_fit else MISSING for _, _, format_cell in budget_columns),
            prediction_text,
        )
    return table


def _build_command_lines(guidance: CaseGuidance) -> list[RenderableType]:
    """What to type for each way; commands are never broken, so that they can be copied."""
    renderables: list[RenderableType] = []
    for option in guidance.ranked_options:
        cannot_fit = option.candidate is not None and not option.candidate.can_fit
        command_by_verb = {
            "run": option.format_sweep_command(guidance.case),
            "predict": option.format_predict_command(guidance.case),
        }
        commands = {
            verb: command for verb, command in command_by_verb.items() if command is not None and not cannot_fit
        }
        if commands:
            renderables += [
                Text(),
                Text(f"{option.training_option.name}: {', and '.join(f'to {verb} it' for verb in commands)},"),
            ]
            renderables += [Text(f"  {command}", no_wrap=True, overflow="ignore") for command in commands.values()]
    return renderables


# --- The title of a page of the guide: what it is about, in a sentence.

TITLE_KEYS = ("model", "hardware", "gpus", "precision", "sequence_length")
"""Settings that a title always names."""


def format_title(case: GuideCase, not_given: Sequence[str] = ()) -> str:
    """Which strategy for what, and all that was asked of it besides."""
    config, device = case.config, case.config.hardware.device
    other_settings = {key: value for key, value in case.settings.items() if key not in TITLE_KEYS}
    if list(case.checkpointing_choices) != list(CHECKPOINTING_MODES):
        other_settings["activation_checkpointing"] = ",".join(case.checkpointing_choices)
    changed_text = f"; with {join_items(format_overrides(other_settings))}" if other_settings else ""
    return (
        f"Which strategy for {config.model.name} ({presentation.format_count(config.model.num_parameters)} parameters) "
        f"on {presentation.format_ranks(config.gpus, device)} {config.hardware.name}? "
        f"{config.precision.name}, {config.sequence_length} tokens per sequence, "
        f"{adapt_to_device(_format_batch(case), device)}{changed_text}."
        f"{describe_not_given(config, not_given, ' Not given: {}.')}"
    )


def _format_batch(case: GuideCase) -> str:
    if case.requested_batch is not None:
        return f"batch {case.requested_batch} per GPU"
    top_candidate = case.ranking.top_candidate
    if top_candidate.prediction.memory.capacity is None:
        return f"batch {top_candidate.config.batch_size_per_gpu} per GPU, since nobody knows how much memory there is"
    return "the largest batch that fits"


# --- The guide's answer for scripts. Keys are only ever added; what is unknown is null, never NaN.

FORMAT_VERSION = 1


def format_guidance_json(guidances: Sequence[CaseGuidance]) -> str:
    """Everything: ``format``, ``source`` of the tree, and ``cases``."""
    values = {
        "format": FORMAT_VERSION,
        "source": TREE_SOURCE,
        "cases": [_build_case_values(guidance) for guidance in guidances],
    }
    return json.dumps(values, indent=2, allow_nan=False)


def _build_case_values(guidance: CaseGuidance) -> dict[str, Any]:
    config, ranking = guidance.case.config, guidance.case.ranking
    return {
        "question": {
            "settings": guidance.case.settings,
            **build_subject_values(config, guidance.case.settings),
            "precision": config.precision.name,
            "sequence_length": config.sequence_length,
            "batch_size_per_gpu": guidance.case.requested_batch,
        },
        "steps": [_build_step_values(step) for step in guidance.decision_path],
        "leaf": {
            "name": guidance.leaf.key,
            "advice": guidance.leaf.advice,
            "ways": [_build_option_values(option, guidance) for option in guidance.ranked_options],
        },
        "ranking": {
            "advice": guidance.ranking_advice,
            "warnings": list_warnings(ranking.possible),
            "best": build_candidate_values(ranking.best_candidate, 1, guidance.budget) if ranking.possible else None,
            "possible": len(ranking.possible),
            "infeasible": len(ranking.infeasible),
        },
        "layouts": guidance.layouts_text or None,
        "agrees": guidance.does_agree,
        "agreement": guidance.agreement_text,
        "may_fit": guidance.can_fit,
    }


def _build_step_values(step: DecisionStep) -> dict[str, Any]:
    answer = step.answer
    return {
        "number": step.number,
        "key": step.node.key,
        "question": step.node.question,
        "answer": answer.text,
        "because": answer.reason,
        "numbers": [dataclasses.asdict(quantity) for quantity in answer.numbers],
        "threshold": None if answer.threshold is None else dataclasses.asdict(answer.threshold),
        "source": answer.source,
        "assumed": answer.is_assumed,
    }


def _build_option_values(option: RankedOption, guidance: CaseGuidance) -> dict[str, Any]:
    return {
        "name": option.training_option.name,
        "remark": option.training_option.note,
        "settings": option.settings,
        "fits": None if option.candidate is None else option.does_fit,
        "why_not_predicted": option.missing_reason or None,
        "run": option.format_sweep_command(guidance.case),
        "predict": option.format_predict_command(guidance.case),
        "best": None if option.candidate is None else build_candidate_values(option.candidate, None, guidance.budget),
    }


# --- The names that readers of course notes meet, each in a line: what it is called here, and when to take it.

GENERAL_TERMS = (
    TrainingTerm("FP16, BF16, FP8", ("precision=fp16", "precision=bf16", "precision=fp8"), "BF16 where the GPU has it"),
    TrainingTerm(
        "INT8 training",
        (),
        "FP8 is the 8-bit format for training; INT8 is for frozen weights (finetune=qlora finetune.bits=8)",
        "not offered: 256 evenly spaced values do not span the range of gradients, and FP8 is as fast where both exist",
    ),
    TrainingTerm(
        "SyncBatchNorm",
        (),
        "batch normalisation (vision models) with few samples per rank: takes statistics over all ranks",
        "does not matter here: T5 and GPT normalise every token by itself, so ranks share no statistics",
    ),
    TrainingTerm(
        "activation checkpointing", ("activation_checkpointing=full",), "activations do not fit; a third more FLOPs"
    ),
    TrainingTerm("gradient accumulation", ("gradient_accumulation=N",), "a larger batch than fits, or fewer exchanges"),
)
"""Names that belong to no strategy and no way to fine-tune."""


TERMS_FIELD = "training_terms"


@functools.cache
def list_training_terms() -> tuple[TrainingTerm, ...]:
    """What the strategies and the ways to fine-tune state, in their order, and `GENERAL_TERMS`.

    A name that several state is one line, with the settings of all: the shortest first.
    """
    stated_terms = [
        term
        for name, strategy_class in list_strategies().items()
        for term in _list_strategy_terms(name, strategy_class)
    ]
    stated_terms += [term for finetune_class in list_finetunes() for term in vars(finetune_class).get(TERMS_FIELD, ())]
    terms: dict[str, TrainingTerm] = {}
    for term in stated_terms:
        known_term = terms.get(term.name, term)
        settings = {*known_term.typed_settings, *term.typed_settings}
        typed_settings = tuple(sorted(settings, key=lambda text: (len(text), text)))
        terms[term.name] = dataclasses.replace(known_term, typed_settings=typed_settings)
    return (*terms.values(), *GENERAL_TERMS)


def _list_strategy_terms(name: str, strategy_class: type[Strategy]) -> Sequence[TrainingTerm]:
    """What a strategy states itself, not a class that it extends; else its label and the first line about it."""
    summary = (strategy_class.__doc__ or "").strip().partition("\n")[0]
    default_term = TrainingTerm(strategy_class.presentation.label or name, (f"strategy={name}",), summary)
    terms: Sequence[TrainingTerm] = vars(strategy_class).get(TERMS_FIELD, (default_term,))
    return terms


# --- The guide's whole answer to a question: for every case the path, the leaf with its ways, the ranking, the verdict.

VARIED_KNOBS = ("activation_checkpointing", "batch_size_per_gpu")
"""Knobs that differ among the runs of a case, unless one value is asked for."""


@dataclass(frozen=True)
class CaseGuidance:
    """The answer for one case."""

    case: GuideCase
    decision_path: list[DecisionStep]
    leaf: TreeLeaf
    ranked_options: list[RankedOption]
    ranking_advice: str
    """The sentence of ``bench.predict`` on the ranking."""
    does_agree: bool | None
    """Whether leaf and ranking do."""
    agreement_text: str
    budget: TrainingBudget
    """What the training is to take."""
    layouts_text: str
    """Whether a layout of several kinds of parallelism beats all of these; empty where none was searched."""
    not_given: tuple[str, ...] = ()
    """Settings that decide the answer and were not typed."""

    @property
    def can_fit(self) -> bool:
        return bool(self.case.ranking.possible) or any(
            option.candidate is not None and option.candidate.can_fit for option in self.ranked_options
        )


def build_guidance(
    question: AdviceQuestion, on_progress: Callable[[str], None] = lambda message: None
) -> list[CaseGuidance]:
    """Answer a question, case by case.

    Raises
    ------
    UsageError
        If something is a mistake, or asks for what the guide is to answer.
    """
    _check_question(question)
    case_candidates = []
    for section_settings in question.list_sections():  # every mistake is found before anything is predicted
        settings = _build_case_settings(section_settings, question)
        candidates = build_candidates(settings, _build_case_knobs(settings, question))
        question.budget.cost_terms.choose_offer(candidates.to_predict[0].config)
        case_candidates.append((settings, candidates))
    recall_parameter_counts(candidates.to_predict[0].config.model for _, candidates in case_candidates)
    return [
        _build_case_guidance(settings, candidates, question, on_progress) for settings, candidates in case_candidates
    ]


def _build_case_guidance(
    settings: RunSettings, candidates: CandidateSet, question: AdviceQuestion, on_progress: Callable[[str], None]
) -> CaseGuidance:
    on_progress(f"{question.format_heading(settings)}: predicting {len(candidates.to_predict)} candidates")
    batch_values = question.knobs.get("batch_size_per_gpu")
    case = GuideCase(
        settings=settings,
        has_requested_precision=any(key.lstrip("+").partition(".")[0] == "precision" for key in question.knobs),
        checkpointing_choices=question.knobs.get("activation_checkpointing", CHECKPOINTING_MODES),
        requested_batch=int(batch_values[0]) if batch_values else None,
        ranking=rank_with_last_resort(settings, _build_case_knobs(settings, question), candidates),
    )
    decision_path, leaf = walk_tree(case)
    ranked_options = rank_options(case, leaf, on_progress)
    layouts_text = answer_with_layouts(settings, _build_case_knobs(settings, question), question.layouts, case.ranking)
    advice = describe_advice(case.ranking.possible, case.ranking.infeasible)
    agreement = describe_agreement(case, decision_path, ranked_options)
    return CaseGuidance(
        case, decision_path, leaf, ranked_options, advice, *agreement, question.budget, layouts_text, question.not_given
    )


def _build_case_settings(section_settings: RunSettings, question: AdviceQuestion) -> RunSettings:
    """What all runs of a case have in common, the precision among it."""
    given_settings = {
        key: values[0] for key, values in question.knobs.items() if key.partition(".")[0] not in VARIED_KNOBS
    }
    precision = given_settings.get("precision") or choose_default_precision(
        compose_config(section_settings)["hardware"]
    )
    return {**section_settings, **given_settings, "precision": precision}


def _build_case_knobs(settings: RunSettings, question: AdviceQuestion) -> dict[str, list[str]]:
    varied_knobs = {key: values for key, values in question.knobs.items() if key in VARIED_KNOBS}
    return {"precision": [settings["precision"]], **varied_knobs}


def _check_question(question: AdviceQuestion) -> None:
    for key, values in question.knobs.items():
        if key.partition(".")[0] == "strategy":
            raise UsageError(
                f"{key}={','.join(values)} is not valid here: the strategy is what the guide answers, so leave it out, "
                f"or ask python -m bench.predict {key}={','.join(values)}."
            )
        if len(values) > 1 and key != "activation_checkpointing":
            raise invalid_value_error(key, ",".join(values), "one value: the guide answers for one at a time")
