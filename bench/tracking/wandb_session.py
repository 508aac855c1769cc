"""Runs on their way to wandb, by its own client: online, or into a folder that can be synchronised later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tracking.base import Session
from bench.tracking.tracked import TrackedRun

# wandb is imported where it is needed: after its variables are set.

NOBODY = "nobody is logged in"

NO_LABEL = "none"
"""What `labels` says in the configuration of a run without tags of the user's own."""

ANSWER_S = 5.0
"""How long a server may take to answer at all."""

PATIENCE = 0.4
"""Share of the time limit that each of wandb's own waits may take: to begin a run, and to finish one."""


@dataclass(frozen=True)
class Destination:
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


class WandbSession(Session):
    """Runs on their way to wandb.

    Parameters
    ----------
    to: Destination
        Where they go.
    folder: Path
        For wandb's files.
    fall_back: bool
        Keep them offline where the server does not take them.
    """

    def __init__(self, to: Destination, folder: Path, *, fall_back: bool) -> None:
        self._to = to
        self._folder = folder
        self._fall_back = fall_back
        self._online = False
        self._page = ""
        self.destination = f"offline {folder}"

    def settle(self, offline: str | None) -> None:
        """Find out whether runs go online.

        Raises
        ------
        ConnectionError
            If they should and cannot, and are not to be kept here instead.
        """
        wanted = self._to.mode
        if wanted == "auto":
            said = os.environ.get("WANDB_MODE", "")
            wanted = {"online": "online", "offline": "offline", "dryrun": "offline"}.get(said, "auto")
        os.environ.pop("WANDB_MODE", None)  # every run is given its mode
        if wanted == "offline":
            return
        if offline is not None:
            self.shortfall = offline
            return
        import wandb

        url = str(wandb.setup().settings.base_url)
        unable = logged_out(url) or unreachable(url)
        if unable is None:
            self._online = True
            self.destination = "/".join(filter(None, [url, self._to.entity, self._to.project]))
        elif wanted == "auto" and unable.startswith(NOBODY):
            self.remark = f"{unable}: runs are kept offline"
        else:
            self._come_short(unable)

    @property
    def whereabouts(self) -> str:
        """Where runs are afterwards, and how offline ones get to a server."""
        if self._online:
            return f"at {self._page or self.destination}"
        runs = f"{self._folder}/wandb/offline-run-*"
        return f"offline under {self._folder}: `wandb sync {runs}`, or bench.track with a login, sends them"

    def holds(self, where: str) -> bool:
        """Whether an offline run is still in its folder; online it is taken to be."""
        return self._online or Path(where).exists()

    def send(self, run: TrackedRun) -> str:
        """Send a run; where the server does not take it, keep it offline, if that is wanted."""
        import wandb

        if self._online:
            try:
                return self._send(run, "online")
            except (wandb.Error, TimeoutError, OSError) as error:  # the next run would fare no better
                self._come_short(f"{run.id} could not be sent: {first_line(error)}")
        return self._send(run, "offline")

    def _come_short(self, why: str) -> None:
        """Go on offline, or not at all."""
        if not self._fall_back:
            raise ConnectionError(why)
        if self._online:
            import wandb

            wandb.teardown()  # which else keeps the id of the run that did not get through
        self._online = False
        self.destination = f"offline {self._folder}"
        self.shortfall = why

    def _send(self, run: TrackedRun, mode: str) -> str:
        import wandb

        patience_s = PATIENCE * self._to.time_limit_s
        sent = wandb.init(
            dir=str(self._folder),
            mode=mode,  # type: ignore[arg-type]
            project=self._to.project,
            entity=self._to.entity,
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name[:128],
            group=run.group[:128],
            job_type=run.job_type,
            tags=list(dict.fromkeys([*run.tags, *self._to.tags])),
            notes=run.notes or None,
            config={**run.config, "labels": ", ".join(self._to.tags) or NO_LABEL},
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
                init_timeout=patience_s,
                finish_timeout=patience_s,
                finish_timeout_raises=True,
            ),
        )
        for metrics in ("step/*", "result/*"):  # the summary is the row's
            sent.define_metric(metrics, summary="none")
        for step, values in enumerate(run.history):  # numbered, so that sending them again adds nothing
            sent.log(values, step=step)
        shown: dict[str, Any] = {
            name: wandb.Table(columns=list(row), data=[list(row.values())], allow_mixed_types=True)
            for name, row in run.tables.items()
        }
        shown |= {name: wandb.Image(path, caption=name) for name, path in run.images.items()}
        if shown:
            sent.log(shown, step=len(run.history))
        sent.summary.update(run.summary)
        if run.files:
            artifact = wandb.Artifact(f"{run.artifact}-{run.id}", type=run.artifact)
            for name, path in run.files.items():  # those that may change are copied until they are sent
                artifact.add_file(path, name=name, policy="immutable" if run.lasting else "mutable", skip_cache=True)
            sent.log_artifact(artifact)
        if run.alert is not None:
            title, text = run.alert
            sent.alert(title=title, text=text, level="ERROR")
        if run.preempted:
            sent.mark_preempting()
        where = sent.url if mode == "online" else str(Path(sent.dir).parent)
        self._page = sent.project_url or ""
        sent.finish(exit_code=1 if run.failed else 0)
        return where or run.id


def logged_out(url: str) -> str | None:
    """Why runs cannot be sent in anybody's name, None if they can. Asks nobody anything."""
    import wandb

    try:
        if wandb.login(prompt=False, verify=False):
            return None
    except wandb.Error as error:  # a key that is none
        return f"the login at {url} is not valid: {first_line(error)}"
    return f"{NOBODY} at {url}"


def unreachable(url: str) -> str | None:
    """Why a server cannot be reached, None if it answers, whatever it says."""
    import requests

    try:
        requests.head(url, timeout=ANSWER_S, allow_redirects=False)
    except requests.exceptions.SSLError:
        return None  # it is there; wandb has its own opinion of certificates
    except requests.exceptions.RequestException as error:
        kind = "does not answer" if isinstance(error, requests.exceptions.Timeout) else "cannot be reached"
        return f"{url} {kind}"
    return None


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
