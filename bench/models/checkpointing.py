"""Activation checkpointing: which blocks compute their activations again in backward, and what they keep instead."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.core.typed_config import OneOf
from bench.models.base import (
    ALTERNATE_OPERATORS,
    BUDGET_PREFIX,
    FULL,
    NONE,
    OPERATORS,
    SELECTIVE,
    Family,
    find_checkpointing_budget,
    find_checkpointing_interval,
)
from bench.models.checkpointing_budget import (
    LINEAR_KIND,
    KeepingPolicy,
    Occurrence,
    choose_kept_results,
    find_operator_kind,
)

CHECKPOINTING_MODES = (NONE, FULL, SELECTIVE)
"""Those that advice compares where nothing is said."""

MAX_CHECKPOINTING_INTERVAL = 64

VALID_CHECKPOINTING = OneOf(
    *CHECKPOINTING_MODES,
    OPERATORS,
    ALTERNATE_OPERATORS,
    *(f"every_{interval}" for interval in range(2, MAX_CHECKPOINTING_INTERVAL + 1)),
    *(f"{BUDGET_PREFIX}{percent}" for percent in range(1, 100)),
    description=f"{', '.join(CHECKPOINTING_MODES)}, {OPERATORS}, {ALTERNATE_OPERATORS}, every_K with a whole number K "
    f"of at least 2 and at most {MAX_CHECKPOINTING_INTERVAL}, budget_P with a whole number P (percent) of at least 1 "
    "and at most 99, or budget, for the largest that is predicted to fit",
)

WEIGHT_PRODUCTS = ("mm", "addmm")
"""What linear layers run; experts, grouped products."""

PRODUCT_NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")

GROUPED_PRODUCT_NAME_PART, ATTENTION_NAME_PART = "grouped_mm", "attention"

SAVED_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Of torch's functional ones (namespace ``_c10d_functional``)."""


@dataclass(frozen=True)
class BlockPositions:
    """Where the blocks of a shortened model stand in the whole one.

    Of the blocks before those that repeat, at least one, and of the `2 * period` blocks behind them each stands for
    itself, of the list's last `period` blocks as well. What lies between repeats the last period of the first ones,
    which is left out where the whole model has `period` blocks less than the shortened one.
    """

    num_blocks: int
    """Of the list in the whole model."""
    num_traced: int
    """Of the list in the shortened model: as many, or `3 * period` more than come before those that repeat, which may
    be `period` more than the whole model has."""
    period: int
    """Blocks after which what is done to a block repeats."""

    @property
    def _num_leading(self) -> int:
        return self.num_traced if self.num_traced == self.num_blocks else self.num_traced - self.period

    @property
    def repeated_positions(self) -> range:
        """Of the shortened model, blocks that stand for others beside themselves."""
        is_whole = self.num_traced == self.num_blocks
        return range(0) if is_whole else range(self._num_leading - self.period, self._num_leading)

    def list_repeated_places(self) -> range:
        """Where the blocks they stand for are in the whole model."""
        return range(self._num_leading - self.period, self.num_blocks - self.period)

    def find_whole(self, traced_position: int) -> int:
        """Where a block of the shortened model stands in the whole one; for repeated ones, the first such place."""
        return traced_position + (self.num_blocks - self.num_traced) * (traced_position >= self._num_leading)

    def find_traced(self, position: int) -> int:
        """The block of the shortened model that a block of the whole one is like."""
        if position >= self.num_blocks - self.period:
            return position - (self.num_blocks - self.num_traced)
        if position < self._num_leading:
            return position
        first_repeated = self._num_leading - self.period
        return first_repeated + (position - first_repeated) % self.period

    def count_alike(self, traced_position: int) -> int:
        """Blocks of the whole model that a block of the shortened one stands for."""
        return sum(self.find_traced(position) == traced_position for position in range(self.num_blocks))


def find_block_period(family: Family, mode: str = NONE) -> int:
    """Blocks after which they, and what a mode of checkpointing does to them, repeat."""
    return math.lcm(family.block_period, find_checkpointing_interval(mode) or 1)


def shorten_family(family: Family, max_blocks: int, period: int) -> Family | None:
    """The family with at most so many blocks in every list; None where it cannot be shortened."""
    if family.block_period == 1:
        return family.limit_blocks(max_blocks)
    return family.limit_blocks(max_blocks, period)  # type: ignore[call-arg]


def is_block_checkpointed(mode: str, position: int) -> bool:
    """Whether the block at a position of its list, counted from 0, is checkpointed: every k-th one is the last of k
    blocks, as in torchtitan, whose ``selective_ac_option`` it is."""
    interval = find_checkpointing_interval(mode)
    return mode != NONE if interval is None else (position + 1) % interval == 0


def describe_checkpointing(mode: str) -> str:
    """A mode in words, for sentences."""
    interval, budget = find_checkpointing_interval(mode), find_checkpointing_budget(mode)
    if interval is not None:
        return f"checkpointing of one block in {interval}"
    if budget is not None:
        return f"checkpointing that keeps {budget} % of activations"
    words = {
        NONE: "no activation checkpointing",
        OPERATORS: "checkpointing by operator",
        ALTERNATE_OPERATORS: "checkpointing by operator, of every second product too,",
    }
    return words.get(mode, f"{mode} checkpointing")


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
