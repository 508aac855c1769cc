"""Adapters beside layers that ranks have parts of: they train like one process, in the memory that is predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import needs
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
pytestmark = needs("peft")

LORA = ("finetune=lora", "finetune.rank=4", "optimizer=adamw", "optimizer.learning_rate=0.01")


def check_adapters_like_one_process(
    execute: Execute, model: tuple[str, ...], gpus: int, layouts: dict[str, tuple[str, ...]], *extra: str
) -> None:
    single, *others = execute(
        (*LORA, *model, *STEPS, *extra, "strategy=single", "gpus=1", "batch_size_per_gpu=8"),
        *(
            (*LORA, *model, *STEPS, *extra, f"gpus={gpus}", f"batch_size_per_gpu={8 // gpus}", *knobs)
            for knobs in layouts.values()
        ),
    )
    assert single["status"] == "ok", single["error"]
    print(single["losses"])
    for layout, row in zip(layouts, others, strict=True):
        print(layout, row.get("losses"), row.get("error", "")[-600:])
    assert single["losses"][-1] < single["losses"][0] - 0.01
    for layout, row in zip(layouts, others, strict=True):
        assert row["status"] == "ok", (layout, row["error"])
        assert row["losses"] == pytest.approx(single["losses"], rel=2e-5), layout


TWO = {
    "fsdp tp2": (*MESH, "strategy.tensor=2", *WHOLE),
    "tp2+sequence": (*MESH, "strategy.tensor=2", DDP),
    "pp2": (*MESH, PIPELINE),
    "tensor_parallel": ("strategy=tensor_parallel", "strategy.degree=2"),
    "pipeline": ("strategy=pipeline", "strategy.stages=2"),
}


@pytest.mark.parametrize("family", ["gpt", "llama", "t5"])
def test_two(execute: Execute, family: str) -> None:
    check_adapters_like_one_process(execute, MODELS[family], 2, TWO)


EIGHT = {
    "pp2-fsdp2-tp2": (*MESH, TENSOR, PIPELINE),
    "ddp2-cp2-tp2": (*MESH, TENSOR, CONTEXT, DDP),
    "fsdp4-tp2": (*MESH, TENSOR),
    "zero1 tp2 pp2": (*MESH, TENSOR, PIPELINE, ZERO1),
    "tensor_parallel ddp": ("strategy=tensor_parallel", "strategy.degree=2", "strategy.data_parallel=ddp"),
    "tensor_parallel fsdp": ("strategy=tensor_parallel", "strategy.degree=2", "strategy.data_parallel=fsdp"),
    "pipeline fsdp": ("strategy=pipeline", "strategy.stages=2", "strategy.data_parallel=fsdp"),
    "pipeline ddp": ("strategy=pipeline", "strategy.stages=2", "strategy.data_parallel=ddp"),
}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_eight(execute: Execute, family: str) -> None:
    check_adapters_like_one_process(execute, MODELS[family], 8, EIGHT)


EXP = {
    "ep2": (*MESH, EXPERT),
    "ddp2-ep2-tp2": (*MESH, TENSOR, EXPERT, DDP),
    "spread": (*MESH, *SPREAD, EXPERT),
    "pp2": (*MESH, PIPELINE, EXPERT, TENSOR),
}


@pytest.mark.parametrize("family", ["moe", *LATENT_MODELS])
def test_exp(execute: Execute, family: str) -> None:
    model = MODELS[family] if family in MODELS else build_latent_model(family)
    check_adapters_like_one_process(execute, model, 8, EXP)


def test_memory(execute: Execute) -> None:
    from bench.prediction.predictor import predict_runs
    from tests.conftest import compose_run_config
    from tests.prediction.test_predicted_mesh import ON_CPU
    runs = {}
    for model in ("gpt_tiny", "llama_tiny"):
        for name, knobs in {**EIGHT, "pp accumulate bf16": (*MESH, PIPELINE, TENSOR, "precision=bf16", "batch_size_per_gpu=2", "strategy.micro_batches=8"), "ckpt": (*MESH, TENSOR, "activation_checkpointing=full"), "tp4": ("gpus=2", *MESH, TENSOR), "keep": (*MESH, PIPELINE, DDP, "optimizer.keep_gradients=true")}.items():
            runs[model, name] = (*ON_CPU, f"model={model}", *knobs, "finetune=lora")
    for name, knobs in EXP.items():
        runs["moe_tiny", name] = (*ON_CPU, "model=moe_tiny", *knobs, "finetune=lora")
    rows = execute(*runs.values())
    predictions = predict_runs([compose_run_config(*run) for run in runs.values()])
    for name, row, prediction in zip(runs, rows, predictions, strict=True):
        if row["status"] != "ok": print(name, row["error"][-300:]); continue
        print("MEM", name, "%.4f" % (prediction.memory.allocated.value / row["peak_allocated_bytes"]), row["peak_allocated_bytes"])
    assert 0
