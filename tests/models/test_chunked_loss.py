"""The loss in chunks: the same loss and gradients, less memory, one more forward pass of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.core.errors import UsageError
from bench.models.chunked_loss import ChunkedLoss
from bench.models.materialize import Materializer
from bench.prediction.predictor import predict_run
from tests.conftest import compose_run_config

MODELS = ("gpt_tiny", "t5_tiny", "llama_tiny", "moe_tiny")


def compute_gradients(model_name: str, num_chunks: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a family's model, drawn at random; without chunks by the family's own loss."""
    run = compose_run_config(f"model={model_name}", "sequence_length=21")
    model = run.model.build_model().train()
    materializer = Materializer(model, run.model, torch.device("cpu"), seed=3)
    chunked_loss = None if num_chunks is None else ChunkedLoss(run.model, model, num_chunks)
    materializer.fill_model(model)
    batch = run.model.build_batch(3, 21, torch.Generator().manual_seed(5))
    if chunked_loss is None:
        loss = run.model.compute_loss(model(**batch.inputs)["logits"], batch.labels)
    else:
        with chunked_loss.provide_labels(batch.labels):
            loss = model(**batch.inputs)["logits"]
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_chunks", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (8, 64))])
def test_loss_and_gradients_are_those_of_all_logits_at_once(model: str, num_chunks: int) -> None:
    """Of 21 positions no number of chunks makes equal parts."""
    whole_loss, whole_gradients = compute_gradients(model, None)
    loss, gradients = compute_gradients(model, num_chunks)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", ["gpt_tiny", "t5_tiny", "llama_tiny"])
def test_the_head_is_computed_once_more(model: str) -> None:
    family = compose_run_config(f"model={model}", "sequence_length=16").model
    built_model = family.build_model().to("meta").train()
    chunked_loss = ChunkedLoss(family, built_model, 4)
    batch = family.build_batch(2, 16, torch.Generator())
    inputs = {name: tensor.to("meta") for name, tensor in batch.inputs.items()}
    with FlopCounterMode(display=False) as counter, chunked_loss.provide_labels(batch.labels.to("meta")):
        built_model(**inputs)["logits"].backward()
    count = family.count_flops_per_sequence(16)
    assert 2 * count.compute_hardware_flops("none", loss_in_chunks=True) == pytest.approx(
        counter.get_total_flops(), rel=1e-3
    )


@pytest.mark.long
def test_a_million_tokens_need_no_logits_of_all_of_them() -> None:
    shape = ("model=gpt_tiny", "model.block_size=1048576", "model.vocabulary_size=50000", "sequence_length=1048576")
    run = (
        *shape,
        "batch_size_per_gpu=1",
        "gpus=1",
        "strategy=single",
        "hardware=a100_80gb",
        "mode=predict",
        "activation_checkpointing=full",
    )
    whole, chunked, fine = (
        predict_run(compose_run_config(*run, *settings)).memory.allocated.value
        for settings in ((), ("loss=chunked",), ("loss=chunked", "loss_chunks=256"))
    )
    vocabulary = compose_run_config(*run).model.vocabulary_size  # type: ignore[attr-defined]
    logits_bytes = 2**20 * vocabulary * 4
    assert whole > 2 * logits_bytes
    assert fine < 0.1 * logits_bytes
    assert fine < chunked < logits_bytes


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("loss=chunky",), "choose whole, chunked"),
        (("loss_chunks=4",), "loss=chunked"),
        (("loss=chunked", "loss_chunks=1"), "at least 2"),
        (("loss=chunked", "strategy=tensor_parallel", "gpus=2"), "divided over the vocabulary"),
        (("loss=chunked", "strategy=pipeline", "gpus=2"), "last stage's logits"),
        (("loss=chunked", "model=gpt_tiny", "model.family=mpt"), "a loss of its own"),
        (("loss=chunked", "model=gemma2_2b", "hardware=a100_80gb", "mode=predict"), "changes logits after its head"),
    ],
)
def test_what_has_no_chunked_loss_says_why(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        compose_run_config(*overrides)


def test_a_run_without_chunks_is_the_run_it_was() -> None:
    values: dict[str, Any] = compose_run_config().to_dict()
    assert compose_run_config("loss=whole", "loss_chunks=null").run_id == compose_run_config().run_id
    assert compose_run_config("loss=chunked").run_id == compose_run_config("loss=chunked", "loss_chunks=8").run_id
    assert (
        len({compose_run_config(*loss).run_id for loss in ((), ("loss=chunked",), ("loss=chunked", "loss_chunks=9"))})
        == 3
    )
    assert values["loss"] == "whole"
