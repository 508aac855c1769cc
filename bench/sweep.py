"""``python -m bench.sweep``: expand, plan, launch, collect, report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from rich.console import Console

from bench import command, records
from bench.checks.before_sweep import check_once
from bench.checks.show import show_check
from bench.config import RunConfig
from bench.errors import ImpossibleError, UsageError, bad_value
from bench.hardware import detect
from bench.hardware.detect import Device
from bench.launch.local import LocalLauncher
from bench.launch.slurm import ledger
from bench.launch.slurm.collect import underway
from bench.launch.slurm.launcher import SlurmLauncher
from bench.launch.slurm.queue import SlurmError
from bench.launch.stop import StopSignal
from bench.launch.task import Task, largest_batch
from bench.launch.worker import Event
from bench.outlook import look_ahead, write_skipped
from bench.paths import require_writable
from bench.planning.estimate import expected_s
from bench.planning.forecast import Untold, forecasts
from bench.planning.plan import Plan, make_plan
from bench.planning.request import Request, read_request
from bench.predicting import Predictor, largest_batches, refuse_unpredictable
from bench.progress import Progress, batch_table, plan_table, prediction_table, result_table, search_table
from bench.records import Record
from bench.records.schema import FINISHED
from bench.submitting import arrays_table, scripts, submitted_text
from bench.terminal import output
from bench.tracking import Courier
from bench.tracking.attempts import report_run

EPILOG = """\
Every field of every group under conf/ can be set: model=t5_small strategy=fsdp strategy.sharding_factor=2 gpus=4.
With -m, commas make axes: -m model=t5_tiny,gpt_tiny gpus=1,2. Without a run of your own, the default sweep runs;
others are sweep=NAME, one for every file under conf/sweep. dry_run=true shows the plan. See README.md.
"""


WIDTH_WITHOUT_TERMINAL = 140

MOST_REPORTED = 1000
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
    console = output(WIDTH_WITHOUT_TERMINAL)
    try:
        device = detect()
        request = read_request(options.overrides, multirun=options.multirun, device=device)
        launcher = _launcher(request, device) if request.executes else None
        if isinstance(launcher, SlurmLauncher) and (bad := launcher.leave_out_bad_nodes(request.store)):
            console.print(f"Left out, since their last health check failed: {', '.join(bad)}", markup=False)
        # A search starts from what is recorded of it, not from whether its first try is.
        everything = request.force or request.search != "none"
        plan = make_plan(request.points, request.store, force=everything, check=_checks(request, launcher))
        if isinstance(launcher, LocalLauncher):
            for remark in device.remarks:
                console.print(remark, soft_wrap=True, markup=False)
        if not request.dry_run:
            _refuse_the_impossible(plan)
            require_writable(request.store)
        predictor = _predict(request, plan, console)
        if isinstance(launcher, SlurmLauncher):
            return _submit(request, plan, launcher, console)
        if launcher is not None:
            _set_aside(request, plan)
        if isinstance(launcher, LocalLauncher) and request.check and not request.dry_run:
            check_once((task.config for task in _tasks(request, plan)), device, show_check)
        with _saying(console, "predicting"):
            expected = look_ahead(request, plan)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 1
    console.print(plan_table(request, plan, details=request.dry_run, expected=expected), soft_wrap=True)
    _warn_of_variables(plan, console)
    if request.dry_run:
        return 0
    return _carry_out(request, plan, launcher, predictor, console)


def _launcher(request: Request, device: Device) -> LocalLauncher | SlurmLauncher:
    kind = request.cluster["launcher"]
    if kind == "local":
        return LocalLauncher(request.cluster, device)
    if kind == "slurm":
        SlurmLauncher.check_store(request.store)
        return SlurmLauncher(request.cluster, dry_run=request.dry_run)
    raise bad_value("cluster.launcher", kind, ["local", "slurm"])


def _saying(console: Console, words: str) -> contextlib.AbstractContextManager[object]:
    """Say on a terminal what takes its time."""
    return console.status(words) if console.is_terminal else contextlib.nullcontext()


def _predict(request: Request, plan: Plan, console: Console) -> Predictor:
    """Predict what is to be predicted, so that its rows are there.

    Raises
    ------
    UsageError
        If nothing at all of what was asked for can be predicted.
    """
    predictor = Predictor(request.store, request.sweep, force=request.force, found=plan.found)
    runs = [config for config in plan.to_run if config.predicted]
    if runs and not request.dry_run:
        with _saying(console, f"predicting {len(runs)} runs"):
            told = forecasts(runs)
            if len(runs) == plan.size and all(isinstance(one, Untold) and one.refused for one in told):
                raise UsageError(_none_can(len(runs), [one.reason for one in told if isinstance(one, Untold)]))
            predictor.rows(runs)
    return predictor


def _set_aside(request: Request, plan: Plan) -> None:
    """Take out of the plan what the store's earlier sweeps have on a cluster."""
    search = request.search != "none"
    try:
        standings = underway(request.store)
    except SlurmError as error:
        raise UsageError(f"store={request.store} has jobs on a cluster, but SLURM cannot be asked: {error}.") from None
    plan.set_aside(
        {
            run_id: f"{standing.state} as job {standing.job_id}"
            for (run_id, searched), standing in standings.items()
            if searched == search
        }
    )


def _submit(request: Request, plan: Plan, launcher: SlurmLauncher, console: Console) -> int:
    """Submit what is to run and come back at once; a dry run only shows what would be submitted."""
    with contextlib.ExitStack() as stack:
        if not request.dry_run:  # what is queued must not change between looking and submitting
            stack.enter_context(ledger.submitting(request.store))
        _set_aside(request, plan)
        expected = look_ahead(request, plan)
        name = ledger.new_name()
        forecasts([task.config for task in _tasks(request, plan)])  # all at once: each array asks for its own
        batches = launcher.batches(_tasks(request, plan), request.store, name)
        console.print(plan_table(request, plan, details=request.dry_run, expected=expected), soft_wrap=True)
        _warn_of_variables(plan, console)
        if batches:
            console.print(arrays_table(launcher, [batch.array for batch in batches]))
        if request.show_script:
            for text in scripts(launcher, batches, request.store, name):
                print(text)
        launcher.refuse_arrays([batch.array for batch in batches], request.store, name)
        if not request.dry_run:
            write_skipped(request, plan, "slurm")
        if not request.dry_run and batches:
            submission = launcher.submit(batches, request.store, request.sweep, name, request.tracker)
            console.print(submitted_text(submission, request.store), soft_wrap=True)
    if not request.dry_run:
        sent_by_jobs = {task.config.run_id for task in _tasks(request, plan)}
        _track(request, plan, _courier(request, console), console, but=sent_by_jobs)
    return 0


def _tasks(request: Request, plan: Plan) -> list[Task]:
    search = request.search == "largest_batch"
    executed = [config for config in plan.to_run if not config.predicted]
    expected = [0.0] * len(executed)
    if request.time_budget_min is not None:
        forecasts(executed)  # all at once: each asks for its own
        expected = [expected_s(config, launcher="local") for config in executed]
    return [
        Task(config, force=request.force, search=search, expected_s=seconds)
        for config, seconds in zip(executed, expected, strict=True)
    ]


def _carry_out(
    request: Request, plan: Plan, launcher: LocalLauncher | None, predictor: Predictor, console: Console
) -> int:
    tasks = _tasks(request, plan)
    courier = _courier(request, console)
    stopped = None
    if launcher is not None:
        write_skipped(request, plan, "local")
        budget_s = None if request.time_budget_min is None else 60 * request.time_budget_min
        with StopSignal() as stop, Progress(console, len(tasks)) as progress:
            out_of_time = bool(tasks) and launcher.launch(
                tasks, request.store, request.sweep, stop, _shown(progress, courier), budget_s, request.tracker
            )
        stopped = stop.received or (f"time_budget_min={request.time_budget_min:g}" if out_of_time else None)
    everything = plan.answered
    predicted = [config for config in everything if config.predicted]
    executed = [config for config in everything if not config.predicted]
    found = {config.run_id: records.latest(request.store, config.run_id) for config in executed}
    foretold = {config.run_id: row for config, row in zip(predicted, predictor.rows(predicted), strict=True)}
    if predicted:
        _show_predictions(request, predicted, foretold, predictor, console)
    if request.search == "largest_batch" and executed:
        sizes = [
            (config, largest_batch(config, lambda tried: records.latest(request.store, tried.run_id)))
            for config in executed
        ]
        console.print(search_table(sizes), soft_wrap=True)
    elif executed or not predicted:
        for rehearsed in sorted({config.rehearsed for config in executed}) or [False]:
            alike = [config for config in executed if config.rehearsed == rehearsed]
            console.print(result_table(alike, found), soft_wrap=True)
    if stopped:
        console.print(f"Stopped by {stopped}: the same command goes on where this one ended.")
        return 1
    drawn = request.report and any((*found.values(), *foretold.values()))
    if drawn:
        _report(request.store, len(everything), console)
    _track(request, plan, courier, console, report=drawn)
    complete = all(record is not None and record["status"] in FINISHED for record in found.values())
    answered = all(row["status"] in (*FINISHED, "skipped") for row in foretold.values())
    return 0 if (complete or request.search != "none") and answered else 1


def _courier(request: Request, console: Console) -> Courier:
    """Sends what the sweep's jobs do not send themselves."""
    return Courier(request.tracker, request.store, lambda line: console.print(line, soft_wrap=True, markup=False))


def _shown(progress: Progress, courier: Courier) -> Callable[[Event], None]:
    """What the launcher tells, shown: progress, and what a tracker has to say."""

    def handle(event: Event) -> None:
        if event["event"] == "tracking":
            courier.hear(event["text"], offline=event["offline"], failure=event["failure"])
        progress.handle(event)

    return handle


def _track(
    request: Request,
    plan: Plan,
    courier: Courier,
    console: Console,
    *,
    report: bool = False,
    but: Collection[str] = (),
) -> None:
    """Send every attempt of the sweep's runs that is not there yet: predicted, skipped and lost ones, too."""
    if not request.tracker.active:
        return
    run_ids = [config.run_id for config in (*plan.answered, *(config for config, _ in plan.skipped))]
    page = report_run(request.store, request.sweep) if report else None
    with _saying(console, f"sending to {request.tracker.name}"):
        courier.send_runs(run_id for run_id in dict.fromkeys(run_ids) if run_id not in but)
        courier.send(runs=[page] if page else [])
    if courier.counts["sent"] or courier.counts["known"]:
        console.print(courier.summary(), soft_wrap=True, markup=False)


def _report(store: Path, runs: int, console: Console) -> None:
    if runs > MOST_REPORTED:
        console.print(f"No report of {runs} runs, which takes minutes: python -m bench.report {store}", soft_wrap=True)
        return
    from bench.reporting import build

    console.print(f"Report: {build(store, store / 'report')}", soft_wrap=True)


def _show_predictions(
    request: Request, configs: list[RunConfig], rows: dict[str, Record], predictor: Predictor, console: Console
) -> None:
    if request.search != "largest_batch":
        console.print(prediction_table(configs, rows), soft_wrap=True)
        return
    with _saying(console, "searching"):
        sizes = largest_batches(configs, predictor)
    table = batch_table([(config, *pair) for config, pair in zip(configs, sizes, strict=True)])
    console.print(table, soft_wrap=True)


def _checks(request: Request, launcher: LocalLauncher | SlurmLauncher | None) -> Callable[[RunConfig], None]:
    """What every run must pass: raises `ImpossibleError` where it cannot be carried out as asked."""

    def check(config: RunConfig) -> None:
        if launcher is None or config.predicted:
            refuse_unpredictable(config)
        else:
            launcher.check(config)
        if request.search != "none" and not _bounded(config):
            raise ImpossibleError(
                f"search={request.search} {_unbounded(config)} needs hardware.memory_limit_gib: without one "
                + ("nothing says what fits." if config.predicted else "it would take all the memory of this machine.")
            )

    return check


def _bounded(config: RunConfig) -> bool:
    """Whether something says, or finds out, how much memory there is."""
    if config.hardware.memory_limit_gib is not None:
        return True
    return config.hardware.memory_gb is not None if config.predicted else config.hardware.device != "cpu"


def _unbounded(config: RunConfig) -> str:
    return "on a CPU" if config.hardware.device == "cpu" else f"with hardware={config.hardware.name}"


def _warn_of_variables(plan: Plan, console: Console) -> None:
    """Environment variables are no part of a run's identity: say where recorded runs were measured with others."""
    for words in plan.changed_variables(os.environ):
        text = f"Recorded with another environment: {words} are not measured again; force=true does."
        console.print(text, soft_wrap=True, markup=False)


def _refuse_the_impossible(plan: Plan) -> None:
    """Raise `UsageError` if nothing at all of what was asked for can run."""
    if plan.impossible and not plan.size:
        raise UsageError(_none_can(len(plan.impossible), [reason for _, reason in plan.impossible]))


def _none_can(runs: int, reasons: list[str]) -> str:
    """The sentence for a sweep of which nothing is possible."""
    first, *others = dict.fromkeys(reasons)
    more = f" ({len(others)} further reasons: see dry_run=true on a part of the sweep.)" if others else ""
    return f"None of the {runs} run(s) asked for can run. {first}{more}"


if __name__ == "__main__":
    sys.exit(command.execute(main))
