"""Hundreds of processes that write to one store at the same moment: ``python -m tests.store_writers STORE SEEN``.

The last of those that are killed writes on until a reader has made the file SEEN.

Prints how each of them ended, by what it was to do: 0 it wrote its row, 1 the row was another's, -9 it was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import records
from bench.records import Record
from tests.records_fixture import make_record

WRITER_COUNTS = {"alone": 150, "contested": 80, "queueing": 50, "doomed": 40}
"""Writers to a run of their own, to one attempt of one run, to the next attempts of five runs, and until they die."""

PADDING = "x" * 5000


def build_row(kind: str, writer: int, run: int) -> Record:
    """A row that says who wrote it, and that it is whole."""
    return make_record(sweep=kind, repeat=run, steps=100) | {"error": f"{writer} {PADDING}"}


def alone(store: Path, writer: int) -> None:
    records.write_row(store, build_row("alone", writer, run=writer))


def contested(store: Path, writer: int) -> None:
    records.write_row(store, build_row("contested", writer, run=0))


def queueing(store: Path, writer: int) -> None:
    own_row = build_row("queueing", writer, run=writer % 5)
    while True:
        try:
            records.write_row(store, own_row | {"attempt": records.find_next_attempt(store, own_row["run_id"])})
            return
        except FileExistsError:
            continue


def doomed(store: Path, writer: int) -> None:
    for number in range(100_000):
        records.write_row(store, build_row("doomed", writer, run=1000 * writer + number))


def fork_writer(job: Callable[[Path, int], None], store: Path, writer: int, gate: tuple[int, int]) -> int:
    """Fork a process that does a job as soon as the gate opens, which is when its last writing end closes."""
    process = os.fork()
    if process:
        return process
    code = 2
    try:
        os.close(gate[1])
        os.read(gate[0], 1)
        job(store, writer)
        code = 0
    except FileExistsError:
        code = 1
    finally:
        os._exit(code)


READER_PATIENCE_S = 120


def main(store: Path, seen: Path) -> None:
    gate = os.pipe()
    tasks = [(globals()[kind], writer) for kind, number in WRITER_COUNTS.items() for writer in range(number)]
    random.Random(0).shuffle(tasks)
    kind_by_pid = {fork_writer(job, store, writer, gate): job.__name__ for job, writer in tasks}
    os.close(gate[1])
    doomed_pids = [process for process, kind in kind_by_pid.items() if kind == "doomed"]
    deadline = time.monotonic() + READER_PATIENCE_S
    for process in doomed_pids:
        while process == doomed_pids[-1] and not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.Random(process).uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
    exit_codes: dict[str, list[int]] = {kind: [] for kind in WRITER_COUNTS}
    for process, kind in kind_by_pid.items():
        exit_codes[kind].append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    print(json.dumps(exit_codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
