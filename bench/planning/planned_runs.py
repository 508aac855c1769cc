"""What is to be expected of planned runs: which will surely not fit, how long each takes, what all of them cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench import records
from bench.config.run_config import RunConfig
from bench.launch.attempt import write_unstarted_row
from bench.planning.request import SweepRequest
from bench.planning.run_predictions import RunPrediction, Unpredictable, predict_configs, predict_duration_s
from bench.planning.sweep_plan import SweepPlan
from bench.prediction.predicted_row import describe_shortage
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction
from bench.rank.row import build_configured_columns

SKIP_OPTION = "skip_oom=true"


@dataclass(frozen=True)
class PlannedRunPrediction:
    """What a run will probably come to."""

    memory: MemoryPrediction | None
    """None where the predictor cannot tell."""
    reason: str
    """Why it cannot."""
    seconds: float
    gpu_hours: float
    dollars: float | None = None
    """None where no price was asked for."""
    kwh: float | None = None
    """Of the GPUs; None where neither price nor energy was asked for, or their power is not known."""


def predict_planned_runs(request: SweepRequest, plan: SweepPlan) -> dict[str, PlannedRunPrediction]:
    """Expectations of the runs that are to be executed, by run_id: for a dry run, or to leave out what does not fit.

    With `skip_oom` those that surely do not fit are taken out of the plan.
    """
    if request.search != "none" or not (request.dry_run or request.skip_oom):
        return {}
    executed_configs = [config for config in plan.to_run if not config.is_predicted]
    predictions_by_run_id = {
        config.run_id: _predict_planned_run(config, prediction, request)
        for config, prediction in zip(executed_configs, predict_configs(executed_configs), strict=True)
    }
    if request.skip_oom:
        plan.skip_runs(
            {
                run_id: f"{describe_shortage(run_prediction.memory)} ({SKIP_OPTION})"
                for run_id, run_prediction in predictions_by_run_id.items()
                if run_prediction.memory is not None and run_prediction.memory.verdict == DOES_NOT_FIT
            }
        )
    return predictions_by_run_id


def _predict_planned_run(config: RunConfig, prediction: RunPrediction, request: SweepRequest) -> PlannedRunPrediction:
    seconds, cost_terms = predict_duration_s(config, launcher=request.cluster["launcher"]), request.cost_terms
    hours = seconds * config.active_devices / 3600
    dollars = cost_terms.compute_dollars(config, hours)
    kwh = cost_terms.compute_kwh(config, hours) if cost_terms.is_requested else None
    memory, reason = (None, prediction.reason) if isinstance(prediction, Unpredictable) else (prediction.memory, "")
    return PlannedRunPrediction(memory, reason, seconds, hours, dollars, kwh)


def write_skipped_rows(request: SweepRequest, plan: SweepPlan, launcher: str) -> None:
    """Give the runs that were left out rows that say so, unless they have them."""
    for config, reason in plan.skipped:
        record = records.read_latest_row(request.store, config.run_id)
        if record is None or (record["status"], record.get("error")) != ("skipped", reason):
            columns = {"launcher": launcher, "sweep": request.sweep}
            write_unstarted_row(
                build_configured_columns(config), request.store, status="skipped", error=reason, launch_columns=columns
            )


def describe_predictions(
    request: SweepRequest, plan: SweepPlan, predictions_by_run_id: Mapping[str, PlannedRunPrediction]
) -> list[str]:
    """What all runs together are expected to come to, in sentences."""
    run_predictions = [
        predictions_by_run_id[config.run_id] for config in plan.to_run if config.run_id in predictions_by_run_id
    ]
    skipped_predictions = [
        predictions_by_run_id[config.run_id] for config, _ in plan.skipped if config.run_id in predictions_by_run_id
    ]
    lines = []
    if run_predictions:
        seconds, hours = (
            sum(prediction.seconds for prediction in run_predictions),
            sum(prediction.gpu_hours for prediction in run_predictions),
        )
        on_gpus = any(config.hardware.device != "cpu" for config in plan.to_run)
        cost = f", {hours:,.1f} GPU-hours" if on_gpus else ""
        cost += "".join(f", {text}" for text in _describe_costs(run_predictions))
        lines.append(f"Expected: {format_duration(seconds)} one after the other{cost}.")
        lines += _describe_cost_terms(request, plan, predictions_by_run_id)
    fits = [
        prediction.memory.verdict
        for prediction in (*run_predictions, *skipped_predictions)
        if prediction.memory is not None
    ]
    if any(fits):
        lines.append(
            f"Memory: {fits.count(FITS)} fit, {fits.count(TOO_CLOSE)} are too close to call, "
            f"{fits.count(DOES_NOT_FIT)} will surely not fit"
            + (" (skip_oom=true leaves them out)." if DOES_NOT_FIT in fits and not request.skip_oom else ".")
        )
    reason_counts: dict[str, int] = {}
    for prediction in run_predictions:
        if prediction.reason:
            reason_counts[prediction.reason] = reason_counts.get(prediction.reason, 0) + 1
    return lines + [f"Not predicted ({count}): {reason}" for reason, count in reason_counts.items()]


def _describe_costs(run_predictions: Sequence[PlannedRunPrediction]) -> Iterator[str]:
    """Dollars and kWh of all runs together, as far as they are known."""
    for prefix, unit, values in (
        ("$", "", [prediction.dollars for prediction in run_predictions]),
        ("", " kWh", [prediction.kwh for prediction in run_predictions]),
    ):
        known_values = [value for value in values if value is not None]
        if known_values:
            missing_text = f" for {len(known_values)} of them" if len(known_values) < len(values) else ""
            yield f"{prefix}{sum(known_values):,.2f}{unit}{missing_text}"


def _describe_cost_terms(
    request: SweepRequest, plan: SweepPlan, predictions_by_run_id: Mapping[str, PlannedRunPrediction]
) -> list[str]:
    """What dollars and kWh stand on, where they were asked for: a sentence for each kind of GPU."""
    if not request.cost_terms.is_requested:
        return []
    configs = [config for config in plan.to_run if config.run_id in predictions_by_run_id]
    return list(dict.fromkeys(sentence for config in configs for sentence in request.cost_terms.describe(config)))


def format_duration(seconds: float) -> str:
    """Seconds in the unit that suits them: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:,.1f} h"
