"""Activation offload: the same gradients; what moves is what blocks keep, once, and as many bytes as predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.core.errors import UsageError
from bench.models.activation_offload import HostTransfer, PinnedTransfer, offload_activations
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.materialize import Materializer
from bench.prediction.predictor import predict_run
from tests.conftest import compose_run_config

MODELS = ("gpt_tiny", "t5_tiny", "llama_tiny", "moe_tiny")
LENGTH, SEQUENCES = 24, 2


class CountingTransfer(PinnedTransfer):
    """Remembers what went to the host, and how much came back."""

    def __init__(self) -> None:
        self.moved: list[torch.Tensor] = []
        self.returned_bytes = 0

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.moved.append(tensor)
        return super().copy_to_host(tensor)

    def copy_to_device(self, host_copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.returned_bytes += host_copy.nbytes
        return super().copy_to_device(host_copy, device)


def compute_gradients(
    model_name: str, checkpointing: str, transfer: HostTransfer | None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    family = compose_run_config(f"model={model_name}", f"sequence_length={LENGTH}").model
    model = family.build_model().train()
    materializer = Materializer(model, family, torch.device("cpu"), seed=3)
    checkpoint_blocks(family, model, checkpointing)
    if transfer is not None:
        offload_activations(family, model, transfer)
    materializer.fill_model(model)
    batch = family.build_batch(SEQUENCES, LENGTH, torch.Generator().manual_seed(5))
    family.compute_loss(model(**batch.inputs)["logits"], batch.labels).backward()
    return model, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full", pytest.param("operators", marks=pytest.mark.long)])
def test_gradients_are_the_same_and_no_weight_moves(model_name: str, checkpointing: str) -> None:
    transfer = CountingTransfer()
    model, gradients = compute_gradients(model_name, checkpointing, transfer)
    _, expected_gradients = compute_gradients(model_name, checkpointing, None)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert transfer.moved
    assert not weights & {tensor.untyped_storage().data_ptr() for tensor in transfer.moved}
    places = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in transfer.moved]
    assert len(places) == len(set(places))  # they are all held here, so that no address is used twice
    assert transfer.returned_bytes == sum(tensor.nbytes for tensor in transfer.moved)


@pytest.mark.parametrize("checkpointing", ["none", "full", "every_2"])
def test_as_much_moves_as_is_predicted_of_a_gpu(checkpointing: str) -> None:
    """With attention that is the same operators on a CPU and on a GPU."""
    run = ("model=gpt_tiny", "model.num_layers=7", "model.attention=eager", f"sequence_length={LENGTH}")
    run = (*run, f"activation_checkpointing={checkpointing}", f"batch_size_per_gpu={SEQUENCES}", "precision=fp32")
    config = compose_run_config(
        *run, "strategy=single", "hardware=a100_80gb", "mode=predict", "activation_offload=true"
    )
    transfer = CountingTransfer()
    model = config.model.build_model().train()
    materializer = Materializer(model, config.model, torch.device("cpu"), seed=3)
    checkpoint_blocks(config.model, model, checkpointing)
    offload_activations(config.model, model, transfer)
    materializer.fill_model(model)
    model(**config.model.build_batch(SEQUENCES, LENGTH, torch.Generator()).inputs)
    assert predict_run(config).memory.host == sum(tensor.nbytes for tensor in transfer.moved)


def test_a_gpu_keeps_less_and_waits_for_its_link() -> None:
    run = ("model=llama3_8b", "sequence_length=4096", "gpus=8", "strategy=fsdp", "precision=bf16", "mode=predict")
    run = (*run, "hardware=h100_80gb", "batch_size_per_gpu=1")
    kept, moved = (predict_run(compose_run_config(*run, *settings)) for settings in ((), ("activation_offload=true",)))
    assert kept.memory.host == 0 < moved.memory.host
    saved_bytes = kept.memory.allocated.value - moved.memory.allocated.value
    assert saved_bytes == pytest.approx(moved.memory.host, rel=0.15)
    assert kept.time is not None
    assert moved.time is not None
    host = compose_run_config(*run).hardware.host
    assert host is not None
    transfer_s = 2 * moved.memory.host * host.compute_link_seconds_per_byte(8)
    assert moved.time.step_s.value - kept.time.step_s.value == pytest.approx(transfer_s, rel=0.1)
    assert moved.time.limited_by == "host link"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("activation_offload=maybe",), "true or false"),
        (("activation_offload=true", "compile=true"), "compile=true"),
        (("activation_offload=true", "strategy=tensor_parallel", "gpus=2"), "tensor_parallel"),
        (("activation_offload=true", "strategy=pipeline", "gpus=2"), "several micro-batches"),
    ],
)
def test_what_cannot_offload_says_why(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        compose_run_config(*overrides)


def test_a_run_that_offloads_nothing_is_the_run_it_was() -> None:
    assert compose_run_config("activation_offload=false").run_id == compose_run_config().run_id
    assert compose_run_config("activation_offload=true").run_id != compose_run_config().run_id
