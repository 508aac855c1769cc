"""What a sweep shows in the terminal: the plan, progress while it runs, results at the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import progress as bars
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bench.config import RunConfig
from bench.outlook import Expectation, duration, summary
from bench.planning.plan import Plan
from bench.planning.request import Request
from bench.records import Record
from bench.records.schema import FINISHED
from bench.typed import as_typed

STYLES = {
    "ok": "green",
    "oom": "yellow",
    "error": "red",
    "timeout": "red",
    "preempted": "magenta",
    "skipped": "yellow",
    "lost": "red",
}

MOST_RICH_LINES = 300

VERDICTS = {"fits": "green", "too close to call": "magenta", "does not fit": "yellow"}

NONE_EXPECTED: Mapping[str, Expectation] = {}

EXPECTED = ("fit", "reserved GiB", "takes", "GPU-hours")
"""What a dry run says of each run: `takes` includes what comes before the first step."""

REHEARSALS = "Rehearsals of rank 0 (its memory; without the others nothing is waited for, so speed is an upper bound)"

IDENTITY = ("model", "strategy", "precision", "ranks x batch", "limit")


def plan_table(
    request: Request, plan: Plan, *, details: bool, expected: Mapping[str, Expectation] = NONE_EXPECTED
) -> RenderableType:
    """The plan: one line, and with `details` every run, what is expected of it, and why some cannot run."""
    line = Text(f"Sweep {request.sweep}: {plan.size} runs, {len(plan.done)} done, {len(plan.to_run)} to run")
    if plan.underway:
        line.append(f", {len(plan.underway)} queued or running on a cluster")
    if plan.skipped:
        line.append(f", {len(plan.skipped)} skipped: predicted not to fit")
    if plan.impossible:
        line.append(f", {len(plan.impossible)} impossible")
    parts: list[RenderableType] = [line]
    if plan.shapes and request.executes and request.cluster["launcher"] == "local":
        shapes = [f"{count} x {gpus} rank{'s' if gpus > 1 else ''}" for (_, gpus), count in sorted(plan.shapes.items())]
        parts.append(Text(f"Shapes on one machine: {', '.join(shapes)}"))
    if details:
        parts.append(_plan_details(plan, expected))
    parts += [Text(sentence) for sentence in summary(request, plan, expected)]
    if plan.impossible:
        reasons: dict[str, int] = {}
        for _, reason in plan.impossible:
            reasons[reason] = reasons.get(reason, 0) + 1
        parts += [Text(f"Impossible ({count}): {reason}", style="yellow") for reason, count in reasons.items()]
        if details:
            parts += [Text(f"  {settings}", style="dim") for settings, _ in plan.impossible]
    return Group(*parts)


def _plan_details(plan: Plan, expected: Mapping[str, Expectation]) -> Lines:
    """A line per run: what it is, what is expected of it, and its state."""
    states: list[tuple[RunConfig, Text]] = [
        *((config, Text("to predict" if config.predicted else "to run")) for config in plan.to_run),
        *((config, Text("skipped", style=STYLES["skipped"])) for config, _ in plan.skipped),
        *((config, Text(f"done: {status}", style=STYLES[status])) for config, status in plan.done),
        *((config, Text(words, style="cyan")) for config, words in plan.underway),
    ]
    differences = _differences([config for config, _ in states])
    table = Lines("run", *IDENTITY, "settings", *EXPECTED, "state", numbers=EXPECTED[1:])
    for config, state in states:
        cells = [differences[config.run_id], *_foreseen(expected.get(config.run_id))]
        table.add_row(Text(config.run_id, style="dim"), *_identity(config), *cells, state)
    return table


def _foreseen(expectation: Expectation | None) -> list[str | Text]:
    if expectation is None:
        return ["", "", "", ""]
    memory = expectation.memory
    return [
        verdict(memory.verdict if memory else None),
        f"{memory.reserved.value / 2**30:,.1f}" if memory else "",
        duration(expectation.seconds),
        f"{expectation.gpu_hours:,.2f}",
    ]


def verdict(words: str | None) -> Text:
    """fits, too close to call or does not fit, in its colour."""
    return Text(words or "", style=VERDICTS.get(words or "", ""))


class Lines:
    """A table, without the columns in which no line says anything.

    Plain text where there is no terminal, so that nothing is cut off, and where it is long: rich takes a second for a
    thousand lines.
    """

    def __init__(self, *columns: str, title: str | None = None, numbers: Sequence[str] = ()) -> None:
        self._title, self._columns, self._numbers = title, columns, numbers
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a line; cells that are missing at its end stay empty."""
        self._rows.append((*cells, *[""] * (len(self._columns) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        self._without_empty()
        rich = console.is_terminal and len(self._rows) <= MOST_RICH_LINES
        yield self._rich() if rich else Text(self._plain(), no_wrap=True, overflow="ignore")

    def _without_empty(self) -> None:
        """Leave out the columns in which no line says anything."""
        kept = [place for place, _ in enumerate(self._columns) if any(str(row[place]) for row in self._rows)]
        if self._rows:
            self._columns = tuple(self._columns[place] for place in kept)
            self._rows = [tuple(row[place] for place in kept) for row in self._rows]

    def _rich(self) -> Table:
        table = Table(box=None, title=self._title, title_justify="left", pad_edge=False)
        for name in self._columns:
            wraps = name == "settings"
            table.add_column(name, no_wrap=not wraps, justify="right" if name in self._numbers else "left")
        for row in self._rows:
            table.add_row(*row)
        return table

    def _plain(self) -> str:
        rows = [self._columns, *(tuple(map(str, row)) for row in self._rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [">" if name in self._numbers else "<" for name in self._columns]
        pattern = "  ".join(f"{{:{side}{width}}}" for side, width in zip(aligned, widths, strict=True))
        return "\n".join([*([self._title] if self._title else []), *(pattern.format(*row).rstrip() for row in rows)])


def _identity(config: RunConfig) -> list[str | Text]:
    strategy = config.effective_strategy
    limit = config.hardware.memory_limit_gib
    return [
        Text(config.model.name),
        Text(f"{strategy} F={config.strategy.factor}" if "hybrid" in strategy else strategy),
        Text(config.precision.name),
        Text(f"{config.gpus}x{config.batch_size_per_gpu}"),
        Text(f"{limit:g} GiB" if limit else ""),
    ]


def _differences(configs: Sequence[RunConfig]) -> dict[str, str]:
    """By run_id, the settings that tell runs of one model apart and have no column: ``checkpointing=full``."""
    values: dict[tuple[str, str], set[Any]] = {}
    settings = [(config, _settings(config)) for config in configs]
    for config, found in settings:
        for name, value in found.items():
            values.setdefault((config.model.name, name), set()).add(value)
    return {
        config.run_id: " ".join(
            f"{name.rpartition('.')[2].removeprefix('activation_')}={as_typed(value)}"
            for name, value in found.items()
            if len(values[config.model.name, name]) > 1
        )
        for config, found in settings
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    """Settings of the run and knobs of its strategy that `_identity` does not show."""
    scalars = {name: value for name, value in vars(config).items() if isinstance(value, (int, str))}
    told = ("mode", "gpus", "gpus_per_node", "batch_size_per_gpu", "run_id")
    asked = {**vars(config.strategy), **config.requested}  # what follows from the rest of a run tells no runs apart
    knobs = {name: value for name, value in asked.items() if name not in ("name", "sharding_factor")}
    return {
        **{name: value for name, value in scalars.items() if name not in told},
        **{f"{config.strategy.name}.{name}": value for name, value in knobs.items()},
        **{f"finetune.{name}": str(value) for name, value in vars(config.finetune).items() if name != "name"},
    }


def result_table(configs: Sequence[RunConfig], found: Mapping[str, Record | None]) -> RenderableType:
    """A line per run: what it was and what it measured."""
    on_cpu = all(config.hardware.device == "cpu" for config in configs)
    unit, factor = ("GFLOP/s", 1000) if on_cpu else ("TFLOP/s", 1)
    figures = ("ms/step", unit, "peak MiB")
    differences = _differences(configs)
    rehearsed = any(config.rehearsed for config in configs)
    title = REHEARSALS if rehearsed else "Results (speed and memory per rank)"
    table = Lines(*IDENTITY, "settings", "status", *figures, title=title, numbers=figures)
    for config in configs:
        record = found[config.run_id]
        status = record["status"] if record else "no row"
        cells = [*_identity(config), differences[config.run_id]]
        table.add_row(*cells, Text(status, style=STYLES.get(status, "red")), *_figures(record, factor))
    return table


def _figures(record: Record | None, factor: int) -> list[str]:
    if record is None or record["status"] not in FINISHED:
        return ["", "", ""]
    if record["status"] == "oom":
        asked = record.get("oom_bytes")
        return ["in", record["oom_phase"], f"+{asked / 2**20:.1f}" if asked else ""]
    numbers = (
        ("step_time_median_s", 1000, ".1f"),
        ("tflops_per_gpu", factor, ",.1f"),
        ("peak_allocated_bytes", 2**-20, ",.1f"),
    )
    found = ((record.get(name), scale, digits) for name, scale, digits in numbers)
    return ["" if value is None else format(value * scale, digits) for value, scale, digits in found]


def prediction_table(configs: Sequence[RunConfig], found: Mapping[str, Record]) -> RenderableType:
    """A line per prediction: will it fit, how fast will it be, what limits it."""
    on_cpu = all(config.hardware.device == "cpu" for config in configs)
    unit, size = ("MiB", 2**20) if on_cpu else ("GiB", 2**30)
    numbers = ("ms/step", "TFLOP/s", f"peak {unit}", f"reserved {unit}")
    title = "Predictions (speed and memory per rank; nothing ran)"
    differences = _differences(configs)
    table = Lines(*IDENTITY, "settings", "fit", *numbers, "limited by", title=title, numbers=numbers)
    for config in configs:
        record = found[config.run_id]
        cells = [*_identity(config), differences[config.run_id]]
        if record["status"] not in FINISHED:
            table.add_row(*cells, Text(record["status"], style="red"))
            continue
        limited = (record.get("limited_by") or "") + (", degraded" if record.get("degraded") else "")
        table.add_row(
            *cells,
            verdict(record.get("fit")),
            _shown(record.get("step_time_median_s"), 1e3),
            _shown(record.get("tflops_per_gpu"), 1),
            _shown(record.get("peak_allocated_bytes"), 1 / size),
            _shown(record.get("peak_reserved_bytes"), 1 / size),
            Text(limited),
        )
    untold: dict[str, int] = {}
    for record in found.values():
        if record["status"] not in FINISHED:
            untold[record["error"]] = untold.get(record["error"], 0) + 1
    return Group(table, *(Text(f"Not predicted ({n}): {why}", style="red") for why, n in untold.items()))


def _shown(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:,.1f}"


def batch_table(sizes: Sequence[tuple[RunConfig, int | None, int | None]]) -> RenderableType:
    """A line per predicted search: the largest batch that surely fits, and the largest that may."""
    columns = ("largest batch", "perhaps")
    table = Lines(*IDENTITY, *columns, title="Largest batch per rank that is predicted to fit", numbers=columns)
    for config, surely, perhaps in sizes:
        table.add_row(*_identity(config), *("none" if size is None else str(size) for size in (surely, perhaps)))
    return table


def search_table(sizes: Sequence[tuple[RunConfig, int | None]]) -> RenderableType:
    """A line per search: the largest batch that fits."""
    table = Lines(*IDENTITY, "largest batch", title="Largest batch per rank that fits", numbers=["largest batch"])
    for config, size in sizes:
        table.add_row(*_identity(config), Text("none, or not found" if size is None else str(size)))
    return table


class Progress:
    """Shows which run is on, how far the sweep is and how long it will take; on a terminal only.

    Elsewhere it is quiet but for runs that came to no result.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = bars.Progress(
            bars.TextColumn("{task.completed}/{task.total}"),
            bars.BarColumn(bar_width=min(30, shutil.get_terminal_size().columns // 4)),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def handle(self, event: dict[str, Any]) -> None:
        """Show one event of the launcher."""
        if event["event"] == "start":
            self._bar.update(self._task, description=event["label"])
        elif event["event"] == "end":
            style = STYLES.get(event["status"], "")
            if self._console.is_terminal or event["status"] not in FINISHED:
                line = Text.assemble((f"{event['status']:9}", style), f"{event['label']}: {event['summary']}")
                self._console.print(line, soft_wrap=True)
        elif event["event"] == "task done":
            self._bar.advance(self._task)
        elif event["event"] == "taken":
            self._console.print(Text(f"left     {event['label']}: job {event['by']} is executing it"), soft_wrap=True)
        elif event["event"] in ("lost", "stuck"):
            self._console.print(
                Text(f"{event['event']:8} {event['label']}: {event['error']}", style="red"), soft_wrap=True
            )
            self._bar.advance(self._task)
