"""Wrap the blocks of a model so that backward computes their activations again, by torch's own wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.models.base import ALTERNATE_OPERATORS, NONE, OPERATORS, SELECTIVE, Family, find_checkpointing_budget
from bench.models.checkpointing import BlockPositions, is_block_checkpointed
from bench.models.checkpointing_budget import (
    LINEAR_KIND,
    KeepingPolicy,
    Occurrence,
    choose_kept_results,
    find_operator_kind,
)

WEIGHT_PRODUCTS = ("mm", "addmm")
"""What linear layers run; experts, grouped products."""

PRODUCT_NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")

GROUPED_PRODUCT_NAME_PART, ATTENTION_NAME_PART = "grouped_mm", "attention"

SAVED_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Of torch's functional ones (namespace ``_c10d_functional``)."""


def checkpoint_blocks(
    family: Family,
    model: nn.Module,
    mode: str,
    block_positions: Sequence[BlockPositions] | None = None,
    *,
    sequence_length: int | None = None,
) -> None:
    """Wrap blocks so that backward computes their activations again.

    ``full`` keeps a block's inputs alone, ``every_K`` does so with every K-th block of each list and leaves the others
    as they are. ``selective`` keeps the results of matrix products with weights and computes the rest again, attention
    scores among it: what "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022,
    arXiv:2205.05198) calls selective activation recomputation. ``operators`` keeps the results of all matrix products,
    of fused attention and of collectives, and computes the rest again; ``operators_every_2`` computes every second
    product of linear layers again, too, as torchtitan does (``selective_ac_option=op``). ``budget_P`` keeps what is
    worth most within P percent of what a block keeps without checkpointing
    (`bench.models.checkpointing_budget`).

    Parameters
    ----------
    block_positions: sequence of BlockPositions or None
        Of each list of a shortened model, whose blocks are treated as those of the whole model.
    sequence_length: int or None
        Of the sequences that the model will be given: ``budget_P`` depends on it.
    """
    if mode == NONE:
        return
    options: dict[str, Any] = {
        "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
        "preserve_rng_state": _has_dropout(model),
    }
    if mode == ALTERNATE_OPERATORS:
        options["context_fn"] = _build_alternate_contexts
    elif mode in _SAVING_POLICIES:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _SAVING_POLICIES[mode])
    budget = find_checkpointing_budget(mode)
    choices = None
    if budget is not None:
        assert sequence_length is not None
        choices = choose_kept_results(family, sequence_length, budget)
    for list_index, blocks in enumerate(family.find_block_lists(model)):
        for index, block in enumerate(blocks):
            position = index if block_positions is None else block_positions[list_index].find_whole(index)
            if choices is not None:
                kept = choices[list_index][index].kept
                options["context_fn"] = functools.partial(_build_budget_contexts, kept)
            if is_block_checkpointed(mode, position):
                blocks[index] = checkpoint_wrapper(block, **options)


def _build_budget_contexts(kept: frozenset[Occurrence]) -> Any:
    """Of one pass of a block: its operators are counted anew."""
    return create_selective_checkpoint_contexts(KeepingPolicy(kept))


def _is_weight_product(operator: Any) -> bool:
    name = operator._schema.name.partition("::")[2]
    return name in WEIGHT_PRODUCTS or GROUPED_PRODUCT_NAME_PART in name


def _is_product_or_collective(operator: Any) -> bool:
    """Of whatever device: fused attention has an operator per kernel, grouped products one per library."""
    name = operator._schema.name.partition("::")[2]
    if operator.namespace == "_c10d_functional":
        return name in SAVED_COLLECTIVES
    return name in PRODUCT_NAMES or GROUPED_PRODUCT_NAME_PART in name or ATTENTION_NAME_PART in name


def _build_policy(is_saved: Callable[[Any], bool]) -> Callable[..., CheckpointPolicy]:
    def choose_policy(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return choose_policy


class _AlternatePolicy:
    """Policy of ``operators_every_2`` for one forward pass of a block, and for its recomputation."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = _is_product_or_collective(operator)
        if find_operator_kind(operator) == LINEAR_KIND:
            self._num_products[context.is_recompute] += 1
            is_saved = self._num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _build_alternate_contexts() -> Any:
    """Of one pass of a block: its products are counted anew."""
    return create_selective_checkpoint_contexts(_AlternatePolicy())


_SAVING_POLICIES = {SELECTIVE: _build_policy(_is_weight_product), OPERATORS: _build_policy(_is_product_or_collective)}
"""Of the modes that keep more than a block's inputs."""


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
