"""The mesh: every kind of parallelism trains like one process, alone and together, and what is refused says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.strategies.pipeline.schedule import ALL_SCHEDULES
from tests.conftest import SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")
SGD = ("optimizer=sgd", "optimizer.learning_rate=1.0")
"""An update that is proportional to gradients: Adam's would hide a factor that all of a parameter's have."""

MODELS = {"gpt": SMALL_GPT, "llama": SMALL_LLAMA, "moe": (*SMALL_MOE, "model.num_layers=2"), "t5": SMALL_T5}
MESH = ("strategy=mesh",)
TENSOR, PIPELINE, CONTEXT, EXPERT = (f"strategy.{name}=2" for name in ("tensor", "pipeline", "context", "expert"))
DDP, ZERO1 = "strategy.data=ddp", "strategy.data=zero1"
WHOLE = ("strategy.sequence_parallel=false", "strategy.loss_parallel=false")
CLIP = "gradient_clip_norm=0.3"

EIGHT = {
    "pp2-fsdp2-tp2+1f1b+sequence": (TENSOR, PIPELINE),
    "ddp2-cp2-tp2+ring+sequence": (TENSOR, CONTEXT, DDP),
    "pp2-fsdp2-cp2+1f1b+ring": (PIPELINE, CONTEXT),
    "pp2-cp2-tp2+1f1b+ring": (TENSOR, PIPELINE, CONTEXT, *WHOLE),
}
EIGHT_WITH_EXPERTS = {
    "fsdp4-ep2": (EXPERT,),
    "ddp2-ep4": ("strategy.expert=4", DDP),
    "ddp2-ep2-tp2+sequence": (TENSOR, EXPERT, DDP),
    "pp2-fsdp2-ep2+1f1b": (PIPELINE, EXPERT),
    "pp2-ep2-tp2+1f1b": (TENSOR, PIPELINE, EXPERT, *WHOLE),
    "replicas2-fsdp2-ep2": (EXPERT, "strategy.replicas=2"),
}


def check_like_one_process(
    execute: Execute, model: tuple[str, ...], gpus: int, layouts: dict[str, tuple[str, ...]], rel: float = 1e-5
) -> None:
    """Runs of a mesh, by what they come to, have the losses of one process with the same knobs of training."""
    single, *others = execute(
        (*model, *STEPS, *SGD, "strategy=single", "gpus=1", "batch_size_per_gpu=8"),
        *(
            (*model, *STEPS, *SGD, *MESH, f"gpus={gpus}", f"batch_size_per_gpu={8 // gpus}", *knobs)
            for knobs in layouts.values()
        ),
    )
    assert single["losses"][-1] < single["losses"][0] - 0.1
    for layout, row in zip(layouts, others, strict=True):
        assert row["status"] == "ok", (layout, row["error"])
        assert row["effective_strategy"] == f"mesh/{layout}"
        assert row["losses"] == pytest.approx(single["losses"], rel=rel), layout


# A dimension alone, on two processes


@pytest.mark.slow
def test_each_dimension_alone_trains_like_one_process(execute: Execute) -> None:
    check_like_one_process(
        execute,
        MODELS["moe"],
        2,
        {
            "tp2": (TENSOR, *WHOLE),
            "pp2+1f1b": (PIPELINE,),
            "cp2+all_gather": (CONTEXT, "strategy.context_form=all_gather"),
            "cp2+all_to_all": (CONTEXT, DDP, "strategy.context_form=all_to_all"),
            "ep2": (EXPERT, DDP),
            "zero1x2": (ZERO1,),
        },
    )


# Together, on eight


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama", "moe"])
def test_dimensions_together_train_like_one_process(execute: Execute, family: str) -> None:
    check_like_one_process(execute, MODELS[family], 8, EIGHT)


@pytest.mark.long
@pytest.mark.slow
def test_experts_together_with_all_else_train_like_one_process(execute: Execute) -> None:
    check_like_one_process(execute, MODELS["moe"], 8, EIGHT_WITH_EXPERTS)


@pytest.mark.long
@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_all_ranks(execute: Execute) -> None:
    layouts = {**EIGHT, **EIGHT_WITH_EXPERTS}
    names = ("pp2-fsdp2-tp2+1f1b+sequence", "ddp2-ep4", "pp2-ep2-tp2+1f1b")
    check_like_one_process(execute, (*MODELS["moe"], CLIP), 8, {name: layouts[name] for name in names})


SPLIT_SCHEDULES = [schedule for schedule in ALL_SCHEDULES if schedule != "1f1b"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "dim"), [("gpt", CONTEXT), ("llama", TENSOR), ("moe", EXPERT)])
def test_every_schedule_trains_like_one_process(execute: Execute, family: str, dim: str) -> None:
    mesh = {CONTEXT: "fsdp2-cp2", TENSOR: "fsdp2-tp2", EXPERT: "fsdp2-ep2"}[dim]
    suffix = {CONTEXT: "+ring", TENSOR: "+sequence", EXPERT: ""}[dim]
    layouts = {
        f"pp2-{mesh}+{schedule}{suffix}": (PIPELINE, dim, f"strategy.schedule={schedule}", "strategy.micro_batches=4")
        for schedule in SPLIT_SCHEDULES
    }
    check_like_one_process(execute, (*MODELS[family], "model.num_layers=4"), 8, layouts)
