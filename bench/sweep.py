"""``python -m bench.sweep``: expand, plan, launch, collect, report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import records
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
from bench.planning.plan import Plan, make_plan
from bench.planning.request import Request, read_request
from bench.progress import Progress, plan_table, result_table, search_table
from bench.records.schema import FINISHED
from bench.submitting import arrays_table, scripts, submitted_text

EPILOG = """\
Every field of every group under conf/ can be set: model=t5_small strategy=fsdp strategy.sharding_factor=2 gpus=4.
With -m, commas make axes: -m model=t5_tiny,gpt_tiny gpus=1,2. Without a run of your own, the default sweep runs;
others are sweep=NAME, one for every file under conf/sweep. dry_run=true shows the plan. See README.md.
"""


WIDTH_WITHOUT_TERMINAL = 140

ROW_BYTES = 256 * 1024
"""Of the largest rows; a store with less space is refused."""


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
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    try:
        device = detect()
        request = read_request(options.overrides, multirun=options.multirun, device=device)
        launcher = _launcher(request, device)
        # A search starts from what is recorded of it, not from whether its first try is.
        everything = request.force or request.search != "none"
        plan = make_plan(request.points, request.store, force=everything, check=_checks(request, launcher))
        if not request.dry_run:
            _refuse_the_impossible(plan)
            _refuse_unwritable(request.store)
        if isinstance(launcher, SlurmLauncher):
            return _submit(request, plan, launcher, console)
        _set_aside(request, plan)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(plan_table(request, plan, details=request.dry_run))
    if request.dry_run:
        return 0
    return _carry_out(request, plan, launcher, console)


def _launcher(request: Request, device: Device) -> LocalLauncher | SlurmLauncher:
    kind = request.cluster["launcher"]
    if kind == "local":
        return LocalLauncher(request.cluster, device)
    if kind == "slurm":
        SlurmLauncher.check_store(request.store)
        return SlurmLauncher(request.cluster, dry_run=request.dry_run)
    raise bad_value("cluster.launcher", kind, ["local", "slurm"])


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
        name = ledger.new_name()
        batches = launcher.batches(_tasks(request, plan), request.store, name)
        console.print(plan_table(request, plan, details=request.dry_run))
        if batches:
            console.print(arrays_table(launcher, [batch.array for batch in batches]))
        if request.show_script:
            for text in scripts(launcher, batches, request.store, name):
                print(text)
        if not request.dry_run and batches:
            submission = launcher.submit(batches, request.store, request.sweep, name)
            console.print(submitted_text(submission, request.store), soft_wrap=True)
    return 0


def _tasks(request: Request, plan: Plan) -> list[Task]:
    return [Task(config, force=request.force, search=request.search == "largest_batch") for config in plan.to_run]


def _carry_out(request: Request, plan: Plan, launcher: LocalLauncher, console: Console) -> int:
    tasks = _tasks(request, plan)
    with StopSignal() as stop, Progress(console, len(tasks)) as progress:
        if tasks:
            launcher.launch(tasks, request.store, request.sweep, stop, progress.handle)
    everything = [*(config for config, _ in plan.done), *plan.to_run]
    found = {config.run_id: records.latest(request.store, config.run_id) for config in everything}
    if request.search == "largest_batch":
        sizes = [
            (config, largest_batch(config, lambda tried: records.latest(request.store, tried.run_id)))
            for config in everything
        ]
        console.print(search_table(sizes))
    else:
        console.print(result_table(everything, found))
    if stop.received:
        console.print(f"Stopped by {stop.received}: the same command goes on where this one ended.")
        return 1
    if request.report and any(found.values()):
        from bench.reporting import build

        page = build(request.store, request.store / "report")
        console.print(f"Report: {page}", soft_wrap=True)
    complete = all(record is not None and record["status"] in FINISHED for record in found.values())
    return 0 if complete or request.search != "none" else 1


def _checks(request: Request, launcher: LocalLauncher | SlurmLauncher) -> Callable[[RunConfig], None]:
    """What every run must pass: raises `ImpossibleError` where it cannot be carried out as asked."""

    def check(config: RunConfig) -> None:
        launcher.check(config)
        bounded = config.hardware.device != "cpu" or config.hardware.memory_limit_gib is not None
        if request.search != "none" and not bounded:
            raise ImpossibleError(
                f"search={request.search} on a CPU needs hardware.memory_limit_gib: without one it would take all the "
                "memory of this machine."
            )

    return check


def _refuse_the_impossible(plan: Plan) -> None:
    """Raise `UsageError` if nothing at all of what was asked for can run."""
    if plan.impossible and not (plan.to_run or plan.done or plan.underway):
        reasons = list(dict.fromkeys(reason for _, reason in plan.impossible))
        more = (
            f" ({len(reasons) - 1} further reasons: see dry_run=true on a part of the sweep.)"
            if len(reasons) > 1
            else ""
        )
        raise UsageError(f"None of the {len(plan.impossible)} run(s) asked for can run. {reasons[0]}{more}")


def _refuse_unwritable(store: Path) -> None:
    """Raise `UsageError` unless the store can take a row: its folder, and some disk space."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as file:
            os.posix_fallocate(file.fileno(), 0, ROW_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"store={store} is not valid: choose a folder that can be written to ({reason}).") from None


if __name__ == "__main__":
    sys.exit(main())
