"""``python -m bench.sweep``: expand, plan, launch, collect, report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import records
from bench.config import RunConfig
from bench.errors import ImpossibleError, UsageError
from bench.hardware import detect
from bench.launch.local import LocalLauncher
from bench.launch.stop import StopSignal
from bench.launch.worker import Task, largest_batch
from bench.planning.plan import FINISHED, Plan, make_plan
from bench.planning.request import Request, read_request
from bench.progress import Progress, plan_table, result_table, search_table

EPILOG = """\
Every field of every group under conf/ can be set: model=t5_small strategy=fsdp strategy.sharding_factor=2 gpus=4.
With -m, commas make axes: -m model=t5_tiny,gpt_tiny gpus=1,2. Without a run of your own, the default sweep runs;
others are sweep=NAME, one for every file under conf/sweep. dry_run=true shows the plan. See README.md.
"""


WIDTH_WITHOUT_TERMINAL = 140


def main(arguments: list[str] | None = None) -> int:
    """Run a sweep. Exit code 0 if every run has a result (ok or oom), 1 if one has not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.sweep", description=__doc__, epilog=EPILOG)
    parser.add_argument("-m", "--multirun", action="store_true", help="values with commas are axes of a grid")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example sweep=model_scale dry_run=true")
    options = parser.parse_intermixed_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    try:
        device = detect()
        request = read_request(options.overrides, multirun=options.multirun, device=device)
        launcher = LocalLauncher(request.cluster, device)
        # A search starts from what is recorded of it, not from whether its first try is.
        everything = request.force or request.search != "none"
        plan = make_plan(request.points, request.store, force=everything, check=_checks(request, launcher))
        if not request.dry_run:
            _refuse_the_impossible(plan)
            _refuse_unwritable(request.store)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(plan_table(request, plan, details=request.dry_run))
    if request.dry_run:
        return 0
    return _carry_out(request, plan, launcher, console)


def _carry_out(request: Request, plan: Plan, launcher: LocalLauncher, console: Console) -> int:
    tasks = [Task(config, force=request.force, search=request.search == "largest_batch") for config in plan.to_run]
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


def _checks(request: Request, launcher: LocalLauncher) -> Callable[[RunConfig], None]:
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
    if plan.impossible and not (plan.to_run or plan.done):
        reasons = list(dict.fromkeys(reason for _, reason in plan.impossible))
        more = (
            f" ({len(reasons) - 1} further reasons: see dry_run=true on a part of the sweep.)"
            if len(reasons) > 1
            else ""
        )
        raise UsageError(f"None of the {len(plan.impossible)} run(s) asked for can run. {reasons[0]}{more}")


def _refuse_unwritable(store: Path) -> None:
    try:
        store.mkdir(parents=True, exist_ok=True)
        writable = os.access(store, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"store={store} is not valid: choose a folder that can be written to.")


if __name__ == "__main__":
    sys.exit(main())
