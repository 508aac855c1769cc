"""Weights & Biases: one wandb run for every attempt, online or into a folder that can be synchronised later."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import bad_value, require_choice
from bench.tracking.base import Session, Tracker
from bench.tracking.tracked import LONGEST_TAG, TrackedRun

MODES = ("auto", "online", "offline")
DEFAULT_PROJECT = "fsdp-bench"
DEFAULT_FOLDER = ".tracking"

NO_LABEL = "none"
"""What `labels` says in the configuration of a run without tags of the user's own."""

ANSWER_S = 5.0
"""How long a server may take to answer at all."""

PATIENCE = 0.4
"""Share of the time limit that each of wandb's own waits may take: to begin a run, and to finish one."""

REFUSED_IN_NAMES = r"[/\\#?%:]"
"""Characters that wandb does not take in the name of a project."""

OF_ONE_RUN = (
    *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "RESUME", "SWEEP_ID", "LAUNCH", "SERVICE"),
    *("FORK_FROM", "RESUME_FROM", "CONFIG_PATHS", "CONFIG"),
)
"""wandb's variables that speak of one run: somebody else's, or all of ours at once."""


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """The fields of ``conf/tracker/wandb.yaml``."""

    mode: str
    project: str | None
    entity: str | None
    base_url: str | None
    folder: str | None
    tags: list[str]
    time_limit_s: float

    def __post_init__(self) -> None:
        require_choice("tracker.mode", self.mode, MODES)
        for name in ("project", "entity"):
            value = getattr(self, name)
            if value is not None and (not 0 < len(value.strip()) <= 128 or re.search(REFUSED_IN_NAMES, value)):
                raise bad_value(f"tracker.{name}", value, r"a name of 1 to 128 characters without / \ # ? % :, or null")
        if self.base_url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.base_url):
            raise bad_value("tracker.base_url", self.base_url, "an address such as https://wandb.example.org, or null")
        if self.folder is not None and (not self.folder or Path(self.folder).is_file()):
            raise bad_value("tracker.folder", self.folder, "the path of a folder, or null")
        if self.folder is not None:  # jobs run elsewhere
            object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for tag in self.tags:
            if not 0 < len(tag) <= LONGEST_TAG:
                raise bad_value("tracker.tags", tag, f"tags of 1 to {LONGEST_TAG} characters")
        if not 1 <= self.time_limit_s < math.inf:
            raise bad_value("tracker.time_limit_s", self.time_limit_s, "a number of seconds of at least 1")

    @property
    def active(self) -> bool:
        """Whether it keeps anything: not where WANDB_MODE=disabled turns wandb off altogether."""
        return os.environ.get("WANDB_MODE") != "disabled"

    @property
    def limit_s(self) -> float:
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

    def home(self, store: Path) -> Path:
        """Folder for offline runs, and for notes of what was sent."""
        return store / DEFAULT_FOLDER if self.folder is None else Path(self.folder)

    @contextlib.contextmanager
    def open(self, folder: Path, *, offline: str | None, fall_back: bool) -> Iterator[Session]:
        """Begin to send, from a process that does nothing else: wandb's variables are changed for good.

        Raises
        ------
        ConnectionError
            If runs are to go to a server and cannot, and `fall_back` is not set.
        """
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.settle_environment(folder)
        import wandb

        session = WandbSession(self, folder, fall_back=fall_back)
        session.settle(offline)
        try:
            yield session
        finally:
            wandb.teardown()

    def settle_environment(self, folder: Path | None = None) -> None:
        """Set wandb's variables before it is imported: whose server, nothing of one run, no reports of errors.

        With a `folder` what wandb keeps of artifacts lies there: a home may be full, or not be there on a node.
        """
        for name in OF_ONE_RUN:
            os.environ.pop(f"WANDB_{name}", None)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if self.base_url is not None:
            os.environ["WANDB_BASE_URL"] = self.base_url
        if folder is not None:
            for kind in ("data", "cache"):
                os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str(folder / kind))


class WandbSession(Session):
    """Runs on their way to wandb.

    Parameters
    ----------
    tracker: WandbTracker
        Where they go.
    folder: Path
        For wandb's files.
    fall_back: bool
        Keep them offline where the server does not take them.
    """

    def __init__(self, tracker: WandbTracker, folder: Path, *, fall_back: bool) -> None:
        self._tracker = tracker
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
        wanted = self._tracker.mode
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
            self.destination = "/".join(filter(None, [url, self._tracker.entity_name, self._tracker.project_name]))
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

        patience_s = PATIENCE * self._tracker.time_limit_s
        sent = wandb.init(
            dir=str(self._folder),
            mode=mode,  # type: ignore[arg-type]
            project=self._tracker.project_name,
            entity=self._tracker.entity_name,
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name[:128],
            group=run.group[:128],
            job_type=run.job_type,
            tags=list(dict.fromkeys([*run.tags, *self._tracker.tags])),
            notes=run.notes or None,
            config={**run.config, "labels": ", ".join(self._tracker.tags) or NO_LABEL},
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


NOBODY = "nobody is logged in"


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
