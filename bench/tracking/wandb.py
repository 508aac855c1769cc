"""Weights & Biases: one wandb run for every attempt, online or into a folder that can be synchronised later."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.core.command_line import require_path
from bench.core.errors import invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.tracking.base import Tracker, TrackerSession
from bench.tracking.tracked_run import MAX_TAG_CHARS
from bench.tracking.wandb_session import WandbDestination, WandbSession

MODES = ("auto", "online", "offline")
DEFAULT_PROJECT = "fsdp-bench"
DEFAULT_FOLDER = ".tracking"

FORBIDDEN_NAME_CHARACTERS = r"[/\\#?%:]"
"""Characters that wandb does not take in the name of a project."""

SINGLE_RUN_VARIABLES = (
    *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "RESUME", "SWEEP_ID", "LAUNCH", "SERVICE"),
    *("FORK_FROM", "RESUME_FROM", "CONFIG_PATHS", "CONFIG"),
)
"""wandb's variables that speak of one run: somebody else's, or all of ours at once."""


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """The fields of ``conf/tracker/wandb.yaml``."""

    mode: Annotated[str, OneOf(*MODES)]
    project: str | None
    entity: str | None
    base_url: str | None
    folder: str | None
    tags: list[str]
    time_limit_s: Annotated[float, Within(1, 86_400, unit="seconds")]

    def __post_init__(self) -> None:
        for name in ("project", "entity"):
            value = getattr(self, name)
            if value is not None and (not 0 < len(value.strip()) <= 128 or re.search(FORBIDDEN_NAME_CHARACTERS, value)):
                raise invalid_value_error(
                    f"tracker.{name}", value, r"a name of 1 to 128 characters without / \ # ? % :, or null"
                )
        if self.base_url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.base_url):
            raise invalid_value_error(
                "tracker.base_url", self.base_url, "an address such as https://wandb.example.org, or null"
            )
        if self.folder is not None and require_path("tracker.folder", self.folder).is_file():
            raise invalid_value_error("tracker.folder", self.folder, "the path of a folder, or null")
        if self.folder is not None:  # jobs run elsewhere
            object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for tag in self.tags:
            if not 0 < len(tag) <= MAX_TAG_CHARS:
                raise invalid_value_error("tracker.tags", tag, f"tags of 1 to {MAX_TAG_CHARS} characters")

    @property
    def is_active(self) -> bool:
        """Whether it keeps anything: not where WANDB_MODE=disabled turns wandb off altogether."""
        return os.environ.get("WANDB_MODE") != "disabled"

    @property
    def send_timeout_s(self) -> float:
        """Seconds that one run may take to send."""
        return self.time_limit_s

    @property
    def project_name(self) -> str:
        """The project that runs go to."""
        return self.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT

    @property
    def entity_name(self) -> str | None:
        """The user or team that runs go to; None for the one who is logged in."""
        return self.entity or os.environ.get("WANDB_ENTITY") or None

    def get_local_folder(self, store: Path) -> Path:
        """Folder for offline runs, and for notes of what was sent."""
        return store / DEFAULT_FOLDER if self.folder is None else Path(self.folder)

    @contextlib.contextmanager
    def open_session(self, folder: Path, *, offline_reason: str | None, fall_back: bool) -> Iterator[TrackerSession]:
        """Begin to send, from a process that does nothing else: wandb's variables are changed for good.

        Raises
        ------
        ConnectionError
            If runs are to go to a server and cannot, and `fall_back` is not set.
        """
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.set_environment(folder)
        import wandb

        destination = WandbDestination(self.mode, self.project_name, self.entity_name, self.tags, self.time_limit_s)
        session = WandbSession(destination, folder, fall_back=fall_back)
        session.choose_mode(offline_reason)
        try:
            yield session
        finally:
            wandb.teardown()

    def set_environment(self, folder: Path | None = None) -> None:
        """Set wandb's variables before it is imported: whose server, nothing of one run, no reports of errors.

        With a `folder` what wandb keeps of artifacts lies there: a home may be full, or not be there on a node.
        """
        for name in SINGLE_RUN_VARIABLES:
            os.environ.pop(f"WANDB_{name}", None)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if self.base_url is not None:
            os.environ["WANDB_BASE_URL"] = self.base_url
        if folder is not None:
            for kind in ("data", "cache"):
                os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str(folder / kind))
