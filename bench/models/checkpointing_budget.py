"""Activation checkpointing within a memory budget: which results of a block's forward pass are worth keeping.

A pass of the model on meta tells, for every operator of a block, what its result takes and what computing it again
would take. Recomputation runs every operator whose result is not kept, so that bytes and time of operators add up, and
the best choice within a budget is a 0-1 knapsack: torch solves it, as it does for compiled regions
(``torch._functorch.config.activation_memory_budget``, whose meaning of a share is the one here).

Attention is taken to be one operator. Where a device has none that is fused (on a CPU, for a bias that is learned), its
products are computed again although its result was to be kept.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from bench.models.base import ALTERNATE_OPERATORS, Family, find_checkpointing_budget

FLOPS_PER_BYTE = 153
"""A product of so many FLOPs takes as long as moving a byte: 312 TFLOP/s in bf16 over 2.039 TB/s, both of NVIDIA's
data sheet of the A100 80GB SXM. One number for all devices, so that a budget keeps the same results everywhere."""

ELEMENT_BYTES = 2
"""Of activations, whose relative sizes alone matter."""

LINEAR_OPERATORS = ("mm", "addmm", "_scaled_mm")
BATCHED_PRODUCTS = ("bmm", "baddbmm")
LINEAR_KIND, ATTENTION_KIND, GROUPED_KIND = "linear", "attention", "grouped_mm"

UNKEPT_OPERATORS = ("_to_copy", "clone", "copy_", "detach", "arange", "empty", "zeros", "ones", "full", "scalar_tensor")
"""Parts of an operator that others stand for, or that cost nothing."""

Occurrence = tuple[str, int]
"""Kind of an operator, and how many of that kind the block ran before it."""


@dataclass
class RecordedOperator:
    """An operator of a block's forward pass."""

    occurrence: Occurrence
    numel: int
    """Elements of its results that are new tensors."""
    moved_numel: int
    """Elements that it reads and writes."""
    flops: int
    storages: tuple[int, ...] = field(compare=False)
    """Of its results."""


@dataclass
class RecordedBlock:
    """What the forward pass of a block did, for one sequence."""

    operators: list[RecordedOperator] = field(default_factory=list)
    saved_numel: int = 0
    """Elements of what autograd keeps for backward of the results of operators."""
    num_recomputed: int = 0
    """Operators that ran before autograd kept its last tensor: recomputation stops there."""


@dataclass(frozen=True)
class BlockChoice:
    """What a block keeps."""

    kept: frozenset[Occurrence]
    recomputed_flops: int
    """Of the matrix products that backward computes again, per sequence."""


class KeepingPolicy:
    """Policy of one forward pass of a block, and of its recomputation, for
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts``."""

    def __init__(self, kept: frozenset[Occurrence]) -> None:
        self.kept = kept
        self.counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts, kind = self.counts[context.is_recompute], find_operator_kind(operator)
        occurrence = (kind, counts[kind])
        counts[kind] += 1
        return CheckpointPolicy.MUST_SAVE if occurrence in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


def find_operator_kind(operator: Any) -> str:
    """Name of an operator, by which it is counted: one for all kernels of fused attention, for all products of
    experts, and for all products of linear layers, with or without bias."""
    name: str = operator._schema.name.partition("::")[2]
    if name in LINEAR_OPERATORS:
        return LINEAR_KIND
    if name in BATCHED_PRODUCTS:
        return "bmm"
    return next((kind for kind in (ATTENTION_KIND, GROUPED_KIND) if kind in name), name)


@functools.lru_cache(maxsize=64)
def choose_kept_results(family: Family, sequence_length: int, budget: int) -> tuple[tuple[BlockChoice, ...], ...]:
    """Per list and block, what it keeps for backward.

    Parameters
    ----------
    budget: int
        Percent of what the block keeps without checkpointing, besides its inputs.
    """
    known: list[tuple[RecordedBlock, BlockChoice]] = []

    def choose(block: RecordedBlock) -> BlockChoice:
        for known_block, choice in known:
            if block == known_block:
                return choice
        known.append((block, _choose_for_block(block, budget / 100)))
        return known[-1][1]

    return tuple(tuple(map(choose, blocks)) for blocks in record_blocks(family, sequence_length))


def count_recomputed_flops(family: Family, sequence_length: int, mode: str) -> int | None:
    """FLOPs per sequence that backward computes again with ``budget_P`` and ``operators_every_2``; None with other
    modes."""
    if mode == ALTERNATE_OPERATORS:
        block_lists = record_blocks(family, sequence_length)
        return sum(_count_alternate_flops(block) for blocks in block_lists for block in blocks)
    budget = find_checkpointing_budget(mode)
    if budget is None:
        return None
    choices = choose_kept_results(family, sequence_length, budget)
    return sum(choice.recomputed_flops for blocks in choices for choice in blocks)


def _count_alternate_flops(block: RecordedBlock) -> int:
    """FLOPs of every second product of linear layers that the block's backward needs."""
    recomputed = block.operators[: block.num_recomputed]
    kinds_and_numbers = [(operator, *operator.occurrence) for operator in recomputed]
    return sum(operator.flops for operator, kind, number in kinds_and_numbers if kind == LINEAR_KIND and number % 2)


def _choose_for_block(block: RecordedBlock, share: float) -> BlockChoice:
    recomputed = block.operators[: block.num_recomputed]
    candidates = [operator for operator in recomputed if operator.numel]
    total_numel = sum(operator.numel for operator in candidates)
    kept: set[Occurrence] = set()
    if candidates:
        _, positions, _ = dp_knapsack(
            [operator.numel / total_numel for operator in candidates],
            [
                operator.flops / FLOPS_PER_BYTE / ELEMENT_BYTES / total_numel + operator.moved_numel / total_numel
                for operator in candidates
            ],
            min(1.0, share * block.saved_numel / total_numel),
        )
        kept = {candidates[position].occurrence for position in positions}
    return BlockChoice(
        frozenset(kept), sum(operator.flops for operator in recomputed if operator.occurrence not in kept)
    )


@functools.lru_cache(maxsize=64)
def record_blocks(family: Family, sequence_length: int) -> tuple[tuple[RecordedBlock, ...], ...]:
    """Run the model on one sequence, on meta, and note what each block does."""
    model = family.build_model().to("meta")
    model.train()
    recorder = _BlockRecorder(model)
    block_lists = family.find_block_lists(model)
    for block in (block for blocks in block_lists for block in blocks):
        block.register_forward_pre_hook(recorder.enter_block)
        block.register_forward_hook(recorder.leave_block)
    batch = family.build_batch(1, sequence_length, torch.Generator())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        recorder.record_attention_as_one(),
        torch.autograd.graph.saved_tensors_hooks(recorder.note_saved, lambda tensor: tensor),
    ):
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})
    return tuple(tuple(recorder.blocks[block] for block in blocks) for blocks in block_lists)


class _BlockRecorder(TorchDispatchMode):
    """Notes the operators of blocks, and what autograd keeps of their results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks: dict[nn.Module, RecordedBlock] = {}
        self._depth = 0
        self._block = RecordedBlock()
        self._counts: Counter[str] = Counter()
        self._numels: dict[int, int] = {}
        """Elements by storage, of the results of this block's operators that autograd does not keep yet."""
        self._alive: list[torch.Tensor] = []
        """So that no storage has the identity of one before it."""
        self._attention_flops: int | None = None
        """While attention runs, whose operators are one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if not self._depth:
            return results
        packet = func._overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=results) if packet in flop_registry else 0
        if self._attention_flops is not None:
            self._attention_flops += flops
            return results
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        kind = find_operator_kind(func)
        if func._schema.is_mutable:
            self._forget_mutated(inputs[0])
        is_kept = not func._schema.is_mutable and not any(part in kind for part in UNKEPT_OPERATORS)
        self._append_operator(kind, inputs, outputs, flops, is_view=func.is_view, is_candidate=is_kept)
        return results

    def _append_operator(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        flops: int,
        *,
        is_candidate: bool,
        is_view: bool = False,
    ) -> None:
        input_storages = {_identify_storage(tensor) for tensor in inputs}
        new_outputs = [tensor for tensor in outputs if not is_view and _identify_storage(tensor) not in input_storages]
        for tensor in new_outputs:
            self._numels[_identify_storage(tensor)] = tensor.numel()
        self._alive += outputs
        keeps_numbers = is_candidate and all(tensor.is_floating_point() for tensor in new_outputs)
        self._block.operators.append(
            RecordedOperator(
                (kind, self._counts[kind]),
                sum(tensor.numel() for tensor in new_outputs) if keeps_numbers else 0,
                sum(tensor.numel() for tensor in (*inputs, *new_outputs)) if new_outputs else 0,
                flops,
                tuple(map(_identify_storage, new_outputs)),
            )
        )
        self._counts[kind] += 1

    def _forget_mutated(self, tensor: torch.Tensor) -> None:
        """What is written to in place cannot be kept as it was."""
        for operator in self._block.operators:
            if _identify_storage(tensor) in operator.storages:
                operator.numel = 0

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with what autograd keeps, as it is kept."""
        if self._depth and self._attention_flops is None:
            storage = _identify_storage(tensor)
            self._block.saved_numel += self._numels.pop(storage, 0)
            self._block.num_recomputed = len(self._block.operators)
        return tensor

    @contextmanager
    def record_attention_as_one(self) -> Iterator[None]:
        """Count scaled dot-product attention as the fused operator that a device has for it."""
        original_attention = functional.scaled_dot_product_attention

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                return original_attention(query, key, value, *args, **kwargs)
            self._attention_flops = 0
            result = original_attention(query, key, value, *args, **kwargs)
            flops, self._attention_flops = self._attention_flops, None
            self._append_operator(ATTENTION_KIND, [query, key, value], [result], flops, is_candidate=True)
            for tensor in (query, key, value, result):
                self.note_saved(tensor)
            return result

        functional.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = original_attention

    def enter_block(self, *_: Any) -> None:
        if not self._depth:
            self._block, self._counts, self._numels = RecordedBlock(), Counter(), {}
        self._depth += 1

    def leave_block(self, block: nn.Module, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.blocks[block] = self._block
            self._alive.clear()


def _identify_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
