"""Execute exactly one run in this terminal: what ``python -m bench.run`` does."""

from __future__ import annotations

import sys

from bench.config import RunConfig
from bench.launch.host import StuckError, execute
from bench.launch.stop import StopSignal
from bench.launch.worker import turn
from bench.planning.request import Request
from bench.records import Record
from bench.tracking import Courier


def run_alone(request: Request, config: RunConfig) -> Record | None:
    """Execute one run here, whatever is recorded of it, as a new attempt, once no other sweep executes it.

    Returns
    -------
    Record or None
        The row that was written; None if a signal came before the run began.

    Raises
    ------
    TakenError
        If a job of another launcher has the run.
    OSError
        If the store cannot be written.
    """
    with StopSignal() as stop:
        with turn(request.store, config.run_id, stop):
            if stop.received:
                print(f"Stopped by {stop.received}.", file=sys.stderr)
                return None
            try:
                record = execute(
                    config,
                    request.store,
                    launcher="alone",
                    sweep=request.sweep,
                    time_limit_s=float(request.cluster["time_limit_s"]),
                    stop=stop,
                    log=False,
                )
            except StuckError as error:
                print(error, file=sys.stderr)
                record = error.record
        courier = Courier(
            request.tracker,
            request.store,
            lambda line: print(line, file=sys.stderr),
            hurry=lambda: stop.received is not None,
        )
        courier.send_runs([config.run_id])
        return record
