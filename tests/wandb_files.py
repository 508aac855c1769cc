"""Offline runs of wandb, read back from their files: blocks of records as LevelDB's log has them, each a protobuf."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK_BYTES = 32768
HEADER_BYTES = 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """Everything that one run's file says."""

    folder: Path
    id: str = ""
    project: str = ""
    entity: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Path]] = field(default_factory=dict)
    """By name: paths of the files on this machine, by their names in the artifact."""
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    preempting: bool = False
    exit_code: int | None = None


def offline_runs(folder: Path) -> dict[str, OfflineRun]:
    """All offline runs below a folder, by id; none is there twice."""
    runs: dict[str, OfflineRun] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run = read_run(path)
        assert run.id not in runs, f"{run.id} is there twice"
        runs[run.id] = run
    return runs


def read_run(path: Path) -> OfflineRun:
    """One run, from its file."""
    found = OfflineRun(path.parent)
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.id, found.project, found.entity = run.run_id, run.project, run.entity
            found.name, found.group, found.job_type = run.display_name, run.run_group, run.job_type
            found.notes, found.tags = run.notes, list(run.tags)
            found.config |= _values(run.config.update)
        elif kind == "config":
            found.config |= _values(record.config.update)
        elif kind == "history":
            found.history.append(_values(record.history.item))
        elif kind == "summary":
            found.summary |= _values(record.summary.update)
        elif kind == "artifact":
            contents = record.artifact.manifest.contents
            found.artifacts[record.artifact.name] = {entry.path: Path(entry.local_path) for entry in contents}
        elif kind == "alert":
            found.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "preempting":
            found.preempting = True
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file, put together from their pieces."""
    assert data[:4] == b":W&B"
    position, whole = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:  # nothing fits into the rest of a block
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        piece = data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        whole = piece if kind in (WHOLE, FIRST) else whole + piece
        if kind in (WHOLE, LAST):
            yield whole
