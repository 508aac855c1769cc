"""A sweep from its command line to its end: expand, plan, launch, collect, report."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import records
from bench.checks.before_sweep import check_machine_once, show_check
from bench.config.run_config import RunConfig
from bench.core.command_line import require_writable_store
from bench.core.errors import ImpossibleError, UsageError, invalid_value_error
from bench.core.progress import show_progress
from bench.hardware import detect_device
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.slurm import submissions
from bench.launch.slurm.launcher import SlurmLauncher
from bench.launch.slurm.queue import SlurmError
from bench.launch.slurm.submission_status import find_unfinished_runs
from bench.launch.task import LaunchTask, search_largest_batch
from bench.launch.worker import WorkerEvent
from bench.planning.planned_runs import PlannedRunPrediction, predict_planned_runs, write_skipped_rows
from bench.planning.request import SweepRequest, parse_sweep_request
from bench.planning.run_predictions import Unpredictable, predict_configs, predict_duration_s
from bench.planning.sweep_plan import SweepPlan, build_sweep_plan
from bench.prediction.trace.trace_cache import release_traces
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES
from bench.sweeps.cluster_tables import build_arrays_table, build_submission_text, list_scripts
from bench.sweeps.predict_sweep import SweepPredictor, find_largest_batches, refuse_unpredictable
from bench.sweeps.tables import (
    SweepProgress,
    build_batch_search_table,
    build_plan_table,
    build_predicted_batch_table,
    build_prediction_table,
    build_result_table,
    describe_assumptions,
)
from bench.tracking import TrackerClient
from bench.tracking.tracked_run import build_report_run


@dataclass(frozen=True)
class PlannedSweep:
    """What was asked for, what of it is to run, and where to print."""

    request: SweepRequest
    plan: SweepPlan
    console: Console

    def build_tasks(self) -> list[LaunchTask]:
        """What a launcher has to do."""
        is_search = self.request.search == "largest_batch"
        executed_configs = [config for config in self.plan.to_run if not config.is_predicted]
        durations_s = [0.0] * len(executed_configs)
        if self.request.time_budget_min is not None:
            predict_configs(executed_configs)  # all at once: each asks for its own
            durations_s = [predict_duration_s(config, launcher="local") for config in executed_configs]
        return [
            LaunchTask(config, force=self.request.force, search=is_search, expected_s=seconds)
            for config, seconds in zip(executed_configs, durations_s, strict=True)
        ]

    def set_aside_submitted(self) -> None:
        """Take out of the plan what the store's earlier sweeps have on a cluster.

        Raises
        ------
        UsageError
            If there are such jobs, and SLURM cannot be asked.
        """
        store, is_search = self.request.store, self.request.search != "none"
        try:
            run_states = find_unfinished_runs(store)
        except SlurmError as error:
            raise UsageError(f"store={store} has jobs on a cluster, but SLURM cannot be asked: {error}.") from None
        self.plan.set_aside_submitted(
            {
                run_id: f"{run_state.state} as job {run_state.job_id}"
                for (run_id, is_search_run), run_state in run_states.items()
                if is_search_run == is_search
            }
        )

    def predict_plan(self) -> dict[str, PlannedRunPrediction]:
        """What the predictor says of what is to run, by run_id; ``skip_oom=true`` sets aside what does not fit."""
        with show_progress(self.console, "predicting"):
            return predict_planned_runs(self.request, self.plan)

    def show_plan(self, run_predictions: Mapping[str, PlannedRunPrediction]) -> None:
        """Print the plan, with what the predictor says of it.

        Environment variables are no part of a run's identity: where recorded runs were measured with others is said.
        """
        table = build_plan_table(
            self.request, self.plan, show_details=self.request.dry_run, predictions_by_run_id=run_predictions
        )
        self.console.print(table, soft_wrap=True)
        for sentence in describe_assumptions(self.request, self.plan):
            self.console.print(sentence, soft_wrap=True, markup=False, highlight=False)
        for variable_change in self.plan.list_changed_variables(os.environ):
            text = f"Recorded with another environment: {variable_change} are not measured again; force=true does."
            self.console.print(text, soft_wrap=True, markup=False)

    @functools.cached_property
    def tracker_client(self) -> TrackerClient:
        """Sends what the sweep's jobs do not send themselves."""
        return TrackerClient(
            self.request.tracker,
            self.request.store,
            lambda line: self.console.print(line, soft_wrap=True, markup=False),
        )

    def send_attempts(self, *, has_report: bool = False, excluded_run_ids: Collection[str] = ()) -> None:
        """Send every attempt of the sweep's runs that is not there yet: predicted, skipped and lost ones, too."""
        request, client = self.request, self.tracker_client
        if not request.tracker.is_active:
            return
        configs = (*self.plan.runs_to_report, *(config for config, _ in self.plan.skipped))
        run_ids = [config.run_id for config in configs]
        report = build_report_run(request.store, request.sweep) if has_report else None
        with show_progress(self.console, f"sending to {request.tracker.name}"):
            client.send_runs(run_id for run_id in dict.fromkeys(run_ids) if run_id not in excluded_run_ids)
            client.send(runs=[report] if report else [])
        if client.counts["sent"] or client.counts["known"]:
            self.console.print(client.format_summary(), soft_wrap=True, markup=False)


# --- Submit a sweep to SLURM, or show what would be submitted.


def submit_sweep(sweep: PlannedSweep, launcher: SlurmLauncher) -> int:
    """Submit what is to run and come back at once; a dry run only shows what would be submitted.

    Raises
    ------
    UsageError
        If SLURM refuses a job, or cannot be asked.
    """
    request, plan, console = sweep.request, sweep.plan, sweep.console
    with contextlib.ExitStack() as stack:
        if not request.dry_run:  # what is queued must not change between looking and submitting
            stack.enter_context(submissions.hold_submission_lock(request.store))
        sweep.set_aside_submitted()
        run_predictions = sweep.predict_plan()
        tasks = sweep.build_tasks()
        predict_configs([task.config for task in tasks])  # all at once: each array asks for its own
        submission_name = submissions.create_submission_name()
        batches = launcher.plan_arrays(tasks, request.store, submission_name)
        arrays = [batch.array for batch in batches]
        sweep.show_plan(run_predictions)
        if batches:
            console.print(build_arrays_table(launcher, arrays))
        if request.show_script:
            for text in list_scripts(launcher, batches, request.store, submission_name):
                print(text)
        launcher.refuse_rejected_arrays(arrays, request.store, submission_name)
        if request.dry_run:
            return 0
        write_skipped_rows(request, plan, "slurm")
        if batches:
            submission = launcher.submit(batches, request.store, request.sweep, submission_name, request.tracker)
            console.print(build_submission_text(submission, request.store), soft_wrap=True)
    sweep.send_attempts(excluded_run_ids={task.config.run_id for task in tasks})
    return 0


# --- Carry out a sweep on this machine, or its predictions, and show what came of it.

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
        sweep.console.print(
            build_result_table(same_mode_configs, rows_by_run_id, sweep.request.cost_terms), soft_wrap=True
        )


def _show_predictions(
    sweep: PlannedSweep, configs: list[RunConfig], rows: dict[str, Record], predictor: SweepPredictor
) -> None:
    if sweep.request.search != "largest_batch":
        sweep.console.print(build_prediction_table(configs, rows, sweep.request.cost_terms), soft_wrap=True)
        return
    with show_progress(sweep.console, "searching"):
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


# --- A sweep from its command line to its end: expand, plan, launch, collect, report.


def run_sweep(overrides: Sequence[str], console: Console, *, multirun: bool) -> int:
    """Run, predict, submit or only plan a sweep.

    Returns
    -------
    int
        0 if every run has a result (ok or oom) or was submitted, 1 if one has not or Ctrl-C came before the first.

    Raises
    ------
    UsageError
        If the command line is a mistake, or nothing of what it asks for can run.
    """
    try:
        device = detect_device()
        request = parse_sweep_request(overrides, multirun=multirun, device=device)
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
        sweep = PlannedSweep(request, plan, console)
        if isinstance(launcher, SlurmLauncher):
            return submit_sweep(sweep, launcher)
        if launcher is not None:
            sweep.set_aside_submitted()
        if isinstance(launcher, LocalLauncher) and request.check and not request.dry_run:
            check_machine_once((task.config for task in sweep.build_tasks()), device, show_check)
        sweep.show_plan(sweep.predict_plan())
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 1
    return 0 if request.dry_run else execute_sweep(sweep, launcher, predictor)


def _build_launcher(request: SweepRequest, device: DetectedDevice) -> LocalLauncher | SlurmLauncher:
    launcher_name = request.cluster["launcher"]
    if launcher_name == "local":
        return LocalLauncher(request.cluster, device)
    if launcher_name == "slurm":
        SlurmLauncher.check_store(request.store)
        return SlurmLauncher(request.cluster, dry_run=request.dry_run)
    raise invalid_value_error("cluster.launcher", launcher_name, ["local", "slurm"])


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
        with show_progress(console, f"predicting {len(configs)} runs"):
            failures = [prediction for prediction in predict_configs(configs) if isinstance(prediction, Unpredictable)]
            if len(failures) == plan.size and all(failure.is_impossible for failure in failures):
                raise UsageError(_format_impossible_sweep([failure.reason for failure in failures]))
            release_traces()  # tens of megabytes, where thousands of rows are to have room
            predictor.load_or_predict_rows(configs)
    return predictor


def _build_run_check(
    request: SweepRequest, launcher: LocalLauncher | SlurmLauncher | None
) -> Callable[[RunConfig], None]:
    """What every run must pass: raises `ImpossibleError` where it cannot be carried out as asked."""

    def check_run(config: RunConfig) -> None:
        request.cost_terms.choose_offer(config)
        if launcher is None or config.is_predicted:
            refuse_unpredictable(config)
        else:
            launcher.check(config)
        if request.search != "none" and not _has_memory_bound(config):
            device = "on a CPU" if config.hardware.device == "cpu" else f"with hardware={config.hardware.name}"
            consequence = (
                "nothing says what fits." if config.is_predicted else "it would take all the memory of this machine."
            )
            raise ImpossibleError(
                f"search={request.search} {device} needs hardware.memory_limit_gib: without one {consequence}"
            )

    return check_run


def _has_memory_bound(config: RunConfig) -> bool:
    """Whether something says, or finds out, how much memory there is."""
    if config.hardware.memory_limit_gib is not None:
        return True
    return config.hardware.memory_gb is not None if config.is_predicted else config.hardware.device != "cpu"


def _refuse_impossible_sweep(plan: SweepPlan) -> None:
    """Raise `UsageError` if nothing at all of what was asked for can run."""
    if plan.impossible and not plan.size:
        raise UsageError(_format_impossible_sweep([reason for _, reason in plan.impossible]))


def _format_impossible_sweep(reasons: list[str]) -> str:
    """The sentence for a sweep of which nothing is possible."""
    first_reason, *other_reasons = dict.fromkeys(reasons)
    more = f" ({len(other_reasons)} further reasons: see dry_run=true on a part of the sweep.)" if other_reasons else ""
    return f"None of the {len(reasons)} run(s) asked for can run. {first_reason}{more}"
