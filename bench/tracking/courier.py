"""Has a tracker's sending done by a process of its own, with a time limit, so that it can hold up nothing.

Attempts are sent after their rows are written and their ranks are gone: between two runs nothing of a tracker is
left. What cannot be sent costs a line of output and at most the time limit, once; the row is in the store, and
``python -m bench.track`` sends it later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bench.tracking.attempts import attempts_of
from bench.tracking.base import Tracker
from bench.tracking.tracked import TrackedRun

ROOT = Path(__file__).resolve().parents[2]
"""The folder that `bench` is imported from."""

POLL_S = 0.2

HURRY_S = 8.0
"""What is left to a run on its way when a signal comes: SLURM kills within 30 seconds."""

LEAVE_S = 5.0
"""How long the process may take to end once it has nothing more to send."""

Answer = dict[str, Any]


class SilenceError(Exception):
    """The sending process did not come to an end with a run."""


class Courier:
    """Sends attempts of one store.

    Parameters
    ----------
    tracker: Tracker
        Where to.
    store: Path
        Whose attempts.
    say: callable
        Takes a line for the user.
    hurry: callable
        Tells whether the time has come to end.
    fall_back: bool
        Keep on this machine what the server does not take, rather than leave it for another time.
    progress: callable
        Told the id of each run that is there.
    """

    def __init__(
        self,
        tracker: Tracker,
        store: Path,
        say: Callable[[str], None],
        *,
        hurry: Callable[[], bool] = lambda: False,
        fall_back: bool = True,
        progress: Callable[[str], None] = lambda run: None,
    ) -> None:
        self._tracker = tracker
        self._store = store
        self._say = say
        self._hurry = hurry
        self._fall_back = fall_back
        self._progress = progress
        self._said: set[str] = set()
        self.offline: str | None = None
        """Why no server is asked any more, if none is."""
        self.counts: Counter[str] = Counter()
        """Runs by what became of them: sent, known (they were there), unsent; and unreadable files."""
        self.whereabouts = ""
        """Where they are now."""
        self.failure: str | None = None
        """Why not all could be sent."""

    def send_runs(self, run_ids: Iterable[str]) -> None:
        """Send every attempt of some runs that is not there yet. Never raises, never takes long."""
        self.send(attempts_of(self._store, run_ids))

    def send(self, rows: Sequence[Path] = (), runs: Sequence[TrackedRun] = ()) -> None:
        """Send rows, and runs that are no rows. Never raises, never takes long."""
        if not self._tracker.active or self.failure is not None or not (rows or runs):
            return
        order = {
            "tracker": dataclasses.asdict(self._tracker),
            "folder": str(self._tracker.home(self._store).resolve()),
            "rows": [str(row.resolve()) for row in rows],
            "runs": [run.plain() for run in runs],
            "offline": self.offline,
            "fall_back": self._fall_back,
        }
        try:
            for answer in self._answers(order):
                self._note(answer)
        except (OSError, SilenceError) as error:
            self._fail(str(error))

    def hear(self, line: str, *, offline: str | None, failure: str | None) -> None:
        """Take what another courier of the same runs had to say: what failed there is not tried again."""
        self.offline, self.failure = self.offline or offline, self.failure or failure
        self._tell(line)

    def summary(self) -> str:
        """How many runs are where, in a line."""
        here = self.counts["sent"] + self.counts["known"]
        return f"{self._tracker.name}: {here} run{'s' * (here != 1)} {self.whereabouts}"

    def _note(self, answer: Answer) -> None:
        for kind in ("sent", "known", "unsent", "unreadable"):
            self.counts[kind] += kind in answer
        if "sent" in answer or "known" in answer:
            self._progress(answer.get("sent") or answer["known"])
        if "offline" in answer:
            self.offline = answer["offline"]
            self._tell(f"{self._tracker.name}: {self.offline}: runs are kept offline")
        self.whereabouts = answer.get("whereabouts", self.whereabouts)
        if "remark" in answer:
            self._tell(f"{self._tracker.name}: {answer['remark']}")
        if "unreadable" in answer:
            self._tell(f"left out: {answer['unreadable']}")
        if "unsent" in answer:
            self._tell(f"{self._tracker.name}: not sent: {answer['unsent']}")
        if "failed" in answer:
            self._fail(answer["failed"])

    def _fail(self, why: str) -> None:
        """Say that runs could not be sent, and try no further."""
        self.failure = why
        later = f"python -m bench.track {shlex.quote(str(self._store))}"
        self._tell(f"{self._tracker.name}: {why.rstrip('.')}. Nothing is lost: {later} sends what is not there yet.")

    def _tell(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _answers(self, order: dict[str, Any]) -> Iterator[Answer]:
        """What the sending process answers.

        Raises
        ------
        SilenceError
            If it takes too long over a run, or dies.
        """
        with tempfile.TemporaryFile() as errors, _order(order) as told:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.tracking.sender"],
                stdin=told,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the sweep, and there is no terminal to ask anything on
            )
            try:
                yield from self._listen(process)
                try:
                    code = process.wait(LEAVE_S)
                except subprocess.TimeoutExpired:
                    return  # everything was said
                if code != 0:
                    raise SilenceError(f"the sending process ended with exit code {code}{_last_line(errors)}")
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()  # type: ignore[union-attr]

    def _listen(self, process: subprocess.Popen[bytes]) -> Iterator[Answer]:
        """Lines as they come, each within the time limit after the one before."""
        assert process.stdout is not None
        stream, heard, at = process.stdout.fileno(), b"", "before the first run"
        deadline, end = time.monotonic() + self._tracker.limit_s, math.inf
        while True:
            if end == math.inf and self._hurry():
                end = time.monotonic() + HURRY_S
            left = min(deadline, end) - time.monotonic()
            if left <= 0:
                raise SilenceError(f"not sent within {self._tracker.limit_s:g} s ({at})")
            if not select.select([stream], [], [], min(POLL_S, left))[0]:
                continue
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                return
            *lines, heard = (heard + chunk).split(b"\n")
            for line in lines:
                answer: Answer = json.loads(line)
                at = f"run {answer['begin']}" if "begin" in answer else at
                deadline = time.monotonic() + self._tracker.limit_s
                yield answer
                if "over" in answer:
                    return


@contextlib.contextmanager
def _order(order: dict[str, Any]) -> Iterator[IO[str]]:
    """An order as a file to read."""
    with tempfile.TemporaryFile("w+") as file:
        json.dump(order, file)
        file.seek(0)
        yield file


def _environment() -> dict[str, str]:
    """This process's environment, in which `bench` is found as here."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
