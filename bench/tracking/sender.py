"""The process that sends: told what on its standard input, it answers with a JSON object a line.

For every run ``{"begin": id}``, then ``{"sent": id, "where": …}`` or ``{"unsent": …}``; or ``{"known": id}`` alone.
``{"remark": …}`` and ``{"offline": why}`` once, ``{"unreadable": …}`` for a file that is no row of a run. At the end
``{"over": true, "whereabouts": …}``, or ``{"failed": …}`` if no more can be sent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import records
from bench.tracking.base import Session, load_tracker
from bench.tracking.notes import note_sent, was_sent
from bench.tracking.tracked import TrackedRun, tracked_run

Tell = Callable[..., None]

PR_SET_PDEATHSIG = 1

POLITE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that SLURM sends to all processes of a job: whoever ordered decides what they mean."""


def main() -> int:
    """Carry out the order on standard input. Exit code 0, whatever came of it: the answers say."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in POLITE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        _carry_out(json.load(sys.stdin), tell)
    except ConnectionError as error:
        tell(failed=str(error))
    except Exception as error:  # the one who asked says it; nothing may depend on a tracker
        tell(failed=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return 0


def _carry_out(order: dict[str, Any], tell: Tell) -> None:
    tracker = load_tracker(order["tracker"])
    folder = Path(order["folder"])
    told: set[str] = set()

    def tell_once(**answer: Any) -> None:
        for key, text in answer.items():
            if text is not None and text not in told:
                told.add(text)
                tell(**{key: text})

    with tracker.open(folder, offline=order["offline"], fall_back=order["fall_back"]) as session:
        tell_once(remark=session.remark, offline=session.shortfall)
        for run in _runs(order, tell):
            _send(run, session, folder, tell)
            tell_once(offline=session.shortfall)
        tell(over=True, whereabouts=session.whereabouts)


def _runs(order: dict[str, Any], tell: Tell) -> Iterator[TrackedRun]:
    for path in map(Path, order["rows"]):
        try:
            record = records.read(path)
        except (OSError, ValueError) as error:
            tell(unreadable=f"{path}: {error}")
            continue
        if record["evidence"] == "published":
            tell(unreadable=f"{path}: quoted, not a run")
            continue
        yield tracked_run(record, path)
    for values in order["runs"]:
        yield TrackedRun(**values)


def _send(run: TrackedRun, session: Session, folder: Path, tell: Tell) -> None:
    """Send a run unless it is there already."""
    if was_sent(folder, session, run):
        tell(known=run.id)
        return
    tell(begin=run.id)
    try:
        where = session.send(run)
        note_sent(folder, session, run, where)
    except ConnectionError:  # then there is no way for the others either
        raise
    except Exception as error:
        tell(unsent=f"{run.id}: {type(error).__name__}: {' '.join(str(error).split())}")
    else:
        tell(sent=run.id, where=where)


if __name__ == "__main__":
    sys.exit(main())
