"""The model of the caching allocator against the rules of torch's, and steps that are played through it."""

import lzma
import math
from itertools import pairwise

import pytest

from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.core.units import GIB, MIB
from bench.prediction.prediction import FITS
from bench.prediction.predictor import predict_run, replay_memory, replay_steps
from bench.prediction.simulation.caching_allocator import AllocatorFullError, CachingAllocator
from bench.prediction.simulation.device_memory import compute_workspace_bytes
from tests.conftest import ROOT, compose_run_config


@pytest.mark.parametrize(
    ("size", "block_bytes", "segment_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB + 512, 11 * MIB + 512, 12 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_are_as_large_as_torch_s(size, block_bytes, segment_bytes):
    allocator = CachingAllocator()
    allocator.allocate(size, "compute")
    # What is left of a segment is a block of its own where it is worth it: 512 bytes; of large ones, more than 1 MiB.
    rest = segment_bytes - block_bytes
    is_split = rest >= 512 if size <= MIB else rest > MIB
    assert allocator.allocated == (block_bytes if is_split else segment_bytes)
    assert allocator.reserved == segment_bytes


@pytest.mark.parametrize(
    ("run", "reserved_gib", "tolerance"),
    [("gpt_175b_batch_1", 63.217, 0.025), ("gpt_175b_batch_2", 66.270, 0.0001), ("t5_11b", 30.738, 0.0025)],
)
def test_what_a_gpu_asked_for_makes_the_model_reserve_what_the_gpu_reserved(run, reserved_gib, tolerance):
    """All large blocks of rank 0 in rehearsed runs of FSDP1 on an H100, made (stream, bytes) and free again (which).

    Batch 1 differs, since of blocks of one size torch takes that of the lowest address.
    """
    allocator, blocks = CachingAllocator(), []
    with lzma.open(ROOT / f"results/calibration/h100_allocations_{run}.txt.xz", "rt") as file:
        for line in file:
            if line.startswith("-"):
                allocator.free(blocks[int(line[1:])])
            else:
                stream, size = line.split(",")
                blocks.append(allocator.allocate(int(size), stream))
    assert allocator.peak_reserved / GIB == pytest.approx(reserved_gib, rel=tolerance)


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small, _ = (allocator.allocate(size * MIB, "compute") for size in (60, 30, 12))
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(24 * MIB, "compute").address == small.address
    assert allocator.reserved == 102 * MIB
    # 6 MiB are left of it, 60 in the other one.
    allocator.allocate(58 * MIB, "compute")
    allocator.allocate(6 * MIB, "compute")
    assert allocator.reserved == 102 * MIB


def test_free_neighbours_become_one_block_and_segments_do_not():
    allocator = CachingAllocator()
    whole = allocator.allocate(40 * MIB, "compute")
    allocator.free(whole)
    parts = [allocator.allocate(10 * MIB, "compute") for _ in range(4)]
    assert allocator.reserved == 40 * MIB
    for index in (1, 3, 2, 0):
        allocator.free(parts[index])
    allocator.allocate(40 * MIB, "compute")
    assert allocator.reserved == 40 * MIB
    for _ in range(2):
        allocator.allocate(20 * MIB, "compute")
    assert allocator.reserved == 80 * MIB


def test_a_stream_cannot_use_what_another_has_cached():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB, "compute"))
    allocator.allocate(40 * MIB, "gather")
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 80 * MIB)


def test_what_another_stream_still_uses_is_active_until_it_is_done():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB, "gather"), ready_time=2.0)
    assert (allocator.allocated, allocator.active) == (0, 40 * MIB)
    allocator.allocate(40 * MIB, "gather", now=1.0)
    assert (allocator.active, allocator.reserved) == (80 * MIB, 80 * MIB)
    allocator.allocate(40 * MIB, "gather", now=3.0)
    assert (allocator.active, allocator.reserved) == (80 * MIB, 80 * MIB)


def test_a_retry_waits_for_streams_and_gives_whole_free_segments_back():
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.allocate(40 * MIB, "gather"), ready_time=9.0)
    split = allocator.allocate(40 * MIB, "compute")
    allocator.free(split)
    allocator.allocate(20 * MIB, "compute")
    allocator.allocate(50 * MIB, "compute", now=1.0)
    assert allocator.num_retries == 1
    assert allocator.reserved == 90 * MIB, "the segment of which 20 MiB are in use stays whole"
    with pytest.raises(AllocatorFullError):
        allocator.allocate(21 * MIB, "compute", now=1.0)


def test_an_expandable_segment_grows_by_what_it_lacks_and_does_not_fragment():
    """torch's own example: each allocation is a little larger than the one before it."""
    reserved = []
    for is_expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=is_expandable)
        for step in range(10):
            blocks = [allocator.allocate((30 + 2 * step + part) * MIB, "compute") for part in range(8)]
            for block in blocks:
                allocator.free(block)
        reserved.append(allocator.reserved / allocator.peak_allocated)
    assert reserved[0] > 1.5
    assert reserved[1] < 1.08  # to whole pages of 20 MiB


def test_expandable_segments_give_pages_back_when_memory_is_short():
    allocator = CachingAllocator(capacity=100 * MIB, expandable_segments=True)
    allocator.free(allocator.allocate(60 * MIB, "gather"))
    allocator.allocate(80 * MIB, "compute")
    assert (allocator.num_retries, allocator.reserved) == (1, 80 * MIB)


# --- Steps that are played.

RUN = {"model": "gpt_350m", "gpus": 8, "hardware": "a100_80gb", "batch_size_per_gpu": 4, "sequence_length": 512}


def build_config(**settings: object) -> RunConfig:
    return compose_run_config(
        "mode=predict", *(f"{key.replace('__', '.')}={value}" for key, value in {**RUN, **settings}.items())
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_what_is_played_is_what_was_simulated(strategy):
    """The same peak, nothing left over, and a third step like the second: nothing more is asked of the device."""
    config = build_config(strategy=strategy)
    replay = replay_steps(config, num_steps=3)
    allocator = replay.allocator
    predicted = predict_run(config).memory
    assert allocator.peak_allocated == pytest.approx(predicted.allocated.value, rel=0.01)
    assert allocator.peak_reserved == pytest.approx(predicted.reserved.value, rel=0.2)
    assert predicted.reserved.low <= allocator.peak_reserved <= predicted.reserved.high
    assert allocator.allocated <= 1.05 * (predicted.initial + predicted.parts["optimizer"]) + 0.01 * GIB
    assert replay_steps(config, num_steps=3).allocator.device_allocated == 0


def test_fsdp2_does_not_retry_where_fsdp1_does():
    """One stream frees all, every step alike: what is cached is given back once, and then there is enough. FSDP1 frees
    later than it allocates; what it gathered later still, where NCCL's stream is recorded."""
    late = {"strategy__limit_all_gathers": "false", "+hardware.speeds.records_nccl_stream": "true"}
    num_retries = {}
    for strategy, knobs in {"fsdp": {}, "fsdp1": late}.items():
        config = build_config(strategy=strategy, **knobs)
        capacity = replay_steps(config).allocator.peak_allocated / 0.85
        num_retries[strategy] = replay_steps(config, capacity, num_steps=3).allocator.num_retries
    assert num_retries["fsdp"] == 0 < num_retries["fsdp1"]


def test_a_memory_that_is_too_small_ends_the_replay():
    config = build_config(strategy="fsdp")
    needed = replay_steps(config).allocator.peak_allocated
    with pytest.raises(AllocatorFullError):
        replay_steps(config, 0.9 * needed)
    assert not replay_memory(config, round(0.9 * needed + compute_workspace_bytes(config))).fits
    assert replay_memory(config, round(2 * needed)).fits


def test_the_nearer_memory_is_to_its_end_the_likelier_are_retries_and_no_step_is_a_cliff():
    late = build_config(strategy="fsdp1", strategy__limit_all_gathers="false")
    wanted = predict_run(late).memory.wanted.value
    times = []
    for share in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25):
        limits = {"hardware__memory_limit_gib": wanted / share / GIB}
        limited = build_config(strategy="fsdp1", strategy__limit_all_gathers="false", **limits)
        times.append(predict_run(limited).time)
    probabilities = [time.retry_probability for time in times]
    seconds = [time.step_s.value for time in times]
    assert probabilities == sorted(probabilities)
    assert seconds == sorted(seconds)
    assert probabilities[0] < 0.05
    assert probabilities[-1] > 0.95
    assert seconds[-1] > 1.15 * seconds[0]
    assert max(later / earlier for earlier, later in pairwise(seconds)) < 1.6
    assert all(time.step_s.low <= time.step_s.value <= time.step_s.high for time in times)
    assert [time.degraded for time in times] == [probability > 0.5 for probability in probabilities]
    assert math.isclose(times[3].retry_s + times[0].step_s.value, times[3].step_s.value, rel_tol=0.02)


def test_a_cache_that_can_be_given_back_does_not_keep_a_run_from_fitting():
    config = build_config(strategy="single", gpus=1)
    memory = predict_run(config).memory
    limit = int(1.08 * memory.allocated.value)
    short = predict_run(build_config(strategy="single", gpus=1, hardware__memory_limit_gib=limit / GIB))
    assert short.memory.wanted.high > limit
    assert short.memory.reserved.value <= limit + 1
    assert short.memory.verdict == FITS
    assert short.time.retry_probability == 0


def test_expandable_segments_reserve_less_and_are_refused_on_a_cpu():
    reserved = {}
    for is_expandable in ("false", "true"):
        config = build_config(strategy="fsdp1", gpus=2, batch_size_per_gpu=8, expandable_segments=is_expandable)
        memory = predict_run(config).memory
        reserved[is_expandable] = memory.reserved.value
        assert memory.active.value <= memory.reserved.value
    assert reserved["true"] < 0.97 * reserved["false"]
    with pytest.raises(UsageError, match="expandable_segments=true is not valid on a CPU"):
        build_config(hardware="cpu", precision="fp32", expandable_segments="true")
