"""Packed stores: what was packed comes back to the byte, what was measured stays, and every reader reads both kinds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import compare, history, records, report
from bench.core.errors import UsageError
from bench.core.files import encode_record
from bench.records import UnreadableRecordWarning, claims
from bench.records.__main__ import main
from bench.records.packed_rows import ROWS_FILE, encode_rows, read_packed_rows
from bench.records.packing import pack_store, unpack_store
from bench.records.schema import COLUMN_NAMES, FORMAT_VERSION, NESTED_PARTS, PREDICTION_ORIGIN
from tests.conftest import ROOT, run_command
from tests.records_fixture import make_default_sweep, make_record, write_store

ROW_FILES = "*/[0-9]*.json"


def read_files(store: Path) -> dict[str, bytes]:
    """Every row file of a store, by its path in it."""
    return {str(path.relative_to(store)): path.read_bytes() for path in store.glob(ROW_FILES)}


def read_lines(store: Path) -> list[str]:
    return (store / ROWS_FILE).read_text().splitlines()


def assert_reads_same(store: Path, other: Path) -> None:
    """Every function that reads gives the same of both."""
    for read in (records.read_latest_attempts, records.read_all_attempts):
        assert [*map(encode_record, read(store).records)] == [*map(encode_record, read(other).records)]
        assert read(store).unreadable == read(other).unreadable == []
    pd.testing.assert_frame_equal(records.load(store), records.load(other))
    assert records.list_runs(store) == records.list_runs(other)
    for run_id in records.list_runs(store):
        attempts = records.list_attempts(store, run_id)
        assert attempts == records.list_attempts(other, run_id)
        assert records.find_next_attempt(store, run_id) == records.find_next_attempt(other, run_id)
        assert records.read_latest_row(store, run_id) == records.read_latest_row(other, run_id) is not None
        pd.testing.assert_frame_equal(records.load(store / run_id), records.load(other / run_id))
        for attempt in attempts:
            path, other_path = (records.get_row_path(folder, run_id, attempt) for folder in (store, other))
            assert records.read_row(path) == records.read_row(other_path)
            assert records.read_row_text(path) == records.read_row_text(other_path)
            pd.testing.assert_frame_equal(records.load(path), records.load(other_path))


@pytest.fixture
def live(tmp_path) -> Path:
    """Runs with one, two and three attempts, one of them out of memory."""
    failed = make_record(repeat=0) | {"status": "error", "error": "killed"}
    measured = {"losses": [9.5, float("nan")], "final_loss": float("inf"), "mfu": None}
    rows = [make_record(repeat=number) | measured for number in range(1, 6)]
    rows += [failed, failed | {"attempt": 1}, failed | {"attempt": 2, "status": "preempted"}, rows[3] | {"attempt": 1}]
    return write_store(tmp_path / "live", [*rows, make_record(repeat=9, status="oom")])


@pytest.fixture
def packed(live, tmp_path) -> Path:
    pack_store(live, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.long
@pytest.mark.slow
def test_a_packed_store_is_one_file_and_reads_as_the_files_did(live, packed):
    assert [path.name for path in packed.iterdir() if path.name[0] != "."] == [ROWS_FILE]
    assert_reads_same(packed, live)
    contents = records.read_latest_attempts(packed)
    assert contents.files == [
        f"{ROWS_FILE}:{number}"
        for number, line in enumerate(read_lines(packed), start=1)
        for row in contents.records
        if number > 1 and (row["run_id"], row["attempt"]) == (json.loads(line)["run_id"], json.loads(line)["attempt"])
    ]
    assert len(contents.files) == 7
    assert len(records.load(packed / ROWS_FILE)) == 7


def test_unpacking_gives_the_files_again(live, packed, tmp_path):
    unpack_store(packed, tmp_path / "unpacked")
    assert read_files(tmp_path / "unpacked") == read_files(live)


def test_unpacking_leaves_rows_that_lie_there_however_their_lines_are_broken(packed, tmp_path):
    unpack_store(packed, tmp_path / "unpacked")
    files = sorted((tmp_path / "unpacked").glob("*/*.json"))
    for path in files:
        path.write_text(json.dumps(json.loads(path.read_text()), indent=1) + "\n")
    unpack_store(packed, tmp_path / "unpacked")
    files[0].write_text(json.dumps(json.loads(files[0].read_text()) | {"seed": 99}))
    with pytest.raises(UsageError, match="no other row"):
        unpack_store(packed, tmp_path / "unpacked")


def test_the_lines_are_sorted_and_leave_out_what_all_rows_share(live, packed):
    header, *lines = (json.loads(line) for line in read_lines(packed))
    assert (header["format"], header["format_version"]) == ("fsdp-bench rows", 1)
    rows = [(line["run_id"], line["attempt"]) for line in lines]
    assert rows == sorted(rows)
    assert len(rows) == len(read_files(live))
    for line in lines:
        assert [*line] == sorted(line)
        assert [*line["config"]] == sorted(line["config"]) == ["repeat"]
    assert header["shared"]["config"]["model"] == {"name": "t5_tiny", "num_layers": 7}
    assert header["shared"]["format"] == FORMAT_VERSION
    assert "repeat" not in header["shared"] | header["shared"]["config"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("store", sorted((ROOT / "results").rglob(ROWS_FILE)), ids=lambda path: path.parent.name)
def test_committed_stores_hold_whole_rows_and_pack_to_the_same_bytes(store, tmp_path):
    """With what their rows had in common when most of them were packed."""
    assert records.read_all_attempts(store).unreadable == []
    unpack_store(store.parent, tmp_path / "live")
    (tmp_path / "packed").mkdir()
    *lines, _ = store.read_bytes().splitlines(keepends=True)
    (tmp_path / "packed" / ROWS_FILE).write_bytes(b"".join(lines))
    pack_store(tmp_path / "live", tmp_path / "packed")
    assert (tmp_path / "packed" / ROWS_FILE).read_bytes() == store.read_bytes()


# ---- any values

KEYS = st.sampled_from(["a", "b", "c", "a/b", "~", "", "ä"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 1e300, float("nan"), float("inf")]),
    st.sampled_from(["", "NaN", "x", "\ud800"]),
)
SECTIONS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=3),
    lambda inner: st.dictionaries(KEYS, st.one_of(LEAVES, inner, st.lists(st.one_of(LEAVES, inner), max_size=2))),
    max_leaves=8,
)
ROW_SETS = st.lists(
    st.dictionaries(st.sampled_from(["config", "effective", "mfu", "error"]), st.one_of(LEAVES, SECTIONS))
)


def number(rows: list[dict[str, Any]], start: int = 0) -> list[dict[str, Any]]:
    """Rows as attempts of runs, two of each, as they are read from files; keys of the second in another order."""
    numbered = []
    for position, row in enumerate(rows, start):
        run, attempt = divmod(position, 2)
        key = {"run_id": f"{run:016x}", "attempt": attempt}
        numbered.append({**key, **row} if attempt else {**row, **key})
    return [json.loads(encode_record(row)) for row in numbered]


def decode(lines: list[str], path: Path) -> list[str]:
    path.write_text("".join(f"{line}\n" for line in lines))
    rows = read_packed_rows(str(path))
    assert rows.problems == []
    return [encode_record(row.decode()) for row in rows.list_rows()]


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=300)
@given(rows=ROW_SETS.filter(len), more=ROW_SETS)
def test_any_values_come_back_to_the_byte_and_lines_stay_when_others_join_them(rows, more, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    first, both = number(rows), number(rows) + number(more, len(rows))
    lines = [*encode_rows(first)]
    assert decode(lines, path) == [*map(encode_record, first)]
    header = read_packed_rows(str(path)).header
    again = [*encode_rows(first, header)]
    assert again == lines
    joined = [*encode_rows(both, header)]
    assert decode(joined, path) == [*map(encode_record, both)]
    assert joined[1 : len(lines)] == lines[1:]


def test_a_value_is_shared_only_if_all_rows_have_it_and_absent_is_not_null(tmp_path):
    rows = number([{"mfu": None, "hfu": 1}, {"hfu": 1.0}, {"mfu": None, "hfu": 1}])
    lines = [*encode_rows(rows)]
    assert json.loads(lines[0])["shared"] == {}
    assert decode(lines, tmp_path / "rows") == [*map(encode_record, rows)]
    assert "mfu" not in json.loads(lines[2])


# ---- packing again


def make_prediction(repeat: int, **columns: object) -> records.Record:
    row = make_record(evidence="predicted", repeat=repeat, steps=0, step_time_median_s=0.5 + repeat, **columns)
    return row | {"git_sha": "a" * 40, "predictor": "a" * 12, "environment": {"python": "3.11", "variables": {}}}


def remake(row: records.Record, **columns: object) -> records.Record:
    """The same prediction on another day, by another commit, on another machine."""
    return row | {
        "started_at": "2027-01-01T00:00:00+00:00",
        "finished_at": "2027-01-01T00:00:01+00:00",
        "git_sha": "b" * 40,
        "git_clean": False,
        "predictor": "b" * 12,
        "torch_version": "3.0",
        "environment": {"python": "3.14"},
        "hosts": "elsewhere",
        "setup_s": 9.0,
        **columns,
    }


def test_what_tells_two_equal_predictions_apart_are_columns_and_parts_of_the_row():
    assert {*COLUMN_NAMES, *NESTED_PARTS} > PREDICTION_ORIGIN
    row = make_prediction(0)
    assert {name for name, value in remake(row).items() if row.get(name) != value} <= PREDICTION_ORIGIN


def test_equal_predictions_are_an_empty_diff_and_one_that_moved_is_one_line(tmp_path):
    predictions = [make_prediction(number) for number in range(8)]
    packed = tmp_path / "packed"
    pack_store(write_store(tmp_path / "first", predictions), packed)
    before = read_lines(packed)
    pack_store(write_store(tmp_path / "again", [*map(remake, predictions)]), packed)
    assert read_lines(packed) == before

    moved = [remake(row, **({"mfu": 0.5} if row["repeat"] == 3 else {})) for row in predictions]
    write_store(tmp_path / "moved", moved)
    with pytest.raises(UsageError, match="--replace-predictions"):
        pack_store(tmp_path / "moved", packed)
    assert read_lines(packed) == before
    result = pack_store(tmp_path / "moved", packed, replace_predictions=True)
    assert (result.num_rows, result.num_added, result.num_removed) == (8, 1, 1)
    after = read_lines(packed)
    assert sum(old != new for old, new in zip(before[1:], after[1:], strict=True)) == 1
    (row,) = [row for row in records.read_latest_attempts(packed).records if row["git_sha"] == "b" * 40]
    assert (row["repeat"], row["mfu"]) == (3, 0.5)


def test_predictions_that_are_no_longer_made_go_only_if_that_is_asked_for(tmp_path):
    predictions = [make_prediction(number) for number in range(4)]
    packed = tmp_path / "packed"
    pack_store(write_store(tmp_path / "first", predictions), packed)
    write_store(tmp_path / "fewer", predictions[:3])
    with pytest.raises(UsageError, match=f"a prediction of run {predictions[3]['run_id']}.*--replace-predictions"):
        pack_store(tmp_path / "fewer", packed)
    pack_store(tmp_path / "fewer", packed, replace_predictions=True)
    assert_reads_same(packed, tmp_path / "fewer")


@pytest.mark.parametrize("replace", [False, True])
def test_nothing_measured_is_lost_or_replaced(replace, live, packed, tmp_path):
    before = (packed / ROWS_FILE).read_bytes()
    pack_store(live, packed, replace_predictions=replace)
    assert (packed / ROWS_FILE).read_bytes() == before

    shutil.copytree(live, tmp_path / "changed")
    path = next(path for path in (tmp_path / "changed").glob("*/0.json"))
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UsageError, match=f"run {path.parent.name} is packed.*with other values"):
        pack_store(tmp_path / "changed", packed, replace_predictions=replace)

    shutil.copytree(live, tmp_path / "fewer")
    shutil.rmtree(tmp_path / "fewer" / make_record(repeat=4)["run_id"])
    with pytest.raises(UsageError, match=f"has run {make_record(repeat=4)['run_id']} packed.*what was measured stays"):
        pack_store(tmp_path / "fewer", packed, replace_predictions=replace)
    assert (packed / ROWS_FILE).read_bytes() == before

    other = tmp_path / "other"  # every run, of one only the second attempt
    shutil.copytree(live, other)
    (other / make_record(repeat=0)["run_id"] / "0.json").unlink()
    (other / make_record(repeat=0)["run_id"] / "1.json").unlink()
    records.write_row(other, make_record(repeat=2) | {"attempt": 1})
    pack_store(other, packed, replace_predictions=replace)
    lines = read_lines(packed)
    assert [line for line in lines if line not in before.decode().splitlines()] == [
        line for line in lines if json.loads(line).get("attempt") == 1 and make_record(repeat=2)["run_id"] in line
    ]
    assert records.list_attempts(packed, make_record(repeat=0)["run_id"]) == [0, 1, 2]


def test_what_cannot_be_read_is_not_packed_over(live, packed):
    path = packed / ROWS_FILE
    whole = path.read_bytes()
    for damaged, line in ((whole[:-20], 12), (b"{}\n" + whole.partition(b"\n")[2], 1)):
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=rf"{ROWS_FILE}:\d+: .*Repair this file first"):
            pack_store(live, packed)
        assert path.read_bytes() == damaged, line


# ---- both kinds in one store


@pytest.mark.slow
def test_packing_a_store_in_place_removes_the_files_of_its_rows_alone(live, tmp_path):
    shutil.copytree(live, tmp_path / "before")
    run = make_record(repeat=2)["run_id"]
    (live / run / "0.log").write_text("printed")
    (live / run / "0.json").with_name("5.json").write_text("{torn")
    result = pack_store(live)
    assert len(result.unreadable) == 1
    assert "5.json" in result.unreadable[0]
    assert sorted(path.name for path in (live / run).iterdir()) == ["0.log", "5.json"]
    (live / run / "5.json").unlink()
    assert read_files(live) == {}
    assert_reads_same(live, tmp_path / "before")


@pytest.mark.long
def test_rows_of_a_run_that_is_being_executed_keep_their_files(live, tmp_path):
    shutil.copytree(live, tmp_path / "before")
    row = make_record(repeat=2)
    claim = claims.take_claim(live, {"run_id": row["run_id"], "status": "error"}, {"process": {}}, 4096)
    pack_store(live)
    assert [*read_files(live)] == [f"{row['run_id']}/0.json"]
    assert_reads_same(live, tmp_path / "before")
    assert claim.write_row(row | {"attempt": 1}).name == "1.json"
    assert records.list_attempts(live, row["run_id"]) == [0, 1]


def test_new_attempts_are_files_beside_the_packed_ones_and_no_number_is_given_twice(packed):
    row = make_record(repeat=1)
    with pytest.raises(FileExistsError):
        records.write_row(packed, row)
    attempt = records.find_next_attempt(packed, row["run_id"])
    assert attempt == 1
    path = records.write_row(packed, row | {"attempt": attempt, "mfu": 0.25})
    assert path.is_file()
    assert records.list_attempts(packed, row["run_id"]) == [0, 1]
    assert records.read_latest_row(packed, row["run_id"])["mfu"] == 0.25
    assert len(records.read_all_attempts(packed).records) == 11
    before = read_lines(packed)
    pack_store(packed)
    assert not path.exists()
    assert [line for line in read_lines(packed) if line not in before] != []
    assert set(before[1:]) < set(read_lines(packed))
    assert records.read_latest_row(packed, row["run_id"])["mfu"] == 0.25
    path.parent.mkdir(exist_ok=True)
    path.write_text("{torn")  # the one before counts, packed or not
    with pytest.warns(UnreadableRecordWarning, match="1.json"):
        frame = records.load(packed)
    assert len(frame) == 7


def test_a_claim_on_a_packed_run_gets_the_next_attempt(packed):
    row = make_record(repeat=1)
    claim = claims.take_claim(packed, {"run_id": row["run_id"]}, {"process": {}}, 4096)
    assert claim.attempt == 1
    claim.release()
    late = claims.Claim(packed, row["run_id"], 0, {"process": {}}, {"run_id": row["run_id"], "attempt": 0})
    (packed / row["run_id"]).mkdir(exist_ok=True)
    assert late.write_row(row | {"attempt": 0, "mfu": 0.125}).name == "1.json"
    assert [row["mfu"] for row in records.read_all_attempts(packed / row["run_id"]).records] == [0.125, None]


@pytest.mark.long
@pytest.mark.slow
def test_runs_of_a_store_of_both_kinds_come_in_the_order_of_their_ids(live, tmp_path):
    shutil.copytree(live, tmp_path / "before")
    pack_store(live)
    for number in range(20, 30):
        records.write_row(live, make_record(repeat=number))
        records.write_row(tmp_path / "before", make_record(repeat=number))
    assert_reads_same(live, tmp_path / "before")
    assert_reads_same(live, tmp_path / "before")


# ---- damage


DAMAGE = {
    "torn": lambda line: line[: len(line) // 2],
    "not text": lambda line: b"\xff\xfe" + line,
    "no object": lambda line: b"[1, 2]",
    "no run": lambda line: line.replace(b'"run_id"', b'"run_ID"'),
    "an attempt that is none": lambda line: line.replace(b'"attempt":0', b'"attempt":"0"'),
    "deep": lambda line: b"[" * 100_000,
    "a mark of a conflict": lambda line: b"<<<<<<< HEAD",
    "half of a pair": lambda line: line.replace(b'"run_id":', b'"error":"\\ud800","run_id":'),
    "a status that is none": lambda line: line[:-1] + b',"status":"fine"}',
    "an order that is none": lambda line: line[:-1] + b',"key_order":7}',
    "absent values that are none": lambda line: line[:-1] + b',"absent":{}}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_costs_its_row_and_is_named(damage, packed):
    path = packed / ROWS_FILE
    lines = path.read_bytes().splitlines()
    (number,) = [n for n, line in enumerate(lines) if f'"run_id":"{make_record(repeat=3)["run_id"]}"'.encode() in line]
    lines[number] = DAMAGE[damage](lines[number])
    path.write_bytes(b"\n".join(lines))
    with pytest.warns(UnreadableRecordWarning) as warned:
        frame = records.load(packed)
    assert len(frame) == 6
    assert [str(warning.message).startswith(f"left out: {path}:{number + 1}: ") for warning in warned] == [True]
    assert records.read_latest_row(packed, make_record(repeat=3)["run_id"]) is None
    assert records.read_latest_row(packed, make_record(repeat=5)["run_id"]) is not None


HEADERS = {
    "empty": b"",
    "a row": b'{"run_id":"0123456789abcdef","attempt":0}',
    "later": b'{"format":"fsdp-bench rows","format_version":2,"shared":{},"key_order":{}}',
    "no version": b'{"format":"fsdp-bench rows","shared":{},"key_order":{}}',
    "no object": b'{"format":"fsdp-bench rows","format_version":1,"shared":[],"key_order":{}}',
    "no order": b'{"format":"fsdp-bench rows","format_version":1,"shared":{},"key_order":{"":[1]}}',
    "deep": b'{"format":"fsdp-bench rows","shared":' + b"[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_damaged_first_line_costs_the_packed_rows_with_one_warning_and_no_attempt_twice(header, packed):
    path = packed / ROWS_FILE
    path.write_bytes(HEADERS[header] + b"\n" + path.read_bytes().partition(b"\n")[2])
    records.write_row(packed, make_record(repeat=77))
    with pytest.warns(UnreadableRecordWarning, match=rf"{ROWS_FILE}:1: .*none of its rows") as warned:
        assert len(records.load(packed)) == 1
    assert len(warned) == 1
    assert records.list_attempts(packed, make_record(repeat=4)["run_id"]) in ([0], [0, 1])
    with pytest.raises(FileExistsError):
        records.write_row(packed, make_record(repeat=4))


def test_a_line_twice_and_a_file_that_is_none_are_named(packed, tmp_path):
    lines = read_lines(packed)
    (packed / ROWS_FILE).write_text("\n".join([*lines, lines[2]]))
    contents = records.read_latest_attempts(packed)
    assert len(contents.records) == 7
    assert contents.unreadable[0].endswith("is in line 3 already")
    (packed / ROWS_FILE).unlink()
    (packed / ROWS_FILE).symlink_to(ROWS_FILE)
    assert "symbolic links" in records.read_latest_attempts(packed).unreadable[0]
    (packed / ROWS_FILE).unlink()
    (packed / ROWS_FILE).mkdir()
    assert records.read_latest_attempts(packed).records == []
    assert records.list_attempts(packed, make_record()["run_id"]) == []


def test_shared_values_of_one_row_cannot_be_changed_through_another(packed):
    first, *others = records.read_latest_attempts(packed).records
    assert all(first["config"] is not row["config"] for row in others)
    lists = [row["losses"] for row in [first, *others] if "losses" in row]
    assert len({id(values) for values in lists}) == len(lists) > 1
    run_id = make_record(repeat=1)["run_id"]
    row = records.read_latest_row(packed, run_id)
    row["config"]["model"]["name"] = "another"
    row["losses"].clear()
    row = records.read_latest_row(packed, run_id)
    assert row["config"]["model"]["name"] != "another"
    assert row["losses"]


# ---- readers while a store is packed

WHILE_PACKED = """
import sys
from pathlib import Path
from bench.records.packing import pack_store
pack_store(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_readers_miss_nothing_while_a_store_is_packed(number, tmp_path):
    store = write_store(tmp_path / "store", [make_record(repeat=number) for number in range(100)])
    expected = records.load(store)
    done, seen = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seen.append(records.load(store).equals(expected))
            seen.append(len(records.read_all_attempts(store).records) == 100)
            seen.append(records.read_latest_row(store, expected["run_id"][30]) is not None)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    subprocess.run([sys.executable, "-c", WHILE_PACKED, str(store)], cwd=ROOT, check=True)
    done.set()
    for reader in readers:
        reader.join()
    assert read_files(store) == {}
    assert len(seen) > 6
    assert all(seen)


def test_a_run_that_is_packed_between_two_looks_at_its_folder_is_read(live, monkeypatch):
    expected = records.load(live)
    listed = records.reading.os.scandir
    packed_once: list[bool] = []

    def pack_after_the_first_run(folder: Any) -> Any:
        entries = listed(folder)
        if Path(folder) != live and not packed_once:
            packed_once.append(True)
            pack_store(live)
        return entries

    monkeypatch.setattr(records.reading.os, "scandir", pack_after_the_first_run)
    found = records.load(live)
    assert packed_once
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.slow
def test_two_that_pack_one_store_at_once_lose_nothing(live):
    expected = records.load(live)
    packing = [subprocess.Popen([sys.executable, "-c", WHILE_PACKED, str(live)], cwd=ROOT) for _ in range(3)]
    assert [process.wait() for process in packing] == [0, 0, 0]
    assert read_files(live) == {}
    pd.testing.assert_frame_equal(records.load(live), expected)


# ---- commands


@pytest.mark.long
@pytest.mark.slow
def test_commands_say_of_a_packed_store_what_they_say_of_files(tmp_path, capsys):
    rows = make_default_sweep()
    earlier = [row | {"git_sha": "c" * 40, "started_at": "2026-05-03T10:00:00+00:00"} for row in rows]
    live, packed = tmp_path / "live", tmp_path / "packed"
    for kind in (live, packed):
        write_store(kind / "after", rows)
        write_store(kind / "before", earlier)
    for name in ("after", "before"):
        pack_store(packed / name)
    outputs = []
    for kind in (live, packed):
        said = [
            compare.main([str(kind / "before"), str(kind / "after")]),
            history.main([str(kind)]),
            report.main([str(kind / "after"), "--output", str(tmp_path / f"report-{kind.name}"), "--figures", "2"]),
        ]
        outputs.append((said, capsys.readouterr().out.replace(str(kind), "STORE").replace(f"report-{kind.name}", "")))
    assert outputs[0] == outputs[1]
    figures = [
        {path.name: path.read_bytes() for path in (tmp_path / f"report-{kind}" / "figures").iterdir()}
        for kind in ("live", "packed")
    ]
    assert figures[0] == figures[1] != {}


def test_the_command_packs_and_unpacks(live, tmp_path, capsys):
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    assert main(["pack", str(live), "--output", str(packed)]) == 0
    assert capsys.readouterr().out == f"{packed / ROWS_FILE}\n10 rows: 10 new, 0 predictions replaced or dropped\n"
    assert main(["pack", str(live), "--output", str(packed)]) == 0
    assert "10 rows: 0 new" in capsys.readouterr().out
    assert main(["unpack", str(packed), "--output", str(unpacked)]) == 0
    assert read_files(unpacked) == read_files(live)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["pack", "{tmp}/nowhere"], "STORE={tmp}/nowhere is not valid"),
        (["pack", "{tmp}/nowhere", "--output", "{tmp}/new"], "STORE={tmp}/nowhere is not valid"),
        (["pack", "{tmp}"], "holds no rows to pack"),
        (["unpack", "{tmp}", "--output", "{tmp}/new"], "holds no rows to unpack"),
        (["unpack", "{live}", "--output", "{packed}"], "choose a folder without rows.jsonl"),
        (["unpack", "{packed}", "--output", "{changed}"], "choose a folder that has no other row at"),
        (["pack", "{live}", "--output", "{live}/{run}/0.json"], "cannot be read or written"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(typed, words, live, packed, tmp_path, capsys):
    changed = tmp_path / "changed"
    shutil.copytree(live, changed)
    path = next(changed.glob("*/0.json"))
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    names = {
        "tmp": tmp_path,
        "live": live,
        "packed": packed,
        "changed": changed,
        "run": make_record(repeat=1)["run_id"],
    }
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main([part.format(**names) for part in typed]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words.format(**names) in said.err
    assert said.err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() if path.name[0] != "."} == {
        path: content for path, content in before.items() if path.name[0] != "."
    }
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_into_a_packed_store_repeats_nothing_and_writes_forced_runs_beside_it(tmp_path):
    store = tmp_path / "store"
    asked = [
        *("model=gpt_tiny", "model.hidden_size=32", "model.num_layers=2", "model.vocabulary_size=128"),
        *("mode=predict", "hardware=a100_80gb", "gpus=1,2", f"store={store}", "report=false"),
    ]
    assert run_command("bench.sweep", "-m", *asked).returncode == 0
    assert run_command("bench.records", "pack", str(store)).returncode == 0
    assert read_files(store) == {}
    before = (store / ROWS_FILE).read_bytes()
    again = run_command("bench.sweep", "-m", *asked)
    assert again.returncode == 0, again.stderr
    assert read_files(store) == {}
    forced = run_command("bench.sweep", "-m", *asked, "force=true")
    assert forced.returncode == 0, forced.stderr
    assert sorted(Path(name).name for name in read_files(store)) == ["1.json", "1.json"]
    assert (store / ROWS_FILE).read_bytes() == before
    assert list(records.load(store)["attempt"]) == [1, 1]
    assert run_command("bench.records", "pack", str(store)).returncode == 0
    assert read_files(store) == {}
    assert (store / ROWS_FILE).read_bytes() == before, "equal predictions are an empty diff"


def test_a_changed_file_is_read_anew(packed):
    run_id = make_record(repeat=1)["run_id"]
    assert records.read_latest_row(packed, run_id)["mfu"] is None
    lines = [line[:-1] + ',"mfu":0.5}' for line in read_lines(packed)]
    (packed / ROWS_FILE).write_text("\n".join(lines))
    assert records.read_latest_row(packed, run_id)["mfu"] == 0.5
    (packed / ROWS_FILE).unlink()
    assert records.read_latest_row(packed, run_id) is None
    with pytest.raises(FileNotFoundError):
        records.read_row(records.get_row_path(packed, run_id, 0))
