"""Calibration: collectives are timed rightly, fits find what they should, and a busy machine is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from bench import calibrate, predict
from bench.calibration import session
from bench.calibration.collectives import (
    REFERENCE_BYTES,
    _CollectiveTimer,
    count_ranks_per_node,
    list_group_layouts,
    list_message_sizes,
    measure_collectives,
)
from bench.calibration.fit_links import count_bus_bytes, fit_links, predict_collective_seconds
from bench.calibration.hardware_file import (
    MEASURED_SOURCE,
    BaselineHardware,
    CalibrationProvenance,
    build_calibrated_hardware,
)
from bench.calibration.noise import REFERENCE_NAME, find_disturbances
from bench.calibration.processes import CalibrationProcess, run_local_processes
from bench.calibration.sample import COLLECTIVE, LAUNCH, MATMUL, CalibrationSample
from bench.core.errors import UsageError
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import read_hardware_file
from bench.hardware.speeds import GlooSpeed, LinkSpeeds
from bench.prediction.cost.collectives import (
    ALL_REDUCE,
    CALIBRATED_COLLECTIVES,
    CollectiveGroup,
    compute_bus_bandwidth,
    compute_collective_seconds,
)
from tests.conftest import CPU, ROOT, compose_run_config

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


def test_a_gpu_that_nobody_has_described_needs_its_peaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unknown, own = (
        DetectedDevice("cuda", "Tesla T4", 1, (7, 5), 16 * 2**30),
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


@pytest.mark.slow
def test_collectives_of_real_processes_are_timed_and_fitted():
    timed, slowest = run_local_processes(4, time_collectives)
    assert slowest == [3.0, 5.0]
    sizes = list_message_sizes("cpu", quick=True)
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
    for kind in CALIBRATED_COLLECTIVES:
        assert samples_by_key[kind, sizes[-1], 4].median_s > samples_by_key[kind, sizes[0], 4].median_s
    fit = fit_links(timed, None, uses_gloo=True, base_name="conf/hardware/cpu.yaml")
    assert fit.links.gloo is not None
    assert all(predict_collective_seconds(sample, fit.links) > 0 for sample in timed)
    assert len(fit.residuals) == 6


def fail_on_rank_1(process: CalibrationProcess) -> None:
    if process.rank == 1:
        raise ValueError("rank 1 is out of sorts")
    with process.init_process_group(process.select_device("cpu")):
        pass


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
        [sys.executable, *session],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
