"""Blocks that are left out since they change a rank by the same each: predictions are as if none were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bench.prediction.simulation import block_repetition
from bench.prediction.simulation.block_repetition import BlockRepetition
from bench.prediction.simulation.plan_state import copy_plan_state
from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.prediction.simulation.state_change import find_named_change
from bench.prediction.trace.chunks import Chunk
from bench.strategies.step_plan import ALL_GATHER_STREAM, GRADIENT_MEMORY
from tests.conftest import SMALL_GPT, compose_run_config
from tests.prediction.test_repetition import assert_equal, predict_twice

DEEP_GPT = (*SMALL_GPT, "model.num_layers=48", "hardware=h100_80gb", "mode=predict", "sequence_length=128")
ON_8_GPUS = (*DEEP_GPT, "precision=bf16", "gpus=8", "gpus_per_node=4", "batch_size_per_gpu=4")
DEEP_T5 = (
    *(
        "model=t5_tiny",
        "model.num_encoder_layers=30",
        "model.num_decoder_layers=30",
        "hardware=a100_80gb",
        "mode=predict",
        "gpus=8",
        "precision=fp16",
    ),
    "sequence_length=128",
)
DEEP_LLAMA = (
    *("model=llama_tiny", "model.num_layers=36", "hardware=h100_80gb", "mode=predict", "gpus=8", "precision=bf16"),
    "sequence_length=128",
)

RUNS = {
    "ddp": (*ON_8_GPUS, "strategy=ddp"),
    "ddp across slow links": (*ON_8_GPUS, "strategy=ddp", "network=ethernet_10"),
    "ddp, powersgd": (*ON_8_GPUS, "strategy=ddp", "strategy.communication_hook=powersgd"),
    "zero1": (*ON_8_GPUS, "strategy=zero1"),
    "fsdp": (*ON_8_GPUS, "strategy=fsdp"),
    "fsdp across slow links": (*ON_8_GPUS, "strategy=fsdp", "network=ethernet_10"),
    "fsdp of one rank": (*ON_8_GPUS, "strategy=fsdp", "strategy.sharding_factor=1"),
    "hybrid fsdp": (*ON_8_GPUS, "strategy=fsdp", "strategy.sharding_factor=node"),
    "fsdp, accumulated": (*ON_8_GPUS, "strategy=fsdp", "gradient_accumulation=3"),
    "fsdp, gradients kept": (*ON_8_GPUS, "strategy=fsdp", "optimizer.keep_gradients=true"),
    "fsdp, not resharded": (*ON_8_GPUS, "strategy=fsdp", "strategy.reshard_after_forward=false"),
    "fsdp, prefetched": (*ON_8_GPUS, "strategy=fsdp", "strategy.forward_prefetch=true"),
    "fsdp, offloaded": (*ON_8_GPUS, "strategy=fsdp", "strategy.cpu_offload=true"),
    "fsdp, units of two blocks": (*ON_8_GPUS, "strategy=fsdp", "strategy.blocks_per_unit=2"),
    "fsdp, checkpointed": (*ON_8_GPUS, "strategy=fsdp", "activation_checkpointing=full"),
    "fsdp, selective checkpointing": (*ON_8_GPUS, "strategy=fsdp", "activation_checkpointing=selective"),
    "fsdp, every other block checkpointed": (*ON_8_GPUS, "strategy=fsdp", "activation_checkpointing=every_2"),
    "fsdp1, every third block checkpointed": (*ON_8_GPUS, "strategy=fsdp1", "activation_checkpointing=every_3"),
    "ddp, every other block checkpointed": (*ON_8_GPUS, "strategy=ddp", "activation_checkpointing=every_2"),
    "fsdp1": (*ON_8_GPUS, "strategy=fsdp1"),
    "fsdp1 of one rank": (*ON_8_GPUS, "strategy=fsdp1", "strategy.sharding_factor=1"),
    "fsdp1, not limited": (*ON_8_GPUS, "strategy=fsdp1", "strategy.limit_all_gathers=false"),
    "fsdp1, accumulated": (*ON_8_GPUS, "strategy=fsdp1", "gradient_accumulation=3"),
    "fsdp1, prefetched": (*ON_8_GPUS, "strategy=fsdp1", "strategy.forward_prefetch=true"),
    "deepspeed 1": (*ON_8_GPUS, "strategy=deepspeed", "strategy.stage=1"),
    "deepspeed 2": (*ON_8_GPUS, "strategy=deepspeed", "strategy.stage=2"),
    "deepspeed 3": (*ON_8_GPUS, "strategy=deepspeed", "strategy.stage=3"),
    "tensor x fsdp": (*ON_8_GPUS, "strategy=mesh", "strategy.tensor=2"),
    "single": (*DEEP_GPT, "precision=bf16", "strategy=single", "batch_size_per_gpu=4"),
    "t5, layers in fp32": (*DEEP_T5, "strategy=fsdp"),
    "t5, fsdp1": (*DEEP_T5, "strategy=fsdp1"),
    "lora": (*DEEP_LLAMA, "strategy=fsdp", "finetune=lora"),
    "experts": (*DEEP_LLAMA, "model=moe_tiny", "model.num_layers=36", "strategy=fsdp"),
}
SIMULATED_WHOLE = {"zero1", "ddp, powersgd", "deepspeed 2", "deepspeed 3", "fsdp1 of one rank", "fsdp1, not limited"}
"""Of the first four it is not known whether what the plan remembers repeats; of the others ever more memory waits for
other streams."""


@pytest.mark.parametrize("name", RUNS)
def test_blocks_that_are_left_out_change_nothing(name: str, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", "")
    monkeypatch.setattr(block_repetition, "MIN_REPETITIONS", 6)
    shortened, whole, num_left_out = predict_twice(compose_run_config(*RUNS[name]), monkeypatch, BlockRepetition)
    assert num_left_out == 0 if name in SIMULATED_WHOLE else num_left_out >= 8
    assert_equal(shortened, whole)


def test_blocks_are_left_out_where_nobody_knows_how_fast_it_is(monkeypatch) -> None:
    """On a CPU that was not calibrated: all times are zero."""
    monkeypatch.setenv("BENCH_CACHE", "")
    monkeypatch.setattr(block_repetition, "MIN_REPETITIONS", 6)
    settings = (*SMALL_GPT, "model.num_layers=40", "mode=predict", "precision=fp32", "strategy=fsdp", "gpus=2")
    shortened, whole, num_left_out = predict_twice(compose_run_config(*settings), monkeypatch, BlockRepetition)
    assert num_left_out >= 8
    assert shortened == whole


def test_few_blocks_are_simulated_one_by_one(monkeypatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", "")
    settings = (*ON_8_GPUS, "strategy=fsdp", "model.num_layers=20")
    assert predict_twice(compose_run_config(*settings), monkeypatch, BlockRepetition)[2] == 0


def run_blocks(rank: SimulatedRank, plan: Any, num_blocks: int, block: Callable[[int], None]) -> int:
    """How many of the blocks are left out."""
    repetition, number, num_left_out = BlockRepetition(rank, plan), 0, 0
    while number < num_blocks:
        left_out = repetition.leave_out(num_blocks - number)
        number, num_left_out = number + left_out, num_left_out + left_out
        block(number)
        number += 1
    return num_left_out


@pytest.mark.parametrize("backlog_s", [0.0, 3.0, 40.0, 1000.0])
def test_no_block_is_left_out_in_which_one_time_overtakes_another(backlog_s: float) -> None:
    """What is sent takes half as long as what is computed beside it, and slows it down, until the computation has come
    up to the backlog of what was to be sent at first."""

    def run(plan: SimpleNamespace) -> tuple[SimulatedRank, int]:
        rank = SimulatedRank(RankSpeed(collective_seconds=lambda kind, size, group: size, overlap_loss=0.25))
        rank.run_collective("backlog", "all-gather", backlog_s, "world", ALL_GATHER_STREAM)

        def simulate(number: int) -> None:
            rank.run_collective(f"all-gather {number}", "all-gather", 0.5, "world", ALL_GATHER_STREAM)
            rank.simulate_chunk(Chunk(0.0, 0.0, 0.0, 0.0, 1.0, 10, None), "forward")

        return rank, run_blocks(rank, plan, 100, simulate)

    (shortened, num_left_out), (whole, _) = run(SimpleNamespace()), run(SimpleNamespace(unseen=object()))
    assert num_left_out >= 80
    assert shortened.stream_times == pytest.approx(whole.stream_times, rel=1e-12)
    assert shortened.spent_seconds == pytest.approx(whole.spent_seconds, rel=1e-9)
    assert (whole.spent_seconds["exposed"] == pytest.approx(25.0)) == (backlog_s == 1000.0)


def test_names_and_numbers_of_a_plan_and_of_a_rank_go_on() -> None:
    """A buffer of each block until the next one's, a gradient that stays, and what the plan counts."""

    def run(num_blocks: int, **unseen: object) -> tuple[SimulatedRank, SimpleNamespace, int]:
        rank = SimulatedRank(RankSpeed(collective_seconds=lambda kind, size, group: 1.5, launch_s=0.01))
        plan = SimpleNamespace(count=0, last="none", whole=set(), names=[], sizes={"block": 4}, **unseen)

        def simulate(number: int) -> None:
            unit = num_blocks - number
            rank.run_collective(f"all-gather {unit}", "all-gather", 8.0, "world", ALL_GATHER_STREAM, after="compute")
            rank.allocate(f"buffer {unit}", 8.0, "gathered", stream=ALL_GATHER_STREAM)
            rank.wait_for_event(f"all-gather {unit}")
            rank.free(f"buffer {unit + 1}")
            rank.simulate_chunk(Chunk(4.0, 0.0, -1.0, -1.0, 1.0, 10, None), "backward")
            rank.allocate(f"gradient {unit} of weight", 3.0, GRADIENT_MEMORY)
            plan.count, plan.last = plan.count + 2, f"buffer {unit}"
            plan.whole = (plan.whole - {unit + 1}) | {unit}
            plan.names.append(f"bucket {2 * number}")

        return rank, plan, run_blocks(rank, plan, num_blocks, simulate)

    (shortened, plan, num_left_out), (whole, whole_plan, num_none) = run(50), run(50, unseen=object())
    assert num_left_out >= 40
    assert num_none == 0
    del whole_plan.unseen
    assert plan == whole_plan
    assert shortened.peak == whole.peak
    assert shortened.peak_active_bytes == whole.peak_active_bytes
    states = shortened.get_state(), whole.get_state()
    assert states[0].allocations == states[1].allocations
    assert states[0].labels == states[1].labels
    assert states[0].sizes.tolist() == states[1].sizes.tolist()
    assert states[0].times == pytest.approx(states[1].times)
    assert states[0].events.keys() == states[1].events.keys()
    for name, (time,) in states[0].events.items():
        assert time == pytest.approx(states[1].events[name][0]), name


def test_a_plan_that_holds_what_may_change_unseen_is_not_repeated() -> None:
    for value in (object(), {"names": []}, [{1}], SimpleNamespace(count=1), [SimpleNamespace(count=1)], {1: object()}):
        assert copy_plan_state(SimpleNamespace(value=value)) is None
    for value in ({"names": (1,)}, [1, 2], {"one"}, 1, 2.0, None, "whole 3", ("a", "b")):
        assert copy_plan_state(SimpleNamespace(value=value)).values == {"value": value}


@pytest.mark.parametrize("step", [1, -1, 2, -2, 3])
@pytest.mark.parametrize("lifetime", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_names_that_come_and_go_are_those_of_as_many_passes(step: int, lifetime: int, count: int) -> None:
    """Several in each pass, each for longer than the one before it, and some that stay."""

    def list_values(num_passes: int) -> dict[str, tuple[float]]:
        values: dict[str, tuple[float]] = {"total": (2.0 * num_passes,)}
        for number in range(num_passes):
            for unit in range(abs(step)):
                index = number * step + unit
                values[f"gradient {index}"] = (float(number),)
                if number >= num_passes - lifetime - unit:
                    values[f"buffer {index} of all"] = (4.0,)
        return values

    states = [list_values(10 + number) for number in (0, 1, 2)]
    change = find_named_change(*states)
    assert change is not None
    assert change.extrapolate(states[-1], count) == list_values(12 + count)


@pytest.mark.parametrize(
    "values",
    [
        ({"a 1": (1.0,)}, {"a 1": (1.0,), "a 2": (1.0,)}, {"a 1": (1.0,), "a 2": (1.0,), "a 4": (1.0,)}),
        ({"a 1": (1.0,)}, {"a 1": (1.0,), "a 2": (1.0,)}, {"a 1": (1.0,), "a 2": (1.0,), "b 3": (1.0,)}),
        ({"a": (1.0,)}, {"a": (2.0,)}, {"a": (4.0,)}),
        ({"a": (1.0, "x")}, {"a": (2.0, "x")}, {"a": (3.0, "y")}),
        ({"a": (1.0,)}, {"a": (2.0,)}, {"a": (2.0,)}),
        ({"a 1": (1.0,), "b": (1.0,)}, {"a 1": (1.0,)}, {"a 1": (1.0,)}),
    ],
    ids=["number", "words", "step", "rest", "stops", "removed once"],
)
def test_passes_that_change_other_things_are_not_alike(values: tuple[dict[str, Any], ...]) -> None:
    assert find_named_change(*values) is None
