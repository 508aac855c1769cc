"""ZeRO stages by the names people know them by: what they compute, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from bench.core.errors import ImpossibleError
from bench.hardware.speeds import GlooSpeed, LinkSpeeds
from bench.prediction.cost.collectives import CollectiveGroup, compute_collective_seconds
from bench.prediction.predictor import predict_run
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.zero1 import partition_parameters
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_zero_computes_what_one_process_does_and_keeps_what_is_predicted(execute: Execute, model: Any) -> None:
    asked = {
        name: (*model, *STEPS, *overrides, "batch_size_per_gpu=2", "gpus=4")
        for name, overrides in {
            "ddp": ("strategy=ddp",),
            "zero1": ("strategy=zero1",),
            "together": ("strategy=zero1", "strategy.parameters_as_bucket_view=true"),
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
    assert [runs[name]["effective_strategy"] for name in ("zero1", "zero2", "zero2_fsdp1")] == [
        "zero1",
        "fsdp/shard_grad_op",
        "fsdp1/shard_grad_op",
    ]
    # Stage 1 saves three quarters of the two states of AdamW.
    states = 2 * 4 * runs["ddp"]["parameters"]
    saved = runs["ddp"]["peak_allocated_bytes"] - runs["zero1"]["peak_allocated_bytes"]
    assert 0.4 * states < saved < 0.8 * states


@pytest.mark.slow
def test_a_rehearsed_rank_keeps_its_part(execute: Execute) -> None:
    run = (*SMALL_GPT, *STEPS, "strategy=zero1")
    real, alone = execute((*run, "gpus=2"), (*run, "gpus=2", "mode=rehearse"))
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


def test_zero1_shards_no_parameters() -> None:
    with pytest.raises(ImpossibleError, match=r"sharding_factor=2 is not valid for strategy=zero1"):
        compose_run_config(*SMALL_T5, "strategy=zero1", "strategy.sharding_factor=2", "gpus=4")
