"""What runs with a commit, of what is too long to run with each: a share that every commit draws anew."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_commit() -> str:
    """The checked-out commit; nothing outside a repository."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def is_drawn(name: str, commit: str, num_shares: int) -> bool:
    """Whether something is in a commit's share, by a hash of both: every process draws the same."""
    return zlib.crc32(f"{commit} {name}".encode()) % num_shares == 0
