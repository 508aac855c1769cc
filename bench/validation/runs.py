"""Runs of published figures and tables that are compared as a whole: their overrides, rows and rates."""

from __future__ import annotations

from bench.config.compose import compose_config
from bench.config.grid import parse_grids
from bench.config.run_config import RunConfig
from bench.config.speed_columns import compute_speed_columns
from bench.prediction.prediction import Prediction
from bench.records.published import PUBLISHED_CSV, PublishedLine, read_published_lines

TFLOPS = "TFLOPS"


def _read_sweep_settings(sweep: str) -> dict[str, str]:
    """What all runs of a file under ``conf/sweep`` have in common, without how they are timed."""
    (grid,) = parse_grids(sweep, compose_config({"sweep": sweep})["sweep"])
    return {key: value for key, value in grid.fixed.items() if not key.startswith("measurement.")}


PAPER_SWEEPS = {"minGPT-175B": "gpt_175b_scale", "T5-11B": "t5_11b_scale"}
"""The sweeps of the FSDP paper's large runs (section 5.4): their files state what the paper says, and what it leaves
open."""

PAPER_OVERRIDES = {
    model: {
        "hardware": "a100_80gb",
        "gpus_per_node": "8",
        "+hardware.speeds.records_nccl_stream": "true",  # of torch before 2.1
        **_read_sweep_settings(sweep),
    }
    for model, sweep in PAPER_SWEEPS.items()
}

FSDP_PAPER_OVERRIDES = {
    key: value
    for key, value in PAPER_OVERRIDES["T5-11B"].items()
    if PAPER_OVERRIDES["minGPT-175B"].get(key) == value and key != "precision.mixing"
}
"""What its GPT and its T5 have in common; FSDP1 casts parameters unless asked otherwise, and DDP cannot."""


def load_published_rows(source: str, metric: str, figure_or_table: str = "") -> list[PublishedLine]:
    """What a source says, in one of its figures or tables, or in all of them."""
    return [
        row
        for row in read_published_lines(PUBLISHED_CSV)
        if (row["source_key"], row["metric"]) == (source, metric) and row["figure_or_table"].startswith(figure_or_table)
    ]


def compute_tflops(config: RunConfig, prediction: Prediction) -> float:
    """Predicted TFLOP/s per GPU, recomputation counted."""
    assert prediction.time is not None, f"{config.hardware.name} has no speeds"
    return float(compute_speed_columns(config, prediction.time.step_s.value)["hardware_tflops_per_gpu"])
