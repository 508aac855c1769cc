"""A sweep from its command line to its end: expand, plan, launch, collect, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from bench.checks.before_sweep import check_machine_once
from bench.checks.terminal import show_check
from bench.config.run_config import RunConfig
from bench.core.command_line import require_writable_store
from bench.core.errors import ImpossibleError, UsageError, invalid_value_error
from bench.hardware import detect_device
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.slurm.launcher import SlurmLauncher
from bench.planning.request import SweepRequest, parse_sweep_request
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.planning.sweep_plan import SweepPlan, build_sweep_plan
from bench.sweeps.execute_sweep import execute_sweep
from bench.sweeps.planned_sweep import PlannedSweep, show_status
from bench.sweeps.predict_sweep import SweepPredictor, refuse_unpredictable
from bench.sweeps.submit_sweep import submit_sweep


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
        with show_status(console, f"predicting {len(configs)} runs"):
            failures = [prediction for prediction in predict_configs(configs) if isinstance(prediction, Unpredictable)]
            if len(failures) == plan.size and all(failure.is_impossible for failure in failures):
                raise UsageError(_format_impossible_sweep([failure.reason for failure in failures]))
            predictor.load_or_predict_rows(configs)
    return predictor


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
