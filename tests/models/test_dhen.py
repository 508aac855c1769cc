"""DHEN: tables that are divided among ranks train like whole ones; sizes and FLOPs are those of the formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.core.errors import ImpossibleError
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.embedding_tables import ADAGRAD_EPSILON, EmbeddingTables, build_table_buffer
from bench.prediction.cost.collectives import ALL_TO_ALL, CollectiveGroup, compute_collective_seconds
from bench.prediction.parameter_facts import find_parameter_facts
from bench.prediction.predictor import predict_run
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace.step_trace import trace_step
from tests.conftest import compose_run_config
from tests.models.test_models import build_family

Execute = Callable[..., list[dict[str, Any]]]

TINY = ("model=dhen_tiny", "sequence_length=1")
STEPS = ("measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")


def make_tables(**options: Any) -> EmbeddingTables:
    tables = EmbeddingTables(**{"num_tables": 3, "rows": 5, "width": 4, "table_format": "fp32"} | options)
    for name, _ in list(tables.named_buffers()):
        tables.register_buffer(name, build_table_buffer(tables, name, torch.device("cpu")))
    return tables


def test_the_papers_model_has_the_parameters_that_the_fsdp_paper_states() -> None:
    family = build_family("dhen")
    dense_parameters = sum(parameter.numel() for parameter in family.build_model().parameters())
    assert dense_parameters == pytest.approx(550e6, rel=0.002)
    assert family.num_parameters - dense_parameters == 768_000_000_000
    assert find_parameter_facts(family).count == family.num_parameters
    assert family.num_active_parameters - dense_parameters == 512 * 256


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "operators", "every_2"])
@pytest.mark.parametrize("option", ["dhen_tiny", pytest.param("dhen", marks=pytest.mark.long)])
def test_flops_agree_with_torchs_counter(option: str, checkpointing: str) -> None:
    family = build_family(option)
    model = family.build_model().train()
    checkpoint_blocks(family, model, checkpointing)
    batch = family.build_batch(2, 1, torch.Generator())
    with FlopCounterMode(display=False) as counter:
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})["logits"].sum().backward()
    assert 2 * family.count_flops_per_sequence(1).compute_hardware_flops(checkpointing) == pytest.approx(
        counter.get_total_flops(), rel=0.002
    )


def test_backward_updates_the_rows_that_were_looked_up_with_rowwise_adagrad() -> None:
    tables = make_tables(learning_rate=0.5)
    before = tables.weight.clone()
    ids = torch.tensor([[[0, 1], [4, 4], [2, 7]], [[1, 1], [3, 0], [2, 2]]])  # row 7 of 5 is row 2
    target = torch.randn(2, 3, 4)
    weight = before.clone().requires_grad_()
    squares = torch.zeros(3, 5)
    for _ in range(2):  # the second step finds the first one's state
        result = tables(ids, torch.float32)
        expected = torch.stack([weight[table][ids[:, table] % 5].sum(dim=1) for table in range(3)], dim=1)
        torch.testing.assert_close(result, expected)
        (result * target).sum().backward()
        (gradient,) = torch.autograd.grad((expected * target).sum(), weight)
        squares += gradient.square().mean(dim=2)
        step = 0.5 * gradient / (squares.sqrt() + ADAGRAD_EPSILON)[:, :, None]
        weight = (weight - step).detach().requires_grad_()
        torch.testing.assert_close(tables.weight, weight.detach())
        torch.testing.assert_close(tables.squares, squares)
    assert torch.equal(tables.weight[1, 1], before[1, 1])  # nobody named it


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("sequence_length=2",), ("sequence_length=2", "choose 1")),
        (("gpus=3", "strategy=ddp"), ("gpus=3", "model.num_tables=8")),
        (("precision=fp16",), ("precision=fp16", "bf16 or fp32")),
        (("gpus=2", "strategy=deepspeed"), ("strategy=deepspeed", "ddp, fsdp, fsdp1, single or zero1")),
        (("gpus=2", "strategy=tensor_parallel"), ("strategy=tensor_parallel",)),
        (("finetune=lora",), ("finetune=lora", "full")),
        (("loss=chunked",), ("loss=chunked", "loss=whole")),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(ImpossibleError) as raised:
        compose_run_config(*TINY, *overrides)
    assert all(part in str(raised.value) for part in parts), raised.value


def test_its_trace_has_the_exchanges_of_a_step_and_none_of_the_rows_that_nobody_names() -> None:
    config = compose_run_config(
        *TINY, "mode=predict", "hardware=a100_80gb", "strategy=fsdp", "gpus=4", "precision=bf16"
    )
    trace = trace_step(build_trace_key(config), 6)
    vectors = 6 * 8 * 32
    assert [(segment.phase, event.kind, event.size) for segment in trace.segments for event in segment.collectives] == [
        ("forward", "all-to-all", 6 * 8 * 2 * 8),  # two ids of 8 bytes for each of 8 tables
        ("forward", "all-to-all", 4 * vectors),  # as tables store them
        ("backward", "all-to-all", 2 * vectors),  # as gradients are computed
    ]
    larger = dataclasses.replace(config, model=dataclasses.replace(config.model, rows_per_table=10**9))  # type: ignore[type-var]
    moved_bytes = [
        sum(
            kernel.bytes_moved for segment in trace_step(build_trace_key(run), 6).segments for kernel in segment.kernels
        )
        for run in (config, larger)
    ]
    assert moved_bytes[0] == moved_bytes[1]
    peaks = [predict_run(run).memory.parts["parameters"] for run in (config, larger)]
    assert peaks[1] - peaks[0] == (10**9 - 512) * 2 * (32 + 1) * 4  # two tables of a rank, and a number per row


def test_a_step_waits_for_exchanges_among_all_ranks() -> None:
    """What tables of twice the bytes cost is what the exchange of their vectors does, and nothing hides it."""
    two_nodes = (*TINY, "mode=predict", "hardware=a100_80gb", "strategy=fsdp", "gpus=16", "batch_size_per_gpu=4096")
    two_nodes += ("hardware.speeds.launch.unit_us=1", "hardware.speeds.launch.operator_us=1")  # the host is ahead
    configs = [
        compose_run_config(*two_nodes, "model.num_tables=64", f"model.table_format={table_format}")
        for table_format in ("fp16", "fp32")
    ]
    half, full = (predict_run(config).time for config in configs)
    assert half is not None
    assert full is not None
    assert configs[0].hardware.speeds is not None
    half_s, full_s = (
        compute_collective_seconds(
            ALL_TO_ALL, 4096 * 64 * 32 * num_bytes, CollectiveGroup(16, 8), configs[0].hardware.speeds.links
        )
        for num_bytes in (2, 4)
    )
    assert full.communication_s - half.communication_s == pytest.approx(full_s - half_s, rel=0.01)
    assert full.exposed_communication_s - half.exposed_communication_s == pytest.approx(full_s - half_s, rel=0.01)


@pytest.mark.slow
@pytest.mark.long
def test_every_strategy_has_the_losses_of_one_process_and_needs_what_is_predicted(execute: Execute) -> None:
    settings = (*TINY, *STEPS, "precision=fp32", "hardware=cpu")
    strategies = [
        ("strategy=ddp", "gpus=4"),
        ("strategy=fsdp", "gpus=4", "activation_checkpointing=full"),
        ("strategy=fsdp", "gpus=4", "strategy.sharding_factor=2", "strategy.reshard_after_forward=false"),
        ("strategy=fsdp1", "gpus=4"),
        ("strategy=zero1", "gpus=4"),
    ]
    runs = [
        (*settings, "strategy=single", "gpus=1", "batch_size_per_gpu=16"),
        *((*settings, *strategy, "batch_size_per_gpu=4") for strategy in strategies),
    ]
    single, *others = records = execute(*runs)
    assert single["status"] == "ok", single["error"]
    for strategy, record in zip(strategies, others, strict=True):
        assert record["status"] == "ok", (strategy, record["error"])
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), strategy
    for run, record in zip(runs, records, strict=True):
        predicted = predict_run(compose_run_config(*run)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(predicted, rel=0.03), run
    assert single["losses"][-1] < single["losses"][0] - 0.01
    assert single["tokens_per_second_per_gpu"] == pytest.approx(16 / single["step_time_median_s"])
