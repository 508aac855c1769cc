"""The guide's whole answer to a question: for every case the path, the leaf with its ways, the ranking, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import CandidateSet, build_candidates, choose_default_precision
from bench.advice.question import AdviceQuestion
from bench.advice.ranking import rank_with_last_resort
from bench.advice.sentence import describe_advice
from bench.advice.tree.agreement import RankedOption, describe_agreement, rank_options
from bench.advice.tree.answers import DecisionStep, walk_tree
from bench.advice.tree.options import GuideCase
from bench.advice.tree.tree import TreeLeaf
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.core.errors import UsageError, invalid_value_error
from bench.models.base import CHECKPOINTING_MODES

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

    @property
    def can_fit(self) -> bool:
        """Whether anything may."""
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
        case_candidates.append((settings, build_candidates(settings, _build_case_knobs(settings, question))))
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
    advice = describe_advice(case.ranking.possible, case.ranking.infeasible)
    return CaseGuidance(
        case, decision_path, leaf, ranked_options, advice, *describe_agreement(case, decision_path, ranked_options)
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
