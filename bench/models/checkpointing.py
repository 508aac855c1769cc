"""Activation checkpointing: which blocks compute their activations again in backward, and what they keep instead."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def needs_recorded_blocks(mode: str) -> bool:
    """Whether only a pass of the model tells what a mode computes again
    (`bench.models.checkpointing_budget.record_blocks`)."""
    return mode == ALTERNATE_OPERATORS or find_checkpointing_budget(mode) is not None


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
