"""``python -m bench.sweep``: expand, plan, launch, collect, report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from rich.console import Console

from bench import records
from bench.checks.before_sweep import check_machine_once
from bench.checks.terminal import show_check
from bench.config.run_config import RunConfig
from bench.core import command_line
from bench.core.command_line import open_stdout_console, require_writable_store
from bench.core.errors import ImpossibleError, UsageError, invalid_value_error
from bench.hardware import detect_device
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.slurm import submissions
from bench.launch.slurm.launcher import SlurmLauncher
from bench.launch.slurm.queue import SlurmError
from bench.launch.slurm.submission_status import find_unfinished_runs
from bench.launch.stop_signal import StopSignal
from bench.launch.task import LaunchTask, search_largest_batch
from bench.launch.worker import WorkerEvent
from bench.planning.planned_runs import predict_planned_runs, write_skipped_rows
from bench.planning.request import SweepRequest, parse_sweep_request
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.planning.sweep_plan import SweepPlan, build_sweep_plan
from bench.planning.time_limits import predict_duration_s
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES
from bench.sweeps.predict_sweep import SweepPredictor, find_largest_batches, refuse_unpredictable
from bench.sweeps.submission_tables import build_arrays_table, build_submission_text, list_scripts
from bench.sweeps.tables import (
    SweepProgress,
    build_batch_search_table,
    build_plan_table,
    build_predicted_batch_table,
    build_prediction_table,
    build_result_table,
)
from bench.tracking import TrackerClient
from bench.tracking.attempts import build_report_run

EPILOG = """\
Every field of every group under conf/ can be set: model=t5_small strategy=fsdp strategy.sharding_factor=2 gpus=4.
With -m, commas make axes: -m model=t5_tiny,gpt_tiny gpus=1,2. Without a run of your own, the default sweep runs;
others are sweep=NAME, one for every file under conf/sweep. dry_run=true shows the plan. See README.md.
"""


WIDTH_WITHOUT_TERMINAL = 140

MAX_REPORTED_RUNS = 1000
"""Runs of a sweep up to which its report is drawn without being asked for."""


def main(arguments: list[str] | None = None) -> int:
    """Run a sweep.

    Returns
    -------
    int
        0 if every run has a result (ok or oom) or was submitted, 1 if one has not, 2 on bad input.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__, epilog=EPILOG)
    parser.add_argument("-m", "--multirun", action="store_true", help="values with commas are axes of a grid")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example sweep=model_scale dry_run=true")
    options = parser.parse_intermixed_args(arguments)
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    try:
        device = detect_device()
        request = parse_sweep_request(options.overrides, multirun=options.multirun, device=device)
        launcher = _build_launcher(request, device) if request.executes_runs else None
        if isinstance(launcher, SlurmLauncher) and (unhealthy_nodes := launcher.exclude_bad_nodes(request.store)):
            console.print(f"Left out, since their last health check failed: {', '.join(unhealthy_nodes)}", markup=False)
        # A search starts from what is recorded of it, not from whether its first try is.
        ignores_recorded = request.force or request.search != "none"
        plan = build_sweep_plan(
            request.points, request.store, force=ignores_recorded, check_run=_build_run_check(request, launcher)
        )
        if isinstance(launcher, LocalLauncher):
            for message in device.messages:
                console.print(message, soft_wrap=True, markup=False)
        if not request.dry_run:
            _refuse_impossible_sweep(plan)
            require_writable_store(request.store)
        predictor = _predict_requested_runs(request, plan, console)
        if isinstance(launcher, SlurmLauncher):
            return _submit_sweep(request, plan, launcher, console)
        if launcher is not None:
            _set_aside_submitted(request, plan)
        if isinstance(launcher, LocalLauncher) and request.check and not request.dry_run:
            check_machine_once((task.config for task in _build_tasks(request, plan)), device, show_check)
        with _show_status(console, "predicting"):
            run_predictions = predict_planned_runs(request, plan)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 1
    console.print(
        build_plan_table(request, plan, show_details=request.dry_run, predictions_by_run_id=run_predictions),
        soft_wrap=True,
    )
    _warn_changed_variables(plan, console)
    if request.dry_run:
        return 0
    return _execute_plan(request, plan, launcher, predictor, console)


def _build_launcher(request: SweepRequest, device: DetectedDevice) -> LocalLauncher | SlurmLauncher:
    launcher_name = request.cluster["launcher"]
    if launcher_name == "local":
        return LocalLauncher(request.cluster, device)
    if launcher_name == "slurm":
        SlurmLauncher.check_store(request.store)
        return SlurmLauncher(request.cluster, dry_run=request.dry_run)
    raise invalid_value_error("cluster.launcher", launcher_name, ["local", "slurm"])


def _show_status(console: Console, status: str) -> contextlib.AbstractContextManager[object]:
    """Say on a terminal what takes its time."""
    return console.status(status) if console.is_terminal else contextlib.nullcontext()


def _predict_requested_runs(request: SweepRequest, plan: SweepPlan, console: Console) -> SweepPredictor:
    """Predict what is to be predicted, so that its rows are there.

    Raises
    ------
    UsageError
        If nothing at all of what was asked for can be predicted.
    """
    predictor = SweepPredictor(request.store, request.sweep, force=request.force, recorded_rows=plan.recorded_rows)
    configs = [config for config in plan.to_run if config.is_predicted]
    if configs and not request.dry_run:
        with _show_status(console, f"predicting {len(configs)} runs"):
            predictions = predict_configs(configs)
            if len(configs) == plan.size and all(
                isinstance(prediction, Unpredictable) and prediction.is_impossible for prediction in predictions
            ):
                raise UsageError(
                    _format_impossible_sweep(
                        len(configs),
                        [prediction.reason for prediction in predictions if isinstance(prediction, Unpredictable)],
                    )
                )
            predictor.load_or_predict_rows(configs)
    return predictor


def _set_aside_submitted(request: SweepRequest, plan: SweepPlan) -> None:
    """Take out of the plan what the store's earlier sweeps have on a cluster."""
    is_search = request.search != "none"
    try:
        run_states = find_unfinished_runs(request.store)
    except SlurmError as error:
        raise UsageError(f"store={request.store} has jobs on a cluster, but SLURM cannot be asked: {error}.") from None
    plan.set_aside_submitted(
        {
            run_id: f"{run_state.state} as job {run_state.job_id}"
            for (run_id, is_search_run), run_state in run_states.items()
            if is_search_run == is_search
        }
    )


def _submit_sweep(request: SweepRequest, plan: SweepPlan, launcher: SlurmLauncher, console: Console) -> int:
    """Submit what is to run and come back at once; a dry run only shows what would be submitted."""
    with contextlib.ExitStack() as stack:
        if not request.dry_run:  # what is queued must not change between looking and submitting
            stack.enter_context(submissions.hold_submission_lock(request.store))
        _set_aside_submitted(request, plan)
        run_predictions = predict_planned_runs(request, plan)
        submission_name = submissions.create_submission_name()
        predict_configs(
            [task.config for task in _build_tasks(request, plan)]
        )  # all at once: each array asks for its own
        batches = launcher.plan_arrays(_build_tasks(request, plan), request.store, submission_name)
        console.print(
            build_plan_table(request, plan, show_details=request.dry_run, predictions_by_run_id=run_predictions),
            soft_wrap=True,
        )
        _warn_changed_variables(plan, console)
        if batches:
            console.print(build_arrays_table(launcher, [batch.array for batch in batches]))
        if request.show_script:
            for text in list_scripts(launcher, batches, request.store, submission_name):
                print(text)
        launcher.refuse_rejected_arrays([batch.array for batch in batches], request.store, submission_name)
        if not request.dry_run:
            write_skipped_rows(request, plan, "slurm")
        if not request.dry_run and batches:
            submission = launcher.submit(batches, request.store, request.sweep, submission_name, request.tracker)
            console.print(build_submission_text(submission, request.store), soft_wrap=True)
    if not request.dry_run:
        run_ids_sent_by_jobs = {task.config.run_id for task in _build_tasks(request, plan)}
        _send_attempts(
            request, plan, _build_tracker_client(request, console), console, excluded_run_ids=run_ids_sent_by_jobs
        )
    return 0


def _build_tasks(request: SweepRequest, plan: SweepPlan) -> list[LaunchTask]:
    is_search = request.search == "largest_batch"
    executed_configs = [config for config in plan.to_run if not config.is_predicted]
    durations_s = [0.0] * len(executed_configs)
    if request.time_budget_min is not None:
        predict_configs(executed_configs)  # all at once: each asks for its own
        durations_s = [predict_duration_s(config, launcher="local") for config in executed_configs]
    return [
        LaunchTask(config, force=request.force, search=is_search, expected_s=seconds)
        for config, seconds in zip(executed_configs, durations_s, strict=True)
    ]


def _execute_plan(
    request: SweepRequest, plan: SweepPlan, launcher: LocalLauncher | None, predictor: SweepPredictor, console: Console
) -> int:
    tasks = _build_tasks(request, plan)
    tracker_client = _build_tracker_client(request, console)
    stop_reason = None
    if launcher is not None:
        write_skipped_rows(request, plan, "local")
        budget_s = None if request.time_budget_min is None else 60 * request.time_budget_min
        with StopSignal() as stop_signal, SweepProgress(console, len(tasks)) as progress:
            is_out_of_time = bool(tasks) and launcher.launch(
                tasks,
                request.store,
                request.sweep,
                stop_signal,
                _build_event_handler(progress, tracker_client),
                budget_s,
                request.tracker,
            )
        stop_reason = stop_signal.received or (
            f"time_budget_min={request.time_budget_min:g}" if is_out_of_time else None
        )
    configs = plan.runs_to_report
    predicted_configs = [config for config in configs if config.is_predicted]
    executed_configs = [config for config in configs if not config.is_predicted]
    rows_by_run_id = {
        config.run_id: records.read_latest_row(request.store, config.run_id) for config in executed_configs
    }
    predicted_rows = {
        config.run_id: row
        for config, row in zip(predicted_configs, predictor.load_or_predict_rows(predicted_configs), strict=True)
    }
    if predicted_configs:
        _show_predictions(request, predicted_configs, predicted_rows, predictor, console)
    if request.search == "largest_batch" and executed_configs:
        largest_batches = [
            (
                config,
                search_largest_batch(
                    config, lambda candidate: records.read_latest_row(request.store, candidate.run_id)
                ),
            )
            for config in executed_configs
        ]
        console.print(build_batch_search_table(largest_batches), soft_wrap=True)
    elif executed_configs or not predicted_configs:
        for is_rehearsed in sorted({config.is_rehearsed for config in executed_configs}) or [False]:
            same_mode_configs = [config for config in executed_configs if config.is_rehearsed == is_rehearsed]
            console.print(build_result_table(same_mode_configs, rows_by_run_id), soft_wrap=True)
    if stop_reason:
        console.print(f"Stopped by {stop_reason}: the same command goes on where this one ended.")
        return 1
    has_report = request.report and any((*rows_by_run_id.values(), *predicted_rows.values()))
    if has_report:
        _write_report(request.store, len(configs), console)
    _send_attempts(request, plan, tracker_client, console, has_report=has_report)
    is_complete = all(
        record is not None and record["status"] in FINISHED_STATUSES for record in rows_by_run_id.values()
    )
    all_predicted = all(row["status"] in (*FINISHED_STATUSES, "skipped") for row in predicted_rows.values())
    return 0 if (is_complete or request.search != "none") and all_predicted else 1


def _build_tracker_client(request: SweepRequest, console: Console) -> TrackerClient:
    """Sends what the sweep's jobs do not send themselves."""
    return TrackerClient(request.tracker, request.store, lambda line: console.print(line, soft_wrap=True, markup=False))


def _build_event_handler(progress: SweepProgress, tracker_client: TrackerClient) -> Callable[[WorkerEvent], None]:
    """What the launcher tells, shown: progress, and what a tracker has to say."""

    def handle_event(event: WorkerEvent) -> None:
        if event["event"] == "tracking":
            tracker_client.merge_report(event["text"], offline_reason=event["offline"], failure=event["failure"])
        progress.show_event(event)

    return handle_event


def _send_attempts(
    request: SweepRequest,
    plan: SweepPlan,
    tracker_client: TrackerClient,
    console: Console,
    *,
    has_report: bool = False,
    excluded_run_ids: Collection[str] = (),
) -> None:
    """Send every attempt of the sweep's runs that is not there yet: predicted, skipped and lost ones, too."""
    if not request.tracker.is_active:
        return
    run_ids = [config.run_id for config in (*plan.runs_to_report, *(config for config, _ in plan.skipped))]
    report = build_report_run(request.store, request.sweep) if has_report else None
    with _show_status(console, f"sending to {request.tracker.name}"):
        tracker_client.send_runs(run_id for run_id in dict.fromkeys(run_ids) if run_id not in excluded_run_ids)
        tracker_client.send(runs=[report] if report else [])
    if tracker_client.counts["sent"] or tracker_client.counts["known"]:
        console.print(tracker_client.format_summary(), soft_wrap=True, markup=False)


def _write_report(store: Path, num_runs: int, console: Console) -> None:
    if num_runs > MAX_REPORTED_RUNS:
        console.print(
            f"No report of {num_runs} runs, which takes minutes: python -m bench.report {store}", soft_wrap=True
        )
        return
    from bench.reporting import build_report

    console.print(f"Report: {build_report(store, store / 'report')}", soft_wrap=True)


def _show_predictions(
    request: SweepRequest,
    configs: list[RunConfig],
    rows: dict[str, Record],
    predictor: SweepPredictor,
    console: Console,
) -> None:
    if request.search != "largest_batch":
        console.print(build_prediction_table(configs, rows), soft_wrap=True)
        return
    with _show_status(console, "searching"):
        largest_batches = find_largest_batches(configs, predictor)
    table = build_predicted_batch_table(
        [(config, *batch_sizes) for config, batch_sizes in zip(configs, largest_batches, strict=True)]
    )
    console.print(table, soft_wrap=True)


def _build_run_check(
    request: SweepRequest, launcher: LocalLauncher | SlurmLauncher | None
) -> Callable[[RunConfig], None]:
    """What every run must pass: raises `ImpossibleError` where it cannot be carried out as asked."""

    def check_run(config: RunConfig) -> None:
        if launcher is None or config.is_predicted:
            refuse_unpredictable(config)
        else:
            launcher.check(config)
        if request.search != "none" and not _has_memory_bound(config):
            raise ImpossibleError(
                f"search={request.search} {_describe_device(config)} needs hardware.memory_limit_gib: without one "
                + (
                    "nothing says what fits."
                    if config.is_predicted
                    else "it would take all the memory of this machine."
                )
            )

    return check_run


def _has_memory_bound(config: RunConfig) -> bool:
    """Whether something says, or finds out, how much memory there is."""
    if config.hardware.memory_limit_gib is not None:
        return True
    return config.hardware.memory_gb is not None if config.is_predicted else config.hardware.device != "cpu"


def _describe_device(config: RunConfig) -> str:
    return "on a CPU" if config.hardware.device == "cpu" else f"with hardware={config.hardware.name}"


def _warn_changed_variables(plan: SweepPlan, console: Console) -> None:
    """Environment variables are no part of a run's identity: say where recorded runs were measured with others."""
    for variable_change in plan.list_changed_variables(os.environ):
        text = f"Recorded with another environment: {variable_change} are not measured again; force=true does."
        console.print(text, soft_wrap=True, markup=False)


def _refuse_impossible_sweep(plan: SweepPlan) -> None:
    """Raise `UsageError` if nothing at all of what was asked for can run."""
    if plan.impossible and not plan.size:
        raise UsageError(_format_impossible_sweep(len(plan.impossible), [reason for _, reason in plan.impossible]))


def _format_impossible_sweep(num_runs: int, reasons: list[str]) -> str:
    """The sentence for a sweep of which nothing is possible."""
    first_reason, *other_reasons = dict.fromkeys(reasons)
    more = f" ({len(other_reasons)} further reasons: see dry_run=true on a part of the sweep.)" if other_reasons else ""
    return f"None of the {num_runs} run(s) asked for can run. {first_reason}{more}"


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
