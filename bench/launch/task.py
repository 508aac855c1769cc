"""What a launcher is given to do: a run, or the search for the largest batch of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError
from bench.planning.batch_search import choose_next_batch_size, find_largest_fitting
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES


@dataclass(frozen=True)
class LaunchTask:
    """One thing to do."""

    config: RunConfig
    force: bool = False
    """Execute even what is recorded already."""
    search: bool = False
    """Find the largest batch that fits, starting from the configuration's."""
    expected_s: float = 0.0
    """Seconds one run is expected to take."""


def search_largest_batch(config: RunConfig, attempt_run: Callable[[RunConfig], Record | None]) -> int | None:
    """Search the largest batch size that fits, from the configuration's on.

    Parameters
    ----------
    attempt_run: callable
        Gives the record of a configuration, by executing it or by looking it up.

    Returns
    -------
    int or None
        None if not even one sequence fits, or the search was cut short: there was no record, or one that says
        neither ok nor oom.
    """
    peak_by_batch_size: dict[int, int | None] = {}
    first_batch_size, memory_limit_bytes, batch_unit = (
        config.batch_size_per_gpu,
        config.hardware.memory_limit_bytes,
        config.strategy.batch_size_multiple,
    )
    while (
        batch_size := choose_next_batch_size(peak_by_batch_size, first_batch_size, memory_limit_bytes, batch_unit)
    ) is not None:
        try:
            sized_config = dataclasses.replace(config, batch_size_per_gpu=batch_size)
        except ImpossibleError:  # more tokens than a run may have
            peak_by_batch_size[batch_size] = None
            continue
        record = attempt_run(sized_config)
        if record is None or record["status"] not in FINISHED_STATUSES:
            return None
        peak_by_batch_size[batch_size] = None if record["status"] == "oom" else record["peak_reserved_bytes"]
    return find_largest_fitting(peak_by_batch_size)
