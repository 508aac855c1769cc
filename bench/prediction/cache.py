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

from bench.prediction.version import compute_code_hash

CACHE_DIR_VARIABLE = "BENCH_CACHE"
"""Environment variable that names another folder; empty for none at all."""

LOCK_TIMEOUT_S = 30.0
"""How long one process waits for another that writes."""

MAX_KEYS_PER_QUERY = 500


def find_cache_file() -> Path | None:
    """The file, None if nothing is to be remembered."""
    folder = os.environ.get(CACHE_DIR_VARIABLE)
    if folder == "":
        return None
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(home) / "fsdp-bench")
    return Path(folder) / "predictions.sqlite"


def read_entries(kind: str, keys: Iterable[str]) -> dict[str, Any]:
    """What is remembered under some of the keys by this version of the predictor; nothing if it cannot be read."""
    values_by_key: dict[str, Any] = {}
    all_keys = list(keys)
    with contextlib.suppress(sqlite3.Error, OSError, ValueError, zlib.error), _open_database() as database:
        for start in range(0, len(all_keys) if database else 0, MAX_KEYS_PER_QUERY):
            key_batch = all_keys[start : start + MAX_KEYS_PER_QUERY]
            placeholders = ",".join("?" * len(key_batch))
            query = f"SELECT key, value FROM entries WHERE kind = ? AND version = ? AND key IN ({placeholders})"
            assert database is not None
            for key, value in database.execute(query, (kind, compute_code_hash(), *key_batch)):
                values_by_key[key] = json.loads(zlib.decompress(value))
    return values_by_key


def write_entries(kind: str, values: Mapping[str, Any]) -> None:
    """Remember values under their keys, and forget those of other versions; without effect where nobody can write."""
    with contextlib.suppress(sqlite3.Error, OSError), _open_database() as database:
        if database is None or not values:
            return
        version = compute_code_hash()
        rows = [
            (kind, version, key, zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))
            for key, value in values.items()
        ]
        with database:
            database.execute("DELETE FROM entries WHERE version <> ?", (version,))
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)


@contextlib.contextmanager
def _open_database() -> Iterator[sqlite3.Connection | None]:
    file = find_cache_file()
    if file is None:
        yield None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(file, timeout=LOCK_TIMEOUT_S)
    try:
        database.execute(
            "CREATE TABLE IF NOT EXISTS entries (kind TEXT, version TEXT, key TEXT, value BLOB,"
            " PRIMARY KEY (kind, version, key))"
        )
        yield database
    finally:
        database.close()
