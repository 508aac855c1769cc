"""Carry out a sweep's predictions: nothing runs, and every run has its row in the store all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.config.run_config import RunConfig
from bench.core import processes
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.hardware import refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.launch.attempt import format_current_time
from bench.planning.batch_search import BatchTrial, search_largest_batches
from bench.planning.run_predictions import RunPrediction, Unpredictable, count_weight_bytes, predict_configs
from bench.planning.sweep_plan import drop_settings, is_current_result
from bench.prediction.cache import compute_predictor_version, find_user_packages
from bench.prediction.parameter_facts import recall_parameter_counts
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import FITS
from bench.rank.row import build_configured_columns, build_environment_columns
from bench.records import Record

MAX_PREDICTED_GPUS = 16_384
"""Beyond it nothing was ever compared with a measurement."""

MIN_ROWS_PER_PROCESS = 250
"""Of rows that several processes write: fewer do not pay for the start of one."""

ROWS_PER_TASK = 64


def refuse_unpredictable(config: RunConfig) -> None:
    """Raise `ImpossibleError` for a run that could not be, on whatever machine."""
    hardware, precision = config.hardware, config.precision
    if config.gpus > MAX_PREDICTED_GPUS:
        raise invalid_value_error(
            "gpus", config.gpus, f"at most {MAX_PREDICTED_GPUS} for mode=predict", ImpossibleError
        )
    _refuse_empty_shards(config)
    if hardware.device == "cpu":
        refuse_unsupported(hardware, DetectedDevice("cpu", "a processor", 0), precision)
        return
    required_format = "tf32" if precision.tf32 else "fp8" if precision.uses_float8 else precision.compute
    if hardware.peak_tflops and required_format not in hardware.peak_tflops:
        raise ImpossibleError(
            f"precision={precision.name} needs {required_format}, which hardware={hardware.name} does not have: "
            f"choose one that computes in {' or '.join(hardware.peak_tflops)}."
        )
    limit, memory_gb = hardware.memory_limit_gib, hardware.memory_gb
    if limit is not None and memory_gb is not None and limit > memory_gb:
        raise ImpossibleError(
            f"hardware.memory_limit_gib={limit:g} is more than hardware={hardware.name} has: "
            f"choose at most {memory_gb:g}, or null."
        )


def _refuse_empty_shards(config: RunConfig) -> None:
    """Raise `ImpossibleError` for more shards than there are parameters to spread over them."""
    factor = config.strategy.resolved_sharding_factor
    if 4 * factor > count_weight_bytes(config) and factor > config.model.num_parameters:  # the former builds nothing
        valid = f"at most the {config.model.num_parameters} parameters of model={config.model.name}"
        raise invalid_value_error("strategy.sharding_factor", factor, valid, ImpossibleError)


@dataclass(frozen=True)
class PredictedRowWriter:
    """Writes the rows of predictions."""

    store: Path
    common_columns: Record
    """That all rows have."""
    started_at: str

    def write_rows(self, configs: Sequence[RunConfig], predictions: Sequence[RunPrediction]) -> list[Record]:
        """Write a row for each run; many are shared among the processors. What `drop_settings` leaves of them."""
        num_workers = min(processes.count_workers(), len(configs) // MIN_ROWS_PER_PROCESS)
        if num_workers < 2:
            return list(map(self.write_row, configs, predictions))
        with processes.open_worker_pool(num_workers) as pool:
            return list(pool.map(self.write_row, configs, predictions, chunksize=ROWS_PER_TASK))

    def write_row(self, config: RunConfig, prediction: RunPrediction) -> Record:
        """Write a row as the next attempt; if somebody else writes at the same time, as the one after. What
        `drop_settings` leaves of it."""
        row = self._build_row(config, prediction)
        while True:
            row["attempt"] = records.find_next_attempt(self.store, row["run_id"])
            try:
                records.write_row(self.store, row)
                return drop_settings(row)
            except FileExistsError:
                continue

    def _build_row(self, config: RunConfig, prediction: RunPrediction) -> Record:
        if isinstance(prediction, Unpredictable):
            results: Record = {"status": "skipped" if prediction.is_impossible else "error", "error": prediction.reason}
        else:
            results = build_predicted_row(config, prediction)
        version = compute_predictor_version(
            config.operator_libraries, find_user_packages(config.model, config.strategy, config.finetune)
        )
        return {
            **build_configured_columns(config),
            **self.common_columns,
            "predictor": version,
            **results,
            "started_at": self.started_at,
            "finished_at": format_current_time(),
        }


class SweepPredictor:
    """Gives the rows of runs, as recorded or predicted now, but for their settings (`drop_settings`).

    Parameters
    ----------
    store: Path
        Where rows are looked up and written.
    sweep: str
        Name of the sweep that asks.
    force: bool
        Predict anew what this predictor has recorded already.
    recorded_rows: mapping
        Rows that were looked up before and are to stay, by run_id.
    """

    def __init__(self, store: Path, sweep: str, *, force: bool, recorded_rows: Mapping[str, Record]) -> None:
        self._store = store
        self._force = force
        self._rows_by_run_id = dict(recorded_rows)
        common_columns = build_environment_columns([])
        del common_columns["environment"]["topology"], common_columns["environment"]["devices"]
        self._common_columns = {**common_columns, "hosts": None, "launcher": "predict", "sweep": sweep}

    def load_or_predict_rows(self, configs: Sequence[RunConfig]) -> list[Record]:
        """The rows of some runs. Each is predicted at most once."""
        missing_configs = {config.run_id: config for config in configs if config.run_id not in self._rows_by_run_id}
        if not self._force:
            recorded_rows = {run_id: records.read_latest_row(self._store, run_id) for run_id in missing_configs}
            current_rows = {
                run_id: drop_settings(row)
                for run_id, row in recorded_rows.items()
                if row is not None and is_current_result(row, missing_configs[run_id])
            }
            self._rows_by_run_id |= current_rows
            missing_configs = {
                run_id: config for run_id, config in missing_configs.items() if run_id not in current_rows
            }
        new_configs = list(missing_configs.values())
        writer = PredictedRowWriter(self._store, self._common_columns, format_current_time())
        recall_parameter_counts(config.model for config in new_configs)
        new_rows = writer.write_rows(new_configs, predict_configs(new_configs))
        self._rows_by_run_id |= dict(zip(missing_configs, new_rows, strict=True))
        return [self._rows_by_run_id[config.run_id] for config in configs]


def find_largest_batches(
    configs: Sequence[RunConfig], predictor: SweepPredictor
) -> list[tuple[int | None, int | None]]:
    """The largest batch of each configuration that surely fits, and the largest that may."""

    def search_batches(does_fit: Callable[[Record], bool]) -> list[int | None]:
        def try_batches(sized_configs: list[RunConfig]) -> list[BatchTrial | None]:
            return [_read_trial(row, does_fit) for row in predictor.load_or_predict_rows(sized_configs)]

        return [search.largest_batch_size for search in search_largest_batches(configs, try_batches)]

    surely_fitting = search_batches(lambda row: row["fit"] == FITS)
    possibly_fitting = search_batches(lambda row: row["status"] == "ok")
    return list(zip(surely_fitting, possibly_fitting, strict=True))


def _read_trial(row: Record, does_fit: Callable[[Record], bool]) -> BatchTrial | None:
    prediction = row.get("prediction")
    if prediction is None or prediction["memory"]["verdict"] is None:
        return None
    fits = does_fit(row)
    return BatchTrial(row["peak_reserved_bytes"] if fits else None, prediction["memory"]["capacity_bytes"], fits)
