"""Published numbers as rows: the lines of ``results/published/published.csv`` in the columns of a record.

Only what the source says goes into a column; what it leaves open stays empty. The line as it was printed is the row's
nested ``source``. ``results/published/README.md`` says what the file holds and how to read it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.installation import DATA_FOLDER
from bench.records.reading import to_frame
from bench.records.schema import COLUMNS, FORMAT_VERSION, Record

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED_CSV = DATA_FOLDER / "results" / "published" / "published.csv"

PublishedLine = Mapping[str, str]

GB = 10**9
"""The FSDP paper's memory axes say GB. Read as 10^9 bytes: its fullest point, 80 GB reserved on a GPU of 80 GiB less
what CUDA keeps, could not be GiB."""

STRATEGY_NAMES = {"FSDP": "fsdp1", "FSDP2": "fsdp", "DDP": "ddp"}
"""Names sources use, and the suite's; every source that says only FSDP used FullyShardedDataParallel. Others stay."""

FULLY_SHARDING_STRATEGIES = ("fsdp", "fsdp1", "ZeRO-DP", "DeepSpeed ZeRO-3")
"""Strategies whose ranks all share one copy where they shard fully; with tensor or pipeline parallelism they do not."""

MODEL_NAMES = {
    "T5-611M": "t5_611m",
    "T5-2.28B": "t5_2b",
    "T5-11B": "t5_11b",
    "minGPT-175B": "gpt_175b",
    "DHEN": "dhen",
}
"""The FSDP paper's models that conf/model has."""

PRECISION_NAMES = {
    "bf16 mixed": "bf16",
    "amp_bf16": "bf16",
    "fp16 mixed": "fp16",
    "fp16 mixed + Adam": "fp16",
}
CHECKPOINTING_NAMES = {"yes": "full", "full": "full", "no": "none", "selective op": "selective"}
HARDWARE_NAMES = {"A100-80GB": "a100_80gb", "a100_80gb": "a100_80gb", "h100_80gb": "h100_80gb", "H200": "h200"}
"""GPUs that conf/hardware describes; where a source says just "H100" it does not say which."""

HARDWARE_FLOPS_SOURCES = {
    "fsdp_paper": "inferred: the paper does not give its formula",
    "megatron_sc21": "stated: its equation 3 includes recomputation",
    "megatron_a100_readme": "stated: the equation of megatron_sc21",
    "medium_fsdp_1t_aws": "stated: the equation of megatron_sc21",
    "pytorch_blog_fsdp_intro": "inferred: the configuration of medium_fsdp_1t_aws",
}
"""Sources whose TFLOPS count what the device executed, recomputation included, and how that is known."""

MODEL_FLOPS_SOURCES = {
    "llm_foundry": "stated: model FLOPs, HFU apart",
    "megatron_h100_readme": "stated: printed beside the MFU they give",
    "llama3_paper": "stated: printed beside the MFU they give",
}
"""Sources whose TFLOPS count the model's FLOPs only. The TFLOPS of the others stay in ``source``."""

MEMORY_COLUMNS = {
    "peak_memory_allocated": "peak_allocated_bytes",
    "peak_memory_active": "peak_active_bytes",
    "peak_memory_reserved": "peak_reserved_bytes",
}
UTILIZATION_COLUMNS = {"mfu": "mfu", "hfu": "hfu", "peak_fraction": "hfu", "hardware_utilization": "hfu"}
"""Metrics in percent of the dense peak. The two without an F belong to sources that count recomputation."""

UNCONVERTED_COLUMNS = {
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "median_latency_per_batch": "step_time_median_s",
}
COUNT_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_published_records(path: str | Path = PUBLISHED_CSV) -> list[Record]:
    """One record per line of the file, in its order.

    A line is one metric of one configuration, so a configuration with several metrics has as many rows.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    return [_build_record(line) for line in read_published_lines(path)]


def read_published_lines(path: str | Path = PUBLISHED_CSV) -> list[PublishedLine]:
    """The lines of the file as they were printed: column to text, empty where the source says nothing.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def load_published(path: str | Path = PUBLISHED_CSV) -> pd.DataFrame:
    """`read_published_records` as a table: the columns of `bench.records.load`, then ``source_*`` with what was
    printed.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    import pandas as pd  # as in `to_frame`

    records = read_published_records(path)
    frame = to_frame(records)
    for key in records[0]["source"] if records else ():
        name = key if key.startswith("source_") else f"source_{key}"
        values = [record["source"][key] for record in records]
        frame[name] = pd.array(values, dtype="Float64" if key == "uncertainty" else "string")
    return frame


def _build_record(line: PublishedLine) -> Record:
    gpus = _parse_integer(line["gpu_count"])
    strategy = STRATEGY_NAMES.get(line["strategy"], line["strategy"] or None)
    effective_strategy = _find_effective_strategy(strategy, line["sharding"])
    is_fsdp_paper = line["source_key"] == "fsdp_paper"
    columns: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    columns |= {
        "run_id": _compute_run_id(line),
        "evidence": "published",
        "attempt": 0,
        "status": "ok",
        "model": (MODEL_NAMES.get(line["model"]) if is_fsdp_paper else None) or line["model"] or None,
        "family": _find_family(line["model"]),
        "parameters": _parse_count(line["parameters"]),
        "strategy": strategy,
        "effective_strategy": effective_strategy,
        "sharding_factor": _find_sharding_factor(strategy, effective_strategy, line["sharding"], gpus),
        "precision": _find_precision(line),
        "device": "cuda" if line["gpu"] else None,
        "hardware": HARDWARE_NAMES.get(line["gpu"]),
        "world_size": gpus,
        "nodes": _parse_note(line, r"^(\d+) machines"),
        "batch_size_per_gpu": _parse_integer(line["batch_size_per_gpu"]),
        "sequence_length": _parse_integer(line["sequence_length"]),
        "gradient_accumulation": _parse_note(line, r"(?:grad accum|GAS) (\d+)"),
        "activation_checkpointing": CHECKPOINTING_NAMES.get(line["activation_checkpointing"]),
        "torch_version": _find_torch_version(line),
    }
    return {
        "format": FORMAT_VERSION,
        **columns,
        **_parse_knobs(line["sharding"]),
        **_build_measurement(line),
        "source": _build_source(line),
    }


def _build_measurement(line: PublishedLine) -> dict[str, Any]:
    """The columns a line's metric belongs to; none for a claim, a ratio or a range."""
    metric, value, source = line["metric"], _parse_number(line["value"]), line["source_key"]
    if metric == "outcome" and line["value"] == "OOM":
        # "when attempting to wrap": before the first step.
        return {"status": "oom", "oom_phase": "init"}
    if value is None:
        return {}
    if metric == "tflops_per_gpu":
        if source in HARDWARE_FLOPS_SOURCES:
            return {"hardware_tflops_per_gpu": value}
        return {"tflops_per_gpu": value} if source in MODEL_FLOPS_SOURCES else {}
    if metric in UTILIZATION_COLUMNS:
        return {UTILIZATION_COLUMNS[metric]: value / 100}
    if metric in MEMORY_COLUMNS:
        return {MEMORY_COLUMNS[metric]: round(value * GB)}
    return {UNCONVERTED_COLUMNS[metric]: value} if metric in UNCONVERTED_COLUMNS else {}


def _build_source(line: PublishedLine) -> dict[str, Any]:
    """The line as it was printed, with the uncertainty as a number and what its TFLOPS count."""
    counted_flops = None
    if line["metric"] == "tflops_per_gpu":
        source = line["source_key"]
        source_kinds = (("hardware FLOPs", HARDWARE_FLOPS_SOURCES), ("model FLOPs", MODEL_FLOPS_SOURCES))
        descriptions = [f"{label} ({sources[source]})" for label, sources in source_kinds if source in sources]
        counted_flops = descriptions[0] if descriptions else "not stated"
    printed_values = {key: value or None for key, value in line.items()}
    printed_values["figure"] = printed_values.pop("figure_or_table")
    return {**printed_values, "uncertainty": _parse_number(line["uncertainty"]), "counts": counted_flops}


def _compute_run_id(line: PublishedLine) -> str:
    text = json.dumps(dict(line), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find_effective_strategy(strategy: str | None, sharding: str) -> str | None:
    """How the suite names what was done; empty where the source does not say or the suite has no name for it.

    The paper's RAF and NRAF are resharding after forward and not doing so.
    """
    if strategy == "ddp":
        return "ddp"
    match = re.match(r"(full_shard|hybrid_shard|no_shard|shard_grad_op)\b", sharding)
    if strategy not in ("fsdp", "fsdp1") or match is None:
        return None
    sharding_strategy = match[1]
    if sharding.endswith(" NRAF"):
        sharding_strategy = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_grad_op"}[sharding_strategy]
    return f"{strategy}/{sharding_strategy}"


def _find_sharding_factor(
    strategy: str | None, effective_strategy: str | None, sharding: str, gpus: int | None
) -> int | None:
    """Ranks per copy of the model where that follows; for hybrid sharding no source says how many a node has."""
    if strategy == "ddp" or (effective_strategy or "").endswith("/no_shard"):
        return 1
    is_fully_sharded = effective_strategy is not None and "hybrid" not in effective_strategy
    return gpus if strategy in FULLY_SHARDING_STRATEGIES and (is_fully_sharded or "ZeRO-3" in sharding) else None


def _parse_knobs(sharding: str) -> dict[str, Any]:
    """Knobs of the strategy that the source names: the columns of that name."""
    knobs: dict[str, Any] = {}
    if match := re.search(r"backward prefetch (on|off)", sharding):
        knobs["backward_prefetch"] = {"on": "pre", "off": "none"}[match[1]]
    if match := re.search(r"rate limiter (on|off)", sharding):
        knobs["limit_all_gathers"] = match[1] == "on"
    if match := re.search(r"\b(N?)RAF$", sharding):
        knobs["reshard_after_forward"] = not match[1]
    if "offload" in sharding:
        knobs["cpu_offload"] = True
    return knobs


def _find_precision(line: PublishedLine) -> str | None:
    """The suite's name; other names (fp8) as printed. A bare "bf16" says what is computed in, not what is stored."""
    if line["precision"] == "bf16" and "mp_mode PURE" in line["note"]:
        return "bf16_pure"
    return PRECISION_NAMES.get(line["precision"], line["precision"] or None)


def _find_family(model: str) -> str | None:
    if model.startswith("T5"):
        return "t5"
    if model == "DHEN":
        return "dhen"
    return "gpt" if "GPT" in model else None


def _parse_note(line: PublishedLine, pattern: str) -> int | None:
    match = re.search(pattern, line["note"])
    return int(match[1]) if match else None


def _find_torch_version(line: PublishedLine) -> str | None:
    """The version that is stated or follows from the source's scripts; bounds stay in ``source``."""
    version = line.get("torch_version") or ""
    return version if version[:1].isdecimal() else None


def _parse_number(text: str) -> float | None:
    """A plain number; None for a bound (">40"), a range or a word."""
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def _parse_integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _parse_count(text: str) -> int | None:
    """A number of parameters, written out or with K, M, B or T; of dense and sparse ones, their sum."""
    if parts := re.fullmatch(r"(\S+) dense \+ (\S+) sparse", text):
        counts = [_parse_count(part) for part in parts.groups()]
        return None if None in counts else sum(count for count in counts if count is not None)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text)
    return round(float(match[1]) * COUNT_SUFFIXES.get(match[2], 1)) if match else None
