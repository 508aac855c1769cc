"""Calibration: collectives are timed rightly, fits find what they should, and a busy machine is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from bench import calibrate, predict
from bench.calibration import kernels, session
from bench.calibration.collectives import (
    REFERENCE_BYTES,
    _CollectiveTimer,
    count_ranks_per_node,
    list_group_layouts,
    list_message_sizes,
    measure_collectives,
)
from bench.calibration.fit_compute import ComputeFit, fit_compute
from bench.calibration.fit_links import count_bus_bytes, fit_links, predict_collective_seconds
from bench.calibration.fit_processor import fit_seconds_per_unit
from bench.calibration.hardware_file import (
    MEASURED_SOURCE,
    BaselineHardware,
    CalibrationProvenance,
    build_calibrated_hardware,
)
from bench.calibration.kernels import (
    ATTENTION_SHAPES,
    ELEMENTWISE_OPERATOR,
    FORWARD,
    KERNEL_SAMPLE,
    MATMUL_SHAPES,
    SUSTAINED_ATTENTION,
    SUSTAINED_PRODUCT,
)
from bench.calibration.noise import REFERENCE_NAME, find_disturbances
from bench.calibration.parts import SINGLE_DEVICE_PLACEHOLDERS, predict_kernel_seconds
from bench.calibration.processes import CalibrationProcess, run_local_processes
from bench.calibration.sample import (
    ATTENTION,
    COLLECTIVE,
    LAUNCH,
    MATMUL,
    MEMORY,
    OPERATOR,
    OPTIMIZER,
    SUSTAINED,
    CalibrationSample,
    CpuTimer,
    TimedCall,
    build_timer,
)
from bench.calibration.session import measure_compute
from bench.calibration.steps import CALL_SAMPLE, STEP_SAMPLE, _OperatorTimer
from bench.core.errors import UsageError
from bench.hardware import Hardware
from bench.hardware.attention_kernels import SDPA
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import format_hardware_yaml, read_hardware_file
from bench.hardware.speeds import (
    AttentionKernelSpeed,
    AttentionSpeed,
    GlooSpeed,
    HardwareSpeeds,
    LaunchOverhead,
    LinkSpeeds,
    MatmulSpeed,
    ProcessorAttentionSpeed,
    ProcessorMatmulSpeed,
    ProcessorOptimizerSpeed,
    ProcessorSpeed,
)
from bench.prediction.cost.collectives import (
    ALL_REDUCE,
    CALIBRATED_COLLECTIVES,
    CollectiveGroup,
    compute_bus_bandwidth,
    compute_collective_seconds,
)
from bench.prediction.predictor import predict_run
from bench.validation import command
from bench.validation.measured import MAX_GOAL_ERROR, compare_step_times, render_step_times
from tests.conftest import CPU, ROOT, SMALL_GPT, compose_run_config

MIB = 2**20


def make_collective_sample(
    kind: str, size: float, group: CollectiveGroup, seconds: Sequence[float]
) -> CalibrationSample:
    dims = (int(size) // 4,)
    return CalibrationSample(
        COLLECTIVE,
        kind,
        "bytes",
        dims,
        0.0,
        size,
        tuple(seconds),
        ranks=group.num_ranks,
        ranks_per_node=group.ranks_per_node,
    )


def make_samples(
    links: LinkSpeeds, groups: Sequence[CollectiveGroup], largest: int = 2**30, scatter: float = 0.0
) -> list[CalibrationSample]:
    """What would be timed on a machine that the model describes to the point, or up to some scatter."""
    rng = random.Random(0)
    sizes = [2.0**power for power in range(10, 31, 2) if 2**power <= largest]
    return [
        make_collective_sample(
            kind,
            size,
            group,
            [
                compute_collective_seconds(kind, size, group, links) * (1 + scatter * rng.uniform(-1, 1))
                for _ in range(9)
            ],
        )
        for group in groups
        for kind in CALIBRATED_COLLECTIVES
        for size in sizes
    ]


# Groups and sizes


def test_groups_are_those_strategies_communicate_in():
    def list_groups(ranks: int, per_node: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {shape.label: shape.groups for shape in list_group_layouts(ranks, per_node)}

    assert list_groups(1, 1) == {}
    assert list_groups(2, 2) == {"the ranks of a node": ((0, 1),)}
    assert list_groups(4, 4) == {"the ranks of a node": ((0, 1, 2, 3),), "half the ranks of a node": ((0, 1), (2, 3))}
    assert list_groups(2, 1) == {"all ranks": ((0, 1),)}
    assert list_groups(4, 2) == {
        "all ranks": ((0, 1, 2, 3),),
        "one rank per node": ((0, 2),),
        "the ranks of a node": ((0, 1), (2, 3)),
    }
    eight = {shape.label: (shape.ranks, shape.ranks_per_node) for shape in list_group_layouts(16, 8)}
    assert eight == {
        "all ranks": (16, 8),
        "one rank per node": (2, 1),
        "the ranks of a node": (8, 8),
        "half the ranks of a node": (4, 4),
    }


def test_sizes_go_from_a_kibibyte_to_what_a_device_can_take():
    assert list_message_sizes("cpu", quick=False) == [4**power for power in range(5, 14)]
    assert list_message_sizes("cuda", quick=False)[-1] == 2**30
    assert set(list_message_sizes("cpu", quick=True)) < set(list_message_sizes("cpu", quick=False))


def test_ranks_on_one_machine_are_a_node():
    assert count_ranks_per_node(["a"]) == 1
    assert count_ranks_per_node(["a", "a", "b", "b"]) == 2
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "a"], ["a", "b", "b"]):
        with pytest.raises(UsageError, match="equally many on every node"):
            count_ranks_per_node(hosts)


# Fits, on what known numbers would come to


def load_h200_links() -> LinkSpeeds:
    speeds = compose_run_config("hardware=h200").hardware.speeds
    assert speeds is not None
    return speeds.links


NODE, HALF, ALL, ONE_EACH = CollectiveGroup(8, 8), CollectiveGroup(4, 4), CollectiveGroup(16, 8), CollectiveGroup(2, 1)


@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_numbers_of_nccls_model_are_found_again(scatter):
    true = dataclasses.replace(
        load_h200_links(), gpu_efficiency=0.61, gpu_latency=2.3, node_efficiency=0.47, latency=11.0
    )
    timed = make_samples(true, [ALL, ONE_EACH, NODE, HALF], scatter=scatter)
    link_fit = fit_links(timed, load_h200_links(), uses_gloo=False, base_name="conf/hardware/h200.yaml")
    for name in ("gpu_efficiency", "gpu_latency", "node_efficiency", "latency"):
        assert getattr(link_fit.links, name) == pytest.approx(getattr(true, name), rel=0.001 + scatter), name
        assert link_fit.sources[name].startswith("measured")
    for name in ("gpu_gb_s", "node_gb_s", "adapters", "congestion", "gloo"):
        assert getattr(link_fit.links, name) == getattr(true, name), name
    assert link_fit.sources["congestion"] == "not measured: as in conf/hardware/h200.yaml"
    assert max(residual.max_error for residual in link_fit.residuals.values()) < 0.01 + 2 * scatter
    assert set(link_fit.residuals) == {
        f"{kind}, {words}"
        for kind in CALIBRATED_COLLECTIVES
        for words in ("16 ranks on 2 nodes", "2 ranks on 2 nodes", "8 ranks on 1 node", "4 ranks on 1 node")
    }


GLOO = LinkSpeeds(1.7, 1.0, 0.9, 1.0, adapters=1, congestion=0.0, latency=2.5, gloo=GlooSpeed(41.0, 0.8, 1.9))


@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_numbers_of_gloo_are_found_again_with_nothing_to_begin_with(scatter):
    timed = make_samples(
        GLOO, [CollectiveGroup(4, 2), CollectiveGroup(2, 1), CollectiveGroup(2, 2)], largest=2**26, scatter=scatter
    )
    link_fit = fit_links(timed, None, uses_gloo=True, base_name="conf/hardware/cpu.yaml")
    assert link_fit.links.gloo is not None
    for name in ("step_us", "reduce", "reduce_scatter"):
        assert getattr(link_fit.links.gloo, name) == pytest.approx(getattr(GLOO.gloo, name), rel=0.001 + scatter), name
    for name in ("gpu_gb_s", "node_gb_s", "latency"):
        assert getattr(link_fit.links, name) == pytest.approx(getattr(GLOO, name), rel=0.001 + scatter), name


@pytest.mark.parametrize("far", [1e-3, 1e3])
def test_what_was_known_before_need_not_be_near(far):
    before = dataclasses.replace(GLOO, gpu_gb_s=1.7 * far, node_gb_s=0.9 * far, gloo=GlooSpeed(41.0 * far, 0.8, 1.9))
    timed = make_samples(
        GLOO, [CollectiveGroup(4, 2), CollectiveGroup(2, 1), CollectiveGroup(2, 2)], largest=2**22, scatter=0.3
    )
    fitted_links = fit_links(timed, before, uses_gloo=True, base_name="x").links
    assert fitted_links.gpu_gb_s * fitted_links.gpu_efficiency == pytest.approx(1.7, rel=0.2)
    assert fitted_links.node_gb_s * fitted_links.node_efficiency == pytest.approx(0.9, rel=0.2)


def test_one_node_says_nothing_of_the_network():
    true = dataclasses.replace(load_h200_links(), gpu_efficiency=0.5)
    link_fit = fit_links(
        make_samples(true, [NODE]), load_h200_links(), uses_gloo=False, base_name="conf/hardware/h200.yaml"
    )
    assert link_fit.links.gpu_efficiency == pytest.approx(0.5, rel=0.001)
    for name in ("node_gb_s", "node_efficiency", "latency", "adapters", "congestion"):
        assert getattr(link_fit.links, name) == getattr(true, name)
    assert (
        link_fit.sources["node_efficiency"]
        == link_fit.sources["latency"]
        == "not measured: as in conf/hardware/h200.yaml"
    )
    alone = fit_links(
        make_samples(GLOO, [CollectiveGroup(2, 2)], 2**26), None, uses_gloo=True, base_name="conf/hardware/cpu.yaml"
    )
    assert alone.links.node_gb_s == alone.links.gpu_gb_s == pytest.approx(1.7, rel=0.001)
    assert alone.sources["node_gb_s"] == "not measured, for want of a second node: as inside a node"


def test_one_rank_per_node_says_nothing_of_the_inside_of_one():
    link_fit = fit_links(
        make_samples(GLOO, [CollectiveGroup(2, 1)], 2**26), None, uses_gloo=True, base_name="conf/hardware/cpu.yaml"
    )
    assert link_fit.links.gpu_gb_s == link_fit.links.node_gb_s == pytest.approx(0.9, rel=0.001)
    assert link_fit.sources["gpu_gb_s"].startswith("not measured")
    for size in (2**10, 2**26):
        expected = compute_collective_seconds(ALL_REDUCE, size, CollectiveGroup(2, 1), GLOO)
        assert compute_collective_seconds(ALL_REDUCE, size, CollectiveGroup(2, 1), link_fit.links) == pytest.approx(
            expected, rel=0.001
        )


def test_a_link_faster_than_its_vendor_says_gets_a_rate_of_its_own():
    true = dataclasses.replace(load_h200_links(), gpu_gb_s=900.0, gpu_efficiency=0.8)
    link_fit = fit_links(make_samples(true, [NODE]), load_h200_links(), uses_gloo=False, base_name="x")
    assert link_fit.links.gpu_gb_s * link_fit.links.gpu_efficiency == pytest.approx(720, rel=0.001)
    assert link_fit.links.gpu_efficiency == 1.0


def test_one_wild_timing_does_not_bend_the_fit():
    timed = make_samples(GLOO, [CollectiveGroup(4, 4)], 2**26)
    wild = dataclasses.replace(timed[8], seconds=tuple(20 * value for value in timed[8].seconds))
    fitted_links = fit_links([*timed[:8], wild, *timed[9:]], None, uses_gloo=True, base_name="x").links
    assert fitted_links.gpu_gb_s == pytest.approx(GLOO.gpu_gb_s, rel=0.1)


def test_gloos_reduction_is_an_all_reduce_of_two_passes():
    group = CollectiveGroup(4, 4)
    gather, scatter, reduce = (compute_collective_seconds(kind, 2**26, group, GLOO) for kind in CALIBRATED_COLLECTIVES)
    assert GLOO.gloo is not None
    moved = 2**26 * 3 / 4 / 1.7e9
    assert gather == pytest.approx(3 * 41e-6 + moved)
    assert scatter == pytest.approx(6 * 41e-6 + 1.9 * moved)
    assert reduce == pytest.approx(6 * 41e-6 + 2 * 0.8 * moved)
    assert compute_bus_bandwidth(ALL_REDUCE, 2**26, group, GLOO) == pytest.approx(2 * moved * 1.7 / reduce)


# The description that is written

FACTS = CalibrationProvenance(
    "2026-01-02 03:04 UTC", "somewhere", "a device", "8 processes on 1 node", {"torch": "9"}, "abc"
)


def test_processes_that_calibrated_are_counted_in_words():
    (pair,) = make_samples(load_h200_links(), [NODE])[:1]
    assert session._describe_processes(1, []) == "1 process on 1 node"
    assert session._describe_processes(16, [dataclasses.replace(pair, ranks=16, ranks_per_node=8)]) == (
        "16 processes on 2 nodes"
    )


def test_what_was_not_measured_is_kept_with_its_source():
    h200 = compose_run_config("hardware=h200").hardware
    known_hardware = BaselineHardware(h200, h200.speeds, "conf/hardware/h200.yaml")
    true = dataclasses.replace(load_h200_links(), gpu_efficiency=0.5)
    fit = fit_links(make_samples(true, [NODE]), load_h200_links(), uses_gloo=False, base_name=known_hardware.name)
    calibrated_hardware = build_calibrated_hardware("mine", known_hardware, None, fit, FACTS)
    assert h200.speeds is not None
    assert calibrated_hardware == dataclasses.replace(
        h200, name="mine", speeds=dataclasses.replace(h200.speeds, links=fit.links), sources=calibrated_hardware.sources
    )
    assert calibrated_hardware.sources["speeds.matmul.efficiency"] == h200.sources["speeds.matmul.efficiency"]
    assert calibrated_hardware.sources["speeds.links.gpu_efficiency"] == "measured inside a node"
    assert calibrated_hardware.sources["speeds.links.node_efficiency"] == "not measured: as in conf/hardware/h200.yaml"
    assert calibrated_hardware.sources["calibration"] == (
        "2026-01-02 03:04 UTC on host somewhere (a device), 8 processes on 1 node; torch 9; commit abc"
    )
    assert calibrated_hardware.sources["residual of all-gather, 8 ranks on 1 node"].endswith("of 11 timings")


def test_a_second_calibration_does_not_take_credit_for_the_first():
    h200 = compose_run_config("hardware=h200").hardware
    old_sources = {**h200.sources, "calibration": "long ago", "speeds.memory_efficiency": MEASURED_SOURCE}
    first = dataclasses.replace(h200, sources=old_sources)
    known_hardware = BaselineHardware(first, first.speeds, "old.yaml")
    fit = fit_links(make_samples(load_h200_links(), [NODE]), load_h200_links(), uses_gloo=False, base_name="old.yaml")
    sources = build_calibrated_hardware("new", known_hardware, None, fit, FACTS).sources
    assert sources["speeds.memory_efficiency"] == "not measured: as in old.yaml"
    assert sources["calibration of old.yaml"] == "long ago"
    assert sources["calibration"] == str(FACTS)


# Noise


def make_sample(*seconds: float, kind: str = MATMUL, size: int = 64) -> CalibrationSample:
    return CalibrationSample(kind, "mm", "fp32", (1, size, size, size), 2.0 * size**3, 12.0 * size**2, seconds)


def make_steady_samples(count: int, spread: float = 0.01, kind: str = MATMUL) -> list[CalibrationSample]:
    """Measurements of different sizes with a spread of about so much."""
    around = (1 - 2 * spread, 1 - spread, 1, 1 + spread, 1 + 2 * spread)
    return [make_sample(*around, kind=kind, size=size) for size in range(8, 8 + count)]


def format_disturbances(samples: Sequence[CalibrationSample], waiting: float = 0.0) -> str:
    return "\n".join(str(disturbance) for disturbance in find_disturbances(samples, waiting))


def test_a_quiet_machine_is_left_in_peace():
    assert find_disturbances(make_steady_samples(20, 0.02)) == []
    assert find_disturbances([], 0.04) == []
    assert find_disturbances([*make_steady_samples(3), make_sample(0.5, 1, 1, 2, 9, size=99)]) == [], (
        "now and then one is disturbed"
    )


def test_too_much_scatter_is_named_with_its_limit():
    noisy = [make_sample(0.4, 0.7, 1, 1.5, 2, size=500 + index) for index in range(3)]
    assert format_disturbances([*make_steady_samples(2), *noisy]) == (
        "the typical spread of 5 matmul measurements (the worst, of matmul mm fp32 1x500x500x500, is 60 %) is 60 %, "
        "above the limit of 15 %"
    )


def test_each_kind_has_its_own_limit():
    assert find_disturbances(make_steady_samples(10, 0.12, LAUNCH)) == []
    assert find_disturbances(make_steady_samples(10, 0.12, MATMUL)) != []
    gathers = [
        make_collective_sample("all-gather", 1024 * size, CollectiveGroup(2, 2), (0.7, 0.85, 1, 1.15, 1.3))
        for size in range(1, 9)
    ]
    assert find_disturbances(gathers) == []


def test_drift_is_the_same_measurement_at_another_time():
    first, later = (
        dataclasses.replace(make_sample(seconds, seconds, seconds), name=REFERENCE_NAME) for seconds in (1.0, 1.5)
    )
    assert find_disturbances([first, *make_steady_samples(5), first]) == []
    assert format_disturbances([first, *make_steady_samples(5), later]) == (
        "the difference between matmul reference fp32 1x64x64x64 at one time and another is 50 %, "
        "above the limit of 30 %"
    )
    reduced = [make_collective_sample(ALL_REDUCE, MIB, CollectiveGroup(2, 2), (seconds,) * 3) for seconds in (1.0, 2.5)]
    assert "all-reduce of 1,048,576 bytes among 2 ranks" in format_disturbances(reduced)


def test_operators_that_are_alike_may_be_different():
    assert find_disturbances([make_sample(1.0, 1.0, 1.0), make_sample(3.0, 3.0, 3.0)]) == []


def test_waiting_for_a_processor_is_somebody_elses_work():
    assert format_disturbances(make_steady_samples(5), waiting=0.5) == (
        "the time in which other processes had the processor is 50 %, above the limit of 5 %"
    )


# What is mistyped

BAD_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "model=t5_tiny": ("model is no part of a calibration", "hardware", "output", "quick"),
    "gpus=4": ("gpus is no part of a calibration",),
    "hardware=a100": ("hardware=a100", "a100_80gb"),
    "hardware=h200": ("hardware=h200 needs a GPU",),
    "hardware=cpu,h200": ("hardware=cpu,h200", "one value"),
    "only=memory": ("only=memory", "compute, collectives"),
    "only=collectives": ("only=collectives", "hardware=FILE", "measure compute too"),
    "only=compute": ("only=compute", "hardware=FILE", "measure collectives too"),
    "quick=maybe": ("quick=maybe", "true, false"),
    "ranks=1": ("ranks=1", "from 2 to 64"),
    "ranks=two": ("ranks=two", "from 2 to 64"),
    "output=mine.json": ("output=mine.json", ".yaml"),
    "output=there.yaml": ("output=there.yaml", "none is overwritten"),
    "output=there.yaml/mine.yaml": ("output=there.yaml/mine.yaml", "written to"),
    "hardware.cpu_threads=0": ("hardware.cpu_threads=0", "at least 1"),
    "speed": ("cannot read 'speed'", "key=value"),
}


@pytest.mark.parametrize("typed", BAD_ARGUMENTS)
def test_mistakes_are_answered_in_a_sentence_and_nothing_is_started(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("precious")
    monkeypatch.setattr(calibrate, "run_calibration", lambda *arguments: pytest.fail("something was started"))
    assert calibrate.main([typed]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    for part in BAD_ARGUMENTS[typed]:
        assert part in captured.err
    assert (tmp_path / "there.yaml").read_text() == "precious"


def test_options_can_be_written_both_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = dict.fromkeys(session.OPTION_KEYS)
    by_key = session.parse_calibration_request(["output=a.yaml", "ranks=4", "quick=true"], own, CPU)
    assert by_key == session.parse_calibration_request(
        [], own | {"output": "a.yaml", "ranks": "4", "quick": "true"}, CPU
    )
    assert (by_key.output_path, by_key.settings.local_ranks, by_key.settings.is_quick) == (Path("a.yaml"), 4, True)
    assert session.parse_calibration_request([], own, CPU).output_path == Path("hardware/cpu_calibrated.yaml")
    assert session.parse_calibration_request([], own, CPU).settings.local_ranks == max(2, len(os.sched_getaffinity(0)))


@pytest.mark.long
def test_a_gpu_that_nobody_has_described_needs_its_peaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unknown, own = (
        DetectedDevice("cuda", "Tesla P40", 1, (6, 1), 24 * 2**30),
        dict.fromkeys(session.OPTION_KEYS),
    )
    with pytest.raises(UsageError, match=r"hardware=gpu is not valid: .* \+hardware.peak_tflops"):
        session.parse_calibration_request([], own, unknown)
    order = session.parse_calibration_request(["+hardware.peak_tflops.fp32=8.1"], own, unknown)
    assert order.baseline.name == "conf/hardware/h200.yaml", "where what was not measured comes from"
    assert (order.settings.local_ranks, order.output_path) == (1, Path("hardware/gpu_calibrated.yaml"))


# Real processes


def time_collectives(process: CalibrationProcess) -> tuple[list[CalibrationSample], list[float]]:
    """All timings, and what becomes of two repetitions of which each has its own slowest rank."""
    device = process.select_device("cpu")
    with process.init_process_group(device):
        timed = measure_collectives(device, "here", quick=True, on_progress=lambda text: None)
        return timed, _CollectiveTimer(device, 2**12, quick=True)._reduce_to_slowest(
            [1.0, 5.0] if process.rank == 0 else [3.0, 2.0]
        )


def time_until_large_messages_take_longer(sizes: Sequence[int], attempts: int = 5) -> list[CalibrationSample]:
    """All timings in which, of every collective, the largest message took longer than the smallest.

    Another process can hold up every repetition of one size. All are then timed again.
    """
    shorter: list[str] = []
    for _ in range(attempts):
        timed, slowest = run_local_processes(4, time_collectives)
        assert slowest == [3.0, 5.0]
        medians = {(sample.name, int(sample.bytes_moved), sample.ranks): sample.median_s for sample in timed}
        shorter = [kind for kind in CALIBRATED_COLLECTIVES if medians[kind, sizes[-1], 4] <= medians[kind, sizes[0], 4]]
        if not shorter:
            return timed
    pytest.fail(f"{sizes[-1]} bytes took no longer than {sizes[0]}, {attempts} times: {shorter}")


@pytest.mark.alone
@pytest.mark.slow
def test_collectives_of_real_processes_are_timed_and_fitted():
    sizes = list_message_sizes("cpu", quick=True)
    timed = time_until_large_messages_take_longer(sizes)
    samples_by_key = {(sample.name, int(sample.bytes_moved), sample.ranks): sample for sample in timed}
    assert set(samples_by_key) == {
        *((kind, size, ranks) for kind in CALIBRATED_COLLECTIVES for size in sizes for ranks in (4, 2)),
        (ALL_REDUCE, REFERENCE_BYTES, 4),
    }
    for (kind, _, ranks), sample in samples_by_key.items():
        assert sample.ranks_per_node == ranks
        assert len(sample.seconds) >= 5
        # No more than a processor can copy, no slower than a hundredth of a spinning disk.
        assert 1e4 < count_bus_bytes(sample) / sample.median_s < 1e11, kind
    fit = fit_links(timed, None, uses_gloo=True, base_name="conf/hardware/cpu.yaml")
    assert fit.links.gloo is not None
    assert all(predict_collective_seconds(sample, fit.links) > 0 for sample in timed)
    assert len(fit.residuals) == 6


def fail_on_rank_1(process: CalibrationProcess) -> None:
    if process.rank == 1:
        raise ValueError("rank 1 is out of sorts")
    with process.init_process_group(process.select_device("cpu")):
        pass


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_fails_ends_the_others():
    with pytest.raises(Exception, match="rank 1 is out of sorts"):
        run_local_processes(2, fail_on_rank_1)


# The command


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A description of a processor all of whose speeds are known, if not true."""
    values = yaml.safe_load((ROOT / "conf" / "hardware" / "h200.yaml").read_text())
    values.update(name="known", device="cpu", gpu_names=[])
    path = tmp_path / "known.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def build_quick_arguments(hardware_file: Path, output: Path) -> list[str]:
    return [f"hardware={hardware_file}", "only=collectives", "quick=true", f"output={output}"]


def check_written(output: Path, processes: str) -> None:
    """Everything is there, says where it comes from, and is of use."""
    hardware = read_hardware_file(output)
    assert hardware.name == output.stem
    assert hardware.speeds is not None
    assert hardware.speeds.links.gloo is not None
    for fact in ("torch", "transformers", "commit", " on host ", processes):
        assert fact in hardware.sources["calibration"]
    assert hardware.sources["speeds.links.gloo"].startswith("measured")
    assert any(name.startswith("residual of all-reduce") for name in hardware.sources)
    raw = json.loads(output.with_suffix(".json").read_text())
    assert len(raw["samples"]) >= 3 * len(list_message_sizes("cpu", quick=True))
    for ending in (".png", ".svg"):
        assert (output.parent / f"{output.stem}-collectives{ending}").stat().st_size > 1000
    question = ["model=gpt_125m", "gpus=2", "strategy=ddp", "batch_size_per_gpu=1", "format=json", f"hardware={output}"]
    assert predict.main(question) == 0


@pytest.mark.long
@pytest.mark.slow
def test_the_command_writes_a_file_that_predictions_take(tmp_path, capsys):
    output = tmp_path / "new" / "mine.yaml"
    done = run_python("-m", "tests.calibrate_anyway", "quick=true", "ranks=2", f"output={output}")
    assert done.returncode == 0, done.stderr
    for part in ("speeds.links.gloo", "speeds.memory_efficiency", "how far off the fit is", "all-reduce, 2 ranks"):
        assert part in done.stdout
    assert f"python -m bench.predict model=gpt_125m gpus=2 hardware={output}" in done.stdout
    check_written(output, "2 processes on 1 node")
    assert json.loads(capsys.readouterr().out)["sections"][0]["ranked"][0]["step_time_s"]["value"] > 0
    hardware = read_hardware_file(output)
    assert hardware.memory_bandwidth_gb_s is not None
    assert hardware.sources["memory_bandwidth_gb_s"].startswith("measured")
    assert hardware.sources["speeds.links.node_gb_s"].startswith("not measured, for want of a second node")
    assert hardware.sources["speeds.outside.device_gib"] == "as the operating system says"
    assert (output.parent / "mine-matmul.png").stat().st_size > 1000
    before = output.read_bytes()
    assert calibrate.main([f"output={output}"]) == 2
    assert output.read_bytes() == before


@pytest.mark.long
@pytest.mark.slow
def test_torchruns_processes_take_part_and_the_first_writes(known, tmp_path):
    output = tmp_path / "mine.yaml"
    command = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        "-m",
        "tests.calibrate_anyway",
    )
    done = run_python(*command, *build_quick_arguments(known, output))
    assert done.returncode == 0, done.stderr
    check_written(output, "2 processes on 1 node")


@pytest.mark.long
@pytest.mark.slow
def test_a_busy_machine_is_refused(known, tmp_path):
    output = tmp_path / "mine.yaml"
    with keep_processors_busy(tmp_path, 2 * len(os.sched_getaffinity(0))):
        done = run_python("-m", "bench.calibrate", *build_quick_arguments(known, output))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was not quiet" in done.stdout
    assert "above the limit of" in done.stdout
    assert "other processes had the processor" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known.yaml"]


@contextlib.contextmanager
def keep_processors_busy(folder: Path, processes: int) -> Iterator[None]:
    """Within, so many processes compute for ever on the processors that we may use."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"], cwd=folder) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


# --- What a calibration fits: known speeds come back from the timings they would have made, and real timings are whole.


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


def make_kernel_sample(
    kind: str, name: str, format_: str, dims: tuple[int, ...], flops: float, moved: float, s: float = 1.0
) -> CalibrationSample:
    return CalibrationSample(kind, name, format_, dims, flops, moved, (s,))


def make_product_samples(shapes: Sequence[tuple[int, int, int]], format_: str) -> list[CalibrationSample]:
    width = 4 if format_ in ("fp32", "tf32") else 2
    return [
        make_kernel_sample(
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
        make_kernel_sample(
            ATTENTION, name, format_, (b, h, s, s, d), float(count * b * h * s * s * d), float(8 * b * h * s * d)
        )
        for b, h, s, d in shapes
        for name, count in (("forward", 2), ("backward", 5))
    ]


KNOWN_GPU = dataclasses.replace(
    H200_HARDWARE.speeds,  # type: ignore[type-var]
    matmul=MatmulSpeed({"fp32": 0.71, "tf32": 0.52, "bf16": 0.66, "fp16": 0.63}, 132, 90.0),
    attention=AttentionSpeed({SDPA: AttentionKernelSpeed(0.61, 0.42, 40.0)}),
    memory_efficiency=0.77,
    launch=LaunchOverhead(kernel_us=1.6, operator_us=7.5, unit_us=800.0),
)


KEPT_UP = {(MATMUL, "bf16"): 0.85, (MATMUL, "tf32"): 0.88, (ATTENTION, "bf16"): 0.91}


def make_sustained_samples(truth: Hardware) -> list[CalibrationSample]:
    """Bursts of what is timed for seconds, too, and these."""
    samples = []
    for (kind, name), share in KEPT_UP.items():
        made = (
            make_product_samples([SUSTAINED_PRODUCT], name)
            if kind == MATMUL
            else make_attention_samples([SUSTAINED_ATTENTION], name)
        )
        (burst,) = set_predicted_times([dataclasses.replace(made[0], name=FORWARD)], truth)
        samples += [burst, dataclasses.replace(burst, kind=SUSTAINED, name=kind, seconds=(burst.median_s / share,))]
    return samples


def make_gpu_samples(noise: float = 0.0) -> list[CalibrationSample]:
    truth = dataclasses.replace(H200_HARDWARE, speeds=KNOWN_GPU)
    samples = [
        sample
        for name in GPU_FORMATS
        for sample in set_predicted_times(make_product_samples(MATMUL_SHAPES, name), truth, noise)
    ]
    for name in ("fp32", "bf16", "fp16"):
        samples += set_predicted_times(make_attention_samples(ATTENTION_SHAPES["cuda"], name), truth, noise)
    samples += make_sustained_samples(truth)
    reached = 4800e9 * 0.77
    samples.append(make_kernel_sample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (2**28,), 0.0, 2.0**31, 2.0**31 / reached))
    samples.append(make_kernel_sample(OPERATOR, "gelu", "bf16", (2**26,), 0.0, 2.0**28, 2.0**28 / (0.5 * reached)))
    samples.append(make_kernel_sample(OPERATOR, "mul", "bf16", (2**26,), 0.0, 2.0**28, 2.0**28 / (1.01 * reached)))
    samples.append(make_kernel_sample(LAUNCH, KERNEL_SAMPLE, "fp32", (500, 132), 0.0, 8.0, 1.6e-6))
    samples.append(make_kernel_sample(LAUNCH, f"{STEP_SAMPLE} gpt", "fp32", (400, 100, 4, 4), 1e6, 1e6, 400 * 7.5e-6))
    return samples


def get_fitted_speeds(fit: ComputeFit) -> HardwareSpeeds:
    return fit.build_speeds(*SINGLE_DEVICE_PLACEHOLDERS)


def test_what_is_timed_is_compared_with_bursts_of_one_gpu() -> None:
    truth = dataclasses.replace(H200_HARDWARE, speeds=KNOWN_GPU)
    (sample,) = make_product_samples([(16384, 16384, 16384)], "bf16")[:1]
    (seconds,) = predict_kernel_seconds([sample], truth)
    assert sample.flops / seconds == pytest.approx(0.66 * 989e12, rel=0.03)


def test_known_speeds_of_a_gpu_come_back() -> None:
    fit = fit_compute(make_gpu_samples(), H200_HARDWARE)
    speeds = get_fitted_speeds(fit)
    assert speeds.matmul is not None
    assert speeds.attention is not None
    assert KNOWN_GPU.matmul is not None
    for name in GPU_FORMATS:
        assert speeds.matmul.efficiency[name] == pytest.approx(KNOWN_GPU.matmul.efficiency[name], rel=0.01), name
    assert speeds.matmul.half_depth == pytest.approx(90.0, rel=0.05)
    assert speeds.attention.kernels[SDPA].forward == pytest.approx(0.61, rel=0.02)
    assert speeds.attention.kernels[SDPA].backward == pytest.approx(0.42, rel=0.02)
    assert speeds.attention.kernels[SDPA].half_width == pytest.approx(40.0, rel=0.05)
    assert speeds.matmul.sustained_share == pytest.approx({"bf16": 0.85, "tf32": 0.88}, rel=0.01)
    assert speeds.attention.kernels[SDPA].sustained_share == pytest.approx(0.91, rel=0.01)
    assert speeds.memory_efficiency == pytest.approx(0.77, rel=1e-3)
    assert speeds.launch == KNOWN_GPU.launch
    assert fit.memory_bandwidth_gb_s == 4800
    assert speeds.operators is not None
    assert speeds.operators["gelu bf16"] == pytest.approx(0.5)
    assert "mul bf16" not in speeds.operators  # as fast as any
    assert speeds.operators["cumsum"] == 0.5  # not timed: what is assumed of it remains
    assert all(residual.max_error < 0.05 for what, residual in fit.residuals.items() if "operator" not in what)


class SlowingTimer(CpuTimer):
    """Every stretch takes a tenth of a second, and a hundredth more than the one before."""

    def __init__(self) -> None:
        self.stretches: list[int] = []

    def time_calls(self, calls: Sequence[TimedCall]) -> float:
        calls[0]()
        self.stretches.append(len(calls))
        return 0.1 + 0.01 * len(self.stretches)

    def time_repetitions(self, calls: Sequence[TimedCall], repetitions: int) -> tuple[float, ...]:
        return (1.0,) * repetitions


def test_what_is_kept_up_is_timed_after_a_burst_and_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SUSTAINED_PRODUCT", (64, 32, 64))
    monkeypatch.setattr(kernels, "SUSTAINED_ATTENTION", (1, 2, 64, 32))
    monkeypatch.setattr(kernels, "QUICK_SUSTAINED_S", 0.4)
    timers: list[SlowingTimer] = []
    monkeypatch.setattr(kernels, "build_timer", lambda device: timers.append(SlowingTimer()) or timers[-1])
    told: list[str] = []
    samples = kernels.measure_sustained(torch.device("cpu"), quick=True, on_progress=told.append)
    assert [(sample.kind, sample.name, sample.format) for sample in samples] == [
        (MATMUL, FORWARD, "bf16"),
        (SUSTAINED, MATMUL, "bf16"),
        (ATTENTION, FORWARD, "bf16"),
        (SUSTAINED, ATTENTION, "bf16"),
    ]
    assert told == ["what is kept up in bf16"]
    for burst, kept_up in (samples[:2], samples[2:]):
        assert kept_up.dims == burst.dims
        assert burst.seconds == (1.0,) * kernels.QUICK_REPETITIONS
    for kept_up, timer in zip(samples[1::2], timers[1::2], strict=True):
        assert len(timer.stretches) == 4, "0.11, 0.12, 0.13 and 0.14 s are the first to come to 0.4"
        assert kept_up.seconds == pytest.approx([stretch_s / timer.stretches[0] for stretch_s in (0.13, 0.14)])


def test_noise_of_a_gpu_moves_its_speeds_little() -> None:
    speeds = get_fitted_speeds(fit_compute(make_gpu_samples(noise=0.05), H200_HARDWARE))
    assert speeds.matmul is not None
    assert speeds.attention is not None
    assert speeds.matmul.efficiency["bf16"] == pytest.approx(0.66, rel=0.03)
    assert speeds.attention.kernels[SDPA].backward == pytest.approx(0.42, rel=0.05)


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
                make_kernel_sample(
                    LAUNCH, f"{STEP_SAMPLE} gpt", name, (count, 60, 4, 4), 0.0, 0.0, within + count * KNOWN_OPERATOR_S
                )
            )
            samples.append(
                make_kernel_sample(LAUNCH, f"{CALL_SAMPLE} gpt", name, (count, 60, 4, 4), 0.0, 0.0, KNOWN_CALL_S)
            )
    for name, share in (("mul", 1.0), ("tanh", 0.4), ("add", 1.02)):
        for moved in (1e6, 1e7):
            seconds = KNOWN_CALL_S + moved / (share * KNOWN_BYTES_PER_S)
            samples.append(make_kernel_sample(OPERATOR, name, "fp32", (int(moved),), 0.0, moved, seconds))
    samples.append(
        make_kernel_sample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (10**7,), 0.0, 8e7, 8e7 / KNOWN_BYTES_PER_S)
    )
    for tensors, elements in ((48, 50_000), (16, 2_000_000)):
        moved = 28.0 * elements
        seconds = tensors * 5e-6 + moved / 20e9
        samples.append(make_kernel_sample(OPTIMIZER, "adamw fused", "fp32", (tensors, elements), 0.0, moved, seconds))
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
        make_kernel_sample(ATTENTION, "forward", "fp32", (1, 1, 1024, 1024, 64), share * 4.0 * 1024**2 * 64, 0.0)
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.slow
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


def test_timing_an_operator_again_and_again_changes_its_operands_once() -> None:
    """T5's indices of relative positions are added to in place: changed ten times they lie outside of their table."""
    positions = torch.zeros(4, dtype=torch.int64)
    timer = _OperatorTimer(build_timer(torch.device("cpu")), 3, "fp32")
    with timer:
        positions += 1
    assert positions.tolist() == [1, 1, 1, 1]
    assert [key[1] for key, _ in timer.times] == ["add_"]
