"""Execute exactly one run in this terminal: what ``python -m bench.run`` does."""

from __future__ import annotations

import sys

from bench import records
from bench.config import RunConfig
from bench.launch.host import execute
from bench.launch.stop import StopSignal
from bench.planning.request import Request
from bench.records import Record
from bench.tracking import Courier


def run_alone(request: Request, config: RunConfig) -> Record:
    """Execute one run here and now, whatever is recorded of it, as a new attempt."""
    with StopSignal() as stop:
        with records.lock(request.store, config.run_id):
            record = execute(
                config,
                request.store,
                launcher="alone",
                sweep=request.sweep,
                time_limit_s=float(request.cluster["time_limit_s"]),
                stop=stop,
                log=False,
            )
        courier = Courier(
            request.tracker,
            request.store,
            lambda line: print(line, file=sys.stderr),
            hurry=lambda: stop.received is not None,
        )
        courier.send_runs([config.run_id])
        return record
