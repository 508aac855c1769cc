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
from bench.calibration.collectives import (
    REFERENCE_BYTES,
    _Bench,
    group_shapes,
    measure_collectives,
    message_sizes,
    ranks_per_node,
)
from bench.calibration.facts import Facts
from bench.calibration.fit_links import bus_bytes, expected_seconds, fit_links
from bench.calibration.hardware_file import MEASURED, Known, calibrated
from bench.calibration.noise import REFERENCE, disturbances
from bench.calibration.sample import COLLECTIVE, LAUNCH, MATMUL, Sample
from bench.calibration.world import Process, on_this_machine
from bench.errors import UsageError
from bench.hardware.detect import Device
from bench.hardware.file import read_hardware
from bench.hardware.speeds import Gloo, Links
from bench.simulate.network import ALL_REDUCE, COLLECTIVES, Group, bus_gb_s, collective_seconds
from tests.conftest import CPU, ROOT, configuration

MIB = 2**20


def collective(kind: str, size: float, group: Group, seconds: Sequence[float]) -> Sample:
    dims = (int(size) // 4,)
    return Sample(
        COLLECTIVE,
        kind,
        "bytes",
        dims,
        0.0,
        size,
        tuple(seconds),
        ranks=group.ranks,
        ranks_per_node=group.ranks_per_node,
    )


def made_up(links: Links, groups: Sequence[Group], largest: int = 2**30, scatter: float = 0.0) -> list[Sample]:
    """What would be timed on a machine that the model describes to the point, or up to some scatter."""
    dice = random.Random(0)
    sizes = [2.0**power for power in range(10, 31, 2) if 2**power <= largest]
    return [
        collective(
            kind,
            size,
            group,
            [collective_seconds(kind, size, group, links) * (1 + scatter * dice.uniform(-1, 1)) for _ in range(9)],
        )
        for group in groups
        for kind in COLLECTIVES
        for size in sizes
    ]


# Groups and sizes


def test_groups_are_those_strategies_communicate_in():
    def of(ranks: int, each: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {shape.words: shape.groups for shape in group_shapes(ranks, each)}

    assert of(1, 1) == {}
    assert of(2, 2) == {"the ranks of a node": ((0, 1),)}
    assert of(4, 4) == {"the ranks of a node": ((0, 1, 2, 3),), "half the ranks of a node": ((0, 1), (2, 3))}
    assert of(2, 1) == {"all ranks": ((0, 1),)}
    assert of(4, 2) == {
        "all ranks": ((0, 1, 2, 3),),
        "one rank per node": ((0, 2),),
        "the ranks of a node": ((0, 1), (2, 3)),
    }
    eight = {shape.words: (shape.ranks, shape.ranks_per_node) for shape in group_shapes(16, 8)}
    assert eight == {
        "all ranks": (16, 8),
        "one rank per node": (2, 1),
        "the ranks of a node": (8, 8),
        "half the ranks of a node": (4, 4),
    }


def test_sizes_go_from_a_kibibyte_to_what_a_device_can_take():
    assert message_sizes("cpu", quick=False) == [4**power for power in range(5, 14)]
    assert message_sizes("cuda", quick=False)[-1] == 2**30
    assert set(message_sizes("cpu", quick=True)) < set(message_sizes("cpu", quick=False))


def test_ranks_on_one_machine_are_a_node():
    assert ranks_per_node(["a"]) == 1
    assert ranks_per_node(["a", "a", "b", "b"]) == 2
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "a"], ["a", "b", "b"]):
        with pytest.raises(UsageError, match="equally many on every node"):
            ranks_per_node(hosts)


# Fits, on what known numbers would come to


def h200_links() -> Links:
    speeds = configuration("hardware=h200").hardware.speeds
    assert speeds is not None
    return speeds.links


NODE, HALF, ALL, ONE_EACH = Group(8, 8), Group(4, 4), Group(16, 8), Group(2, 1)


@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_numbers_of_nccls_model_are_found_again(scatter):
    true = dataclasses.replace(h200_links(), gpu_efficiency=0.61, gpu_latency=2.3, node_efficiency=0.47, latency=11.0)
    timed = made_up(true, [ALL, ONE_EACH, NODE, HALF], scatter=scatter)
    found = fit_links(timed, h200_links(), gloo=False, base_name="conf/hardware/h200.yaml")
    for name in ("gpu_efficiency", "gpu_latency", "node_efficiency", "latency"):
        assert getattr(found.links, name) == pytest.approx(getattr(true, name), rel=0.001 + scatter), name
        assert found.sources[name].startswith("measured")
    for name in ("gpu_gb_s", "node_gb_s", "adapters", "congestion", "gloo"):
        assert getattr(found.links, name) == getattr(true, name), name
    assert found.sources["congestion"] == "not measured: as in conf/hardware/h200.yaml"
    assert max(residual.worst for residual in found.residuals.values()) < 0.01 + 2 * scatter
    assert set(found.residuals) == {
        f"{kind}, {words}"
        for kind in COLLECTIVES
        for words in ("16 ranks on 2 nodes", "2 ranks on 2 nodes", "8 ranks on 1 node", "4 ranks on 1 node")
    }


GLOO = Links(1.7, 1.0, 0.9, 1.0, adapters=1, congestion=0.0, latency=2.5, gloo=Gloo(41.0, 0.8, 1.9))


@pytest.mark.parametrize("scatter", [0.0, 0.05])
def test_numbers_of_gloo_are_found_again_with_nothing_to_begin_with(scatter):
    timed = made_up(GLOO, [Group(4, 2), Group(2, 1), Group(2, 2)], largest=2**26, scatter=scatter)
    found = fit_links(timed, None, gloo=True, base_name="conf/hardware/cpu.yaml")
    assert found.links.gloo is not None
    for name in ("step_us", "reduce", "reduce_scatter"):
        assert getattr(found.links.gloo, name) == pytest.approx(getattr(GLOO.gloo, name), rel=0.001 + scatter), name
    for name in ("gpu_gb_s", "node_gb_s", "latency"):
        assert getattr(found.links, name) == pytest.approx(getattr(GLOO, name), rel=0.001 + scatter), name


@pytest.mark.parametrize("far", [1e-3, 1e3])
def test_what_was_known_before_need_not_be_near(far):
    before = dataclasses.replace(GLOO, gpu_gb_s=1.7 * far, node_gb_s=0.9 * far, gloo=Gloo(41.0 * far, 0.8, 1.9))
    timed = made_up(GLOO, [Group(4, 2), Group(2, 1), Group(2, 2)], largest=2**22, scatter=0.3)
    found = fit_links(timed, before, gloo=True, base_name="x").links
    assert found.gpu_gb_s * found.gpu_efficiency == pytest.approx(1.7, rel=0.2)
    assert found.node_gb_s * found.node_efficiency == pytest.approx(0.9, rel=0.2)


def test_one_node_says_nothing_of_the_network():
    true = dataclasses.replace(h200_links(), gpu_efficiency=0.5)
    found = fit_links(made_up(true, [NODE]), h200_links(), gloo=False, base_name="conf/hardware/h200.yaml")
    assert found.links.gpu_efficiency == pytest.approx(0.5, rel=0.001)
    for name in ("node_gb_s", "node_efficiency", "latency", "adapters", "congestion"):
        assert getattr(found.links, name) == getattr(true, name)
    assert found.sources["node_efficiency"] == found.sources["latency"] == "not measured: as in conf/hardware/h200.yaml"
    alone = fit_links(made_up(GLOO, [Group(2, 2)], 2**26), None, gloo=True, base_name="conf/hardware/cpu.yaml")
    assert alone.links.node_gb_s == alone.links.gpu_gb_s == pytest.approx(1.7, rel=0.001)
    assert alone.sources["node_gb_s"] == "not measured, for want of a second node: as inside a node"


def test_one_rank_per_node_says_nothing_of_the_inside_of_one():
    found = fit_links(made_up(GLOO, [Group(2, 1)], 2**26), None, gloo=True, base_name="conf/hardware/cpu.yaml")
    assert found.links.gpu_gb_s == found.links.node_gb_s == pytest.approx(0.9, rel=0.001)
    assert found.sources["gpu_gb_s"].startswith("not measured")
    for size in (2**10, 2**26):
        expected = collective_seconds(ALL_REDUCE, size, Group(2, 1), GLOO)
        assert collective_seconds(ALL_REDUCE, size, Group(2, 1), found.links) == pytest.approx(expected, rel=0.001)


def test_a_link_faster_than_its_vendor_says_gets_a_rate_of_its_own():
    true = dataclasses.replace(h200_links(), gpu_gb_s=900.0, gpu_efficiency=0.8)
    found = fit_links(made_up(true, [NODE]), h200_links(), gloo=False, base_name="x")
    assert found.links.gpu_gb_s * found.links.gpu_efficiency == pytest.approx(720, rel=0.001)
    assert found.links.gpu_efficiency == 1.0


def test_one_wild_timing_does_not_bend_the_fit():
    timed = made_up(GLOO, [Group(4, 4)], 2**26)
    wild = dataclasses.replace(timed[8], seconds=tuple(20 * each for each in timed[8].seconds))
    found = fit_links([*timed[:8], wild, *timed[9:]], None, gloo=True, base_name="x").links
    assert found.gpu_gb_s == pytest.approx(GLOO.gpu_gb_s, rel=0.1)


def test_gloos_reduction_is_an_all_reduce_of_two_passes():
    group = Group(4, 4)
    gather, scatter, reduce = (collective_seconds(kind, 2**26, group, GLOO) for kind in COLLECTIVES)
    assert GLOO.gloo is not None
    moved = 2**26 * 3 / 4 / 1.7e9
    assert gather == pytest.approx(3 * 41e-6 + moved)
    assert scatter == pytest.approx(6 * 41e-6 + 1.9 * moved)
    assert reduce == pytest.approx(6 * 41e-6 + 2 * 0.8 * moved)
    assert bus_gb_s(ALL_REDUCE, 2**26, group, GLOO) == pytest.approx(2 * moved * 1.7 / reduce)


# The description that is written

FACTS = Facts("2026-01-02 03:04 UTC", "somewhere", "a device", "8 processes on 1 node", {"torch": "9"}, "abc")


def test_what_was_not_measured_is_kept_with_its_source():
    h200 = configuration("hardware=h200").hardware
    known = Known(h200, h200.speeds, "conf/hardware/h200.yaml")
    true = dataclasses.replace(h200_links(), gpu_efficiency=0.5)
    fit = fit_links(made_up(true, [NODE]), h200_links(), gloo=False, base_name=known.name)
    found = calibrated("mine", known, None, fit, FACTS)
    assert h200.speeds is not None
    assert found == dataclasses.replace(
        h200, name="mine", speeds=dataclasses.replace(h200.speeds, links=fit.links), sources=found.sources
    )
    assert found.sources["speeds.matmul.efficiency"] == h200.sources["speeds.matmul.efficiency"]
    assert found.sources["speeds.links.gpu_efficiency"] == "measured inside a node"
    assert found.sources["speeds.links.node_efficiency"] == "not measured: as in conf/hardware/h200.yaml"
    assert found.sources["calibration"] == (
        "2026-01-02 03:04 UTC on host somewhere (a device), 8 processes on 1 node; torch 9; commit abc"
    )
    assert found.sources["residual of all-gather, 8 ranks on 1 node"].endswith("of 11 timings")


def test_a_second_calibration_does_not_take_credit_for_the_first():
    h200 = configuration("hardware=h200").hardware
    said = {**h200.sources, "calibration": "long ago", "speeds.memory_efficiency": MEASURED}
    first = dataclasses.replace(h200, sources=said)
    known = Known(first, first.speeds, "old.yaml")
    fit = fit_links(made_up(h200_links(), [NODE]), h200_links(), gloo=False, base_name="old.yaml")
    sources = calibrated("new", known, None, fit, FACTS).sources
    assert sources["speeds.memory_efficiency"] == "not measured: as in old.yaml"
    assert sources["calibration of old.yaml"] == "long ago"
    assert sources["calibration"] == str(FACTS)


# Noise


def timing(*seconds: float, kind: str = MATMUL, size: int = 64) -> Sample:
    return Sample(kind, "mm", "fp32", (1, size, size, size), 2.0 * size**3, 12.0 * size**2, seconds)


def steady(count: int, spread: float = 0.01, kind: str = MATMUL) -> list[Sample]:
    """Measurements of different sizes with a spread of about so much."""
    around = (1 - 2 * spread, 1 - spread, 1, 1 + spread, 1 + 2 * spread)
    return [timing(*around, kind=kind, size=size) for size in range(8, 8 + count)]


def words_of(samples: Sequence[Sample], waiting: float = 0.0) -> str:
    return "\n".join(str(each) for each in disturbances(samples, waiting))


def test_a_quiet_machine_is_left_in_peace():
    assert disturbances(steady(20, 0.02)) == []
    assert disturbances([], 0.04) == []
    assert disturbances([*steady(3), timing(0.5, 1, 1, 2, 9, size=99)]) == [], "now and then one is disturbed"


def test_too_much_scatter_is_named_with_its_limit():
    noisy = [timing(0.4, 0.7, 1, 1.5, 2, size=500 + each) for each in range(3)]
    assert words_of([*steady(2), *noisy]) == (
        "the typical spread of 5 matmul measurements (the worst, of matmul mm fp32 1x500x500x500, is 60 %) is 60 %, "
        "above the limit of 15 %"
    )


def test_each_kind_has_its_own_limit():
    assert disturbances(steady(10, 0.12, LAUNCH)) == []
    assert disturbances(steady(10, 0.12, MATMUL)) != []
    gathers = [collective("all-gather", 1024 * size, Group(2, 2), (0.7, 0.85, 1, 1.15, 1.3)) for size in range(1, 9)]
    assert disturbances(gathers) == []


def test_drift_is_the_same_measurement_at_another_time():
    first, later = (dataclasses.replace(timing(each, each, each), name=REFERENCE) for each in (1.0, 1.5))
    assert disturbances([first, *steady(5), first]) == []
    assert words_of([first, *steady(5), later]) == (
        "the difference between matmul reference fp32 1x64x64x64 at one time and another is 50 %, "
        "above the limit of 30 %"
    )
    reduced = [collective(ALL_REDUCE, MIB, Group(2, 2), (each,) * 3) for each in (1.0, 2.5)]
    assert "all-reduce of 1,048,576 bytes among 2 ranks" in words_of(reduced)


def test_operators_that_are_alike_may_be_different():
    assert disturbances([timing(1.0, 1.0, 1.0), timing(3.0, 3.0, 3.0)]) == []


def test_waiting_for_a_processor_is_somebody_elses_work():
    assert words_of(steady(5), waiting=0.5) == (
        "the time in which other processes had the processor is 50 %, above the limit of 5 %"
    )


# What is mistyped

MISTAKES: dict[str, tuple[str, ...]] = {
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


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_answered_in_a_sentence_and_nothing_is_started(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("precious")
    monkeypatch.setattr(calibrate, "measured", lambda *arguments: pytest.fail("something was started"))
    assert calibrate.main([typed]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    for part in MISTAKES[typed]:
        assert part in said.err
    assert (tmp_path / "there.yaml").read_text() == "precious"


def test_options_can_be_written_both_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = dict.fromkeys(calibrate.OWN)
    by_key = calibrate.read_order(["output=a.yaml", "ranks=4", "quick=true"], own, CPU)
    assert by_key == calibrate.read_order([], own | {"output": "a.yaml", "ranks": "4", "quick": "true"}, CPU)
    assert (by_key.output, by_key.extent.ranks, by_key.extent.quick) == (Path("a.yaml"), 4, True)
    assert calibrate.read_order([], own, CPU).output == Path("hardware/cpu_calibrated.yaml")
    assert calibrate.read_order([], own, CPU).extent.ranks == max(2, len(os.sched_getaffinity(0)))


def test_a_gpu_that_nobody_has_described_needs_its_peaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unknown, own = Device("cuda", "Tesla T4", 1, (7, 5), 16 * 2**30), dict.fromkeys(calibrate.OWN)
    with pytest.raises(UsageError, match=r"hardware=gpu is not valid: .* \+hardware.peak_tflops"):
        calibrate.read_order([], own, unknown)
    order = calibrate.read_order(["+hardware.peak_tflops.fp32=8.1"], own, unknown)
    assert order.known.name == "conf/hardware/h200.yaml", "where what was not measured comes from"
    assert (order.extent.ranks, order.output) == (1, Path("hardware/gpu_calibrated.yaml"))


# Real processes


def timed_by(process: Process) -> tuple[list[Sample], list[float]]:
    """All timings, and what becomes of two repetitions of which each has its own slowest rank."""
    device = process.device("cpu")
    with process.communicating(device):
        timed = measure_collectives(device, "here", quick=True, progress=lambda text: None)
        return timed, _Bench(device, 2**12, quick=True)._slowest([1.0, 5.0] if process.rank == 0 else [3.0, 2.0])


@pytest.mark.alone
@pytest.mark.slow
def test_collectives_of_real_processes_are_timed_and_fitted():
    timed, slowest = on_this_machine(4, timed_by)
    assert slowest == [3.0, 5.0]
    sizes = message_sizes("cpu", quick=True)
    found = {(each.name, int(each.bytes_moved), each.ranks): each for each in timed}
    assert set(found) == {
        *((kind, size, ranks) for kind in COLLECTIVES for size in sizes for ranks in (4, 2)),
        (ALL_REDUCE, REFERENCE_BYTES, 4),
    }
    for (kind, _, ranks), each in found.items():
        assert each.ranks_per_node == ranks
        assert len(each.seconds) >= 5
        # No more than a processor can copy, no slower than a hundredth of a spinning disk.
        assert 1e4 < bus_bytes(each) / each.median_s < 1e11, kind
    for kind in COLLECTIVES:
        assert found[kind, sizes[-1], 4].median_s > found[kind, sizes[0], 4].median_s
    fit = fit_links(timed, None, gloo=True, base_name="conf/hardware/cpu.yaml")
    assert fit.links.gloo is not None
    assert all(expected_seconds(each, fit.links) > 0 for each in timed)
    assert len(fit.residuals) == 6


def failing(process: Process) -> None:
    if process.rank == 1:
        raise ValueError("rank 1 is out of sorts")
    with process.communicating(process.device("cpu")):
        pass


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others():
    with pytest.raises(Exception, match="rank 1 is out of sorts"):
        on_this_machine(2, failing)


# The command


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A description of a processor all of whose speeds are known, if not true."""
    values = yaml.safe_load((ROOT / "conf" / "hardware" / "h200.yaml").read_text())
    values.update(name="known", device="cpu", gpu_names=[])
    path = tmp_path / "known.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def quick_collectives(known: Path, output: Path) -> list[str]:
    return [f"hardware={known}", "only=collectives", "quick=true", f"output={output}"]


def check_written(output: Path, processes: str) -> None:
    """Everything is there, says where it comes from, and is of use."""
    hardware = read_hardware(output)
    assert hardware.name == output.stem
    assert hardware.speeds is not None
    assert hardware.speeds.links.gloo is not None
    for fact in ("torch", "transformers", "commit", " on host ", processes):
        assert fact in hardware.sources["calibration"]
    assert hardware.sources["speeds.links.gloo"].startswith("measured")
    assert any(name.startswith("residual of all-reduce") for name in hardware.sources)
    raw = json.loads(output.with_suffix(".json").read_text())
    assert len(raw["samples"]) >= 3 * len(message_sizes("cpu", quick=True))
    for ending in (".png", ".svg"):
        assert (output.parent / f"{output.stem}-collectives{ending}").stat().st_size > 1000
    question = ["model=gpt_125m", "gpus=2", "strategy=ddp", "batch_size_per_gpu=1", "format=json", f"hardware={output}"]
    assert predict.main(question) == 0


@pytest.mark.slow
def test_the_command_writes_a_file_that_predictions_take(tmp_path, capsys):
    output = tmp_path / "new" / "mine.yaml"
    done = python("-m", "tests.calibrate_anyway", "quick=true", "ranks=2", f"output={output}")
    assert done.returncode == 0, done.stderr
    for part in ("speeds.links.gloo", "speeds.memory_efficiency", "how far off the fit is", "all-reduce, 2 ranks"):
        assert part in done.stdout
    assert f"python -m bench.predict model=gpt_125m gpus=2 hardware={output}" in done.stdout
    check_written(output, "2 processes on 1 node")
    assert json.loads(capsys.readouterr().out)["sections"][0]["ranked"][0]["step_time_s"]["value"] > 0
    hardware = read_hardware(output)
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
    done = python(*command, *quick_collectives(known, output))
    assert done.returncode == 0, done.stderr
    check_written(output, "2 processes on 1 node")


@pytest.mark.slow
def test_a_busy_machine_is_refused(known, tmp_path):
    output = tmp_path / "mine.yaml"
    with busy(tmp_path, 2 * len(os.sched_getaffinity(0))):
        done = python("-m", "bench.calibrate", *quick_collectives(known, output))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was not quiet" in done.stdout
    assert "above the limit of" in done.stdout
    assert "other processes had the processor" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known.yaml"]


@contextlib.contextmanager
def busy(folder: Path, processes: int) -> Iterator[None]:
    """Within, so many processes compute for ever on the processors that we may use."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"], cwd=folder) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
