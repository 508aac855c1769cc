"""Claims: one owner per run at a time, on any number of processes; no attempt vanishes with its owner."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from bench import records
from bench.records import TakenError, claims
from bench.row import configured_row, environment_row
from tests.conftest import configuration

fork = multiprocessing.get_context("fork")

RUN = configuration("model=gpt_tiny")
ROW = {**configured_row(RUN), **environment_row([]), "started_at": "2026-01-01T00:00:00+00:00"}
END = {"status": "error", "error": "somebody's cause", "finished_at": "2026-01-01T00:00:01+00:00"}


def take(store: Path, owner: int = 1, reserve_bytes: int = 4096) -> records.Claim:
    return claims.take(store, ROW, {"job": str(owner), "restart": 0}, reserve_bytes)


def test_a_claim_is_exclusive_until_its_row_is_written(tmp_path):
    claim = take(tmp_path)
    with pytest.raises(TakenError) as taken:
        take(tmp_path, owner=2)
    assert taken.value.claim.owner == {"job": "1", "restart": 0}
    assert claims.running(tmp_path) == [RUN.run_id]
    claim.write_row(END)
    assert claims.running(tmp_path) == []
    assert take(tmp_path, owner=2).attempt == 1
    assert records.latest(tmp_path, RUN.run_id)["error"] == "somebody's cause"


def test_a_claim_leaves_nothing_but_the_row(tmp_path):
    take(tmp_path).write_row(END)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [f"{RUN.run_id}/0.json"]


def test_claims_are_no_records(tmp_path):
    take(tmp_path)
    contents = records.read_all(tmp_path)
    assert contents.records == []
    assert contents.unreadable == []


def _race(store: Path, number: int, barrier, winners) -> None:
    barrier.wait()
    try:
        take(store, owner=number)
        winners.put(number)
    except TakenError:
        pass
    os._exit(0)


def test_of_many_processes_one_gets_the_claim(tmp_path):
    barrier, winners = fork.Barrier(40), fork.SimpleQueue()
    processes = [fork.Process(target=_race, args=(tmp_path, number, barrier, winners)) for number in range(40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    winner = winners.get()
    assert winners.empty()
    held = claims.held(tmp_path, RUN.run_id)
    assert held is not None
    assert held.owner["job"] == str(winner)


def _bury(store: Path, barrier, results) -> None:
    dead = claims.held(store, RUN.run_id)
    barrier.wait()
    results.put(dead is not None and dead.break_with(END))
    os._exit(0)


def test_the_row_of_a_dead_owner_is_written_once(tmp_path):
    take(tmp_path)
    barrier, results = fork.Barrier(20), fork.SimpleQueue()
    processes = [fork.Process(target=_bury, args=(tmp_path, barrier, results)) for _ in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sum(results.get() for _ in processes) == 1
    assert records.attempts(tmp_path, RUN.run_id) == [0]
    assert claims.running(tmp_path) == []


def test_a_claim_taken_anew_is_not_broken_for_the_dead_one(tmp_path):
    dead = take(tmp_path)
    assert dead.break_with(END)
    alive = take(tmp_path, owner=2)
    assert not dead.break_with(END)
    held = claims.held(tmp_path, RUN.run_id)
    assert held is not None
    assert held.owner == alive.owner
    alive.write_row(END)
    assert records.attempts(tmp_path, RUN.run_id) == [0, 1]


def test_an_owner_that_died_after_its_row_leaves_one_row(tmp_path):
    claim = take(tmp_path)
    records.write(tmp_path, {**claim.row, **END})
    assert claim.break_with({**END, "error": "another cause"})
    assert records.attempts(tmp_path, RUN.run_id) == [0]
    assert records.latest(tmp_path, RUN.run_id)["error"] == "somebody's cause"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    rubbish = subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'rubbish'}", "bs=4k"], capture_output=True, text=True)
    assert "No space left" in rubbish.stderr


def test_a_row_finds_room_on_a_disk_that_filled_up_meanwhile(small_disk):
    claim = take(small_disk / "store", reserve_bytes=64 * 1024)
    fill(small_disk)
    claim.write_row({**END, "error": "x" * 20_000})
    assert len(records.latest(small_disk / "store", RUN.run_id)["error"]) == 20_000


def test_a_run_is_not_begun_on_a_full_disk(small_disk):
    fill(small_disk)
    with pytest.raises(OSError) as full:  # noqa: PT011
        take(small_disk / "store")
    assert full.value.errno == errno.ENOSPC
    (small_disk / "rubbish").unlink()
    take(small_disk / "store")


def test_a_disk_too_small_for_the_row_gives_the_claim_back(small_disk):
    with pytest.raises(OSError, match="No space left"):
        take(small_disk / "store", reserve_bytes=2**21)
    assert claims.running(small_disk / "store") == []
