"""What torch's FSDP1 keeps of frozen units under reentrant checkpoints around them."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from bench.prediction.other_software_memory import predict_peak
from bench.prediction.predictor import predict_run
from tests.conftest import compose_run_config

WIDTH, NUM_BLOCKS = 16, 6


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def shard(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


class Block(nn.Module):
    """A product that may be frozen, and one that is trained and has a unit of its own; it notes its inputs."""

    def __init__(self, inputs: list[weakref.ref[torch.Tensor]], num_kept: list[int], *, is_frozen: bool) -> None:
        super().__init__()
        self.inputs, self.num_kept = inputs, num_kept
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not is_frozen)
        self.adapter = shard(nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            living = (reference() for reference in self.inputs)
            self.num_kept.append(sum(tensor is not None and tensor.grad is not None for tensor in living))
            self.inputs.append(weakref.ref(x))
        return x + self.base(x) + self.adapter(x)


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("is_frozen", "expected"), [(True, list(range(NUM_BLOCKS))), (False, [0] * NUM_BLOCKS)])
def test_inputs_and_gradients_of_frozen_units_live_until_backward_ends(fake_group, is_frozen, expected):
    """When a block is computed again, those of all blocks behind it are there still; afterwards none is."""
    inputs, num_kept = [], []
    model = shard(Blocks(*(shard(Block(inputs, num_kept, is_frozen=is_frozen)) for _ in range(NUM_BLOCKS))))
    model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert num_kept == expected


LORA = ("mode=predict", "finetune=lora", "finetune.rank=16", "precision=bf16_pure", "activation_checkpointing=full")


@pytest.mark.long
def test_what_is_kept_grows_with_the_depth():
    """Two more hidden states for every block, 2 bytes an element; nothing where every unit is trained."""
    peaks = []
    for num_layers in (20, 40):
        shape = (f"model.num_layers={num_layers}", "model.vocabulary_size=64", "sequence_length=512")
        config = compose_run_config(
            *LORA, "model=gpt_125m", *shape, "strategy=fsdp1", "gpus=2", "hardware=a100_80gb", "batch_size_per_gpu=8"
        )
        peaks.append((predict_peak(config, is_reentrant=True), predict_run(config).memory.allocated.value))
    hidden_bytes = 8 * 512 * 768 * 2
    (reentrant, _), (deeper_reentrant, _) = peaks
    shard_bytes = 20 * 12 * 768**2 * 2 / 2
    assert deeper_reentrant - reentrant == pytest.approx(20 * 2 * hidden_bytes + shard_bytes, rel=0.05)
    assert all(reentrant > usual for reentrant, usual in peaks)
    trained = compose_run_config(
        "mode=predict", "model=gpt_125m", "strategy=fsdp1", "gpus=2", "activation_checkpointing=full",
        "hardware=a100_80gb",
    )  # fmt: skip
    assert predict_peak(trained, is_reentrant=True) == predict_run(trained).memory.allocated.value


MISTRAL_7B_LORA_SHARDED = [("batch_size_per_gpu=2", 15_144_870_400), ("batch_size_per_gpu=4", 21_959_827_968)]
"""Rows 35 and 37 of https://github.com/foundation-model-stack/fms-acceleration/blob/876e2ed6fc4e966785e3f4315f5ee3cdf8e3d097/
scripts/benchmarks/refs/a100_80gb.csv, two GPUs."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "published"), MISTRAL_7B_LORA_SHARDED)
def test_peaks_of_adapters_under_fsdp1_are_those_of_an_allocator(batch, published):
    """Dropout of the adapters' inputs, which the source has, is not predicted."""
    config = compose_run_config(
        *LORA, "model=mistral_7b", "finetune.target_modules=[q_proj,k_proj,v_proj,o_proj]", "strategy=fsdp1", "gpus=2",
        "hardware=a100_80gb", "optimizer.implementation=foreach", "sequence_length=4096", batch,
    )  # fmt: skip
    peak = predict_peak(config, is_reentrant=True)
    assert peak == pytest.approx(published, rel=0.01)
