"""What a launcher is given to do: a run, or the search for the largest batch of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.planning.batch_search import BatchTrial, search_largest_batches
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES


@dataclass(frozen=True)
class LaunchTask:
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

    def try_batch(sized_config: RunConfig) -> BatchTrial | None:
        record = attempt_run(sized_config)
        if record is None or record["status"] not in FINISHED_STATUSES:
            return None
        peak_bytes = None if record["status"] == "oom" else record["peak_reserved_bytes"]
        return BatchTrial(peak_bytes, config.hardware.memory_limit_bytes, fits=peak_bytes is not None)

    (search,) = search_largest_batches([config], lambda configs: map(try_batch, configs))
    return search.largest_batch_size
