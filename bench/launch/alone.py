"""Execute exactly one run in this terminal: what ``python -m bench.run`` does."""

from __future__ import annotations

from bench import records
from bench.config import RunConfig
from bench.launch.host import execute
from bench.launch.stop import StopSignal
from bench.planning.request import Request
from bench.records import Record


def run_alone(request: Request, config: RunConfig) -> Record:
    """Execute one run here and now, whatever is recorded of it, as a new attempt."""
    with records.lock(request.store, config.run_id), StopSignal() as stop:
        return execute(
            config,
            request.store,
            launcher="alone",
            sweep=request.sweep,
            time_limit_s=float(request.cluster["time_limit_s"]),
            stop=stop,
            log=False,
        )
