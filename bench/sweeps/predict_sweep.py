"""Carry out a sweep's predictions: nothing runs, and every run has its row in the store all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import records
from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.hardware import refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.launch.attempt import format_current_time
from bench.planning.batch_search import BatchTrial, search_largest_batches
from bench.planning.run_predictions import RunPrediction, Unpredictable, count_weight_bytes, predict_configs
from bench.planning.sweep_plan import is_current_result
from bench.prediction.cache import compute_predictor_version, find_user_packages
from bench.prediction.parameter_facts import recall_parameter_counts
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import FITS
from bench.rank.row import build_configured_columns, build_environment_columns
from bench.records import Record

MAX_PREDICTED_GPUS = 16_384
"""Beyond it nothing was ever compared with a measurement."""

WRITER_THREADS = 16
"""Rows written at once: each waits for the disk."""


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


class SweepPredictor:
    """Gives the rows of runs, recorded ones as they are.

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
                run_id: row
                for run_id, row in recorded_rows.items()
                if row is not None and is_current_result(row, missing_configs[run_id])
            }
            self._rows_by_run_id |= current_rows
            missing_configs = {
                run_id: config for run_id, config in missing_configs.items() if run_id not in current_rows
            }
        new_configs = list(missing_configs.values())
        started_at = format_current_time()
        recall_parameter_counts(config.model for config in new_configs)
        new_rows = [
            self._build_row(config, prediction, started_at)
            for config, prediction in zip(new_configs, predict_configs(new_configs), strict=True)
        ]
        with ThreadPoolExecutor(WRITER_THREADS) as writers:
            written_rows = list(writers.map(self._write_row, new_rows))
        self._rows_by_run_id |= dict(zip(missing_configs, written_rows, strict=True))
        return [self._rows_by_run_id[config.run_id] for config in configs]

    def _build_row(self, config: RunConfig, prediction: RunPrediction, started_at: str) -> Record:
        if isinstance(prediction, Unpredictable):
            results: Record = {"status": "skipped" if prediction.is_impossible else "error", "error": prediction.reason}
        else:
            results = build_predicted_row(config, prediction)
        common_columns = {
            **self._common_columns,
            "predictor": compute_predictor_version(
                config.operator_libraries, find_user_packages(config.model, config.strategy, config.finetune)
            ),
        }
        return {
            **build_configured_columns(config),
            **common_columns,
            **results,
            "started_at": started_at,
            "finished_at": format_current_time(),
        }

    def _write_row(self, row: Record) -> Record:
        """Write a row as the next attempt; if somebody else writes at the same time, as the one after."""
        while True:
            row["attempt"] = records.find_next_attempt(self._store, row["run_id"])
            try:
                records.write_row(self._store, row)
                return row
            except FileExistsError:
                continue


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
