"""The predictor's version is raised when numbers move, and only then."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.prediction import cache
from tests import golden_predictions
from tests.conftest import ROOT
from tests.golden_predictions import find_fault, list_moved, predict_cases, read_golden

PRINT_VERSIONS = "from bench.prediction.cache import *; print(compute_predictor_version(), compute_code_hash())"


def test_no_number_moves_without_a_new_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    golden = read_golden()
    if golden["libraries"] != golden_predictions.describe_libraries():
        pytest.skip(f"the golden predictions were made with {golden['libraries']}")
    fault = find_fault(golden, predict_cases())
    assert fault is None, fault


@pytest.fixture
def golden() -> dict[str, Any]:
    return read_golden()


def test_a_number_that_moved_asks_for_a_new_version(golden: dict[str, Any]) -> None:
    current = copy.deepcopy(golden["predictions"])
    case = sorted(current)[0]
    current[case]["memory.allocated.value"] *= 1 + 1e-6
    fault = find_fault(golden, current)
    assert fault is not None
    assert fault.startswith("1 predicted numbers moved: raise PREDICTOR_VERSION")
    assert f"run `{golden_predictions.COMMAND}`" in fault
    assert f"{case}: memory.allocated.value was" in fault


def test_noise_of_additions_is_no_move(golden: dict[str, Any]) -> None:
    current = copy.deepcopy(golden["predictions"])
    for numbers in current.values():
        numbers["memory.allocated.value"] *= 1 + 1e-13
    assert list_moved(golden["predictions"], current) == []


def test_a_new_version_without_a_move_is_no_version(golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PREDICTOR_VERSION", golden["version"] + 1)
    fault = find_fault(golden, golden["predictions"])
    assert fault is not None
    assert "no number moved" in fault


def test_the_file_is_not_written_anew_under_the_same_version(
    golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only under a higher one."""
    copied = Path(shutil.copy(golden_predictions.FILE, tmp_path))
    moved = copy.deepcopy(golden["predictions"])
    moved[sorted(moved)[0]]["memory.reserved.high"] += 1
    monkeypatch.setattr(golden_predictions, "FILE", copied)
    monkeypatch.setattr(golden_predictions, "predict_cases", lambda: moved)
    monkeypatch.setattr(golden_predictions, "describe_libraries", lambda: golden["libraries"])
    assert golden_predictions.main() == 1
    assert "raise PREDICTOR_VERSION" in capsys.readouterr().err
    assert read_golden() == golden
    monkeypatch.setattr(cache, "PREDICTOR_VERSION", golden["version"] + 1)
    assert golden_predictions.main() == 0
    assert read_golden() == {**golden, "version": golden["version"] + 1, "predictions": moved}


def run_copy(code: Path) -> list[str]:
    """The version, and the hash of all code, that a copy of the suite states."""
    done = subprocess.run([sys.executable, "-c", PRINT_VERSIONS], cwd=code, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_a_comment_and_a_new_strategy_leave_the_version_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only remembered on a machine is forgotten all the same."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    before = run_copy(tmp_path)
    assert before[0] == cache.compute_predictor_version()
    with (tmp_path / "bench/prediction/predictor.py").open("a") as file:
        file.write("# A remark.\n")
    after_remark = run_copy(tmp_path)
    shutil.copy(ROOT / "tests/outsiders/local_sgd/local_sgd/strategy.py", tmp_path / "bench/strategies/local_sgd.py")
    after_strategy = run_copy(tmp_path)
    assert before[0] == after_remark[0] == after_strategy[0]
    assert len({before[1], after_remark[1], after_strategy[1]}) == 3
