"""What was measured on a GPU, against a CPU's losses and predicted memory: ``results/checks/h100.json``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.checks.losses import load_reference_losses
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.prediction.predictor import predict_runs
from tests.conftest import ROOT

H100_CHECK = json.loads((ROOT / "results/checks/h100.json").read_text())

LARGE_RUN = "measured"
"""GPT-350M; all others are of a million parameters."""


def predict_allocated_bytes() -> dict[str, float]:
    hardware = compose_config({"hardware": "h100_80gb"})["hardware"]
    runs: list[dict[str, Any]] = H100_CHECK["runs"]
    configs = [build_run_config({**run["config"], "mode": "predict", "hardware": hardware}) for run in runs]
    return {
        run["run"]: prediction.memory.allocated.value
        for run, prediction in zip(runs, predict_runs(configs), strict=True)
    }


def test_losses_on_a_gpu_are_those_of_a_cpu() -> None:
    reference = load_reference_losses()
    compared = [run for run in H100_CHECK["runs"] if run["run"] != LARGE_RUN]
    assert len(compared) == 18
    assert len({run["run"].partition(" ")[0] for run in compared}) == 9
    for run in compared:
        expected = reference[run["run"].rpartition(" ")[2]]
        assert run["losses"] == pytest.approx(expected, rel=2.4e-7), run["run"]


def test_predicted_memory_is_what_the_allocator_of_a_gpu_had() -> None:
    predicted_bytes = predict_allocated_bytes()
    for run in H100_CHECK["runs"]:
        too_large = predicted_bytes[run["run"]] - run["peak_allocated_bytes"]
        if "accelerate" in run["run"]:  # which leaves DDP out where there is one process
            assert 0 < too_large < 4.2e6, run["run"]
        else:
            assert -1.8e6 < too_large < 0, run["run"]
    large = next(run for run in H100_CHECK["runs"] if run["run"] == LARGE_RUN)
    assert predicted_bytes[LARGE_RUN] == pytest.approx(large["peak_allocated_bytes"], rel=0.0003)
