"""Activation checkpointing: which blocks, which operators, and what is computed again."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bench.core.errors import ImpossibleError
from bench.models import Family
from bench.models.base import FlopCount
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.checkpointing import BlockPositions, is_block_checkpointed
from bench.models.checkpointing_budget import (
    FLOPS_PER_BYTE,
    RecordedOperator,
    choose_kept_results,
    count_recomputed_flops,
    record_blocks,
)
from bench.models.traced_flops import trace_flops
from tests.conftest import compose_run_config

MODELS = ("gpt_tiny", "t5_tiny", "llama_tiny", "moe_tiny")


def build_family(model: str, *overrides: str) -> Family:
    return compose_run_config(f"model={model}", "sequence_length=16", *overrides).model


ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class ForwardCounter(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.attention_flops = 0
        """Of fused attention, forward: 2 products of queries x keys x width each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.calls[name] += 1
        if name == ATTENTION_ON_CPU:
            query, key = args[:2]
            self.attention_flops += 4 * query.numel() * key.shape[-2]
        return func(*args, **(kwargs or {}))


def count_training_calls(family: Family, mode: str) -> Counter[str]:
    """Operators of forward and backward on a CPU, where attention is one kernel."""
    model = family.build_model().to_empty(device="cpu")
    checkpoint_blocks(family, model, mode, sequence_length=16)
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


@pytest.mark.parametrize("model", ["gpt_tiny", "llama_tiny"])
def test_every_second_product_of_a_block_is_computed_again(model: str) -> None:
    family = build_family(model)
    calls = {mode: count_training_calls(family, mode) for mode in ("none", "operators_every_2", "full")}
    products = {mode: sum(counts[name] for name in ("mm", "addmm")) for mode, counts in calls.items()}
    in_a_block = {"gpt_tiny": 4, "llama_tiny": 7}[
        model
    ]  # GPT: qkv, output, up, down; Llama: q, k, v, o, gate, up, down
    (blocks,) = family.find_block_lists(family.build_model())
    again = products["operators_every_2"] - products["none"]
    # The last product of GPT is a second one, which nothing needs: recomputation stops before it.
    assert again == len(blocks) * (1 if model == "gpt_tiny" else 3)
    assert products["full"] - products["none"] == len(blocks) * (in_a_block - 1)


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (model, mode)
        for model in (*MODELS, "gemma2")
        for mode in ("full", "selective", "operators", "operators_every_2", "budget_15", "budget_40", "budget_80")
        # On a CPU the attention of T5 that learns its bias is not fused, so that its result is not kept.
        if (model, mode) != ("t5_tiny", "budget_80")
    ],
)
def test_hardware_flops_count_what_a_step_on_a_cpu_computes_again(model: str, mode: str) -> None:
    """Where attention is one operator, and experts have products of their own."""
    gemma2 = ("llama_tiny", "model.architecture=gemma2", "model.attention=eager", "model.sliding_window=8")
    family = build_family(*gemma2) if model == "gemma2" else build_family(model)

    def count_forward_products(mode: str) -> float:
        model = family.build_model().to_empty(device="cpu").train()
        checkpoint_blocks(family, model, mode, sequence_length=16)
        batch = family.build_batch(1, 16, torch.Generator())
        with FlopCounterMode(display=False) as flop_counter, ForwardCounter() as call_counter:
            model(**batch.inputs)["logits"].sum().backward()
        return flop_counter.get_total_flops() + call_counter.attention_flops

    recorded_flops = count_recomputed_flops(family, 16, mode)
    flop_count = family.count_flops_per_sequence(16)
    counted = flop_count.compute_hardware_flops(mode, recorded_flops=recorded_flops) - flop_count.model_flops
    assert count_forward_products(mode) - count_forward_products("none") == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize("model", [*MODELS, "eager"])
def test_the_more_may_be_kept_the_less_is_computed_again(model: str) -> None:
    family = (
        build_family("gpt_tiny", "model.attention=eager", "model.block_size=256")
        if model == "eager"
        else build_family(model)
    )
    length = 256 if model == "eager" else 16
    no_flops, all_flops = (
        family.count_flops_per_sequence(length).compute_hardware_flops(mode) for mode in ("none", "full")
    )
    flops = [count_recomputed_flops(family, length, f"budget_{percent}") for percent in (1, 10, 25, 50, 75, 99)]
    assert all(isinstance(count, int) for count in flops)
    assert sorted(flops, reverse=True) == flops  # type: ignore[type-var]
    assert flops[0] == pytest.approx(all_flops - no_flops, rel=0.01)
    assert model == "eager" or flops[-1] == 0  # scores are not kept without checkpointing, but their softmax


def test_a_choice_within_a_budget_is_the_best_of_all() -> None:
    """By trying every set of a block's operators, of which two cannot be told apart by their names alone."""
    block = record_blocks(build_family("gpt_tiny"), 16)[0][1]
    operators = [operator for operator in block.operators[: block.num_recomputed] if operator.numel]
    assert Counter(operator.occurrence[0] for operator in operators) >= Counter(linear=3, native_layer_norm=2, gelu=1)

    def count_time(kept: Iterable[RecordedOperator]) -> float:
        return sum(operator.flops / FLOPS_PER_BYTE + 2 * operator.moved_numel for operator in kept)

    for percent in (15, 40, 65):
        kept = choose_kept_results(build_family("gpt_tiny"), 16, percent)[0][1].kept
        chosen = [operator for operator in operators if operator.occurrence in kept]
        assert len(chosen) == len(kept) > 0
        budget = percent / 100 * block.saved_numel
        assert sum(operator.numel for operator in chosen) <= budget * 1.001
        best = max(
            count_time(subset)
            for size in range(len(operators) + 1)
            for subset in itertools.combinations(operators, size)
            if sum(operator.numel for operator in subset) <= budget
        )
        assert count_time(chosen) == pytest.approx(best, rel=0.01)


def test_a_compiled_run_has_no_budget() -> None:
    with pytest.raises(ImpossibleError, match="activation_checkpointing=budget_50 is not valid with compile=true"):
        build_family("gpt_tiny", "activation_checkpointing=budget_50", "compile=true")


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


@pytest.mark.parametrize("period", [1, 2])
def test_what_repeats_is_left_out_of_a_model_that_is_shorter_than_the_traced_one(period: int) -> None:
    positions = BlockPositions(1 + 2 * period, 1 + 3 * period, period)
    traced_positions = [positions.find_traced(position) for position in range(positions.num_blocks)]
    assert traced_positions == [*range(1 + period), *range(1 + 2 * period, 1 + 3 * period)]
    assert [positions.find_whole(traced) for traced in traced_positions] == list(range(positions.num_blocks))
    assert not positions.list_repeated_places()
    assert [positions.count_alike(traced) for traced in positions.repeated_positions] == [0] * period
