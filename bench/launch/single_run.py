"""Execute exactly one run in this terminal: what ``python -m bench.run`` does."""

from __future__ import annotations

import sys

from bench.config.run_config import RunConfig
from bench.launch.run_on_host import UnkillableRankError, execute_run
from bench.launch.stop_signal import StopSignal
from bench.launch.worker import hold_run_lock
from bench.planning.request import SweepRequest
from bench.records import Record
from bench.tracking import TrackerClient


def execute_single_run(request: SweepRequest, config: RunConfig) -> Record | None:
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
        with hold_run_lock(request.store, config.run_id, stop):
            if stop.received:
                print(f"Stopped by {stop.received}.", file=sys.stderr)
                return None
            try:
                record = execute_run(
                    config,
                    request.store,
                    launcher="alone",
                    sweep=request.sweep,
                    time_limit_s=float(request.cluster["time_limit_s"]),
                    stop=stop,
                    log_to_file=False,
                )
            except UnkillableRankError as error:
                print(error, file=sys.stderr)
                record = error.record
        tracker_client = TrackerClient(
            request.tracker,
            request.store,
            lambda line: print(line, file=sys.stderr),
            is_stopping=lambda: stop.received is not None,
        )
        tracker_client.send_runs([config.run_id])
        return record
