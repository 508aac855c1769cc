"""All that a row holds, as blocks that a page can show: what was asked, where it ran, how long, how much, per rank."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.core import presentation
from bench.records import Record
from bench.records.schema import MIN_STEPS_FOR_P95
from bench.reporting.page.rerun_command import build_rerun_command
from bench.reporting.tables.table import compute_step_times_s

DetailBlock = dict[str, Any]
"""A part of a run's details: ``title``, and ``facts`` (pairs), ``columns`` and ``rows``, ``text`` or ``steps``."""

MAX_LISTED_RANKS = 32
"""Ranks that are listed one by one."""

CONFIG_SECTIONS = ("model", "strategy", "precision", "optimizer", "finetune", "measurement", "hardware")
MEMORY_LABELS = {
    "peak_allocated_bytes": "Allocated, in a step after warm-up",
    "peak_active_bytes": "Active",
    "peak_reserved_bytes": "Reserved by the caching allocator",
    "peak_allocated_overall_bytes": "Allocated, construction and warm-up included",
    "peak_device_used_bytes": "In use as the driver sees it (on a CPU: resident)",
}
RANK_COLUMN_LABELS = {
    "step_times_s": "Median step",
    "peak_allocated_bytes": "Allocated",
    "peak_reserved_bytes": "Reserved",
    "peak_device_used_bytes": "Driver",
    "alloc_retries": "Retries",
}
SPEED_LABELS = {
    "tflops_per_gpu": "Model TFLOP/s per rank",
    "hardware_tflops_per_gpu": "TFLOP/s per rank with recomputation",
    "mfu": "MFU",
    "hfu": "HFU",
    "tokens_per_second_per_gpu": "Tokens/s per rank",
    "exposed_communication": "Communication not hidden, share of a step",
    "setup_s": "Seconds before the first timed step",
    "final_loss": "Loss of the last step",
    "limited_by": "Limited by",
    "alloc_retries": "Allocator retries",
    "skipped_steps": "Skipped steps",
    "concurrent_runs": "Other runs of this store at the same time",
}
SHARE_COLUMNS = {"mfu", "hfu", "exposed_communication"}


def build_details(record: Record, file: str, heading: str, *, is_complete: bool = True) -> list[DetailBlock]:
    """The blocks of one row.

    Parameters
    ----------
    file: str
        Where the row lies, below the store.
    heading: str
        The run in words.
    is_complete: bool
        With everything; else with what becomes of a run, and where its row has the rest.
    """
    if not is_complete:
        rest = {"title": "The rest", "text": f"This report has many runs. All that is known of this one is in {file}."}
        blocks = [_build_outcome_block(record, heading), _build_speed_block(record), _build_memory_block(record), rest]
        return [block for block in blocks if block]
    return [
        block
        for block in (
            _build_outcome_block(record, heading),
            _build_origin_block(record, file),
            _build_rerun_block(record),
            _build_step_time_block(record),
            _build_speed_block(record),
            _build_memory_block(record),
            *_build_prediction_blocks(record),
            _build_ranks_block(record),
            *_build_configuration_blocks(record),
            *_build_environment_blocks(record),
            *_build_source_blocks(record),
        )
        if block
    ]


def _build_pairs_block(title: str, pairs: Mapping[str, Any]) -> DetailBlock | None:
    """Pairs of a name and a text, without those that say nothing."""
    shown_pairs = [[name, _format_value(value)] for name, value in pairs.items() if value is not None and value != ""]
    return {"title": title, "facts": shown_pairs} if shown_pairs else None


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _build_outcome_block(record: Record, heading: str) -> DetailBlock | None:
    degraded = "yes: the times are not representative" if record.get("degraded") else None
    return _build_pairs_block(
        "Outcome",
        {
            "Run": heading,
            "Status": record["status"],
            "Evidence": record["evidence"],
            "Fits": record.get("fit"),
            "Degraded": degraded,
            "Loss": _describe_nonfinite_loss(record.get("first_nonfinite_loss_step")),
            "Ran out of memory in": record.get("oom_phase"),
            "Asked for": _format_memory(record.get("oom_bytes")),
            "First rank": record.get("oom_rank"),
            "Cause": record.get("error"),
        },
    )


def _describe_nonfinite_loss(step: int | None) -> str | None:
    return None if step is None else f"NaN or infinite from step {step}: the run trained nothing from there on"


def _build_origin_block(record: Record, file: str) -> DetailBlock | None:
    changes_note = {False: " with uncommitted changes", None: "", True: ""}[record.get("git_clean")]
    return _build_pairs_block(
        "When and where",
        {
            "Row": file,
            "Trace": record.get("trace"),
            "Started": record.get("started_at"),
            "Written": record.get("finished_at"),
            "Sweep": record.get("sweep"),
            "Attempt": record.get("attempt"),
            "Repeat": record.get("repeat"),
            "Launcher": record.get("launcher"),
            "Job": record.get("job_id"),
            "Device": record.get("gpu_name"),
            "Hosts": record.get("hosts"),
            "Commit": f"{record['git_sha']}{changes_note}" if record.get("git_sha") else None,
            "Predictor": record.get("predictor"),
        },
    )


def _build_rerun_block(record: Record) -> DetailBlock | None:
    rerun_command = build_rerun_command(record)
    return {"title": "Run it again", "text": rerun_command} if rerun_command else None


def _build_step_time_block(record: Record) -> DetailBlock | None:
    step_times_s = compute_step_times_s(record)
    if len(step_times_s):
        percentiles = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "max": 100}
        if len(step_times_s) < MIN_STEPS_FOR_P95:
            del percentiles["5 %"], percentiles["95 %"]
        percentile_values = np.percentile(step_times_s, list(percentiles.values()))
        pairs = [
            [name, presentation.format_seconds(float(value))]
            for name, value in zip(percentiles, percentile_values, strict=True)
        ]
        interval = _format_interval(record, "step_time_ci_low_s", "step_time_ci_high_s", presentation.format_seconds)
        pairs += [["95 % interval of the median", interval]] if interval else []
        steps_ms = [float(f"{1000 * step_s:.4g}") for step_s in step_times_s]
        return {
            "title": f"Step times ({presentation.format_plural(len(step_times_s), 'timed step')})",
            "facts": pairs,
            "steps": steps_ms,
        }
    if record.get("step_time_median_s") is None:
        return None
    predicted_pairs = {
        "Step": presentation.format_seconds(record["step_time_median_s"]),
        "95 % interval": _format_interval(
            record, "step_time_ci_low_s", "step_time_ci_high_s", presentation.format_seconds
        ),
    }
    return _build_pairs_block("Step time", predicted_pairs)


def _format_interval(record: Mapping[str, Any], low_column: str, high_column: str, format_value: Any) -> str | None:
    if record.get(low_column) is None or record.get(high_column) is None:
        return None
    return f"{format_value(record[low_column])} to {format_value(record[high_column])}"


def _build_speed_block(record: Record) -> DetailBlock | None:
    values: dict[str, Any] = {}
    for column, name in SPEED_LABELS.items():
        value = record.get(column)
        if isinstance(value, float):
            value = (
                f"{presentation.format_number(100 * value)} %"
                if column in SHARE_COLUMNS
                else presentation.format_number(value)
            )
        values[name] = value
    return _build_pairs_block("Speed", values)


def _format_memory(value: Any) -> str | None:
    return None if value is None else f"{presentation.format_memory(value)} ({value:,} bytes)"


def _build_memory_block(record: Record) -> DetailBlock | None:
    values = {name: _format_memory(record.get(column)) for column, name in MEMORY_LABELS.items()}
    for kind in ("allocated", "reserved"):
        interval_columns = (f"peak_{kind}_low_bytes", f"peak_{kind}_high_bytes")
        values[f"{kind.capitalize()}: expected 19 times of 20"] = _format_interval(
            record, *interval_columns, presentation.format_memory
        )
    values["Limit"] = _format_memory(record.get("memory_limit_bytes"))
    return _build_pairs_block("Peak memory of the rank that needed most", values)


def _build_prediction_blocks(record: Record) -> list[DetailBlock | None]:
    prediction = record.get("prediction") or {}
    memory, time = prediction.get("memory") or {}, prediction.get("time") or {}
    memory_parts = {name: presentation.format_memory(size) for name, size in (memory.get("parts_bytes") or {}).items()}
    peak_location = {"Phase of the peak": memory.get("phase"), "Module of the peak": memory.get("module")}
    time_parts = {
        name.removesuffix("_s").replace("_", " "): presentation.format_seconds(value)
        for name, value in time.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }
    return [
        _build_pairs_block("What the predicted peak consists of", {**memory_parts, **peak_location}),
        _build_pairs_block("What the predicted step consists of", time_parts),
    ]


def _build_ranks_block(record: Record) -> DetailBlock | None:
    ranks = [rank for rank in record.get("ranks") or [] if isinstance(rank, Mapping)]
    if not ranks:
        return None
    rows = [_format_rank(rank) for rank in ranks[:MAX_LISTED_RANKS]]
    filled_columns = [index for index in range(len(rows[0])) if any(row[index] != presentation.MISSING for row in rows)]
    columns = ["Rank", "Host", "Status", *RANK_COLUMN_LABELS.values()]
    title_suffix = (
        f", the first {MAX_LISTED_RANKS} of {len(ranks)}; the others are in the row"
        if len(ranks) > MAX_LISTED_RANKS
        else ""
    )
    return {
        "title": f"Ranks{title_suffix}",
        "columns": [columns[index] for index in filled_columns],
        "rows": [[row[index] for index in filled_columns] for row in rows],
    }


def _format_rank(rank: Mapping[str, Any]) -> list[str]:
    texts = [str(rank.get(name, presentation.MISSING)) for name in ("rank", "host", "status")]
    for column in RANK_COLUMN_LABELS:
        value = rank.get(column)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = statistics.median(value) if len(value) else None
        if value is None:
            texts.append(presentation.MISSING)
        elif column.endswith("_bytes"):
            texts.append(presentation.format_memory(float(value)))
        else:
            texts.append(presentation.format_seconds(float(value)) if column.endswith("_s") else str(value))
    return texts


def _build_configuration_blocks(record: Record) -> list[DetailBlock | None]:
    config = record.get("config") or {}
    plain_fields = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    blocks = [_build_pairs_block("Configuration", plain_fields)]
    for section in dict.fromkeys((*CONFIG_SECTIONS, *config)):
        if isinstance(config.get(section), Mapping):
            blocks.append(_build_pairs_block(f"Configuration: {section}", _flatten_section(config[section])))
    effective_fields = _flatten_section(record.get("effective") or {})
    requested_fields = _flatten_section(config.get("strategy") or {})
    changed_fields = {
        name: value for name, value in effective_fields.items() if requested_fields.get(name, "") != value
    }
    blocks.append(_build_pairs_block("What the strategy came to", changed_fields))
    return blocks


def _flatten_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """A nested section as dotted names and values; sources apart, which are long and in the row."""
    flat_fields: dict[str, Any] = {}
    for name, value in section.items():
        if name == "sources":
            continue
        if isinstance(value, Mapping):
            flat_fields |= {
                f"{name}.{inner_name}": inner_value for inner_name, inner_value in _flatten_section(value).items()
            }
        else:
            flat_fields[str(name)] = "null" if value is None else value
    return flat_fields


def _build_environment_blocks(record: Record) -> list[DetailBlock | None]:
    environment = {name: value for name, value in (record.get("environment") or {}).items() if value is not None}
    topology, devices = environment.pop("topology", None), environment.pop("devices", None)
    blocks: list[DetailBlock | None] = [_build_pairs_block("Environment", _flatten_section(environment))]
    ranks_by_device: dict[str, list[str]] = {}
    for rank, properties in (devices or {}).items():
        ranks_by_device.setdefault(json.dumps(properties, sort_keys=True), []).append(str(rank).removeprefix("rank "))
    for text, ranks in ranks_by_device.items():
        rank_list = presentation.format_list(ranks, 8)
        blocks.append(_build_pairs_block(f"Device of rank {rank_list}", _flatten_section(json.loads(text))))
    if topology:
        blocks.append({"title": "Topology", "text": str(topology)})
    return blocks


def _build_source_blocks(record: Record) -> list[DetailBlock | None]:
    return [_build_pairs_block("Source", record.get("source") or {})]


def deduplicate_blocks(runs: Mapping[str, list[DetailBlock]]) -> dict[str, Any]:
    """The details of many runs: every block once, and of each run which blocks it has.

    Runs of a sweep share most of what they are: a thousand of them have a handful of environments.
    """
    block_numbers: dict[str, int] = {}
    blocks_by_run = {
        run: [block_numbers.setdefault(json.dumps(block, ensure_ascii=False), len(block_numbers)) for block in blocks]
        for run, blocks in runs.items()
    }
    return {"blocks": [json.loads(text) for text in block_numbers], "runs": blocks_by_run}
