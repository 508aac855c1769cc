"""The whole answer to a question: a section for every table, each ranked, with advice and rules of thumb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import Candidates, candidates
from bench.advice.question import Question
from bench.advice.ranking import Ranking, ranked
from bench.advice.rules import Compared, compare_rules
from bench.advice.sentence import advise
from bench.errors import ImpossibleError, UsageError
from bench.planning.grid import Settings


@dataclass(frozen=True)
class Section:
    """What is ranked against each other: one model on one number of one kind of GPUs."""

    settings: Settings
    advice: str
    ranking: Ranking
    impossible: dict[str, int]
    """Why some combinations cannot be, or cannot be predicted, and how many."""
    rules: list[Compared]


@dataclass(frozen=True)
class Answer:
    """All sections, and those that came to nothing."""

    sections: list[Section]
    left_out: list[tuple[str, str]]
    """What cannot be at all, of several things asked for, and why."""


def answer(question: Question, on_progress: Callable[[str], None] = lambda words: None) -> Answer:
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
    asked = []
    left_out = []
    for settings in question.sections():  # every mistake is found before anything is predicted
        try:
            asked.append((settings, candidates(settings, question.knobs)))
        except ImpossibleError as error:
            left_out.append((question.heading(settings), str(error)))
    if not asked:
        raise UsageError(left_out[0][1])
    sections = []
    for settings, found in asked:
        on_progress(f"{question.heading(settings)}: predicting {len(found.to_predict)} candidates")
        sections.append(_section(settings, found, question))
    return Answer(sections, left_out)


def _section(settings: Settings, found: Candidates, question: Question) -> Section:
    ranking = ranked(settings, question.knobs, found)
    reasons = {**found.impossible, **ranking.untold}
    rules = compare_rules(ranking.first)
    return Section(settings, advise(ranking.possible, ranking.infeasible), ranking, reasons, rules)
