"""The machine that plays a step: what waits for what, what is hidden, and what memory is in use meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.simulate.machine import COMPUTE, Machine, Pace
from bench.simulate.reel import Piece
from bench.strategies.plan import GATHER, GATHERED, GRADIENTS, REDUCE, REPLICAS, SHARDS, WORLD


def piece(seconds: float = 0.0, *, peak: float = 0.0, net: float = 0.0, kernels: int = 1) -> Piece:
    return Piece(peak, 0.0, net, 0.0, seconds, kernels, None)


def machine(*, collective_s: float = 1.0, **pace: float) -> Machine:
    return Machine(Pace(collective=lambda kind, size, group: collective_s, **pace), timeline=True)  # type: ignore[arg-type]


def test_what_is_sent_beside_computation_is_hidden():
    it = machine()
    it.send("a", "all-gather", 1, SHARDS, GATHER)
    it.play(piece(3.0), "forward")
    it.wait("a")
    assert it.elapsed == 3.0
    assert it.spent["exposed"] == 0
    assert it.spent["communication"] == 1.0


def test_what_is_waited_for_at_once_is_exposed():
    it = machine()
    it.send("a", "all-gather", 1, SHARDS, GATHER)
    it.wait("a")
    it.play(piece(3.0), "forward")
    assert it.elapsed == 4.0
    assert it.spent["exposed"] == 1.0


def test_a_stream_takes_one_thing_after_the_other():
    it = machine()
    for name in "abc":
        it.send(name, "all-gather", 1, SHARDS, GATHER)
    it.send("d", "all-reduce", 1, REPLICAS, REDUCE)
    assert it.streams[GATHER] == 3.0
    assert it.streams[REDUCE] == 1.0


def test_a_group_takes_one_thing_after_the_other_on_whatever_streams():
    """Zhao et al. 2023, section 3.3.2: an all-gather issued after a reduce-scatter waits until that is done."""
    it = machine()
    it.play(piece(5.0), "backward")
    it.send("a", "reduce-scatter", 1, SHARDS, REDUCE, after=COMPUTE)
    it.send("b", "all-gather", 1, SHARDS, GATHER)
    assert it.streams[REDUCE] == 6.0
    assert it.streams[GATHER] == 7.0


def test_a_collective_waits_for_the_stream_it_depends_on():
    it = machine()
    it.play(piece(5.0), "backward")
    it.send("a", "reduce-scatter", 1, SHARDS, REDUCE, after=COMPUTE)
    it.send("b", "all-gather", 1, WORLD, GATHER)
    assert it.streams[REDUCE] == 6.0
    assert it.streams[GATHER] == 1.0


def test_many_small_kernels_wait_for_the_processor():
    it = machine(launch_s=0.01)
    it.play(piece(0.1, kernels=100), "forward")
    assert it.elapsed == pytest.approx(1.0, rel=0.02)
    assert it.spent["compute"] == pytest.approx(0.1)
    assert it.spent["launch"] == pytest.approx(it.elapsed - 0.1)


def test_large_kernels_do_not():
    it = machine(launch_s=0.01)
    it.play(piece(10.0, kernels=100), "forward")
    assert it.elapsed == pytest.approx(10.0, rel=0.01)


def test_the_parts_add_up_to_the_step():
    it = machine(launch_s=0.02, overlap_loss=0.2)
    for number in range(5):
        it.send(str(number), "all-gather", 1, SHARDS, GATHER)
        it.play(piece(0.6, kernels=7), "forward")
        it.wait(str(number))
        it.copy("copy", 10)
    it.update(0.3, 2)
    assert sum(it.spent[name] for name in ("compute", "exposed", "optimizer", "launch")) == pytest.approx(it.elapsed)


def test_computation_is_slower_while_something_is_sent():
    it = machine(overlap_loss=0.5)
    it.send("a", "all-gather", 1, SHARDS, GATHER)
    it.play(piece(3.0), "forward")
    assert it.elapsed == pytest.approx(3.5)


def test_the_rate_limiter_stops_the_processor():
    """With two units in use the third gather is issued only when the device has done with the first."""
    starts = {}
    for limited in (False, True):
        it = machine(collective_s=0.1)
        for unit in range(4):
            if limited:
                it.throttle(2)
            it.send(str(unit), "all-gather", 1, SHARDS, GATHER)
            starts[limited, unit] = it.streams[GATHER] - 0.1
            it.wait(str(unit))
            it.play(piece(1.0), "forward")
            it.note_release()
    assert starts[False, 2] == pytest.approx(0.2)
    assert starts[True, 2] == pytest.approx(1.1)


def test_a_stream_may_follow_the_computation():
    it = machine(collective_s=0.1)
    it.play(piece(1.0), "forward")
    it.mark("here")
    it.play(piece(1.0), "forward")
    it.send("early", "all-gather", 1, SHARDS, GATHER)
    it.follow(GATHER, "here")
    it.send("late", "all-gather", 1, SHARDS, GATHER)
    assert it.streams[GATHER] == pytest.approx(1.1)


def test_memory_freed_while_a_stream_uses_it_is_active_but_not_allocated():
    it = machine(launch_s=0.01)
    it.hold("whole", 100, GATHERED)
    it.play(piece(5.0), "forward")
    it.release("whole", after=COMPUTE)
    it.hold("next", 80, GATHERED)
    assert it.peak.size == 100
    assert it.active == 180


def test_memory_freed_on_its_own_stream_is_free():
    it = machine(launch_s=0.01)
    it.hold("whole", 100, GATHERED)
    it.play(piece(5.0), "forward")
    it.release("whole")
    it.hold("next", 80, GATHERED)
    assert it.active == it.peak.size == 100


def test_the_peak_says_what_it_consists_of_and_where_it_is():
    it = machine()
    it.hold("gradients", 10, GRADIENTS)
    it.phase, it.module = "backward", "h.3"
    it.play(Piece(peak=50, lasting_at_peak=20, net=5, lasting_net=5, seconds=1, kernels=1, gradient=None), "backward")
    it.phase, it.module = "optimizer", "optimizer"
    it.hold("more", 30, GRADIENTS)
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
    it.hold("a", 10, GATHERED)
    it.hold("a", 30, GATHERED)
    assert it.peak.size == 30
    it.release("a")
    it.release("a")
    it.hold("b", 31, GATHERED)
    assert it.peak.size == 31


def test_spans_of_a_stream_do_not_overlap():
    it = machine(launch_s=0.001, overlap_loss=0.1)
    for number in range(6):
        it.send(str(number), "all-gather", 1, SHARDS, GATHER)
        it.play(piece(0.7), "forward")
        it.wait(str(number))
    for stream in (COMPUTE, GATHER):
        spans = sorted((span.start_s, span.end_s) for span in it.timeline if span.stream == stream)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))
        assert all(start <= end for start, end in spans)
