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

from rich import progress as bars

from bench.core.command_line import PlainConsole
from bench.core.errors import UsageError
from bench.core.installation import PACKAGE_FOLDER
from bench.tracking.base import Tracker
from bench.tracking.tracked_run import TrackedRun, build_report_run, list_all_attempts, list_attempts

"""The folder that `bench` is imported from."""

POLL_INTERVAL_S = 0.2

STOP_TIMEOUT_S = 8.0
"""What is left to a run on its way when a signal comes: SLURM kills within 30 seconds."""

EXIT_TIMEOUT_S = 5.0
"""How long the process may take to end once it has nothing more to send."""

SenderMessage = dict[str, Any]


class SenderError(Exception):
    """The sending process did not come to an end with a run."""


class TrackerClient:
    """Sends attempts of one store.

    Parameters
    ----------
    tracker: Tracker
        Where to.
    store: Path
        Whose attempts.
    print_line: callable
        Takes a line for the user.
    is_stopping: callable
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
        print_line: Callable[[str], None],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        fall_back: bool = True,
        on_run_sent: Callable[[str], None] = lambda run: None,
    ) -> None:
        self._tracker = tracker
        self._store = store
        self._print_line = print_line
        self._is_stopping = is_stopping
        self._fall_back = fall_back
        self._on_run_sent = on_run_sent
        self._printed_lines: set[str] = set()
        self.offline_reason: str | None = None
        """Why no server is asked any more, if none is."""
        self.counts: Counter[str] = Counter()
        """Runs by what became of them: sent, known (they were there), unsent; and unreadable files."""
        self.location = ""
        """Where they are now."""
        self.failure: str | None = None
        """Why not all could be sent."""

    def send_runs(self, run_ids: Iterable[str]) -> None:
        """Send every attempt of some runs that is not there yet. Never raises, never takes long."""
        self.send(list_attempts(self._store, run_ids))

    def send(self, rows: Sequence[Path] = (), runs: Sequence[TrackedRun] = ()) -> None:
        """Send rows, and runs that are no rows. Never raises, never takes long."""
        if not self._tracker.is_active or self.failure is not None or not (rows or runs):
            return
        request = {
            "tracker": dataclasses.asdict(self._tracker),
            "folder": str(self._tracker.get_local_folder(self._store).resolve()),
            "rows": [str(row.resolve()) for row in rows],
            "runs": [run.to_plain_values() for run in runs],
            "offline": self.offline_reason,
            "fall_back": self._fall_back,
        }
        try:
            for message in self._run_sender(request):
                self._handle_message(message)
        except (OSError, SenderError) as error:
            self._record_failure(str(error))

    def merge_report(self, line: str, *, offline_reason: str | None, failure: str | None) -> None:
        """Take what another client that sent the same runs had to say: what failed there is not tried again."""
        self.offline_reason, self.failure = self.offline_reason or offline_reason, self.failure or failure
        self._print_once(line)

    def format_summary(self) -> str:
        """How many runs are where, in a line."""
        num_sent = self.counts["sent"] + self.counts["known"]
        return f"{self._tracker.name}: {num_sent} run{'s' * (num_sent != 1)} {self.location}"

    def _handle_message(self, message: SenderMessage) -> None:
        for kind in ("sent", "known", "unsent", "unreadable"):
            self.counts[kind] += kind in message
        if "sent" in message or "known" in message:
            self._on_run_sent(message.get("sent") or message["known"])
        if "offline" in message:
            self.offline_reason = message["offline"]
            self._print_once(f"{self._tracker.name}: {self.offline_reason}: runs are kept offline")
        self.location = message.get("whereabouts", self.location)
        if "remark" in message:
            self._print_once(f"{self._tracker.name}: {message['remark']}")
        if "unreadable" in message:
            self._print_once(f"left out: {message['unreadable']}")
        if "unsent" in message:
            self._print_once(f"{self._tracker.name}: not sent: {message['unsent']}")
        if "failed" in message:
            self._record_failure(message["failed"])

    def _record_failure(self, reason: str) -> None:
        """Say that runs could not be sent, and try no further."""
        self.failure = reason
        resume_command = f"python -m bench.track {shlex.quote(str(self._store))}"
        self._print_once(
            f"{self._tracker.name}: {reason.rstrip('.')}. Nothing is lost: {resume_command} sends what is not there "
            "yet."
        )

    def _print_once(self, line: str) -> None:
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self._print_line(line)

    def _run_sender(self, request: dict[str, Any]) -> Iterator[SenderMessage]:
        """What the sending process answers.

        Raises
        ------
        SilenceError
            If it takes too long over a run, or dies.
        """
        with tempfile.TemporaryFile() as stderr_file, _open_request(request) as request_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.tracking.sending_process"],
                stdin=request_file,
                stdout=subprocess.PIPE,
                stderr=stderr_file,
                env=_build_environment(),
                start_new_session=True,  # Ctrl-C is for the sweep, and there is no terminal to ask anything on
            )
            try:
                yield from self._read_messages(process)
                try:
                    exit_code = process.wait(EXIT_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    return  # everything was said
                if exit_code != 0:
                    raise SenderError(
                        f"the sending process ended with exit code {exit_code}{_read_last_line(stderr_file)}"
                    )
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()  # type: ignore[union-attr]

    def _read_messages(self, process: subprocess.Popen[bytes]) -> Iterator[SenderMessage]:
        """Lines as they come, each within the time limit after the one before."""
        assert process.stdout is not None
        stream, buffered, current_run = process.stdout.fileno(), b"", "before the first run"
        deadline, stop_deadline = time.monotonic() + self._tracker.send_timeout_s, math.inf
        while True:
            if stop_deadline == math.inf and self._is_stopping():
                stop_deadline = time.monotonic() + STOP_TIMEOUT_S
            remaining_s = min(deadline, stop_deadline) - time.monotonic()
            if remaining_s <= 0:
                raise SenderError(f"not sent within {self._tracker.send_timeout_s:g} s ({current_run})")
            if not select.select([stream], [], [], min(POLL_INTERVAL_S, remaining_s))[0]:
                continue
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                return
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                message: SenderMessage = json.loads(line)
                current_run = f"run {message['begin']}" if "begin" in message else current_run
                deadline = time.monotonic() + self._tracker.send_timeout_s
                yield message
                if "over" in message:
                    return


@contextlib.contextmanager
def _open_request(request: dict[str, Any]) -> Iterator[IO[str]]:
    """An order as a file to read."""
    with tempfile.TemporaryFile("w+") as file:
        json.dump(request, file)
        file.seek(0)
        yield file


def _build_environment() -> dict[str, str]:
    """This process's environment, in which `bench` is found as here."""
    python_path = os.pathsep.join(filter(None, [str(PACKAGE_FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": python_path}


def _read_last_line(stderr_file: IO[bytes]) -> str:
    stderr_file.seek(0)
    lines = stderr_file.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""


# --- A whole store to a tracker.


def send_store(store: Path, tracker: Tracker) -> int:
    """Send every attempt of every run, and the report if one lies in the store, to a tracker.

    Returns
    -------
    int
        0 if everything is there, 1 if something could not be sent.

    Raises
    ------
    UsageError
        If there is nothing to send.
    """
    if not store.is_dir():
        raise UsageError(f"STORE={store} is not valid: choose a folder that a sweep wrote to.")
    try:
        rows = list_all_attempts(store)
    except PermissionError as error:
        raise UsageError(f"{error.filename} cannot be read ({error.strerror}).") from None
    if not rows:
        raise UsageError(f"The store {store} holds no rows to send.")
    if not tracker.is_active:
        print(f"{tracker.name} is turned off in this environment: nothing is sent.", file=sys.stderr)
        return 1
    report = build_report_run(store, store.resolve().name)
    with bars.Progress(
        console=PlainConsole(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress_bar:
        task = progress_bar.add_task("sending", total=len(rows))
        tracker_client = TrackerClient(
            tracker,
            store,
            lambda line: print(line, file=sys.stderr),
            fall_back=False,
            on_run_sent=lambda run: progress_bar.advance(task),
        )
        tracker_client.send(rows, [report] if report else [])
    counts = tracker_client.counts
    messages = [f"{counts['sent']} sent", f"{counts['known']} there already"]
    num_missing = len(rows) + (report is not None) - counts["sent"] - counts["known"]
    print(", ".join(messages + ([f"{num_missing} not sent"] if num_missing else [])))
    if tracker_client.location:
        print(tracker_client.format_summary())
    return 1 if num_missing else 0
