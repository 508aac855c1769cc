"""The whole answer to a question: a section for every table, each ranked, with advice and rules of thumb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import CandidateSet, build_candidates
from bench.advice.question import AdviceQuestion
from bench.advice.ranking import CandidateRanking, rank_with_last_resort
from bench.advice.rules import RuleComparison, compare_rules
from bench.advice.sentence import describe_advice
from bench.config.grid import RunSettings
from bench.core.errors import ImpossibleError, UsageError


@dataclass(frozen=True)
class AdviceSection:
    """What is ranked against each other: one model on one number of one kind of GPUs."""

    settings: RunSettings
    advice: str
    ranking: CandidateRanking
    impossible_reasons: dict[str, int]
    """Why some combinations cannot be, or cannot be predicted, and how many."""
    rule_comparisons: list[RuleComparison]


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
    section_candidates = []
    skipped_sections = []
    for settings in question.list_sections():  # every mistake is found before anything is predicted
        try:
            section_candidates.append((settings, build_candidates(settings, question.knobs)))
        except ImpossibleError as error:
            skipped_sections.append((question.format_heading(settings), str(error)))
    if not section_candidates:
        raise UsageError(skipped_sections[0][1])
    sections = []
    for settings, candidates in section_candidates:
        on_progress(f"{question.format_heading(settings)}: predicting {len(candidates.to_predict)} candidates")
        sections.append(_build_section(settings, candidates, question))
    return AdviceAnswer(sections, skipped_sections)


def _build_section(settings: RunSettings, candidates: CandidateSet, question: AdviceQuestion) -> AdviceSection:
    ranking = rank_with_last_resort(settings, question.knobs, candidates)
    impossible_reasons = {**candidates.impossible_reasons, **ranking.unpredictable_reasons}
    rule_comparisons = compare_rules(ranking.top_candidate)
    return AdviceSection(
        settings, describe_advice(ranking.possible, ranking.infeasible), ranking, impossible_reasons, rule_comparisons
    )
