"""What was traced and predicted before, in a file of the user's: a prediction is made once, by any process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PREDICTOR_VERSION = 25
"""Raised by hand when predicted numbers move, and only then: a test of golden predictions says when that is."""

BENCH_DIR = Path(__file__).resolve().parents[1]

PREDICTING_SOURCES = (
    "prediction",
    "strategies",
    "models",
    "optimizers",
    "finetune",
    "rank/engine.py",
    "hardware",
    "core/precision.py",
)
"""Code below ``bench`` that a prediction follows from. What it reads of ``conf`` is on the row."""

TRACED_PACKAGES = ("torch", "transformers")
"""Whose operators are in every trace."""

OPTIONAL_TRACED_PACKAGES = ("bitsandbytes", "peft", "torchao")
"""Whose operators are in the traces of runs that need them."""


@functools.cache
def compute_predictor_version(libraries: tuple[str, ...] = (), user_packages: tuple[str, ...] = ()) -> str:
    """`PREDICTOR_VERSION`, a hyphen, and 12 hexadecimal digits: a hash of the versions of what is traced and of code
    that is not the suite's. Rows of before there was such a number have a hash of all code instead.

    Parameters
    ----------
    libraries: tuple of str
        Those of `OPTIONAL_TRACED_PACKAGES` that the run needs; one that is not installed has a version, too.
    user_packages: tuple of str
        Packages and modules of the user's that the run's family or strategy is from (`find_user_packages`).
    """
    parts = [*_describe_libraries(libraries)]
    for name in user_packages:
        parts += [f"{name} {file.name}\n".encode() + file.read_bytes() for file in _list_package_files(name)]
    return f"{PREDICTOR_VERSION}-{_compute_digest(parts)}"


@functools.cache
def compute_code_hash() -> str:
    """Hash of all code that predicts, and of the versions of all that may be traced.

    What is remembered on this machine alone is kept under it (`bench.prediction.cache`): whoever changes the predictor
    is never shown what it said before, and a change that moves no number costs no more than predicting once more.
    """
    parts = [*_describe_libraries(OPTIONAL_TRACED_PACKAGES)]
    for name in PREDICTING_SOURCES:
        files = sorted((BENCH_DIR / name).rglob("*.py")) or [BENCH_DIR / name]
        parts += [f"{file.relative_to(BENCH_DIR)}\n".encode() + file.read_bytes() for file in files]
    return _compute_digest(parts)


def _compute_digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def _describe_libraries(libraries: Iterable[str]) -> list[bytes]:
    return [f"{package} {find_package_version(package)}\n".encode() for package in (*TRACED_PACKAGES, *libraries)]


def build_cache_key(name: str, *parts: Any) -> str:
    """A name under which to remember what follows from dataclasses: another one when code of the user's has changed."""
    user_packages = find_user_packages(*parts)
    return f"{name} {compute_predictor_version((), user_packages)}" if user_packages else name


def find_user_packages(*parts: Any) -> tuple[str, ...]:
    """Top-level packages and modules beside this one that define classes of dataclasses and of what they hold."""
    return tuple(sorted({name for part in parts for name in _iterate_user_packages(part)}))


def _iterate_user_packages(part: Any) -> Iterator[str]:
    yield from _find_class_packages(type(part))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):  # not what it has worked out and keeps: a library's, some of it
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                yield from _iterate_user_packages(value)


@functools.cache
def _find_class_packages(kind: type) -> frozenset[str]:
    packages = {base_class.__module__.partition(".")[0] for base_class in kind.__mro__}
    return frozenset(packages - {__package__.partition(".")[0]} - sys.stdlib_module_names)


def _list_package_files(name: str) -> list[Path]:
    """Code of a package; of a module that is in none, whatever lies beside it."""
    module = sys.modules[name]
    if hasattr(module, "__path__"):
        return sorted(file for folder in module.__path__ for file in Path(folder).rglob("*.py"))
    return sorted(Path(str(module.__file__)).parent.glob("*.py"))


def find_package_version(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- What was traced and predicted before, in a file of the user's: a prediction is made once, by any process.

CACHE_DIR_VARIABLE = "BENCH_CACHE"
"""Environment variable that names another folder; empty for none at all."""

LOCK_TIMEOUT_S = 30.0
"""How long one process waits for another that writes."""

MAX_KEYS_PER_QUERY = 500

MAX_UNUSED_S = 30 * 24 * 3600.0
"""How long what another version of the predictor remembered stays after it was last written."""


def find_cache_folder() -> Path | None:
    """Where this machine's user has what is remembered, None if nothing is to be."""
    folder = os.environ.get(CACHE_DIR_VARIABLE)
    if folder is not None:
        return Path(folder) if folder else None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fsdp-bench"


def find_cache_file() -> Path | None:
    """The file of this version of the predictor, None if nothing is to be remembered.

    Each has one of its own: checkouts that are used in turn leave each other's alone.
    """
    folder = find_cache_folder()
    return None if folder is None else folder / f"predictions-{compute_code_hash()}.sqlite"


def read_entries(kind: str, keys: Iterable[str]) -> dict[str, Any]:
    """What is remembered under some of the keys by this version of the predictor; nothing if it cannot be read."""
    values_by_key: dict[str, Any] = {}
    all_keys = list(keys)
    with contextlib.suppress(sqlite3.Error, OSError, ValueError, zlib.error), _open_database() as database:
        for start in range(0, len(all_keys) if database else 0, MAX_KEYS_PER_QUERY):
            key_batch = all_keys[start : start + MAX_KEYS_PER_QUERY]
            placeholders = ",".join("?" * len(key_batch))
            query = f"SELECT key, value FROM entries WHERE kind = ? AND key IN ({placeholders})"
            assert database is not None
            for key, value in database.execute(query, (kind, *key_batch)):
                values_by_key[key] = json.loads(zlib.decompress(value))
    return values_by_key


def write_entries(kind: str, values: Mapping[str, Any]) -> None:
    """Remember values under their keys; without effect where nobody can write."""
    with contextlib.suppress(sqlite3.Error, OSError), _open_database() as database:
        if database is None or not values:
            return
        rows = [
            (kind, key, zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))
            for key, value in values.items()
        ]
        with database:
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)


@contextlib.contextmanager
def _open_database() -> Iterator[sqlite3.Connection | None]:
    file = find_cache_file()
    if file is None:
        yield None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        _remove_unused_files(file.parent)
    database = sqlite3.connect(file, timeout=LOCK_TIMEOUT_S)
    try:
        database.execute(
            "CREATE TABLE IF NOT EXISTS entries (kind TEXT, key TEXT, value BLOB, PRIMARY KEY (kind, key))"
        )
        yield database
    finally:
        database.close()


def _remove_unused_files(folder: Path) -> None:
    """Remove what versions of the predictor remembered that have not written for long."""
    for file in folder.glob("predictions*.sqlite"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > MAX_UNUSED_S:
                file.unlink()
