"""Synthetic rows of repeated runs, for everything that compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.records import Record
from tests.records_fixture import make_record

BASE_STEP_S, PEAK_BYTES = 0.1, 400 * 2**20

A100_FACTS = {
    "name": "NVIDIA A100-SXM4-80GB",
    "memory_bytes": 85_000_000_000,
    "driver": "550.54.15",
    "power_limit_w": 400.0,
    "sm_clock_mhz": 1095,
    "sm_clock_max_mhz": 1410,
}
TOPOLOGY = (
    "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-31\nGPU1\tNV12\t X \t0-31\n\nLegend:\n  X = Self\n  SYS = over\n"
)


def make_runs(
    step_times_s: Sequence[float], *, memory: int = PEAK_BYTES, day: str = "2026-05-04", **columns: Any
) -> list[Record]:
    """One configuration run as often as there are times; `columns` are those of every row."""
    rows = []
    for repeat, seconds in enumerate(step_times_s):
        measured = {
            "step_time_median_s": float(seconds),
            "tflops_per_gpu": 2.0 / float(seconds),
            "peak_allocated_bytes": memory,
            "peak_active_bytes": memory,
            "peak_reserved_bytes": memory,
        }
        if columns.get("status", "ok") != "ok":
            measured = {}
        clock = {"started_at": f"{day}T10:{repeat:02d}:00+00:00", "finished_at": f"{day}T10:{repeat:02d}:30+00:00"}
        rows.append(make_record(**{"repeat": repeat, "steps": 0, **clock, **measured, **columns}))
    return rows


def draw_step_times(
    rng: np.random.Generator, count: int, spread: float, slower: float = 0.0, step_s: float = BASE_STEP_S
) -> np.ndarray:
    """Step times of so many runs: lognormal around `step_s`, all slower by a fraction."""
    return step_s * (1 + slower) * np.exp(rng.normal(0, spread, count))


def move_to_gpus(rows: list[Record], variables: dict[str, str] | None = None, **gpu_facts: Any) -> list[Record]:
    """The same rows as if they had run on GPUs; `gpu_facts` replace those of `GPU`."""
    device = {**A100_FACTS, **gpu_facts}
    environment = {
        "cuda": "12.8",
        "nccl": "2.27.3",
        "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
        "variables": variables or {},
        "topology": TOPOLOGY,
        "devices": {"rank 0": device, "rank 1": device},
    }
    return [
        {**row, "device": "cuda", "hardware": "auto", "gpu_name": device["name"], "environment": environment}
        for row in rows
    ]
