"""CPU offload: what leaves the device, what that takes, and the optimizer whose parameters come to it one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.core.errors import UsageError
from bench.optimizers import load_optimizer
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import DOES_NOT_FIT, Prediction
from bench.prediction.predictor import predict_run
from bench.rank.engine import build_engine, build_micro_batches
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.records.schema import COLUMNS
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.uploading_optimizer import UploadingOptimizer
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config
from tests.strategies.test_strategy_plans import Notebook, config, plan_of, step

OFFLOAD_PARAMETERS = {"strategy.cpu_offload": True, "strategy.optimizer_on_device": True}
OFFLOAD_BOTH = {"strategy.cpu_offload": True}
LARGE = {"model": "gpt_1b3", "strategy": "fsdp", "gpus": 8, "hardware": "a100_80gb", "precision": "bf16"}


def predict_large_run(**knobs: object) -> Prediction:
    return predict_run(config(**{**LARGE, **knobs}))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updating_one_parameter_after_the_other_is_the_same_step(name: str, implementation: str) -> None:
    momentum = 0.9 if name == "sgd" else 0.0
    optimizer = load_optimizer(name)(name, implementation, 1e-2, momentum=momentum)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    offloaded = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    offloaded.load_state_dict(plain.state_dict())
    uploading = UploadingOptimizer(offloaded.parameters(), optimizer.build, torch.device("cpu"))
    usual = optimizer.build(plain.parameters())
    for _ in range(3):
        data = torch.randn(4, 5)
        for model, model_optimizer in ((plain, usual), (offloaded, uploading)):
            model(data).square().mean().backward()
            model_optimizer.step()
            model_optimizer.zero_grad()
    for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None
    moments = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[name]
    assert [state[moments].shape for state in uploading.list_states()] == [p.shape for p in plain.parameters()]
    assert all(twin.untyped_storage().nbytes() == 0 for twin in uploading._device_parameters)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(SMALL_T5, id="t5", marks=pytest.mark.long), pytest.param(SMALL_GPT, id="gpt")]
)
def test_a_step_with_offloading_computes_what_one_without_does(model: tuple[str, ...]) -> None:
    """One process and torch's offloading on a CPU, which a run refuses: everything but the way to another device."""
    losses = []
    init_rehearsal_group(1)
    try:
        settings: list[dict[str, Any]] = [{}, {"cpu_offload": True}, {"cpu_offload": True, "optimizer_on_device": True}]
        for knobs in settings:
            run = compose_run_config(
                *model, "strategy=fsdp", "gpus=1", "sequence_length=16", "optimizer.learning_rate=1e-2"
            )
            strategy, cpu = dataclasses.replace(run.strategy, **knobs), torch.device("cpu")
            engine = build_engine(run.model, strategy, run.precision, run.optimizer, device=cpu)
            batches = build_micro_batches(run.model, batch_size=2, sequence_length=16, device=cpu)
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
        compose_run_config(*SMALL_T5, "strategy=fsdp", "gpus=4", *overrides)


def test_identity_depends_on_the_machine_only_where_something_is_kept_there() -> None:
    faster = {"hardware.host.link_gb_s": 50}
    assert config(**LARGE, mode="predict").run_id == config(**LARGE, **faster, mode="predict").run_id
    ids = {config(**LARGE, **OFFLOAD_BOTH, **more, mode="predict").run_id for more in ({}, faster)}
    assert len(ids) == 2
    assert config(**LARGE, **OFFLOAD_BOTH).run_id == config(**LARGE, **OFFLOAD_BOTH, **faster).run_id


def test_what_leaves_the_device_is_on_the_host() -> None:
    plain, parameters, both = (
        predict_large_run(),
        predict_large_run(**OFFLOAD_PARAMETERS),
        predict_large_run(**OFFLOAD_BOTH),
    )
    shard = config(**LARGE).model.num_parameters / 8
    assert plain.memory.host == 0
    assert parameters.memory.host == pytest.approx(8 * shard, rel=0.001)
    assert both.memory.host == pytest.approx(16 * shard, rel=0.001)
    assert (
        both.memory.parts["optimizer"] == both.memory.parts["parameters"] == parameters.memory.parts["parameters"] == 0
    )
    assert parameters.memory.parts["optimizer"] == plain.memory.parts["optimizer"]
    assert plain.memory.allocated.value > parameters.memory.allocated.value > both.memory.allocated.value


@pytest.mark.slow
def test_shards_come_before_every_gather_and_gradients_go_after_every_reduction() -> None:
    plan, plan_inputs = plan_of(config(**{**LARGE, **OFFLOAD_BOTH}))
    device = Notebook()
    plan.allocate_persistent_state(device)
    initial_tensors = dict(device.held)
    step(plan, plan_inputs, device)
    assert device.held == initial_tensors
    shards = 4 * sum(plan.updated_numels)
    root = 4 * plan.compute_shard_numel(plan_inputs.units[0])  # type: ignore[attr-defined]
    moved = {
        prefix: sum(size for name, size in device.moved if name.startswith(prefix))
        for prefix in ("upload", "gradient out")
    }
    assert moved["upload"] == pytest.approx(2 * shards - root)
    assert moved["gradient out"] == pytest.approx(shards)


def test_what_is_frozen_comes_and_nothing_of_it_goes_back() -> None:
    run = config(**{**LARGE, **OFFLOAD_BOTH})
    block = ShardingUnit(
        0, "block", (ParameterSpec("frozen", (64, 48), is_trained=False), ParameterSpec("adapter", (64, 8)))
    )
    root = ShardingUnit(-1, "outside", (ParameterSpec("embedding", (96, 8), is_trained=False),))
    plan_inputs = PlanInputs((root, block), run.precision, 8, run.optimizer, 1)
    device = Notebook()
    step(run.strategy.plan(plan_inputs), plan_inputs, device)
    moved = dict(device.moved)
    assert moved["upload 0"] == 4 * (64 * 48 + 64 * 8) / 8
    assert moved["gradient out 0"] == 4 * 64 * 8 / 8
    assert "gradient out -1" not in moved


def test_time_follows_from_the_link_and_from_the_memory_of_the_machine() -> None:
    def predict_step_s(**knobs: object) -> float:
        time = predict_large_run(**knobs).time
        assert time is not None
        return time.step_s.value

    size = 4 * config(**LARGE).model.num_parameters / 8
    two = {**OFFLOAD_PARAMETERS, "hardware.host.link_gb_s": 13.1}
    assert predict_step_s(**two) - predict_step_s(**OFFLOAD_PARAMETERS) >= 0.99 * 3 * size * 2 / 26.2e9
    slow = {**OFFLOAD_BOTH, "hardware.host.memory_gb_s": 204.8}
    per_byte = 8 / (409.6e9 * 0.84)
    assert predict_step_s(**slow) - predict_step_s(**OFFLOAD_BOTH) == pytest.approx(7 * size * per_byte, rel=0.01)
    assert predict_step_s() < min(predict_step_s(**OFFLOAD_PARAMETERS), predict_step_s(**OFFLOAD_BOTH))
    time = predict_large_run(**OFFLOAD_BOTH).time
    assert time is not None
    assert time.step_s.high / time.step_s.value >= 1.3
    run = config(**{**LARGE, **OFFLOAD_BOTH})
    unknown = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=None))
    assert predict_run(unknown).time is None


def test_what_limits_a_step_is_where_it_goes_and_is_explained() -> None:
    explained = next(column.meaning for column in COLUMNS if column.name == "limited_by")
    fast_host = {"hardware.speeds.launch.unit_us": 1, "hardware.speeds.launch.operator_us": 1}
    limits = ((OFFLOAD_PARAMETERS, "host link"), (OFFLOAD_BOTH, "host memory"))
    for knobs, limit in (*limits, (fast_host, "compute"), ({}, "kernel launches")):
        time = predict_large_run(**knobs).time
        assert time is not None
        assert time.limited_by == limit
        assert limit in explained


def test_more_than_the_machine_has_does_not_fit() -> None:
    run = config(**{**LARGE, **OFFLOAD_BOTH, "hardware.host.memory_gib": 16})
    prediction = predict_run(run)
    assert prediction.memory.verdict == DOES_NOT_FIT
    assert (
        "GiB are offloaded, and the rank's share of its machine's memory is 2 GiB"
        in build_predicted_row(run, prediction)["error"]
    )
