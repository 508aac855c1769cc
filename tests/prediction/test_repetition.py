"""Passes that are left out since they change a rank by the same each: predictions are as if none were."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from bench.config.run_config import RunConfig
from bench.core.units import MIB
from bench.prediction.prediction import Prediction
from bench.prediction.predictor import predict_run, replay_steps
from bench.prediction.simulation import state_change
from bench.prediction.simulation.caching_allocator import AllocatorFullError, CachingAllocator
from bench.prediction.simulation.device_memory import compute_workspace_bytes
from bench.prediction.simulation.repetition import Repetition
from bench.prediction.simulation.simulated_rank import COMPUTE_STREAM, RankSpeed, SimulatedRank
from bench.prediction.trace.chunks import Chunk
from bench.strategies.pipeline.cycles import list_cycles
from bench.strategies.pipeline.schedule import (
    ALL_SCHEDULES,
    BACKWARD,
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    WEIGHT_BACKWARD,
    Timetable,
)
from bench.strategies.step_plan import ALL_GATHER_STREAM, GRADIENT_MEMORY, REDUCE_STREAM
from tests.conftest import SMALL_GPT, compose_run_config

ON_H100 = (*SMALL_GPT, "hardware=h100_80gb", "mode=predict", "precision=bf16", "sequence_length=128")
ON_4_GPUS = (*ON_H100, "gpus=4", "batch_size_per_gpu=24", "gradient_accumulation=12")
RUNS = {
    "fsdp": (*ON_4_GPUS, "strategy=fsdp"),
    "fsdp, reduced every time": (*ON_4_GPUS, "strategy=fsdp", "gradient_accumulation_sync=true"),
    "fsdp, not resharded": (*ON_4_GPUS, "strategy=fsdp", "strategy.reshard_after_forward=false"),
    "fsdp across nodes": (*ON_4_GPUS, "strategy=fsdp", "gpus_per_node=1", "network=ethernet_10"),
    "fsdp, gradients kept": (*ON_4_GPUS, "strategy=fsdp", "optimizer.keep_gradients=true"),
    "fsdp1": (*ON_4_GPUS, "strategy=fsdp1"),
    "fsdp1, reduced every time": (*ON_4_GPUS, "strategy=fsdp1", "gradient_accumulation_sync=true"),
    "ddp": (*ON_4_GPUS, "strategy=ddp"),
    "zero1": (*ON_4_GPUS, "strategy=zero1"),
    "deepspeed 1": (*ON_4_GPUS, "strategy=deepspeed", "strategy.stage=1"),
    "deepspeed 2": (*ON_4_GPUS, "strategy=deepspeed", "strategy.stage=2", "gradient_accumulation_sync=true"),
    "deepspeed 3": (*ON_4_GPUS, "strategy=deepspeed", "strategy.stage=3", "gradient_accumulation_sync=true"),
    "deepspeed 2, offloaded": (
        *(*ON_4_GPUS, "strategy=deepspeed", "strategy.stage=2", "gradient_accumulation_sync=true"),
        "strategy.offload_optimizer=cpu",
    ),
    "tensor x fsdp": (*ON_4_GPUS, "strategy=mesh", "strategy.tensor=2"),
    "data_parallel": (*ON_4_GPUS, "strategy=data_parallel", "gradient_accumulation_sync=true"),
}


def predict_twice(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, repetition: type = Repetition
) -> tuple[Prediction, Prediction, int]:
    """With passes left out, with none, and how many are."""
    counts = []
    leave_out = repetition.leave_out  # type: ignore[attr-defined]

    def count(self: Any, num_left: int) -> int:
        counts.append(leave_out(self, num_left))
        return counts[-1]

    monkeypatch.setattr(repetition, "leave_out", count)
    shortened = predict_run(config)
    monkeypatch.setattr(repetition, "leave_out", lambda self, num_left: 0)
    return shortened, predict_run(config), sum(counts)


def assert_equal(shortened: Prediction, whole: Prediction) -> None:
    assert shortened.memory == whole.memory
    assert shortened.time is not None
    assert whole.time is not None
    for field in dataclasses.fields(shortened.time):
        value = getattr(shortened.time, field.name)
        if isinstance(value, float) and not isinstance(value, bool):
            assert value == pytest.approx(getattr(whole.time, field.name), rel=1e-6, abs=1e-9), field.name
    assert shortened.time.step_s.value == pytest.approx(whole.time.step_s.value, rel=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_micro_batches_that_are_left_out_change_nothing(name: str, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", "")
    shortened, whole, num_left_out = predict_twice(compose_run_config(*RUNS[name]), monkeypatch)
    assert num_left_out >= 5
    assert_equal(shortened, whole)


REPLAYED = (
    *("model=llama3_8b", "model.num_layers=8", "hardware=h100_80gb", "mode=predict", "precision=bf16"),
    *("sequence_length=128", "gradient_accumulation=24"),
)
ON_512_GPUS = (*REPLAYED, "gpus=512", "batch_size_per_gpu=24")
ON_16_GPUS = (*REPLAYED, "gpus=16", "batch_size_per_gpu=96")
REPLAYED_RUNS = {
    "fsdp": (*ON_16_GPUS, "strategy=fsdp"),
    "fsdp, expandable segments": (*ON_16_GPUS, "strategy=fsdp", "expandable_segments=true"),
    "fsdp, reduced every time": (*ON_512_GPUS, "strategy=fsdp", "gradient_accumulation_sync=true"),
    "fsdp, checkpointed": (*ON_512_GPUS, "strategy=fsdp", "activation_checkpointing=full"),
    "fsdp1, reduced every time": (*ON_512_GPUS, "strategy=fsdp1", "gradient_accumulation_sync=true"),
    "fsdp1, checkpointed": (*ON_512_GPUS, "strategy=fsdp1", "activation_checkpointing=full"),
}
CAPACITY_SHARES = (10.0, 1.2, 1.15, 1.1, 1.05)
"""Of what is allocated at the peak: enough, and less and less of it."""


def replay(config: RunConfig, capacity: int) -> tuple[object, ...]:
    """What the replayed allocator has counted, or that memory was full."""
    try:
        replayed = replay_steps(config, capacity)
    except AllocatorFullError:
        return ("full",)
    allocator = replayed.allocator
    peaks = (allocator.peak_allocated, allocator.peak_active, allocator.peak_reserved)
    return (*peaks, allocator.reserved, allocator.device_allocated, replayed.num_retries)


@pytest.mark.parametrize("name", REPLAYED_RUNS)
def test_micro_batches_are_left_out_of_a_replay_too_and_change_nothing(name: str, monkeypatch) -> None:
    """Where the allocator retries in every micro-batch as where it never does."""
    config = compose_run_config(*REPLAYED_RUNS[name])
    peak = predict_run(config).memory.allocated.value - compute_workspace_bytes(config)
    leave_out, counts, outcomes = Repetition.leave_out, [], []

    def count(self: Repetition, num_left: int) -> int:
        counts.append(leave_out(self, num_left))
        return counts[-1]

    for share in CAPACITY_SHARES:
        monkeypatch.setattr(Repetition, "leave_out", count)
        outcomes.append(replay(config, round(share * peak)))
        monkeypatch.setattr(Repetition, "leave_out", lambda self, num_left: 0)
        assert outcomes[-1] == replay(config, round(share * peak)), share
    assert sum(counts) >= 20
    assert len(set(outcomes)) > 1


def test_what_a_segment_that_comes_again_is_called_does_not_count() -> None:
    """A block in a segment that was given back and asked for again lies where it did, for all that comes next; one of
    another size does not."""

    def arrange(*sizes: int) -> list[object]:
        allocator = CachingAllocator(capacity=100 * MIB)
        for size in sizes:
            allocator.free(allocator.allocate(size, COMPUTE_STREAM))
            block = allocator.allocate(60 * MIB, ALL_GATHER_STREAM)  # has what is cached given back
            allocator.free(block)
            kept = allocator.allocate(size, COMPUTE_STREAM)  # has the other given back
            names = allocator.get_arrangement([kept])[0]
            allocator.free(kept)
        return names

    assert arrange(50 * MIB) == arrange(50 * MIB, 50 * MIB)
    assert arrange(50 * MIB) != arrange(52 * MIB)
    both = [CachingAllocator(), CachingAllocator()]
    sizes = ((50 * MIB, 52 * MIB), (52 * MIB, 50 * MIB))
    names = [
        allocator.get_arrangement([allocator.allocate(size, COMPUTE_STREAM) for size in pair])[0]
        for allocator, pair in zip(both, sizes, strict=True)
    ]
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("schedule", "data"),
    [
        (schedule, data)
        for schedule in ALL_SCHEDULES
        for data in ("fsdp", "ddp")
        if data == "fsdp" or schedule not in SPLIT_BACKWARD_SCHEDULES
    ],
)
def test_cycles_of_a_schedule_that_are_left_out_change_nothing(schedule: str, data: str, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", "")
    stages = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    settings = (
        *("strategy=mesh", "gpus=4", "strategy.pipeline=2", f"strategy.data={data}", f"strategy.schedule={schedule}"),
        *(
            f"strategy.virtual_stages={stages}",
            "batch_size_per_gpu=32",
            "strategy.micro_batches=64",
            "model.num_layers=8",
        ),
    )
    shortened, whole, num_left_out = predict_twice(compose_run_config(*ON_H100, *settings), monkeypatch)
    assert num_left_out >= 2 * 20
    assert_equal(shortened, whole)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_cycles_are_the_actions_of_a_rank(schedule: str) -> None:
    timetable = Timetable(schedule, 4, 1 if schedule in SINGLE_STAGE_SCHEDULES else 2, 48)
    for rank in range(4):
        cycles = list_cycles(timetable, rank)
        numbered = [
            each for cycle in cycles for number in range(cycle.repetitions) for each in cycle.number_actions(number)
        ]
        assert tuple(each.action for each in numbered) == timetable.list_actions(rank)
        counts = Counter()
        for each in numbered:
            kind = BACKWARD if each.action.kind == WEIGHT_BACKWARD else each.action.kind
            assert each.num_before == counts[kind, each.action.stage]
            assert each.is_last == (each.num_before == 47)
            counts[kind, each.action.stage] += 1
        for cycle in cycles:
            each_repetition = [
                [(*each.action[:2], each.num_before in (0, 47)) for each in cycle.number_actions(number)]
                for number in range(cycle.repetitions)
            ]
            assert all(repeated == each_repetition[0] for repeated in each_repetition)
        assert max(cycle.repetitions for cycle in cycles) > 8


def test_what_is_not_alike_is_not_left_out() -> None:
    """Times that grow by more each time, memory that is freed, and what is to be written down; nor the last pass where
    memory grows."""

    def try_passes(rank: SimulatedRank, seconds: float, size: float, held: float) -> list[int]:
        passes = Repetition(rank)
        left_out = []
        for number in range(1, 6):
            rank.simulate_chunk(Chunk(0.0, 0.0, size, size, 1.0 + number * seconds, 1, None), "forward")
            rank.allocate("held", 100.0 + number * held, GRADIENT_MEMORY)
            left_out.append(passes.leave_out(10))
        return left_out

    assert try_passes(SimulatedRank(RankSpeed()), 0.0, 0.0, 0.0)[2] == 10
    assert try_passes(SimulatedRank(RankSpeed()), 0.0, 2.0, 3.0)[2] == 9
    assert not any(try_passes(SimulatedRank(RankSpeed()), 0.1, 0.0, 0.0))
    assert not any(try_passes(SimulatedRank(RankSpeed()), 0.0, -1.0, 0.0))
    assert not any(try_passes(SimulatedRank(RankSpeed()), 0.0, 0.0, -1.0))
    assert not any(try_passes(SimulatedRank(RankSpeed(), timeline=True), 0.0, 0.0, 0.0))


def test_a_rank_goes_on_from_where_left_out_passes_would_have_led() -> None:
    left_out = []

    def run(num_passes: int, *, leaves_out: bool) -> SimulatedRank:
        rank = SimulatedRank(RankSpeed(collective_seconds=lambda kind, size, group: 1.5, launch_s=0.01))
        passes, number = Repetition(rank), 0
        while number < num_passes:
            rank.wait_for_event("gather")  # of the pass before
            rank.simulate_chunk(Chunk(4.0, 0.0, 0.0, 0.0, 1.0, 10, None), "forward")
            rank.run_collective("gather", "all-gather", 8.0, "world", ALL_GATHER_STREAM, after=COMPUTE_STREAM)
            rank.grow_allocation("kept", 2.0, GRADIENT_MEMORY)
            number += 1
            if leaves_out:
                left_out.append(passes.leave_out(num_passes - number))
                number += left_out[-1]
        return rank

    shortened, whole = run(50, leaves_out=True), run(50, leaves_out=False)
    assert sum(left_out) == 50 - 4
    assert whole.stream_times[COMPUTE_STREAM] > 50 * 2.5 - 3
    assert shortened.stream_times[COMPUTE_STREAM] == pytest.approx(whole.stream_times[COMPUTE_STREAM], rel=1e-12)
    assert shortened.spent_seconds == pytest.approx(whole.spent_seconds)
    assert shortened.peak == whole.peak
    assert state_change.TIME_TOLERANCE < 1e-6


def test_what_is_freed_late_comes_back_in_the_order_of_its_times() -> None:
    """Streams that move on at different pace may change places."""
    rank = SimulatedRank(RankSpeed(collective_seconds=lambda kind, size, group: size))
    for stream, size in ((ALL_GATHER_STREAM, 1.0), (REDUCE_STREAM, 2.0)):
        rank.run_collective(stream, "all-gather", size, stream, stream)
        rank.allocate(stream, 8.0 / size, GRADIENT_MEMORY)
        rank.free(stream, after=stream)
    state = rank.get_state()
    moved_times = np.where(state.times == 1.0, 11.0, np.where(state.times == 2.0, 3.0, state.times))
    rank.set_state(dataclasses.replace(state, times=moved_times))
    rank.processor_time = 5.0
    rank.allocate("next", 10.0, GRADIENT_MEMORY)
    assert rank.peak_active_bytes == 10.0 + 8.0, "what the first stream still uses, not what the second did"
