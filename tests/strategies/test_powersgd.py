"""PowerSGD: exact where it must be, training on where it is not; what it sends and keeps against what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core.errors import ImpossibleError, UsageError
from bench.prediction.predictor import predict_run
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.powersgd import PowerSGDPlan
from bench.strategies.powersgd_hook import register_powersgd_hook
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config
from tests.finetune.test_finetune import needs_peft
from tests.strategies.test_strategy_plans import Notebook, config, plan_of, step

HOOK = "strategy.communication_hook=powersgd"
STEPS = ("sequence_length=16", "measurement.warmup_steps=4", "measurement.steps=4", "optimizer.learning_rate=1e-3")


@pytest.mark.long
@pytest.mark.slow
def test_powersgd_is_exact_until_it_starts_and_trains_on(execute: Callable[..., list[dict[str, Any]]]) -> None:
    run = (*SMALL_T5, *STEPS, "strategy=ddp", "gpus=2", "batch_size_per_gpu=2")
    asked = {
        "plain": (*run,),
        "powersgd": (*run, HOOK, "strategy.start_powerSGD_iter=3", "strategy.matrix_approximation_rank=2"),
        # With so many columns no factor is smaller than the matrix, so that all is sent as it is.
        "whole": (*run, HOOK, "strategy.matrix_approximation_rank=64"),
    }
    runs = dict(zip(asked, execute(*asked.values()), strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*asked[name])).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.02), name
    plain, lossy = runs["plain"]["losses"], runs["powersgd"]["losses"]
    assert runs["whole"]["losses"][:10] == pytest.approx(plain, rel=1e-6)
    assert lossy[:4] == pytest.approx(plain[:4], rel=1e-6)  # three updates with whole gradients
    assert lossy[4] != pytest.approx(plain[4], rel=1e-6)
    assert lossy[9] < lossy[3] - 0.5 * (plain[3] - plain[9])
    kept = runs["powersgd"]["peak_allocated_bytes"] - runs["plain"]["peak_allocated_bytes"]
    assert kept > 0.9 * 4 * runs["plain"]["parameters"]  # what was lost, of every gradient


class Squares(nn.Module):
    """The sum of the squares of parameters of some shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self) -> torch.Tensor:
        return torch.stack([(each**2).sum() for each in self.all]).sum()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    init_rehearsal_group(2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_factors_are_those_of_the_library(two_ranks: None, rank: int) -> None:
    shapes = [(64, 48), (7, 5), (33,), (128, 9), (4, 4, 40)]
    wrapped = DistributedDataParallel(Squares(shapes), static_graph=True, gradient_as_bucket_view=True, init_sync=False)
    state = register_powersgd_hook(wrapped, rank, start_iter=2)
    for _ in range(4):
        wrapped().backward()
    compression = PowerSGDPlan(rank, itemsize=4)
    parameters = [ParameterSpec(str(shape), shape) for shape in shapes]
    device = Notebook()
    compression.all_reduce_bucket(device, "bucket", parameters)
    compression.allocate_persistent_state(device, parameters)
    sent = device.volume("all-reduce", "world")
    assert sent * 2 == 4 * state.total_numel_after_compression  # of two steps
    assert sum(parameter.numel for parameter in parameters) * 2 == state.total_numel_before_compression
    kept = [*state.p_memory_dict.values(), *state.q_memory_dict.values()]
    assert device.held["factors"][0] == sum(each.nbytes for each in kept)
    assert device.held["errors"][0] == sum(each.nbytes for each in state.error_dict.values())


def test_it_starts_after_as_many_backward_passes_as_are_reduced(two_ranks: None) -> None:
    wrapped = DistributedDataParallel(Squares([(64, 48)]), gradient_as_bucket_view=True, init_sync=False)
    state = register_powersgd_hook(wrapped, 1, start_iter=2)
    for _ in range(3):
        with wrapped.no_sync():
            wrapped().backward()
    for _ in range(2):
        wrapped().backward()
        assert not state.error_dict
    wrapped().backward()
    assert state.error_dict


def test_nothing_is_kept_of_what_is_frozen() -> None:
    adapter = ParameterSpec("adapter", (64, 48))
    whole, adapted = Notebook(), Notebook()
    for device, frozen in ((whole, ()), (adapted, (ParameterSpec("frozen", (96, 64), is_trained=False),))):
        run = config(strategy="ddp", **{"strategy.communication_hook": "powersgd"})
        unit = ShardingUnit(-1, "model", (adapter, *frozen))
        plan = run.strategy.plan(PlanInputs((unit,), run.precision, 8, run.optimizer, 1))
        plan.allocate_persistent_state(device)
    for name in ("errors", "factors", "buckets"):
        assert adapted.held[name] == whole.held[name]
        assert whole.held[name][0] > 0


@pytest.mark.long
@needs_peft
@pytest.mark.slow
def test_adapters_are_sent_as_factors_in_the_memory_that_is_predicted(
    execute: Callable[..., list[dict[str, Any]]],
) -> None:
    asked = ("model=t5_tiny", *STEPS, "strategy=ddp", "gpus=2", "batch_size_per_gpu=1", "finetune=lora", HOOK)
    (record,) = execute(asked)
    assert record["status"] == "ok", record["error"]
    expected = predict_run(compose_run_config(*asked)).memory.allocated.value
    assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=1e-3)


def test_less_is_sent_and_more_is_kept_with_every_column() -> None:
    volumes, kept = [], []
    for options in ({}, {"rank": 8}, {"rank": 1}):
        hook = {"strategy.communication_hook": "powersgd", "strategy.matrix_approximation_rank": options.get("rank", 1)}
        device = Notebook()
        plan, setting = plan_of(config(strategy="ddp", **(hook if options else {})))
        plan.allocate_persistent_state(device)
        kept.append(device.total())
        step(plan, setting, device)
        volumes.append(device.volume("all-reduce", "world"))
    whole, eight, one = volumes
    assert one < eight / 4 < whole / 8
    assert kept[0] < kept[2] < kept[1]


def test_on_a_slow_network_it_pays_and_on_a_fast_one_it_does_not() -> None:
    def step_s(gpus: int, *more: str) -> float:
        asked = ("model=gpt_350m", "hardware=a100_80gb", "strategy=ddp", f"gpus={gpus}", "mode=predict", *more)
        time = predict_run(compose_run_config(*asked, "batch_size_per_gpu=4", "sequence_length=512")).time
        assert time is not None
        return time.step_s.value

    slow = ("gpus_per_node=1", "hardware.speeds.links.node_gb_s=1", "hardware.speeds.links.adapters=1")
    assert step_s(8, *slow, HOOK) < 0.5 * step_s(8, *slow)
    assert step_s(8, HOOK) > step_s(8)


@pytest.mark.parametrize(
    ("overrides", "error", "reason"),
    [
        ((HOOK, "precision=bf16_pure"), ImpossibleError, r"powersgd is not valid with precision=bf16_pure"),
        ((HOOK, "precision=fp16"), ImpossibleError, r"powersgd is not valid with precision=fp16, .* overflows"),
        ((HOOK, "precision=bf16", "precision.reduce=bf16"), ImpossibleError, r"precision.reduce=bf16 .* choose fp32"),
        ((HOOK, "strategy.start_powerSGD_iter=1"), UsageError, r"start_powerSGD_iter=1 .* at least 2"),
        ((HOOK, "strategy.matrix_approximation_rank=0"), UsageError, r"rank=0 .* at least 1"),
        ((HOOK, "strategy.start_powerSGD_iter=9"), UsageError, r"warmup_steps=3 .* at least 10"),
        (("strategy.matrix_approximation_rank=4",), ImpossibleError, r"rank=4 .* choose communication_hook=powersgd"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        compose_run_config(*SMALL_GPT, "strategy=ddp", "gpus=2", *overrides)


def test_without_it_a_run_is_what_it_was() -> None:
    run = (*SMALL_T5, "strategy=ddp", "gpus=2")
    knobs = ("strategy.matrix_approximation_rank=1", "strategy.start_powerSGD_iter=2")
    assert compose_run_config(*run).run_id == compose_run_config(*run, *knobs).run_id
    assert compose_run_config(*run).run_id != compose_run_config(*run, HOOK).run_id
