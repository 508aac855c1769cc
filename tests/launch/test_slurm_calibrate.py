"""Calibration on a real SLURM: tasks on two nodes communicate inside nodes and across, and the first writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from bench.hardware.hardware_file import read_hardware_file
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_tasks_of_srun_time_collectives_inside_nodes_and_across(idle_slurm, tmp_path: Path):
    values = yaml.safe_load((ROOT / "conf" / "hardware" / "h200.yaml").read_text())
    values.update(name="known", device="cpu", gpu_names=[])
    known, output = tmp_path / "known.yaml", tmp_path / "mine.yaml"
    known.write_text(yaml.safe_dump(values))
    said = idle_slurm.run(
        *("srun", "--nodes=2", "--ntasks-per-node=2", f"--chdir={ROOT}"),
        *(sys.executable, "-m", "tests.calibrate_anyway", f"hardware={known}", "only=collectives", "quick=true"),
        f"output={output}",
    )
    assert f"Hardware file: {output}" in said
    hardware = read_hardware_file(output)
    assert hardware.speeds is not None
    assert "4 processes on 2 nodes" in hardware.sources["calibration"]
    assert hardware.sources["speeds.links.latency"] == "measured across nodes"
    assert hardware.sources["speeds.links.gloo"] == "measured inside a node"
    residuals = {name for name in hardware.sources if name.startswith("residual of all-reduce")}
    assert residuals == {
        f"residual of all-reduce, {words}"
        for words in ("4 ranks on 2 nodes", "2 ranks on 2 nodes", "2 ranks on 1 node")
    }
