"""Runs on their way to MLflow, by its own client."""

from __future__ import annotations

import datetime
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.tracking.base import TrackerSession
from bench.tracking.tracked_run import TrackedRun

# mlflow is imported where it is needed: after its variables are set.

ID_TAG = "bench.id"
"""Names the attempt, so that it is one run however often it is sent."""

MAX_PARAMS, MAX_METRICS = 100, 1000
"""Of one request."""

MAX_VALUE_CHARS = 5000

FORBIDDEN_CHARACTERS = re.compile(r"[^\w./ -]")
"""Characters that MLflow does not take in a name."""


class MlflowSession(TrackerSession):
    """Runs on their way to MLflow.

    Parameters
    ----------
    uri: str
        Of the server, or of a database.
    experiment: str
        What runs belong to; made if there is none.
    tags: sequence of str
        Given to every run.
    folder: Path
        For artifacts where there is no server to keep them.
    """

    def __init__(self, uri: str, experiment: str, tags: Sequence[str], folder: Path) -> None:
        from mlflow import MlflowClient

        self._uri, self._tags = uri, tags
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        location = None if uri.startswith("http") else (folder / "mlflow-artifacts").as_uri()
        self._experiment_id = known.experiment_id if known else self._client.create_experiment(experiment, location)
        self.destination = f"{uri} {experiment}"
        self._experiment = experiment

    @property
    def location(self) -> str:
        """Where runs are afterwards, and how to look at them."""
        if self._uri.startswith("http"):
            return f"at {self._uri}/#/experiments/{self._experiment_id}"
        return f"in {self._uri}: `mlflow ui --backend-store-uri {self._uri}` shows them"

    def has_run(self, run_location: str) -> bool:
        """Whether a run is still there, and was not removed."""
        return self._find_run(run_location.rpartition("/")[2], by_tag=False) is not None

    def send(self, run: TrackedRun) -> str:
        """Send a run, or complete what there is of it."""
        from mlflow.entities import Metric, Param

        started_ms = _find_start_ms(run)
        mlflow_run = self._find_run(run.id, by_tag=True) or self._client.create_run(
            self._experiment_id, start_time=started_ms, tags=self._build_tags(run), run_name=run.name[:250]
        )
        run_id = mlflow_run.info.run_id
        params = [Param(_clean_name(key), str(value)[:MAX_VALUE_CHARS]) for key, value in _flatten(run.config) if key]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        # the same time for the same step, so that sending them again adds nothing
        metrics = [
            Metric(_clean_name(key), value, started_ms + step, step)
            for step, values in enumerate([*run.history, run.summary])
            for key, value in _list_numbers(values)
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(run_id, metrics=metrics[start : start + MAX_METRICS])
        for key, value in run.summary.items():
            if isinstance(value, str):
                self._client.set_tag(run_id, _clean_name(f"summary.{key}"), value[:MAX_VALUE_CHARS])
        for name, row in run.tables.items():
            self._client.log_dict(run_id, {"columns": list(row), "data": [list(row.values())]}, f"tables/{name}.json")
        self._send_files(run, run_id)
        self._client.set_terminated(run_id, "FAILED" if run.failed or run.alert else "FINISHED")
        return f"{self._uri}/{run_id}"

    def _build_tags(self, run: TrackedRun) -> dict[str, str]:
        """What runs are found and told apart by; the message of an alert is the note that a run's page begins with."""
        title, text = run.alert or ("", run.notes)
        tags = {
            ID_TAG: run.id,
            "group": run.group,
            "kind": run.job_type,
            "mlflow.note.content": text,
            "alert": title,
            "preempted": "true" if run.preempted else "",
            **{f"tag.{_clean_name(tag)}": "true" for tag in (*run.tags, *self._tags)},
        }
        return {key: value[:MAX_VALUE_CHARS] for key, value in tags.items() if value}

    def _send_files(self, run: TrackedRun, run_id: str) -> None:
        """Artifacts and pictures under the names that they have in every tracker."""
        pictures = {f"{name}{Path(path).suffix}": path for name, path in run.images.items()}
        with tempfile.TemporaryDirectory() as folder:
            for name, path in {**run.files, **pictures}.items():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            if run.files or pictures:
                self._client.log_artifacts(run_id, folder)

    def _find_run(self, name: str, *, by_tag: bool) -> Any:
        """A run that is there, by our id or by MLflow's."""
        condition = f"tags.`{ID_TAG}` = '{name}'" if by_tag else f"attributes.run_id = '{name}'"
        runs = self._client.search_runs([self._experiment_id], condition, max_results=1)
        return runs[0] if runs else None


def _find_start_ms(run: TrackedRun) -> int:
    """When the run began, in milliseconds since 1970; 0 where it does not say."""
    started_at = dict(_flatten(run.config)).get("started_at") or run.summary.get("started_at")
    if not isinstance(started_at, str):
        return 0
    return round(1000 * datetime.datetime.fromisoformat(started_at).timestamp())


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by keys with dots."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _list_numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield key, float(value)


def _clean_name(name: str) -> str:
    return FORBIDDEN_CHARACTERS.sub("_", name)[:250]
