"""Layouts that nobody chose train like one process, in about the memory that is predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import compose_run_config, needs
from tests.random_meshes import build_one_process_run, compute_loss_errors, draw_overrides
from tests.random_runs import compute_memory_errors, measure_runs

FRESH, FRESH_SEED = 4, 2018

MAX_LOSS_ERRORS = {"fp32": 1e-5, "bf16": 1e-2, "bf16_pure": 1e-2}

MAX_MEMORY_ERROR = 0.07
"""Of 45 drawn before, 42 were within 0.004; what attention over several ranks keeps differs from rank to rank."""


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
def test_fresh_random_layouts_train_like_one_process_in_the_memory_that_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))
    drawn = [draw_overrides(number, FRESH_SEED) for number in range(FRESH)]
    runs = [(compose_run_config(*overrides), build_one_process_run(overrides)) for overrides in drawn]
    measure_runs([run for pair in runs for run in pair], tmp_path / "store")
    for error, config in compute_loss_errors(runs, tmp_path / "store"):
        assert error <= MAX_LOSS_ERRORS[config.precision.name], config.label
    worst, run = compute_memory_errors([config for config, _ in runs], tmp_path / "store")[0]
    assert abs(worst) < MAX_MEMORY_ERROR, f"{worst:+.2%}: {run}"
