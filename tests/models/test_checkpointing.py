"""Activation checkpointing: which blocks, which operators, and what is computed again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bench.core.errors import ImpossibleError
from bench.models import Family
from bench.models.base import FlopCount
from bench.models.checkpointing import BlockPositions, checkpoint_blocks, is_block_checkpointed
from bench.models.traced_flops import trace_flops
from tests.conftest import compose_run_config

MODELS = ("gpt_tiny", "t5_tiny", "llama_tiny", "moe_tiny")


def build_family(model: str, *overrides: str) -> Family:
    return compose_run_config(f"model={model}", "sequence_length=16", *overrides).model


class ForwardCounter(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def count_training_calls(family: Family, mode: str) -> Counter[str]:
    """Operators of forward and backward on a CPU, where attention is one kernel."""
    model = family.build_model().to_empty(device="cpu")
    checkpoint_blocks(family, model, mode)
    batch = family.build_batch(1, 16, torch.Generator())
    with ForwardCounter() as counter:
        model(**batch.inputs)["logits"].sum().backward()
    return counter.calls


def test_every_third_block_is_the_last_of_three() -> None:
    assert [is_block_checkpointed("every_3", position) for position in range(7)] == [
        *(False, False, True),
        *(False, False, True),
        False,
    ]
    assert all(is_block_checkpointed(mode, 0) for mode in ("full", "selective", "operators"))


def test_every_kth_block_of_each_list_is_wrapped() -> None:
    family = build_family("t5_tiny", "model.num_encoder_layers=5", "model.num_decoder_layers=4")
    model = family.build_model()
    checkpoint_blocks(family, model, "every_2")
    is_wrapped = [
        [type(block).__name__ == "CheckpointWrapper" for block in blocks] for blocks in family.find_block_lists(model)
    ]
    assert is_wrapped == [[False, True, False, True, False], [False, True, False, True]]


def test_saved_operators_are_not_computed_again_and_others_are() -> None:
    family = build_family("gpt_tiny")
    calls = {mode: count_training_calls(family, mode) for mode in ("none", "selective", "operators", "full")}
    attention = next(name for name in calls["none"] if "attention" in name and not name.endswith("backward"))
    products = {mode: sum(counts[name] for name in ("mm", "addmm", "bmm")) for mode, counts in calls.items()}
    assert calls["none"][attention] == calls["operators"][attention] < calls["selective"][attention]
    assert products["none"] == products["operators"] == products["selective"] < products["full"]
    assert calls["operators"]["native_layer_norm"] > calls["none"]["native_layer_norm"]


@pytest.mark.parametrize("mode", ["operators", "every_2", "every_3"])
@pytest.mark.parametrize("model", MODELS)
def test_hardware_flops_are_those_of_a_step(model: str, mode: str) -> None:
    family = build_family(model)
    if model != "moe_tiny":  # whose experts' products depend on values, which meta has not
        built_model = family.build_model().to("meta").train()
        checkpoint_blocks(family, built_model, mode)
        batch = family.build_batch(2, 16, torch.Generator())
        with FlopCounterMode(display=False) as counter:
            built_model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})["logits"].sum().backward()
        counted = family.count_flops_per_sequence(16).compute_hardware_flops(mode)
        assert 2 * counted == pytest.approx(counter.get_total_flops(), rel=1e-3)
    formula, traced = (
        count.compute_hardware_flops(mode) for count in (family.count_flops_per_sequence(16), trace_flops(family, 16))
    )
    assert formula == pytest.approx(traced, rel=1e-3)


def test_a_family_that_does_not_tell_its_blocks_apart_says_so() -> None:
    count = dataclasses.replace(build_family("gpt_tiny").count_flops_per_sequence(16), recomputed_by_block=())
    assert isinstance(count, FlopCount)
    assert count.compute_hardware_flops("operators") == count.model_flops
    with pytest.raises(ImpossibleError, match="every_2"):
        count.compute_hardware_flops("every_2")


@pytest.mark.parametrize("period", [1, 2, 5])
@pytest.mark.parametrize("num_blocks", [3, 4, 7, 16, 33])
def test_a_shortened_models_blocks_are_treated_as_those_they_stand_for(num_blocks: int, period: int) -> None:
    positions = BlockPositions(num_blocks, min(num_blocks, 1 + 3 * period), period)
    mode = f"every_{period}" if period > 1 else "full"
    traced_positions = [positions.find_traced(position) for position in range(num_blocks)]
    for position, traced in enumerate(traced_positions):
        assert is_block_checkpointed(mode, position) == is_block_checkpointed(mode, positions.find_whole(traced))
    assert set(traced_positions) == set(range(positions.num_traced))
    assert sum(positions.count_alike(traced) for traced in range(positions.num_traced)) == num_blocks
