"""No tracker: rows stay in the store, and nothing is sent anywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.tracking.base import Session, Tracker
from bench.tracking.tracked import TrackedRun


class Nowhere(Session):
    """Sends nothing."""

    destination = "nowhere"

    def send(self, run: TrackedRun) -> str:
        """Do nothing."""
        return self.destination


@dataclass(frozen=True)
class NoTracker(Tracker):
    """Keeps nothing."""

    @property
    def active(self) -> bool:
        """False: there is nothing to send to."""
        return False

    def home(self, store: Path) -> Path:
        """The store itself, in which nothing is written."""
        return store

    def open(self, folder: Path, *, offline: str | None, fall_back: bool) -> AbstractContextManager[Session]:
        """Begin to do nothing."""
        return nullcontext(Nowhere())


NO_TRACKER = NoTracker("none")
"""What ``tracker=none`` comes to."""
