"""Clocks, statistics, memory and profiling: the mathematics of measuring, on inputs whose answer is known."""

from __future__ import annotations

import random
import re
import statistics
import time
import tomllib

import pytest
import torch

from bench.measure.clock import CpuClock
from bench.measure.environment import software
from bench.measure.memory import Change, CpuProbe, peak_of_changes
from bench.measure.oom import bytes_asked, is_out_of_memory
from bench.measure.profiling import covered, exposed_communication, merged, overlap
from bench.measure.statistics import median_interval, percentile, slowest_rank
from tests.conftest import ROOT

MIB = 2**20


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 1.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="shorter"):
        slowest_rank([[1.0, 2.0], [1.0]])


def test_percentile_is_linear_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert percentile([7.0], 0.95) == 7.0


def test_the_medians_interval_holds_the_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    true_median = 0.5**-0.5  # of 1 / sqrt(1 - u) for u uniform in [0, 1): skewed, with a heavy tail
    held = 0
    for _ in range(2000):
        sample = [1 / (1 - generator.random()) ** 0.5 for _ in range(20)]
        low, high = median_interval(sample)
        assert low <= statistics.median(sample) <= high
        held += low <= true_median <= high
    assert 0.945 <= held / 2000 <= 0.985


def test_too_few_samples_give_the_whole_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([1.0]) == (1.0, 1.0)


def test_the_clock_times_steps_not_what_lies_around_them() -> None:
    clock = CpuClock()
    time.sleep(0.05)
    clock.tick()
    for _ in range(3):
        time.sleep(0.01)
        clock.tick()
    times = clock.times_s()
    assert len(times) == 3
    assert all(0.01 <= step < 0.05 for step in times)


def test_peak_counts_what_is_alive_when_the_steady_step_starts() -> None:
    changes = [
        Change(1, 0xA, 100, False),
        Change(2, 0xB, 900, False),
        Change(3, 0xB, -900, False),
        Change(5, 0xC, 50, False),
        Change(6, 0xC, -50, False),
    ]
    assert peak_of_changes(changes, steady_from_ns=4) == (1000, 150)


def test_peak_leaves_the_backends_buffers_out_and_survives_releases_it_did_not_see() -> None:
    changes = [
        Change(1, 0xA, 100, False),
        Change(2, 0xB, 500, True),  # inside a collective
        Change(3, 0xA, 100, False),  # the same address again: released in between by another thread
        Change(4, 0xD, -70, False),  # allocated before anybody looked
    ]
    assert peak_of_changes(changes, steady_from_ns=0) == (100, 100)


def test_the_cpu_probe_sees_a_known_peak() -> None:
    import contextlib

    probe = CpuProbe(contextlib.nullcontext)
    with probe.observe():
        kept = torch.ones(MIB)  # 4 MiB
        scratch = torch.ones(4 * MIB)  # 16 MiB, gone before the steady step
        del scratch
        probe.start_steady_step()
        temporary = kept + 1
        del temporary
    peaks = probe.peaks()
    assert peaks.allocated_overall == pytest.approx(20 * MIB, rel=0.001)
    assert peaks.allocated == pytest.approx(8 * MIB, rel=0.001)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes."
            ),
            12345,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."), 20 * MIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."), 1536 * MIB),
        (MemoryError("std::bad_alloc"), None),
        (RuntimeError("NCCL error: unhandled cuda error ... Cuda failure 2 'out of memory'"), None),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, size: int | None) -> None:
    assert is_out_of_memory(error)
    assert bytes_asked(error) == size


@pytest.mark.parametrize(
    "error", [RuntimeError("Connection closed by peer"), ValueError("out of range"), KeyError("x")]
)
def test_other_failures_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_real_failed_allocation_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert bytes_asked(caught.value) == 2**60


def test_interval_arithmetic() -> None:
    assert merged([(3, 5), (1, 2), (4, 7)]) == [(1, 2), (3, 7)]
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert overlap([(0, 4)], [(3, 6), (8, 9)]) == 1


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_exposed_communication_is_what_no_kernel_hides() -> None:
    events = [
        event("ncclDevKernel_AllGather", 0, 40),
        event("gemm", 20, 60),  # hides 20 of 40
        event("ncclDevKernel_ReduceScatter", 70, 30),  # 10 hidden, 20 exposed
        event("aten::mm", 0, 100, category="cpu_op"),  # the host's side of it does not count
    ]
    assert exposed_communication(events, on_gpu=True) == pytest.approx(0.4)
    assert exposed_communication([], on_gpu=True) == 0.0


def test_versions_of_every_library_that_an_extra_brings_are_on_the_row() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    computing = [extra for extra in extras if extra not in ("notebooks", "dashboard", "test")]
    brought = {re.split("[<>=]", package)[0] for extra in computing for package in extras[extra]}
    assert "torchao" in brought
    assert brought <= set(software()["packages"])
