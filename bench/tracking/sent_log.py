"""Notes of what was sent where, so that it is not sent again.

    <folder>/sent/<destination>/<id>.json       one run that is there: where, and a hash of what was sent

A note is written, whole at once, after its run has arrived. Whoever is interrupted before has the run sent again under
the same id, which changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bench.core.atomic_write import replace_file
from bench.records import sharing
from bench.tracking.base import TrackerSession
from bench.tracking.tracked_run import TrackedRun

SENT_FOLDER = "sent"


def was_sent(folder: Path, session: TrackerSession, run: TrackedRun) -> bool:
    """Whether a run is where a session sends, as it is now."""
    try:
        log_entry = json.loads(_build_log_path(folder, session.destination, run).read_text())
        return bool(log_entry["content"] == _hash_files(run) and session.has_run(log_entry["where"]))
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that says nothing
        return False


def log_sent_run(folder: Path, session: TrackerSession, run: TrackedRun, run_location: str) -> None:
    """Note that a run has arrived.

    Raises
    ------
    OSError
        If the note cannot be written.
    """
    path = _build_log_path(folder, session.destination, run)
    sharing.make_folder(path.parent)
    log_entry = {"destination": session.destination, "where": run_location, "content": _hash_files(run)}
    replace_file(path, json.dumps(log_entry) + "\n")


def _build_log_path(folder: Path, destination: str, run: TrackedRun) -> Path:
    return folder / SENT_FOLDER / hashlib.sha256(destination.encode()).hexdigest()[:12] / f"{run.id}.json"


def _hash_files(run: TrackedRun) -> str:
    """Hash of a run's files: a row never changes, a report does."""
    digest = hashlib.sha256()
    for name in sorted(run.files):
        digest.update(f"\0{name}\0".encode() + Path(run.files[name]).read_bytes())
    return digest.hexdigest()
