"""A store of 20,000 runs: planning, loading and writing stay fast. Limits are several times what a quiet machine takes.

Measured on two cores with 100,000 runs of 6 KB each: 4,000 look-ups 0.8 s, the first `load` 16 s, the next ones 2.5 s,
one `write` 5 ms.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from bench import records
from bench.records import reading
from bench.records.schema import FORMAT_VERSION
from tests.records_fixture import make_record

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NUM_RUNS = 20_000


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Path]:
    """Rows like those of a real sweep, written without the care that `records.write` takes."""
    root = tmp_path_factory.mktemp("large")
    rows = [make_record(repeat=n, steps=50) | {"format": FORMAT_VERSION, "run_id": "RUN"} for n in range(50)]
    templates = [json.dumps(row, indent=1) for row in rows]
    for number in range(NUM_RUNS):
        folder = root / run_id(number)
        folder.mkdir()
        (folder / "0.json").write_text(templates[number % 50].replace("RUN", run_id(number)))
    yield root
    shutil.rmtree(root)


def run_id(number: int) -> str:
    return f"{random.Random(number).getrandbits(64):016x}"


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Of this process's own time: what other processes take of the machine does not count."""
    started = time.process_time()
    yield
    assert time.process_time() - started < limit_s


def test_looking_up_thousands_of_runs_takes_a_second(store):
    planned = [run_id(number) for number in random.Random(0).sample(range(NUM_RUNS), 2000)]
    new = [f"{number:016x}" for number in range(2000)]
    with at_most(4):  # 0.6
        found = [records.read_latest_row(store, run) for run in planned + new]
    assert [row and row["run_id"] for row in found] == planned + [None] * 2000


def test_loading_again_parses_only_what_is_new(store, monkeypatch):
    monkeypatch.setattr(reading, "MIN_FILE_AGE_NS", 0)
    with at_most(15):  # 3
        first = records.load(store)
    assert first["run_id"].nunique() == NUM_RUNS
    with at_most(3):  # 0.5
        second = records.load(store)
    pd.testing.assert_frame_equal(first, second)

    records.write_row(store, make_record(repeat=1000))
    with at_most(3):
        third = records.load(store)
    assert len(third) == NUM_RUNS + 1
    assert third[third["run_id"] != make_record(repeat=1000)["run_id"]].reset_index(drop=True).equals(first)


def test_writing_a_row_takes_no_longer_than_in_an_empty_store(store):
    took = []
    for number in range(30):
        row = make_record(repeat=2000 + number)
        started = time.perf_counter()
        records.write_row(store, row)
        took.append(time.perf_counter() - started)
    assert statistics.median(took) < 0.1  # 5 ms, nearly all of it for the disk to confirm
