"""One attempt as a tracker shows it: its row sorted into configuration, steps and results. Pure functions."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import records
from bench.core.units import GIB
from bench.records import COLUMN_NAMES, Record
from bench.records.matching import build_step_time_key, encode_config_key
from bench.records.store import RUN_ID_PATTERN

FAILED_STATUSES = ("error", "timeout", "preempted")
"""Statuses of attempts that came to no result. Running out of memory is one, and a skipped run has not failed."""

SCALING_KNOBS = ("gpus", "gpus_per_node", "strategy.sharding_factor")
"""What differs between the points of one scaling curve."""

FILTER_COLUMNS = (
    "run_id",
    "attempt",
    "evidence",
    "git_sha",
    "git_clean",
    "torch_version",
    "gpu_name",
    "hosts",
    "launcher",
)
"""Columns that say what ran and where, for a tracker's configuration: to filter and to group by."""

OOM_TABLE = "out_of_memory"
"""Name of the table that collects the runs that do not fit."""

MAX_TAG_CHARS = 64
"""Characters; wandb takes no longer one."""


@dataclass(frozen=True)
class TrackedRun:
    """One run for a tracker."""

    id: str
    """The same whenever and from wherever it is sent."""
    name: str
    group: str
    job_type: str
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """Metrics by step, from step 0."""
    summary: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tables of one row, by name: a tracker shows those of many runs as one."""
    images: dict[str, str] = field(default_factory=dict)
    """Pictures by name: paths."""
    artifact: str = ""
    """Kind of the files: ``record``, ``report``."""
    files: dict[str, str] = field(default_factory=dict)
    """Files by their name in the artifact: paths."""
    lasting: bool = True
    """Whether these files stay as they are."""
    failed: bool = False
    preempted: bool = False
    alert: tuple[str, str] | None = None
    """Title and text of a message to whoever wants to be told."""

    def to_plain_values(self) -> dict[str, Any]:
        """As plain values, to be handed to another process."""
        return asdict(self)


def build_tracked_run(record: Record, row_path: Path) -> TrackedRun:
    """An attempt for a tracker.

    Parameters
    ----------
    record: Record
        Its row, of whatever evidence but `published`.
    row_path: Path
        The row's file; a trace lies beside it.
    """
    status = record["status"]
    return TrackedRun(
        id=build_attempt_id(record),
        name=_format_name(record),
        group=record.get("sweep") or "adhoc",
        job_type=record["evidence"],
        tags=_list_tags(record),
        notes=record.get("error") or "",
        config=_build_config(record),
        history=[*_list_steps(record), *_build_result_points(record)],
        summary=_build_summary(record),
        tables={OOM_TABLE: _build_oom_row(record)} if status == "oom" else {},
        artifact="record",
        files=_list_files(record, row_path),
        failed=status in FAILED_STATUSES,
        preempted=status == "preempted",
    )


def build_attempt_id(record: Record) -> str:
    """A tracker's id of an attempt: fixed, and different for every attempt that was ever made.

    A run_id names a configuration, and every store counts attempts from 0, so when, where and with which commit an
    attempt began tells those of two stores apart: the history of a configuration needs both.
    """
    origin = "|".join(str(record.get(name)) for name in ("started_at", "hosts", "git_sha", "job_id"))
    return f"{record['run_id']}-{record['attempt']}-{_compute_short_hash(origin)}"


def format_configuration(record: Record) -> str:
    """A configuration in a few words and a hash: equal for attempts that may be compared, whatever their commit."""
    question = build_step_time_key(record)
    text = f"{_format_label(record)} x{record.get('world_size')}"
    return f"{text} #{_compute_short_hash(encode_config_key(question) if question else text)}"


def format_scaling_series(record: Record) -> str:
    """The same for all points of a scaling curve: the configuration without its world size."""
    question = build_step_time_key(record)
    text = _format_label(record)
    return f"{text} #{_compute_short_hash(encode_config_key(question, *SCALING_KNOBS) if question else text)}"


def _compute_short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _format_label(record: Record) -> str:
    factor_text = f" F={record['sharding_factor']}" if "hybrid" in str(record.get("effective_strategy")) else ""
    limit_bytes = record.get("memory_limit_bytes")
    parts = [
        str(record.get("model")),
        f"{record.get('effective_strategy')}{factor_text}",
        str(record.get("precision")),
        f"b{record.get('batch_size_per_gpu')}",
        str(record.get("hardware")),
    ]
    return " ".join(parts + ([f"<={limit_bytes / GIB:g}GiB"] if limit_bytes else []))


def _format_name(record: Record) -> str:
    """What people read in a list of runs; one that came to no speed says so."""
    status_text = "" if record["status"] == "ok" else f" {record['status']}"
    repeat_text = f" r{record['repeat']}" if record.get("repeat") else ""
    attempt_text = f" attempt {record['attempt']}" if record.get("attempt") else ""
    return f"{_format_label(record)} x{record.get('world_size')}{repeat_text}{attempt_text}{status_text}"


def _list_tags(record: Record) -> list[str]:
    tag_values = [record.get(name) for name in ("strategy", "model", "precision", "status", "evidence")]
    return list(dict.fromkeys(str(tag)[:MAX_TAG_CHARS] for tag in tag_values if tag))


def _build_config(record: Record) -> dict[str, Any]:
    """The complete resolved configuration of the run, what it ran on, and names to group by."""
    return {
        **(record.get("config") or {}),
        **{name: record[name] for name in FILTER_COLUMNS if record.get(name) is not None},
        **{name: record[name] for name in ("requested", "effective", "environment") if record.get(name)},
        "configuration": format_configuration(record),
        "scaling_series": format_scaling_series(record),
        "commit": (record.get("git_sha") or "unknown")[:12],
    }


def _build_summary(record: Record) -> dict[str, Any]:
    """Every column that says anything, under its own name and in its own unit; and the start as a number."""
    columns = {name: record[name] for name in COLUMN_NAMES if record.get(name) is not None}
    return {**columns, "started_unix_s": _parse_start(record)}


def _list_steps(record: Record) -> Iterator[dict[str, Any]]:
    """The loss of every step from the first, and time and speed of those that were timed, the last ones."""
    losses = record.get("losses") or []
    rank_step_times = [rank["step_times_s"] for rank in record.get("ranks") or [] if rank.get("step_times_s")]
    step_times_s = [max(rank_times) for rank_times in zip(*rank_step_times, strict=False)]
    work_per_step = {
        "step/tokens_per_second_per_gpu": _compute_tokens_per_step(record),
        "step/tflops_per_gpu": (record.get("flops") or {}).get("model", 0.0) / 1e12,
    }
    num_untimed = max(len(losses) - len(step_times_s), 0)
    for step in range(max(len(losses), len(step_times_s))):
        metrics: dict[str, Any] = {"step/number": step, "step/timed": int(step >= num_untimed)}
        if step < len(losses):
            metrics["step/loss"] = losses[step]
        if step >= num_untimed:
            step_s = step_times_s[step - num_untimed]
            metrics["step/time_s"] = step_s
            metrics["step/time_fastest_rank_s"] = min(rank_times[step - num_untimed] for rank_times in rank_step_times)
            metrics |= {name: amount / step_s for name, amount in work_per_step.items() if amount}
        yield metrics


def _compute_tokens_per_step(record: Record) -> float:
    """Tokens a rank reads in a step, from its speed and the time of a step; 0 where it is not known."""
    return (record.get("tokens_per_second_per_gpu") or 0.0) * (record.get("step_time_median_s") or 0.0)


def _build_result_points(record: Record) -> list[dict[str, Any]]:
    """The result as a point after the last step, for curves over commits and world sizes; none where there is none."""
    if record["status"] not in ("ok", "oom"):
        return []
    point: dict[str, Any] = {
        "result/started_unix_s": _parse_start(record),
        "result/world_size": record.get("world_size"),
    }
    for name in ("tflops_per_gpu", "step_time_median_s", "tokens_per_second_per_gpu", "mfu"):
        point[f"result/{name}"] = record.get(name)
    for name in ("allocated", "reserved"):
        peak = record.get(f"peak_{name}_bytes")
        point[f"result/peak_{name}_gib"] = None if peak is None else peak / GIB
    return [{name: value for name, value in point.items() if value is not None}]


def _parse_start(record: Record) -> float:
    return datetime.datetime.fromisoformat(record["started_at"]).timestamp()


def _build_oom_row(record: Record) -> dict[str, Any]:
    """A row for the table of runs that do not fit."""
    sizes_bytes = {name: record.get(f"{name}_bytes") for name in ("oom", "memory_limit", "peak_reserved")}
    return {
        **{name: record.get(name) for name in ("model", "effective_strategy", "sharding_factor", "precision")},
        **{name: record.get(name) for name in ("world_size", "batch_size_per_gpu", "hardware", "evidence")},
        "phase": record.get("oom_phase"),
        "rank": record.get("oom_rank"),
        **{f"{name}_gib": None if size is None else size / GIB for name, size in sizes_bytes.items()},
        "commit": (record.get("git_sha") or "unknown")[:12],
    }


def _list_files(record: Record, row_path: Path) -> dict[str, str]:
    files = {"record.json": str(row_path)}
    trace = row_path.with_name(record["trace"]) if record.get("trace") else None
    return files | ({"trace.json.gz": str(trace)} if trace is not None and trace.is_file() else {})


# --- What a store has to show: every attempt of every run, and the report drawn of it.

PAGE_FILE = "index.html"


def list_attempts(store: Path, run_ids: Iterable[str]) -> list[Path]:
    """The row files of some runs of a store, every attempt. Rows that are packed have none: `read_row` reads both."""
    return [
        records.get_row_path(store, run_id, attempt)
        for run_id in run_ids
        for attempt in records.list_attempts(store, run_id)
    ]


def list_all_attempts(path: Path) -> list[Path]:
    """The row files of every attempt below a store, or below a folder of stores."""
    return [row for store, run_id in _find_runs(path) for row in list_attempts(store, [run_id])]


def _find_runs(path: Path) -> Iterator[tuple[Path, str]]:
    """Folders of runs: their store, and their run_id."""
    if RUN_ID_PATTERN.match(path.name):
        yield path.parent, path.name
        return
    for folder, folders, _ in os.walk(path):
        run_names = records.list_runs(folder)
        yield from ((Path(folder), name) for name in run_names)
        folders[:] = sorted(name for name in folders if name not in run_names and not name.startswith("."))


def build_report_run(store: Path, sweep: str) -> TrackedRun | None:
    """The report that lies in a store, as a run of its own: its page and its figures; None if there is none."""
    folder = store / "report"
    if not (folder / PAGE_FILE).is_file():
        return None
    figures = sorted(path for path in (folder / "figures").glob("*") if path.suffix in (".png", ".svg"))
    origin = f"{socket.gethostname()}:{store.resolve()}|{sweep}"
    return TrackedRun(
        id=f"report-{hashlib.sha256(origin.encode()).hexdigest()[:16]}",
        name=f"report of {sweep}",
        group=sweep,
        job_type="report",
        tags=["report"],
        images={f"figures/{path.stem}": str(path.resolve()) for path in figures if path.suffix == ".png"},
        artifact="report",
        files={
            PAGE_FILE: str((folder / PAGE_FILE).resolve()),
            **{f"figures/{path.name}": str(path.resolve()) for path in figures},
        },
        lasting=False,
    )
