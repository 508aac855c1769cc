"""``python -m bench.check``: what it asks of a machine, and that a machine with a fault does not pass."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bench import check
from bench.checks import losses, measurements
from bench.checks.before_sweep import check_machine_once
from bench.checks.losses import load_reference_losses
from bench.checks.measurements import check_memory, check_profile, time_loop
from bench.checks.runs import (
    FAILED,
    NOT_RUN,
    PASSED,
    TOKEN_VARIABLE,
    CheckResult,
    CheckRun,
    build_results_table,
    check_device_free,
    find_leftover_processes,
    read_used_bytes,
)
from bench.checks.session import CheckReport
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.core.errors import UsageError
from bench.hardware.detect import DetectedDevice
from bench.prediction.predictor import predict_runs
from tests.conftest import CPU, ROOT, compose_run_config, run_command

GPU_DEVICE = DetectedDevice("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 80 * 2**30)

LIBRARIES = ("accelerate", "deepspeed", "lightning")


@pytest.mark.long
@pytest.mark.slow
def test_a_cpu_passes(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    done = run_command("bench.check", f"output={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["passed"] is True
    by_name = {result["name"]: result for result in report["checks"]}
    for strategy in losses.list_comparable_strategies():
        expected = {NOT_RUN, PASSED} if strategy in (*LIBRARIES, "data_parallel") else {PASSED}
        assert by_name[f"losses: {strategy} gpt"]["status"] in expected, strategy
    ran = [name for name in by_name if not name.startswith("losses")]
    assert {by_name[name]["status"] for name in ran} == {PASSED}
    assert "out of memory on one rank of two" in ran
    assert by_name["machine"]["found"].count("torch ") == 1
    assert report["rows"]["one of two"]["status"] == "oom"


def make_run_result(**values: Any) -> CheckRun:
    return CheckRun({"status": "ok", "error": None, **values})


def test_losses_that_differ_fail() -> None:
    reference = losses.load_reference_losses()
    right = {
        "ddp t5": make_run_result(losses=reference["t5"]),
        "ddp gpt": make_run_result(losses=[*reference["gpt"][:4], 1.0]),
    }
    absent = {
        "deepspeed gpt": CheckRun(None, "install it"),
        "fsdp t5": CheckRun({"status": "error", "error": "rank 1: crashed"}),
    }
    results = {result.name: result for result in losses.compare_losses({**right, **absent}, CPU)}
    assert {name: result.status for name, result in results.items()} == {
        "losses: ddp t5": PASSED,
        "losses: ddp gpt": FAILED,
        "losses: deepspeed gpt": NOT_RUN,
        "losses: fsdp t5": FAILED,
    }
    assert "crashed" in results["losses: fsdp t5"].found
    short = losses.compare_losses({"ddp t5": make_run_result(losses=reference["t5"][:2])}, CPU)
    assert [result.status for result in short] == [FAILED]


def test_every_strategy_is_asked_on_as_many_gpus_as_there_are() -> None:
    runs = losses.build_loss_runs(GPU_DEVICE)
    assert {name.partition(" ")[0] for name in runs} == set(losses.list_comparable_strategies())
    assert "gpus=4" in runs["ddp t5"]
    assert {name for name in runs if name.endswith("t5")} == {f"{name} t5" for name in losses.T5_STRATEGIES}
    assert "gpus=1" in runs["single t5"]
    runs_on_one_gpu = losses.build_loss_runs(
        DetectedDevice("cuda", GPU_DEVICE.name, 1, GPU_DEVICE.capability, GPU_DEVICE.memory_bytes)
    )
    assert "gpus=1" in runs_on_one_gpu["ddp gpt"]


def make_peak_runs(**values: Any) -> dict[str, CheckRun]:
    sizes = {"peak_allocated_bytes": 100 * 2**20, "peak_reserved_bytes": 110 * 2**20}
    ranks = [{"peak_reserved_bytes": size * 2**20} for size in (50, 150)]
    runs = {name: make_run_result(**sizes) for name in ("measured", "rehearsed")}
    return {**runs, "pipeline": make_run_result(**sizes, ranks=ranks), **values}


def test_limits_are_chosen_from_the_peaks() -> None:
    runs = measurements.build_limited_runs(CPU, make_peak_runs())
    limits = {name: float(settings[-1].partition("=")[2]) * 2**10 for name, settings in runs.items()}
    assert limits == pytest.approx({"fits": 165, "exhausted": 55, "one of two": 100}, abs=0.1)
    small = dataclasses.replace(GPU_DEVICE, memory_bytes=150 * 2**20)
    limit = f"hardware.memory_limit_gib={150 / 2**10:.4f}"
    assert measurements.build_limited_runs(small, make_peak_runs())["fits"][-1] == limit
    assert measurements.build_limited_runs(CPU, {name: CheckRun(None, "no") for name in make_peak_runs()}) == {}


def test_memory_that_is_not_as_it_should_be_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExactPrediction:
        class memory:  # noqa: N801
            class allocated:  # noqa: N801
                value = 100 * 2**20

    monkeypatch.setattr(measurements, "predict_run", lambda config: ExactPrediction)
    oom = {"status": "oom", "error": "rank 0: out of memory", "oom_phase": "forward"}
    too_small = check_memory(
        CPU, make_peak_runs(), {"fits": CheckRun(None, "hardware.memory_limit_gib=90 is more than it has")}
    )
    assert too_small[0].status == NOT_RUN
    good = {
        "fits": make_run_result(peak_reserved_bytes=100, memory_limit_bytes=100),
        "exhausted": CheckRun(oom, duration_s=3.0),
        "one of two": CheckRun(oom, duration_s=14.0),
    }
    assert {result.status for result in check_memory(CPU, make_peak_runs(), good)} == {PASSED}
    bad = {
        "fits": make_run_result(peak_reserved_bytes=101, memory_limit_bytes=100),
        "exhausted": make_run_result(),
        "one of two": CheckRun(oom, duration_s=16.0),
    }
    rehearsed = make_run_result(peak_allocated_bytes=104 * 2**20)
    assert {result.status for result in check_memory(CPU, make_peak_runs(rehearsed=rehearsed), bad)[:4]} == {FAILED}
    unknown = check_memory(CPU, {name: CheckRun(None, "needs 2 GPUs") for name in make_peak_runs()}, {})
    assert {result.status for result in unknown} == {NOT_RUN}


def test_a_trace_without_kernels_fails(tmp_path: Path) -> None:
    profiled = make_run_result(run_id="a", trace=None, exposed_communication=None, world_size=2)
    assert [result.status for result in check_profile(CPU, profiled, tmp_path)] == [FAILED, FAILED]


@pytest.mark.slow
def test_the_clock_of_the_steps_is_compared_with_the_walls() -> None:
    clock_s, wall_s = time_loop("cpu")
    assert clock_s == pytest.approx(wall_s, rel=0.05)


def interrupted_loop(kind: str) -> tuple[float, float]:
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0, 1.0


@pytest.mark.long
@pytest.mark.slow
def test_the_process_of_the_clock_leaves_ctrl_c_to_its_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "time_loop", interrupted_loop)
    assert measurements.check_clock(CPU).status == PASSED


def test_a_process_that_is_left_is_found() -> None:
    token = "left by a test"
    assert find_leftover_processes(token) == []
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_leftover_processes(token) == [process.pid]
        assert check_device_free(CPU, token, {}).status == FAILED
        assert process.stdin is not None
        process.stdin.close()
    assert check_device_free(CPU, token, {}).status == PASSED


def test_a_machine_whose_gpus_cannot_be_used_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unusable = dataclasses.replace(GPU_DEVICE, unusable_reason="CUDA cannot be started: why", messages=("A remark.",))
    monkeypatch.setattr(check, "detect_device", lambda: unusable)
    file = tmp_path / "check.json"
    assert check.main([f"output={file}"]) == 1
    assert capsys.readouterr().out.count("A remark.") == 1
    (result,) = json.loads(file.read_text())["checks"]
    assert (result["status"], result["found"]) == (FAILED, "CUDA cannot be started: why")


def test_memory_of_gpus_is_asked_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.ModuleType("pynvml")
    used = {0: 9 * 2**30, 1: 2**20, 2: 2**20}
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetMemoryInfo = lambda index: types.SimpleNamespace(used=used[index], total=80 * 2**30)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    two = dataclasses.replace(GPU_DEVICE, count=2)
    before = read_used_bytes(two)
    assert before == {0: 2**20, 1: 2**20}
    used[0] += 2**30  # of another user's GPU
    assert check_device_free(two, "no such token", before).status == PASSED
    used[2] += 2**30
    assert check_device_free(two, "no such token", before).status == FAILED
    del nvml.nvmlDeviceGetMemoryInfo
    assert read_used_bytes(two) == {}
    assert check_device_free(two, "no such token", before).status == PASSED


def test_a_sweep_on_gpus_checks_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    on_gpu = compose_run_config("hardware=h100_80gb", "mode=predict")
    checked_devices: list[DetectedDevice] = []

    def make_check(status: str) -> Any:
        def run_check(device: DetectedDevice) -> CheckReport:
            checked_devices.append(device)
            return CheckReport([CheckResult("losses", status, "")], {}, 1.0, None)

        return run_check

    check_machine_once([compose_run_config()], GPU_DEVICE, make_check(FAILED))
    check_machine_once([on_gpu], CPU, make_check(FAILED))
    assert not checked_devices
    with pytest.raises(UsageError, match="check=false"):
        check_machine_once([on_gpu], GPU_DEVICE, make_check(FAILED))
    check_machine_once([on_gpu], GPU_DEVICE, make_check(PASSED))
    check_machine_once([on_gpu], GPU_DEVICE, make_check(FAILED))
    assert len(checked_devices) == 2
    other = DetectedDevice("cuda", "NVIDIA H200", 8, (9, 0), 141 * 2**30)
    with pytest.raises(UsageError):
        check_machine_once([on_gpu], other, make_check(FAILED))


def test_a_check_that_is_stopped_or_cannot_be_remembered_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = compose_run_config("hardware=h100_80gb", "mode=predict")
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        check_machine_once([on_gpu], GPU_DEVICE, lambda device: CheckReport([], {}, 1.0, "SIGINT"))
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("BENCH_CACHE", str(file / "folder"))
    check_machine_once(
        [on_gpu], GPU_DEVICE, lambda device: CheckReport([CheckResult("losses", PASSED, "")], {}, 1.0, None)
    )


@pytest.mark.parametrize("argument", ["output=", "store=x", "output=/proc/no/such"])
def test_what_is_mistyped_is_said(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([argument]) == 2
    assert "output" in capsys.readouterr().err


def test_a_stopped_check_has_not_passed() -> None:
    assert not CheckReport([], {}, 1.0, "SIGINT").has_passed
    assert build_results_table([CheckResult("a", PASSED, "b")]).row_count == 1


# --- What was measured on GPUs, against a CPU's losses and predicted memory: ``results/checks``.

GPU_CHECKS = {name: json.loads((ROOT / f"results/checks/{name}.json").read_text()) for name in ("h100", "h200")}

HARDWARE = {"h100": "h100_80gb", "h200": "h200"}

MAX_MISSING_BYTES = {"h100": 1.8e6, "h200": 5.6e6}
"""The latter of DDP after two steps of warm-up: that it makes its buckets anew shows later there."""

OTHER_RUNS = ("measured", "rehearsed", "profiled", "fits")
"""GPT-350M; all others are of a million parameters, and their losses are a CPU's."""


def predict_allocated_bytes(gpu: str) -> dict[str, float]:
    hardware = compose_config({"hardware": HARDWARE[gpu]})["hardware"]
    runs: list[dict[str, Any]] = GPU_CHECKS[gpu]["runs"]
    configs = [build_run_config({**run["config"], "mode": "predict", "hardware": hardware}) for run in runs]
    return {
        run["run"]: prediction.memory.allocated.value
        for run, prediction in zip(runs, predict_runs(configs), strict=True)
    }


@pytest.mark.parametrize(("gpu", "runs", "strategies"), [("h100", 18, 9), ("h200", 14, 10)])
def test_losses_on_a_gpu_are_those_of_a_cpu(gpu: str, runs: int, strategies: int) -> None:
    reference = load_reference_losses()
    compared = [run for run in GPU_CHECKS[gpu]["runs"] if run["run"] not in OTHER_RUNS]
    assert len(compared) == runs
    assert len({run["run"].partition(" ")[0] for run in compared}) == strategies
    for run in compared:
        expected = reference[run["run"].rpartition(" ")[2]]
        assert run["losses"] == pytest.approx(expected[: len(run["losses"])], rel=2.4e-7), run["run"]


def test_a_whole_check_on_a_gpu_found_nothing_wrong() -> None:
    checks = GPU_CHECKS["h200"]["checks"]
    assert [check["name"] for check in checks if check["status"] == FAILED] == []
    assert len([check for check in checks if check["status"] == PASSED]) == 22


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPU_CHECKS)
def test_predicted_memory_is_what_the_allocator_of_a_gpu_had(gpu: str) -> None:
    predicted_bytes = predict_allocated_bytes(gpu)
    for run in GPU_CHECKS[gpu]["runs"]:
        too_large = predicted_bytes[run["run"]] - run["peak_allocated_bytes"]
        if run["run"] in OTHER_RUNS:
            assert abs(too_large) < 0.0005 * run["peak_allocated_bytes"], run["run"]
        elif "accelerate" in run["run"]:  # which leaves DDP out where there is one process
            assert 0 < too_large < 4.2e6, run["run"]
        else:
            assert -MAX_MISSING_BYTES[gpu] < too_large < 0, run["run"]
