"""DDP's communication hooks: gradients compressed to 16 bits on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.config.run_config import build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.hardware.speeds import GlooSpeed, LinkSpeeds
from bench.prediction.cost.collectives import CollectiveGroup, compute_collective_seconds
from bench.prediction.cost.rank_groups import build_collective_group
from bench.prediction.predictor import predict_run
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.reporting.page.rerun_command import list_overrides
from bench.strategies.step_plan import SHARD_GROUP, WORLD_GROUP
from bench.strategies.zero1 import partition_parameters
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config
from tests.strategies.test_strategy_plans import Notebook, config, plan_of, sent, step

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")


@pytest.mark.long
@pytest.mark.slow
def test_a_hook_rounds_and_otherwise_computes_the_same(execute: Callable[..., list[dict[str, Any]]]) -> None:
    run = (*SMALL_T5, *STEPS, "strategy=ddp", "gpus=2")
    overrides_by_hook = {hook: (*run, f"strategy.communication_hook={hook}") for hook in ("none", "fp16", "bf16")}
    runs = dict(zip(overrides_by_hook, execute(*overrides_by_hook.values()), strict=True))
    plain = runs["none"]["losses"]
    assert plain[-1] < plain[0] - 0.005
    for hook in ("fp16", "bf16"):
        record = runs[hook]
        assert record["status"] == "ok", record["error"]
        losses = record["losses"][: len(plain)]  # there is one step more
        assert losses == pytest.approx(plain, rel=1e-3)
        assert losses != plain
        assert record["effective"]["communication_hook"] == hook
        expected = predict_run(compose_run_config(*overrides_by_hook[hook])).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_held_while_the_last_bucket_is_sent_is_predicted(execute: Callable[..., list[dict[str, Any]]]) -> None:
    """Its last gradient is the embedding's, the largest of all: autograd may have it beside what DDP keeps of it."""
    run = ("model=t5_tiny", "strategy=ddp", "gpus=2", "batch_size_per_gpu=1", "sequence_length=16")
    compressed = (*run, "measurement.warmup_steps=3", "measurement.steps=1", "strategy.communication_hook=bf16")
    powersgd = (*run, "measurement.warmup_steps=4", "measurement.steps=1", "strategy.communication_hook=powersgd")
    beside = "strategy.gradient_as_bucket_view=false"
    every = ("gradient_accumulation=2", "gradient_accumulation_sync=true")
    runs = [
        compressed,
        (*compressed, beside),
        powersgd,
        (*powersgd, beside),
        (*powersgd, beside, *every),
        (*powersgd, beside, "optimizer.keep_gradients=true"),
        (*powersgd, "strategy.bucket_cap_mb=1"),
    ]
    for overrides, record in zip(runs, execute(*runs), strict=True):
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=1e-3), overrides


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_half_as_much_is_sent(hook: str) -> None:
    volumes = []
    for chosen in ("none", hook):
        device = Notebook()
        plan, plan_inputs = plan_of(config(strategy="ddp", **{"strategy.communication_hook": chosen}))
        plan.allocate_persistent_state(device)
        step(plan, plan_inputs, device)
        volumes.append(device.volume("all-reduce", "world"))
    assert volumes[1] == volumes[0] / 2


def test_what_has_16_bits_is_not_compressed() -> None:
    with pytest.raises(ImpossibleError, match=r"communication_hook=fp16 is not valid with precision=bf16_pure"):
        compose_run_config(
            *SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=fp16", "precision=bf16_pure"
        )
    with pytest.raises(UsageError, match=r"communication_hook=fp8 .* none, fp16, bf16"):
        compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=fp8")


def test_without_a_hook_a_run_is_what_it_was() -> None:
    assert compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2").run_id == compose_run_config(
        *SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=none"
    ).run_id  # fmt: skip
    other = compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=bf16")
    assert other.run_id != compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2").run_id


# --- ZeRO stages by the names people know them by: what they compute, and what they keep.


Execute = Callable[..., list[dict[str, Any]]]

HALVES = "strategy.sharding_factor=2"
"""Of 4 ranks."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_zero_computes_what_one_process_does_and_keeps_what_is_predicted(execute: Execute, model: Any) -> None:
    asked = {
        name: (*model, *STEPS, *overrides, "batch_size_per_gpu=2", "gpus=4")
        for name, overrides in {
            "ddp": ("strategy=ddp",),
            "zero1": ("strategy=zero1",),
            "together": ("strategy=zero1", "strategy.parameters_as_bucket_view=true"),
            "hybrid": ("strategy=zero1", HALVES),
            "hybrid together": ("strategy=zero1", HALVES, "strategy.parameters_as_bucket_view=true"),
            "zero2": ("strategy=zero2",),
            "zero2_fsdp1": ("strategy=zero2_fsdp1",),
        }.items()
    }
    single, *others = execute((*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"), *asked.values())
    runs = dict(zip(asked, others, strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), name
        expected = predict_run(compose_run_config(*asked[name])).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01), name
    assert single["losses"][-1] < single["losses"][0] - 0.01
    assert [runs[name]["effective_strategy"] for name in ("zero1", "hybrid", "zero2", "zero2_fsdp1")] == [
        "zero1",
        "zero1/hybrid",
        "fsdp/shard_grad_op",
        "fsdp1/shard_grad_op",
    ]
    # Stage 1 saves three quarters of the two states of AdamW; among 2 of the 4 ranks a half.
    states = 2 * 4 * runs["ddp"]["parameters"]
    saved, saved_by_halves = (
        runs["ddp"]["peak_allocated_bytes"] - runs[name]["peak_allocated_bytes"] for name in ("zero1", "hybrid")
    )
    assert 0.4 * states < saved < 0.8 * states
    assert 0.3 * states < saved_by_halves < 0.55 * states


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("knobs", [("gpus=2",), ("gpus=4", HALVES)], ids=["full", "hybrid"])
def test_a_rehearsed_rank_keeps_its_part(execute: Execute, knobs: tuple[str, ...]) -> None:
    run = (*SMALL_GPT, *STEPS, "strategy=zero1", *knobs)
    real, alone = execute(run, (*run, "mode=rehearse"))
    first = real["ranks"][0]["peak_allocated_bytes"]
    assert alone["peak_allocated_bytes"] == pytest.approx(first, rel=0.01)


def test_a_stage_by_its_name_is_the_run_that_its_knob_makes() -> None:
    for name, base in (("zero2", "fsdp"), ("zero2_fsdp1", "fsdp1")):
        named = compose_run_config(*SMALL_T5, f"strategy={name}", "gpus=4")
        knob = compose_run_config(*SMALL_T5, f"strategy={base}", "strategy.reshard_after_forward=false", "gpus=4")
        assert named.run_id == knob.run_id


@pytest.fixture
def four_ranks() -> Iterator[None]:
    init_rehearsal_group(4)
    yield
    dist.destroy_process_group()


def test_parameters_are_divided_as_the_optimizer_divides_them(four_ranks: None) -> None:
    config = compose_run_config(*SMALL_T5, "gpus=4")
    units = build_parameter_layout(config.model, 1, False).units
    parameters = [parameter for unit in units for parameter in unit.parameters]
    tensors = [torch.nn.Parameter(torch.empty(parameter.shape)) for parameter in parameters]
    optimizer = ZeroRedundancyOptimizer(tensors, torch.optim.AdamW)
    theirs = [[tensor.numel() for tensor in groups[0]["params"]] for groups in optimizer._partition_parameters()]
    assert [[parameter.numel for parameter in part] for part in partition_parameters(parameters, 4)] == theirs


def test_the_updated_parameters_are_sent_once() -> None:
    links = LinkSpeeds(100.0, 1.0, 10.0, 1.0, adapters=1, congestion=0.0, latency=1.0)
    size, eight = 1e9, CollectiveGroup(8, 8)
    seconds = compute_collective_seconds("broadcast", size, eight, links)
    assert 1.0 < seconds / (size / 100e9) < 1.1  # the whole, once round
    assert compute_collective_seconds("broadcast", size, CollectiveGroup(1, 1), links) == 0.0
    gloo = LinkSpeeds(1.0, 1.0, 1.0, 1.0, adapters=1, congestion=0.0, latency=1.0, gloo=GlooSpeed(100.0, 1.0, 1.0))
    assert compute_collective_seconds("broadcast", size, eight, gloo) == pytest.approx(3 * (1e-4 + 1.0))


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (1, r"sharding_factor=1 is not valid with gpus=4 .* fewer than 2 ranks: choose 2 or more, or strategy=ddp\."),
        (3, r"sharding_factor=3 is not valid: choose a divisor of the world size, gpus=4: 2, 4\."),
        ("half", r"sharding_factor=half is not valid: choose full, node, or a whole number of at least 2\."),
    ],
)
def test_zero1_divides_optimizer_state_among_some_ranks(factor: int | str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compose_run_config(*SMALL_T5, "strategy=zero1", f"strategy.sharding_factor={factor}", "gpus=4")


def test_zero1_among_all_ranks_is_the_run_that_it_was() -> None:
    """Its row says a factor of 1, as rows of before there was a choice."""
    run = (*SMALL_T5, "strategy=zero1", "gpus=4", "gpus_per_node=2")
    full, hybrid = compose_run_config(*run), compose_run_config(*run, HALVES)
    assert full.strategy.sharding_factor == 1
    assert full.run_id == compose_run_config(*run, "strategy.sharding_factor=4").run_id != hybrid.run_id
    assert hybrid.run_id == compose_run_config(*run, "strategy.sharding_factor=node").run_id
    for resolved in (full, hybrid):
        assert build_run_config(resolved.to_dict()).run_id == resolved.run_id
    typed = list_overrides(full.to_dict(), {**full.requested, "sharding_factor": 1})  # as older rows say
    assert not [text for text in typed if "sharding_factor" in text]


def test_updated_parameters_are_sent_within_a_group_alone() -> None:
    run = {"strategy": "zero1", "model": "gpt_350m", "gpus": 16}
    full, hybrid = config(**run), config(**run, **{"strategy.sharding_factor": "node"})
    size = 4 * full.model.num_parameters
    device = sent(hybrid)
    assert device.volume("broadcast", SHARD_GROUP) == pytest.approx(size, rel=1e-3)
    assert device.volume("broadcast", WORLD_GROUP) == 0
    assert device.volume("all-reduce", WORLD_GROUP) == pytest.approx(size, rel=1e-3)
    assert sent(full).volume("broadcast", WORLD_GROUP) == pytest.approx(size, rel=1e-3)
    assert build_collective_group(hybrid, SHARD_GROUP) == CollectiveGroup(8, 8)
    times = [predict_run(run).time for run in (full, hybrid)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].step_s.value < times[0].step_s.value
