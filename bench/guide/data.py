"""The guide's answer for scripts. Keys are only ever added; what is unknown is null, never NaN."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bench.advice.data import row_values, subject
from bench.guide.guide import Guidance
from bench.guide.path import Taken
from bench.guide.tree import SOURCE
from bench.guide.weighing import Weighed

FORMAT = 1


def as_json(found: Sequence[Guidance]) -> str:
    """Everything: ``format``, ``source`` of the tree, and ``cases``."""
    values = {"format": FORMAT, "source": SOURCE, "cases": [_case(guidance) for guidance in found]}
    return json.dumps(values, indent=2, allow_nan=False)


def _case(guidance: Guidance) -> dict[str, Any]:
    config, ranking = guidance.case.config, guidance.case.ranking
    return {
        "question": {
            "settings": guidance.case.settings,
            **subject(config),
            "precision": config.precision.name,
            "sequence_length": config.sequence_length,
            "batch_size_per_gpu": guidance.case.batch,
        },
        "steps": [_step(taken) for taken in guidance.path],
        "leaf": {
            "name": guidance.leaf.key,
            "advice": guidance.leaf.advice,
            "ways": [_way(each, guidance) for each in guidance.ways],
        },
        "ranking": {
            "advice": guidance.advice,
            "best": row_values(ranking.possible[0], 1, None) if ranking.possible else None,
            "possible": len(ranking.possible),
            "infeasible": len(ranking.infeasible),
        },
        "agrees": guidance.agrees,
        "agreement": guidance.agreement,
        "may_fit": guidance.may_fit,
    }


def _step(taken: Taken) -> dict[str, Any]:
    found = taken.answered
    return {
        "number": taken.number,
        "key": taken.step.key,
        "question": taken.step.question,
        "answer": found.answer,
        "because": found.because,
        "numbers": [dataclasses.asdict(each) for each in found.numbers],
        "threshold": None if found.threshold is None else dataclasses.asdict(found.threshold),
        "source": found.source,
        "assumed": found.assumed,
    }


def _way(each: Weighed, guidance: Guidance) -> dict[str, Any]:
    return {
        "name": each.way.name,
        "remark": each.way.remark,
        "settings": each.settings,
        "fits": None if each.row is None else each.fits,
        "why_not_predicted": each.why_none or None,
        "run": each.sweep(guidance.case),
        "predict": each.predict(guidance.case),
        "best": None if each.row is None else row_values(each.row, None, None),
    }
