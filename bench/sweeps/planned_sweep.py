"""A sweep whose plan is made: what is submitted, executed or only shown."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rich.console import Console

from bench.core.errors import UsageError
from bench.launch.slurm.queue import SlurmError
from bench.launch.slurm.submission_status import find_unfinished_runs
from bench.launch.task import LaunchTask
from bench.planning.planned_runs import PlannedRunPrediction, predict_planned_runs
from bench.planning.request import SweepRequest
from bench.planning.run_predictions import predict_configs
from bench.planning.sweep_plan import SweepPlan
from bench.planning.time_limits import predict_duration_s
from bench.sweeps.tables import build_plan_table
from bench.tracking import TrackerClient
from bench.tracking.attempts import build_report_run


def show_status(console: Console, status: str) -> contextlib.AbstractContextManager[object]:
    """Say on a terminal what takes its time."""
    return console.status(status) if console.is_terminal else contextlib.nullcontext()


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
        with show_status(self.console, "predicting"):
            return predict_planned_runs(self.request, self.plan)

    def show_plan(self, run_predictions: Mapping[str, PlannedRunPrediction]) -> None:
        """Print the plan, with what the predictor says of it.

        Environment variables are no part of a run's identity: where recorded runs were measured with others is said.
        """
        table = build_plan_table(
            self.request, self.plan, show_details=self.request.dry_run, predictions_by_run_id=run_predictions
        )
        self.console.print(table, soft_wrap=True)
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
        with show_status(self.console, f"sending to {request.tracker.name}"):
            client.send_runs(run_id for run_id in dict.fromkeys(run_ids) if run_id not in excluded_run_ids)
            client.send(runs=[report] if report else [])
        if client.counts["sent"] or client.counts["known"]:
            self.console.print(client.format_summary(), soft_wrap=True, markup=False)
