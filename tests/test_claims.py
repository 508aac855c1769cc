"""Claims: one owner per run at a time, on any number of processes; no attempt vanishes with its owner."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest

from bench import processes, records, run
from bench.launch import local, owners, worker
from bench.records import TakenError, claims
from bench.row import configured_row, environment_row
from tests.conftest import CPU, configuration

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


def test_who_was_taken_for_dead_leaves_the_claim_of_the_next_alone(tmp_path):
    first = take(tmp_path)
    assert claims.held(tmp_path, RUN.run_id).break_with(END)
    second = take(tmp_path, owner=2)
    assert first.write_row({**END, "error": "its own cause"}).name == "1.json"
    with pytest.raises(TakenError):
        take(tmp_path, owner=3)
    assert second.write_row(END).name == "2.json"
    assert claims.running(tmp_path) == []


def test_a_job_that_dies_after_its_row_is_written_gives_the_run_no_other(tmp_path):
    take(tmp_path).write_row({"status": "error", "error": "its own", "finished_at": END["finished_at"]})
    said = local._write_down(RUN, tmp_path, "adhoc", "its job was killed or crashed.", attempt=0)
    assert said == " Its row had been written."
    assert records.latest(tmp_path, RUN.run_id)["error"] == "its own"
    taken = take(tmp_path)
    assert local._write_down(RUN, tmp_path, "adhoc", "its job was killed or crashed.", attempt=1).startswith(" A job")
    taken.release()
    assert local._write_down(RUN, tmp_path, "adhoc", "its job was killed or crashed.", attempt=1) == ""
    assert records.latest(tmp_path, RUN.run_id)["attempt"] == 1


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


# ---- bench.run


@pytest.fixture
def typed(tmp_path, monkeypatch) -> list[str]:
    """What asks for `RUN`, on a machine without GPUs and in a process from which nothing is forked."""
    monkeypatch.setattr(run, "detect", lambda: CPU)
    monkeypatch.setattr(processes, "prepare", lambda imports: None)
    return ["model=gpt_tiny", f"store={tmp_path}"]


def test_a_run_that_a_job_executes_is_left_to_it(typed, tmp_path, capsys):
    take(tmp_path, owner=12)
    assert run.main(typed) == 1
    assert capsys.readouterr().err == f"{RUN.label} is being executed by job 12.\n"


def test_a_run_without_a_store_that_can_be_written_is_refused(typed, capsys):
    assert run.main([*typed, "store=/proc/nope"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("store=/proc/nope is not valid: choose a folder that can be written to (")


def test_a_store_that_fails_later_is_one_sentence(typed, tmp_path, monkeypatch, capsys):
    def take(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(claims, "take", take)
    assert run.main(typed) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"store={tmp_path} cannot take the row of {RUN.label}: [Errno 28]")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_another_sweep_hears_signals(number, typed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker.time, "sleep", lambda _seconds: os.kill(os.getpid(), number))
    with records.lock(tmp_path, RUN.run_id):
        assert run.main(typed) == 1
    assert capsys.readouterr().err == f"Stopped by {number.name}.\n"
    assert records.attempts(tmp_path, RUN.run_id) == []


def test_what_describes_no_process_is_none_that_lives():
    alive = owners.this_process()
    assert owners.process_lives(alive)
    assert not owners.process_lives({"host": alive["host"], "pid": 999999999})
    assert not owners.process_lives({**alive, "started": None})
