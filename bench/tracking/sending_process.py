"""The process that sends: told what on its standard input, it answers with a JSON object a line.

For every run ``{"begin": id}``, then ``{"sent": id, "where": …}`` or ``{"unsent": …}``; or ``{"known": id}`` alone.
``{"remark": …}`` and ``{"offline": why}`` once, ``{"unreadable": …}`` for a file that is no row of a run. At the end
``{"over": true, "whereabouts": …}``, or ``{"failed": …}`` if no more can be sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import records
from bench.core import files
from bench.core.files import replace_file
from bench.core.processes import die_with_parent
from bench.tracking.base import TrackerSession, load_tracker
from bench.tracking.tracked_run import TrackedRun, build_tracked_run

MessageWriter = Callable[..., None]

PACKED_ROWS_FOLDER = "rows"

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that SLURM sends to all processes of a job: whoever ordered decides what they mean."""


def main() -> int:
    """Carry out the order on standard input. Exit code 0, whatever came of it: the answers say."""
    die_with_parent()
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    message_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer

    def write_message(**message: Any) -> None:
        message_stream.write(json.dumps(message) + "\n")
        message_stream.flush()

    try:
        _handle_request(json.load(sys.stdin), write_message)
    except ConnectionError as error:
        write_message(failed=str(error))
    except Exception as error:  # the one who asked says it; nothing may depend on a tracker
        write_message(failed=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return 0


def _handle_request(request: dict[str, Any], write_message: MessageWriter) -> None:
    tracker = load_tracker(request["tracker"])
    folder = Path(request["folder"])
    written_texts: set[str] = set()

    def write_once(**message: Any) -> None:
        for key, text in message.items():
            if text is not None and text not in written_texts:
                written_texts.add(text)
                write_message(**{key: text})

    with tracker.open_session(folder, offline_reason=request["offline"], fall_back=request["fall_back"]) as session:
        write_once(remark=session.message, offline=session.offline_reason)
        for run in _load_runs(request, folder, write_message):
            _send_run(run, session, folder, write_message)
            write_once(offline=session.offline_reason)
        write_message(over=True, whereabouts=session.location)


def _load_runs(request: dict[str, Any], folder: Path, write_message: MessageWriter) -> Iterator[TrackedRun]:
    for path in map(Path, request["rows"]):
        try:
            record = records.read_row(path)
        except (OSError, ValueError) as error:
            write_message(unreadable=f"{path}: {error}")
            continue
        if record["evidence"] == "published":
            write_message(unreadable=f"{path}: quoted, not a run")
            continue
        run = build_tracked_run(record, path)
        yield run if path.exists() else _write_packed_row(run, path, folder)
    for values in request["runs"]:
        yield TrackedRun(**values)


def _write_packed_row(run: TrackedRun, path: Path, folder: Path) -> TrackedRun:
    """The same run with a file of its packed row, in the tracker's folder."""
    row_path = folder / PACKED_ROWS_FOLDER / f"{run.id}.json"
    files.make_folder(row_path.parent)
    replace_file(row_path, records.read_row_text(path))
    return dataclasses.replace(run, files={**run.files, "record.json": str(row_path)})


def _send_run(run: TrackedRun, session: TrackerSession, folder: Path, write_message: MessageWriter) -> None:
    """Send a run unless it is there already."""
    if was_sent(folder, session, run):
        write_message(known=run.id)
        return
    write_message(begin=run.id)
    try:
        run_location = session.send(run)
        log_sent_run(folder, session, run, run_location)
    except ConnectionError:  # then there is no way for the others either
        raise
    except Exception as error:
        write_message(unsent=f"{run.id}: {type(error).__name__}: {' '.join(str(error).split())}")
    else:
        write_message(sent=run.id, where=run_location)


# --- Notes of what was sent where, so that it is not sent again.

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
    files.make_folder(path.parent)
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


if __name__ == "__main__":
    sys.exit(main())
