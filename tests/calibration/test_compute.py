"""What a calibration fits: known speeds come back from the timings they would have made, and real timings are whole."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.calibration.fit_compute import ComputeFit, fit_compute
from bench.calibration.fit_processor import fit_seconds_per_unit
from bench.calibration.kernels import ATTENTION_SHAPES as ATTENTION_SHAPES
from bench.calibration.kernels import ELEMENTWISE_OPERATOR, KERNEL_SAMPLE
from bench.calibration.kernels import MATMUL_SHAPES as MATMUL_SHAPES
from bench.calibration.parts import SINGLE_DEVICE_PLACEHOLDERS, predict_kernel_seconds
from bench.calibration.sample import ATTENTION, LAUNCH, MATMUL, MEMORY, OPERATOR, OPTIMIZER, CalibrationSample
from bench.calibration.session import measure_compute
from bench.calibration.steps import CALL_SAMPLE, STEP_SAMPLE
from bench.core.errors import UsageError
from bench.hardware import Hardware
from bench.hardware.hardware_file import format_hardware_yaml, read_hardware_file
from bench.hardware.speeds import (
    AttentionSpeed,
    HardwareSpeeds,
    LaunchOverhead,
    MatmulSpeed,
    ProcessorAttentionSpeed,
    ProcessorMatmulSpeed,
    ProcessorOptimizerSpeed,
    ProcessorSpeed,
)
from bench.prediction.predictor import predict_run
from bench.validation import command
from bench.validation.measured import MAX_GOAL_ERROR, compare_step_times, render_step_times
from tests.conftest import ROOT, SMALL_GPT, compose_run_config

CPU_HARDWARE = compose_run_config("hardware=cpu").hardware
H200_HARDWARE = compose_run_config("hardware=h200").hardware
GPU_FORMATS = ("fp32", "tf32", "bf16", "fp16")


def set_predicted_times(
    samples: Sequence[CalibrationSample], hardware: Hardware, noise: float = 0.0
) -> list[CalibrationSample]:
    """The same samples with the times that the hardware would need, more or less."""
    rng = np.random.default_rng(0)
    timed_samples = []
    for sample in samples:
        (seconds,) = predict_kernel_seconds([sample], hardware)
        spread = np.exp(noise * rng.standard_normal(7))
        timed_samples.append(dataclasses.replace(sample, seconds=tuple(float(seconds * factor) for factor in spread)))
    return timed_samples


def make_sample(
    kind: str, name: str, format_: str, dims: tuple[int, ...], flops: float, moved: float, s: float = 1.0
) -> CalibrationSample:
    return CalibrationSample(kind, name, format_, dims, flops, moved, (s,))


def make_product_samples(shapes: Sequence[tuple[int, int, int]], format_: str) -> list[CalibrationSample]:
    width = 4 if format_ in ("fp32", "tf32") else 2
    return [
        make_sample(
            MATMUL, "mm", format_, (1, m, n, k, transposed), 2.0 * m * n * k, float(width * (m * k + k * n + m * n))
        )
        for tokens, in_features, out_features in shapes
        for m, n, k, transposed in (
            (tokens, out_features, in_features, 0),
            (tokens, in_features, out_features, 0),
            (out_features, in_features, tokens, 1),
        )
    ]


def make_attention_samples(shapes: Sequence[tuple[int, int, int, int]], format_: str) -> list[CalibrationSample]:
    return [
        make_sample(
            ATTENTION, name, format_, (b, h, s, s, d), float(count * b * h * s * s * d), float(8 * b * h * s * d)
        )
        for b, h, s, d in shapes
        for name, count in (("forward", 2), ("backward", 5))
    ]


KNOWN_GPU = dataclasses.replace(
    H200_HARDWARE.speeds,  # type: ignore[type-var]
    matmul=MatmulSpeed({"fp32": 0.71, "tf32": 0.52, "bf16": 0.66, "fp16": 0.63}, 132, 90.0),
    attention=AttentionSpeed(0.61, 0.42, 40.0),
    memory_efficiency=0.77,
    launch=LaunchOverhead(kernel_us=1.6, operator_us=7.5, unit_us=120.0),
)


def make_gpu_samples(noise: float = 0.0) -> list[CalibrationSample]:
    truth = dataclasses.replace(H200_HARDWARE, speeds=KNOWN_GPU)
    samples = [
        sample
        for name in GPU_FORMATS
        for sample in set_predicted_times(make_product_samples(MATMUL_SHAPES, name), truth, noise)
    ]
    for name in ("fp32", "bf16", "fp16"):
        samples += set_predicted_times(make_attention_samples(ATTENTION_SHAPES["cuda"], name), truth, noise)
    reached = 4800e9 * 0.77
    samples.append(make_sample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (2**28,), 0.0, 2.0**31, 2.0**31 / reached))
    samples.append(make_sample(OPERATOR, "gelu", "bf16", (2**26,), 0.0, 2.0**28, 2.0**28 / (0.5 * reached)))
    samples.append(make_sample(OPERATOR, "mul", "bf16", (2**26,), 0.0, 2.0**28, 2.0**28 / (1.01 * reached)))
    samples.append(make_sample(LAUNCH, KERNEL_SAMPLE, "fp32", (500, 132), 0.0, 8.0, 1.6e-6))
    samples.append(make_sample(LAUNCH, f"{STEP_SAMPLE} gpt", "fp32", (400, 100, 4, 4), 1e6, 1e6, 400 * 7.5e-6))
    return samples


def get_fitted_speeds(fit: ComputeFit) -> HardwareSpeeds:
    return fit.build_speeds(*SINGLE_DEVICE_PLACEHOLDERS)


def test_known_speeds_of_a_gpu_come_back() -> None:
    fit = fit_compute(make_gpu_samples(), H200_HARDWARE)
    speeds = get_fitted_speeds(fit)
    assert speeds.matmul is not None
    assert speeds.attention is not None
    assert KNOWN_GPU.matmul is not None
    for name in GPU_FORMATS:
        assert speeds.matmul.efficiency[name] == pytest.approx(KNOWN_GPU.matmul.efficiency[name], rel=0.01), name
    assert speeds.matmul.half_depth == pytest.approx(90.0, rel=0.05)
    assert speeds.attention.forward == pytest.approx(0.61, rel=0.02)
    assert speeds.attention.backward == pytest.approx(0.42, rel=0.02)
    assert speeds.attention.half_width == pytest.approx(40.0, rel=0.05)
    assert speeds.memory_efficiency == pytest.approx(0.77, rel=1e-3)
    assert speeds.launch == KNOWN_GPU.launch
    assert fit.memory_bandwidth_gb_s == 4800
    assert speeds.operators is not None
    assert speeds.operators["gelu bf16"] == pytest.approx(0.5)
    assert "mul bf16" not in speeds.operators  # as fast as any
    assert speeds.operators["cumsum"] == 0.5  # not timed: what is assumed of it remains
    assert all(residual.max_error < 0.05 for what, residual in fit.residuals.items() if "operator" not in what)


def test_noise_of_a_gpu_moves_its_speeds_little() -> None:
    speeds = get_fitted_speeds(fit_compute(make_gpu_samples(noise=0.05), H200_HARDWARE))
    assert speeds.matmul is not None
    assert speeds.attention is not None
    assert speeds.matmul.efficiency["bf16"] == pytest.approx(0.66, rel=0.03)
    assert speeds.attention.backward == pytest.approx(0.42, rel=0.05)


def test_a_gpu_without_peaks_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="has no peak_tflops"):
        fit_compute(make_gpu_samples(), compose_run_config("hardware=gpu").hardware)


KNOWN_CPU = ProcessorSpeed(
    products=ProcessorMatmulSpeed(
        call_us={"fp32": 4.0, "bf16": 30.0},
        gflops={"fp32": 150.0, "bf16": 1400.0},
        transposed_gflops={"fp32": 140.0, "bf16": 800.0},
        copied_gb_s={"fp32": 8.0, "bf16": 5.0},
        other_gb_s={"fp32": 30.0, "bf16": 15.0},
        result_gb_s={"fp32": 9.0, "bf16": 4.0},
    ),
    attention=ProcessorAttentionSpeed(
        forward_gflops={"fp32": 90.0, "bf16": 240.0},
        backward_gflops={"fp32": 100.0, "bf16": 200.0},
        forward_block_us={"fp32": 4.0, "bf16": 6.0},
        backward_block_us={"fp32": 7.0, "bf16": 80.0},
    ),
    updates=ProcessorOptimizerSpeed({"adamw fused": 5.0}, {"adamw fused": 20.0}),
)
KNOWN_BYTES_PER_S, KNOWN_CALL_S, KNOWN_OPERATOR_S = 15e9, 6e-6, 4e-6
CPU_SHAPES = ((16, 320, 1280), (112, 640, 640), (640, 96, 384), (1152, 320, 3000), (448, 640, 2560), (1792, 192, 192))


def make_cpu_samples() -> list[CalibrationSample]:
    speeds = HardwareSpeeds(
        None,
        None,
        1.0,
        0.0,
        LaunchOverhead(KNOWN_CALL_S * 1e6, KNOWN_OPERATOR_S * 1e6, 100.0),
        *SINGLE_DEVICE_PLACEHOLDERS,
        None,
        KNOWN_CPU,
    )
    truth = dataclasses.replace(CPU_HARDWARE, memory_bandwidth_gb_s=KNOWN_BYTES_PER_S / 1e9, speeds=speeds)
    samples = []
    for name in ("fp32", "bf16"):
        samples += set_predicted_times(make_product_samples(CPU_SHAPES, name), truth)
        samples += set_predicted_times(make_attention_samples(ATTENTION_SHAPES["cpu"], name), truth)
        for count, call, block in ((300, 30.0, 6.0 + 80.0),) if name == "bf16" else ((300, 4.0, 4.0 + 7.0),):
            within = count * KNOWN_CALL_S + 60e-6 * call + 4e-6 * block
            samples.append(
                make_sample(
                    LAUNCH, f"{STEP_SAMPLE} gpt", name, (count, 60, 4, 4), 0.0, 0.0, within + count * KNOWN_OPERATOR_S
                )
            )
            samples.append(make_sample(LAUNCH, f"{CALL_SAMPLE} gpt", name, (count, 60, 4, 4), 0.0, 0.0, KNOWN_CALL_S))
    for name, share in (("mul", 1.0), ("tanh", 0.4), ("add", 1.02)):
        for moved in (1e6, 1e7):
            seconds = KNOWN_CALL_S + moved / (share * KNOWN_BYTES_PER_S)
            samples.append(make_sample(OPERATOR, name, "fp32", (int(moved),), 0.0, moved, seconds))
    samples.append(make_sample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (10**7,), 0.0, 8e7, 8e7 / KNOWN_BYTES_PER_S))
    for tensors, elements in ((48, 50_000), (16, 2_000_000)):
        moved = 28.0 * elements
        seconds = tensors * 5e-6 + moved / 20e9
        samples.append(make_sample(OPTIMIZER, "adamw fused", "fp32", (tensors, elements), 0.0, moved, seconds))
    return samples


def test_known_speeds_of_a_cpu_come_back() -> None:
    fit = fit_compute(make_cpu_samples(), CPU_HARDWARE)
    speeds = get_fitted_speeds(fit)
    assert speeds.processor is not None
    for section in ("products", "attention", "updates"):
        for field, numbers in vars(getattr(speeds.processor, section)).items():
            for key, number in numbers.items():
                truth = getattr(getattr(KNOWN_CPU, section), field)[key]
                assert number == pytest.approx(truth, rel=0.02), f"{section}.{field}.{key}"
    assert fit.memory_bandwidth_gb_s * speeds.memory_efficiency == pytest.approx(15.0, rel=1e-3)
    assert speeds.launch.kernel_us == pytest.approx(KNOWN_CALL_S * 1e6, rel=1e-3)
    assert speeds.launch.operator_us == pytest.approx(KNOWN_OPERATOR_S * 1e6, rel=0.02)
    assert speeds.operators == {"tanh": pytest.approx(0.4, rel=1e-3)}
    assert all(residual.mean_error < 0.01 for residual in fit.residuals.values())


def test_a_product_and_attention_take_on_a_cpu_what_their_parts_take() -> None:
    hardware = fit_compute(make_cpu_samples(), CPU_HARDWARE).device_speeds.build_hardware(CPU_HARDWARE)
    straight, transposed = make_product_samples([(100, 200, 300)], "fp32")[::2]
    for product, gflops, copied, other, result in (
        (straight, 150, 200 * 300, 100 * 200, 100 * 300),  # the right operand is copied
        (transposed, 140, 300 * 100, 100 * 200, 300 * 200),  # the left one
    ):
        bytes_s = 4 * (copied / 8e9 + other / 30e9 + result / 9e9)
        expected = KNOWN_CALL_S + 4e-6 + 2 * 100 * 200 * 300 / (gflops * 1e9) + bytes_s
        assert predict_kernel_seconds([product], hardware)[0] == pytest.approx(expected, rel=0.01)
    # 1024 queries are 4 blocks of 256, 1024 keys are 2 of 512: the first half of the queries leaves out one of them.
    whole, causal = (
        make_sample(ATTENTION, "forward", "fp32", (1, 1, 1024, 1024, 64), share * 4.0 * 1024**2 * 64, 0.0)
        for share in (1.0, 0.5)
    )
    seconds = KNOWN_CALL_S + 8 * 4e-6 + whole.flops / 90e9
    assert predict_kernel_seconds([whole], hardware)[0] == pytest.approx(seconds, rel=0.01)
    assert predict_kernel_seconds([causal], hardware)[0] == pytest.approx(
        KNOWN_CALL_S + 0.75 * (seconds - KNOWN_CALL_S), rel=0.01
    )


def test_work_that_shows_no_time_costs_nothing_and_none_is_negative() -> None:
    work = [[1.0, 2.0, 5.0], [1.0, 4.0, 1.0], [1.0, 8.0, 3.0], [1.0, 16.0, 2.0]]
    unit_seconds = fit_seconds_per_unit(work, [2.0, 4.0, 8.0, 16.0])
    assert unit_seconds == pytest.approx([0.0, 1.0, 0.0], abs=1e-9)
    assert (fit_seconds_per_unit(work, [5.0, 4.0, 3.0, 2.0]) >= 0).all()


def test_a_format_that_was_not_measured_has_no_time_and_all_the_memory() -> None:
    fit = fit_compute(make_cpu_samples(), CPU_HARDWARE)
    hardware = fit.device_speeds.build_hardware(CPU_HARDWARE)
    run = ("model=gpt_tiny", "strategy=single", "gpus=1", "hardware=cpu")
    fp16, fp32 = (
        predict_run(dataclasses.replace(compose_run_config(*run, f"precision={name}"), hardware=hardware))
        for name in ("fp16", "fp32")
    )
    assert fp32.time is not None
    assert fp16.time is None
    assert fp16.memory == predict_run(compose_run_config(*run, "precision=fp16")).memory


def test_on_a_cpu_everything_adds_up() -> None:
    """Twice the overhead of an operator is as much longer a step as there are operators."""
    base = fit_compute(make_cpu_samples(), CPU_HARDWARE).device_speeds
    slow = dataclasses.replace(
        base, launch=dataclasses.replace(base.launch, operator_us=base.launch.operator_us + 1000)
    )
    run = compose_run_config("model=gpt_tiny", "strategy=single", "gpus=1", "hardware=cpu")
    before, after = (
        predict_run(dataclasses.replace(run, hardware=parts.build_hardware(CPU_HARDWARE)), timeline=True).time
        for parts in (base, slow)
    )
    assert before is not None
    assert after is not None
    more = (after.step_s.value - before.step_s.value) / 1000e-6
    assert more == pytest.approx(round(more))
    assert 100 < more < 1000
    assert after.limited_by == "kernel launches"
    parts = before.compute_s + before.optimizer_s + before.bubble_s
    assert parts == pytest.approx(before.step_s.value)


@pytest.mark.slow
def test_a_quick_calibration_times_everything_there_is_to_fit() -> None:
    progress_messages: list[str] = []
    samples = measure_compute(torch.device("cpu"), 1, quick=True, on_progress=progress_messages.append)
    fit = fit_compute(samples, CPU_HARDWARE)
    speeds = get_fitted_speeds(fit)
    assert speeds.processor is not None
    assert set(speeds.processor.products.gflops) == {"fp32", "bf16"}
    assert len(speeds.processor.updates.gb_s) == 6
    assert 0.1 < speeds.processor.products.gflops["fp32"] < 10_000
    assert all(0.1 < value < 1000 for value in (speeds.launch.kernel_us, speeds.launch.operator_us))
    assert progress_messages
    keys = [
        (sample.kind, sample.name, sample.format, sample.dims, sample.flops, sample.bytes_moved) for sample in samples
    ]
    assert len(set(keys)) == len(keys)


def test_measured_rows_are_compared_with_a_hardware_file_or_refused(
    tmp_path: Path, execute: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("model=gpt_tiny", *SMALL_GPT[1:], "strategy=single", "gpus=1", "hardware=cpu", "measurement.steps=1")
    execute(run, (*run, "repeat=1"), (*run, "batch_size_per_gpu=2"))
    file = tmp_path / "mine.yaml"
    file.write_text(
        format_hardware_yaml(
            fit_compute(make_cpu_samples(), CPU_HARDWARE).device_speeds.build_hardware(CPU_HARDWARE), "known"
        )
    )
    page = tmp_path / "page.md"
    arguments = ["--measured", str(tmp_path / "store"), "--hardware", str(file)]
    assert command.main([*arguments, "--output", str(page)]) == 0
    text = page.read_text()
    assert text in capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| gpt_tiny")]
    assert len(rows) == 2  # repetitions are one
    assert "median of 2 runs" in text
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command.main(["--measured", str(empty), "--hardware", str(file)]) == 2
    assert "holds no rows" in capsys.readouterr().err
    without = tmp_path / "without.yaml"
    without.write_text(format_hardware_yaml(CPU_HARDWARE, "no speeds"))
    assert command.main(["--measured", str(tmp_path / "store"), "--hardware", str(without)]) == 2
    assert "a file with speeds" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "results" / "calibration").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_committed_table_is_what_comes_out_today(file: Path) -> None:
    text = render_step_times(file.parent / "rows", file)
    page = file.with_name("README.md").read_text(encoding="utf-8")
    assert text == page, "run python -m bench.predict validate --measured"
    comparisons = compare_step_times(file.parent / "rows", read_hardware_file(file))
    assert len(comparisons) >= 30
    errors = [abs(comparison.error) for comparison in comparisons]
    assert sum(error <= MAX_GOAL_ERROR for error in errors) >= 0.9 * len(errors)
    assert statistics.fmean(errors) <= 0.06
