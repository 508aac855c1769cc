"""Adapters beside layers that ranks have parts of: they train like one process, in the memory that is predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace.step_trace import trace_step
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.mesh.split import MeshSplit
from bench.strategies.pipeline.schedule import ALL_SCHEDULES
from tests.conftest import compose_run_config, needs
from tests.prediction.test_predicted_mesh import ON_CPU, check_measured_memory
from tests.strategies.test_mesh import (
    CONTEXT,
    DDP,
    EXPERT,
    LATENT_MODELS,
    MESH,
    MODELS,
    PIPELINE,
    SPREAD,
    STEPS,
    TENSOR,
    WHOLE,
    ZERO1,
    build_latent_model,
)

Execute = Callable[..., list[dict[str, Any]]]

LORA = "finetune=lora"
TENSOR_PARALLEL, STAGES = ("strategy=tensor_parallel", "strategy.degree=2"), ("strategy=pipeline", "strategy.stages=2")

ALONE = {
    "tensor": (*MESH, TENSOR, *WHOLE),
    "tensor, sequence": (*MESH, TENSOR),
    "pipeline": (*MESH, PIPELINE),
    "strategy=tensor_parallel": TENSOR_PARALLEL,
    "strategy=pipeline": STAGES,
}
TOGETHER = {
    "tensor x pipeline x fsdp": (*MESH, TENSOR, PIPELINE),
    "tensor x context x ddp": (*MESH, TENSOR, CONTEXT, DDP),
    "tensor x fsdp": (*MESH, TENSOR),
    "tensor x pipeline x zero1": (*MESH, TENSOR, PIPELINE, ZERO1),
    "tensor_parallel with ddp": (*TENSOR_PARALLEL, "strategy.data_parallel=ddp"),
    "tensor_parallel with fsdp": (*TENSOR_PARALLEL, "strategy.data_parallel=fsdp"),
    "pipeline with ddp": (*STAGES, "strategy.data_parallel=ddp"),
    "pipeline with fsdp": (*STAGES, "strategy.data_parallel=fsdp"),
}
WITH_EXPERTS = {
    "expert x fsdp": (*MESH, EXPERT),
    "tensor x expert x ddp": (*MESH, TENSOR, EXPERT, DDP),
    "tensor x pipeline x expert": (*MESH, TENSOR, PIPELINE, EXPERT),
    "whole experts": (*MESH, *SPREAD, EXPERT),
}
WAYS: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "clipped": (
        "gpt",
        ("gradient_clip_norm=0.05", "activation_checkpointing=full"),
        {name: TOGETHER[name] for name in ("tensor x pipeline x fsdp", "tensor x fsdp", "pipeline with ddp")},
    ),
    "compiled": (
        "llama",
        ("compile=true",),
        {
            "tensor x fsdp": (*MESH, TENSOR),
            "tensor x ddp": (*MESH, TENSOR, DDP, *WHOLE),
            "tensor x pipeline": (*MESH, TENSOR, PIPELINE, "activation_checkpointing=full"),
        },
    ),
    "t5": (
        "t5",
        (),
        {"tensor": TENSOR_PARALLEL, "tensor x fsdp": (*MESH, TENSOR), "pipeline x fsdp": (*MESH, PIPELINE)},
    ),
}
"""Model, knobs of training, and layouts on four processes."""


def check_like_one_process(
    execute: Execute, model: tuple[str, ...], gpus: int, layouts: dict[str, tuple[str, ...]], *knobs: str
) -> None:
    """Adam on adapters, of which B starts as zeros: an update that were not the same would be seen from the second step
    on."""
    run = (LORA, "finetune.rank=4", "optimizer=adamw", "optimizer.learning_rate=0.01", *model, *STEPS, *knobs)
    single, *others = execute(
        (*run, "strategy=single", "gpus=1", "batch_size_per_gpu=8"),
        *((*run, f"gpus={gpus}", f"batch_size_per_gpu={8 // gpus}", *layout) for layout in layouts.values()),
    )
    assert single["losses"][-1] < single["losses"][0] - 0.04
    for name, row in zip(layouts, others, strict=True):
        assert row["status"] == "ok", (name, row["error"])
        assert row["losses"] == pytest.approx(single["losses"], rel=1e-5), name


@needs("peft")
@pytest.mark.slow
def test_adapters_of_divided_layers_train_like_one_process(execute: Execute) -> None:
    check_like_one_process(execute, MODELS["gpt"], 2, ALONE)


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_adapters_of_all_dimensions_together_train_like_one_process(execute: Execute, family: str) -> None:
    check_like_one_process(execute, MODELS[family], 8, TOGETHER)


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", *LATENT_MODELS])
def test_adapters_beside_divided_experts_train_like_one_process(execute: Execute, name: str) -> None:
    check_like_one_process(execute, MODELS.get(name) or build_latent_model(name), 8, WITH_EXPERTS)


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
def test_adapters_train_like_one_process_by_every_schedule(execute: Execute) -> None:
    layouts = {
        name: (*MESH, PIPELINE, TENSOR, f"strategy.schedule={name}", "strategy.micro_batches=4")
        for name in ALL_SCHEDULES
    }
    check_like_one_process(execute, (*MODELS["llama"], "model.num_layers=4"), 4, layouts)


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_like_one_process_in_other_ways(execute: Execute, way: str) -> None:
    family, knobs, layouts = WAYS[way]
    check_like_one_process(execute, MODELS[family], 4, layouts, *knobs)


@needs("peft")
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "moe_tiny"])
def test_memory_of_divided_adapters_is_what_is_measured(execute: Execute, model: str) -> None:
    """All peaks that were seen, 28 of them, were predicted within 0.01 %."""
    layouts = {
        "gpt_tiny": {
            **TOGETHER,
            "gradients that are kept": (*MESH, PIPELINE, DDP, "optimizer.keep_gradients=true"),
            "several micro-batches": (
                *(*MESH, PIPELINE, TENSOR, "precision=bf16", "batch_size_per_gpu=2", "strategy.micro_batches=8"),
            ),
        },
        "moe_tiny": WITH_EXPERTS,
    }[model]
    runs = {name: (*ON_CPU, f"model={model}", *knobs, LORA) for name, knobs in layouts.items()}
    check_measured_memory(execute, runs, worst=0.001)


# How layers are divided


@pytest.mark.parametrize("family", ["gpt", "llama", "t5", "moe"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_only_adapters_are_trained_after_layers_are_divided(family: str, sequence_parallel: bool) -> None:
    config = compose_run_config(*MODELS[family], LORA, "finetune.rank=4", "strategy=single", "gpus=1")
    model = config.trained_model.build_model()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    init_rehearsal_group(2)
    try:
        MeshSplit(2, sequence_parallel, keeps_dtensors=True).divide_for_trace(config.trained_model, model)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == names
        assert names
        assert all(".lora_A." in name or ".lora_B." in name for name in names)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", ["gpt", "llama", "t5"])
@pytest.mark.parametrize("sequence_parallel", ["false", "true"])
def test_adapters_send_no_more_hidden_states(family: str, sequence_parallel: str) -> None:
    """Backward the gradients of what all ranks have whole are added up, which are much smaller."""
    sent: dict[tuple[str, str], list[tuple[str, float]]] = {}
    run = (*MODELS[family], *MESH, TENSOR, f"strategy.sequence_parallel={sequence_parallel}", "sequence_length=64")
    for finetune in ("full", "lora"):
        config = compose_run_config(*run, "gpus=2", "hardware=h100_80gb", "mode=predict", f"finetune={finetune}")
        segments = trace_step(build_trace_key(config), 16).segments
        hidden_bytes = 16 * 64 * 32 * config.precision.compute_itemsize
        for phase in ("forward", "backward"):
            events = [event for segment in segments if segment.phase == phase for event in segment.collectives]
            sent[finetune, phase] = sorted((event.kind, event.size) for event in events if event.size >= hidden_bytes)
    assert sent["full", "forward"]
    assert sent["lora", "forward"] == sent["full", "forward"]
    assert len(sent["lora", "backward"]) <= len(sent["full", "backward"])
