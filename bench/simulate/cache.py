"""What was traced and predicted before, in a file of the user's: a prediction is made once, by any process."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.simulate.version import LIBRARIES, predictor_version

FOLDER_VARIABLE = "BENCH_CACHE"
"""Environment variable that names another folder; empty for none at all."""

PATIENCE_S = 30.0
"""How long one process waits for another that writes."""

KEYS_PER_QUERY = 500


def cache_file() -> Path | None:
    """The file, None if nothing is to be remembered."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder == "":
        return None
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(home) / "fsdp-bench")
    return Path(folder) / "predictions.sqlite"


def read(kind: str, keys: Iterable[str]) -> dict[str, Any]:
    """What is remembered under some of the keys by this version of the predictor; nothing if it cannot be read."""
    found: dict[str, Any] = {}
    wanted = list(keys)
    with contextlib.suppress(sqlite3.Error, OSError, ValueError, zlib.error), _opened() as database:
        for start in range(0, len(wanted) if database else 0, KEYS_PER_QUERY):
            part = wanted[start : start + KEYS_PER_QUERY]
            marks = ",".join("?" * len(part))
            query = f"SELECT key, value FROM entries WHERE kind = ? AND version = ? AND key IN ({marks})"
            assert database is not None
            for key, value in database.execute(query, (kind, predictor_version(LIBRARIES), *part)):
                found[key] = json.loads(zlib.decompress(value))
    return found


def write(kind: str, values: Mapping[str, Any]) -> None:
    """Remember values under their keys, and forget those of other versions; without effect where nobody can write."""
    with contextlib.suppress(sqlite3.Error, OSError), _opened() as database:
        if database is None or not values:
            return
        version = predictor_version(LIBRARIES)
        rows = [
            (kind, version, key, zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))
            for key, value in values.items()
        ]
        with database:
            database.execute("DELETE FROM entries WHERE version <> ?", (version,))
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)


@contextlib.contextmanager
def _opened() -> Iterator[sqlite3.Connection | None]:
    file = cache_file()
    if file is None:
        yield None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(file, timeout=PATIENCE_S)
    try:
        database.execute(
            "CREATE TABLE IF NOT EXISTS entries (kind TEXT, version TEXT, key TEXT, value BLOB,"
            " PRIMARY KEY (kind, version, key))"
        )
        yield database
    finally:
        database.close()
