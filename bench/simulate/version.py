"""Which predictor made a prediction: what an older one predicted is predicted anew."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]

DECIDES = ("simulate", "strategies", "models", "finetune", "training", "hardware", "precision.py")
"""Code below ``bench`` that a prediction follows from. What it reads of ``conf`` is on the row."""

PACKAGES = ("torch", "transformers")
"""Whose operators are in every trace."""

LIBRARIES = ("bitsandbytes", "peft", "torchao")
"""Whose operators are in the traces of runs that need them."""


@functools.cache
def predictor_version(libraries: tuple[str, ...] = ()) -> str:
    """Hash of the code that predicts and the versions of what it traces: 12 hexadecimal digits.

    Parameters
    ----------
    libraries: tuple of str
        Those of `LIBRARIES` that the run needs; one that is not installed has a version, too.
    """
    found = hashlib.sha256()
    for name in DECIDES:
        for file in sorted((BENCH / name).rglob("*.py")) or [BENCH / name]:
            found.update(f"{file.relative_to(BENCH)}\n".encode() + file.read_bytes())
    for package in (*PACKAGES, *libraries):
        found.update(f"{package} {_installed(package)}\n".encode())
    return found.hexdigest()[:12]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
