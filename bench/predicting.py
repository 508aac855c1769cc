"""Carry out a sweep's predictions: nothing runs, and every run has its row in the store all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import records
from bench.config import RunConfig
from bench.errors import ImpossibleError, bad_value
from bench.hardware import refuse_unsupported
from bench.hardware.detect import Device
from bench.launch.attempt import now
from bench.planning.estimate import weight_bytes
from bench.planning.forecast import Forecast, Untold, forecasts
from bench.planning.plan import answers
from bench.planning.search import largest_fitting, next_batch_size
from bench.predicted_row import predicted_row
from bench.records import Record
from bench.row import configured_row, environment_row
from bench.simulate.prediction import FITS
from bench.simulate.version import outside_of, predictor_version

MOST_GPUS = 16_384
"""Beyond it nothing was ever compared with a measurement."""

WRITERS = 16
"""Rows written at once: each waits for the disk."""


def refuse_unpredictable(config: RunConfig) -> None:
    """Raise `ImpossibleError` for a run that could not be, on whatever machine."""
    hardware, precision = config.hardware, config.precision
    if config.gpus > MOST_GPUS:
        raise bad_value("gpus", config.gpus, f"at most {MOST_GPUS} for mode=predict", ImpossibleError)
    _refuse_empty_shards(config)
    if hardware.device == "cpu":
        refuse_unsupported(hardware, Device("cpu", "a processor", 0), precision, compile_blocks=False)
        return
    needed = "tf32" if precision.tf32 else "fp8" if precision.in_float8 else precision.compute
    if hardware.peak_tflops and needed not in hardware.peak_tflops:
        raise ImpossibleError(
            f"precision={precision.name} needs {needed}, which hardware={hardware.name} does not have: "
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
    factor = config.strategy.factor
    if 4 * factor > weight_bytes(config) and factor > config.model.num_parameters:  # the former builds nothing
        valid = f"at most the {config.model.num_parameters} parameters of model={config.model.name}"
        raise bad_value("strategy.sharding_factor", factor, valid, ImpossibleError)


class Predictor:
    """Gives the rows of runs, recorded ones as they are.

    Parameters
    ----------
    store: Path
        Where rows are looked up and written.
    sweep: str
        Name of the sweep that asks.
    force: bool
        Predict anew what this predictor has recorded already.
    found: mapping
        Rows that were looked up before and are to stay, by run_id.
    """

    def __init__(self, store: Path, sweep: str, *, force: bool, found: Mapping[str, Record]) -> None:
        self._store = store
        self._force = force
        self._rows = dict(found)
        facts = environment_row([])
        del facts["environment"]["topology"], facts["environment"]["devices"]
        self._facts = {**facts, "hosts": None, "launcher": "predict", "sweep": sweep}

    def rows(self, configs: Sequence[RunConfig]) -> list[Record]:
        """The rows of some runs. Each is predicted at most once."""
        wanted = {config.run_id: config for config in configs if config.run_id not in self._rows}
        if not self._force:
            recorded = {run_id: records.latest(self._store, run_id) for run_id in wanted}
            found = {id: row for id, row in recorded.items() if row is not None and answers(row, wanted[id])}
            self._rows |= found
            wanted = {run_id: config for run_id, config in wanted.items() if run_id not in found}
        new = list(wanted.values())
        started = now()
        rows = [self._row(config, forecast, started) for config, forecast in zip(new, forecasts(new), strict=True)]
        with ThreadPoolExecutor(WRITERS) as writers:
            written = list(writers.map(self._write, rows))
        self._rows |= dict(zip(wanted, written, strict=True))
        return [self._rows[config.run_id] for config in configs]

    def _row(self, config: RunConfig, forecast: Forecast, started: str) -> Record:
        if isinstance(forecast, Untold):
            results: Record = {"status": "skipped" if forecast.refused else "error", "error": forecast.reason}
        else:
            results = predicted_row(config, forecast)
        facts = {
            **self._facts,
            "predictor": predictor_version(config.libraries, outside_of(config.model, config.strategy)),
        }
        return {**configured_row(config), **facts, **results, "started_at": started, "finished_at": now()}

    def _write(self, row: Record) -> Record:
        """Write a row as the next attempt; if somebody else writes at the same time, as the one after."""
        while True:
            numbered = {**row, "attempt": records.next_attempt(self._store, row["run_id"])}
            try:
                records.write(self._store, numbered)
                return numbered
            except FileExistsError:
                continue


@dataclasses.dataclass
class BatchSearch:
    """The search for the largest batch of one configuration."""

    config: RunConfig
    tried: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """Batch size to the memory it reserves, None if it does not fit."""
    limit_bytes: int | None = None
    cut_short: bool = False

    @property
    def next(self) -> RunConfig | None:
        """What to predict next, None when the answer is known."""
        start, unit = self.config.batch_size_per_gpu, self.config.strategy.batch_unit
        while not self.cut_short:
            size = next_batch_size(self.tried, start, self.limit_bytes, unit)
            if size is None:
                break
            try:
                return dataclasses.replace(self.config, batch_size_per_gpu=size)
            except ImpossibleError:  # more tokens than a run may have
                self.tried[size] = None
        return None

    def note(self, row: Record, fits: Callable[[Record], bool]) -> None:
        """Take the row of what was to be predicted next."""
        prediction = row.get("prediction")
        if prediction is None or prediction["memory"]["verdict"] is None:
            self.cut_short = True
            return
        self.limit_bytes = prediction["memory"]["capacity_bytes"]
        self.tried[row["batch_size_per_gpu"]] = row["peak_reserved_bytes"] if fits(row) else None

    @property
    def largest(self) -> int | None:
        """The largest batch that fits; None for none, or if the search could not come to an end."""
        return None if self.cut_short else largest_fitting(self.tried)


def largest_batches(configs: Sequence[RunConfig], predictor: Predictor) -> list[tuple[int | None, int | None]]:
    """The largest batch of each configuration that surely fits, and the largest that may."""
    surely = _search(configs, predictor, lambda row: row["fit"] == FITS)
    perhaps = _search(configs, predictor, lambda row: row["status"] == "ok")
    return list(zip(surely, perhaps, strict=True))


def _search(configs: Sequence[RunConfig], predictor: Predictor, fits: Callable[[Record], bool]) -> list[int | None]:
    """All searches side by side, so that each of their few rounds is predicted at once."""
    searches = [BatchSearch(config) for config in configs]
    while waiting := [(search, config) for search in searches if (config := search.next) is not None]:
        for (search, _), row in zip(waiting, predictor.rows([config for _, config in waiting]), strict=True):
            search.note(row, fits)
    return [search.largest for search in searches]
