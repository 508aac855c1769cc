"""Carry out a sweep on this machine, or its predictions, and show what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import records
from bench.config.run_config import RunConfig
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import search_largest_batch
from bench.launch.worker import WorkerEvent
from bench.planning.planned_runs import write_skipped_rows
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES
from bench.sweeps.planned_sweep import PlannedSweep, show_status
from bench.sweeps.predict_sweep import SweepPredictor, find_largest_batches
from bench.sweeps.tables import (
    SweepProgress,
    build_batch_search_table,
    build_predicted_batch_table,
    build_prediction_table,
    build_result_table,
)
from bench.tracking import TrackerClient

MAX_REPORTED_RUNS = 1000
"""Runs of a sweep up to which its report is drawn without being asked for."""

RowsByRunId = dict[str, Record | None]


def execute_sweep(sweep: PlannedSweep, launcher: LocalLauncher | None, predictor: SweepPredictor) -> int:
    """Run what is to run, if there is a launcher, and show the results of all that was asked for.

    Returns
    -------
    int
        0 if every run has a result (ok or oom; predicted ones also skipped), 1 if one has not.
    """
    request, console = sweep.request, sweep.console
    stop_reason = None if launcher is None else _launch_tasks(sweep, launcher)
    configs = sweep.plan.runs_to_report
    predicted_configs = [config for config in configs if config.is_predicted]
    executed_configs = [config for config in configs if not config.is_predicted]
    executed_rows: RowsByRunId = {
        config.run_id: records.read_latest_row(request.store, config.run_id) for config in executed_configs
    }
    predicted_rows = dict(
        zip(
            [config.run_id for config in predicted_configs],
            predictor.load_or_predict_rows(predicted_configs),
            strict=True,
        )
    )
    if predicted_configs:
        _show_predictions(sweep, predicted_configs, predicted_rows, predictor)
    if executed_configs or not predicted_configs:
        _show_results(sweep, executed_configs, executed_rows)
    if stop_reason:
        console.print(f"Stopped by {stop_reason}: the same command goes on where this one ended.")
        return 1
    has_report = request.report and any((*executed_rows.values(), *predicted_rows.values()))
    if has_report:
        _write_report(request.store, len(configs), console)
    sweep.send_attempts(has_report=has_report)
    is_complete = all(row is not None and row["status"] in FINISHED_STATUSES for row in executed_rows.values())
    all_predicted = all(row["status"] in (*FINISHED_STATUSES, "skipped") for row in predicted_rows.values())
    return 0 if (is_complete or request.search != "none") and all_predicted else 1


def _launch_tasks(sweep: PlannedSweep, launcher: LocalLauncher) -> str | None:
    """Execute what is to run; why not all of it was."""
    request, tasks = sweep.request, sweep.build_tasks()
    write_skipped_rows(request, sweep.plan, "local")
    budget_s = None if request.time_budget_min is None else 60 * request.time_budget_min
    with StopSignal() as stop_signal, SweepProgress(sweep.console, len(tasks)) as progress:
        is_out_of_time = bool(tasks) and launcher.launch(
            tasks,
            request.store,
            request.sweep,
            stop_signal,
            _build_event_handler(progress, sweep.tracker_client),
            budget_s,
            request.tracker,
        )
    return stop_signal.received or (f"time_budget_min={request.time_budget_min:g}" if is_out_of_time else None)


def _build_event_handler(progress: SweepProgress, tracker_client: TrackerClient) -> Callable[[WorkerEvent], None]:
    """What the launcher tells, shown: progress, and what a tracker has to say."""

    def handle_event(event: WorkerEvent) -> None:
        if event["event"] == "tracking":
            tracker_client.merge_report(event["text"], offline_reason=event["offline"], failure=event["failure"])
        progress.show_event(event)

    return handle_event


def _show_results(sweep: PlannedSweep, configs: list[RunConfig], rows_by_run_id: RowsByRunId) -> None:
    if sweep.request.search == "largest_batch" and configs:
        store = sweep.request.store
        largest_batches = [
            (config, search_largest_batch(config, lambda tried: records.read_latest_row(store, tried.run_id)))
            for config in configs
        ]
        sweep.console.print(build_batch_search_table(largest_batches), soft_wrap=True)
        return
    for is_rehearsed in sorted({config.is_rehearsed for config in configs}) or [False]:
        same_mode_configs = [config for config in configs if config.is_rehearsed == is_rehearsed]
        sweep.console.print(build_result_table(same_mode_configs, rows_by_run_id), soft_wrap=True)


def _show_predictions(
    sweep: PlannedSweep, configs: list[RunConfig], rows: dict[str, Record], predictor: SweepPredictor
) -> None:
    if sweep.request.search != "largest_batch":
        sweep.console.print(build_prediction_table(configs, rows), soft_wrap=True)
        return
    with show_status(sweep.console, "searching"):
        largest_batches = find_largest_batches(configs, predictor)
    table = build_predicted_batch_table(
        [(config, *batch_sizes) for config, batch_sizes in zip(configs, largest_batches, strict=True)]
    )
    sweep.console.print(table, soft_wrap=True)


def _write_report(store: Path, num_runs: int, console: Console) -> None:
    if num_runs > MAX_REPORTED_RUNS:
        console.print(
            f"No report of {num_runs} runs, which takes minutes: python -m bench.report {store}", soft_wrap=True
        )
        return
    from bench.reporting import build_report

    console.print(f"Report: {build_report(store, store / 'report')}", soft_wrap=True)
