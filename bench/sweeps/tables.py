"""What a sweep shows in the terminal: the plan, progress while it runs, results at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bench.config.price import NO_COST_TERMS, CostTerms
from bench.config.run_config import RunConfig
from bench.config.run_id import get_fields
from bench.core.presentation import format_memory, format_number
from bench.core.progress import ProgressLine
from bench.core.typed_config import format_override_value
from bench.hardware.interconnect import describe_network
from bench.planning.planned_runs import PlannedRunPrediction, describe_predictions, format_duration
from bench.planning.request import SweepRequest
from bench.planning.sweep_plan import SweepPlan
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES

STATUS_STYLES = {
    "ok": "green",
    "oom": "yellow",
    "error": "red",
    "timeout": "red",
    "preempted": "magenta",
    "skipped": "yellow",
    "lost": "red",
}

MAX_RICH_ROWS = 300

FIT_STYLES = {"fits": "green", "too close to call": "magenta", "does not fit": "yellow"}

NO_PREDICTIONS: Mapping[str, PlannedRunPrediction] = {}

PREDICTION_COLUMNS = ("fit", "reserved", "takes", "GPU-hours", "$", "kWh")
"""What a dry run says of each run: `takes` includes what comes before the first step."""

UNIT_COST_COLUMNS = ("$/1e9 tokens", "kWh/1e9 tokens")
"""What a table of results says where price or energy was asked for."""

REHEARSAL_TITLE = (
    "Rehearsals of rank 0 (its memory; without the others nothing is waited for, so speed is an upper bound)"
)

RUN_COLUMNS = ("model", "strategy", "precision", "ranks x batch", "limit")


def build_plan_table(
    request: SweepRequest,
    plan: SweepPlan,
    *,
    show_details: bool,
    predictions_by_run_id: Mapping[str, PlannedRunPrediction] = NO_PREDICTIONS,
) -> RenderableType:
    """The plan: one line, and with `show_details` every run, what is expected of it, and why some cannot run."""
    summary_line = Text(f"Sweep {request.sweep}: {plan.size} runs, {len(plan.done)} done, {len(plan.to_run)} to run")
    if plan.on_cluster:
        summary_line.append(f", {len(plan.on_cluster)} queued or running on a cluster")
    if plan.skipped:
        summary_line.append(f", {len(plan.skipped)} skipped: predicted not to fit")
    if plan.impossible:
        summary_line.append(f", {len(plan.impossible)} impossible")
    parts: list[RenderableType] = [summary_line]
    if plan.runs_per_shape and request.executes_runs and request.cluster["launcher"] == "local":
        shape_texts = [
            f"{count} x {gpus} rank{'s' if gpus > 1 else ''}"
            for (_, gpus), count in sorted(plan.runs_per_shape.items())
        ]
        parts.append(Text(f"Shapes on one machine: {', '.join(shape_texts)}"))
    if show_details:
        parts.append(_build_plan_details(plan, predictions_by_run_id))
    parts += [Text(sentence) for sentence in describe_predictions(request, plan, predictions_by_run_id)]
    if plan.impossible:
        reason_counts: dict[str, int] = {}
        for _, reason in plan.impossible:
            reason_counts[reason] = reason_counts.get(reason, 0) + 1
        parts += [Text(f"Impossible ({count}): {reason}", style="yellow") for reason, count in reason_counts.items()]
        if show_details:
            parts += [Text(f"  {settings}", style="dim") for settings, _ in plan.impossible]
    return Group(*parts)


def describe_assumptions(request: SweepRequest, plan: SweepPlan) -> list[str]:
    """What nobody gave and decides the results: settings, and what predictions take for granted of the network."""
    sentences = []
    if request.not_given:
        settings = ", ".join(f"{key}={value}" for key, value in request.not_given.items())
        sentences.append(f"Not given: {settings} (each can be set as key=value).")
    configs = [config for config in plan.runs_to_report if config.is_predicted and config.hardware.device != "cpu"]
    widest: dict[str, RunConfig] = {}
    for config in configs:
        if config.gpus > max(1, widest[config.hardware.name].gpus if config.hardware.name in widest else 1):
            widest[config.hardware.name] = config
    sentences += [
        f"Network of hardware={name}: {describe_network(config.hardware, config.gpus, config.gpus_per_node)}"
        for name, config in widest.items()
    ]
    return sentences


def _build_plan_details(plan: SweepPlan, predictions_by_run_id: Mapping[str, PlannedRunPrediction]) -> CompactTable:
    """A line per run: what it is, what is expected of it, and its state."""
    states_by_config: list[tuple[RunConfig, Text]] = [
        *((config, Text("to predict" if config.is_predicted else "to run")) for config in plan.to_run),
        *((config, Text("skipped", style=STATUS_STYLES["skipped"])) for config, _ in plan.skipped),
        *((config, Text(f"done: {status}", style=STATUS_STYLES[status])) for config, status in plan.done),
        *((config, Text(job_state, style="cyan")) for config, job_state in plan.on_cluster),
    ]
    differences = _describe_differing_settings([config for config, _ in states_by_config])
    table = CompactTable(
        "run", *RUN_COLUMNS, "settings", *PREDICTION_COLUMNS, "state", number_columns=PREDICTION_COLUMNS[1:]
    )
    for config, state in states_by_config:
        cells = [differences[config.run_id], *_format_run_prediction(predictions_by_run_id.get(config.run_id))]
        table.add_row(Text(config.run_id, style="dim"), *_format_run_cells(config), *cells, state)
    return table


def _format_run_prediction(run_prediction: PlannedRunPrediction | None) -> list[str | Text]:
    if run_prediction is None:
        return [""] * len(PREDICTION_COLUMNS)
    memory = run_prediction.memory
    return [
        format_fit(memory.verdict if memory else None),
        _format_peak(memory.reserved.value) if memory else "",
        format_duration(run_prediction.seconds),
        f"{run_prediction.gpu_hours:,.2f}",
        _format_scaled(run_prediction.dollars, 1, ",.2f"),
        _format_scaled(run_prediction.kwh, 1, ",.2f"),
    ]


def format_fit(fit: str | None) -> Text:
    """fits, too close to call or does not fit, in its colour."""
    return Text(fit or "", style=FIT_STYLES.get(fit or "", ""))


class CompactTable:
    """A table, without the columns in which no line says anything.

    Plain text where there is no terminal, so that nothing is cut off, and where it is long: rich takes a second for a
    thousand lines.
    """

    def __init__(self, *columns: str, title: str | None = None, number_columns: Sequence[str] = ()) -> None:
        self._title, self._columns, self._number_columns = title, columns, number_columns
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a line; cells that are missing at its end stay empty."""
        self._rows.append((*cells, *[""] * (len(self._columns) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._drop_empty_columns()
        use_rich = console.is_terminal and len(self._rows) <= MAX_RICH_ROWS
        yield self._build_rich_table() if use_rich else Text(self._format_plain_text(), no_wrap=True, overflow="ignore")

    def _drop_empty_columns(self) -> None:
        """Leave out the columns in which no line says anything."""
        kept_columns = [index for index, _ in enumerate(self._columns) if any(str(row[index]) for row in self._rows)]
        if self._rows:
            self._columns = tuple(self._columns[index] for index in kept_columns)
            self._rows = [tuple(row[index] for index in kept_columns) for row in self._rows]

    def _build_rich_table(self) -> Table:
        table = Table(box=None, title=self._title, title_justify="left", pad_edge=False)
        for name in self._columns:
            can_wrap = name == "settings"
            table.add_column(name, no_wrap=not can_wrap, justify="right" if name in self._number_columns else "left")
        for row in self._rows:
            table.add_row(*row)
        return table

    def _format_plain_text(self) -> str:
        rows = [self._columns, *(tuple(map(str, row)) for row in self._rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        alignments = [">" if name in self._number_columns else "<" for name in self._columns]
        pattern = "  ".join(f"{{:{side}{width}}}" for side, width in zip(alignments, widths, strict=True))
        return "\n".join([*([self._title] if self._title else []), *(pattern.format(*row).rstrip() for row in rows)])


def _format_run_cells(config: RunConfig) -> list[str | Text]:
    strategy = config.effective_strategy
    limit = config.hardware.memory_limit_gib
    return [
        Text(config.model.name),
        Text(f"{strategy} F={config.strategy.resolved_sharding_factor}" if "hybrid" in strategy else strategy),
        Text(config.precision.name),
        Text(f"{config.gpus}x{config.batch_size_per_gpu}"),
        Text(f"{limit:g} GiB" if limit else ""),
    ]


SHORT_SETTING_NAMES = {"activation_checkpointing": "checkpointing"}


def _describe_differing_settings(configs: Sequence[RunConfig]) -> dict[str, str]:
    """By run_id, the settings that tell runs of one model apart and have no column: ``checkpointing=full``."""
    values: dict[tuple[str, str], set[Any]] = {}
    settings = [(config, _list_settings(config)) for config in configs]
    for config, run_settings in settings:
        for name, value in run_settings.items():
            values.setdefault((config.model.name, name), set()).add(value)
    return {
        config.run_id: " ".join(
            f"{SHORT_SETTING_NAMES.get(name, name.rpartition('.')[2])}={format_override_value(value)}"
            for name, value in run_settings.items()
            if len(values[config.model.name, name]) > 1
        )
        for config, run_settings in settings
    }


def _list_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of the run, fields of its model and knobs of its strategy that `_format_run_cells` does not show."""
    scalars = {name: value for name, value in get_fields(config).items() if isinstance(value, (int, str))}
    shown_elsewhere = ("mode", "gpus", "gpus_per_node", "batch_size_per_gpu")
    requested_knobs = {
        **get_fields(config.strategy),
        **config.requested,
    }  # what follows from the rest of a run tells no runs apart
    knobs = {name: value for name, value in requested_knobs.items() if name not in ("name", "sharding_factor")}
    return {
        **{name: value for name, value in scalars.items() if name not in shown_elsewhere},
        "gradient_clip_norm": config.gradient_clip_norm,
        **{f"{config.strategy.name}.{name}": value for name, value in knobs.items()},
        **{f"model.{name}": str(value) for name, value in get_fields(config.model).items() if name != "name"},
        **{f"finetune.{name}": str(value) for name, value in get_fields(config.finetune).items() if name != "name"},
    }


def build_result_table(
    configs: Sequence[RunConfig],
    rows_by_run_id: Mapping[str, Record | None],
    cost_terms: CostTerms = NO_COST_TERMS,
) -> RenderableType:
    """A line per run: what it was and what it measured."""
    measured_columns = ("ms/step", "TFLOP/s", "peak", *UNIT_COST_COLUMNS)
    differences = _describe_differing_settings(configs)
    has_rehearsals = any(config.is_rehearsed for config in configs)
    title = REHEARSAL_TITLE if has_rehearsals else "Results (speed and memory per rank)"
    table = CompactTable(
        *RUN_COLUMNS, "settings", "status", *measured_columns, title=title, number_columns=measured_columns
    )
    for config in configs:
        record = rows_by_run_id[config.run_id]
        status = record["status"] if record else "no row"
        cells = [*_format_run_cells(config), differences[config.run_id]]
        table.add_row(
            *cells,
            Text(status, style=STATUS_STYLES.get(status, "red")),
            *_format_measurements(record),
            *_format_unit_costs(config, record, cost_terms),
        )
    return table


def _format_measurements(record: Record | None) -> list[str]:
    """Milliseconds per step, TFLOP/s and peak memory per rank, in the units of the report's page."""
    if record is None or record["status"] not in FINISHED_STATUSES:
        return ["", "", ""]
    if record["status"] == "oom":
        requested_bytes = record.get("oom_bytes")
        return ["in", record["oom_phase"], f"+{format_memory(requested_bytes)}" if requested_bytes else ""]
    return [
        _format_scaled(record.get("step_time_median_s"), 1e3),
        _format_speed(record.get("tflops_per_gpu")),
        _format_peak(record.get("peak_allocated_bytes")),
    ]


def _format_speed(tflops: float | None) -> str:
    return "" if tflops is None else format_number(tflops)


def _format_peak(num_bytes: float | None) -> str:
    return "" if num_bytes is None else format_memory(num_bytes)


def build_prediction_table(
    configs: Sequence[RunConfig], rows_by_run_id: Mapping[str, Record], cost_terms: CostTerms = NO_COST_TERMS
) -> RenderableType:
    """A line per prediction: will it fit, how fast will it be, what limits it."""
    number_columns = ("ms/step", "TFLOP/s", "peak", "reserved", *UNIT_COST_COLUMNS)
    title = "Predictions (speed and memory per rank; nothing ran)"
    differences = _describe_differing_settings(configs)
    table = CompactTable(
        *RUN_COLUMNS, "settings", "fit", *number_columns, "limited by", title=title, number_columns=number_columns
    )
    for config in configs:
        record = rows_by_run_id[config.run_id]
        cells = [*_format_run_cells(config), differences[config.run_id]]
        if record["status"] not in FINISHED_STATUSES:
            table.add_row(*cells, Text(record["status"], style="red"))
            continue
        limiting_factor = (record.get("limited_by") or "") + (", degraded" if record.get("degraded") else "")
        table.add_row(
            *cells,
            format_fit(record.get("fit")),
            _format_scaled(record.get("step_time_median_s"), 1e3),
            _format_speed(record.get("tflops_per_gpu")),
            _format_peak(record.get("peak_allocated_bytes")),
            _format_peak(record.get("peak_reserved_bytes")),
            *_format_unit_costs(config, record, cost_terms),
            Text(limiting_factor),
        )
    reason_counts: dict[str, int] = {}
    for record in rows_by_run_id.values():
        if record["status"] not in FINISHED_STATUSES:
            reason_counts[record["error"]] = reason_counts.get(record["error"], 0) + 1
    return Group(table, *(Text(f"Not predicted ({n}): {reason}", style="red") for reason, n in reason_counts.items()))


def _format_scaled(value: float | None, factor: float, digits: str = ",.1f") -> str:
    return "" if value is None else format(value * factor, digits)


def _format_unit_costs(config: RunConfig, record: Record | None, cost_terms: CostTerms) -> list[str]:
    """Cells of `UNIT_COST_COLUMNS`, empty where nothing was asked for or is known."""
    speed = None if record is None else record.get("tokens_per_second_per_gpu")
    if not speed or not cost_terms.is_requested:
        return [""] * len(UNIT_COST_COLUMNS)
    gpu_hours = 1e9 / speed / 3600
    costs = (cost_terms.compute_dollars(config, gpu_hours), cost_terms.compute_kwh(config, gpu_hours))
    return [_format_scaled(cost, 1, ",.2f") for cost in costs]


def build_predicted_batch_table(sizes: Sequence[tuple[RunConfig, int | None, int | None]]) -> RenderableType:
    """A line per predicted search: the largest batch that surely fits, and the largest that may."""
    columns = ("largest batch", "perhaps")
    table = CompactTable(
        *RUN_COLUMNS, *columns, title="Largest batch per rank that is predicted to fit", number_columns=columns
    )
    for config, surely_fitting, possibly_fitting in sizes:
        table.add_row(
            *_format_run_cells(config),
            *("none" if size is None else str(size) for size in (surely_fitting, possibly_fitting)),
        )
    return table


def build_batch_search_table(sizes: Sequence[tuple[RunConfig, int | None]]) -> RenderableType:
    """A line per search: the largest batch that fits."""
    table = CompactTable(
        *RUN_COLUMNS, "largest batch", title="Largest batch per rank that fits", number_columns=["largest batch"]
    )
    for config, size in sizes:
        table.add_row(*_format_run_cells(config), Text("none, or not found" if size is None else str(size)))
    return table


class SweepProgress:
    """Shows which run is on, how far the sweep is, how long it has taken and will; on a terminal only.

    Elsewhere it is quiet but for runs that came to no result.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._line = ProgressLine(console, total, "starting")

    def __enter__(self) -> SweepProgress:
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, traceback)

    def show_event(self, event: dict[str, Any]) -> None:
        """Show one event of the launcher."""
        if event["event"] == "start":
            self._line.show(event["label"])
        elif event["event"] == "end":
            style = STATUS_STYLES.get(event["status"], "")
            if self._console.is_terminal or event["status"] not in FINISHED_STATUSES:
                line = Text.assemble((f"{event['status']:9}", style), f"{event['label']}: {event['summary']}")
                self._console.print(line, soft_wrap=True)
        elif event["event"] == "task done":
            self._line.advance()
        elif event["event"] == "taken":
            self._console.print(Text(f"left     {event['label']}: job {event['by']} is executing it"), soft_wrap=True)
        elif event["event"] in ("lost", "stuck"):
            self._console.print(
                Text(f"{event['event']:8} {event['label']}: {event['error']}", style="red"), soft_wrap=True
            )
            self._line.advance()
