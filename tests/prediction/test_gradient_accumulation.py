"""Gradients of later micro-batches are added to those that are there: what real torch moves for it is what a prediction
counts, and takes as long as the memory's bandwidth says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from bench.core.errors import ImpossibleError
from bench.prediction.pipeline.rank_timelines import find_first_backward
from bench.prediction.predictor import predict_run
from bench.prediction.trace.fake_process_group import join_fake_process_group
from bench.strategies.pipeline.schedule import (
    ALL_SCHEDULES,
    BACKWARD,
    SINGLE_STAGE_SCHEDULES,
    WEIGHT_BACKWARD,
    Timetable,
)
from tests.conftest import compose_run_config

ON_4_GPUS = (
    *("model=llama3_2_1b", "mode=predict", "hardware=h100_80gb", "gpus=4", "sequence_length=1024"),
    *("batch_size_per_gpu=8", "activation_checkpointing=none"),
)
NUM_MICRO_BATCHES = 5
REPEATED = f"gradient_accumulation={NUM_MICRO_BATCHES}"
PIPELINE = ("model=llama2_7b", "strategy=mesh", "strategy.pipeline=2")

BYTES_PER_PARAMETER: dict[str, tuple[tuple[str, ...], int]] = {
    "ddp, fp32 gradients": (("strategy=ddp", "precision=bf16", REPEATED), 3 * 4),
    "ddp, bf16 gradients": (("strategy=ddp", "precision=bf16_pure", REPEATED), 3 * 2),
    "zero1": (("strategy=zero1", "precision=bf16_pure", REPEATED), 3 * 2),
    "fsdp, added in fp32": (("strategy=fsdp", "precision=bf16", REPEATED), 2 + 2 * 4),
    "fsdp, added in bf16": (("strategy=fsdp", "precision=bf16_pure", REPEATED), 3 * 2),
    "fsdp1": (("strategy=fsdp1", "precision=bf16", REPEATED), 3 * 2),
}


def predict_step_s(*overrides: str) -> float:
    time = predict_run(compose_run_config(*ON_4_GPUS, *overrides)).time
    assert time is not None
    return time.step_s.value


def compute_moving_s(moved_bytes: float) -> float:
    hardware = compose_run_config(*ON_4_GPUS, "strategy=ddp", "precision=bf16").hardware
    assert hardware.speeds is not None
    assert hardware.memory_bandwidth_gb_s is not None
    return moved_bytes / (hardware.memory_bandwidth_gb_s * 1e9 * hardware.speeds.memory_efficiency)


@pytest.mark.parametrize("name", BYTES_PER_PARAMETER)
def test_adding_takes_what_the_memory_takes_in_all_micro_batches_but_the_first(name: str) -> None:
    overrides, bytes_per_parameter = BYTES_PER_PARAMETER[name]
    numel = compose_run_config(*ON_4_GPUS, *overrides).model.num_parameters
    added_s = predict_step_s(*overrides) - predict_step_s(*overrides, "gradient_accumulation_fusion=true")
    moving_s = (NUM_MICRO_BATCHES - 1) * compute_moving_s(numel * bytes_per_parameter)
    assert added_s == pytest.approx(moving_s, rel=0.05)  # some of it while ranks wait for the last bucket


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_of_a_pipeline_add_theirs_to_those_of_the_micro_batches_before(schedule: str) -> None:
    overrides = (*PIPELINE, f"strategy.schedule={schedule}", "strategy.micro_batches=4", "precision=bf16_pure")
    numel = compose_run_config(*ON_4_GPUS, *overrides).model.num_parameters
    added_s = predict_step_s(*overrides) - predict_step_s(*overrides, "gradient_accumulation_fusion=true")
    # Half of the parameters, by the last stage in all micro-batches but the first, and by the first stage in the last;
    # and what a kernel takes at least, of which there is one per tensor.
    assert added_s == pytest.approx((3 + 1) * compute_moving_s(3 * 2 * numel / 2), rel=0.07)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_all_stages_have_gradients_of_one_micro_batch_first(schedule: str) -> None:
    virtual_stages = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    timetable = Timetable(schedule, ranks=4, virtual_stages=virtual_stages, micro_batches=8)
    for rank in range(timetable.ranks):
        first = {}
        for action in timetable.list_actions(rank):
            if action.kind in (BACKWARD, WEIGHT_BACKWARD):
                first.setdefault(action.stage, action.micro_batch)
        assert set(first.values()) == {find_first_backward(timetable)}


def test_one_micro_batch_has_nothing_to_add_to() -> None:
    once = ("strategy=fsdp", "precision=bf16", "gradient_accumulation=1")
    assert predict_step_s(*once) == predict_step_s(*once, "gradient_accumulation_fusion=true")


@pytest.mark.parametrize("mode", ["measure", "rehearse"])
def test_no_run_has_products_that_add(mode: str) -> None:
    with pytest.raises(ImpossibleError, match=rf"fusion=true .* mode={mode}, .* choose false, or mode=predict"):
        compose_run_config("gradient_accumulation_fusion=true", f"mode={mode}", "hardware=h100_80gb")


class AddedBytesCounter(TorchDispatchMode):
    """Bytes read and written by in-place additions of tensors as large as a weight."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.added_bytes = 0
        self._numel = numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor and args[0].numel() == self._numel:
            self.added_bytes += 2 * args[0].nbytes + args[1].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("parameter_dtype", "reduce_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_fsdp2_moves_as_many_bytes(parameter_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    width, num_layers = 48, 3
    added_bytes = []
    with join_fake_process_group(1):  # a real one would stay in torch's caches, and hang processes forked later
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=parameter_dtype, reduce_dtype=reduce_dtype))
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        inputs = torch.randn(5, width)
        for _ in range(3):
            with AddedBytesCounter(width * width) as counter:
                model(inputs).sum().backward()
            added_bytes.append(counter.added_bytes)
    moved = num_layers * width * width * (parameter_dtype.itemsize + 2 * reduce_dtype.itemsize)
    assert added_bytes == [0, moved, moved]


def test_autograd_moves_as_many_bytes() -> None:
    layer = nn.Linear(48, 48, bias=False)
    added_bytes = []
    for _ in range(2):
        with AddedBytesCounter(48 * 48) as counter:
            layer(torch.randn(5, 48)).sum().backward()
        added_bytes.append(counter.added_bytes)
    assert added_bytes == [0, 3 * 4 * 48 * 48]
