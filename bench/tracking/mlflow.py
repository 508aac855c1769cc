"""MLflow: one run for every attempt, on a server that everybody can host, or in a database beside the store."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.core.command_line import require_path
from bench.core.errors import UsageError, invalid_value_error
from bench.core.installation import format_install_command
from bench.core.typed_config import Within
from bench.tracking.base import Tracker, TrackerSession
from bench.tracking.mlflow_session import MlflowSession
from bench.tracking.tracked_run import MAX_TAG_CHARS
from bench.tracking.wandb_session import find_connection_problem

DEFAULT_EXPERIMENT = "fsdp-bench"
DEFAULT_FOLDER = ".tracking"
DATABASE_FILE = "mlflow.db"

URI_PATTERN = re.compile(r"https?://[^/\s]+(/\S*)?|sqlite:///\S+")


@dataclass(frozen=True)
class MlflowTracker(Tracker):
    """The fields of ``conf/tracker/mlflow.yaml``."""

    tracking_uri: str | None
    experiment: str | None
    folder: str | None
    tags: list[str]
    time_limit_s: Annotated[float, Within(1, 86_400, unit="seconds")]

    def __post_init__(self) -> None:
        if self.tracking_uri is not None and not URI_PATTERN.fullmatch(self.tracking_uri):
            raise invalid_value_error(
                "tracker.tracking_uri",
                self.tracking_uri,
                "an address as http://host:5000, sqlite:///file, or null",
            )
        if self.experiment is not None and not 0 < len(self.experiment.strip()) <= 250:
            raise invalid_value_error("tracker.experiment", self.experiment, "a name of 1 to 250 characters, or null")
        if self.folder is not None and require_path("tracker.folder", self.folder).is_file():
            raise invalid_value_error("tracker.folder", self.folder, "the path of a folder, or null")
        if self.folder is not None:  # jobs run elsewhere
            object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for tag in self.tags:
            if not 0 < len(tag) <= MAX_TAG_CHARS:
                raise invalid_value_error("tracker.tags", tag, f"tags of 1 to {MAX_TAG_CHARS} characters")
        if importlib.util.find_spec("mlflow") is None:
            raise UsageError(f"tracker=mlflow needs mlflow: install the extra, {format_install_command('mlflow')}.")

    @property
    def send_timeout_s(self) -> float:
        """Seconds that one run may take to send."""
        return self.time_limit_s

    def get_local_folder(self, store: Path) -> Path:
        """Folder for the database, and for notes of what was sent."""
        return store / DEFAULT_FOLDER if self.folder is None else Path(self.folder)

    @contextlib.contextmanager
    def open_session(self, folder: Path, *, offline_reason: str | None, fall_back: bool) -> Iterator[TrackerSession]:
        """Begin to send, from a process that does nothing else: MLflow's variables are changed for good.

        Raises
        ------
        ConnectionError
            If runs are to go to a server and cannot, and `fall_back` is not set.
        """
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        own_uri = f"sqlite:///{folder / DATABASE_FILE}"
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or own_uri
        problem = offline_reason
        if problem is None and uri.startswith("http"):
            problem = find_connection_problem(uri)
        if problem is not None:
            if not fall_back:
                raise ConnectionError(problem)
            uri = own_uri
        for name, value in {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, round(self.time_limit_s / 2))),
            "GIT_PYTHON_REFRESH": "quiet",
        }.items():
            os.environ.setdefault(name, value)
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        session = MlflowSession(uri, experiment, self.tags, folder)
        session.offline_reason = problem
        yield session
