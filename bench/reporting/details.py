"""All that a row holds, as blocks that a page can show: what was asked, where it ran, how long, how much, per rank."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.records import Record
from bench.records.schema import STEPS_FOR_P95
from bench.reporting import labels
from bench.reporting.again import command
from bench.reporting.table import step_times_s

Block = dict[str, Any]
"""A part of a run's details: ``title``, and ``facts`` (pairs), ``columns`` and ``rows``, ``text`` or ``steps``."""

MOST_RANKS = 32
"""Ranks that are listed one by one."""

SECTIONS = ("model", "strategy", "precision", "optimizer", "finetune", "measurement", "hardware")
MEMORY = {
    "peak_allocated_bytes": "Allocated, in a step after warm-up",
    "peak_active_bytes": "Active",
    "peak_reserved_bytes": "Reserved by the caching allocator",
    "peak_allocated_overall_bytes": "Allocated, construction and warm-up included",
    "peak_device_used_bytes": "In use as the driver sees it (on a CPU: resident)",
}
RANK_COLUMNS = {
    "step_times_s": "Median step",
    "peak_allocated_bytes": "Allocated",
    "peak_reserved_bytes": "Reserved",
    "peak_device_used_bytes": "Driver",
    "alloc_retries": "Retries",
}
SPEED = {
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
SHARES = {"mfu", "hfu", "exposed_communication"}


def details(record: Record, file: str, heading: str) -> list[Block]:
    """The blocks of one row.

    Parameters
    ----------
    file: str
        Where the row lies, below the store.
    heading: str
        The run in words.
    """
    return [
        block
        for block in (
            _outcome(record, heading),
            _where(record, file),
            _again(record),
            _step_times(record),
            _speed(record),
            _memory(record),
            *_prediction(record),
            _ranks(record),
            *_configuration(record),
            *_environment(record),
            *_source(record),
        )
        if block
    ]


def _facts(title: str, pairs: Mapping[str, Any]) -> Block | None:
    """Pairs of a name and a text, without those that say nothing."""
    facts = [[name, _text(value)] for name, value in pairs.items() if value is not None and value != ""]
    return {"title": title, "facts": facts} if facts else None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _outcome(record: Record, heading: str) -> Block | None:
    degraded = "yes: the times are not representative" if record.get("degraded") else None
    return _facts(
        "Outcome",
        {
            "Run": heading,
            "Status": record["status"],
            "Evidence": record["evidence"],
            "Fits": record.get("fit"),
            "Degraded": degraded,
            "Loss": _loss_text(record.get("first_nonfinite_loss_step")),
            "Ran out of memory in": record.get("oom_phase"),
            "Asked for": _memory_text(record.get("oom_bytes")),
            "First rank": record.get("oom_rank"),
            "Cause": record.get("error"),
        },
    )


def _loss_text(step: int | None) -> str | None:
    return None if step is None else f"NaN or infinite from step {step}: the run trained nothing from there on"


def _where(record: Record, file: str) -> Block | None:
    clean = {False: " with uncommitted changes", None: "", True: ""}[record.get("git_clean")]
    return _facts(
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
            "Commit": f"{record['git_sha']}{clean}" if record.get("git_sha") else None,
            "Predictor": record.get("predictor"),
        },
    )


def _again(record: Record) -> Block | None:
    typed = command(record)
    return {"title": "Run it again", "text": typed} if typed else None


def _step_times(record: Record) -> Block | None:
    steps = step_times_s(record)
    if len(steps):
        shares = {"min": 0, "5 %": 5, "median": 50, "95 %": 95, "max": 100}
        if len(steps) < STEPS_FOR_P95:
            del shares["5 %"], shares["95 %"]
        found = np.percentile(steps, list(shares.values()))
        facts = [[name, labels.seconds(float(value))] for name, value in zip(shares, found, strict=True)]
        interval = _interval(record, "step_time_ci_low_s", "step_time_ci_high_s", labels.seconds)
        facts += [["95 % interval of the median", interval]] if interval else []
        shown = [float(f"{1000 * step:.4g}") for step in steps]
        return {"title": f"Step times ({labels.counted(len(steps), 'timed step')})", "facts": facts, "steps": shown}
    if record.get("step_time_median_s") is None:
        return None
    expected = {
        "Step": labels.seconds(record["step_time_median_s"]),
        "95 % interval": _interval(record, "step_time_ci_low_s", "step_time_ci_high_s", labels.seconds),
    }
    return _facts("Step time", expected)


def _interval(record: Mapping[str, Any], low: str, high: str, words: Any) -> str | None:
    if record.get(low) is None or record.get(high) is None:
        return None
    return f"{words(record[low])} to {words(record[high])}"


def _speed(record: Record) -> Block | None:
    values: dict[str, Any] = {}
    for column, name in SPEED.items():
        value = record.get(column)
        if isinstance(value, float):
            value = f"{labels.number(100 * value)} %" if column in SHARES else labels.number(value)
        values[name] = value
    return _facts("Speed", values)


def _memory_text(value: Any) -> str | None:
    return None if value is None else f"{labels.memory(value)} ({value:,} bytes)"


def _memory(record: Record) -> Block | None:
    values = {name: _memory_text(record.get(column)) for column, name in MEMORY.items()}
    for kind in ("allocated", "reserved"):
        ends = (f"peak_{kind}_low_bytes", f"peak_{kind}_high_bytes")
        values[f"{kind.capitalize()}: expected 19 times of 20"] = _interval(record, *ends, labels.memory)
    values["Limit"] = _memory_text(record.get("memory_limit_bytes"))
    return _facts("Peak memory of the rank that needed most", values)


def _prediction(record: Record) -> list[Block | None]:
    prediction = record.get("prediction") or {}
    memory, time = prediction.get("memory") or {}, prediction.get("time") or {}
    parts = {name: labels.memory(size) for name, size in (memory.get("parts_bytes") or {}).items()}
    where = {"Phase of the peak": memory.get("phase"), "Module of the peak": memory.get("module")}
    seconds = {
        name.removesuffix("_s").replace("_", " "): labels.seconds(value)
        for name, value in time.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }
    return [
        _facts("What the predicted peak consists of", {**parts, **where}),
        _facts("What the predicted step consists of", seconds),
    ]


def _ranks(record: Record) -> Block | None:
    ranks = [rank for rank in record.get("ranks") or [] if isinstance(rank, Mapping)]
    if not ranks:
        return None
    rows = [_rank(rank) for rank in ranks[:MOST_RANKS]]
    filled = [place for place in range(len(rows[0])) if any(row[place] != labels.MISSING for row in rows)]
    columns = ["Rank", "Host", "Status", *RANK_COLUMNS.values()]
    more = f", the first {MOST_RANKS} of {len(ranks)}; the others are in the row" if len(ranks) > MOST_RANKS else ""
    return {
        "title": f"Ranks{more}",
        "columns": [columns[place] for place in filled],
        "rows": [[row[place] for place in filled] for row in rows],
    }


def _rank(rank: Mapping[str, Any]) -> list[str]:
    texts = [str(rank.get(name, labels.MISSING)) for name in ("rank", "host", "status")]
    for column in RANK_COLUMNS:
        value = rank.get(column)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = statistics.median(value) if len(value) else None
        if value is None:
            texts.append(labels.MISSING)
        elif column.endswith("_bytes"):
            texts.append(labels.memory(float(value)))
        else:
            texts.append(labels.seconds(float(value)) if column.endswith("_s") else str(value))
    return texts


def _configuration(record: Record) -> list[Block | None]:
    config = record.get("config") or {}
    own = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    blocks = [_facts("Configuration", own)]
    for section in dict.fromkeys((*SECTIONS, *config)):
        if isinstance(config.get(section), Mapping):
            blocks.append(_facts(f"Configuration: {section}", _flat(config[section])))
    effective = _flat(record.get("effective") or {})
    asked = _flat(config.get("strategy") or {})
    other = {name: value for name, value in effective.items() if asked.get(name, "") != value}
    blocks.append(_facts("What the strategy came to", other))
    return blocks


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """A nested section as dotted names and values; sources apart, which are long and in the row."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if name == "sources":
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": what for inner, what in _flat(value).items()}
        else:
            found[str(name)] = "null" if value is None else value
    return found


def _environment(record: Record) -> list[Block | None]:
    environment = {name: value for name, value in (record.get("environment") or {}).items() if value is not None}
    topology, devices = environment.pop("topology", None), environment.pop("devices", None)
    blocks: list[Block | None] = [_facts("Environment", _flat(environment))]
    alike: dict[str, list[str]] = {}
    for rank, facts in (devices or {}).items():
        alike.setdefault(json.dumps(facts, sort_keys=True), []).append(str(rank).removeprefix("rank "))
    for text, ranks in alike.items():
        which = labels.listing(ranks, 8)
        blocks.append(_facts(f"Device of rank {which}", _flat(json.loads(text))))
    if topology:
        blocks.append({"title": "Topology", "text": str(topology)})
    return blocks


def _source(record: Record) -> list[Block | None]:
    return [_facts("Source", record.get("source") or {})]


def packed(runs: Mapping[str, list[Block]]) -> dict[str, Any]:
    """The details of many runs: every block once, and of each run which blocks it has.

    Runs of a sweep share most of what they are: a thousand of them have a handful of environments.
    """
    numbers: dict[str, int] = {}
    found = {
        run: [numbers.setdefault(json.dumps(block, ensure_ascii=False), len(numbers)) for block in blocks]
        for run, blocks in runs.items()
    }
    return {"blocks": [json.loads(text) for text in numbers], "runs": found}
