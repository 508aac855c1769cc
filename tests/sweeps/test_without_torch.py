"""What needs no torch does not import it: plans, mistakes, and predictions that are remembered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = """
import sys
from bench import sweep
assert sweep.main(sys.argv[1:]) == int({code}), "exit code"
assert ("torch" in sys.modules) == {has_torch}, "whether torch was imported"
"""

PREDICTED = ("-m", "mode=predict", "hardware=a100_80gb", "report=false", "sequence_length=64", "gpus=2")

POINTS = {
    "models": ("model=gpt_tiny,t5_tiny,llama_tiny,moe_tiny", "strategy=ddp,fsdp,fsdp1"),
    "strategies": ("model=gpt_tiny", "strategy=data_parallel,zero1,tensor_parallel,pipeline,mesh,deepspeed"),
}


def run_sweep(*arguments: str, has_torch: bool, code: int = 0) -> str:
    """What a sweep prints in a process of its own."""
    command = [sys.executable, "-c", SWEEP.format(code=code, has_torch=has_torch), *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_predictions_that_are_remembered_are_given_without_torch(name: str, cache: None, tmp_path: Path) -> None:
    """In another store, and in the same one."""
    sweep = (*PREDICTED, *POINTS[name], "batch_size_per_gpu=2")
    first = run_sweep(*sweep, f"store={tmp_path / 'first'}", has_torch=True)
    assert run_sweep(*sweep, f"store={tmp_path / 'second'}", has_torch=False) == first
    again = run_sweep(*sweep, f"store={tmp_path / 'second'}", has_torch=False)
    assert again.count("GiB") == first.count("GiB") > 0


@pytest.mark.slow
def test_runs_are_planned_without_torch(cache: None, tmp_path: Path) -> None:
    plan = (
        "dry_run=true",
        f"store={tmp_path / 'store'}",
        "-m",
        "model=gpt_tiny,t5_tiny",
        "strategy=ddp,fsdp",
        "gpus=2",
    )
    run_sweep(*plan, has_torch=True)  # predicts how long each takes, and what it needs
    run_sweep(*plan, has_torch=False)


@pytest.mark.parametrize(
    "mistake", ["model=gpt_tny", "strategy=fdsp", "optimizer=adam", "gpus=0", "precision=bf17", "sequence_length=1"]
)
def test_a_mistake_is_refused_without_torch(mistake: str, tmp_path: Path) -> None:
    run_sweep(
        "model=gpt_tiny", "mode=predict", "hardware=a100_80gb", mistake, f"store={tmp_path}", has_torch=False, code=2
    )
