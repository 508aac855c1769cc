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
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


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


def read_offline_runs(folder: Path) -> dict[str, OfflineRun]:
    """All offline runs below a folder, by id; none is there twice."""
    runs: dict[str, OfflineRun] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run = read_run(path)
        assert run.id not in runs, f"{run.id} is there twice"
        runs[run.id] = run
    return runs


def read_run(path: Path) -> OfflineRun:
    """One run, from its file."""
    offline_run = OfflineRun(path.parent)
    for data in _split_records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            offline_run.id, offline_run.project, offline_run.entity = run.run_id, run.project, run.entity
            offline_run.name, offline_run.group, offline_run.job_type = run.display_name, run.run_group, run.job_type
            offline_run.notes, offline_run.tags = run.notes, list(run.tags)
            offline_run.config |= _parse_items(run.config.update)
        elif kind == "config":
            offline_run.config |= _parse_items(record.config.update)
        elif kind == "history":
            offline_run.history.append(_parse_items(record.history.item))
        elif kind == "summary":
            offline_run.summary |= _parse_items(record.summary.update)
        elif kind == "artifact":
            contents = record.artifact.manifest.contents
            offline_run.artifacts[record.artifact.name] = {entry.path: Path(entry.local_path) for entry in contents}
        elif kind == "alert":
            offline_run.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "preempting":
            offline_run.preempting = True
        elif kind == "exit":
            offline_run.exit_code = record.exit.exit_code
    return offline_run


def _parse_items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _split_records(data: bytes) -> Iterator[bytes]:
    """The records of a file, put together from their pieces."""
    assert data[:4] == b":W&B"
    position, record_bytes = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:  # nothing fits into the rest of a block
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        fragment = data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        record_bytes = fragment if kind in (FULL, FIRST) else record_bytes + fragment
        if kind in (FULL, LAST):
            yield record_bytes
