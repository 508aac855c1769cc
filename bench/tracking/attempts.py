"""What a store has to show: every attempt of every run, and the report drawn of it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import records
from bench.records.store import RUN_ID
from bench.tracking.tracked import TrackedRun

PAGE = "index.html"


def attempts_of(store: Path, run_ids: Iterable[str]) -> list[Path]:
    """The row files of some runs of a store, every attempt."""
    return [
        records.row_path(store, run_id, attempt) for run_id in run_ids for attempt in records.attempts(store, run_id)
    ]


def all_attempts(path: Path) -> list[Path]:
    """The row files of every attempt below a store, or below a folder of stores."""
    return [row for store, run_id in _runs(path) for row in attempts_of(store, [run_id])]


def _runs(path: Path) -> Iterator[tuple[Path, str]]:
    """Folders of runs: their store, and their run_id."""
    if RUN_ID.match(path.name):
        yield path.parent, path.name
        return
    for folder, folders, _ in os.walk(path):
        runs = sorted(name for name in folders if RUN_ID.match(name))
        yield from ((Path(folder), name) for name in runs)
        folders[:] = sorted(name for name in folders if name not in runs and not name.startswith("."))


def report_run(store: Path, sweep: str) -> TrackedRun | None:
    """The report that lies in a store, as a run of its own: its page and its figures; None if there is none."""
    folder = store / "report"
    if not (folder / PAGE).is_file():
        return None
    figures = sorted(path for path in (folder / "figures").glob("*") if path.suffix in (".png", ".svg"))
    place = f"{socket.gethostname()}:{store.resolve()}|{sweep}"
    return TrackedRun(
        id=f"report-{hashlib.sha256(place.encode()).hexdigest()[:16]}",
        name=f"report of {sweep}",
        group=sweep,
        job_type="report",
        tags=["report"],
        images={f"figures/{path.stem}": str(path.resolve()) for path in figures if path.suffix == ".png"},
        artifact="report",
        files={
            PAGE: str((folder / PAGE).resolve()),
            **{f"figures/{path.name}": str(path.resolve()) for path in figures},
        },
        lasting=False,
    )
