"""Runs on their way to wandb, by its own client: online, or into a folder that can be synchronised later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tracking.base import TrackerSession
from bench.tracking.tracked_run import TrackedRun

# wandb is imported where it is needed: after its variables are set.

NOT_LOGGED_IN = "nobody is logged in"

NO_LABEL = "none"
"""What `labels` says in the configuration of a run without tags of the user's own."""

SERVER_TIMEOUT_S = 5.0
"""How long a server may take to answer at all."""

WAIT_TIMEOUT_SHARE = 0.4
"""Share of the time limit that each of wandb's own waits may take: to begin a run, and to finish one."""


@dataclass(frozen=True)
class WandbDestination:
    """Where runs go, and as what."""

    mode: str
    """auto, online or offline."""
    project: str
    entity: str | None
    """A user or team; None for the one who is logged in."""
    tags: Sequence[str]
    """Given to every run."""
    time_limit_s: float
    """That one run may take to send."""


class WandbSession(TrackerSession):
    """Runs on their way to wandb.

    Parameters
    ----------
    wandb_destination: WandbDestination
        Where they go.
    folder: Path
        For wandb's files.
    fall_back: bool
        Keep them offline where the server does not take them.
    """

    def __init__(self, wandb_destination: WandbDestination, folder: Path, *, fall_back: bool) -> None:
        self._wandb_destination = wandb_destination
        self._folder = folder
        self._fall_back = fall_back
        self._online = False
        self._project_url = ""
        self.destination = f"offline {folder}"

    def choose_mode(self, offline_reason: str | None) -> None:
        """Find out whether runs go online.

        Raises
        ------
        ConnectionError
            If they should and cannot, and are not to be kept here instead.
        """
        mode = self._wandb_destination.mode
        if mode == "auto":
            environment_mode = os.environ.get("WANDB_MODE", "")
            mode = {"online": "online", "offline": "offline", "dryrun": "offline"}.get(environment_mode, "auto")
        os.environ.pop("WANDB_MODE", None)  # every run is given its mode
        if mode == "offline":
            return
        if offline_reason is not None:
            self.offline_reason = offline_reason
            return
        import wandb

        url = str(wandb.setup().settings.base_url)
        problem = find_login_problem(url) or find_connection_problem(url)
        if problem is None:
            self._online = True
            self.destination = "/".join(
                filter(None, [url, self._wandb_destination.entity, self._wandb_destination.project])
            )
        elif mode == "auto" and problem.startswith(NOT_LOGGED_IN):
            self.message = f"{problem}: runs are kept offline"
        else:
            self._go_offline(problem)

    @property
    def location(self) -> str:
        """Where runs are afterwards, and how offline ones get to a server."""
        if self._online:
            return f"at {self._project_url or self.destination}"
        run_folders = f"{self._folder}/wandb/offline-run-*"
        return f"offline under {self._folder}: `wandb sync {run_folders}`, or bench.track with a login, sends them"

    def has_run(self, run_location: str) -> bool:
        """Whether an offline run is still in its folder; online it is taken to be."""
        return self._online or Path(run_location).exists()

    def send(self, run: TrackedRun) -> str:
        """Send a run; where the server does not take it, keep it offline, if that is wanted."""
        import wandb

        if self._online:
            try:
                return self._send_in_mode(run, "online")
            except (wandb.Error, TimeoutError, OSError) as error:  # the next run would fare no better
                self._go_offline(f"{run.id} could not be sent: {format_error(error)}")
        return self._send_in_mode(run, "offline")

    def _go_offline(self, reason: str) -> None:
        """Go on offline, or not at all."""
        if not self._fall_back:
            raise ConnectionError(reason)
        if self._online:
            import wandb

            wandb.teardown()  # which else keeps the id of the run that did not get through
        self._online = False
        self.destination = f"offline {self._folder}"
        self.offline_reason = reason

    def _send_in_mode(self, run: TrackedRun, mode: str) -> str:
        import wandb

        wait_timeout_s = WAIT_TIMEOUT_SHARE * self._wandb_destination.time_limit_s
        wandb_run = wandb.init(
            dir=str(self._folder),
            mode=mode,  # type: ignore[arg-type]
            project=self._wandb_destination.project,
            entity=self._wandb_destination.entity,
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name[:128],
            group=run.group[:128],
            job_type=run.job_type,
            tags=list(dict.fromkeys([*run.tags, *self._wandb_destination.tags])),
            notes=run.notes or None,
            config={**run.config, "labels": ", ".join(self._wandb_destination.tags) or NO_LABEL},
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # the row says which commit ran, this process may be of another
                disable_code=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                init_timeout=wait_timeout_s,
                finish_timeout=wait_timeout_s,
                finish_timeout_raises=True,
            ),
        )
        for pattern in ("step/*", "result/*"):  # the summary is the row's
            wandb_run.define_metric(pattern, summary="none")
        for step, values in enumerate(run.history):  # numbered, so that sending them again adds nothing
            wandb_run.log(values, step=step)
        media: dict[str, Any] = {
            name: wandb.Table(columns=list(row), data=[list(row.values())], allow_mixed_types=True)
            for name, row in run.tables.items()
        }
        media |= {name: wandb.Image(path, caption=name) for name, path in run.images.items()}
        if media:
            wandb_run.log(media, step=len(run.history))
        wandb_run.summary.update(run.summary)
        if run.files:
            artifact = wandb.Artifact(f"{run.artifact}-{run.id}", type=run.artifact)
            for name, path in run.files.items():  # those that may change are copied until they are sent
                artifact.add_file(path, name=name, policy="immutable" if run.lasting else "mutable", skip_cache=True)
            wandb_run.log_artifact(artifact)
        if run.alert is not None:
            title, text = run.alert
            wandb_run.alert(title=title, text=text, level="ERROR")
        if run.preempted:
            wandb_run.mark_preempting()
        run_location = wandb_run.url if mode == "online" else str(Path(wandb_run.dir).parent)
        self._project_url = wandb_run.project_url or ""
        wandb_run.finish(exit_code=1 if run.failed else 0)
        return run_location or run.id


def find_login_problem(url: str) -> str | None:
    """Why runs cannot be sent in anybody's name, None if they can. Asks nobody anything."""
    import wandb

    try:
        if wandb.login(prompt=False, verify=False):
            return None
    except wandb.Error as error:  # a key that is none
        return f"the login at {url} is not valid: {format_error(error)}"
    return f"{NOT_LOGGED_IN} at {url}"


def find_connection_problem(url: str) -> str | None:
    """Why a server cannot be reached, None if it answers, whatever it says."""
    import requests

    try:
        requests.head(url, timeout=SERVER_TIMEOUT_S, allow_redirects=False)
    except requests.exceptions.SSLError:
        return None  # it is there; wandb has its own opinion of certificates
    except requests.exceptions.RequestException as error:
        problem = "does not answer" if isinstance(error, requests.exceptions.Timeout) else "cannot be reached"
        return f"{url} {problem}"
    return None


def format_error(error: BaseException) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
