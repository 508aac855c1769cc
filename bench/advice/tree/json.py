"""The guide's answer for scripts. Keys are only ever added; what is unknown is null, never NaN."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bench.advice.json_csv import build_candidate_values, build_subject_values
from bench.advice.tree.guidance import CaseGuidance
from bench.advice.tree.options_predicted import RankedOption
from bench.advice.tree.path import DecisionStep
from bench.advice.tree.tree import TREE_SOURCE

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
            **build_subject_values(config),
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
            "best": build_candidate_values(ranking.possible[0], 1, None) if ranking.possible else None,
            "possible": len(ranking.possible),
            "infeasible": len(ranking.infeasible),
        },
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
        "best": None if option.candidate is None else build_candidate_values(option.candidate, None, None),
    }
