"""The answer for scripts: JSON with everything, CSV with a line per candidate. Keys are only ever added.

JSON: ``format`` (1), ``tokens``, ``sections`` and ``left_out``. A section has ``question``, ``advice``, ``ranked`` and
``infeasible`` (rows, see `row_values`), ``impossible`` and ``rules_of_thumb``. What is unknown is null, never NaN.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

from bench.advice.answer import Answer, Section
from bench.advice.ranking import Row
from bench.advice.reasons import notes, why_not
from bench.advice.rules import Compared
from bench.advice.words import overrides
from bench.config import RunConfig
from bench.simulate.prediction import Range

FORMAT = 1

TIME_PARTS = ("compute_s", "exposed_communication_s", "optimizer_s", "bubble_s")
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
    "tokens_per_second_per_gpu",
    "tokens_per_second",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    *TIME_PARTS,
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
    "reason",
    "overrides",
)


def as_json(answer: Answer, tokens: float | None) -> str:
    """Everything that was predicted."""
    values = {
        "format": FORMAT,
        "tokens": tokens,
        "sections": [_section(section, tokens) for section in answer.sections],
        "left_out": [{"question": question, "reason": reason} for question, reason in answer.left_out],
    }
    return json.dumps(values, indent=2, allow_nan=False)


def as_csv(answer: Answer, tokens: float | None) -> str:
    """A line per candidate, with `CSV_COLUMNS`; what is unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for section in answer.sections:
        common = _question(section)
        for values in _rows(section, tokens):
            writer.writerow({name: _cell(value) for name, value in _flat({**common, **values}).items()})
    return text.getvalue().rstrip("\n")


def _section(section: Section, tokens: float | None) -> dict[str, Any]:
    rows = _rows(section, tokens)
    return {
        "question": _question(section),
        "advice": section.advice,
        "ranked": [row for row in rows if row["status"] == "ok"],
        "infeasible": [row for row in rows if row["status"] == "oom"],
        "impossible": [{"reason": reason, "candidates": count} for reason, count in section.impossible.items()],
        "rules_of_thumb": [_rule(compared) for compared in section.rules],
    }


def subject(config: RunConfig) -> dict[str, Any]:
    """What a question is about: which model, on what and how much of it."""
    return {
        "model": config.model.name,
        "parameters": config.model.num_parameters,
        "hardware": config.hardware.name,
        "gpus": config.gpus,
        "gpus_per_node": config.gpus_per_node,
        "nodes": config.nodes,
    }


def _question(section: Section) -> dict[str, Any]:
    config = section.ranking.first.config
    return {
        "settings": section.settings,
        **subject(config),
        "sequence_length": config.sequence_length,
        "optimizer": config.optimizer.name,
        "capacity_bytes": section.ranking.first.prediction.memory.capacity,
    }


def _rows(section: Section, tokens: float | None) -> list[dict[str, Any]]:
    ranked = [row_values(row, rank, tokens) for rank, row in enumerate(section.ranking.possible, 1)]
    return ranked + [row_values(row, None, tokens) for row in section.ranking.infeasible]


def row_values(row: Row, rank: int | None, tokens: float | None) -> dict[str, Any]:
    """One candidate with its whole prediction."""
    config, memory, time = row.config, row.prediction.memory, row.prediction.time
    return {
        "rank": rank,
        "status": row.prediction.status,
        "run_id": config.run_id,
        "overrides": overrides(row.settings),
        "strategy": config.strategy.name,
        "effective_strategy": config.effective_strategy,
        "sharding_factor": config.strategy.factor,
        "reshard_after_forward": getattr(config.strategy, "reshard_after_forward", None),
        "precision": config.precision.name,
        "activation_checkpointing": config.activation_checkpointing,
        "gradient_accumulation": config.gradient_accumulation,
        "batch_size_per_gpu": config.batch_size_per_gpu,
        "largest_batch_per_gpu": row.largest_batch,
        "tokens_per_step": row.tokens_per_step * config.gpus,
        "tflops_per_gpu": row.tflops_per_gpu,
        "hardware_tflops_per_gpu": row.hardware_tflops_per_gpu,
        "mfu": row.mfu,
        "hfu": row.hfu,
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu,
        "tokens_per_second": row.tokens_per_second,
        "gpu_hours": row.gpu_hours(tokens),
        "days": row.days(tokens),
        "step_time_s": None if time is None else _range(time.step_s),
        "time": None
        if time is None
        else {
            **{name: getattr(time, name) for name in TIME_PARTS},
            "communication_s": time.communication_s,
            "limited_by": time.limited_by,
            "degraded": time.degraded,
        },
        "memory": {
            **{name: _range(getattr(memory, name)) for name in ("allocated", "active", "reserved", "device_used")},
            "parts": memory.parts,
            "phase": memory.phase,
            "module": memory.module,
            "phase_peaks": memory.phase_peaks,
            "capacity_bytes": memory.capacity,
            "headroom_bytes": row.headroom_bytes,
            "host_bytes": memory.host,
            "verdict": memory.verdict,
        },
        "reason": None if row.possible else why_not(row),
        "notes": notes(config),
    }


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The columns of a CSV line."""
    memory, time, step = values["memory"], values["time"] or {}, values["step_time_s"] or {}
    flat = {
        **values,
        "step_time_s": step.get("value"),
        "step_time_low_s": step.get("low"),
        "step_time_high_s": step.get("high"),
        **{name: time.get(name) for name in (*TIME_PARTS, "limited_by", "degraded")},
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
    return {name: flat[name] for name in CSV_COLUMNS}


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _range(values: Range) -> dict[str, float]:
    return dataclasses.asdict(values)


def _rule(compared: Compared) -> dict[str, Any]:
    memory = compared.memory
    return {
        "rule": compared.rule.name,
        "formula": compared.rule.formula,
        "says_bytes": compared.says_bytes,
        "predicted_allocated_bytes": None if memory is None else memory.allocated.value,
        "predicted_parts": None if memory is None else memory.parts,
        "why": compared.why,
    }
