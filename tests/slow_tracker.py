"""A tracker of one's own that hangs: what any tracker may do, however it is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.tracking import Session, Tracker
from bench.tracking.tracked import TrackedRun


class Hanging(Session):
    """Takes the first run, and never comes back from the second."""

    destination = "nowhere"

    def __init__(self) -> None:
        self.taken = 0

    def send(self, run: TrackedRun) -> str:
        self.taken += 1
        if self.taken > 1:
            time.sleep(10**6)
        return "somewhere"


@dataclass(frozen=True)
class SlowTracker(Tracker):
    """Has no settings but its patience."""

    @property
    def limit_s(self) -> float:
        return 5.0

    def home(self, store: Path) -> Path:
        return store / ".slow"

    @contextlib.contextmanager
    def open(self, folder: Path, *, offline: str | None, fall_back: bool) -> Iterator[Session]:
        yield Hanging()
