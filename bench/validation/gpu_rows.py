"""Rows of a GPU beside predictions: those made before it ran, which are rows of the same store, and today's."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import UsageError
from bench.core.installation import DATA_FOLDER
from bench.core.units import GIB
from bench.prediction.intervals import COMPLETE, INTERVAL_METRICS, ROUGH, is_time_known
from bench.prediction.prediction import DOES_NOT_FIT, PredictedRange, Prediction
from bench.prediction.predictor import predict_runs
from bench.records import Record
from bench.records.matching import build_run_key, encode_config_key
from bench.reporting.builder import read_store
from bench.validation.interval_fit import Residual
from bench.validation.measured import parse_recorded_config

STEP_TIME, ALLOCATED, RESERVED, DEVICE_USED = QUANTITIES = ("step_time", "allocated", "reserved", "device_used")
"""What is compared of a row."""

INTERVAL_METRIC_BY_QUANTITY = dict(zip(QUANTITIES, INTERVAL_METRICS, strict=True))

MEASURED_STORES = ("h200", "h100")
"""Below results/measured: those of GPUs."""

PAGE_HEAD = """# {gpu}: measured, rehearsed and predicted

`python -m bench.predict validate --measured {store} --output FILE` writes this page. {provenance}

**Before** is what was predicted before anything had run there{versions}; **now** is what is predicted today, and some
of what today's predictor knows it learned from these rows (`results/measured/README.md` says which).
Above 0, less was measured than predicted.{rehearsals}

| | runs | before: mean | worst | within the interval | now: mean | worst | within the interval |
|---|--:|--:|--:|--:|--:|--:|--:|
{summary}

Of {num_ooms} runs that ran out of memory {num_foreseen} had been predicted to, and {num_foreseen_now} are today; of
{num_fitting} that did not, {num_refused} had been predicted to, and {num_refused_now} are today.

| run | checkpointing | outcome | ms/step | before | now | allocated GiB | before | now | reserved GiB | before | now |
|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


REHEARSALS = """ Of rehearsals only allocated memory is compared: their steps wait for nobody,
and they reserved more than a real run, since their collectives kept memory from being used again (mended since)."""


@dataclass(frozen=True)
class Comparison:
    """A quantity that was measured, with an interval that was predicted for it."""

    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted against measured, as a share."""
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class GpuRow:
    """A run of a store, the row of its earlier prediction and today's prediction."""

    row: Record
    config: RunConfig
    earlier: Record | None
    prediction: Prediction

    @property
    def is_time_known(self) -> bool:
        """As `bench.prediction.intervals` has it."""
        return self.prediction.time is not None and is_time_known(self.config, self.prediction.time)

    @property
    def has_run_out(self) -> bool:
        return bool(self.row["status"] == "oom")

    def compare_earlier(self, quantity: str) -> Comparison | None:
        """`quantity` is one of `QUANTITIES`; None where one of both has none."""
        measured, earlier = self._find_measured(quantity), self.earlier
        if measured is None or earlier is None or earlier["status"] != "ok":
            return None
        names = [f"peak_{quantity}_{bound}bytes" for bound in ("", "low_", "high_")]
        if quantity == STEP_TIME:
            names = ["step_time_median_s", "step_time_ci_low_s", "step_time_ci_high_s"]
        return Comparison(measured, *(earlier[name] for name in names))

    def compare_now(self, quantity: str) -> Comparison | None:
        """The same with today's prediction."""
        measured, time = self._find_measured(quantity), self.prediction.time
        value: PredictedRange | None = getattr(self.prediction.memory, quantity, None)
        if quantity == STEP_TIME:
            value = None if time is None else time.step_s
        return None if measured is None or value is None else Comparison(measured, value.value, value.low, value.high)

    def _find_measured(self, quantity: str) -> float | None:
        if quantity != ALLOCATED and self.row["evidence"] == "rehearsed":
            return None
        return self.row.get("step_time_median_s" if quantity == STEP_TIME else f"peak_{quantity}_bytes")


def read_gpu_rows(store_path: Path) -> list[GpuRow]:
    """Every run of a store that ended well or ran out of memory, in the order of their starts.

    Raises
    ------
    UsageError
        If there is none of a GPU.
    """
    records = read_store(store_path).records
    earlier_by_run = {_encode_run(row): row for row in records if row["evidence"] == "predicted"}
    rows = [
        row
        for row in records
        if row["evidence"] in ("measured", "rehearsed") and row["status"] in ("ok", "oom") and row["device"] != "cpu"
    ]
    if not rows:
        raise UsageError(f"{store_path} has no row of a GPU: for those of a CPU, name what it was calibrated to, too.")
    rows.sort(key=lambda row: row["started_at"])
    configs = [_use_current_hardware(parse_recorded_config(row)) for row in rows]
    return [
        GpuRow(row, config, earlier_by_run.get(_encode_run(row)), prediction)
        for row, config, prediction in zip(rows, configs, predict_runs(configs), strict=True)
    ]


def _encode_run(row: Record) -> str:
    """What was run, without how its evidence came about."""
    return encode_config_key(build_run_key(row) or {})


def _use_current_hardware(config: RunConfig) -> RunConfig:
    """The same run on what is known of its GPU today."""
    described = build_run_config(compose_config({"mode": "predict", "hardware": config.hardware.name})).hardware
    hardware = dataclasses.replace(described, memory_limit_gib=config.hardware.memory_limit_gib)
    return dataclasses.replace(config, hardware=hardware)


def list_measured_residuals() -> dict[str, list[Residual]]:
    """How far the committed rows of GPUs are from today's predictions, by metric of `bench.prediction.intervals`."""
    residuals: dict[str, list[Residual]] = {metric: [] for metric in INTERVAL_METRICS}
    for name in MEASURED_STORES:
        for row in read_gpu_rows(DATA_FOLDER / "results" / "measured" / name):
            for quantity, metric in INTERVAL_METRIC_BY_QUANTITY.items():
                comparison = None if row.has_run_out else row.compare_now(quantity)
                if comparison is not None:
                    log_ratio = math.log(comparison.measured / comparison.predicted)
                    residuals[metric].append(
                        Residual(
                            f"results/measured/{name}",
                            row.config.hardware.name,
                            log_ratio,
                            COMPLETE if quantity != STEP_TIME or row.is_time_known else ROUGH,
                        )
                    )
    return residuals


def render_gpu_page(store_path: Path) -> str:
    """The page in Markdown."""
    rows = read_gpu_rows(store_path)
    first_row = rows[0].row
    ended_rows, foreseen_rows = [row for row in rows if not row.has_run_out], [row for row in rows if row.has_run_out]
    versions = ", ".join(sorted({str(row.earlier["predictor"]) for row in rows if row.earlier is not None}))
    head = PAGE_HEAD.format(
        gpu=first_row["gpu_name"],
        store=store_path,
        provenance=_describe_provenance([row.row for row in rows]),
        versions=f" (predictor {versions})" if versions else "",
        summary="\n".join(
            _format_summary(title, rows, quantity)
            for title, quantity in (
                ("step time", STEP_TIME),
                ("allocated memory", ALLOCATED),
                ("reserved memory", RESERVED),
            )
        ),
        rehearsals=REHEARSALS if any(row.row["evidence"] == "rehearsed" for row in rows) else "",
        num_ooms=len(foreseen_rows),
        num_foreseen=sum(map(_is_refused_earlier, foreseen_rows)),
        num_foreseen_now=sum(map(_is_refused_now, foreseen_rows)),
        num_fitting=len(ended_rows),
        num_refused=sum(map(_is_refused_earlier, ended_rows)),
        num_refused_now=sum(map(_is_refused_now, ended_rows)),
    )
    return head + "".join(f"{_format_row(row)}\n" for row in rows)


def _is_refused_earlier(row: GpuRow) -> bool:
    return row.earlier is not None and row.earlier["status"] == "oom"


def _is_refused_now(row: GpuRow) -> bool:
    return row.prediction.memory.verdict == DOES_NOT_FIT


def _describe_provenance(rows: Sequence[Record]) -> str:
    names = ("git_sha", "torch_version")
    commits, torch_versions = (", ".join(sorted({str(row[name]) for row in rows})) for name in names)
    return f"{len(rows)} runs from {rows[0]['started_at'][:10]}, torch {torch_versions}, commit {commits[:10]}."


def _format_summary(title: str, rows: Sequence[GpuRow], quantity: str) -> str:
    earlier = [comparison for row in rows if (comparison := row.compare_earlier(quantity)) is not None]
    now = [comparison for row in rows if (comparison := row.compare_now(quantity)) is not None]
    cells = [title, str(len(now))]
    for comparisons in (earlier, now):
        errors = [comparison.error for comparison in comparisons]
        num_within = sum(comparison.is_within for comparison in comparisons)
        cells += [f"{statistics.fmean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"] if errors else ["–", "–"]
        cells.append(f"{num_within} of {len(comparisons)}")
    return f"| {' | '.join(cells)} |"


def _list_methods(config: RunConfig, usual: dict[str, Any]) -> list[str]:
    """What else changes how a step is carried out, beside strategy, precision and checkpointing, as it is typed, where
    it differs from a composed configuration."""
    implementation = config.optimizer.implementation
    methods = {
        "optimizer": (config.optimizer.name, usual["optimizer"]["name"]),
        "optimizer.implementation": (implementation, usual["optimizer"]["implementation"]),
        "strategy.cpu_offload": (getattr(config.strategy, "cpu_offload", False), False),
        "activation_offload": (config.activation_offload, False),
        "loss": (config.loss, usual["loss"]),
        "gradient_accumulation": (config.gradient_accumulation, 1),
        "expandable_segments": (config.expandable_segments, False),
    }
    return [f"{name}={str(value).lower()}" for name, (value, default) in methods.items() if value != default]


def _format_row(row: GpuRow) -> str:
    config = row.config
    settings = [config.model.name, row.row["effective_strategy"], config.precision.name]
    usual = compose_config({"model": config.model.name})
    changed = {key: value for key, value in row.row["config"]["model"].items() if usual["model"].get(key) != value}
    settings += [f"{key}={value}" for key, value in changed.items()]
    settings += ["compiled"] if config.compile else []
    settings += _list_methods(config, usual)
    settings += [f"{config.gpus} x {config.batch_size_per_gpu} x {config.sequence_length}"]
    settings += [f"limit {config.hardware.memory_limit_gib:g} GiB"] if config.hardware.memory_limit_gib else []
    settings += ["rehearsed"] if row.row["evidence"] == "rehearsed" else []
    cells = [", ".join(settings), config.activation_checkpointing, str(row.row["status"])]
    for quantity, scale, digits in ((STEP_TIME, 1e-3, 1), (ALLOCATED, GIB, 2), (RESERVED, GIB, 2)):
        earlier, now = row.compare_earlier(quantity), row.compare_now(quantity)
        cells.append("" if now is None else f"{now.measured / scale:,.{digits}f}")
        cells += ["" if comparison is None else f"{comparison.error:+.1%}" for comparison in (earlier, now)]
    return f"| {' | '.join(cells)} |"
