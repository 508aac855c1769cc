"""Mixtures of experts: counts, routing, and grouped products against one expert after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import predict
from bench.core.errors import UsageError
from bench.models.materialize import Materializer
from bench.models.moe import EXPERT_COUNT_FIELDS, MixtureOfExpertsFamily
from bench.models.routing import Routing
from bench.models.traced_flops import trace_flops
from bench.prediction.predictor import predict_runs
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace.step_trace import trace_step
from bench.strategies.fsdp.plan import choose_sharded_dimension
from tests.conftest import compose_run_config

PUBLISHED = {
    # Total: Jiang et al. 2024; safetensors of the models on Hugging Face. Active: arXiv:2401.04088, table 1;
    # arXiv:2505.09388; arXiv:2508.10925, table 1, and arXiv:2405.04434, appendix B, which leave out the embedding.
    "mixtral_8x7b": (46_702_792_704, 12.9e9, 0),
    "mixtral_8x22b": (140_620_634_112, 39e9, 0),
    "qwen3_30b_a3b": (30_532_122_624, 3.3e9, 0),
    "qwen3_235b_a22b": (235_093_634_560, 22e9, 0),
    "gpt_oss_20b": (20_914_757_184, 3.61e9, 1),
    "gpt_oss_120b": (116_829_156_672, 5.13e9, 1),
    "deepseek_v2_lite": (15_706_484_224, 2.4e9, 1),
    # arXiv:2405.04434 (236B, 21B active), arXiv:2412.19437 (671B without the layer of multi-token prediction, 37B).
    "deepseek_v2": (235_741_434_880, 21e9, 0),
    "deepseek_v3": (671_026_404_352, 37e9, 1),
    # arXiv:2507.20534, table 2, has 1.04T, 32.6B active; the exact sum is this suite's.
    "kimi_k2": (1_026_408_209_408, 32.6e9, 0),
}
DEEPSEEK = {
    "num_kv_heads": 4,
    "kv_rank": 16,
    "rotary_size": 8,
    "head_size": 16,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
    "dense_intermediate_size": 96,
}

Execute = Callable[..., list[dict[str, Any]]]


def load_model(name: str) -> MixtureOfExpertsFamily:
    model = compose_run_config(f"model={name}").model
    assert isinstance(model, MixtureOfExpertsFamily)
    return model


def build_tiny(architecture: str = "mixtral", **fields: Any) -> MixtureOfExpertsFamily:
    attention = "eager" if architecture == "gpt_oss" else "sdpa"
    deepseek = {"deepseek_v2": DEEPSEEK, "deepseek_v3": {**DEEPSEEK, "query_rank": 24, "expert_groups": 2}}
    fields = {**deepseek.get(architecture, {}), **fields}
    tiny = {"architecture": architecture, "attention": attention, "hidden_size": 64, "intermediate_size": 48}
    return dataclasses.replace(load_model("moe_tiny"), **{**tiny, **fields})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers_of_parameters(name: str) -> None:
    total, active, without_embedding = PUBLISHED[name]
    model = load_model(name)
    assert model.num_parameters == total
    left_out = without_embedding * model.vocabulary_size * model.hidden_size
    assert model.num_active_parameters - left_out == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize("architecture", EXPERT_COUNT_FIELDS)
def test_flops_are_those_of_the_active_experts_and_agree_with_a_trace(architecture: str) -> None:
    model = build_tiny(architecture)
    assert model.count_flops_per_sequence(64) == trace_flops(model, 64)
    more = dataclasses.replace(model, num_experts=2 * model.num_experts)
    router_flops = 2 * 64 * model.hidden_size * model.num_experts * (model.num_layers - model.num_dense_layers)
    more_flops = more.count_flops_per_sequence(64).blocks_linear - model.count_flops_per_sequence(64).blocks_linear
    assert more_flops == router_flops


@pytest.mark.parametrize("architecture", EXPERT_COUNT_FIELDS)
def test_grouped_products_compute_what_one_expert_after_the_other_does(architecture: str) -> None:
    """transformers' own loop over experts, with the router's choice."""
    model = build_tiny(architecture, routing="router")
    module: Any = model.build_model()
    Materializer(module, model, torch.device("cpu"), 0).fill_model(module)
    batch = model.build_batch(2, 32, torch.Generator().manual_seed(0))

    def compute_gradients(implementation: str) -> tuple[float, list[torch.Tensor]]:
        for part in module.modules():
            if hasattr(part, "config"):
                part.config._experts_implementation = implementation
        module.zero_grad()
        loss = model.compute_loss(module(**batch.inputs)["logits"], batch.labels)
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in module.parameters()]

    loss, gradients = compute_gradients("grouped")
    expected_loss, expected_gradients = compute_gradients("eager")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def list_traced_operators(*overrides: str) -> set[str]:
    """Names of what a step of a model with experts runs on a rank of two that share them."""
    run = compose_run_config("model=moe_tiny", "gpus=2", "strategy=mesh", "strategy.expert=2", *overrides)
    trace = trace_step(build_trace_key(run), 1)
    return {kernel.operator.removeprefix("aten.") for segment in trace.segments for kernel in segment.kernels}


def test_rows_are_gathered_forward_and_backward() -> None:
    """Nothing is added up row by row in a tensor of zeros."""
    assert not {"index_put", "index_put_"} & list_traced_operators()


@pytest.mark.slow
def test_what_is_between_products_of_experts_is_compiled_where_tokens_are_sent() -> None:
    activation = {"silu", "silu_backward"}
    assert activation <= list_traced_operators()
    assert not activation & list_traced_operators("compile=true")


def count_tokens(routing: Routing, num_experts: int, length: int, num_choices: int) -> list[int]:
    routing.sequence_length = length
    experts = routing.choose_experts(torch.zeros(3 * length, num_choices, dtype=torch.long), num_experts)
    assert experts.shape == (3 * length, num_choices)
    assert torch.equal(experts[:length], experts[length : 2 * length])
    assert all(len(set(row)) == num_choices for row in experts.tolist())
    return experts[:length].flatten().bincount(minlength=num_experts).tolist()


def test_a_balanced_router_sends_as_many_tokens_to_every_expert() -> None:
    assert count_tokens(Routing("balanced", 1.0), 8, 40, 2) == [10] * 8
    assert (
        max(count_tokens(Routing("balanced", 1.0), 6, 13, 2)) - min(count_tokens(Routing("balanced", 1.0), 6, 13, 2))
        <= 1
    )


def test_a_skewed_router_follows_zipfs_law() -> None:
    counts = count_tokens(Routing("skewed", 1.0), 16, 20_000, 1)
    shares = [count / 20_000 for count in counts]
    harmonic = sum(1 / rank for rank in range(1, 17))
    assert shares == pytest.approx([1 / rank / harmonic for rank in range(1, 17)], abs=0.012)
    even = count_tokens(Routing("skewed", 0.0), 16, 20_000, 2)
    assert even == pytest.approx([2500] * 16, rel=0.1)


def test_a_model_says_what_its_experts_take() -> None:
    model = build_tiny("mixtral", routing="balanced")
    assert set(model.count_expert_tokens(64)) == {64 * model.experts_per_token // model.num_experts}
    skewed, drawn = (build_tiny("mixtral", routing=kind).count_expert_tokens(512) for kind in ("skewed", "router"))
    routing = Routing("skewed", 1.0)
    assert list(skewed) == count_tokens(routing, model.num_experts, 512, model.experts_per_token)
    assert sum(skewed) == sum(drawn) == 512 * model.experts_per_token
    assert max(skewed) - min(skewed) > max(drawn) - min(drawn) > 0
    assert compose_run_config("model=llama_tiny").model.count_expert_tokens(64) == ()


def test_what_makes_no_sense_is_refused() -> None:
    for overrides, reason in (
        (("model.experts_per_token=9",), "model.experts_per_token=9 is not valid: choose at most model.num_experts=8"),
        (("model.routing=even",), "model.routing=even is not valid: choose router, balanced, skewed"),
        (
            ("model.architecture=deepseek_v2", "model.num_kv_heads=2", "model.kv_rank=16", "model.rotary_size=8"),
            "model.num_kv_heads=2 is not valid: choose model.num_heads=4, for model.architecture=deepseek_v2",
        ),
        (("model.num_kv_heads=3",), "model.num_kv_heads=3 is not valid: choose a divisor of model.num_heads=4"),
        (("model.architecture=deepseek_v2",), "model.kv_rank=null is not valid: choose a number"),
        (("model.expert_groups=3",), "model.expert_groups=3 is not valid: choose a divisor of half of model.num_exp"),
    ):
        with pytest.raises(UsageError, match=reason):
            compose_run_config("model=moe_tiny", *overrides)


def test_experts_that_ranks_do_not_divide_are_cut_along_a_dimension_that_they_do() -> None:
    assert choose_sharded_dimension((8, 512, 256), 4) == 0
    assert choose_sharded_dimension((3, 512, 256), 4) == 1
    assert choose_sharded_dimension((8, 510, 256), 64) == 2
    assert choose_sharded_dimension((3, 511, 255), 4) == 0
    assert choose_sharded_dimension((510, 256), 64) == 0


@pytest.mark.long
@pytest.mark.slow
def test_deepseek_v3_trains_as_in_one_process_and_needs_what_is_predicted(execute: Execute) -> None:
    """Two kinds of layers: three dense ones, and nine whose experts are chosen within half of their groups."""
    shape = {**DEEPSEEK, "architecture": "deepseek_v3", "query_rank": 24, "expert_groups": 2, "num_dense_layers": 3}
    model = ("model=moe_tiny", "model.num_layers=12", *(f"model.{name}={value}" for name, value in shape.items()))
    run = (*model, "hardware=cpu", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")
    mesh = (*run, "strategy=mesh", "gpus=2", "batch_size_per_gpu=2")
    runs = [
        (*run, "strategy=single", "gpus=1", "batch_size_per_gpu=4"),
        (*mesh, "strategy.expert=2"),
        (*mesh, "strategy.pipeline=2"),
    ]
    single, *divided = execute(*runs)
    assert single["losses"][-1] < single["losses"][0]
    for row, overrides in zip(divided, runs[1:], strict=True):
        assert row["losses"] == pytest.approx(single["losses"], rel=1e-5)
        (prediction,) = predict_runs([compose_run_config(*overrides, "mode=predict")])
        assert prediction.memory.allocated.value == pytest.approx(row["peak_allocated_bytes"], rel=1e-3)


@pytest.mark.long
@pytest.mark.slow
def test_fewer_experts_than_ranks_train_as_in_one_process_and_need_what_is_predicted(execute: Execute) -> None:
    model = ("model=moe_tiny", "model.num_experts=3", "model.num_layers=3", "model.vocabulary_size=512")
    run = (*model, "hardware=cpu", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")
    runs = [
        (*run, "strategy=single", "gpus=1", "batch_size_per_gpu=4"),
        (*run, "strategy=fsdp", "gpus=4", "batch_size_per_gpu=1"),
        (*run, "strategy=fsdp", "gpus=4", "batch_size_per_gpu=1", "precision=bf16"),
    ]
    single, sharded, narrow = records = execute(*runs)
    assert sharded["losses"] == pytest.approx(single["losses"], rel=1e-5), sharded["error"]
    assert narrow["losses"] == pytest.approx(single["losses"], rel=0.02), narrow["error"]
    for record, predicted in zip(
        records, predict_runs([compose_run_config(*overrides) for overrides in runs]), strict=True
    ):
        assert predicted.memory.allocated.value == pytest.approx(record["peak_allocated_bytes"], rel=0.001)


@pytest.mark.long
@pytest.mark.slow
def test_skewed_experts_cost_no_memory_and_narrow_formats_train(execute: Execute) -> None:
    """Without expert parallelism every rank has all experts: what is popular is no larger."""
    model = ("model=moe_tiny", "model.hidden_size=64", "model.intermediate_size=64", "model.vocabulary_size=512")
    run = (*model, "hardware=cpu", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")
    balanced, skewed, narrow, mixed = execute(
        (*run, "strategy=fsdp", "gpus=2"),
        (*run, "strategy=fsdp", "gpus=2", "model.routing=skewed"),
        (*run, "strategy=fsdp", "gpus=2", "precision=bf16"),
        (*run, "strategy=ddp", "gpus=2", "precision=bf16"),
    )
    assert skewed["peak_allocated_bytes"] == pytest.approx(balanced["peak_allocated_bytes"], rel=0.001)
    assert skewed["losses"] != balanced["losses"]
    for record in (narrow, mixed):
        assert record["losses"] == pytest.approx(balanced["losses"], rel=0.02), record["error"]
        assert record["losses"] != balanced["losses"]


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (("model.hidden_size=40",), "model.intermediate_size=36 is not valid with precision=bf16"),
        (("model.hidden_size=36", "model.num_heads=2"), "model.hidden_size=36 is not valid with precision=bf16"),
        (
            ("model.intermediate_size=40", "gpus=2", "strategy=mesh", "strategy.tensor=2"),
            "choose a multiple of 16, of which 2 ranks have a part each, or precision=fp32.",
        ),
    ],
)
def test_widths_that_torch_cannot_multiply_in_groups_are_a_sentence(
    knobs: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model=moe_tiny", "model.intermediate_size=36", "hardware=h100_80gb", "gpus=1", *knobs]
    assert predict.main([*settings, "precision=bf16"]) == 2
    assert told in capsys.readouterr().err
    assert predict.main([*settings, "precision=fp32"]) == 0
