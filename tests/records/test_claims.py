"""Claims: one owner per run at a time, on any number of processes; no attempt vanishes with its owner."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest

from bench import records, run
from bench.core import processes
from bench.launch import attempt, local, run_on_host
from bench.rank.row import build_configured_columns, build_environment_columns
from bench.records import RunClaimedError, claims
from tests.conftest import CPU, compose_run_config

fork_context = multiprocessing.get_context("fork")

RUN_CONFIG = compose_run_config("model=gpt_tiny")
STARTED_ROW = {
    **build_configured_columns(RUN_CONFIG),
    **build_environment_columns([]),
    "started_at": "2026-01-01T00:00:00+00:00",
}
END_COLUMNS = {"status": "error", "error": "somebody's cause", "finished_at": "2026-01-01T00:00:01+00:00"}


def take_claim(store: Path, owner: int = 1, reserve_bytes: int = 4096) -> records.Claim:
    return claims.take_claim(store, STARTED_ROW, {"job": str(owner), "restart": 0}, reserve_bytes)


def test_a_claim_is_exclusive_until_its_row_is_written(tmp_path):
    claim = take_claim(tmp_path)
    with pytest.raises(RunClaimedError) as taken:
        take_claim(tmp_path, owner=2)
    assert taken.value.claim.owner == {"job": "1", "restart": 0}
    assert claims.list_claimed_runs(tmp_path) == [RUN_CONFIG.run_id]
    claim.write_row(END_COLUMNS)
    assert claims.list_claimed_runs(tmp_path) == []
    assert take_claim(tmp_path, owner=2).attempt == 1
    assert records.read_latest_row(tmp_path, RUN_CONFIG.run_id)["error"] == "somebody's cause"


def test_a_claim_leaves_nothing_but_the_row(tmp_path):
    take_claim(tmp_path).write_row(END_COLUMNS)
    leftover_files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert leftover_files == [f"{RUN_CONFIG.run_id}/0.json"]


def test_who_was_taken_for_dead_leaves_the_claim_of_the_next_alone(tmp_path):
    first = take_claim(tmp_path)
    assert claims.find_claim(tmp_path, RUN_CONFIG.run_id).break_claim(END_COLUMNS)
    second = take_claim(tmp_path, owner=2)
    assert first.write_row({**END_COLUMNS, "error": "its own cause"}).name == "1.json"
    with pytest.raises(RunClaimedError):
        take_claim(tmp_path, owner=3)
    assert second.write_row(END_COLUMNS).name == "2.json"
    assert claims.list_claimed_runs(tmp_path) == []


def test_a_job_that_dies_after_its_row_is_written_gives_the_run_no_other(tmp_path):
    take_claim(tmp_path).write_row({"status": "error", "error": "its own", "finished_at": END_COLUMNS["finished_at"]})
    message = local._write_lost_run_row(RUN_CONFIG, tmp_path, "adhoc", "its job was killed or crashed.", attempt=0)
    assert message == " Its row had been written."
    assert records.read_latest_row(tmp_path, RUN_CONFIG.run_id)["error"] == "its own"
    taken = take_claim(tmp_path)
    assert local._write_lost_run_row(
        RUN_CONFIG, tmp_path, "adhoc", "its job was killed or crashed.", attempt=1
    ).startswith(" A job")
    taken.release()
    assert local._write_lost_run_row(RUN_CONFIG, tmp_path, "adhoc", "its job was killed or crashed.", attempt=1) == ""
    assert records.read_latest_row(tmp_path, RUN_CONFIG.run_id)["attempt"] == 1


def test_claims_are_no_records(tmp_path):
    take_claim(tmp_path)
    contents = records.read_latest_attempts(tmp_path)
    assert contents.records == []
    assert contents.unreadable == []


def _race_for_claim(store: Path, number: int, barrier, winners) -> None:
    barrier.wait()
    try:
        take_claim(store, owner=number)
        winners.put(number)
    except RunClaimedError:
        pass
    os._exit(0)


@pytest.mark.slow
def test_of_many_processes_one_gets_the_claim(tmp_path):
    barrier, winners = fork_context.Barrier(40), fork_context.SimpleQueue()
    processes = [
        fork_context.Process(target=_race_for_claim, args=(tmp_path, number, barrier, winners)) for number in range(40)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    winner = winners.get()
    assert winners.empty()
    current_claim = claims.find_claim(tmp_path, RUN_CONFIG.run_id)
    assert current_claim is not None
    assert current_claim.owner["job"] == str(winner)


def _break_dead_claim(store: Path, barrier, results) -> None:
    dead_claim = claims.find_claim(store, RUN_CONFIG.run_id)
    barrier.wait()
    results.put(dead_claim is not None and dead_claim.break_claim(END_COLUMNS))
    os._exit(0)


@pytest.mark.slow
def test_the_row_of_a_dead_owner_is_written_once(tmp_path):
    take_claim(tmp_path)
    barrier, results = fork_context.Barrier(20), fork_context.SimpleQueue()
    processes = [fork_context.Process(target=_break_dead_claim, args=(tmp_path, barrier, results)) for _ in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sum(results.get() for _ in processes) == 1
    assert records.list_attempts(tmp_path, RUN_CONFIG.run_id) == [0]
    assert claims.list_claimed_runs(tmp_path) == []


def test_a_claim_taken_anew_is_not_broken_for_the_dead_one(tmp_path):
    dead = take_claim(tmp_path)
    assert dead.break_claim(END_COLUMNS)
    alive = take_claim(tmp_path, owner=2)
    assert not dead.break_claim(END_COLUMNS)
    current_claim = claims.find_claim(tmp_path, RUN_CONFIG.run_id)
    assert current_claim is not None
    assert current_claim.owner == alive.owner
    alive.write_row(END_COLUMNS)
    assert records.list_attempts(tmp_path, RUN_CONFIG.run_id) == [0, 1]


def test_an_owner_that_died_after_its_row_leaves_one_row(tmp_path):
    claim = take_claim(tmp_path)
    records.write_row(tmp_path, {**claim.row, **END_COLUMNS})
    assert claim.break_claim({**END_COLUMNS, "error": "another cause"})
    assert records.list_attempts(tmp_path, RUN_CONFIG.run_id) == [0]
    assert records.read_latest_row(tmp_path, RUN_CONFIG.run_id)["error"] == "somebody's cause"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {result.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill_disk(disk: Path) -> None:
    rubbish = subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'rubbish'}", "bs=4k"], capture_output=True, text=True)
    assert "No space left" in rubbish.stderr


def test_a_row_finds_room_on_a_disk_that_filled_up_meanwhile(small_disk):
    claim = take_claim(small_disk / "store", reserve_bytes=64 * 1024)
    fill_disk(small_disk)
    claim.write_row({**END_COLUMNS, "error": "x" * 20_000})
    assert len(records.read_latest_row(small_disk / "store", RUN_CONFIG.run_id)["error"]) == 20_000


def test_a_run_is_not_begun_on_a_full_disk(small_disk):
    fill_disk(small_disk)
    with pytest.raises(OSError) as full:  # noqa: PT011
        take_claim(small_disk / "store")
    assert full.value.errno == errno.ENOSPC
    (small_disk / "rubbish").unlink()
    take_claim(small_disk / "store")


def test_a_disk_too_small_for_the_row_gives_the_claim_back(small_disk):
    with pytest.raises(OSError, match="No space left"):
        take_claim(small_disk / "store", reserve_bytes=2**21)
    assert claims.list_claimed_runs(small_disk / "store") == []


# ---- bench.run


@pytest.fixture
def typed(tmp_path, monkeypatch) -> list[str]:
    """What asks for `RUN_CONFIG`, on a machine without GPUs and in a process from which nothing is forked."""
    monkeypatch.setattr(run, "detect_device", lambda: CPU)
    monkeypatch.setattr(processes, "preload_if_forking", lambda imports: None)
    return ["model=gpt_tiny", f"store={tmp_path}"]


def test_a_run_that_a_job_executes_is_left_to_it(typed, tmp_path, capsys):
    take_claim(tmp_path, owner=12)
    assert run.main(typed) == 1
    assert capsys.readouterr().err == f"{RUN_CONFIG.label} is being executed by job 12.\n"


def test_a_run_without_a_store_that_can_be_written_is_refused(typed, capsys):
    assert run.main([*typed, "store=/proc/nope"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("store=/proc/nope is not valid: choose a folder that can be written to (")


def test_a_store_that_fails_later_is_one_sentence(typed, tmp_path, monkeypatch, capsys):
    def take(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(claims, "take_claim", take)
    assert run.main(typed) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"store={tmp_path} cannot take the row of {RUN_CONFIG.label}: [Errno 28]")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_another_sweep_hears_signals(number, typed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_on_host.time, "sleep", lambda _seconds: os.kill(os.getpid(), number))
    with records.lock_run(tmp_path, RUN_CONFIG.run_id):
        assert run.main(typed) == 1
    assert capsys.readouterr().err == f"Stopped by {number.name}.\n"
    assert records.list_attempts(tmp_path, RUN_CONFIG.run_id) == []


def test_what_describes_no_process_is_none_that_lives():
    alive = attempt.describe_this_process()
    assert attempt.is_process_alive(alive)
    assert not attempt.is_process_alive({"host": alive["host"], "pid": 999999999})
    assert not attempt.is_process_alive({**alive, "started": None})
