"""A tracker of one's own that hangs: what any tracker may do, however it is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.tracking import Tracker, TrackerSession
from bench.tracking.tracked_run import TrackedRun


class HangingSession(TrackerSession):
    """Takes the first run, and never comes back from the second."""

    destination = "nowhere"

    def __init__(self) -> None:
        self.num_runs = 0

    def send(self, run: TrackedRun) -> str:
        self.num_runs += 1
        if self.num_runs > 1:
            time.sleep(10**6)
        return "somewhere"


@dataclass(frozen=True)
class SlowTracker(Tracker):
    """Has no settings but its patience."""

    @property
    def send_timeout_s(self) -> float:
        return 5.0

    def get_local_folder(self, store: Path) -> Path:
        return store / ".slow"

    @contextlib.contextmanager
    def open_session(self, folder: Path, *, offline_reason: str | None, fall_back: bool) -> Iterator[TrackerSession]:
        yield HangingSession()
