"""What a tracker is: somewhere to send attempts to, once their rows are written."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.errors import invalid_value_error
from bench.core.plugins import find_plugin_class
from bench.core.typed_config import build_dataclass
from bench.tracking.tracked_run import TrackedRun


class TrackerSession(ABC):
    """Sends runs one after the other, in a process of its own."""

    destination: str
    """Where they go, in words that name it: what was sent there is not sent again."""

    offline_reason: str | None = None
    """Why they do not go where they should, if they do not."""

    message: str | None = None
    """What is worth saying of where they go."""

    @property
    def location(self) -> str:
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

    def has_run(self, run_location: str) -> bool:
        """Whether a run that was sent is still where `send` said."""
        return True


@dataclass(frozen=True)
class Tracker(ABC):
    """A tracker with its settings: the fields of its YAML under ``conf/tracker``.

    Nothing is ever sent from the process of a rank, nor while anything is timed: see `bench.tracking.client`.
    """

    name: str

    @property
    def is_active(self) -> bool:
        """Whether it keeps anything at all."""
        return True

    @property
    def send_timeout_s(self) -> float:
        """Seconds that one run may take to send."""
        return 30.0

    @abstractmethod
    def get_local_folder(self, store: Path) -> Path:
        """Folder for what the tracker keeps on this machine."""

    @abstractmethod
    def open_session(
        self, folder: Path, *, offline_reason: str | None, fall_back: bool
    ) -> AbstractContextManager[TrackerSession]:
        """Begin to send.

        Parameters
        ----------
        folder: Path
            As `get_local_folder` says.
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
        raise invalid_value_error("tracker.name", name, "the name of a file under bench/tracking")
    tracker: Tracker = build_dataclass("tracker", load_tracker_class(name), values)
    return tracker


def load_tracker_class(name: str) -> type[Tracker]:
    """The class of a tracker.

    Raises
    ------
    UsageError
        If there is no such file under ``bench/tracking``.
    """
    tracker_class: type[Tracker] = find_plugin_class("tracker.name", name, sys.modules["bench.tracking"], Tracker)
    return tracker_class
