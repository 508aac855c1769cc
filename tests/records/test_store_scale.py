"""A store of 5,000 runs, or of 20,000 with SCALE=1: planning, loading and writing stay fast. Limits are several times
what was seen.

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
from pathlib import Path

import pandas as pd
import pytest

from bench import records
from bench.records import reading
from bench.records.schema import FORMAT_VERSION
from tests.conftest import FULL_SCALE, limit_cpu_time
from tests.records_fixture import make_record

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NUM_RUNS = 20_000 if FULL_SCALE else 5_000


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


def test_looking_up_thousands_of_runs_is_fast(store):
    planned = [run_id(number) for number in random.Random(0).sample(range(NUM_RUNS), 2000)]
    new = [f"{number:016x}" for number in range(2000)]
    with limit_cpu_time(200):
        found = [records.read_latest_row(store, run) for run in planned + new]
    assert [row and row["run_id"] for row in found] == planned + [None] * 2000


def test_loading_again_parses_only_what_is_new(store, monkeypatch):
    monkeypatch.setattr(reading, "MIN_FILE_AGE_NS", 0)
    with limit_cpu_time(700 if FULL_SCALE else 260):
        first = records.load(store)
    assert first["run_id"].nunique() == NUM_RUNS
    with limit_cpu_time(150 if FULL_SCALE else 75):
        second = records.load(store)
    pd.testing.assert_frame_equal(first, second)

    records.write_row(store, make_record(repeat=1000))
    with limit_cpu_time(150 if FULL_SCALE else 75):
        third = records.load(store)
    assert len(third) == NUM_RUNS + 1
    assert third[third["run_id"] != make_record(repeat=1000)["run_id"]].reset_index(drop=True).equals(first)


def test_writing_a_row_takes_no_longer_than_in_an_empty_store(store, tmp_path):
    taken_s: dict[Path, list[float]] = {store: [], tmp_path: []}
    for number in range(30):
        row = make_record(repeat=2000 + number)
        for root, times in taken_s.items():
            started = time.perf_counter()
            records.write_row(root, row)
            times.append(time.perf_counter() - started)
    assert statistics.median(taken_s[store]) < 0.1  # 5 ms, nearly all of it for the disk to confirm
    assert statistics.median(taken_s[store]) < 4 * statistics.median(taken_s[tmp_path])
