"""The mesh: every kind of parallelism trains like one process, alone and together, and what is refused says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.core.errors import ImpossibleError, UsageError
from bench.models.materialize import take_part
from bench.models.routing import Routing
from bench.rank.engine import build_engine, build_micro_batches
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.mesh.experts import arrange_expert_parameter
from bench.strategies.mesh.layout import DEFAULT_ORDER, MeshLayout
from bench.strategies.pipeline.schedule import ALL_SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Timetable
from tests.conftest import SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5, compose_run_config, needs, run_command

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")
SGD = ("optimizer=sgd", "optimizer.learning_rate=1.0")
"""An update that is proportional to gradients: Adam's would hide a factor that all of a parameter's have."""

MODELS = {"gpt": SMALL_GPT, "llama": SMALL_LLAMA, "moe": (*SMALL_MOE, "model.num_layers=2"), "t5": SMALL_T5}
MESH = ("strategy=mesh",)
TENSOR, PIPELINE, CONTEXT, EXPERT = (f"strategy.{name}=2" for name in ("tensor", "pipeline", "context", "expert"))
DDP, ZERO1, SHARDS = "strategy.data=ddp", "strategy.data=zero1", "strategy.shards=2"
WHOLE = ("strategy.sequence_parallel=false", "strategy.loss_parallel=false")
CLIP = "gradient_clip_norm=0.3"
TENSOR_OUTSIDE = "tensor-pipeline-replicas-shards-expert-context"

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
    "pp2-ep2-tp2+1f1b+sequence": (TENSOR, PIPELINE, EXPERT),
    "fsdp2-ep2-cp2+ring": (EXPERT, CONTEXT),
    "replicas2-fsdp2-ep2": (EXPERT, "strategy.replicas=2"),
}


SPREAD = (TENSOR, "strategy.expert_tensor_parallel=false")
"""Whole experts on tensor-parallel ranks."""
WITH_WHOLE_EXPERTS = {
    "fsdp2-tp2+sequence+whole_experts": SPREAD,
    "ddp2-tp2+sequence+whole_experts": (*SPREAD, DDP),
    "zero1x2-tp2+sequence+whole_experts": (*SPREAD, ZERO1),
    "ep2-tp2+sequence+whole_experts": (*SPREAD, EXPERT),
    "tp2-ep2+sequence+whole_experts": (*SPREAD, EXPERT, DDP, f"strategy.order={TENSOR_OUTSIDE}"),
}
EIGHT_WITH_WHOLE_EXPERTS = {
    "ddp2-ep2-tp2+sequence+whole_experts": (*SPREAD, EXPERT, DDP),
    "fsdp2-ep2-tp2+sequence+whole_experts": (*SPREAD, EXPERT),
    "pp2-ep2-tp2+1f1b+sequence+whole_experts": (*SPREAD, PIPELINE, EXPERT),
    "ep2-cp2-tp2+ring+sequence+whole_experts": (*SPREAD, EXPERT, CONTEXT),
    "fsdp2-tp4+sequence+whole_experts": (*SPREAD, "strategy.tensor=4"),
}

LATENT_SIZES = (
    *("kv_rank=16", "rotary_size=8", "head_size=16", "num_kv_heads=4", "num_shared_experts=2"),
    *("num_dense_layers=1", "dense_intermediate_size=96"),
)
LATENT_MODELS = {
    "deepseek_v2": ("architecture=deepseek_v2", *LATENT_SIZES),
    "deepseek_v3": ("architecture=deepseek_v3", *LATENT_SIZES, "query_rank=24", "expert_groups=2"),
}
LATENT_ATTENTION = {
    "fsdp2-tp2": (TENSOR, *WHOLE),
    "ddp2-tp2+sequence": (TENSOR, DDP),
    "ep2-tp2+sequence": (TENSOR, EXPERT),
    "zero1x2-tp2+sequence+whole_experts": (*SPREAD, ZERO1),
    "ep2-tp2+sequence+whole_experts": (*SPREAD, EXPERT),
}
EIGHT_WITH_LATENT_ATTENTION = {
    "pp2-ep2-tp2+1f1b+sequence": (TENSOR, PIPELINE, EXPERT),
    "pp2-fsdp2-tp2+1f1b": (TENSOR, PIPELINE, *WHOLE),
    "pp2-ep2-tp2+1f1b+sequence+whole_experts": (*SPREAD, PIPELINE, EXPERT),
    "fsdp2-tp4+sequence+whole_experts": (*SPREAD, "strategy.tensor=4"),
}


def check_like_one_process(
    execute: Execute, model: tuple[str, ...], gpus: int, layouts: dict[str, tuple[str, ...]], rel: float = 1e-5
) -> None:
    """Runs of a mesh, by what they come to, have the losses of one process with the same knobs of training."""
    single, *others = execute(
        (*SGD, *model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"),
        *(
            (*SGD, *model, *STEPS, *MESH, f"gpus={gpus}", f"batch_size_per_gpu={8 // gpus}", *knobs)
            for knobs in layouts.values()
        ),
    )
    assert single["losses"][-1] < single["losses"][0] - max(0.015, 10 * rel)  # many times what may be off
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
@pytest.mark.parametrize("routing", ["balanced", "router"])
def test_whole_experts_on_tensor_parallel_ranks_train_like_one_process(execute: Execute, routing: str) -> None:
    model = (*MODELS["moe"], f"model.routing={routing}", CLIP)
    check_like_one_process(execute, model, 4, WITH_WHOLE_EXPERTS, rel=1e-6)  # partial gradients of routers: 4e-6


@pytest.mark.long
@pytest.mark.slow
def test_whole_experts_together_with_all_else_train_like_one_process(execute: Execute) -> None:
    model = (*MODELS["moe"], "model.num_kv_heads=4", CLIP)
    check_like_one_process(execute, model, 8, EIGHT_WITH_WHOLE_EXPERTS, rel=1e-6)


@pytest.mark.long
def build_latent_model(architecture: str, *fields: str) -> tuple[str, ...]:
    return (*SMALL_MOE, *(f"model.{field}" for field in (*LATENT_MODELS[architecture], *fields)), CLIP)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("architecture", LATENT_MODELS)
def test_attention_of_latents_is_divided_by_heads_and_trains_like_one_process(
    execute: Execute, architecture: str
) -> None:
    """With what all heads share, and with experts that every token goes to."""
    check_like_one_process(execute, build_latent_model(architecture, "num_layers=2"), 4, LATENT_ATTENTION, rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("architecture", LATENT_MODELS)
def test_attention_of_latents_with_all_else_trains_like_one_process(execute: Execute, architecture: str) -> None:
    model = build_latent_model(architecture, "num_layers=3", "routing=router")
    check_like_one_process(execute, model, 8, EIGHT_WITH_LATENT_ATTENTION, rel=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_compiled_attention_of_latents_trains_like_one_process(execute: Execute) -> None:
    """Layers of two kinds, whose parts are compiled one by one: of each mesh there has to be one alone."""
    model = (*build_latent_model("deepseek_v3", "num_layers=2"), "compile=true")
    check_like_one_process(execute, model, 2, {"tp2+sequence+whole_experts": SPREAD})


@pytest.mark.long
@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_all_ranks(execute: Execute) -> None:
    layouts = {**EIGHT, **EIGHT_WITH_EXPERTS}
    names = ("pp2-fsdp2-tp2+1f1b+sequence", "ddp2-ep4", "fsdp2-ep2-cp2+ring")
    check_like_one_process(execute, (*MODELS["moe"], CLIP), 8, {name: layouts[name] for name in names})


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "dim"), [("gpt", CONTEXT), ("llama", TENSOR), ("moe", EXPERT), ("t5", SHARDS)])
def test_every_schedule_trains_like_one_process(execute: Execute, family: str, dim: str) -> None:
    other, suffix = {
        CONTEXT: ("cp2", "+ring"),
        TENSOR: ("tp2", "+sequence"),
        EXPERT: ("ep2", ""),
        SHARDS: ("fsdp2", ""),
    }[dim]
    blocks = ("model.num_encoder_layers=4", "model.num_decoder_layers=6") if family == "t5" else ("model.num_layers=6",)
    schedules = set(ALL_SCHEDULES) - set(SPLIT_BACKWARD_SCHEDULES if family == "t5" else ())
    layouts = {
        f"pp2-{other}+{schedule}{suffix}": (PIPELINE, dim, f"strategy.schedule={schedule}", "strategy.micro_batches=4")
        for schedule in sorted(schedules - {"1f1b"})
    }
    check_like_one_process(execute, (*MODELS[family], *blocks), 4, layouts)


@pytest.mark.long
@pytest.mark.slow
def test_heads_that_share_keys_are_divided_and_train_like_one_process(execute: Execute) -> None:
    """Four heads for queries and two for keys: two ranks have one of those each, four ranks one each twice."""
    model = (*MODELS["llama"], "model.num_heads=4", "model.num_kv_heads=2")
    exchanged = "strategy.context_form=all_to_all"
    layouts = {"fsdp2-cp2+all_to_all": (CONTEXT, exchanged), "cp4+all_to_all": ("strategy.context=4", exchanged)}
    check_like_one_process(execute, model, 4, layouts)


# With other ways to train, on four

OUTSIDE_IN = "strategy.order=tensor-context-expert-shards-replicas-pipeline"

CHECKPOINTED = {
    "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE),
    "fsdp2-cp2+all_to_all": (CONTEXT, "strategy.context_form=all_to_all"),
}
WAYS: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]], float]] = {
    "accumulation": (
        "moe",
        ("gradient_accumulation=2",),
        {
            "ddp2-ep2": (EXPERT, DDP),
            "ep2-tp2+sequence": (TENSOR, EXPERT),
            "replicas2-cp2+all_gather": (CONTEXT, "strategy.replicas=2", "strategy.context_form=all_gather"),
            "fsdp2-tp2+sequence": (TENSOR, "gradient_accumulation_sync=true"),
        },
        1e-5,
    ),
    "full": (
        "llama",
        ("activation_checkpointing=full", "model.num_layers=4"),
        {
            **CHECKPOINTED,
            "pp2-fsdp2+zbv_zero_bubble": (
                *(PIPELINE, "strategy.schedule=zbv_zero_bubble", "strategy.micro_batches=4"),
            ),
        },
        1e-5,
    ),
    "stages": (
        "llama",
        ("model.num_layers=6",),
        {
            "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE, "strategy.last_stage_less_blocks=2"),
            "pp2-fsdp2+interleaved_1f1b": (
                *(PIPELINE, "strategy.schedule=interleaved_1f1b"),
                *("strategy.first_stage_less_blocks=1", "strategy.last_stage_less_blocks=1"),
            ),
        },
        1e-5,
    ),
    "selective": ("gpt", ("activation_checkpointing=selective",), CHECKPOINTED, 1e-5),
    "operators": ("moe", ("activation_checkpointing=operators",), {"ep2-tp2+sequence": (TENSOR, EXPERT)}, 1e-5),
    "every_2": ("llama", ("activation_checkpointing=every_2",), CHECKPOINTED, 1e-5),
    "operators_every_2": ("llama", ("activation_checkpointing=operators_every_2",), CHECKPOINTED, 1e-5),
    "masks": (  # of whole sequences, of which a stage receives a part of the hidden states
        "llama",
        ("model.architecture=gemma2", "model.attention=eager", "model.sliding_window=8", "model.num_layers=4"),
        {
            "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE),
            "pp2-tp2+interleaved_zero_bubble+sequence": (
                *(TENSOR, PIPELINE, "strategy.schedule=interleaved_zero_bubble"),
            ),
        },
        1e-5,
    ),
    "t5": ("t5", (), {"fsdp2-tp2+sequence": (TENSOR,), "pp2-ddp2+1f1b": (PIPELINE, DDP)}, 1e-5),
    "order": (
        "moe",
        (),
        {
            "tp2-pp2+gpipe": (OUTSIDE_IN, *WHOLE, TENSOR, PIPELINE, "strategy.schedule=gpipe"),
            "tp2-ep2+sequence": (OUTSIDE_IN, TENSOR, EXPERT),
            "tp2-cp2+ring": (OUTSIDE_IN, *WHOLE, TENSOR, CONTEXT),
            "tp2-fsdp2+sequence": (OUTSIDE_IN, TENSOR),
        },
        1e-5,
    ),
    "lora": (
        "llama",
        ("finetune=lora", "optimizer.learning_rate=10"),
        {"fsdp2-cp2+ring_lora": (CONTEXT,), "zero1x4_lora": (ZERO1,)},
        1e-5,
    ),
    "compile": (
        "llama",
        ("compile=true",),
        {
            "pp2-fsdp2+1f1b": (PIPELINE,),
            "fsdp2-tp2+sequence": (TENSOR,),
            "ddp2-tp2": (TENSOR, DDP, *WHOLE),
            "fsdp2-cp2+all_to_all": (CONTEXT, "strategy.context_form=all_to_all"),
            "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE, "activation_checkpointing=full"),
        },
        1e-5,
    ),
    "compile, in parts of blocks": (
        "moe",
        ("compile=true",),
        {
            "fsdp2-cp2+ring": (CONTEXT,),
            "ddp2-cp2+all_gather": (CONTEXT, DDP, "strategy.context_form=all_gather", "activation_checkpointing=full"),
            "cp2-tp2+ring+sequence": (TENSOR, CONTEXT),
            "fsdp2-ep2": (EXPERT, "activation_checkpointing=full"),
            "ep2-tp2+sequence": (TENSOR, EXPERT),
            "pp2-ep2+1f1b": (PIPELINE, EXPERT),
        },
        1e-5,
    ),
    "bf16": (
        "moe",
        ("precision=bf16",),
        {
            "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE),
            "fsdp2-ep2": (EXPERT,),
            "ddp2-cp2+ring": (CONTEXT, DDP),
        },
        1e-2,
    ),
    "fp16": (
        "moe",
        ("precision=fp16", CLIP),
        {
            "pp2-tp2+1f1b+sequence": (TENSOR, PIPELINE),
            "fsdp2-ep2": (EXPERT,),
            "ddp2-cp2+ring": (CONTEXT, DDP),
        },
        1e-2,
    ),
}
"""Model, knobs of training, layouts, and how far losses may be off."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=needs("peft")) if way == "lora" else way for way in WAYS])
def test_other_ways_to_train_are_those_of_one_process(execute: Execute, way: str) -> None:
    family, knobs, layouts, rel = WAYS[way]
    check_like_one_process(execute, (*MODELS[family], *knobs), 4, layouts, rel)


def test_a_checkpointed_block_with_experts_is_computed_again_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch before 2.13 too, whose FSDP2 does not cast inputs of what backward computes again."""
    pre_forward = FSDPState._pre_forward

    def run_older_pre_forward(
        state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = pre_forward(state, module, args, kwargs)
        return (args, kwargs) if state._training_state == TrainingState.PRE_BACKWARD else inputs

    monkeypatch.setattr(FSDPState, "_pre_forward", run_older_pre_forward)
    knobs = ("precision=bf16", "activation_checkpointing=full", "gpus=4", "mode=rehearse")
    config = compose_run_config(*MODELS["moe"], *STEPS, *MESH, EXPERT, *knobs)
    device = torch.device("cpu")
    init_rehearsal_group(config.gpus)
    try:
        engine = build_engine(
            config.model,
            config.strategy,
            config.precision,
            config.optimizer,
            device=device,
            world_size=config.gpus,
            activation_checkpointing=config.activation_checkpointing,
            rehearsed=True,
        )
        loss = engine.step(build_micro_batches(config.model, batch_size=1, sequence_length=32, device=device))
        assert loss is not None
        assert loss.isfinite()
    finally:
        dist.destroy_process_group()


# What decides which rank does what


def test_ranks_of_the_last_dimension_are_neighbours_and_share_sequences() -> None:
    degrees = {"pipeline": 2, "replicas": 1, "shards": 2, "expert": 2, "context": 1, "tensor": 2}
    layout = MeshLayout(tuple((name, degrees[name]) for name in DEFAULT_ORDER))
    assert layout.find_coordinates(0) == dict.fromkeys(degrees, 0)
    assert layout.find_coordinates(13) == {
        **dict.fromkeys(degrees, 0),
        "pipeline": 1,
        "expert": 0,
        "shards": 1,
        "tensor": 1,
    }
    # Tensor-parallel neighbours and stages have one share; shards and experts different ones.
    assert [layout.find_batch_share(rank) for rank in range(16)] == [(rank // 2 % 4, 4) for rank in range(16)]
    turned = MeshLayout(tuple(reversed(layout.degrees)))
    assert [turned.find_batch_share(rank)[0] for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]


@pytest.mark.parametrize("rank", [0, 6, 7])
def test_uneven_rows_are_those_that_fsdp_counts(rank: int) -> None:
    """GPT-2's vocabulary: a tensor-parallel rank has 25,129 or 25,128 rows, and FSDP2 shards these over four."""
    rows = torch.arange(50257)
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4, 2))
        expected = rows.chunk(2)[rank % 2].chunk(4)[rank // 2]
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        like = DTensor.from_local(expected.to("meta"), mesh, placements, run_check=False, shape=rows.shape, stride=(1,))
        assert torch.equal(take_part(rows, like).to_local(), expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.slow
def test_rows_that_ranks_do_not_have_evenly_train_like_one_process(execute: Execute) -> None:
    """In optimizers that compare what parameters and gradients have of them."""
    run = (*SGD, *MODELS["llama"], *STEPS, "model.vocabulary_size=127", "optimizer.implementation=foreach")
    single, meshed = execute(
        (*run, "strategy=single", "gpus=1", "batch_size_per_gpu=6"),
        (*run, *MESH, TENSOR, *WHOLE, "gpus=6", "batch_size_per_gpu=1"),
    )
    assert meshed["status"] == "ok", meshed["error"]
    assert meshed["effective_strategy"] == "mesh/fsdp3-tp2"
    assert meshed["losses"] == pytest.approx(single["losses"], rel=1e-5)


def test_degrees_that_are_left_out_follow_and_the_row_has_all() -> None:
    config = compose_run_config(*MODELS["moe"], *MESH, "gpus=16", TENSOR, EXPERT, "strategy.pipeline=1")
    strategy: Any = config.strategy
    assert (strategy.shards, strategy.replicas, strategy.sharding_factor) == (4, 1, 16)
    assert config.effective_strategy == "mesh/fsdp4-ep2-tp2+sequence"
    replicated: Any = compose_run_config(*MODELS["moe"], *MESH, "gpus=16", TENSOR, EXPERT, DDP).strategy
    assert (replicated.shards, replicated.replicas, replicated.sharding_factor) == (1, 4, 4)
    recorded = config.to_dict()["strategy"]
    assert {name: recorded[name] for name in ("tensor", "pipeline", "context", "expert", "replicas", "shards")} == {
        "tensor": 2,
        "pipeline": 1,
        "context": 1,
        "expert": 2,
        "replicas": 1,
        "shards": 4,
    }
    assert recorded["order"].startswith("pipeline-")


KNOBS = {
    "order": "strategy.order=tensor-pipeline-replicas-shards-expert-context",
    "schedule": "strategy.schedule=gpipe",
    "micro-batches": "strategy.micro_batches=4",
    "form": "strategy.context_form=all_gather",
    "sequence": "strategy.sequence_parallel=false",
    "loss": "strategy.loss_parallel=false",
    "degrees": "strategy.replicas=2",
}


def test_every_knob_is_another_run_and_one_without_effect_is_not() -> None:
    run = (*MODELS["gpt"], *MESH, "gpus=16", "sequence_length=32", TENSOR, PIPELINE, CONTEXT)
    ids = [compose_run_config(*run).run_id, *(compose_run_config(*run, knob).run_id for knob in KNOBS.values())]
    assert len(set(ids)) == len(ids)
    flat = (*MODELS["gpt"], *MESH, "gpus=4")
    same = (flat, (*flat, SPREAD[1]), *((*flat, KNOBS[name]) for name in ("schedule", "form", "sequence", "loss")))
    assert len({compose_run_config(*overrides).run_id for overrides in same}) == 1
    divided, whole = ((*MODELS["moe"], *MESH, "gpus=4", *knobs) for knobs in ((TENSOR,), SPREAD))
    assert compose_run_config(*divided).run_id != compose_run_config(*whole).run_id


def test_micro_batches_without_a_pipeline_are_predicted_alone() -> None:
    flat = (*MODELS["gpt"], *MESH, "gpus=4", KNOBS["micro-batches"])
    for mode in ("measure", "rehearse"):
        with pytest.raises(ImpossibleError, match=f"micro_batches=4 is not valid with mode={mode}.*accumulation=4"):
            compose_run_config(*flat, f"mode={mode}")
    assert compose_run_config(*flat, "mode=predict", "hardware=h100_80gb").strategy.timetable is not None


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_v_shaped_schedules_turn_at_the_last_rank(schedule: str) -> None:
    timetable = Timetable(schedule, ranks=4, virtual_stages=2, micro_batches=8)
    expected = generate_stage_to_rank_mapping(4, 8, style="v")
    assert {stage: timetable.find_rank_of_stage(stage) for stage in range(8)} == expected


def test_each_rank_has_gate_and_up_of_its_part_of_every_expert() -> None:
    gate, up = torch.arange(24.0).reshape(2, 3, 4, 1).transpose(0, 1)[:2, :, :, :].unbind(1)
    whole = torch.cat([gate, up], dim=1)
    arranged = arrange_expert_parameter("layers.0.mlp.experts.gate_up_proj", whole, 2)
    for rank, part in enumerate(arranged.chunk(2, dim=1)):
        expected = torch.cat([each.chunk(2, dim=1)[rank] for each in (gate, up)], dim=1)
        assert torch.equal(part, expected)
    assert arrange_expert_parameter("layers.0.mlp.experts.down_proj", whole, 2) is whole


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_parts_of_every_sequence_go_to_the_experts_of_their_positions(kind: str) -> None:
    routing = Routing(kind, 1.0, sequence_length=8)
    whole = routing.choose_experts(torch.zeros(16, 2, dtype=torch.long), 8)
    parts = [routing.choose_experts(torch.zeros(4, 2, dtype=torch.long), 8, (part, 4)) for part in range(4)]
    assert torch.equal(torch.cat([part.unflatten(0, (2, 2)) for part in parts], dim=1).flatten(0, 1), whole)


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_a_part_of_a_sequence_goes_to_the_experts_of_its_positions(kind: str) -> None:
    whole = Routing(kind, 1.0, sequence_length=8)
    positions = torch.tensor([0, 1, 6, 7])
    part = Routing(kind, 1.0, sequence_length=4, positions=positions, num_parts=2)
    routed = torch.zeros(8, 2, dtype=torch.long)
    assert torch.equal(part.choose_experts(routed[:4], 8), whole.choose_experts(routed, 8)[positions])


# What is refused

RUN = (*MESH, "gpus=8", "sequence_length=32", "batch_size_per_gpu=1")
REFUSED = {
    "product": (("gpt", "strategy.tensor=3"), "gpus=8: 1, 2, 4, 8"),
    "both given": (
        ("gpt", "strategy.shards=2", "strategy.replicas=2"),
        "product is 4: choose degrees whose product is 8",
    ),
    "order": (("gpt", "strategy.order=tensor-pipeline"), "strategy.order=tensor-pipeline .*each of pipeline"),
    "ddp shards": (("gpt", DDP, "strategy.shards=2"), "strategy.shards=2 .*shards no parameters"),
    "zero1 experts": (("moe", ZERO1, EXPERT), "ZeroRedundancyOptimizer divides states among the ranks of one"),
    "ddp zero bubble": (
        ("gpt", PIPELINE, DDP, "strategy.schedule=zbv_zero_bubble", "model.num_layers=4"),
        "without the hooks that tell DDP",
    ),
    "dropout": (("gpt", TENSOR, "model.dropout=0.1"), "drop out the same"),
    "no experts": (("gpt", EXPERT), "which has no experts"),
    "experts": (("moe", EXPERT, "model.num_experts=7"), "a divisor of model.num_experts=7: 1, 7"),
    "whole experts": (
        ("moe", *SPREAD, EXPERT, "model.num_experts=6"),
        "since model.num_experts=6 are spread over both: choose degrees whose product is one of 1, 2, 3, 6",
    ),
    "whole experts of none": (
        ("llama", *SPREAD),
        "strategy.expert_tensor_parallel=false .*has no experts: choose true",
    ),
    "whole sequences": (
        ("moe", *SPREAD, "strategy.sequence_parallel=false"),
        "would send the same tokens to the experts",
    ),
    "heads": (("llama", "strategy.tensor=8"), "strategy.tensor=8 is not valid with model.num_heads=4"),
    "undivided": (("llama", TENSOR, "model.architecture=phi3"), "has one matrix for several"),
    "undivided experts": (("moe", TENSOR, "model.architecture=gpt_oss", "model.attention=eager"), "has a sink"),
    "biases": (("t5", CONTEXT), "adds a bias for each pair of positions"),
    "window": (("llama", CONTEXT, "model.architecture=mistral", "model.sliding_window=8"), "a sliding window"),
    "eager": (("gpt", CONTEXT, "model.attention=eager"), "needs a mask of whole sequences"),
    "length": (("gpt", CONTEXT, "sequence_length=30"), "a multiple of 4"),
    "heads of all_to_all": (
        ("gpt", "strategy.context=8", "strategy.context_form=all_to_all"),
        "4 heads on each rank",
    ),
    "blocks": (("gpt", "strategy.pipeline=8"), "which has 2 blocks"),
    "t5 stages": (("t5", PIPELINE, TENSOR), "copy the table of position biases"),
    "t5 backward": (
        ("t5", PIPELINE, "strategy.schedule=zbv_zero_bubble"),
        "what several blocks share more than once: choose gpipe, 1f1b, interleaved_1f1b, looped_bfs.",
    ),
    "micro-batches": (("gpt", PIPELINE, "strategy.micro_batches=4"), "a divisor of the 2 sequences"),
    "1f1b": (("gpt", PIPELINE, "strategy.micro_batches=1"), "at least one per stage, 2"),
    "dualpipev": (
        ("gpt", PIPELINE, "strategy.schedule=dualpipev", "strategy.micro_batches=2", "model.num_layers=4"),
        "at least one per stage, 4",
    ),
    "v": (
        ("gpt", PIPELINE, "strategy.schedule=zbv_zero_bubble", "strategy.virtual_stages=3", "model.num_layers=6"),
        "strategy.virtual_stages=3 .*2, or null",
    ),
    "accumulation": (("gpt", PIPELINE, "gradient_accumulation=2"), "accumulate gradients already"),
    "chunked": (("gpt", "loss=chunked"), "loss=chunked is not valid for strategy=mesh"),
    "offload": (("gpt", "activation_offload=true"), "activation_offload=true is not valid for strategy=mesh"),
    "compile, expert, operators": (
        ("moe", EXPERT, "compile=true", "activation_checkpointing=operators"),
        "recomputes its parts as a whole: choose none or full",
    ),
    "compile, selective": (
        ("llama", TENSOR, "compile=true", "activation_checkpointing=selective"),
        "keep the mesh among the tensors for backward: choose none or full",
    ),
    "compiled zero bubble": (
        (
            *("gpt", PIPELINE, "strategy.schedule=interleaved_zero_bubble", "model.num_layers=4", "compile=true"),
            "batch_size_per_gpu=2",
        ),
        "does not split the backward of compiled stages",
    ),
    "asynchronous": (
        ("gpt", TENSOR, "strategy.async_tensor_parallel=true"),
        "symmetric memory, which it has between CUDA",
    ),
    "asynchronous alone": (("gpt", "strategy.async_tensor_parallel=true"), "false, or strategy.tensor of 2 or more"),
    "fused": (("gpt", "optimizer=sgd", "optimizer.implementation=fused"), "whose parameters are DTensors"),
    "reduce": (("gpt", DDP, "precision=bf16", "precision.reduce=bf16"), "reduces gradients as they are stored"),
    "adapters": (
        ("llama", TENSOR, "finetune=lora", "finetune.dropout=0.1"),
        "dropout=0.1 is not valid: choose 0.0",
    ),
    "quantised": (("llama", "finetune=qlora"), "finetune=qlora is not valid with strategy=mesh"),
    "factor": (("gpt", "strategy.sharding_factor=4"), "auto: the degrees spread a copy over 8 of gpus=8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(name: str) -> None:
    (model, *knobs), message = REFUSED[name]
    with pytest.raises((ImpossibleError, UsageError), match=message):
        compose_run_config(*MODELS[model], *RUN, *knobs)


@pytest.mark.slow
def test_a_refusal_on_the_command_line_is_one_sentence() -> None:
    finished = run_command("bench.run", *MODELS["moe"], *RUN, ZERO1, EXPERT)
    assert finished.returncode == 2
    assert "ZeroRedundancyOptimizer" in finished.stderr
    assert "Traceback" not in finished.stderr
