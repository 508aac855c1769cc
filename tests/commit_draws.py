"""What runs with a commit, of what is too long to run with each: a share that every commit draws anew."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_commit() -> str:
    """The checked-out commit; nothing outside a repository."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def is_drawn(name: str, commit: str, num_shares: int) -> bool:
    """Whether something is in a commit's share, by a hash of both: every process draws the same."""
    return _hash_with_commit(name, commit) % num_shares == 0


def draw(names: Iterable[str], commit: str, count: int) -> list[str]:
    """That many names, or all where there are no more."""
    return sorted(names, key=lambda name: _hash_with_commit(name, commit))[:count]


def _hash_with_commit(name: str, commit: str) -> int:
    return zlib.crc32(f"{commit} {name}".encode())
