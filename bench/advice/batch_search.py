"""The largest batch that fits, for many candidates at once.

Unlike a run that runs out of memory, a prediction says how much too much it would be, and it grows with the batch along
straight pieces (where the peak lies changes with the batch). So a few predictions enclose the largest; in the end it is
predicted itself, and so is the next one. Candidates are searched side by side: a round of predictions serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.config.run_config import RunConfig
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.prediction import FITS, MemoryPrediction

MAX_BATCH_UNITS = 65_536
"""Sequences per GPU at which a search ends: no training has such a batch."""
SECOND_BATCH_UNITS = 16
"""Batch tried after one sequence alone: there the peak mostly lies where it lies for large batches."""
MAX_INTERPOLATED_TRIES = 8
"""Tries after which the gap is just halved: memory does not grow as it was taken to."""


@dataclasses.dataclass
class PredictedBatchSearch:
    """The search for the largest batch per GPU that fits; the configuration's own does not matter."""

    config: RunConfig
    reserved_bytes_by_size: dict[int, float] = dataclasses.field(default_factory=dict)
    """Batch size to the bytes that would be reserved."""
    fitting_sizes: list[int] = dataclasses.field(default_factory=list)
    """Batch sizes that fit, ascending."""
    capacity_bytes: int | None = None
    has_unknown_capacity: bool = False
    """Nobody knows how much memory there is."""
    unpredictable: Unpredictable | None = None
    """Why there is no prediction."""

    @property
    def batch_unit(self) -> int:
        """Sequences per GPU in which batches are counted here: all that are tried are multiples of it."""
        return self.config.strategy.batch_size_multiple

    @property
    def next_config(self) -> RunConfig | None:
        """What to predict next, None when the answer is known."""
        is_finished = self.has_unknown_capacity or self.unpredictable is not None
        next_size = None if is_finished else self._choose_next_size()
        return (
            None
            if next_size is None
            else dataclasses.replace(self.config, batch_size_per_gpu=next_size * self.batch_unit)
        )

    @property
    def largest_batch(self) -> int | None:
        """0 if not even the smallest batch fits; None if there is no limit or no prediction."""
        return (
            None
            if self.has_unknown_capacity or self.unpredictable is not None
            else self.batch_unit * max(self.fitting_sizes, default=0)
        )

    def record_prediction(self, batch_units: int, memory: MemoryPrediction) -> None:
        """Take the prediction of what was next, a batch of so many units."""
        self.capacity_bytes, self.has_unknown_capacity = memory.capacity, memory.capacity is None
        self.reserved_bytes_by_size[batch_units] = memory.reserved.value
        if memory.verdict == FITS:
            self.fitting_sizes = sorted({*self.fitting_sizes, batch_units})

    def _choose_next_size(self) -> int | None:
        if not self.reserved_bytes_by_size:
            return 1
        if not self.fitting_sizes or self.fitting_sizes[-1] == MAX_BATCH_UNITS:
            return None
        largest_fitting = self.fitting_sizes[-1]
        smallest_too_large = min((size for size in self.reserved_bytes_by_size if size > largest_fitting), default=None)
        if smallest_too_large is None:
            if largest_fitting < SECOND_BATCH_UNITS:
                return SECOND_BATCH_UNITS
            return min(
                max(self._interpolate_capacity(self.fitting_sizes[-2], largest_fitting), largest_fitting + 1),
                MAX_BATCH_UNITS,
            )
        if smallest_too_large == largest_fitting + 1:
            return None
        if len(self.reserved_bytes_by_size) > MAX_INTERPOLATED_TRIES:
            return (largest_fitting + smallest_too_large) // 2
        # Along the chord at least as much fits as is foretold, beyond two that fit at most: the two in turn.
        is_extrapolating = len(self.fitting_sizes) > 1 and len(self.reserved_bytes_by_size) % 2 == 0
        crossing_size = (
            self._interpolate_capacity(self.fitting_sizes[-2], largest_fitting) + 1
            if is_extrapolating
            else self._interpolate_capacity(largest_fitting, smallest_too_large)
        )
        return min(max(crossing_size, largest_fitting + 1), smallest_too_large - 1)

    def _interpolate_capacity(self, first_size: int, second_size: int) -> int:
        """The largest batch within the capacity on the line through two that were tried."""
        assert self.capacity_bytes is not None
        bytes_increase = self.reserved_bytes_by_size[second_size] - self.reserved_bytes_by_size[first_size]
        if bytes_increase <= 0:
            return 2 * second_size
        return first_size + int(
            (self.capacity_bytes - self.reserved_bytes_by_size[first_size])
            * (second_size - first_size)
            / bytes_increase
        )


def search_largest_batches(configs: Sequence[RunConfig]) -> list[PredictedBatchSearch]:
    """Search the largest batch of each configuration."""
    searches = [PredictedBatchSearch(config) for config in configs]
    while unfinished_searches := [
        (search, config) for search in searches if (config := search.next_config) is not None
    ]:
        for (search, config), prediction in zip(
            unfinished_searches, predict_configs([config for _, config in unfinished_searches]), strict=True
        ):
            if isinstance(prediction, Unpredictable):
                search.unpredictable = prediction
            else:
                search.record_prediction(config.batch_size_per_gpu // search.batch_unit, prediction.memory)
    return searches
