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

from bench.records.schema import COLUMNS, FORMAT_VERSION, Record
from bench.records.table import to_frame

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published" / "published.csv"

Line = Mapping[str, str]

GB = 10**9
"""The FSDP paper's memory axes say GB. Read as 10^9 bytes: its fullest point, 80 GB reserved on a GPU of 80 GiB less
what CUDA keeps, could not be GiB."""

STRATEGIES = {"FSDP": "fsdp1", "FSDP2": "fsdp", "DDP": "ddp"}
"""Names sources use, and the suite's; every source that says only FSDP used FullyShardedDataParallel. Others stay."""

SHARDS_ALL = ("fsdp", "fsdp1", "ZeRO-DP", "DeepSpeed ZeRO-3")
"""Strategies whose ranks all share one copy where they shard fully; with tensor or pipeline parallelism they do not."""

MODELS = {"T5-611M": "t5_611m", "T5-2.28B": "t5_2b", "T5-11B": "t5_11b", "minGPT-175B": "gpt_175b"}
"""The FSDP paper's models that conf/model has."""

PRECISIONS = {
    "bf16 mixed": "bf16",
    "amp_bf16": "bf16",
    "fp16 mixed": "fp16",
    "fp16 mixed + Adam": "fp16",
}
CHECKPOINTING = {"yes": "full", "full": "full", "no": "none", "selective op": "selective"}
HARDWARE = {"A100-80GB": "a100_80gb", "a100_80gb": "a100_80gb", "h100_80gb": "h100_80gb", "H200": "h200"}
"""GPUs that conf/hardware describes; where a source says just "H100" it does not say which."""

COUNTS_RECOMPUTATION = {
    "fsdp_paper": "inferred: the paper does not give its formula",
    "megatron_sc21": "stated: its equation 3 includes recomputation",
    "megatron_a100_readme": "stated: the equation of megatron_sc21",
    "medium_fsdp_1t_aws": "stated: the equation of megatron_sc21",
    "pytorch_blog_fsdp_intro": "inferred: the configuration of medium_fsdp_1t_aws",
}
"""Sources whose TFLOPS count what the device executed, recomputation included, and how that is known."""

COUNTS_MODEL = {
    "llm_foundry": "stated: model FLOPs, HFU apart",
    "megatron_h100_readme": "stated: printed beside the MFU they give",
    "llama3_paper": "stated: printed beside the MFU they give",
}
"""Sources whose TFLOPS count the model's FLOPs only. The TFLOPS of the others stay in ``source``."""

MEMORY = {
    "peak_memory_allocated": "peak_allocated_bytes",
    "peak_memory_active": "peak_active_bytes",
    "peak_memory_reserved": "peak_reserved_bytes",
}
FRACTIONS = {"mfu": "mfu", "hfu": "hfu", "peak_fraction": "hfu", "hardware_utilization": "hfu"}
"""Metrics in percent of the dense peak. The two without an F belong to sources that count recomputation."""

PLAIN = {
    "tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "median_latency_per_batch": "step_time_median_s",
}
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def published_records(path: str | Path = PUBLISHED) -> list[Record]:
    """One record per line of the file, in its order.

    A line is one metric of one configuration, so a configuration with several metrics has as many rows.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [_record(line) for line in csv.DictReader(file)]


def load_published(path: str | Path = PUBLISHED) -> pd.DataFrame:
    """`published_records` as a table: the columns of `bench.records.load`, then ``source_*`` with what was printed.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    import pandas as pd  # as in `to_frame`

    records = published_records(path)
    frame = to_frame(records)
    for key in records[0]["source"] if records else ():
        name = key if key.startswith("source_") else f"source_{key}"
        values = [record["source"][key] for record in records]
        frame[name] = pd.array(values, dtype="Float64" if key == "uncertainty" else "string")
    return frame


def _record(line: Line) -> Record:
    gpus = _whole(line["gpu_count"])
    strategy = STRATEGIES.get(line["strategy"], line["strategy"] or None)
    kind = _kind(strategy, line["sharding"])
    paper = line["source_key"] == "fsdp_paper"
    columns: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    columns |= {
        "run_id": _identity(line),
        "evidence": "published",
        "attempt": 0,
        "status": "ok",
        "model": (MODELS.get(line["model"]) if paper else None) or line["model"] or None,
        "family": _family(line["model"]),
        "parameters": _count(line["parameters"]),
        "strategy": strategy,
        "effective_strategy": kind,
        "sharding_factor": _sharding_factor(strategy, kind, line["sharding"], gpus),
        "precision": _precision(line),
        "device": "cuda" if line["gpu"] else None,
        "hardware": HARDWARE.get(line["gpu"]),
        "world_size": gpus,
        "nodes": _noted(line, r"^(\d+) machines"),
        "batch_size_per_gpu": _whole(line["batch_size_per_gpu"]),
        "sequence_length": _whole(line["sequence_length"]),
        "gradient_accumulation": _noted(line, r"(?:grad accum|GAS) (\d+)"),
        "activation_checkpointing": CHECKPOINTING.get(line["activation_checkpointing"]),
    }
    return {
        "format": FORMAT_VERSION,
        **columns,
        **_knobs(line["sharding"]),
        **_measurement(line),
        "source": _source(line),
    }


def _measurement(line: Line) -> dict[str, Any]:
    """The columns a line's metric belongs to; none for a claim, a ratio or a range."""
    metric, value, source = line["metric"], _number(line["value"]), line["source_key"]
    if metric == "outcome" and line["value"] == "OOM":
        # "when attempting to wrap": before the first step.
        return {"status": "oom", "oom_phase": "init"}
    if value is None:
        return {}
    if metric == "tflops_per_gpu":
        if source in COUNTS_RECOMPUTATION:
            return {"hardware_tflops_per_gpu": value}
        return {"tflops_per_gpu": value} if source in COUNTS_MODEL else {}
    if metric in FRACTIONS:
        return {FRACTIONS[metric]: value / 100}
    if metric in MEMORY:
        return {MEMORY[metric]: round(value * GB)}
    return {PLAIN[metric]: value} if metric in PLAIN else {}


def _source(line: Line) -> dict[str, Any]:
    """The line as it was printed, with the uncertainty as a number and what its TFLOPS count."""
    counts = None
    if line["metric"] == "tflops_per_gpu":
        source = line["source_key"]
        kinds = (("hardware FLOPs", COUNTS_RECOMPUTATION), ("model FLOPs", COUNTS_MODEL))
        known = [f"{what} ({sources[source]})" for what, sources in kinds if source in sources]
        counts = known[0] if known else "not stated"
    printed = {key: value or None for key, value in line.items()}
    printed["figure"] = printed.pop("figure_or_table")
    return {**printed, "uncertainty": _number(line["uncertainty"]), "counts": counts}


def _identity(line: Line) -> str:
    text = json.dumps(dict(line), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(strategy: str | None, sharding: str) -> str | None:
    """How the suite names what was done; empty where the source does not say or the suite has no name for it.

    The paper's RAF and NRAF are resharding after forward and not doing so.
    """
    if strategy == "ddp":
        return "ddp"
    found = re.match(r"(full_shard|hybrid_shard|no_shard|shard_grad_op)\b", sharding)
    if strategy not in ("fsdp", "fsdp1") or found is None:
        return None
    kind = found[1]
    if sharding.endswith(" NRAF"):
        kind = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_grad_op"}[kind]
    return f"{strategy}/{kind}"


def _sharding_factor(strategy: str | None, kind: str | None, sharding: str, gpus: int | None) -> int | None:
    """Ranks per copy of the model where that follows; for hybrid sharding no source says how many a node has."""
    if strategy == "ddp" or (kind or "").endswith("/no_shard"):
        return 1
    sharded = kind is not None and "hybrid" not in kind
    return gpus if strategy in SHARDS_ALL and (sharded or "ZeRO-3" in sharding) else None


def _knobs(sharding: str) -> dict[str, Any]:
    """Knobs of the strategy that the source names: the columns of that name."""
    knobs: dict[str, Any] = {}
    if found := re.search(r"backward prefetch (on|off)", sharding):
        knobs["backward_prefetch"] = {"on": "pre", "off": "none"}[found[1]]
    if found := re.search(r"rate limiter (on|off)", sharding):
        knobs["limit_all_gathers"] = found[1] == "on"
    if found := re.search(r"\b(N?)RAF$", sharding):
        knobs["reshard_after_forward"] = not found[1]
    if "offload" in sharding:
        knobs["cpu_offload"] = True
    return knobs


def _precision(line: Line) -> str | None:
    """The suite's name; other names (fp8) as printed. A bare "bf16" says what is computed in, not what is stored."""
    if line["precision"] == "bf16" and "mp_mode PURE" in line["note"]:
        return "bf16_pure"
    return PRECISIONS.get(line["precision"], line["precision"] or None)


def _family(model: str) -> str | None:
    if model.startswith("T5"):
        return "t5"
    return "gpt" if "GPT" in model else None


def _noted(line: Line, pattern: str) -> int | None:
    found = re.search(pattern, line["note"])
    return int(found[1]) if found else None


def _number(text: str) -> float | None:
    """A plain number; None for a bound (">40"), a range or a word."""
    return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _count(text: str) -> int | None:
    """A number of parameters, written out or with K, M, B or T."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text)
    return round(float(found[1]) * UNITS.get(found[2], 1)) if found else None
