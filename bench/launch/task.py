"""What a launcher is given to do: a run, or the search for the largest batch of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from bench.config import RunConfig
from bench.errors import ImpossibleError
from bench.planning.search import largest_fitting, next_batch_size
from bench.records import Record
from bench.records.schema import FINISHED


@dataclass(frozen=True)
class Task:
    """One thing to do."""

    config: RunConfig
    force: bool = False
    """Execute even what is recorded already."""
    search: bool = False
    """Find the largest batch that fits, starting from the configuration's."""
    expected_s: float = 0.0
    """Seconds one run is expected to take."""


def largest_batch(config: RunConfig, attempt: Callable[[RunConfig], Record | None]) -> int | None:
    """Search the largest batch size that fits, from the configuration's on.

    Parameters
    ----------
    attempt: callable
        Gives the record of a configuration, by executing it or by looking it up.

    Returns
    -------
    int or None
        None if not even one sequence fits, or the search was cut short: there was no record, or one that says
        neither ok nor oom.
    """
    tried: dict[int, int | None] = {}
    start, limit, unit = config.batch_size_per_gpu, config.hardware.memory_limit_bytes, config.strategy.batch_unit
    while (size := next_batch_size(tried, start, limit, unit)) is not None:
        try:
            sized = dataclasses.replace(config, batch_size_per_gpu=size)
        except ImpossibleError:  # more tokens than a run may have
            tried[size] = None
            continue
        record = attempt(sized)
        if record is None or record["status"] not in FINISHED:
            return None
        tried[size] = None if record["status"] == "oom" else record["peak_reserved_bytes"]
    return largest_fitting(tried)
