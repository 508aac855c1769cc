"""Nodes are checked before a run; one that is slower than its kind is named, and left out afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster_sweeps import FAKE_MODEL_RUN, find_run_attempts, run_jobs_command, submit_sweep
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE = (*FAKE_MODEL_RUN, "cluster=slurm_test", "gpus=2", "cluster.check=quick")


def described_as_fast(folder: Path) -> Path:
    """A description of a CPU that promises more than any CPU does."""
    values = yaml.safe_load((ROOT / "results/calibration/cpu_2core.yaml").read_text())
    values |= {"name": "fast", "peak_tflops": {"fp32": 1000.0}}
    values["speeds"]["matmul"] = {"efficiency": {"fp32": 0.5}, "multiprocessors": 1, "half_depth": 64}
    file = folder / "fast.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_healthy_node_is_on_the_row_with_its_numbers(idle_slurm, tmp_path: Path) -> None:
    submit_sweep(tmp_path, *ONE)
    run_jobs_command("watch", tmp_path)
    (row,) = find_run_attempts(tmp_path)
    assert row["status"] == "ok", row["error"]
    assert row["health_matmul_tflops"] > 0
    assert row["health_all_reduce_gb_s"] > 0
    assert row["failed_nodes"] is None
    assert {rank["health"]["node"] for rank in row["ranks"]} == {row["hosts"]}


def test_a_slow_node_is_named_and_left_out_when_the_run_is_submitted_again(idle_slurm, tmp_path: Path) -> None:
    store = tmp_path / "store"
    slow = (*ONE, f"hardware={described_as_fast(tmp_path)}", "cluster.exclude_bad=true")
    submit_sweep(store, *slow)
    run_jobs_command("watch", store)
    (first,) = find_run_attempts(store)
    node = first["failed_nodes"]
    assert first["status"] == "error"
    assert f"node {node} failed the health check: matrix products reach" in first["error"]
    again = submit_sweep(store, *slow)
    assert f"Left out, since their last health check failed: {node}" in again.stdout
    run_jobs_command("watch", store)
    _, second = find_run_attempts(store)
    assert second["failed_nodes"] not in (None, node)
    kept = submit_sweep(store, *slow, "cluster.exclude_bad=false")
    assert "Left out" not in kept.stdout
    run_jobs_command("cancel", store)
