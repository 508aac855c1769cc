"""CPU offload: what leaves the device, what that takes, and the optimizer whose parameters come to it one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.errors import UsageError
from bench.measure.rehearsal import start_rehearsal
from bench.predicted_row import predicted_row
from bench.records.schema import COLUMNS
from bench.simulate.predict import predict
from bench.simulate.prediction import DOES_NOT_FIT, Prediction
from bench.strategies.plan import Parameter, Setting, Unit
from bench.strategies.uploading import UploadingOptimizer
from bench.training.engine import build_engine, micro_batches
from bench.training.optimizer import OptimizerConfig
from tests.conftest import SMALL_GPT, SMALL_T5, configuration
from tests.test_strategy_plans import Notebook, config, plan_of, step

PARAMETERS = {"strategy.cpu_offload": True, "strategy.optimizer_on_device": True}
OPTIMIZER = {"strategy.cpu_offload": True}
LARGE = {"model": "gpt_1b3", "strategy": "fsdp", "gpus": 8, "hardware": "a100_80gb", "precision": "bf16"}


def predicted(**knobs: object) -> Prediction:
    return predict(config(**{**LARGE, **knobs}))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updating_one_parameter_after_the_other_is_the_same_step(name: str, implementation: str) -> None:
    momentum = 0.9 if name == "sgd" else 0.0
    optimizer = OptimizerConfig(name, implementation, 1e-2, momentum)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    offloaded = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    offloaded.load_state_dict(plain.state_dict())
    uploading = UploadingOptimizer(offloaded.parameters(), optimizer.build, torch.device("cpu"))
    usual = optimizer.build(plain.parameters())
    for _ in range(3):
        data = torch.randn(4, 5)
        for model, each in ((plain, usual), (offloaded, uploading)):
            model(data).square().mean().backward()
            each.step()
            each.zero_grad()
    for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None
    moments = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[name]
    assert [state[moments].shape for state in uploading.states()] == [p.shape for p in plain.parameters()]
    assert all(twin.untyped_storage().nbytes() == 0 for twin in uploading._twins)


def test_no_more_than_one_parameter_is_on_the_device_at_a_time_and_no_frozen_one() -> None:
    trained = [nn.Parameter(torch.zeros(1024)) for _ in range(5)]
    frozen = nn.Parameter(torch.zeros(1 << 20), requires_grad=False)
    twins: list[torch.Tensor] = []
    on_device: list[int] = []

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        twins.extend(parameters)
        on_device.append(sum(twin.untyped_storage().nbytes() for twin in twins))
        return torch.optim.SGD(twins[-1:])

    UploadingOptimizer([trained[0], frozen, *trained[1:]], build, torch.device("cpu"))
    assert on_device == [4 * 1024] * 5


@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_a_step_with_offloading_computes_what_one_without_does(model: tuple[str, ...]) -> None:
    """One process and torch's offloading on a CPU, which a run refuses: everything but the way to another device."""
    losses = []
    start_rehearsal(1)
    try:
        settings: list[dict[str, Any]] = [{}, {"cpu_offload": True}, {"cpu_offload": True, "optimizer_on_device": True}]
        for knobs in settings:
            run = configuration(*model, "strategy=fsdp", "gpus=1", "sequence_length=16", "optimizer.learning_rate=1e-2")
            strategy, cpu = dataclasses.replace(run.strategy, **knobs), torch.device("cpu")
            engine = build_engine(run.model, strategy, run.precision, run.optimizer, device=cpu)
            batches = micro_batches(run.model, batch_size=2, sequence_length=16, device=cpu)
            assert isinstance(engine.optimizer, UploadingOptimizer) == ("optimizer_on_device" in knobs)
            losses.append([float(engine.step(batches)) for _ in range(3)])
    finally:
        dist.destroy_process_group()
    assert losses[0][2] < losses[0][0]
    assert losses[1] == losses[2] == losses[0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("strategy.optimizer_on_device=true",),
            "optimizer_on_device=true is not valid with strategy.cpu_offload=false",
        ),
        (("strategy.cpu_offload=true",), "cpu_offload=true is not valid on a CPU"),
        (("hardware=a100_80gb", "hardware.host.link_gb_s=0"), r"hardware.host.link_gb_s=0 is not valid: choose"),
        (
            ("hardware=a100_80gb", "hardware.host.memory_efficiency=2"),
            r"memory_efficiency=2 is not valid: choose .*at most 1",
        ),
        (("hardware=a100_80gb", "hardware.host.gpus_per_link=0"), r"hardware.host.gpus_per_link=0 is not valid"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        configuration(*SMALL_T5, "strategy=fsdp", "gpus=4", *overrides)


def test_identity_depends_on_the_machine_only_where_something_is_kept_there() -> None:
    faster = {"hardware.host.link_gb_s": 50}
    assert config(**LARGE, mode="predict").run_id == config(**LARGE, **faster, mode="predict").run_id
    ids = {config(**LARGE, **OPTIMIZER, **more, mode="predict").run_id for more in ({}, faster)}
    assert len(ids) == 2
    assert config(**LARGE, **OPTIMIZER).run_id == config(**LARGE, **OPTIMIZER, **faster).run_id


def test_what_leaves_the_device_is_on_the_host() -> None:
    plain, parameters, both = predicted(), predicted(**PARAMETERS), predicted(**OPTIMIZER)
    shard = config(**LARGE).model.num_parameters / 8
    assert plain.memory.host == 0
    assert parameters.memory.host == pytest.approx(8 * shard, rel=0.001)
    assert both.memory.host == pytest.approx(16 * shard, rel=0.001)
    assert (
        both.memory.parts["optimizer"] == both.memory.parts["parameters"] == parameters.memory.parts["parameters"] == 0
    )
    assert parameters.memory.parts["optimizer"] == plain.memory.parts["optimizer"]
    assert plain.memory.allocated.value > parameters.memory.allocated.value > both.memory.allocated.value


def test_shards_come_before_every_gather_and_gradients_go_after_every_reduction() -> None:
    plan, setting = plan_of(config(**{**LARGE, **OPTIMIZER}))
    device = Notebook()
    plan.begin(device)
    found = dict(device.held)
    step(plan, setting, device)
    assert device.held == found
    shards = 4 * sum(plan.updated)
    root = 4 * plan.shard_numel(setting.units[0])  # type: ignore[attr-defined]
    moved = {
        way: sum(size for name, size in device.moved if name.startswith(way)) for way in ("upload", "gradient out")
    }
    assert moved["upload"] == pytest.approx(2 * shards - root)
    assert moved["gradient out"] == pytest.approx(shards)


def test_what_is_frozen_comes_and_nothing_of_it_goes_back() -> None:
    run = config(**{**LARGE, **OPTIMIZER})
    block = Unit(0, "block", (Parameter("frozen", (64, 48), is_trained=False), Parameter("adapter", (64, 8))))
    root = Unit(-1, "outside", (Parameter("embedding", (96, 8), is_trained=False),))
    setting = Setting((root, block), run.precision, 8, 2, 1)
    device = Notebook()
    step(run.strategy.plan(setting), setting, device)
    moved = dict(device.moved)
    assert moved["upload 0"] == 4 * (64 * 48 + 64 * 8) / 8
    assert moved["gradient out 0"] == 4 * 64 * 8 / 8
    assert "gradient out -1" not in moved


def test_time_follows_from_the_link_and_from_the_memory_of_the_machine() -> None:
    def seconds(**knobs: object) -> float:
        time = predicted(**knobs).time
        assert time is not None
        return time.step_s.value

    size = 4 * config(**LARGE).model.num_parameters / 8
    two = {**PARAMETERS, "hardware.host.link_gb_s": 13.1}
    assert seconds(**two) - seconds(**PARAMETERS) >= 0.99 * 3 * size * 2 / 26.2e9
    slow = {**OPTIMIZER, "hardware.host.memory_gb_s": 204.8}
    per_byte = 8 / (409.6e9 * 0.84)
    assert seconds(**slow) - seconds(**OPTIMIZER) == pytest.approx(7 * size * per_byte, rel=0.01)
    assert seconds() < min(seconds(**PARAMETERS), seconds(**OPTIMIZER))
    time = predicted(**OPTIMIZER).time
    assert time is not None
    assert time.step_s.high / time.step_s.value == pytest.approx(1.3)
    run = config(**{**LARGE, **OPTIMIZER})
    unknown = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=None))
    assert predict(unknown).time is None


def test_what_limits_a_step_is_where_it_goes_and_is_explained() -> None:
    explained = next(column.meaning for column in COLUMNS if column.name == "limited_by")
    for knobs, limit in ((PARAMETERS, "host link"), (OPTIMIZER, "host memory"), ({}, "compute")):
        time = predicted(**knobs).time
        assert time is not None
        assert time.limited_by == limit
        assert limit in explained


def test_more_than_the_machine_has_does_not_fit() -> None:
    run = config(**{**LARGE, **OPTIMIZER, "hardware.host.memory_gib": 16})
    found = predict(run)
    assert found.memory.verdict == DOES_NOT_FIT
    assert (
        "GiB are offloaded, and the rank's share of its machine's memory is 2 GiB" in predicted_row(run, found)["error"]
    )
