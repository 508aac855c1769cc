"""Which predictor made a prediction: what an older one predicted is predicted anew."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]

DECIDES = ("simulate", "strategies", "models", "finetune", "training", "hardware", "precision.py")
"""Code below ``bench`` that a prediction follows from. What it reads of ``conf`` is on the row."""

PACKAGES = ("torch", "transformers")
"""Whose operators are in every trace."""

LIBRARIES = ("bitsandbytes", "peft", "torchao")
"""Whose operators are in the traces of runs that need them."""


@functools.cache
def predictor_version(libraries: tuple[str, ...] = (), outside: tuple[str, ...] = ()) -> str:
    """Hash of the code that predicts and the versions of what it traces: 12 hexadecimal digits.

    Parameters
    ----------
    libraries: tuple of str
        Those of `LIBRARIES` that the run needs; one that is not installed has a version, too.
    outside: tuple of str
        Packages and modules of the user's that the run's family or strategy is from (`outside_of`).
    """
    found = hashlib.sha256()
    for name in DECIDES:
        for file in sorted((BENCH / name).rglob("*.py")) or [BENCH / name]:
            found.update(f"{file.relative_to(BENCH)}\n".encode() + file.read_bytes())
    for package in (*PACKAGES, *libraries):
        found.update(f"{package} {_installed(package)}\n".encode())
    for name in outside:
        for file in _files_of(name):
            found.update(f"{name} {file.name}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def remembered_as(name: str, *parts: Any) -> str:
    """A name under which to remember what follows from dataclasses: another one when code of the user's has changed."""
    outside = outside_of(*parts)
    return f"{name} {predictor_version((), outside)}" if outside else name


def outside_of(*parts: Any) -> tuple[str, ...]:
    """Top-level packages and modules beside this one that define classes of dataclasses and of what they hold."""
    return tuple(sorted({name for part in parts for name in _tops(part)}))


def _tops(part: Any) -> Iterator[str]:
    for each in type(part).__mro__:
        top = each.__module__.partition(".")[0]
        if top != __package__.partition(".")[0] and top not in sys.stdlib_module_names:
            yield top
    if dataclasses.is_dataclass(part):
        for value in vars(part).values():
            if dataclasses.is_dataclass(value):
                yield from _tops(value)


def _files_of(name: str) -> list[Path]:
    """Code of a package; of a module that is in none, whatever lies beside it."""
    module = sys.modules[name]
    if hasattr(module, "__path__"):
        return sorted(file for folder in module.__path__ for file in Path(folder).rglob("*.py"))
    return sorted(Path(str(module.__file__)).parent.glob("*.py"))


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
