"""The answer for scripts: JSON with everything, CSV with a line per candidate. Keys are only ever added.

JSON: ``format`` (1), ``tokens``, ``prices``, ``pue``, ``power_share``, ``sections`` and ``left_out``. A section has
``question``, ``advice``, ``warnings``, ``layouts`` (null where none were searched), ``ranked`` and ``infeasible``
(rows, see `build_candidate_values`), ``impossible`` and ``rules_of_thumb``. What is unknown is null, never NaN.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

from bench.advice.answer import AdviceAnswer, AdviceSection, RuleComparison
from bench.advice.budget import COST_KEYS, TrainingBudget
from bench.advice.misfits import describe_misfit, list_notes
from bench.advice.ranking import RankedCandidate
from bench.advice.sentence import describe_assumed_network
from bench.advice.wording import format_overrides
from bench.config.grid import RunSettings
from bench.config.price import CostTerms
from bench.config.run_config import RunConfig
from bench.prediction.prediction import MEMORY_RANGES, prediction_to_plain

FORMAT_VERSION = 1

STEP_TIME_PARTS = ("compute_s", "exposed_communication_s", "optimizer_s", "bubble_s")
"""Parts of a step's time that add up to all of it."""

CSV_COLUMNS = (
    "model",
    "parameters",
    "hardware",
    "gpus",
    "gpus_per_node",
    "rank",
    "status",
    "strategy",
    "effective_strategy",
    "sharding_factor",
    "reshard_after_forward",
    "precision",
    "activation_checkpointing",
    "sequence_length",
    "gradient_accumulation",
    "batch_size_per_gpu",
    "largest_batch_per_gpu",
    "tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "causal_tflops_per_gpu",
    "causal_mfu",
    "tokens_per_second_per_gpu",
    "tokens_per_second",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    *STEP_TIME_PARTS,
    "limited_by",
    "degraded",
    "allocated_bytes",
    "reserved_bytes",
    "reserved_low_bytes",
    "reserved_high_bytes",
    "device_used_bytes",
    "capacity_bytes",
    "headroom_bytes",
    "host_bytes",
    "verdict",
    "peak_phase",
    "peak_module",
    "gpu_hours",
    "days",
    *COST_KEYS,
    "reason",
    "overrides",
    "network",
)


def format_answer_json(answer: AdviceAnswer, budget: TrainingBudget) -> str:
    values = {
        "format": FORMAT_VERSION,
        "tokens": budget.tokens,
        **_build_cost_values(budget.cost_terms),
        "sections": [_build_section_values(section, budget) for section in answer.sections],
        "left_out": [{"question": question, "reason": reason} for question, reason in answer.skipped_sections],
    }
    return json.dumps(values, indent=2, allow_nan=False)


def format_answer_csv(answer: AdviceAnswer, budget: TrainingBudget) -> str:
    """A line per candidate, with `CSV_COLUMNS`; what is unknown is empty."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for section in answer.sections:
        question_values = _build_question_values(section)
        for candidate_values in _list_candidate_values(section, budget):
            writer.writerow(
                {
                    name: _format_cell(value)
                    for name, value in _flatten_for_csv({**question_values, **candidate_values}).items()
                }
            )
    return buffer.getvalue().rstrip("\n")


def _build_cost_values(cost_terms: CostTerms) -> dict[str, Any]:
    """What dollars and kWh stand on."""
    return {
        "prices": [dataclasses.asdict(offer) for offer in cost_terms.offers],
        "pue": cost_terms.pue,
        "power_share": cost_terms.power_share,
    }


def _build_section_values(section: AdviceSection, budget: TrainingBudget) -> dict[str, Any]:
    candidate_values = _list_candidate_values(section, budget)
    return {
        "question": _build_question_values(section),
        "advice": section.advice,
        "warnings": section.warnings,
        "layouts": _build_layouts_values(section),
        "ranked": [values for values in candidate_values if values["status"] == "ok"],
        "infeasible": [values for values in candidate_values if values["status"] == "oom"],
        "impossible": [{"reason": reason, "candidates": count} for reason, count in section.impossible_reasons.items()],
        "rules_of_thumb": [_build_rule_values(comparison) for comparison in section.rule_comparisons],
    }


def _build_layouts_values(section: AdviceSection) -> dict[str, Any] | None:
    """What a search of layouts came to; None where none was made."""
    comparison = section.layouts
    if comparison is None:
        return None
    search, alone = comparison.search, comparison.best_alone
    return {
        "text": section.layouts_text,
        "is_layout_best": comparison.is_layout_best,
        "global_sequences": search.question.global_sequences,
        "best_layout_step_s": None if search.best is None else search.best.step_s,
        "alone_step_s": None if alone is None else alone.step_s,
        "num_layouts": search.num_layouts,
        "num_predicted": len(search.predicted),
        "num_too_large": search.num_too_large,
        "num_too_slow": search.num_too_slow,
    }


def build_subject_values(config: RunConfig, settings: RunSettings) -> dict[str, Any]:
    """What a question is about: which model, on what and how much of it, and what is assumed of the links."""
    return {
        "network": describe_assumed_network(config, settings),
        "model": config.model.name,
        "parameters": config.model.num_parameters,
        "hardware": config.hardware.name,
        "gpus": config.gpus,
        "gpus_per_node": config.gpus_per_node,
        "nodes": config.nodes,
    }


def _build_question_values(section: AdviceSection) -> dict[str, Any]:
    config = section.ranking.top_candidate.config
    return {
        "settings": section.settings,
        **build_subject_values(config, section.settings),
        "not_given": list(section.not_given),
        "sequence_length": config.sequence_length,
        "optimizer": config.optimizer.name,
        "capacity_bytes": section.ranking.top_candidate.prediction.memory.capacity,
    }


def _list_candidate_values(section: AdviceSection, budget: TrainingBudget) -> list[dict[str, Any]]:
    ranked_values = [
        build_candidate_values(candidate, rank, budget) for rank, candidate in enumerate(section.ranking.possible, 1)
    ]
    return ranked_values + [build_candidate_values(candidate, None, budget) for candidate in section.ranking.infeasible]


def build_candidate_values(candidate: RankedCandidate, rank: int | None, budget: TrainingBudget) -> dict[str, Any]:
    """One candidate with its whole prediction."""
    config, plain = candidate.config, prediction_to_plain(candidate.prediction)
    memory, time = plain["memory"], plain["time"]
    return {
        "rank": rank,
        "status": candidate.prediction.status,
        "run_id": config.run_id,
        "overrides": format_overrides(candidate.settings),
        "strategy": config.strategy.name,
        "effective_strategy": config.effective_strategy,
        "sharding_factor": config.strategy.resolved_sharding_factor,
        "reshard_after_forward": getattr(config.strategy, "reshard_after_forward", None),
        "precision": config.precision.name,
        "activation_checkpointing": config.activation_checkpointing,
        "gradient_accumulation": config.gradient_accumulation,
        "batch_size_per_gpu": config.batch_size_per_gpu,
        "largest_batch_per_gpu": candidate.largest_batch,
        "tokens_per_step": config.tokens_per_step,
        "tflops_per_gpu": candidate.tflops_per_gpu,
        "hardware_tflops_per_gpu": candidate.hardware_tflops_per_gpu,
        "causal_tflops_per_gpu": candidate.causal_tflops_per_gpu,
        "mfu": candidate.mfu,
        "causal_mfu": candidate.causal_mfu,
        "hfu": candidate.hfu,
        "tokens_per_second_per_gpu": candidate.tokens_per_second_per_gpu,
        "tokens_per_second": candidate.tokens_per_second,
        **budget.build_values(candidate),
        "step_time_s": None if time is None else time["step_s"],
        "time": None
        if time is None
        else {name: time[name] for name in (*STEP_TIME_PARTS, "communication_s", "limited_by", "degraded")},
        "memory": {
            **{name: memory[name] for name in (*MEMORY_RANGES, "parts", "phase", "module", "phase_peaks")},
            "capacity_bytes": memory["capacity"],
            "headroom_bytes": candidate.headroom_bytes,
            "host_bytes": memory["host"],
            "verdict": memory["verdict"],
        },
        "reason": None if candidate.can_fit else describe_misfit(candidate),
        "notes": list_notes(config),
    }


def _flatten_for_csv(values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a CSV line."""
    memory, time, step_time = values["memory"], values["time"] or {}, values["step_time_s"] or {}
    flat_values = {
        **values,
        "step_time_s": step_time.get("value"),
        "step_time_low_s": step_time.get("low"),
        "step_time_high_s": step_time.get("high"),
        **{name: time.get(name) for name in (*STEP_TIME_PARTS, "limited_by", "degraded")},
        "allocated_bytes": memory["allocated"]["value"],
        "reserved_bytes": memory["reserved"]["value"],
        "reserved_low_bytes": memory["reserved"]["low"],
        "reserved_high_bytes": memory["reserved"]["high"],
        "device_used_bytes": memory["device_used"]["value"],
        "capacity_bytes": memory["capacity_bytes"],
        "headroom_bytes": memory["headroom_bytes"],
        "host_bytes": memory["host_bytes"],
        "verdict": memory["verdict"],
        "peak_phase": memory["phase"],
        "peak_module": memory["module"],
        "overrides": " ".join(values["overrides"]),
    }
    return {name: flat_values[name] for name in CSV_COLUMNS}


def _format_cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _build_rule_values(comparison: RuleComparison) -> dict[str, Any]:
    memory = comparison.memory
    return {
        "rule": comparison.rule.name,
        "formula": comparison.rule.formula,
        "says_bytes": comparison.rule_bytes,
        "predicted_allocated_bytes": None if memory is None else memory.allocated.value,
        "predicted_parts": None if memory is None else memory.parts,
        "why": comparison.explanation,
    }
