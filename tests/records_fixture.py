"""Synthetic rows that look like those of real sweeps, for everything that reads records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench import records
from bench.records import Record
from bench.records.store import validate_record

GIB = 2**30
MODEL_PARAMETERS = {"t5_tiny": 5_242_880, "gpt_tiny": 6_438_912, "t5_small": 60_506_624, "gpt_small": 124_439_808}


def format_effective_strategy(strategy: str, sharding_factor: int, world_size: int) -> str:
    """The name a run of this kind gives what it did."""
    if strategy not in ("fsdp", "fsdp1"):
        return strategy
    if world_size == 1:
        return f"{strategy}/unsharded"
    sharding = {1: "full_replication", world_size: "full_shard"}.get(sharding_factor, "hybrid_shard")
    return f"{strategy}/{sharding}"


def make_record(**columns: Any) -> Record:
    """One valid row; any column, or `config`, can be given. `steps` asks for that many timed steps (0: none kept)."""
    steps = columns.pop("steps", 20)
    given_columns = {
        "model": "t5_tiny",
        "strategy": "ddp",
        "precision": "fp32",
        "world_size": 2,
        "repeat": 0,
        **columns,
    }
    world_size = given_columns["world_size"]
    factor = given_columns.setdefault("sharding_factor", 1)
    identity = json.dumps(given_columns, sort_keys=True, default=str)
    run_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
    rng = np.random.default_rng(int(run_id[:8], 16))
    step_s = (
        0.05 * (1 + 0.1 * world_size) * (1.3 if given_columns["strategy"] == "fsdp" else 1.0) * rng.uniform(0.95, 1.05)
    )
    times = step_s * rng.lognormal(0, 0.04, (world_size, steps or 20))
    times[:, -1:] *= 1.5  # a straggler
    step_times = times.max(axis=0)
    model = given_columns["model"]
    allocated = int(12 * MODEL_PARAMETERS.get(model, 10_000_000) / factor + 60e6 * rng.uniform(0.99, 1.01))
    is_ok = given_columns.get("status", "ok") == "ok"
    measured: dict[str, Any] = {
        "tflops_per_gpu": 0.004 / float(np.median(step_times)),
        "hardware_tflops_per_gpu": 0.004 / float(np.median(step_times)),
        "tokens_per_second_per_gpu": 1024 / float(np.median(step_times)),
        "step_time_median_s": float(np.median(step_times)),
        "step_time_p95_s": float(np.percentile(step_times, 95)),
        "peak_allocated_bytes": allocated,
        "peak_active_bytes": allocated,
        "peak_reserved_bytes": allocated,
        "peak_allocated_overall_bytes": int(allocated * 1.02),
        "peak_device_used_bytes": allocated + 400 * 2**20,
        "alloc_retries": 0,
        "degraded": False,
        "final_loss": 9.8,
        "ranks": [
            {"rank": rank, "host": "node-a", "step_times_s": [float(time) for time in times[rank]]}
            for rank in range(world_size if steps else 0)
        ],
    }
    row: Record = {
        "run_id": run_id,
        "evidence": "measured",
        "sweep": "default",
        "attempt": 0,
        "status": "ok",
        "family": model.partition("_")[0],
        "parameters": MODEL_PARAMETERS.get(model, 10_000_000),
        "effective_strategy": format_effective_strategy(given_columns["strategy"], factor, world_size),
        "device": "cpu",
        "hardware": "cpu",
        "nodes": 1,
        "batch_size_per_gpu": 4,
        "sequence_length": 128,
        "gradient_accumulation": 1,
        "activation_checkpointing": "none",
        "compile": False,
        "attention": "sdpa",
        "optimizer": "adamw",
        "optimizer_implementation": "fused",
        "parameter_dtype": "fp32",
        "compute_dtype": given_columns["precision"],
        "reduce_dtype": "fp32",
        "setup_s": 3.2,
        "seed": 0,
        "git_sha": "0123456789abcdef0123456789abcdef01234567",
        "git_clean": True,
        "torch_version": "2.13.0+cpu",
        "started_at": "2026-05-04T10:00:00+00:00",
        "finished_at": "2026-05-04T10:00:20+00:00",
        "gpu_name": "AMD EPYC 9554 64-Core Processor",
        "hosts": "node-a",
        "config": {
            "mode": "measure",
            "model": {"name": model, "num_layers": len(model)},
            "strategy": {
                "name": given_columns["strategy"],
                "sharding_factor": factor,
                "knob_of": given_columns["strategy"],
            },
            "precision": {"name": given_columns["precision"], "compute": given_columns["precision"]},
            "measurement": {"warmup_steps": 2, "steps": steps},
            "gpus": world_size,
            "repeat": given_columns["repeat"],
        },
        **(measured if is_ok else {}),
        **given_columns,
    }
    if row["status"] == "oom":
        row = {"oom_phase": "forward", "oom_bytes": 96 * 2**20, "oom_rank": 0, **row}
    validate_record(row)
    return row


def make_default_sweep(precisions: tuple[str, ...] = ("fp32", "bf16")) -> list[Record]:
    """What `python -m bench.sweep` leaves: both families, every strategy, two precisions, 1, 2 and 4 processes, and
    a part with 0.5 GiB per process in which replicated models run out of memory.
    """
    rows = []
    for model in ("t5_tiny", "gpt_tiny"):
        for precision in precisions:
            for world_size in (1, 2, 4):
                sharding_options = {("ddp", 1), ("fsdp", 1), ("fsdp", min(2, world_size)), ("fsdp", world_size)}
                run = {"model": model, "precision": precision, "world_size": world_size}
                rows += [
                    make_record(**run, strategy=name, sharding_factor=factor)
                    for name, factor in sorted(sharding_options)
                ]
    for model in ("t5_tiny", "t5_small", "gpt_tiny", "gpt_small"):
        for strategy, factor in (("ddp", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)):
            is_large, is_replicated = "small" in model, factor < (2 if model == "t5_small" else 4)
            oom_columns = {"status": "oom", "oom_phase": "optimizer" if model == "t5_small" else "init"}
            rows.append(
                make_record(
                    model=model, world_size=4, strategy=strategy, sharding_factor=factor, memory_limit_bytes=GIB // 2,
                    hardware="cpu", batch_size_per_gpu=1, sequence_length=128,
                    **(oom_columns if is_large and is_replicated else {}),
                )
            )  # fmt: skip
    return rows


def write_store(store: Path, rows: list[Record]) -> Path:
    """Write rows to a store as a sweep would."""
    for row in rows:
        records.write_row(store, row)
    return store
