"""The machine that plays a step: what waits for what, what is hidden, and what memory is in use meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.prediction.simulation.simulated_rank import COMPUTE_STREAM, RankSpeed, SimulatedRank
from bench.prediction.trace.chunks import Chunk
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    REDUCE_STREAM,
    REPLICA_GROUP,
    SHARD_GROUP,
    WORLD_GROUP,
)


def piece(seconds: float = 0.0, *, peak: float = 0.0, net: float = 0.0, kernels: int = 1) -> Chunk:
    return Chunk(peak, 0.0, net, 0.0, seconds, kernels, None)


def machine(*, collective_s: float = 1.0, **pace: float) -> SimulatedRank:
    return SimulatedRank(RankSpeed(collective_seconds=lambda kind, size, group: collective_s, **pace), timeline=True)  # type: ignore[arg-type]


def test_what_is_sent_beside_computation_is_hidden():
    it = machine()
    it.run_collective("a", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    it.simulate_chunk(piece(3.0), "forward")
    it.wait_for_event("a")
    assert it.elapsed_s == 3.0
    assert it.spent_seconds["exposed"] == 0
    assert it.spent_seconds["communication"] == 1.0


def test_what_is_waited_for_at_once_is_exposed():
    it = machine()
    it.run_collective("a", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    it.wait_for_event("a")
    it.simulate_chunk(piece(3.0), "forward")
    assert it.elapsed_s == 4.0
    assert it.spent_seconds["exposed"] == 1.0


def test_a_stream_takes_one_thing_after_the_other():
    it = machine()
    for name in "abc":
        it.run_collective(name, "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    it.run_collective("d", "all-reduce", 1, REPLICA_GROUP, REDUCE_STREAM)
    assert it.stream_times[ALL_GATHER_STREAM] == 3.0
    assert it.stream_times[REDUCE_STREAM] == 1.0


def test_a_group_takes_one_thing_after_the_other_on_whatever_streams():
    """Zhao et al. 2023, section 3.3.2: an all-gather issued after a reduce-scatter waits until that is done."""
    it = machine()
    it.simulate_chunk(piece(5.0), "backward")
    it.run_collective("a", "reduce-scatter", 1, SHARD_GROUP, REDUCE_STREAM, after=COMPUTE_STREAM)
    it.run_collective("b", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    assert it.stream_times[REDUCE_STREAM] == 6.0
    assert it.stream_times[ALL_GATHER_STREAM] == 7.0


def test_a_collective_waits_for_the_stream_it_depends_on():
    it = machine()
    it.simulate_chunk(piece(5.0), "backward")
    it.run_collective("a", "reduce-scatter", 1, SHARD_GROUP, REDUCE_STREAM, after=COMPUTE_STREAM)
    it.run_collective("b", "all-gather", 1, WORLD_GROUP, ALL_GATHER_STREAM)
    assert it.stream_times[REDUCE_STREAM] == 6.0
    assert it.stream_times[ALL_GATHER_STREAM] == 1.0


def test_many_small_kernels_wait_for_the_processor():
    it = machine(launch_s=0.01)
    it.simulate_chunk(piece(0.1, kernels=100), "forward")
    assert it.elapsed_s == pytest.approx(1.0, rel=0.02)
    assert it.spent_seconds["compute"] == pytest.approx(0.1)
    assert it.spent_seconds["launch"] == pytest.approx(it.elapsed_s - 0.1)


def test_large_kernels_do_not():
    it = machine(launch_s=0.01)
    it.simulate_chunk(piece(10.0, kernels=100), "forward")
    assert it.elapsed_s == pytest.approx(10.0, rel=0.01)


def test_the_parts_add_up_to_the_step():
    it = machine(launch_s=0.02, overlap_loss=0.2)
    for number in range(5):
        it.run_collective(str(number), "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
        it.simulate_chunk(piece(0.6, kernels=7), "forward")
        it.wait_for_event(str(number))
        it.copy_within_device("copy", 10)
    it.simulate_optimizer_step(0.3, 2)
    assert sum(it.spent_seconds[name] for name in ("compute", "exposed", "optimizer", "launch")) == pytest.approx(
        it.elapsed_s
    )


def test_computation_is_slower_while_something_is_sent():
    it = machine(overlap_loss=0.5)
    it.run_collective("a", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    it.simulate_chunk(piece(3.0), "forward")
    assert it.elapsed_s == pytest.approx(3.5)


def test_the_rate_limiter_stops_the_processor():
    """With two units in use the third gather is issued only when the device has done with the first."""
    starts = {}
    for limited in (False, True):
        it = machine(collective_s=0.1)
        for unit in range(4):
            if limited:
                it.limit_all_gathers(2)
            it.run_collective(str(unit), "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
            starts[limited, unit] = it.stream_times[ALL_GATHER_STREAM] - 0.1
            it.wait_for_event(str(unit))
            it.simulate_chunk(piece(1.0), "forward")
            it.note_late_free()
    assert starts[False, 2] == pytest.approx(0.2)
    assert starts[True, 2] == pytest.approx(1.1)


def test_a_stream_may_follow_the_computation():
    it = machine(collective_s=0.1)
    it.simulate_chunk(piece(1.0), "forward")
    it.record_event("here")
    it.simulate_chunk(piece(1.0), "forward")
    it.run_collective("early", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    it.follow_stream(ALL_GATHER_STREAM, "here")
    it.run_collective("late", "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
    assert it.stream_times[ALL_GATHER_STREAM] == pytest.approx(1.1)


def test_memory_freed_while_a_stream_uses_it_is_active_but_not_allocated():
    it = machine(launch_s=0.01)
    it.allocate("whole", 100, ALL_GATHER_MEMORY)
    it.simulate_chunk(piece(5.0), "forward")
    it.free("whole", after=COMPUTE_STREAM)
    it.allocate("next", 80, ALL_GATHER_MEMORY)
    assert it.peak.size == 100
    assert it.peak_active_bytes == 180


def test_memory_freed_on_its_own_stream_is_free():
    it = machine(launch_s=0.01)
    it.allocate("whole", 100, ALL_GATHER_MEMORY)
    it.simulate_chunk(piece(5.0), "forward")
    it.free("whole")
    it.allocate("next", 80, ALL_GATHER_MEMORY)
    assert it.peak_active_bytes == it.peak.size == 100


def test_the_peak_says_what_it_consists_of_and_where_it_is():
    it = machine()
    it.allocate("gradients", 10, GRADIENT_MEMORY)
    it.phase, it.module = "backward", "h.3"
    it.simulate_chunk(
        Chunk(
            peak_bytes=50,
            lasting_bytes_at_peak=20,
            net_bytes=5,
            lasting_net_bytes=5,
            seconds=1,
            num_kernels=1,
            completed_gradient=None,
        ),
        "backward",
    )
    it.phase, it.module = "optimizer", "optimizer"
    it.allocate("more", 30, GRADIENT_MEMORY)
    assert it.peak.size == 60
    assert (it.peak.phase, it.peak.module) == ("backward", "h.3")
    assert {name: size for name, size in it.peak.parts.items() if size} == {
        "gradients": 10,
        "activations": 20,
        "temporaries": 30,
    }
    assert it.phase_peaks == {"forward": 10, "backward": 60, "optimizer": 45}


def test_holding_under_a_name_again_frees_what_was_there():
    it = machine()
    it.allocate("a", 10, ALL_GATHER_MEMORY)
    it.allocate("a", 30, ALL_GATHER_MEMORY)
    assert it.peak.size == 30
    it.free("a")
    it.free("a")
    it.allocate("b", 31, ALL_GATHER_MEMORY)
    assert it.peak.size == 31


def test_spans_of_a_stream_do_not_overlap():
    it = machine(launch_s=0.001, overlap_loss=0.1)
    for number in range(6):
        it.run_collective(str(number), "all-gather", 1, SHARD_GROUP, ALL_GATHER_STREAM)
        it.simulate_chunk(piece(0.7), "forward")
        it.wait_for_event(str(number))
    for stream in (COMPUTE_STREAM, ALL_GATHER_STREAM):
        spans = sorted((span.start_s, span.end_s) for span in it.timeline if span.stream == stream)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))
        assert all(start <= end for start, end in spans)
