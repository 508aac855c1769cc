"""What is to be expected of planned runs: which will surely not fit, how long each takes, what all of them cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench import records
from bench.config import RunConfig
from bench.launch.attempt import write_unstarted_row
from bench.planning.estimate import expected_s
from bench.planning.forecast import Forecast, Untold, forecasts
from bench.planning.plan import Plan
from bench.planning.request import Request
from bench.predicted_row import shortage
from bench.row import configured_row
from bench.simulate.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction

SKIPPED_BY = "skip_oom=true"


@dataclass(frozen=True)
class Expectation:
    """What a run will probably come to."""

    memory: MemoryPrediction | None
    """None where the predictor cannot tell."""
    untold: str
    """Why it cannot."""
    seconds: float
    gpu_hours: float


def look_ahead(request: Request, plan: Plan) -> dict[str, Expectation]:
    """Expectations of the runs that are to be executed, by run_id: for a dry run, or to leave out what does not fit.

    With `skip_oom` those that surely do not fit are taken out of the plan.
    """
    if request.search != "none" or not (request.dry_run or request.skip_oom):
        return {}
    executed = [config for config in plan.to_run if not config.predicted]
    expected = {
        config.run_id: _expectation(config, told, request.cluster["launcher"])
        for config, told in zip(executed, forecasts(executed), strict=True)
    }
    if request.skip_oom:
        plan.skip(
            {
                run_id: f"{shortage(expectation.memory)} ({SKIPPED_BY})"
                for run_id, expectation in expected.items()
                if expectation.memory is not None and expectation.memory.verdict == DOES_NOT_FIT
            }
        )
    return expected


def _expectation(config: RunConfig, told: Forecast, launcher: str) -> Expectation:
    seconds = expected_s(config, launcher=launcher)
    hours = seconds * config.devices / 3600
    if isinstance(told, Untold):
        return Expectation(None, told.reason, seconds, hours)
    return Expectation(told.memory, "", seconds, hours)


def write_skipped(request: Request, plan: Plan, launcher: str) -> None:
    """Give the runs that were left out rows that say so, unless they have them."""
    for config, reason in plan.skipped:
        record = records.latest(request.store, config.run_id)
        if record is None or (record["status"], record.get("error")) != ("skipped", reason):
            facts = {"launcher": launcher, "sweep": request.sweep}
            write_unstarted_row(configured_row(config), request.store, status="skipped", error=reason, facts=facts)


def summary(request: Request, plan: Plan, expected: Mapping[str, Expectation]) -> list[str]:
    """What all runs together are expected to come to, in sentences."""
    told = [expected[config.run_id] for config in plan.to_run if config.run_id in expected]
    left = [expected[config.run_id] for config, _ in plan.skipped if config.run_id in expected]
    lines = []
    if told:
        seconds, hours = sum(one.seconds for one in told), sum(one.gpu_hours for one in told)
        on_gpus = any(config.hardware.device != "cpu" for config in plan.to_run)
        cost = f", {hours:,.1f} GPU-hours" if on_gpus else ""
        lines.append(f"Expected: {duration(seconds)} one after the other{cost}.")
    verdicts = [one.memory.verdict for one in (*told, *left) if one.memory is not None]
    if any(verdicts):
        lines.append(
            f"Memory: {verdicts.count(FITS)} fit, {verdicts.count(TOO_CLOSE)} are too close to call, "
            f"{verdicts.count(DOES_NOT_FIT)} will surely not fit"
            + (" (skip_oom=true leaves them out)." if DOES_NOT_FIT in verdicts and not request.skip_oom else ".")
        )
    reasons: dict[str, int] = {}
    for one in told:
        if one.untold:
            reasons[one.untold] = reasons.get(one.untold, 0) + 1
    return lines + [f"Not predicted ({count}): {reason}" for reason, count in reasons.items()]


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:,.1f} h"
