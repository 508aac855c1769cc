"""A model of torch's caching allocator for CUDA devices: what it reserves for the blocks a program asks for.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/
CUDACachingAllocator.cpp; constants in ``c10/core/AllocatorConfig.h``) with default settings, and with
``expandable_segments:True``: rounding, two pools per stream, best fit, splitting and merging, blocks that another
stream still uses when they are freed, and the retry. Not modelled: ``max_split_size_mb``, garbage collection,
``roundup_power2_divisions``, private pools of CUDA graphs, and several devices.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import count

from bench.core.units import MIB

SEGMENT_DISTANCE = 1 << 48
"""Between the addresses of two segments, more than any has bytes."""

MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to a multiple of it (``kMinBlockSize``)."""

MAX_SMALL_BYTES = MIB
"""Up to this size a block is in the pool of small ones (``kSmallSize``)."""

SMALL_SEGMENT_BYTES = 2 * MIB
"""Of a segment that small blocks are cut from (``kSmallBuffer``)."""

LARGE_SEGMENT_BYTES = 20 * MIB
"""Of a segment that blocks of less than `MIN_OWN_SEGMENT_BYTES` are cut from (``large_segment_size``); with expandable
segments, of the pages of the large pool."""

MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on a block has a segment of its own if no free block is large enough (``kMinLargeAlloc``)."""

SEGMENT_ROUNDING_BYTES = 2 * MIB
"""Such segments are rounded up to a multiple of it (``kRoundLarge``)."""


class AllocatorFullError(Exception):
    """Nothing that is cached is left to give back, and the block that is asked for does not fit."""


class Block:
    """A part of a segment, in use or free."""

    __slots__ = ("address", "is_free", "next", "pool", "previous", "size")

    def __init__(self, pool: _BlockPool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.is_free = False
        self.previous: Block | None = None
        self.next: Block | None = None


class _BlockPool:
    """The small or the large blocks of one stream; `mapped_end` is that of its expandable segment."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free_keys: list[tuple[int, int]] = []
        """Size and address of free blocks, sorted: the first that is large enough fits best."""
        self.free_blocks: dict[int, Block] = {}
        """By address."""
        self.last_block: Block | None = None
        """Of the expandable segment."""
        self.mapped_end = 0

    def add_free(self, block: Block) -> None:
        block.is_free = True
        insort(self.free_keys, (block.size, block.address))
        self.free_blocks[block.address] = block

    def remove_free(self, block: Block) -> None:
        self.take_free(bisect_left(self.free_keys, (block.size, block.address)))

    def take_free(self, index: int) -> Block:
        """The free block of that position among `free_keys`, which is free no more."""
        block = self.free_blocks.pop(self.free_keys.pop(index)[1])
        block.is_free = False
        return block

    def merge(self, block: Block, following: Block) -> None:
        """Make one block of two neighbours."""
        block.size += following.size
        block.next = following.next
        if block.next is not None:
            block.next.previous = block
        if self.last_block is following:
            self.last_block = block


def round_block_bytes(size: float) -> int:
    """Bytes of the block for so many."""
    return max(MIN_BLOCK_BYTES, -(-int(size) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def compute_segment_bytes(block_bytes: int) -> int:
    """Bytes that are asked of the device for a block, in whole segments."""
    if block_bytes <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class CachingAllocator:
    """Blocks of one device.

    Parameters
    ----------
    capacity: float
        Bytes the device gives at most.
    expandable_segments: bool
        One segment per pool that grows by pages, instead of one for each large block.
    """

    def __init__(self, capacity: float = float("inf"), *, expandable_segments: bool = False) -> None:
        self._capacity = capacity
        self._is_expandable = expandable_segments
        self._pools: dict[tuple[str, bool], _BlockPool] = {}
        self._addresses = count(0, SEGMENT_DISTANCE)
        self._late_frees: list[tuple[float, int, Block]] = []
        self.allocated = self.active = self.reserved = 0
        self.peak_allocated = self.peak_active = self.peak_reserved = 0
        self.num_retries = 0
        """Times everything cached was given back since the device had too little (``num_alloc_retries``)."""
        self.device_allocated = 0
        """Bytes that were asked of the device, all in all."""

    def reset_peaks(self) -> None:
        """Let peaks, retries and what is asked of the device count from now on."""
        self.peak_allocated, self.peak_active, self.peak_reserved = self.allocated, self.active, self.reserved
        self.num_retries = self.device_allocated = 0

    def allocate(self, size: float, stream: str, now: float = 0.0) -> Block:
        """A block for so many bytes on a stream. What other streams used, and do no more, can be used again.

        Raises
        ------
        AllocatorFullError
            If the device has too little even when everything cached was given back.
        """
        if self._late_frees:
            self.collect_late_frees(now)
        rounded = round_block_bytes(size)
        pool = self._find_pool(stream, rounded)
        block = self._take_free_block(pool, rounded) or self._ask_device(pool, rounded)
        if block is None:
            self._release_cached(now)
            block = self._ask_device(pool, rounded)
            if block is None:
                raise AllocatorFullError(f"{rounded} bytes do not fit {self._capacity - self.reserved:.0f}")
            self.num_retries += 1
        if block.size > rounded:
            self._split(block, rounded)
        self.allocated += block.size
        self.active += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.active > self.peak_active:
            self.peak_active = self.active
        return block

    def free(self, block: Block, ready_time: float | None = None) -> None:
        """Free a block; if other streams use it until `ready_time` it stays active until then (``record_stream``)."""
        self.allocated -= block.size
        if ready_time is None:
            self._return_block(block)
        else:
            heapq.heappush(self._late_frees, (ready_time, block.address, block))

    @property
    def last_ready_time(self) -> float:
        """When the last stream is done with what was freed; 0 where none uses it."""
        return max((ready_time for ready_time, _, _ in self._late_frees), default=0.0)

    def get_arrangement(self, used_blocks: Sequence[Block]) -> tuple[list[object], list[float]]:
        """All that what is allocated next depends on: where blocks are, in use or free, and what comes back late; and
        when that does, in seconds.

        Of addresses only the order counts: segments are numbered, since one that is given back and asked for again has
        another address.

        Parameters
        ----------
        used_blocks: sequence of Block
            All that are allocated, in an order that says what each is for.
        """
        late_frees = sorted(self._late_frees)
        used_blocks = [*used_blocks, *(block for _, _, block in late_frees)]
        free_keys = [pool.free_keys for _, pool in sorted(self._pools.items())]
        last_blocks = [pool.last_block for _, pool in sorted(self._pools.items())]
        segments = {block.address // SEGMENT_DISTANCE for block in used_blocks}
        segments.update(address // SEGMENT_DISTANCE for keys in free_keys for _, address in keys)
        numbers = {segment: number for number, segment in enumerate(sorted(segments))}

        def number_address(address: int) -> tuple[int, int]:
            return numbers[address // SEGMENT_DISTANCE], address % SEGMENT_DISTANCE

        arrangement = [
            self.reserved,
            [(block.size, number_address(block.address)) for block in used_blocks],
            [[(size, number_address(address)) for size, address in keys] for keys in free_keys],
            [block and number_address(block.address) for block in last_blocks],
        ]
        return arrangement, [ready_time for ready_time, _, _ in late_frees]

    def get_counts(self) -> tuple[int, int]:
        """Retries, and bytes asked of the device, since peaks were reset."""
        return self.num_retries, self.device_allocated

    def set_counts(self, counts: Iterator[float]) -> None:
        """Go on counting from others."""
        self.num_retries, self.device_allocated = int(next(counts)), int(next(counts))

    def move_late_frees(self, ready_times: Iterator[float]) -> None:
        """What comes back late does so at other times, in the order of `get_arrangement`."""
        self._late_frees = sorted((next(ready_times), address, block) for _, address, block in sorted(self._late_frees))

    def _find_pool(self, stream: str, size: int) -> _BlockPool:
        key = stream, size <= MAX_SMALL_BYTES
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _BlockPool(is_small=key[1])
        return pool

    def _take_free_block(self, pool: _BlockPool, size: int) -> Block | None:
        """The smallest free block that is large enough. The last one of an expandable segment, which could grow,
        counts as the largest."""
        index = bisect_left(pool.free_keys, (size, -1))
        if index == len(pool.free_keys):
            return None
        block = pool.free_blocks[pool.free_keys[index][1]]
        if block is pool.last_block and index + 1 < len(pool.free_keys):
            index += 1
        return pool.take_free(index)

    def _ask_device(self, pool: _BlockPool, size: int) -> Block | None:
        """A new segment, or more of the expandable one, with room for the block; None if the device has too little."""
        if self._is_expandable:
            return self._expand_segment(pool, size)
        segment_bytes = compute_segment_bytes(size)
        if self.reserved + segment_bytes > self._capacity:
            return None
        self._note_device_bytes(segment_bytes)
        return Block(pool, next(self._addresses), segment_bytes)

    def _expand_segment(self, pool: _BlockPool, size: int) -> Block | None:
        """Map pages behind the last block, as many as it lacks."""
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        last = pool.last_block
        present_bytes = last.size if last is not None and last.is_free else 0
        mapped_bytes = -(-(size - present_bytes) // page_bytes) * page_bytes
        if self.reserved + mapped_bytes > self._capacity:
            return None
        self._note_device_bytes(mapped_bytes)
        if last is not None and last.is_free:
            pool.remove_free(last)
            last.size += mapped_bytes
            block = last
        else:
            block = Block(pool, pool.mapped_end if last is not None else next(self._addresses), mapped_bytes)
            block.previous = last
            if last is not None:
                last.next = block
            pool.last_block = block
        pool.mapped_end = block.address + block.size
        return block

    def _note_device_bytes(self, size: int) -> None:
        self.reserved += size
        self.device_allocated += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        """Leave the rest of a block free, if it is worth it (``should_split``)."""
        pool, remaining_bytes = block.pool, block.size - size
        is_worth_it = (
            remaining_bytes >= MIN_BLOCK_BYTES
            if pool.is_small or self._is_expandable
            else remaining_bytes > MAX_SMALL_BYTES
        )
        if not is_worth_it:
            return
        rest = Block(pool, block.address + size, remaining_bytes)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        if pool.last_block is block:
            pool.last_block = rest
        pool.add_free(rest)

    def _return_block(self, block: Block) -> None:
        """Make a block free, as one with its free neighbours."""
        self.active -= block.size
        pool, previous, following = block.pool, block.previous, block.next
        if following is not None and following.is_free:
            pool.remove_free(following)
            pool.merge(block, following)
        if previous is not None and previous.is_free:
            pool.remove_free(previous)
            pool.merge(previous, block)
            block = previous
        pool.add_free(block)

    def collect_late_frees(self, now: float) -> None:
        """Make free what no stream uses any more."""
        while self._late_frees and self._late_frees[0][0] <= now:
            self._return_block(heapq.heappop(self._late_frees)[2])

    def _release_cached(self, now: float) -> None:
        """Wait for all streams, and give every segment back of which nothing is in use; of an expandable one, the
        pages behind what is in use."""
        self.collect_late_frees(max(now, self.last_ready_time))
        for pool in self._pools.values():
            for block in list(pool.free_blocks.values()):
                if self._is_expandable:
                    self._unmap(pool, block)
                elif block.previous is None and block.next is None:
                    pool.remove_free(block)
                    self.reserved -= block.size

    def _unmap(self, pool: _BlockPool, block: Block) -> None:
        """Give back the whole pages of the last block of an expandable segment. (torch gives back those in its middle
        as well, and maps them again first: such gaps are left as they are here.)"""
        page_bytes = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        if block is not pool.last_block:
            return
        unmapped_bytes = block.size // page_bytes * page_bytes
        if not unmapped_bytes:
            return
        pool.remove_free(block)
        self.reserved -= unmapped_bytes
        block.size -= unmapped_bytes
        pool.mapped_end -= unmapped_bytes
        if block.size:
            pool.add_free(block)
            return
        pool.last_block = block.previous
        if block.previous is not None:
            block.previous.next = None
