"""Optimizers: bytes against torch's own objects, losses and peaks of real runs, refusals, and clipping by norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.optimizers import OptimizerConfig, UpdatedTensor, find_hidden_matrices, list_optimizers
from bench.prediction.predictor import predict_run
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config, needs

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("measurement.warmup_steps=3", "measurement.steps=2", "hardware=cpu", "sequence_length=8")
SMALL_BATCH = ("gpus=2", "batch_size_per_gpu=2")
WIDE_GPT = (*SMALL_GPT, "model.hidden_size=192", "model.vocabulary_size=64", "activation_checkpointing=full")
"""So wide that the optimizer's step is the peak."""

OPTIMIZERS = [
    *("adamw", "sgd", "adafactor", "muon"),
    *(pytest.param(name, marks=needs("bitsandbytes")) for name in ("lion", "adamw_8bit")),
]
"""That of torchao is left out: its step is compiled for minutes."""


def read_optimizer(name: str, **knobs: Any) -> OptimizerConfig:
    return dataclasses.replace(compose_run_config(f"optimizer={name}", "strategy=single").optimizer, **knobs)


def list_tensors(parameters: list[nn.Parameter]) -> list[UpdatedTensor]:
    return [UpdatedTensor(tuple(parameter.shape), parameter.ndim == 2) for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_have_the_bytes_that_are_predicted(name: str, dtype: torch.dtype) -> None:
    optimizer = read_optimizer(name)
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(7, 5), (5,), (90, 70), (3, 4, 6)]]
    built = optimizer.build(parameters, lambda parameter: parameter.ndim == 2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    built.step()
    states = [value for state in built.state.values() for key, value in state.items() if not key.startswith("qmap")]
    measured = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    predicted = [optimizer.compute_state_bytes(tensor, dtype.itemsize) for tensor in list_tensors(parameters)]
    assert sum(predicted) == measured


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_update_as_one_process_and_peaks_are_predicted(name: str, execute: Execute) -> None:
    """Of whole tensors; what is flat or a DTensor where that is how the optimizer is defined."""
    optimizer = read_optimizer(name)
    base = (*WIDE_GPT, *STEPS, f"optimizer={name}")
    runs = [(*base, "strategy=single", "batch_size_per_gpu=4")]
    kinds = {"ddp": "whole", "zero1": "whole", "fsdp": "DTensors", "fsdp1": "flat"}
    strategies = [strategy for strategy, kind in kinds.items() if kind in optimizer.supported_tensors]
    runs += [(*base, f"strategy={strategy}", *SMALL_BATCH) for strategy in strategies]
    single, *others = execute(*runs)
    for run, record in zip(runs, (single, *others), strict=True):
        predicted = predict_run(compose_run_config(*run)).memory.allocated.value
        assert predicted == pytest.approx(record["peak_allocated_bytes"], rel=0.01), run
    for strategy, record in zip(strategies, others, strict=True):
        if kinds[strategy] in optimizer.updates_like_one_process:
            assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), strategy
        elif name == "muon":  # sums are rounded to bf16 in another order
            assert record["losses"] == pytest.approx(single["losses"], rel=1e-3), strategy


@pytest.mark.long
@pytest.mark.slow
def test_adafactor_of_flat_shards_is_another_optimizer(execute: Execute) -> None:
    base = (*SMALL_GPT, *STEPS, "optimizer=adafactor")
    single, flat = execute((*base, "strategy=single", "batch_size_per_gpu=4"), (*base, "strategy=fsdp1", *SMALL_BATCH))
    assert flat["losses"][0] == pytest.approx(single["losses"][0], rel=1e-5)
    assert flat["losses"][-1] != pytest.approx(single["losses"][-1], rel=1e-3)


def test_muon_has_the_matrices_within_blocks_alone() -> None:
    family = compose_run_config(*SMALL_T5).model
    model = family.build_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden = {names[id(matrix)] for matrix in find_hidden_matrices(family.find_block_lists(model))}
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in hidden
    assert not [name for name in hidden if "relative_attention_bias" in name or "shared" in name or "norm" in name]


@pytest.mark.parametrize(
    ("optimizer", "strategy", "reason"),
    [
        ("muon", "fsdp1", "whose parameters are flat: Muon makes the rows or columns of whole matrices orthogonal"),
        ("muon", "tensor_parallel", "whose parameters are each rank's parts of them"),
        ("adafactor", "fsdp", "DTensors refuse"),
        ("lion", "fsdp", "bitsandbytes 0.50's kernels are not made for DTensors"),
        ("adamw_8bit", "zero2", "bitsandbytes 0.50's kernels are not made for DTensors"),
    ],
)
def test_what_does_not_work_is_refused_with_the_reason(optimizer: str, strategy: str, reason: str) -> None:
    with pytest.raises(ImpossibleError, match=f"optimizer={optimizer} is not valid with strategy=.*{reason}"):
        compose_run_config(f"optimizer={optimizer}", f"strategy={strategy}", "gpus=4")


def predict_large_run(**settings: object) -> Any:
    values = {"model": "gpt_mini", "gpus": 8, "hardware": "a100_80gb", "mode": "predict", **settings}
    config: RunConfig = build_run_config(compose_config({key: str(value) for key, value in values.items()}))
    return predict_run(config)


@pytest.mark.parametrize("name", list_optimizers())
def test_every_optimizer_is_predicted_without_its_library(name: str) -> None:
    prediction = predict_large_run(strategy="ddp", optimizer=name)
    assert prediction.time is not None
    assert prediction.time.optimizer_s > 0


def test_muon_on_dtensors_sends_and_multiplies_within_its_step() -> None:
    muon, adamw = (predict_large_run(strategy="fsdp", optimizer=name).time for name in ("muon", "adamw"))
    assert muon.optimizer_s > adamw.optimizer_s
    assert muon.communication_s > adamw.communication_s


def test_products_of_a_matrix_are_those_of_five_iterations() -> None:
    muon = read_optimizer("muon")
    products = muon.list_matrix_products([UpdatedTensor((30, 10), True), UpdatedTensor((10,))])
    flops = sum(2 * product.m * product.n * product.k * product.count for product in products)
    assert flops == 5 * (4 * 10**2 * 30 + 2 * 10**3)


CLIPPED = ("optimizer=sgd", "optimizer.learning_rate=1", "gradient_clip_norm=0.5", *STEPS)
CLIPPING_STRATEGIES = [
    ("strategy=ddp",),
    ("strategy=zero1",),
    ("strategy=fsdp",),
    ("strategy=fsdp", "strategy.sharding_factor=2"),
    ("strategy=fsdp1",),
    ("strategy=tensor_parallel", "strategy.degree=2"),
    ("strategy=tensor_parallel", "strategy.degree=2", "strategy.data_parallel=ddp"),
    ("strategy=pipeline", "strategy.stages=2"),
    ("strategy=pipeline", "strategy.stages=2", "strategy.data_parallel=fsdp"),
]


@pytest.mark.long
@pytest.mark.slow
def test_gradients_are_clipped_by_one_norm_on_whatever_ranks(execute: Execute) -> None:
    """SGD, whose steps are as long as gradients are: AdamW's would hide a wrong norm."""
    single, free, *others = execute(
        (*SMALL_T5, *CLIPPED, "strategy=single", "batch_size_per_gpu=8"),
        (*SMALL_T5, *CLIPPED, "gradient_clip_norm=null", "strategy=single", "batch_size_per_gpu=8"),
        *((*SMALL_T5, *CLIPPED, *knobs, "gpus=4", "batch_size_per_gpu=2") for knobs in CLIPPING_STRATEGIES),
    )
    assert single["losses"] != pytest.approx(free["losses"], rel=1e-2)
    for knobs, record in zip(CLIPPING_STRATEGIES, others, strict=True):
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), knobs


@pytest.mark.long
@pytest.mark.slow
def test_scaled_gradients_are_clipped_when_they_are_unscaled(execute: Execute) -> None:
    wide, narrow = execute(
        *((*SMALL_T5, *CLIPPED, "strategy=single", f"precision={precision}") for precision in ("fp32", "fp16"))
    )
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=0.02)


def test_clipping_takes_time_and_has_a_run_id_of_its_own() -> None:
    free, clipped = (
        predict_large_run(strategy="fsdp", gradient_clip_norm=norm).time.step_s.value for norm in ("null", 1.0)
    )
    assert clipped > free
    ids = {compose_run_config(f"gradient_clip_norm={norm}").run_id for norm in ("null", 0.5, 1.0)}
    assert len(ids) == 3
    assert compose_run_config().run_id in ids
