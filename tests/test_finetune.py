"""Adapters beside frozen and quantised weights: what they compute, what they need, what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import processes
from bench.config import run_config
from bench.errors import UsageError
from bench.finetune import flops
from bench.finetune.quantised import scale_bytes
from bench.models.materialize import Materializer
from bench.planning.compose import composed
from bench.predict import main
from bench.reporting.again import overrides
from bench.simulate.layout import layout_of
from bench.simulate.predict import predict
from tests.conftest import SMALL_GPT, SMALL_T5, configuration
from tests.extras import needs

Execute = Callable[..., list[dict[str, Any]]]

# Weights of 4 bits need layers that are a multiple of 64 wide on a CPU.
WIDE_T5 = (*SMALL_T5, "model.d_model=64", "model.d_kv=16")
WIDE_GPT = (*SMALL_GPT, "model.hidden_size=64")

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-2")


needs_peft = needs("peft")
needs_both = needs("peft", "bitsandbytes")


def close_to_predicted(record: dict[str, Any], asked: tuple[str, ...]) -> None:
    expected = predict(configuration(*asked)).memory.allocated.value
    assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.02), asked


@needs_peft
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [(SMALL_T5, ("ddp", "zero1", "fsdp")), (SMALL_GPT, ("fsdp", "alone", "recomputed", "bf16"))],
    ids=["t5", "gpt"],
)
def test_adapters_learn_the_same_everywhere_in_the_memory_that_is_predicted(
    execute: Execute, model: Any, names: tuple[str, ...]
) -> None:
    lora = (*model, *STEPS, "finetune=lora", "batch_size_per_gpu=2", "gpus=4")
    asked = {
        "ddp": (*lora, "strategy=ddp"),
        "zero1": (*lora, "strategy=zero1"),
        "fsdp": (*lora, "strategy=fsdp"),
        "recomputed": (*lora, "strategy=fsdp", "strategy.sharding_factor=1", "activation_checkpointing=full"),
        "alone": (*lora, "strategy=fsdp", "mode=rehearse"),
        "bf16": (*lora, "strategy=ddp", "precision=bf16"),
    }
    whole = (*model, *STEPS, "strategy=single", "batch_size_per_gpu=8")
    full, single, *others = execute(whole, (*whole, "finetune=lora"), *(asked[name] for name in names))
    runs = dict(zip(names, others, strict=True))
    close_to_predicted(single, (*whole, "finetune=lora"))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        close_to_predicted(record, asked[name])
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


@needs_both
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"), [(WIDE_T5, ("4", "ranks")), (WIDE_GPT, ("4", "8", "bf16"))], ids=["t5", "gpt"]
)
def test_quantised_weights_train_as_predicted(execute: Execute, model: Any, names: tuple[str, ...]) -> None:
    qlora = (*model, *STEPS, "finetune=qlora", "batch_size_per_gpu=4", "strategy=single")
    asked = {
        "4": qlora,
        "8": (*qlora, "finetune.bits=8", "activation_checkpointing=full"),
        "bf16": (*qlora, "precision=bf16", "finetune.double_quantisation=false"),
        "ranks": (*qlora, "strategy=ddp", "gpus=4", "batch_size_per_gpu=1"),
    }
    lora, *found = execute((*qlora, "finetune=lora"), *(asked[name] for name in names))
    runs = dict(zip(names, found, strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        close_to_predicted(record, asked[name])
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


def filled(*asked: str) -> torch.nn.Module:
    config = configuration(*asked, "strategy=single", "seed=5")
    model = config.trained.build()
    Materializer(model, config.trained, torch.device("cpu"), 5).model(model)
    return model


@needs_both
@pytest.mark.parametrize("model", [WIDE_T5, WIDE_GPT], ids=["t5", "gpt"])
def test_frozen_weights_are_those_that_full_training_starts_from(model: Any) -> None:
    full = dict(filled(*model).named_parameters())
    lora = dict(filled(*model, "finetune=lora").named_parameters())
    base = {name.replace(".base_layer", ""): each for name, each in lora.items() if "lora_" not in name}
    assert base.keys() == full.keys()
    assert all(torch.equal(base[name], each) and not base[name].requires_grad for name, each in full.items())
    adapters = {name: each for name, each in lora.items() if "lora_" in name}
    assert adapters
    assert all(each.requires_grad for each in adapters.values())
    assert all(not each.any() for name, each in adapters.items() if "lora_B" in name)
    config = configuration(*model, "finetune=qlora", "strategy=single")
    fixed = config.trained.stored_bytes(config.trained.build())
    quantised = filled(*model, "finetune=qlora")
    import bitsandbytes as bnb

    layers = {name: each for name, each in quantised.named_modules() if isinstance(each, bnb.nn.Linear4bit)}
    assert len(layers) == len(fixed)
    for name, layer in layers.items():
        drawn = full[name.replace(".base_layer", "") + ".weight"]
        drawn = drawn.T if model is WIDE_GPT else drawn
        restored = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert (restored - drawn).abs().mean() < 0.1 * drawn.abs().mean(), name  # NF4 errs by 8 % of a normal weight


@needs_both
def test_a_quantised_weight_takes_half_a_byte_and_its_scales() -> None:
    # QLoRA, section 3: 0.5 bits per weight for the scales of blocks of 64, 0.127 bits with double quantisation.
    weights = 2**24
    assert 8 * scale_bytes(weights, double=False) / weights == pytest.approx(0.5, rel=1e-3)
    assert 8 * scale_bytes(weights, double=True) / weights == pytest.approx(0.127, rel=0.01)
    plain, narrow = (
        layout_of(configuration(*WIDE_GPT, f"finetune={name}", "strategy=single").trained, 1, False)
        for name in ("lora", "qlora")
    )
    pairs = list(zip(plain.units[1].parameters, narrow.units[1].parameters, strict=True))
    assert {one.is_trained for one, _ in pairs} == {True, False}
    assert [one.is_trained for one, _ in pairs] == [two.is_trained for _, two in pairs]
    quantised = [two for _, two in pairs if two.fixed_bytes is not None]
    assert len(quantised) == 4  # attention in and out, feed-forward in and out
    assert all(two.fixed_bytes > two.numel // 2 for two in quantised)


REFUSED = [
    (("finetune=lora", "strategy=fsdp1", "gpus=2"), "would save nothing: choose strategy ddp, fsdp, single or zero1."),
    (("finetune=qlora", "strategy=fsdp1", "gpus=2"), "with strategy fsdp, or strategy ddp, single or zero1."),
    (("finetune=qlora", "strategy=fsdp", "gpus=2"), "packed weights without the scales"),
    (
        ("finetune=lora", "strategy=deepspeed", "gpus=2"),
        "frozen parameters beside others: choose finetune=full, or strategy ddp, fsdp, single or zero1.",
    ),
    (
        ("finetune=qlora", "strategy=deepspeed", "gpus=2"),
        "quantised weights beside others: choose finetune=full, or strategy ddp, single or zero1.",
    ),
    (("finetune=qlora", "strategy=single", "precision=fp16"), "precision=fp16 is not valid with finetune=qlora"),
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
@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=[" ".join(asked) for asked, _ in REFUSED])
def test_what_makes_no_sense_is_refused(asked: tuple[str, ...], said: str) -> None:
    strategy = () if any(word.startswith("strategy=") for word in asked) else ("strategy=ddp",)
    with pytest.raises(UsageError) as caught:
        configuration(*SMALL_GPT, *strategy, *asked)
    assert said in str(caught.value)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"packages peft and bitsandbytes, .*pip install -e .\.\[peft,bitsandbytes\]"):
        configuration(*SMALL_GPT, "strategy=ddp", "finetune=qlora")


@needs_peft
def test_runs_of_before_there_was_a_choice_are_the_same_runs() -> None:
    values = composed({"strategy": "ddp", "gpus": "2", "hardware": "cpu"})
    full = run_config(values)
    values.pop("finetune")
    assert run_config(values).run_id == full.run_id
    others = [configuration("strategy=ddp", "gpus=2", *asked).run_id for asked in ((), ("finetune=lora",))]
    others.append(configuration("strategy=ddp", "gpus=2", "finetune=lora", "finetune.rank=4").run_id)
    assert len(set(others)) == 3


@needs_peft
def test_a_row_says_how_to_run_it_again() -> None:
    config = configuration("strategy=ddp", "gpus=2", "finetune=lora", "finetune.rank=4", "finetune.target_modules=[q]")
    row = json.loads(json.dumps(config.to_dict()))
    typed = overrides(row, row["strategy"])
    assert {"finetune=lora", "finetune.rank=4"} <= set(typed)
    again = [word for word in typed if word.startswith(("finetune", "strategy="))]
    assert configuration("gpus=2", *again).run_id == config.run_id


@needs_both
def test_frozen_weights_have_no_gradients_in_the_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    length, rank, blocks, vocabulary, hidden = 16, 4, 5, 128, 32
    asked = (*SMALL_GPT, f"model.num_layers={blocks}", f"sequence_length={length}", "strategy=single")
    adapted = ("finetune.rank=4", "finetune.target_modules=[c_fc]")
    config = configuration(*asked, "finetune=lora", *adapted)
    count = config.trained.flops_per_sequence(length)
    weights = 12 * hidden * hidden
    attention = 4 * length * length * hidden
    adapter = 2 * length * rank * 5 * hidden
    head = 2 * length * hidden * vocabulary
    forward = blocks * (2 * length * weights + attention + adapter) + head
    # Of the first block what lies before its adapter has no backward: attention and its projections, the input of c_fc.
    before = 2 * length * (3 + 1 + 4) * hidden * hidden + 2 * attention + 2 * length * hidden * rank
    backward = blocks * (2 * length * weights + 2 * attention + 2 * adapter) + head - before
    assert count.model == forward + backward
    assert count.hardware("none") == count.model
    assert count.hardware("full") - count.model > blocks * length * weights
    quantised = configuration(*asked, "finetune=qlora", "finetune.bits=8", *adapted).trained.flops_per_sequence(length)
    assert quantised.model == count.model
    whole = config.model.flops_per_sequence(length)
    assert whole.model == 3 * (forward - blocks * adapter)
    monkeypatch.setattr(processes, "may_reach_gpus", lambda: True)
    flops.counted.cache_clear()
    assert count.model == forward + backward  # counted in another process


@needs_both
def test_rules_of_thumb_for_adapters_stand_beside_their_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*SMALL_GPT, "gpus=1", "hardware=a100_40gb", "batch_size_per_gpu=2", "sequence_length=16")
    status = main([*asked, "finetune=lora", "activation_checkpointing=none", "format=json"])
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
    asked = ("model=gpt_125m", "hardware=a100_40gb", "mode=predict", "strategy=single", "precision=bf16_pure")
    asked = (*asked, "batch_size_per_gpu=2", "sequence_length=64")
    lora = configuration(*asked, "finetune=lora")
    qlora = dataclasses.replace(
        lora, finetune=configuration(*asked, "finetune=qlora", f"finetune.bits={bits}").finetune
    )
    one, other = (predict(config) for config in (lora, qlora))
    saved = one.memory.parts["parameters"] - other.memory.parts["parameters"]
    weights = 12 * 12 * 768 * 768  # of 12 blocks, 12 x hidden x hidden each
    assert saved == pytest.approx(weights * (2 - bits / 8), rel=0.04)
    assert one.time is not None
    assert other.time is not None
    assert 0.5 * one.time.step_s.value < other.time.step_s.value < 5 * one.time.step_s.value
