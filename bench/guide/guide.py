"""The guide's whole answer to a question: for every case the path, the leaf with its ways, the ranking, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import Candidates, candidates, usual_precision
from bench.advice.question import Question
from bench.advice.ranking import ranked
from bench.advice.sentence import advise
from bench.errors import UsageError, bad_value
from bench.guide.agreement import agreement
from bench.guide.case import Case
from bench.guide.path import Taken, walk
from bench.guide.tree import Leaf
from bench.guide.weighing import Weighed, weigh
from bench.models.blocks import CHECKPOINTING
from bench.planning.compose import composed
from bench.planning.grid import Settings

VARIED = ("activation_checkpointing", "batch_size_per_gpu")
"""Knobs that differ among the runs of a case, unless one value is asked for."""


@dataclass(frozen=True)
class Guidance:
    """The answer for one case."""

    case: Case
    path: list[Taken]
    leaf: Leaf
    ways: list[Weighed]
    advice: str
    """The sentence of ``bench.predict`` on the ranking."""
    agrees: bool | None
    """Whether leaf and ranking do."""
    agreement: str

    @property
    def may_fit(self) -> bool:
        """Whether anything may."""
        return bool(self.case.ranking.possible) or any(each.row is not None and each.row.possible for each in self.ways)


def guide(question: Question, on_progress: Callable[[str], None] = lambda words: None) -> list[Guidance]:
    """Answer a question, case by case.

    Raises
    ------
    UsageError
        If something is a mistake, or asks for what the guide is to answer.
    """
    _check(question)
    asked = []
    for section in question.sections():  # every mistake is found before anything is predicted
        settings = _settings(section, question)
        asked.append((settings, candidates(settings, _knobs(settings, question))))
    return [_guidance(settings, found, question, on_progress) for settings, found in asked]


def _guidance(
    settings: Settings, found: Candidates, question: Question, on_progress: Callable[[str], None]
) -> Guidance:
    on_progress(f"{question.heading(settings)}: predicting {len(found.to_predict)} candidates")
    batch = question.knobs.get("batch_size_per_gpu")
    case = Case(
        settings=settings,
        precision_asked=any(key.lstrip("+").partition(".")[0] == "precision" for key in question.knobs),
        checkpointing=question.knobs.get("activation_checkpointing", CHECKPOINTING),
        batch=int(batch[0]) if batch else None,
        ranking=ranked(settings, _knobs(settings, question), found),
    )
    path, leaf = walk(case)
    ways = weigh(case, leaf, on_progress)
    advice = advise(case.ranking.possible, case.ranking.infeasible)
    return Guidance(case, path, leaf, ways, advice, *agreement(case, path, ways))


def _settings(section: Settings, question: Question) -> Settings:
    """What all runs of a case have in common, the precision among it."""
    given = {key: values[0] for key, values in question.knobs.items() if key.partition(".")[0] not in VARIED}
    precision = given.get("precision") or usual_precision(composed(section)["hardware"])
    return {**section, **given, "precision": precision}


def _knobs(settings: Settings, question: Question) -> dict[str, list[str]]:
    varied = {key: values for key, values in question.knobs.items() if key in VARIED}
    return {"precision": [settings["precision"]], **varied}


def _check(question: Question) -> None:
    for key, values in question.knobs.items():
        if key.partition(".")[0] == "strategy":
            raise UsageError(
                f"{key}={','.join(values)} is not valid here: the strategy is what the guide answers, so leave it out, "
                f"or ask python -m bench.predict {key}={','.join(values)}."
            )
        if len(values) > 1 and key != "activation_checkpointing":
            raise bad_value(key, ",".join(values), "one value: the guide answers for one at a time")
