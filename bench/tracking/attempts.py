"""What a store has to show: every attempt of every run, and the report drawn of it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import records
from bench.records.store import RUN_ID_PATTERN
from bench.tracking.tracked_run import TrackedRun

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
