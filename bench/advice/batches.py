"""The largest batch that fits, for many candidates at once.

Unlike a run that runs out of memory, a prediction says how much too much it would be, and it grows with the batch along
straight pieces (where the peak lies changes with the batch). So a few predictions enclose the largest; in the end it is
predicted itself, and so is the next one. Candidates are searched side by side: a round of predictions serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.config import RunConfig
from bench.planning.forecast import Untold, forecasts
from bench.simulate.prediction import FITS, MemoryPrediction

MOST = 65_536
"""Sequences per GPU at which a search ends: no training has such a batch."""
SECOND = 16
"""Batch tried after one sequence alone: there the peak mostly lies where it lies for large batches."""
PATIENCE = 8
"""Tries after which the gap is just halved: memory does not grow as it was taken to."""


@dataclasses.dataclass
class BatchSearch:
    """The search for the largest batch per GPU that fits; the configuration's own does not matter."""

    config: RunConfig
    tried: dict[int, float] = dataclasses.field(default_factory=dict)
    """Batch size to the bytes that would be reserved."""
    fitting: list[int] = dataclasses.field(default_factory=list)
    """Batch sizes that fit, ascending."""
    capacity: int | None = None
    unbounded: bool = False
    """Nobody knows how much memory there is."""
    untold: Untold | None = None
    """Why there is no prediction."""

    @property
    def unit(self) -> int:
        """Sequences per GPU in which batches are counted here: all that are tried are multiples of it."""
        return self.config.strategy.batch_unit

    @property
    def next(self) -> RunConfig | None:
        """What to predict next, None when the answer is known."""
        known = self.unbounded or self.untold is not None
        size = None if known else self._next_size()
        return None if size is None else dataclasses.replace(self.config, batch_size_per_gpu=size * self.unit)

    @property
    def largest(self) -> int | None:
        """0 if not even the smallest batch fits; None if there is no limit or no prediction."""
        return None if self.unbounded or self.untold is not None else self.unit * max(self.fitting, default=0)

    def note(self, batch_size: int, memory: MemoryPrediction) -> None:
        """Take the prediction of what was next, a batch of so many units."""
        self.capacity, self.unbounded = memory.capacity, memory.capacity is None
        self.tried[batch_size] = memory.reserved.value
        if memory.verdict == FITS:
            self.fitting = sorted({*self.fitting, batch_size})

    def _next_size(self) -> int | None:
        if not self.tried:
            return 1
        if not self.fitting or self.fitting[-1] == MOST:
            return None
        low = self.fitting[-1]
        high = min((size for size in self.tried if size > low), default=None)
        if high is None:
            if low < SECOND:
                return SECOND
            return min(max(self._crossing(self.fitting[-2], low), low + 1), MOST)
        if high == low + 1:
            return None
        if len(self.tried) > PATIENCE:
            return (low + high) // 2
        # Along the chord at least as much fits as is foretold, beyond two that fit at most: the two in turn.
        beyond = len(self.fitting) > 1 and len(self.tried) % 2 == 0
        foretold = self._crossing(self.fitting[-2], low) + 1 if beyond else self._crossing(low, high)
        return min(max(foretold, low + 1), high - 1)

    def _crossing(self, first: int, second: int) -> int:
        """The largest batch within the capacity on the line through two that were tried."""
        assert self.capacity is not None
        rise = self.tried[second] - self.tried[first]
        if rise <= 0:
            return 2 * second
        return first + int((self.capacity - self.tried[first]) * (second - first) / rise)


def search_batches(configs: Sequence[RunConfig]) -> list[BatchSearch]:
    """Search the largest batch of each configuration."""
    searches = [BatchSearch(config) for config in configs]
    while waiting := [(search, config) for search in searches if (config := search.next) is not None]:
        for (search, config), forecast in zip(waiting, forecasts([config for _, config in waiting]), strict=True):
            if isinstance(forecast, Untold):
                search.untold = forecast
            else:
                search.note(config.batch_size_per_gpu // search.unit, forecast.memory)
    return searches
