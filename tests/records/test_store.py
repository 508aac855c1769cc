"""The store: many writers at once, writers that die, and an index that never says what the files do not."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench import records
from bench.core.files import encode_record
from bench.records import reading
from tests.conftest import ROOT
from tests.records_fixture import make_record, write_store
from tests.store_writers import PADDING, WRITER_COUNTS

KILLED_AT = """
import os, signal, sys
from bench import records
from tests.records_fixture import make_record

setattr(os, sys.argv[2], lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
records.write_row(sys.argv[1], make_record())
"""


@pytest.mark.long
@pytest.mark.slow
def test_hundreds_of_writers_at_once_lose_and_tear_nothing(tmp_path, monkeypatch):
    for setting in ("MIN_INDEXED_ROWS", "MAX_STALE_SHARE", "MIN_FILE_AGE_NS"):
        monkeypatch.setattr(reading, setting, 0)  # every load writes the index anew, beside the writers
    store, seen = tmp_path / "store", tmp_path / "seen"
    store.mkdir()
    writing = subprocess.Popen(
        [sys.executable, "-m", "tests.store_writers", str(store), str(seen)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    loaded = [0]
    while writing.poll() is None:
        loaded.append(len(records.load(store)))  # a torn row would be a warning, and a warning is an error here
        if len(set(loaded)) > 2:
            seen.touch()
    ends = {kind: Counter(codes) for kind, codes in json.loads(writing.communicate()[0]).items()}
    assert ends == {
        "alone": {0: WRITER_COUNTS["alone"]},
        "contested": {0: 1, 1: WRITER_COUNTS["contested"] - 1},
        "queueing": {0: WRITER_COUNTS["queueing"]},
        "doomed": {-signal.SIGKILL: WRITER_COUNTS["doomed"]},
    }
    assert loaded == sorted(loaded)
    assert len(set(loaded)) > 2, "nobody read while they wrote"

    rows = [records.read_row(path) for path in store.glob("*/*.json")]
    assert all(row["error"].endswith(f" {PADDING}") for row in rows)
    writers = {kind: [int(row["error"].split()[0]) for row in rows if row["sweep"] == kind] for kind in WRITER_COUNTS}
    assert sorted(writers["alone"]) == list(range(WRITER_COUNTS["alone"]))
    assert len(writers["contested"]) == 1
    assert sorted(writers["queueing"]) == list(range(WRITER_COUNTS["queueing"]))
    attempts = [(row["repeat"], row["attempt"]) for row in rows if row["sweep"] == "queueing"]
    assert sorted(attempts) == [(run, attempt) for run in range(5) for attempt in range(WRITER_COUNTS["queueing"] // 5)]
    for writer, written in Counter(writers["doomed"]).items():  # each row before the one it died over is there
        runs = sorted(row["repeat"] for row in rows if row["sweep"] == "doomed" and row["repeat"] // 1000 == writer)
        assert runs == [1000 * writer + number for number in range(written)]

    left = list(store.glob("*/.row-*"))
    assert len(left) <= WRITER_COUNTS["doomed"], "a temporary file that no dead writer left"
    assert_same(records.load(store), unindexed(store))


def test_values_that_compare_equal_are_written_as_what_they_are():
    values = {"0.0": 0.0, "-0.0": -0.0, "0": 0, "false": False, "1": 1, "1.0": 1.0, "true": True}
    for text, value in values.items():
        assert encode_record({"mfu": value}) == f'{{\n "mfu": {text}\n}}'


@pytest.mark.parametrize(("evidence", "num_syncs"), [("measured", 2), ("predicted", 0)])
def test_what_cannot_be_made_again_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch, evidence, num_syncs):
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or sync(descriptor))
    row = make_record() | {"evidence": evidence}
    assert records.read_row(records.write_row(tmp_path, row))["run_id"] == row["run_id"]
    assert len(synced) == num_syncs


@pytest.mark.parametrize("step", ["fchmod", "fsync", "link", "unlink"])
def test_a_writer_killed_at_any_step_leaves_a_whole_row_or_none(step, tmp_path):
    died = subprocess.run([sys.executable, "-c", KILLED_AT, str(tmp_path), step], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/.row-*"))) == 1
    row = make_record()
    run_id = row["run_id"]
    linked = step == "unlink"
    assert list(records.load(tmp_path)["run_id"]) == [run_id] * linked
    assert records.list_attempts(tmp_path, run_id) == [0] * linked
    records.write_row(tmp_path, row | {"attempt": records.find_next_attempt(tmp_path, run_id)})
    assert len(records.load(tmp_path)) == 1


PARSED_FILES: list[str] = []
"""What `load` had to parse since the fixture `parsed` began to count."""


def unindexed(path: Path) -> pd.DataFrame:
    """What `load` gives where there is no index; what it parses for that does not count."""
    parsed_before = list(PARSED_FILES)
    contents = records.read_latest_attempts(path)
    PARSED_FILES[:] = parsed_before
    frame = records.to_frame(contents.records)
    frame.attrs["unreadable"] = contents.unreadable
    return frame


def assert_same(frame: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(frame, expected)
    assert frame.attrs == expected.attrs


@pytest.fixture
def indexed(tmp_path, monkeypatch):
    """A store of 40 runs with an index, where one more row is enough for another index."""
    for setting in ("MIN_INDEXED_ROWS", "MAX_STALE_SHARE", "MIN_FILE_AGE_NS"):
        monkeypatch.setattr(reading, setting, 0)
    odd = {"mfu": None, "error": "ünïcode \x00 line\nbreak", "parameters": 2**62, "hfu": 1e-300}
    store = write_store(tmp_path / "store", [make_record(repeat=n) | (odd if n % 3 else {}) for n in range(40)])
    assert_same(records.load(store), unindexed(store))
    assert (store / ".index").is_file()
    return store


@pytest.fixture
def parsed(monkeypatch):
    """The files that `load` has to parse."""
    PARSED_FILES.clear()
    read = reading.read_row
    monkeypatch.setattr(reading, "read_row", lambda path: PARSED_FILES.append(os.fspath(path)) or read(path))
    return PARSED_FILES


def test_an_indexed_store_is_not_parsed_again(indexed, parsed):
    expected = unindexed(indexed)
    for _ in range(2):
        assert_same(records.load(indexed), expected)
    assert not parsed


def replace(store: Path, run: str) -> None:
    """Another row of the same size and modification time."""
    path = records.get_row_path(store, run, 0)
    before = path.stat()
    other = path.with_name(".other")
    other.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def edit(store: Path, run: str) -> None:
    path = records.get_row_path(store, run, 0)
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))


def fail_again(store: Path, run: str) -> None:
    records.write_row(store, records.read_row(records.get_row_path(store, run, 0)) | {"attempt": 1, "status": "error"})


def delete(store: Path, run: str) -> None:
    for path in (store / run).iterdir():
        path.unlink()
    (store / run).rmdir()


def tear(store: Path, run: str) -> None:
    (store / run / "1.json").write_text('{"format": 1, "run_')


def move(store: Path, run: str) -> None:
    (store / run).rename(store / "0123456789abcdef")


def add(store: Path, run: str) -> None:
    records.write_row(store, make_record(repeat=100))


@pytest.mark.parametrize("change", [replace, edit, fail_again, delete, tear, move, add])
def test_a_change_shows_at_once(change, indexed, parsed):
    before = records.load(indexed)
    change(indexed, before["run_id"][17])
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", records.UnreadableRecordWarning)
            after = records.load(indexed)
        assert_same(after, unindexed(indexed))
    assert not after.equals(before) or change is tear
    assert len(set(parsed)) <= 1, "more was parsed than had changed"


def test_a_later_attempt_that_goes_away_gives_way_to_the_one_before(indexed):
    before = records.load(indexed)
    run = before["run_id"][3]
    fail_again(indexed, run)
    assert records.load(indexed)["attempt"][3] == 1
    records.get_row_path(indexed, run, 1).unlink()
    assert_same(records.load(indexed), before)


def test_unreadable_files_are_named_alike_with_and_without_an_index(indexed):
    run = records.load(indexed)["run_id"][0]
    for name, text in {"1.json": '{"format"', "2.json": "[]", "notes.txt": "", "3.json": '{"format": 99}'}.items():
        (indexed / run / name).write_text(text)
    told = []
    for has_index in (True, True, False):
        if not has_index:
            (indexed / ".index").unlink()
        with pytest.warns(records.UnreadableRecordWarning) as warned:
            frame = records.load(indexed)
        told.append(([str(warning.message) for warning in warned], frame.attrs["unreadable"]))
    assert len(told[0][0]) == 4
    assert told[0] == told[1] == told[2]


class Trap:
    """Executes something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forged(body: bytes) -> bytes:
    return reading._build_header(body) + body


def trapped_arrays(trap: Path) -> bytes:
    path = trap.with_suffix(".npz")
    np.savez(path, files=np.array([Trap(trap)], dtype=object))
    return path.read_bytes()


DAMAGE = {
    "empty": lambda whole, trap: b"",
    "torn": lambda whole, trap: whole[: len(whole) // 2],
    "a bit": lambda whole, trap: whole[:-500] + bytes([whole[-500] ^ 1]) + whole[-499:],
    "a header alone": lambda whole, trap: whole.partition(b"\n")[0] + b"\n",
    "an older format": lambda whole, trap: whole.replace(b'"index": 2', b'"index": 1', 1),
    "other columns": lambda whole, trap: whole.replace(b'"run_id": "string"', b'"run_ID": "string"', 1),
    "text": lambda whole, trap: b"about these runs\n",
    "a pickle": lambda whole, trap: pickle.dumps(Trap(trap)),
    "a pickle that fits": lambda whole, trap: forged(pickle.dumps(Trap(trap))),
    "objects": lambda whole, trap: forged(trapped_arrays(trap)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_index_that_is_damaged_or_foreign_is_built_anew(kind, indexed, parsed, tmp_path_factory):
    path, trap = indexed / ".index", tmp_path_factory.mktemp("trap") / "sprung"
    path.write_bytes(DAMAGE[kind](path.read_bytes(), trap))
    expected = unindexed(indexed)
    assert_same(records.load(indexed), expected)
    assert len(parsed) == 40
    assert_same(records.load(indexed), expected)
    assert len(parsed) == 40
    assert not trap.exists()


def test_where_no_index_can_be_written_there_is_none(indexed):
    (indexed / ".index").unlink()
    (indexed / ".index").mkdir()
    for _ in range(2):
        assert_same(records.load(indexed), unindexed(indexed))
    assert [path.name for path in indexed.iterdir() if path.name.startswith(".")] == [".index"]


def test_an_index_serves_whatever_folder_is_loaded(indexed, parsed):
    above = indexed.parent
    assert_same(records.load(above), unindexed(above))
    one = next(path for path in indexed.iterdir() if path.is_dir())
    for path in (above, indexed, one, one / "0.json"):
        parsed.clear()
        assert_same(records.load(path), unindexed(path))
        assert len(parsed) == (path.suffix == ".json" or path == one)


@pytest.mark.slow
def test_a_moved_store_keeps_its_index(indexed, parsed, monkeypatch, tmp_path_factory):
    moved = indexed.rename(tmp_path_factory.mktemp("elsewhere") / "store")
    monkeypatch.chdir(moved)
    for path in (moved, Path(), Path("../store")):
        assert_same(records.load(path), unindexed(path))
    assert not parsed


def test_small_and_unsettled_stores_have_no_index(tmp_path, monkeypatch):
    few = write_store(tmp_path, [make_record(repeat=n) for n in range(3)])
    monkeypatch.setattr(reading, "MIN_FILE_AGE_NS", 0)
    records.load(few)
    assert not (few / ".index").exists()
    monkeypatch.setattr(reading, "MIN_INDEXED_ROWS", 0)
    monkeypatch.setattr(reading, "MIN_FILE_AGE_NS", 10**12)
    records.load(few)
    assert not (few / ".index").exists()


def test_a_run_deleted_while_the_store_is_read_is_passed_over(tmp_path, monkeypatch):
    store = write_store(tmp_path, [make_record(repeat=n) for n in range(3)])
    gone = sorted(path.name for path in store.iterdir())[1]
    listed = reading._walk_folders

    def folders(path):
        for files, strangers in listed(path):
            if files and gone in files[0].path:
                delete(store, gone)
            yield files, strangers

    monkeypatch.setattr(reading, "_walk_folders", folders)
    assert len(records.load(store)) == 2
