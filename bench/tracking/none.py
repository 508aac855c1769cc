"""No tracker: rows stay in the store, and nothing is sent anywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.tracking.base import Tracker, TrackerSession
from bench.tracking.tracked_run import TrackedRun


class NoTrackerSession(TrackerSession):
    destination = "nowhere"

    def send(self, run: TrackedRun) -> str:
        return self.destination


@dataclass(frozen=True)
class NoTracker(Tracker):
    @property
    def is_active(self) -> bool:
        """False: there is nothing to send to."""
        return False

    def get_local_folder(self, store: Path) -> Path:
        """The store itself, in which nothing is written."""
        return store

    def open_session(
        self, folder: Path, *, offline_reason: str | None, fall_back: bool
    ) -> AbstractContextManager[TrackerSession]:
        return nullcontext(NoTrackerSession())


NO_TRACKER = NoTracker("none")
"""What ``tracker=none`` comes to."""
