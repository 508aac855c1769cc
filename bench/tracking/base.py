"""What a tracker is: somewhere to send attempts to, once their rows are written."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import bad_value
from bench.plugins import find
from bench.tracking.tracked import TrackedRun
from bench.typed import typed


class Session(ABC):
    """Sends runs one after the other, in a process of its own."""

    destination: str
    """Where they go, in words that name it: what was sent there is not sent again."""

    shortfall: str | None = None
    """Why they do not go where they should, if they do not."""

    remark: str | None = None
    """What is worth saying of where they go."""

    @property
    def whereabouts(self) -> str:
        """Where runs are afterwards, for people: "at …"."""
        return f"at {self.destination}"

    @abstractmethod
    def send(self, run: TrackedRun) -> str:
        """Send a run and wait until it is there; sending it again changes nothing.

        Returns
        -------
        str
            Where it can be found.

        Raises
        ------
        Exception
            If it cannot be sent, whatever the reason: the caller says so and goes on.
        """

    def holds(self, where: str) -> bool:
        """Whether a run that was sent is still where `send` said."""
        return True


@dataclass(frozen=True)
class Tracker(ABC):
    """A tracker with its settings: the fields of its YAML under ``conf/tracker``.

    Nothing is ever sent from the process of a rank, nor while anything is timed: see `bench.tracking.courier`.
    """

    name: str

    @property
    def active(self) -> bool:
        """Whether it keeps anything at all."""
        return True

    @property
    def limit_s(self) -> float:
        """Seconds that one run may take to send."""
        return 30.0

    @abstractmethod
    def home(self, store: Path) -> Path:
        """Folder for what the tracker keeps on this machine."""

    @abstractmethod
    def open(self, folder: Path, *, offline: str | None, fall_back: bool) -> AbstractContextManager[Session]:
        """Begin to send.

        Parameters
        ----------
        folder: Path
            As `home` says.
        offline: str or None
            Why no server is to be asked, if none is.
        fall_back: bool
            Keep runs on this machine where the server does not take them.
        """


def load_tracker(values: dict[str, Any]) -> Tracker:
    """The tracker that composed values describe.

    Raises
    ------
    UsageError
        Naming the field, the value and what is valid.
    """
    name = values.get("name")
    if not isinstance(name, str):
        raise bad_value("tracker.name", name, "the name of a file under bench/tracking")
    tracker: Tracker = typed("tracker", find("tracker.name", name, sys.modules["bench.tracking"], Tracker), values)
    return tracker
