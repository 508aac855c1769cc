"""What a sweep shows in the terminal: the plan, progress while it runs, results at the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.config import RunConfig
from bench.planning.plan import Plan
from bench.planning.request import Request
from bench.records import Record
from bench.records.schema import FINISHED

STYLES = {"ok": "green", "oom": "yellow", "error": "red", "timeout": "red", "preempted": "magenta", "lost": "red"}

IDENTITY = ("model", "strategy", "precision", "ranks x batch", "limit")


def plan_table(request: Request, plan: Plan, *, details: bool) -> RenderableType:
    """The plan: one line, and with `details` every run and why some cannot run."""
    total = len(plan.to_run) + len(plan.done) + len(plan.underway)
    line = Text(f"Sweep {request.sweep}: {total} runs, {len(plan.done)} done, {len(plan.to_run)} to run")
    if plan.underway:
        line.append(f", {len(plan.underway)} queued or running on a cluster")
    if plan.impossible:
        line.append(f", {len(plan.impossible)} impossible")
    parts: list[RenderableType] = [line]
    if plan.shapes and request.cluster["launcher"] == "local":
        shapes = [f"{count} x {gpus} rank{'s' if gpus > 1 else ''}" for (_, gpus), count in sorted(plan.shapes.items())]
        parts.append(Text(f"Shapes on one machine: {', '.join(shapes)}"))
    if details:
        table = _table("run", *IDENTITY, "state")
        for config in plan.to_run:
            table.add_row(Text(config.run_id, style="dim"), *_identity(config), Text("to run"))
        for config, status in plan.done:
            table.add_row(
                Text(config.run_id, style="dim"), *_identity(config), Text(f"done: {status}", style=STYLES[status])
            )
        for config, words in plan.underway:
            table.add_row(Text(config.run_id, style="dim"), *_identity(config), Text(words, style="cyan"))
        parts.append(table)
    if plan.impossible:
        reasons: dict[str, int] = {}
        for _, reason in plan.impossible:
            reasons[reason] = reasons.get(reason, 0) + 1
        parts += [Text(f"Impossible ({count}): {reason}", style="yellow") for reason, count in reasons.items()]
        if details:
            parts += [Text(f"  {settings}", style="dim") for settings, _ in plan.impossible]
    return Group(*parts)


def _table(*columns: str, title: str | None = None, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    return table


def _identity(config: RunConfig) -> list[RenderableType]:
    strategy = config.strategy.effective(config.gpus)
    limit = config.hardware.memory_limit_gib
    return [
        Text(config.model.name),
        Text(f"{strategy} F={config.strategy.factor}" if "hybrid" in strategy else strategy),
        Text(config.precision.name),
        Text(f"{config.gpus}x{config.batch_size_per_gpu}"),
        Text(f"{limit:g} GiB" if limit else ""),
    ]


def result_table(configs: Sequence[RunConfig], found: Mapping[str, Record | None]) -> RenderableType:
    """A line per run: what it was and what it measured."""
    on_cpu = all(config.hardware.device == "cpu" for config in configs)
    unit, factor = ("GFLOP/s", 1000) if on_cpu else ("TFLOP/s", 1)
    figures = ("ms/step", unit, "peak MiB")
    table = _table(*IDENTITY, "status", *figures, title="Results (speed and memory per rank)", numbers=figures)
    for config in configs:
        record = found[config.run_id]
        status = record["status"] if record else "no row"
        table.add_row(*_identity(config), Text(status, style=STYLES.get(status, "red")), *_figures(record, factor))
    return table


def _figures(record: Record | None, factor: int) -> list[str]:
    if record is None or record["status"] not in FINISHED:
        return ["", "", ""]
    if record["status"] == "oom":
        asked = record["oom_bytes"]
        return ["in", record["oom_phase"], f"+{asked / 2**20:.1f}" if asked else ""]
    return [
        f"{record['step_time_median_s'] * 1000:.1f}",
        f"{record['tflops_per_gpu'] * factor:,.1f}",
        f"{record['peak_allocated_bytes'] / 2**20:,.1f}",
    ]


def search_table(sizes: Sequence[tuple[RunConfig, int | None]]) -> RenderableType:
    """A line per search: the largest batch that fits."""
    table = _table(*IDENTITY, "largest batch", title="Largest batch per rank that fits", numbers=["largest batch"])
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
        elif event["event"] == "lost":
            self._console.print(Text(f"lost     {event['label']}: {event['error']}", style="red"), soft_wrap=True)
            self._bar.advance(self._task)
