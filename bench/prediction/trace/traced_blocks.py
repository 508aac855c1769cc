"""Which blocks of a model, or of a stage of it, a trace has: a few that stand for all that are like them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from itertools import pairwise

from bench.models import Family
from bench.models.checkpointing import shorten_family
from bench.prediction.trace.trace import TraceKey

REPEATED_TRACED_BLOCKS = 3
"""Blocks per list that are traced beside those that come before what repeats: two inner ones, which must be alike, and
the last. Where blocks are not alike, or not checkpointed alike, there is a period instead of each."""

SPARE_TRACED_BLOCKS = 2
"""Beyond those that are traced: an inner stage needs a block before it and one behind."""


def count_traced_blocks(num_first: int, period: int) -> int:
    """Blocks per list that a trace has at most."""
    return num_first + REPEATED_TRACED_BLOCKS * period


def shorten_for_trace(family: Family, period: int) -> Family | None:
    """The family with the blocks that a trace has; None where it cannot be shortened."""
    return shorten_family(family, count_traced_blocks(family.num_first_blocks, period), period)


# --- Of one stage of a pipeline.


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of one list that a stage has."""

    list_index: int
    """Of the list."""
    num_blocks: int
    """Number of blocks: no more than are traced, where it stands for a trace."""
    has_first_block: bool
    has_last_block: bool
    first_position: int | None = None
    """Of its first block in the list, up to where they repeat; None where the first block alone is another than the
    rest. Of a stage that is not shortened, since what is done to a block depends on it, the position wherever it is."""


@dataclass(frozen=True)
class StageTraceKey:
    """Everything the trace of a stage depends on but the size of a micro-batch."""

    trace_key: TraceKey
    stage_blocks: tuple[StageBlocks, ...]

    @property
    def num_first_blocks(self) -> int:
        """Blocks of the stage's lists that come before those that repeat, at least one."""
        return max(_count_first_blocks(self.trace_key, blocks.first_position or 0) for blocks in self.stage_blocks)


def list_stage_blocks(block_counts: tuple[int, ...], blocks: range) -> tuple[StageBlocks, ...]:
    """What a stage has of each list of blocks.

    Parameters
    ----------
    block_counts: tuple of int
        Blocks per list of the whole model.
    blocks: range
        The stage's, counted over all lists.
    """
    list_bounds = [sum(block_counts[:index]) for index in range(len(block_counts) + 1)]
    stage_blocks = []
    for index, (start, end) in enumerate(pairwise(list_bounds)):
        first, last = max(start, blocks.start), min(end, blocks.stop)
        if first < last:
            stage_blocks.append(StageBlocks(index, last - first, first == start, last == end, first - start))
    return tuple(stage_blocks)


def shorten_stage_blocks(
    stage_blocks: tuple[StageBlocks, ...], key: TraceKey, block_counts: tuple[int, ...]
) -> tuple[StageBlocks, ...]:
    """The stage that is traced in a stage's place: long lists are shortened, unless blocks are not alike, or not
    checkpointed alike. Of a list that has one block less than are traced the trace is that of longer ones, too.

    Parameters
    ----------
    block_counts: tuple of int
        Blocks per list of the whole model.
    """
    if is_stage_traced_whole(key):
        return stage_blocks
    return tuple(_shorten_list(blocks, key, block_counts[blocks.list_index]) for blocks in stage_blocks)


def _shorten_list(blocks: StageBlocks, key: TraceKey, list_length: int) -> StageBlocks:
    assert blocks.first_position is not None
    first_position = min(blocks.first_position, key.num_first_blocks)
    num_traced = count_traced_blocks(_count_first_blocks(key, first_position), 1)
    can_lengthen = first_position + num_traced + (not blocks.has_last_block) <= list_length
    return dataclasses.replace(
        blocks,
        num_blocks=num_traced
        if can_lengthen and blocks.num_blocks == num_traced - 1
        else min(blocks.num_blocks, num_traced),
        first_position=None if key.num_first_blocks == 1 else first_position,
    )


def _count_first_blocks(key: TraceKey, first_position: int) -> int:
    """Blocks before those that repeat, at least one, of a list's from a position on."""
    return max(1, key.num_first_blocks - first_position)


def is_stage_traced_whole(key: TraceKey) -> bool:
    return key.block_period > 1 or shorten_staged_family(key.family) is None


@functools.lru_cache(maxsize=64)
def shorten_staged_family(family: Family) -> Family | None:
    """The model that shortened stages are made of."""
    return family.limit_blocks(count_traced_blocks(family.num_first_blocks, 1) + SPARE_TRACED_BLOCKS)
