"""Whatever happens to the files of a store: no traceback, exit code 0, 1 or 2, and what is whole is read.

Damage is made to real rows, claims and submissions: any value anywhere becomes another one, or goes, or bytes do.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import compare, history, records, report
from bench.comparison import build_histories as history_of
from bench.comparison import compare_records as compare_rows
from bench.core.files import encode_record
from bench.launch.attempt import describe_outcome, describe_this_process
from bench.launch.run_on_host import write_dead_attempt_row
from bench.launch.slurm import submissions
from bench.launch.slurm.submissions import JobArray, SubmittedRun
from bench.rank.row import build_configured_columns, build_environment_columns
from bench.records import claims
from bench.records.packed_rows import ROWS_FILE, encode_rows, open_packed_rows
from bench.reporting.page.run_details import build_details
from bench.reporting.tables.table import prepare_table
from bench.tracking.tracked_run import build_tracked_run
from tests.conftest import ROOT, compose_run_config
from tests.records_fixture import make_record

RUN = compose_run_config("model=gpt_tiny")
ROW = {**build_configured_columns(RUN), **build_environment_columns([]), "started_at": "2026-01-01T00:00:00+00:00"}


def examples(count: int) -> settings:
    """So many examples, or, for `make fuzz`, four times as many each time."""
    return settings(max_examples=4 * count if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else count)


def shortest(folder: str, **values: object) -> dict[str, Any]:
    """The shortest committed row of a folder with some values, as it was written."""
    packed = [open_packed_rows(path.parent) for path in (ROOT / "results" / folder).rglob(ROWS_FILE)]
    found = (row.decode() for rows in packed for row in rows.list_rows())
    return min((row for row in found if values.items() <= row.items()), key=lambda row: (len(str(row)), row["run_id"]))


REAL = [
    shortest("measured", status="ok", world_size=2),
    shortest("measured", status="oom"),
    shortest("measured", strategy="pipeline", status="ok"),
    shortest("predicted", status="ok"),
    {"format": 1, **make_record(repeat=3)},
]

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "NaN", "Infinity", "\ud800", "\0", "[/a]", "$\\frac$", "../..", "<script>", "ok", "x" * 5000]),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 5e-324, 1e-300, 1e15, 0.0, -0.0]),
    TEXTS,
)
DEEP = st.sampled_from([10, 100, 400]).map(lambda depth: json.loads("[" * depth + "]" * depth))
VALUES = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)),
    DEEP,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value of a JSON value, the first of a list standing for all of it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """A JSON value of which some parts are other ones, or gone."""
    value = copy.deepcopy(whole)
    for place in draw(st.lists(st.sampled_from(places(whole)[1:]), min_size=1, max_size=3)):
        container = value
        for key in place[:-1]:
            container = _inner(container, key)
        if isinstance(container, dict):
            container[place[-1]] = draw(VALUES)
            if not draw(st.integers(0, 3)):
                del container[place[-1]]
        elif isinstance(container, list) and container:
            container[0] = draw(VALUES)
    return value


def _inner(container: Any, key: Any) -> Any:
    """A part of a value, which an earlier change may have taken away."""
    if isinstance(container, dict):
        return container.get(key)
    return container[0] if isinstance(container, list) and container else None


def as_text(value: Any) -> bytes:
    """As a foreign tool might write it: NaN, infinity and halves of surrogate pairs included."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> bytes:
    """A file that was changed as JSON, or as bytes."""
    if draw(st.integers(0, 3)):
        return as_text(draw(changed(whole)))
    content = as_text(whole)
    at = draw(st.integers(0, len(content)))
    match draw(st.integers(0, 3)):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at + 1 :]
        case 2:
            return draw(st.binary(max_size=64))
        case _:
            return content[:at] + draw(st.sampled_from([b"[", b"{", b'"', b"\0"])) * draw(st.sampled_from([1, 100_000]))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """A store of one configuration, run three times with one commit and three times with the next."""
    store = tmp_path_factory.mktemp("healthy")
    for repeat in range(6):
        at = f"2026-05-0{1 + repeat // 3}T10:0{repeat}:00+00:00"
        records.write_row(store, make_record(repeat=repeat, git_sha="ab"[repeat // 3] * 40, started_at=at))
    return store


@pytest.fixture(scope="module")
def healthy_rows(healthy) -> list[dict[str, Any]]:
    return records.read_latest_attempts(healthy).records


ROWS = st.sampled_from(range(len(REAL))).flatmap(lambda number: damaged(REAL[number]))


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.long
@pytest.mark.slow
@examples(500)
@given(content=ROWS)
def test_a_damaged_row_is_left_out_or_harmless(content, tmp_path_factory, healthy_rows):
    path = put(tmp_path_factory.getbasetemp() / "row" / "0.json", content)
    try:
        row = records.read_row(path)
    except ValueError:
        return
    records.to_frame([row])
    prepare_table([row, *healthy_rows])
    describe_outcome(row)
    build_details(row, "0.json", "a run")
    if row["evidence"] != "published":
        json.dumps(build_tracked_run(row, path).to_plain_values())
    compare_rows([row, *healthy_rows], healthy_rows)
    history_of([row, *healthy_rows])
    assert json.loads(encode_record(row))


@pytest.mark.long
@pytest.mark.slow
@examples(8)
@given(contents=st.lists(ROWS, min_size=30, max_size=30), most=st.integers(2, 6))
def test_commands_read_a_store_with_damaged_rows(contents, most, tmp_path_factory, healthy, capsys):
    root = tmp_path_factory.mktemp("damaged")
    for number, content in enumerate(contents):
        put(root / f"{number:016x}" / "0.json", content)
    for run in healthy.iterdir():
        put(root / run.name / "0.json", (run / "0.json").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", records.UnreadableRecordWarning)
        assert len(records.load(root)) >= 6
    assert compare.main([str(healthy), str(root)]) in (0, 1, 2)
    assert history.main([str(root)]) in (0, 2)
    page = root / "page"
    assert report.main([str(root), "--output", str(page), "--figures", str(most), "--no-interactive"]) == 0
    capsys.readouterr()


PACKED = [*map(json.loads, encode_rows(sorted(REAL, key=lambda row: (row["run_id"], row["attempt"]))))]


@pytest.mark.slow
@examples(150)
@given(data=st.data())
def test_damaged_lines_of_packed_rows_are_left_out_or_harmless(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    contents = [as_text(line) for line in PACKED]
    for number in data.draw(st.lists(st.sampled_from([0, *range(len(PACKED))]), min_size=1, max_size=2)):
        contents[number] = data.draw(damaged(PACKED[number]))
    put(folder / ROWS_FILE, b"\n".join(contents))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", records.UnreadableRecordWarning)
        frame = records.load(folder)
    rows = records.read_all_attempts(folder).records
    assert len(frame) <= len(rows) <= b"\n".join(contents).count(b"\n")
    for row in rows:
        assert json.loads(encode_record(row))
        assert row["attempt"] in records.list_attempts(folder, row["run_id"])
        assert records.read_latest_row(folder, row["run_id"]) is not None
    if contents[0] == as_text(PACKED[0]):
        whole = sum(content == as_text(line) for content, line in zip(contents[1:], PACKED[1:], strict=True))
        assert len(rows) >= whole


CLAIM = {"attempt": 0, "owner": {"process": describe_this_process()}, "row": {**ROW, "attempt": 0}}


@pytest.mark.slow
@examples(250)
@given(content=damaged(CLAIM))
def test_a_damaged_claim_blocks_nothing(content, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    path = put(store / claims.CLAIMS_FOLDER / f"{RUN.run_id}.claim", content)
    os.utime(path, (0, 0))
    claims.find_claim(store, RUN.run_id)
    assert claims.list_claimed_runs(store) == [RUN.run_id]
    write_dead_attempt_row(store, RUN.run_id)
    try:
        claim = claims.take_claim(store, ROW, {"process": describe_this_process()}, 4096)
    except records.RunClaimedError as taken:
        claim = taken.claim
        assert "process" not in claim.owner
        claim.break_claim({"status": "error", "error": "its job is gone", "finished_at": ROW["started_at"]})
        claim = claims.take_claim(store, ROW, {"process": describe_this_process()}, 4096)
    claim.write_row({"status": "error", "error": "the next", "finished_at": ROW["started_at"]})
    newest = records.read_latest_row(store, RUN.run_id)
    assert newest is not None
    assert newest["error"] == "the next"
    assert claims.list_claimed_runs(store) == []


def submitted() -> dict[str, Any]:
    """What `submission.json` says."""
    entry = SubmittedRun(RUN.run_id, RUN.label, False, 0, build_configured_columns(RUN))
    array = JobArray("0-1x1", "fsdp-bench-0", 1, 1, 10, 60.0, [entry, entry])
    values = asdict(submissions.Submission(Path(), "test", "2026-01-01T00:00:00Z", {"name": "slurm"}, "code", [array]))
    del values["folder"]
    return values


@examples(250)
@given(content=damaged(submitted()))
def test_a_damaged_submission_blocks_nothing(content, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    put(store / submissions.JOBS_FOLDER / "20260101-000000-abcdef" / "submission.json", content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", records.UnreadableRecordWarning)
        found = submissions.list_submissions(store)
    for submission in found:
        for array in submission.arrays:
            assert (submission.folder / array.name).parent == submission.folder
            assert submission.read_job_id(array) is None
            assert array.max_gpu_hours is not None
            assert [array.build_element_id("7", index) for index in range(len(array.entries))]
