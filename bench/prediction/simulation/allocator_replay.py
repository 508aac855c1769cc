"""Play what a simulated step allocates and frees through the model of the caching allocator.

A strategy's plan says what it holds under which name, the trace which storages the model's own computation makes. What
counts is the allocator's state after a first step: then optimizer state has been cut from what was cached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from bench.models.checkpointing import BlockPositions
from bench.prediction.simulation.caching_allocator import Block, CachingAllocator
from bench.prediction.trace.chunks import Chunk, MemoryEvent, MemoryPiece
from bench.prediction.trace.scaled_trace import StorageOrigin
from bench.prediction.trace.trace import LOSS_PLACE, BlockPlace
from bench.strategies.step_plan import COMPUTE_STREAM

OPTIMIZER_STATE_NAME, OPTIMIZER_TEMPORARIES_NAME = "optimizer", "optimizer temporaries"
EARLY_NAME = "early"

StorageKind = tuple[str, int, int, int, int]
"""Phase, micro-batch, block list (-1 outside of blocks), segment (-1 within blocks) and order of a storage."""


@dataclass
class AllocatorReplay:
    """One rank's allocator, through several simulated steps.

    What it plays raises `AllocatorFullError` where something does not fit, even when all that was cached has been given
    back.

    Parameters
    ----------
    allocator: CachingAllocator
    positions: sequence of BlockPositions
        Per list of blocks, where those that were traced stand in the whole model.
    """

    allocator: CachingAllocator
    positions: Sequence[BlockPositions]
    updated_numels: Sequence[int] = ()
    num_retries: int = 0
    """Of all steps that have ended."""
    _held: dict[str, list[Block]] = field(default_factory=dict)
    _persistent_names: set[str] = field(default_factory=set)
    _storages: dict[StorageKind, dict[int, Block]] = field(default_factory=lambda: defaultdict(dict))
    _kept_gradients: list[Block] = field(default_factory=list)
    """What `grow` will say the name of."""
    _state_bytes: float = 0.0
    _is_building: bool = True

    def begin_step(self, updated_numels: Sequence[int], early_sizes: Sequence[float] = ()) -> None:
        """What is held from now on persists, and is there already after the first step. Peaks and retries are counted
        anew.

        Parameters
        ----------
        updated_numels: sequence of int
            Elements of the tensors that the optimizer updates: its states and temporaries come one for each.
        early_sizes: sequence of float
            Bytes of what this step holds and others do not.
        """
        self.updated_numels, self._is_building = updated_numels, True
        self._held[EARLY_NAME] = self._allocate_all(early_sizes, COMPUTE_STREAM, 0.0)
        self.allocator.reset_peaks()

    def end_building(self) -> None:
        """What is held from now on is of the step."""
        self._is_building = False

    def end_step(self, now: float) -> None:
        """All streams are done; what of the step is left is freed."""
        for name in [name for name in self._held if name not in self._persistent_names]:
            self.free(name, None)
        for blocks in (self._kept_gradients, *(blocks.values() for blocks in self._storages.values())):
            for block in blocks:
                self.allocator.free(block)
        self._kept_gradients = []
        self._storages.clear()
        self.allocator.collect_late_frees(max(now, self.allocator.last_ready_time))
        self.num_retries += self.allocator.num_retries

    def get_arrangement(self) -> tuple[list[object], list[float]]:
        """All that what is played next depends on: what is held, and where; and when what other streams use comes back,
        in seconds."""
        held = sorted(self._held.items())
        storages = [(kind, *item) for kind, blocks in sorted(self._storages.items()) for item in sorted(blocks.items())]
        used_blocks = [*(block for _, blocks in held for block in blocks), *(block for _, _, block in storages)]
        names = [*((name, len(blocks)) for name, blocks in held), *((kind, key) for kind, key, _ in storages)]
        arrangement, ready_times = self.allocator.get_arrangement([*used_blocks, *self._kept_gradients])
        return [*names, *arrangement], ready_times

    def hold(self, name: str, size: float, stream: str, now: float) -> None:
        """Hold bytes under a name."""
        if self._is_building:
            if name in self._persistent_names:
                return
            if name == OPTIMIZER_STATE_NAME:  # made when the first step ends
                self._state_bytes = size
                self._persistent_names.add(name)
                return
            self._persistent_names.add(name)
        self.free(name, None)
        if name != OPTIMIZER_TEMPORARIES_NAME:
            self._held[name] = self._allocate_all([size], stream, now)
            return
        if OPTIMIZER_STATE_NAME in self._persistent_names and OPTIMIZER_STATE_NAME not in self._held:
            self._held[OPTIMIZER_STATE_NAME] = self._allocate_all(
                self._divide_among_updated(self._state_bytes), COMPUTE_STREAM, now
            )
        self._held[name] = self._allocate_all(self._divide_among_updated(size), stream, now)

    def grow(self, name: str, size: float, now: float) -> None:
        """Hold more under a name; or, of what is held under it, so many bytes less."""
        blocks = self._held.setdefault(name, [])
        if size > 0:
            blocks += self._kept_gradients or self._allocate_all([size], COMPUTE_STREAM, now)
            self._kept_gradients = []
        while size < 0 and blocks:
            size += blocks[0].size
            self.allocator.free(blocks.pop(0))

    def free(self, name: str, ready_time: float | None) -> None:
        """Free what is held under a name; other streams use it until `ready_time`, None for none."""
        for block in self._held.pop(name, ()):
            self.allocator.free(block, ready_time)

    def play(self, chunk: Chunk, place: BlockPlace, now: float) -> None:
        """The storages that the model's own computation makes and frees, and its gradients that stay.

        Parameters
        ----------
        place: (int, int) or None
            Where it is in the whole model.
        """
        local_blocks: dict[int, Block] = {}
        for piece, kept_size in zip_longest(chunk.pieces, chunk.kept_sizes, fillvalue=0.0):
            if not isinstance(piece, MemoryPiece):
                continue
            for event in piece.events:
                if event.origin is None:
                    if event.size:
                        self._put(local_blocks, event.number, self.allocator.allocate(event.size, COMPUTE_STREAM, now))
                    elif event.number in local_blocks:
                        self.allocator.free(local_blocks.pop(event.number))
                else:
                    self._play_lasting(event, event.origin, place, piece.segment.place, now)
            self._kept_gradients += self._allocate_all([kept_size], COMPUTE_STREAM, now)
        for block in local_blocks.values():
            self.allocator.free(block)

    def _play_lasting(
        self, event: MemoryEvent, origin: StorageOrigin, place: BlockPlace, traced_place: BlockPlace, now: float
    ) -> None:
        """A storage that outlives its segment is made or freed."""
        list_index = -1 if origin.segment >= 0 or origin.place is None else origin.place[0]
        kind = origin.phase, origin.micro_batch, list_index, origin.segment, origin.order
        blocks = self._storages[kind]
        position = self._find_position(origin, place, traced_place)
        if event.size:
            self._put(blocks, position, self.allocator.allocate(event.size, COMPUTE_STREAM, now))
            return
        for freed_position in list(blocks) if event.frees_all_alike else [position]:
            if freed_position in blocks:
                self.allocator.free(blocks.pop(freed_position))

    def _find_position(self, origin: StorageOrigin, place: BlockPlace, traced_place: BlockPlace) -> int:
        """Position in the whole model of the block that made a storage; 0 outside of blocks."""
        if origin.segment >= 0 or origin.place is None:
            return 0
        list_index, traced_position = origin.place
        if place is not None and traced_place is not None and place != LOSS_PLACE and place[0] == list_index:
            return place[1] + traced_position - traced_place[1]
        return self.positions[list_index].find_whole(traced_position)

    def _put(self, blocks: dict[int, Block], key: int, block: Block) -> None:
        if key in blocks:
            self.allocator.free(blocks.pop(key))
        blocks[key] = block

    def _divide_among_updated(self, size: float) -> list[float]:
        """A part of so many bytes for every tensor that the optimizer updates."""
        total = sum(self.updated_numels)
        return [size * numel / total for numel in self.updated_numels if numel] if size else []

    def _allocate_all(self, sizes: Iterable[float], stream: str, now: float) -> list[Block]:
        return [self.allocator.allocate(size, stream, now) for size in sizes if size]
