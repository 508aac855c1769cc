"""Adapters beside frozen and quantised weights: what they compute, what they need, what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core import processes
from bench.core.errors import UsageError
from bench.finetune import adapters, family
from bench.finetune.quantised import count_scale_bytes
from bench.launch.local import LocalLauncher
from bench.models.materialize import Materializer
from bench.predict import main
from bench.prediction.predictor import predict_run
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace.step_trace import trace_step
from bench.rank.engine import build_engine
from bench.reporting.page.rerun_command import list_overrides
from tests.conftest import CPU, SMALL_GPT, SMALL_T5, compose_run_config, needs
from tests.models.test_hf import CONFIGS
from tests.strategies.test_mesh import build_latent_model

Execute = Callable[..., list[dict[str, Any]]]

# Weights of 4 bits need layers that are a multiple of 64 wide on a CPU.
WIDE_T5 = (*SMALL_T5, "model.d_model=64", "model.d_kv=16")
WIDE_GPT = (*SMALL_GPT, "model.hidden_size=64")

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-2")


needs_peft = needs("peft")
needs_both = needs("peft", "bitsandbytes")


def assert_memory_as_predicted(record: dict[str, Any], run_overrides: tuple[str, ...]) -> None:
    expected = predict_run(compose_run_config(*run_overrides)).memory.allocated.value
    assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.02), run_overrides


@pytest.mark.long
@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (SMALL_T5, ("ddp", "zero1", "fsdp", "fsdp1", "fsdp1 recomputed")),
        (SMALL_GPT, ("fsdp", "fsdp1", "hybrid", "alone", "recomputed", "bf16")),
    ],
    ids=["t5", "gpt"],
)
def test_adapters_learn_the_same_everywhere_in_the_memory_that_is_predicted(
    execute: Execute, model: Any, names: tuple[str, ...]
) -> None:
    lora = (*model, *STEPS, "finetune=lora", "batch_size_per_gpu=2", "gpus=4")
    overrides_by_name = {
        "ddp": (*lora, "strategy=ddp"),
        "zero1": (*lora, "strategy=zero1"),
        "fsdp": (*lora, "strategy=fsdp"),
        "fsdp1": (*lora, "strategy=fsdp1"),
        "fsdp1 recomputed": (*lora, "strategy=fsdp1", "activation_checkpointing=full"),
        "hybrid": (*lora, "strategy=fsdp1", "strategy.sharding_factor=2"),
        "recomputed": (*lora, "strategy=fsdp", "strategy.sharding_factor=1", "activation_checkpointing=full"),
        "alone": (*lora, "strategy=fsdp", "mode=rehearse"),
        "bf16": (*lora, "strategy=ddp", "precision=bf16"),
    }
    whole = (*model, *STEPS, "strategy=single", "batch_size_per_gpu=8")
    full, single, *others = execute(whole, (*whole, "finetune=lora"), *(overrides_by_name[name] for name in names))
    runs = dict(zip(names, others, strict=True))
    assert_memory_as_predicted(single, (*whole, "finetune=lora"))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        assert_memory_as_predicted(record, overrides_by_name[name])
        if name not in ("alone", "bf16"):
            assert record["losses"] == pytest.approx(single["losses"], rel=1e-6), name
    # Adapters change nothing at first, then learn, another way than the whole model.
    assert single["losses"][0] == pytest.approx(full["losses"][0], rel=1e-6)
    assert single["losses"][-1] < single["losses"][0] - 0.01
    assert single["losses"][-1] != pytest.approx(full["losses"][-1], rel=1e-3)
    assert single["peak_allocated_bytes"] < full["peak_allocated_bytes"]
    assert single["environment"]["packages"]["peft"]
    assert runs["fsdp"]["effective_strategy"] == "fsdp/full_shard_lora"
    if "alone" in runs:
        assert runs["alone"]["peak_allocated_bytes"] == runs["fsdp"]["ranks"][0]["peak_allocated_bytes"]


@needs_peft
@pytest.mark.slow
def test_adapters_in_fp32_beside_weights_in_bf16_need_the_memory_that_is_predicted(execute: Execute) -> None:
    """In every strategy that takes them; dropout draws other elements on every rank, and its masks are held."""
    lora = (*SMALL_GPT, *STEPS, "finetune=lora", "precision=bf16_pure", "finetune.fp32_adapters=true")
    runs = [(*lora, "strategy=single", "batch_size_per_gpu=8")]
    runs += [(*lora, f"strategy={strategy}", "gpus=4", "batch_size_per_gpu=2") for strategy in ("ddp", "zero1")]
    runs += [(*runs[0], "finetune.dropout=0.5"), (*runs[0], "finetune.fp32_adapters=false")]
    single, ddp, zero1, dropped, uniform = records = execute(*runs)
    for record, overrides in zip(records, runs, strict=True):
        assert record["status"] == "ok", record["error"]
        assert_memory_as_predicted(record, overrides)
    for record in (ddp, zero1):
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-3)
    assert uniform["peak_allocated_bytes"] < single["peak_allocated_bytes"] < dropped["peak_allocated_bytes"]
    assert dropped["losses"][0] == single["losses"][0]  # B is zero at first
    assert dropped["losses"][-1] != single["losses"][-1]


@needs_peft
def test_adapters_in_fp32_are_trained_in_fp32() -> None:
    config = compose_run_config(
        *SMALL_GPT, "strategy=single", "finetune=lora", "precision=bf16_pure", "finetune.fp32_adapters=true"
    )
    engine = build_engine(
        config.trained_model, config.strategy, config.precision, config.optimizer, device=torch.device("cpu")
    )
    formats = {parameter.requires_grad: parameter.dtype for parameter in engine.module.parameters()}
    assert formats == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.long
@needs("peft", "deepspeed")
@pytest.mark.slow
def test_deepspeed_trains_adapters_beside_frozen_parameters(execute: Execute) -> None:
    """With buckets so small that they are not most of the memory."""
    lora = (*SMALL_GPT, *STEPS, "finetune=lora")
    stages = [
        (*lora, "strategy=deepspeed", f"strategy.stage={stage}", "strategy.reduce_bucket_size=2000", "gpus=2")
        for stage in (0, 1, 2, 3)
    ]
    runs = [(*lora, "strategy=single", "batch_size_per_gpu=8"), *((*stage, "batch_size_per_gpu=4") for stage in stages)]
    single, *others = execute(*runs)
    for record, overrides in zip(others, runs[1:], strict=True):
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert_memory_as_predicted(record, overrides)


@pytest.mark.long
@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated t5", "llama", "moe", "falcon", "deepseek_v2", "mamba"])
def test_adapters_of_every_family_learn_as_in_one_process(execute: Execute, name: str, tmp_path: Path) -> None:
    lora = (*list_model_overrides(name, tmp_path), *STEPS, "finetune=lora", "finetune.rank=4")
    runs = [(*lora, "strategy=single", "batch_size_per_gpu=4")]
    runs += [(*lora, f"strategy={strategy}", "gpus=2", "batch_size_per_gpu=2") for strategy in ("ddp", "fsdp", "fsdp1")]
    records = execute(*runs)
    for record, overrides in zip(records, runs, strict=True):
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(records[0]["losses"], rel=1e-5)
        expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01), overrides
    assert records[0]["losses"][-1] < records[0]["losses"][0] - 0.01


@pytest.mark.long
@needs_both
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"), [(WIDE_T5, ("4", "ranks")), (WIDE_GPT, ("4", "8", "bf16"))], ids=["t5", "gpt"]
)
def test_quantised_weights_train_as_predicted(execute: Execute, model: Any, names: tuple[str, ...]) -> None:
    qlora = (*model, *STEPS, "finetune=qlora", "batch_size_per_gpu=4", "strategy=single")
    overrides_by_name = {
        "4": qlora,
        "8": (*qlora, "finetune.bits=8", "activation_checkpointing=full"),
        "bf16": (*qlora, "precision=bf16", "finetune.double_quantisation=false"),
        "ranks": (*qlora, "strategy=ddp", "gpus=4", "batch_size_per_gpu=1"),
    }
    lora, *records = execute((*qlora, "finetune=lora"), *(overrides_by_name[name] for name in names))
    runs = dict(zip(names, records, strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        assert_memory_as_predicted(record, overrides_by_name[name])
        # Rounded weights give other losses, that fall all the same.
        assert record["losses"] != lora["losses"]
        assert record["losses"] == pytest.approx(lora["losses"], rel=0.03), name
        assert record["losses"][-1] < record["losses"][0] - 0.4, name
    losses = {name: record["losses"] for name, record in runs.items()}
    assert runs["4"]["peak_allocated_bytes"] < lora["peak_allocated_bytes"]
    if "ranks" in runs:
        assert losses["ranks"] == pytest.approx(losses["4"], rel=1e-6)
        assert runs["ranks"]["effective_strategy"] == "ddp/qlora"
    else:
        assert losses["8"] == pytest.approx(lora["losses"], rel=1e-3)


SHARDED_QLORA_MODELS = {
    "t5": WIDE_T5,
    "gpt": WIDE_GPT,
    "llama": ("model=llama_tiny", "model.intermediate_size=320"),
    "moe": ("model=moe_tiny",),
}
SHARDED_QLORA_RUNS = {
    "t5": ("fsdp", "fsdp1 4", "fsdp bf16", "fsdp1 bf16_pure"),
    "gpt": ("fsdp accumulated", "fsdp1 hybrid", "fsdp replicated"),
    "llama": ("fsdp", "fsdp 4", "fsdp1", "fsdp1 4", "fsdp1 recomputed"),
    "moe": ("fsdp", "fsdp1"),
}


@pytest.mark.long
@needs_both
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED_QLORA_RUNS)
def test_quantised_weights_that_are_sharded_train_as_in_one_process(execute: Execute, name: str) -> None:
    qlora = (*SHARDED_QLORA_MODELS[name], *STEPS, "finetune=qlora")
    two, four = ("gpus=2", "batch_size_per_gpu=2"), ("gpus=4", "batch_size_per_gpu=1")
    overrides_by_name = {
        "fsdp": ("strategy=fsdp", *two),
        "fsdp 4": ("strategy=fsdp", *four),
        "fsdp bf16": ("strategy=fsdp", *two, "precision=bf16"),
        "fsdp replicated": ("strategy=fsdp", "strategy.sharding_factor=1", *two),
        "fsdp accumulated": ("strategy=fsdp", "strategy.reshard_after_forward=false", *two, "gradient_accumulation=2"),
        "fsdp1": ("strategy=fsdp1", *two),
        "fsdp1 4": ("strategy=fsdp1", *four),
        "fsdp1 bf16_pure": ("strategy=fsdp1", *two, "precision=bf16_pure"),
        "fsdp1 hybrid": ("strategy=fsdp1", "strategy.sharding_factor=2", *four),
        "fsdp1 recomputed": ("strategy=fsdp1", *two, "activation_checkpointing=full"),
    }
    runs = [(*qlora, *overrides_by_name[run_name]) for run_name in SHARDED_QLORA_RUNS[name]]
    single, *records = execute((*qlora, "strategy=single", "batch_size_per_gpu=4"), *runs)
    for run_name, record, overrides in zip(SHARDED_QLORA_RUNS[name], records, runs, strict=True):
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01), run_name
        assert record["peak_allocated_bytes"] < single["peak_allocated_bytes"], run_name
        if run_name == "fsdp accumulated":
            continue  # twice as many sentences
        rounding = 1e-2 if "bf16" in run_name else 1e-6
        assert record["losses"] == pytest.approx(single["losses"], rel=rounding), run_name
    assert single["losses"][-1] < single["losses"][0] - 0.4


@pytest.mark.long
@needs("peft", "bitsandbytes", "deepspeed")
@pytest.mark.slow
def test_deepspeed_trains_adapters_beside_quantised_weights(execute: Execute) -> None:
    qlora = (*SHARDED_QLORA_MODELS["llama"], *STEPS, "finetune=qlora")
    stages = [
        (*qlora, "strategy=deepspeed", f"strategy.stage={stage}", "strategy.reduce_bucket_size=2000", "gpus=2")
        for stage in (0, 1, 2, 3)
    ]
    runs = [
        (*qlora, "strategy=single", "batch_size_per_gpu=4"),
        *((*stage, "batch_size_per_gpu=2") for stage in stages),
    ]
    single, *others = execute(*runs)
    for stage, (record, overrides) in enumerate(zip(others, runs[1:], strict=True)):
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-6)
        if stage < 3:
            expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
            assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01), overrides


def build_filled_model(*run_overrides: str) -> torch.nn.Module:
    config = compose_run_config(*run_overrides, "strategy=single", "seed=5")
    model = config.trained_model.build_model()
    Materializer(model, config.trained_model, torch.device("cpu"), 5).fill_model(model)
    return model


@needs_both
@pytest.mark.parametrize("model", [WIDE_T5, WIDE_GPT], ids=["t5", "gpt"])
def test_frozen_weights_are_those_that_full_training_starts_from(model: Any) -> None:
    full = dict(build_filled_model(*model).named_parameters())
    lora = dict(build_filled_model(*model, "finetune=lora").named_parameters())
    base = {name.replace(".base_layer", ""): parameter for name, parameter in lora.items() if "lora_" not in name}
    assert base.keys() == full.keys()
    assert all(torch.equal(base[name], parameter) and not base[name].requires_grad for name, parameter in full.items())
    adapters = {name: parameter for name, parameter in lora.items() if "lora_" in name}
    assert adapters
    assert all(parameter.requires_grad for parameter in adapters.values())
    assert all(not parameter.any() for name, parameter in adapters.items() if "lora_B" in name)
    config = compose_run_config(*model, "finetune=qlora", "strategy=single")
    stored_formats = config.trained_model.find_stored_formats(config.trained_model.build_model())
    quantised = build_filled_model(*model, "finetune=qlora")
    import bitsandbytes as bnb

    layers = {name: module for name, module in quantised.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert len(layers) == len(stored_formats)
    for name, layer in layers.items():
        drawn = full[name.replace(".base_layer", "") + ".weight"]
        drawn = drawn.T if model is WIDE_GPT else drawn
        restored = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert (restored - drawn).abs().mean() < 0.1 * drawn.abs().mean(), name  # NF4 errs by 8 % of a normal weight


@needs_both
def test_a_weight_that_was_quantised_is_not_kept_as_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_run_config(*WIDE_GPT, "finetune=qlora", "strategy=single")
    drawn_weights: list[weakref.ref[torch.nn.Parameter]] = []
    quantise = family.quantise_drawn_weight

    def quantise_and_remember(module: Any) -> None:
        if adapters.is_quantised(module):
            drawn_weights.append(weakref.ref(module.weight))
        quantise(module)

    monkeypatch.setattr(family, "quantise_drawn_weight", quantise_and_remember)
    model = config.trained_model.build_model()
    materializer = Materializer(model, config.trained_model, torch.device("cpu"), 5)
    materializer.fill_model(model)
    assert len(drawn_weights) == len(config.trained_model.list_converted_modules(model)) > 0
    assert all(weight() is None for weight in drawn_weights)


@needs_both
def test_a_quantised_weight_takes_half_a_byte_and_its_scales() -> None:
    # QLoRA, section 3: 0.5 bits per weight for the scales of blocks of 64, 0.127 bits with double quantisation.
    weights = 2**24
    assert 8 * count_scale_bytes(weights, has_double_quantisation=False) / weights == pytest.approx(0.5, rel=1e-3)
    assert 8 * count_scale_bytes(weights, has_double_quantisation=True) / weights == pytest.approx(0.127, rel=0.01)
    plain, narrow = (
        build_parameter_layout(
            compose_run_config(*WIDE_GPT, f"finetune={name}", "strategy=single").trained_model, 1, False
        )
        for name in ("lora", "qlora")
    )
    pairs = list(zip(plain.units[1].parameters, narrow.units[1].parameters, strict=True))
    assert {parameter.is_trained for parameter, _ in pairs} == {True, False}
    assert [parameter.is_trained for parameter, _ in pairs] == [parameter.is_trained for _, parameter in pairs]
    quantised = [(drawn.numel, parameter) for drawn, parameter in pairs if parameter.quantised_bytes is not None]
    assert len(quantised) == 4  # attention in and out, feed-forward in and out
    assert all(parameter.quantised_bytes == num_weights // 2 for num_weights, parameter in quantised)
    assert all(parameter.numel == num_weights // 8 for num_weights, parameter in quantised)  # in numbers of 4 bytes
    assert all(parameter.scale_bytes > num_weights // 64 for num_weights, parameter in quantised)


REFUSED_CASES = [
    (("finetune=lora", "strategy=fsdp1", "strategy.sharding_factor=1", "gpus=2"), "strategy.sharding_factor=1 is not"),
    (("finetune=lora", "strategy=fsdp1", "gpus=2", "precision=fp16"), "precision=fp16 is not valid for strategy=fsdp1"),
    (
        ("finetune=qlora", "model.hidden_size=64", "strategy=fsdp1", "gpus=2", "precision=bf16"),
        "in one flat parameter and would cast packed weights with it: choose bf16_pure, precision.mixing=autocast, or",
    ),
    *(
        (
            ("finetune=qlora", "finetune.bits=8", f"strategy={strategy}", "gpus=2"),
            f"finetune=qlora is not valid with strategy={strategy} for finetune.bits=8, since bitsandbytes keeps",
        )
        for strategy in ("fsdp", "fsdp1", "deepspeed")
    ),
    (
        ("finetune=lora", "strategy=data_parallel", "gpus=2", "hardware=a100_80gb"),
        "deepspeed, fsdp, fsdp1, mesh, naive_pipeline, pipeline, single, tensor_parallel or zero1.",
    ),
    (
        ("finetune=qlora", "strategy=data_parallel", "gpus=2", "hardware=a100_80gb"),
        "quantised weights beside others: choose finetune=full, or strategy ddp, deepspeed, fsdp, fsdp1, single or",
    ),
    (("finetune=qlora", "strategy=single", "precision=fp16"), "precision=fp16 is not valid with finetune=qlora"),
    (
        ("finetune=lora", "finetune.fp32_adapters=true", "strategy=fsdp", "gpus=2", "precision=bf16_pure"),
        "with strategy=fsdp, whose parameters all have one format: choose false, or strategy ddp, single or zero1",
    ),
    (
        ("finetune=lora", "finetune.fp32_adapters=true", "precision=bf16"),
        "fp32_adapters=true is not valid with precision=bf16, whose parameters are in fp32",
    ),
    (("finetune=lora", "finetune.dropout=1"), "finetune.dropout=1"),
    (("finetune=lora", "finetune.rank=33"), "finetune.rank=33 is not valid: choose a whole number from 1 to 32"),
    (("finetune=lora", "finetune.rank=0"), "finetune.rank=0"),
    (("finetune=lora", "finetune.alpha=0"), "finetune.alpha=0"),
    (("finetune=lora", "finetune.target_modules=[q,v]"), "that model=gpt_tiny has: c_attn, c_proj, c_fc"),
    (("finetune=lora", "finetune.target_modules=[]"), "finetune.target_modules="),
    (("finetune=qlora",), "unless a layer's input is a multiple of 64 wide, and that of c_attn is 32"),
    (("finetune=qlora", "finetune.bits=3"), "finetune.bits=3 is not valid: choose 4, 8"),
    (("finetune=lora", "finetune.bits=4"), "finetune.bits is not a field of finetune=lora"),
    (("finetune.name=3",), "finetune.name=3 is not valid: choose full, lora, qlora"),
    (("finetune=dora",), "finetune=dora is not valid: choose full, lora, qlora"),
]


@needs_both
@pytest.mark.parametrize(
    ("run_overrides", "sentence"), REFUSED_CASES, ids=[" ".join(run_overrides) for run_overrides, _ in REFUSED_CASES]
)
def test_what_makes_no_sense_is_refused(run_overrides: tuple[str, ...], sentence: str) -> None:
    strategy = () if any(word.startswith("strategy=") for word in run_overrides) else ("strategy=ddp",)
    with pytest.raises(UsageError) as caught:
        compose_run_config(*SMALL_GPT, *strategy, *run_overrides)
    assert sentence in str(caught.value)


def test_a_missing_library_is_named_with_what_installs_it_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose_run_config(*WIDE_GPT, "strategy=ddp", "gpus=2", "finetune=qlora")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"packages peft and bitsandbytes, .*pip install -e .\.\[peft,bitsandbytes\]"):
        LocalLauncher(compose_config({})["cluster"], CPU).check(config)


# --- Predictions where a library is missing.

STAND_IN_MODELS = {
    "gpt": (*SMALL_GPT, "model.hidden_size=64"),
    "t5": (*SMALL_T5, "model.d_model=64", "model.d_kv=16"),
    "gated t5": ("model=t5_v1_1_small", "model.d_model=64", "model.d_ff=64", "model.d_kv=16", "model.num_heads=4"),
    "llama": ("model=llama_tiny",),
    "moe": ("model=moe_tiny",),
    "falcon": ("falcon",),
    "deepseek_v2": ("deepseek_v2",),
    "bart": ("bart",),
    "llama4_text": ("llama4_text",),
    "mamba": ("mamba", "model.attention=eager"),
}
"""Families, and models of very different make by their type."""

STAND_IN_SETTINGS = [
    ("finetune=lora", "hardware=cpu", "precision=bf16"),
    (
        "finetune=lora",
        "hardware=a100_40gb",
        "precision=bf16_pure",
        "finetune.fp32_adapters=true",
        "finetune.dropout=0.1",
    ),
    ("finetune=qlora", "hardware=a100_40gb", "precision=bf16_pure", "finetune.fp32_adapters=true"),
    ("finetune=qlora", "hardware=a100_40gb", "precision=bf16", "activation_checkpointing=full"),
    ("finetune=qlora", "hardware=a100_40gb", "precision=fp32", "finetune.double_quantisation=false"),
    ("finetune=qlora", "hardware=a100_40gb", "precision=bf16_pure", "finetune.bits=8"),
    ("finetune=qlora", "hardware=cpu", "precision=bf16", "finetune.bits=8"),
]


def list_model_overrides(name: str, folder: Path) -> tuple[str, ...]:
    first, *others = STAND_IN_MODELS[name]
    if first.startswith("model="):
        return STAND_IN_MODELS[name]
    file = folder / f"{name}.json"
    file.write_text(json.dumps(CONFIGS[name]))
    return ("model=hf", f"model.path={file}", *others)


def trace_all(config: RunConfig) -> tuple[Any, ...]:
    """All that is predicted from: the trace, where its storages have other numbers, the layout and the FLOPs."""
    build_parameter_layout.cache_clear()
    family.count_training_flops.cache_clear()
    trace = trace_step(build_trace_key(config), 2)
    numbers: dict[int, int] = {}
    for segment in trace.segments:
        segment.changes[:] = [(size, numbers.setdefault(number, len(numbers))) for size, number in segment.changes]
    flops = config.trained_model.count_flops_per_sequence(config.sequence_length).model_flops
    return trace, vars(build_parameter_layout(config.trained_model, 1, False)), flops


@needs_peft
@pytest.mark.parametrize("name", ["deepseek_v2", "llama4_text", "bert"])
def test_adapters_stand_beside_linear_layers_of_blocks_alone(name: str, tmp_path: Path) -> None:
    """Not beside stacks of experts, routers, or layers outside that are called as one within."""
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(CONFIGS[name]))
    config = compose_run_config("model=hf", f"model.path={file}", "strategy=single", "finetune=lora", "gpus=1")
    model = config.trained_model.build_model()
    block_ids = {
        id(parameter) for blocks in config.trained_model.find_block_lists(model) for parameter in blocks.parameters()
    }
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(id(parameter) in block_ids and parameter.dim() == 2 for parameter in trained.values())
    assert all(parameter.shape[0] == 8 for name, parameter in trained.items() if ".lora_A." in name)
    assert not any("router" in name or ".experts." in name for name in trained)


@pytest.mark.long
@needs_both
@pytest.mark.parametrize("settings", STAND_IN_SETTINGS, ids=" ".join)
@pytest.mark.parametrize("name", STAND_IN_MODELS)
def test_stand_ins_are_traced_as_the_libraries_are(
    name: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*list_model_overrides(name, tmp_path), *settings, "sequence_length=16", "strategy=single")
    config = compose_run_config(*overrides, "finetune.rank=4")
    expected = trace_all(config)
    monkeypatch.setattr(adapters, "is_installed", lambda package: False)
    stand_ins = trace_all(compose_run_config(*overrides, "finetune.rank=4"))
    assert stand_ins == expected


@pytest.mark.parametrize(
    "finetune", [("finetune=lora",), ("finetune=qlora",), ("finetune=qlora", "finetune.bits=8")], ids=" ".join
)
@pytest.mark.parametrize("hardware", ["cpu", "a100_40gb"])
def test_a_prediction_needs_no_library(
    finetune: tuple[str, ...], hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(adapters, "is_installed", lambda package: False)
    overrides = (*WIDE_GPT, "mode=predict", f"hardware={hardware}", "strategy=ddp", "gpus=2", "sequence_length=24")
    full, adapted = (predict_run(compose_run_config(*overrides, *choice)) for choice in ((), finetune))
    assert adapted.memory.parts["optimizer"] < full.memory.parts["optimizer"] / 4


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_adapters_within_compiled_blocks_are_units_of_fsdp1(checkpointing: str) -> None:
    """Reduced as without the compiler, though a block's gradients are complete when the block before it has begun."""
    overrides = (
        *("model=llama_tiny", "mode=predict", "hardware=a100_80gb", "strategy=fsdp1", "gpus=2", "finetune=lora"),
        f"activation_checkpointing={checkpointing}",
    )
    eager, compiled = (
        predict_run(compose_run_config(*overrides, f"compile={value}"), timeline=True) for value in ("false", "true")
    )
    assert eager.time is not None
    assert compiled.time is not None
    expected, counts = (
        Counter((span.kind, span.name) for span in time.timeline if span.kind in ("all-gather", "reduce-scatter"))
        for time in (eager.time, compiled.time)
    )
    assert counts.keys() == expected.keys()
    reduced = ("reduce-scatter", "reduce-scatter model.layers.2")
    assert counts[reduced] == expected[reduced] == 14  # an adapter's two matrices, beside each of seven layers


@needs_peft
def test_runs_of_before_there_was_a_choice_are_the_same_runs() -> None:
    values = compose_config({"strategy": "ddp", "gpus": "2", "hardware": "cpu"})
    full = build_run_config(values)
    values.pop("finetune")
    assert build_run_config(values).run_id == full.run_id
    others = [
        compose_run_config("strategy=ddp", "gpus=2", *run_overrides).run_id
        for run_overrides in ((), ("finetune=lora",))
    ]
    others.append(compose_run_config("strategy=ddp", "gpus=2", "finetune=lora", "finetune.rank=4").run_id)
    assert len(set(others)) == 3


@needs_peft
def test_a_row_says_how_to_run_it_again() -> None:
    config = compose_run_config(
        "strategy=ddp", "gpus=2", "finetune=lora", "finetune.rank=4", "finetune.target_modules=[q]"
    )
    row = json.loads(json.dumps(config.to_dict()))
    typed = list_overrides(row, row["strategy"])
    assert {"finetune=lora", "finetune.rank=4"} <= set(typed)
    rerun_overrides = [word for word in typed if word.startswith(("finetune", "strategy="))]
    assert compose_run_config("gpus=2", *rerun_overrides).run_id == config.run_id


@pytest.mark.long
@needs_both
def test_frozen_weights_have_no_gradients_in_the_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    length, rank, blocks, vocabulary, hidden = 16, 4, 5, 128, 32
    base_overrides = (*SMALL_GPT, f"model.num_layers={blocks}", f"sequence_length={length}", "strategy=single")
    adapted = ("finetune.rank=4", "finetune.target_modules=[c_fc]")
    config = compose_run_config(*base_overrides, "finetune=lora", *adapted)
    count = config.trained_model.count_flops_per_sequence(length)
    weights = 12 * hidden * hidden
    attention = 4 * length * length * hidden
    adapter = 2 * length * rank * 5 * hidden
    head = 2 * length * hidden * vocabulary
    forward = blocks * (2 * length * weights + attention + adapter) + head
    # Of the first block what lies before its adapter has no backward: attention and its projections, the input of c_fc.
    before = 2 * length * (3 + 1 + 4) * hidden * hidden + 2 * attention + 2 * length * hidden * rank
    backward = blocks * (2 * length * weights + 2 * attention + 2 * adapter) + head - before
    assert count.model_flops == forward + backward
    assert count.compute_hardware_flops("none") == count.model_flops
    assert count.compute_hardware_flops("full") - count.model_flops > blocks * length * weights
    quantised = compose_run_config(
        *base_overrides, "finetune=qlora", "finetune.bits=8", *adapted
    ).trained_model.count_flops_per_sequence(length)
    assert quantised.model_flops == count.model_flops
    whole = config.model.count_flops_per_sequence(length)
    assert whole.model_flops == 3 * (forward - blocks * adapter)
    monkeypatch.setattr(processes, "can_reach_gpus", lambda: True)
    family.count_training_flops.cache_clear()
    assert count.model_flops == forward + backward  # counted in another process


def test_flops_beside_a_router_with_a_buffer_are_counted() -> None:
    """Its correction is no parameter, and so not on meta."""
    model = build_latent_model("deepseek_v3")
    config = compose_run_config(*model, "finetune=lora", "finetune.rank=4", "strategy=single", "mode=predict")
    flops = config.trained_model.count_flops_per_sequence(32).model_flops
    assert 0 < flops < config.model.count_flops_per_sequence(32).model_flops


@needs_both
def test_rules_of_thumb_for_adapters_stand_beside_their_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    base_overrides = (*SMALL_GPT, "gpus=1", "hardware=a100_40gb", "batch_size_per_gpu=2", "sequence_length=16")
    status = main([*base_overrides, "finetune=lora", "activation_checkpointing=none", "format=json"])
    assert status == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    rules = {rule["rule"]: rule for rule in section["rules_of_thumb"]}
    assert "adapters are 1/" in rules["LoRA, 1/64 trained"]["why"]
    assert rules["QLoRA, 1/64 trained"]["why"] == "not predicted: ask with finetune=qlora"
    full, lora = (rules[name]["predicted_allocated_bytes"] for name in ("16 bytes per parameter", "LoRA, 1/64 trained"))
    assert lora < full
    assert section["ranked"][0]["effective_strategy"] == "single/lora"


@needs_both
@pytest.mark.parametrize("bits", [4, 8])
def test_on_a_gpu_what_quantised_weights_save_is_predicted(bits: int) -> None:
    base_overrides = ("model=gpt_125m", "hardware=a100_40gb", "mode=predict", "strategy=single", "precision=bf16_pure")
    base_overrides = (*base_overrides, "batch_size_per_gpu=2", "sequence_length=64")
    lora = compose_run_config(*base_overrides, "finetune=lora")
    qlora = dataclasses.replace(
        lora, finetune=compose_run_config(*base_overrides, "finetune=qlora", f"finetune.bits={bits}").finetune
    )
    lora_prediction, qlora_prediction = (predict_run(config) for config in (lora, qlora))
    saved = lora_prediction.memory.parts["parameters"] - qlora_prediction.memory.parts["parameters"]
    weights = 12 * 12 * 768 * 768  # of 12 blocks, 12 x hidden x hidden each
    assert saved == pytest.approx(weights * (2 - bits / 8), rel=0.04)
    assert lora_prediction.time is not None
    assert qlora_prediction.time is not None
    assert (
        0.5 * lora_prediction.time.step_s.value
        < qlora_prediction.time.step_s.value
        < 5 * lora_prediction.time.step_s.value
    )
