"""Tensor parallelism: what it computes, what it keeps, what it sends, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench.core.errors import ImpossibleError
from bench.models.division import FusedMatrices, LayerDivision, RowwiseEmbedding
from bench.models.materialize import Materializer
from bench.prediction.cost.collectives import CollectiveGroup, compute_collective_seconds
from bench.prediction.cost.rank_groups import build_collective_group
from bench.prediction.predictor import predict_run
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace.fake_process_group import split_model
from bench.prediction.trace.step_trace import trace_step
from bench.strategies.step_plan import REPLICA_GROUP, SHARD_GROUP, TENSOR_GROUP, WORLD_GROUP
from bench.strategies.tensor_parallel.split import TensorParallelSplit
from tests.conftest import SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5, compose_run_config

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-2")
SPLIT = ("strategy=tensor_parallel", "gpus=4", "batch_size_per_gpu=2")
TWO = ("strategy.degree=2",)
WHOLE = ("strategy.sequence_parallel=false",)
BF16 = ("precision=bf16",)
DDP = ("strategy.data_parallel=ddp",)

RUNS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "t5": (
        SMALL_T5,
        {
            "tensor_parallel/4+sequence": (),
            "tensor_parallel/2x2+sequence+fsdp": TWO,
            "tensor_parallel/2x2+fsdp": (*TWO, *WHOLE, *BF16),
        },
    ),
    "llama": (
        SMALL_LLAMA,
        {
            "tensor_parallel/4+sequence": (),
            "tensor_parallel/2x2+sequence+fsdp": (*TWO, *BF16),
            "tensor_parallel/2x2+ddp": (*TWO, *WHOLE, *DDP),
        },
    ),
    "qwen3": (
        (*SMALL_LLAMA, "model.architecture=qwen3", "model.num_kv_heads=2"),
        {"tensor_parallel/2x2+sequence+fsdp": TWO},
    ),
    "gpt": (
        # The vocabulary is divisible by nothing: the last rank has less of it.
        (*SMALL_GPT, "model.vocabulary_size=127"),
        {
            "tensor_parallel/4+sequence": (),
            "tensor_parallel/2x2+sequence+fsdp": (*TWO, "activation_checkpointing=full"),
            "tensor_parallel/2x2+ddp": (*TWO, *WHOLE, *DDP),
        },
    ),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", RUNS)
def test_split_layers_compute_what_one_process_does_and_keep_what_is_predicted(execute: Execute, family: str) -> None:
    model, runs = RUNS[family]
    asked = {name: (*model, *STEPS, *SPLIT, *overrides) for name, overrides in runs.items()}
    alone = (*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8")
    single, *others = execute(alone, *asked.values())
    for (name, overrides), found in zip(asked.items(), others, strict=True):
        assert found["status"] == "ok", found["error"]
        assert found["effective_strategy"] == name
        assert found["mixed_precision"] == ("fsdp policy" if found["precision"] == "bf16" else "none")
        rounding = 0.02 if found["precision"] == "bf16" else 1e-5
        assert found["losses"] == pytest.approx(single["losses"], rel=rounding), name
        expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert found["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01), name
    assert single["losses"][-1] < single["losses"][0] - 0.3


@pytest.mark.long
@pytest.mark.slow
def test_a_rehearsed_rank_keeps_its_part(execute: Execute) -> None:
    many = ("gpus=64", *TWO, "batch_size_per_gpu=1", "activation_checkpointing=full")
    run = (*SMALL_GPT, *STEPS, *SPLIT, *many, "mode=rehearse")
    (alone,) = execute(run)
    assert alone["status"] == "ok", alone["error"]
    expected = predict_run(compose_run_config(*run)).memory.allocated.value
    assert alone["peak_allocated_bytes"] == pytest.approx(expected, rel=0.001)
    assert all(0 < loss < 10 for loss in alone["losses"])  # means nothing, but is a number


def test_a_fused_matrix_is_divided_part_by_part() -> None:
    query, key, value = torch.arange(12.0).reshape(3, 1, 4)
    fused = torch.cat([query, key, value], dim=-1)
    arranged = LayerDivision(fused_matrices={"weight": FusedMatrices(3)}).arrange_parameter("weight", fused, 2)
    for rank, mine in enumerate(arranged.chunk(2, dim=-1)):
        expected = torch.cat([each.chunk(2, dim=-1)[rank] for each in (query, key, value)], dim=-1)
        assert torch.equal(mine, expected)
    assert LayerDivision().arrange_parameter("weight", fused, 2) is fused


@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT, SMALL_LLAMA], ids=["t5", "gpt", "llama"])
def test_a_rank_has_its_share_of_every_layer(model: tuple[str, ...]) -> None:
    config = compose_run_config(*model, "strategy=single", "gpus=1")

    def held(split: TensorParallelSplit | None) -> dict[tuple[int, str], int]:
        units = build_parameter_layout(config.model, 1, False, split).units
        return {
            (unit.index, parameter.name.replace("parametrizations.", "").replace(".original", "")): parameter.numel
            for unit in units
            for parameter in unit.parameters
        }

    whole, quarter = held(None), held(TensorParallelSplit(4, sequence_parallel=True))
    shared = {name for name in whole if quarter[name] == whole[name]}
    assert all(quarter[name] * 4 == whole[name] for name in set(whole) - shared)
    # Whole on every rank are layer norms, learned positions, and biases that are added after the parts are summed up.
    assert all("norm" in name or "ln_" in name or "wpe" in name or "c_proj.bias" in name for _, name in shared)


def collectives(config: Any) -> list[tuple[str, str, int]]:
    trace = trace_step(build_trace_key(config), config.sequences_per_device)
    inside = [segment for segment in trace.segments if segment.place is not None and segment.place[0] >= 0]
    return [(segment.phase, event.kind, event.size) for segment in inside for event in segment.collectives]


@pytest.mark.slow
def test_each_block_sends_what_megatron_says() -> None:
    """Two all-reduces forward and two backward per block (Shoeybi et al. 2019, section 3); with sequence parallelism
    an all-gather and a reduce-scatter for each of them (Korthikanti et al. 2022, section 4.2.2)."""
    sizes = (*SMALL_GPT, "sequence_length=16", "strategy=tensor_parallel", "gpus=4", "batch_size_per_gpu=1")
    whole, divided = compose_run_config(*sizes, *WHOLE), compose_run_config(*sizes)
    hidden = 4 * 16 * 32 * 4  # sequences, tokens, hidden size, bytes
    blocks = 2
    sent = collectives(whole)
    assert sent == [("forward", "all-reduce", hidden)] * 2 * blocks + [("backward", "all-reduce", hidden)] * 2 * blocks
    sent = [each for each in collectives(divided) if each[2] == hidden]
    for phase in ("forward", "backward"):
        kinds = [kind for when, kind, _ in sent if when == phase]
        assert kinds.count("all-gather") == kinds.count("reduce-scatter") == 2 * blocks


@pytest.mark.long
@pytest.mark.slow
def test_compiled_blocks_exchange_what_others_do_beside_fewer_kernels() -> None:
    sizes = (*SMALL_GPT, "sequence_length=16", "strategy=tensor_parallel", "gpus=4", "batch_size_per_gpu=1")
    key = build_trace_key(compose_run_config(*sizes))
    plain, compiled = (trace_step(dataclasses.replace(key, compile=flag), 4).segments for flag in (False, True))
    # As a whole: the compiled first block takes in the hook that divides what embeddings give it, and its gradient's.
    exchanged = [
        [sorted((event.kind, event.size) for event in segment.collectives) for segment in segments]
        for segments in (plain, compiled)
    ]
    assert sorted(itertools.chain(*exchanged[0])) == sorted(itertools.chain(*exchanged[1]))
    moved = [before != after for before, after in zip(*exchanged, strict=True)]
    assert sum(moved) == 2  # the first block's backward, and that of the embeddings
    inner = [(before, after) for before, after in zip(plain, compiled, strict=True) if before.place == (0, 1)]
    assert len(inner) == 2
    for before, after in inner:
        assert [(event.kind, event.size) for event in before.collectives] == [
            (event.kind, event.size) for event in after.collectives
        ]
        assert before.collectives
        assert len(after.kernels) < len(before.kernels)


def test_the_group_that_shares_layers_is_as_near_as_can_be() -> None:
    run = (*SMALL_GPT, "cluster.gpus_per_node=8", "strategy=tensor_parallel", "gpus=32", "mode=predict")
    config = compose_run_config(*run, "strategy.degree=4", "strategy.sharding_factor=16", "hardware=h100_80gb")
    assert build_collective_group(config, TENSOR_GROUP) == CollectiveGroup(4, 4, concurrent_groups=2)
    assert build_collective_group(config, SHARD_GROUP) == CollectiveGroup(4, 2, concurrent_groups=4)
    assert build_collective_group(config, REPLICA_GROUP) == CollectiveGroup(2, 1, concurrent_groups=8)
    assert build_collective_group(config, WORLD_GROUP) == CollectiveGroup(8, 2, concurrent_groups=4)
    assert [config.strategy.find_batch_share(rank, 32) for rank in (0, 3, 4, 31)] == [(0, 8), (0, 8), (1, 8), (7, 8)]


@pytest.mark.slow
def test_waiting_inside_blocks_is_part_of_the_step() -> None:
    """What is exposed is at least what the collectives inside the blocks take, at the speed of the links."""
    run = ("model=gpt_13b", "model.vocabulary_size=50304", "hardware=h100_80gb", "precision=bf16", "gpus=8")
    split = (
        *run,
        "strategy=tensor_parallel",
        "strategy.degree=8",
        "sequence_length=2048",
        "batch_size_per_gpu=1",
        "mode=predict",
    )
    config = compose_run_config(*split, *WHOLE)
    time = predict_run(config).time
    assert time is not None
    size = 8 * 2048 * 5120 * 2
    each = compute_collective_seconds("all-reduce", size, CollectiveGroup(8, 8), config.hardware.speeds.links)  # type: ignore[union-attr]
    in_blocks = 40 * 4 * each
    assert in_blocks < time.exposed_communication_s < 1.5 * in_blocks
    # Across machines everybody waits longer for the same.
    far = predict_run(compose_run_config(*split, *WHOLE, "cluster.gpus_per_node=4")).time
    assert far is not None
    assert far.exposed_communication_s > 1.5 * time.exposed_communication_s


REFUSED = {
    "degree=3": ((*SMALL_T5, "strategy.degree=3", "gpus=4"), "strategy.degree=3 .* gpus=4: 2, 4"),
    "degree=1": (
        (*SMALL_T5, "strategy.degree=1", "gpus=4"),
        r"strategy.degree=1 .* fewer than 2 ranks: choose 2 or more",
    ),
    "degree=node": (
        (*SMALL_T5, "strategy.degree=node", "gpus=4", "gpus_per_node=1"),
        r"strategy.degree=node is not valid .* gpus_per_node=1, where that is fewer than 2 ranks: choose 2 or more",
    ),
    "one process": ((*SMALL_T5, "gpus=1"), "fewer than 2 ranks: choose gpus=2 or more"),
    "heads": ((*SMALL_T5, "gpus=8", "gpus_per_node=8"), "strategy.degree=8 .* model.num_heads=4.*: choose 2, 4"),
    "sequence": ((*SMALL_GPT, "gpus=4", "sequence_length=30"), "strategy.degree=4 .* sequence_length=30.*: choose 2"),
    "factor": ((*SMALL_T5, "gpus=4", *TWO, "strategy.sharding_factor=1"), "sharding_factor=1 .* a multiple of 2"),
    "ddp": (
        (*SMALL_T5, "gpus=4", *TWO, *DDP, "strategy.sharding_factor=4"),
        "nothing further: choose auto or 2",
    ),
    "fp16": ((*SMALL_T5, "gpus=4", "precision=fp16"), "precision=fp16 .*gradient scaler.* Choose bf16 or fp32"),
    "reduce": (
        (*SMALL_T5, "gpus=4", *TWO, *DDP, *BF16, "precision.reduce=bf16"),
        "precision.reduce=bf16 .* choose fp32, or fsdp",
    ),
    "compile": (
        (*SMALL_T5, "gpus=4", "compile=true", "activation_checkpointing=operators"),
        "operators is not valid with compile=true .* choose none or full",
    ),
    "dropout": ((*SMALL_T5, "gpus=4", "model.dropout=0.1"), "model.dropout=0.1 .* choose 0.0"),
    "family": (("model=mpt_7b", "gpus=4"), "model.family=mpt .* choose a model of family gpt, llama, mingpt, t5"),
    "kv heads": ((*SMALL_LLAMA, "model.num_kv_heads=2", "gpus=4"), "degree=4 .* model.num_kv_heads=2.*: choose 2"),
    "fused": ((*SMALL_LLAMA, "model.architecture=phi3", "gpus=4"), "architecture=phi3 .* has one matrix for several"),
    "experts": ((*SMALL_MOE, "gpus=4"), "model.family=moe .* choose a model of family gpt, llama, mingpt, t5"),
    "reshard": ((*SMALL_T5, "gpus=4", *TWO, *DDP, "strategy.reshard_after_forward=true"), "choose null with .*ddp"),
    "alone": ((*SMALL_T5, "gpus=4", *TWO, "strategy.data_parallel=none"), "data_parallel=none .* fsdp or ddp"),
    "data": ((*SMALL_T5, "gpus=4", "strategy.data_parallel=zero"), "strategy.data_parallel=zero .* fsdp, ddp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    overrides, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        compose_run_config("strategy=tensor_parallel", *overrides)


def test_what_it_comes_to_can_be_asked_for() -> None:
    """The knobs on a row make the same run again."""
    for overrides in ((), TWO, (*TWO, *DDP)):
        config = compose_run_config(*SMALL_T5, "strategy=tensor_parallel", "gpus=4", *overrides)
        values = {name: value for name, value in config.to_dict()["strategy"].items() if name != "name"}
        again = [f"strategy.{name}={'null' if value is None else value}" for name, value in values.items()]
        assert compose_run_config(*SMALL_T5, "strategy=tensor_parallel", "gpus=4", *again).run_id == config.run_id


def test_an_impossible_degree_leaves_a_run_out_of_a_sweep() -> None:
    with pytest.raises(ImpossibleError):
        compose_run_config(*SMALL_T5, "strategy=tensor_parallel", "strategy.degree=3", "gpus=4")


def test_tied_parameters_stay_tied_when_they_are_divided() -> None:
    config = compose_run_config(*SMALL_T5, "strategy=single", "gpus=1")
    names = [
        parameter.name
        for parameter in build_parameter_layout(config.model, 1, False, TensorParallelSplit(2, False))
        .units[0]
        .parameters
    ]
    assert sum("shared" in name or "embed_tokens" in name or "lm_head" in name for name in names) == 1


@pytest.mark.slow
def test_a_model_is_as_it_was_after_it_has_been_traced() -> None:
    """Splitting a model for a trace leaves nothing: no process group, no hook, no operators of divided losses."""
    config = compose_run_config(*SMALL_GPT, "strategy=tensor_parallel", "gpus=2", "batch_size_per_gpu=1")
    excepthook = sys.excepthook
    trace_step(build_trace_key(config), 2)
    assert sys.excepthook is excepthook
    assert not torch.distributed.is_initialized()
    assert torch.ops.aten._log_softmax.default not in DTensor._op_dispatcher._custom_op_handlers


class LookupShapes(TorchDispatchMode):
    """Shapes of what lookups in tables of embeddings are made of, and of the gradients of these tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: set[torch.Size] = set()
        self.gradients: set[torch.Size] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            self.tables.add(args[0].shape)
        elif func is torch.ops.aten.embedding_dense_backward.default:
            self.gradients.add(result.shape)
        return result


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("model", [SMALL_LLAMA, SMALL_T5], ids=["llama", "t5"])
def test_of_a_table_of_embeddings_ranks_have_rows_and_the_gradient_of_these(model: tuple[str, ...], tie: bool) -> None:
    """torch's own style has every rank compute the gradient of the whole table."""
    config = compose_run_config(*model, f"model.tie_embeddings={str(tie).lower()}")
    built = config.model.build_model()
    Materializer(built, config.model, torch.device("cpu"), seed=1).fill_model(built)
    with split_model(TensorParallelSplit(2, sequence_parallel=True, keeps_dtensors=True), config.model, built):
        batch = config.model.build_batch(1, 32, torch.Generator().manual_seed(0))
        with LookupShapes() as shapes:
            built(**batch.inputs)["logits"].sum().backward()
    own_rows = {torch.Size((64, 32))}
    assert own_rows <= shapes.tables
    assert own_rows <= shapes.gradients
    assert not {shape for shape in shapes.tables | shapes.gradients if shape[0] > 64}
    for parameter in built.parameters():
        assert not isinstance(parameter, DTensor) or parameter.grad.to_local().shape == parameter.to_local().shape


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_looks_up_its_own_rows_and_leaves_padding_alone(rank: int) -> None:
    """Of 10 rows the first rank has 5, the second the others; row 7 pads, and has no gradient."""
    table = torch.nn.Embedding(10, 4, padding_idx=7)
    tokens = torch.tensor([[0, 7, 4], [5, 9, 5]])
    whole = torch.nn.functional.embedding(tokens, table.weight, padding_idx=7)
    whole.sum().backward()
    assert table.weight.grad is not None
    rows = slice(5 * rank, 5 * rank + 5)
    own_weight, own_gradient = table.weight.detach()[rows].clone(), table.weight.grad[rows].clone()
    is_own = ((tokens >= rows.start) & (tokens < rows.stop)).unsqueeze(-1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        divided = torch.nn.Embedding(10, 4, padding_idx=7)
        parallelize_module(divided, init_device_mesh("cpu", (2,)), RowwiseEmbedding(), src_data_rank=None)
        divided.weight.to_local().detach().copy_(own_weight)
        found = divided(tokens)
        assert torch.equal(found, whole.detach() * is_own)
        found.sum().backward()
        assert torch.equal(divided.weight.grad.to_local(), own_gradient)
    finally:
        dist.destroy_process_group()
