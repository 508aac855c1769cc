"""The compiled loss: the same loss and gradients, and no logits in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.config.run_config import build_run_config
from bench.core.errors import UsageError
from bench.models.compiled_loss import compile_loss
from bench.prediction.predictor import predict_run
from bench.records.schema import Record
from tests.conftest import compose_run_config

MODELS = ("gpt_tiny", "t5_tiny", "llama_tiny", "dhen_tiny")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_those_of_the_family(model: str, dtype: torch.dtype) -> None:
    """Of bf16 logits the loss is in fp32 and their gradient in bf16, compiled or not."""
    family = compose_run_config(
        f"model={model}", "sequence_length=1" if "dhen" in model else "sequence_length=21"
    ).model
    labels = family.build_batch(3, 1 if "dhen" in model else 21, torch.Generator().manual_seed(5)).labels
    generator = torch.Generator().manual_seed(6)
    shape = labels.shape if labels.is_floating_point() else (*labels.shape, family.vocabulary_size)
    drawn = torch.randn(shape, generator=generator).to(dtype)
    results: list[tuple[torch.Tensor, Any]] = []
    for compute_loss in (family.compute_loss, compile_loss(family.compute_loss)):
        logits = drawn.clone().requires_grad_()
        loss = compute_loss(logits, labels)
        loss.backward()
        results.append((loss.detach(), logits.grad))
    (loss, gradient), (compiled_loss, compiled_gradient) = results
    assert compiled_loss.dtype == torch.float32
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled_gradient, gradient)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("strategy=single", "gpus=1", "batch_size_per_gpu=8", "sequence_length=64"),
        ("strategy=fsdp", "gpus=2", "precision=bf16", "gradient_accumulation=2"),
        ("strategy=ddp", "gpus=2", "precision=fp16"),
        ("strategy=pipeline", "gpus=2", "strategy.micro_batches=2"),
        ("strategy=mesh", "gpus=2", "strategy.expert=2", "model=moe_tiny"),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_training_with_it_has_the_same_losses_and_needs_what_is_predicted(
    execute: Callable[..., list[Record]], settings: tuple[str, ...]
) -> None:
    rows = execute(
        *(
            ("model=gpt_tiny", "hardware=cpu", *settings, f"loss={loss}", "measurement.steps=3")
            for loss in ("whole", "compiled")
        )
    )
    assert [row["status"] for row in rows] == ["ok", "ok"], [row.get("error") for row in rows]
    assert [row.get("compiled_loss") for row in rows] == [None, True]
    assert rows[1]["losses"] == pytest.approx(rows[0]["losses"], rel=2e-3 if "precision=fp16" in settings else 1e-4)
    assert rows[1]["run_id"] != rows[0]["run_id"]
    for row in rows:
        predicted = predict_run(build_run_config({**row["config"], "mode": "predict"})).memory.allocated.value
        assert row["peak_allocated_bytes"] == pytest.approx(predicted, rel=0.002), row["config"]["loss"]


def test_the_loss_of_few_tokens_is_traced_at_its_batch_size() -> None:
    """For these sizes the compiler splits the reduction over the vocabulary, and not for more sequences."""
    overrides = (
        *("model=mpt_7b", "model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "sequence_length=64"),
        *("mode=predict", "strategy=single", "hardware=h100_80gb", "batch_size_per_gpu=4", "precision=bf16"),
    )
    whole, compiled = (
        predict_run(compose_run_config(*overrides, f"loss={loss}")).memory.allocated.value
        for loss in ("whole", "compiled")
    )
    assert 0.4 * whole < compiled <= whole


def test_no_logits_in_fp32_are_predicted() -> None:
    """Each takes 2 bytes in bf16 and 2 bytes of its gradient. torch's operators have, besides the logits in bf16, their
    log-probabilities and two gradients in fp32."""
    settings = ("model=llama3_2_1b", "strategy=single", "gpus=1", "precision=bf16_pure", "batch_size_per_gpu=8")
    further = ("sequence_length=2048", "activation_checkpointing=full", "hardware=h100_80gb", "mode=predict")
    whole, compiled = (
        predict_run(compose_run_config(*settings, *further, loss)) for loss in ("loss=whole", "loss=compiled")
    )
    logits = 8 * 2048 * 128_256
    assert whole.memory.allocated.value - compiled.memory.allocated.value == pytest.approx(10 * logits, rel=0.05)
    assert compiled.time.step_s.value < whole.time.step_s.value


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("loss=compiled", "strategy=tensor_parallel", "gpus=2"), "ranks that share every sequence's logits"),
        (
            ("loss=compiled", "strategy=mesh", "strategy.context=2", "gpus=2"),
            "ranks that share every sequence's logits",
        ),
        (
            ("loss=compiled", "strategy=mesh", "strategy.pipeline=2", "strategy.schedule=zbv_zero_bubble", "gpus=2"),
            "splits backward",
        ),
        (("loss=compiled", "loss_chunks=4"), "loss=compiled, or loss=chunked"),
    ],
)
def test_what_has_no_compiled_loss_says_why(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        compose_run_config("model=gpt_tiny", *overrides)
