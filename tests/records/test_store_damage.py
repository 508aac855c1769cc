"""One damaged row, claim or submission stops nothing but itself, and no value of a measured row loses it."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from pathlib import Path

import pytest

from bench import compare, history, records, report
from bench.launch import attempt as attempts
from bench.launch.attempt import Attempt, write_lost_row
from bench.launch.slurm import submission_status, submissions
from bench.launch.slurm.submissions import JobArray, SubmittedRun
from bench.rank.memory_probe import MemoryPeaks
from bench.rank.row import build_configured_columns, build_environment_columns, build_measured_columns
from bench.rank.run_rank import RankOutcome
from bench.rank.timed_loop import RankSamples
from bench.records import claims
from bench.reporting.page.run_details import build_details
from tests.conftest import compose_run_config
from tests.records_fixture import make_record

RUN = compose_run_config("model=gpt_tiny")
ROW = {**build_configured_columns(RUN), **build_environment_columns([]), "started_at": "2026-01-01T00:00:00+00:00"}
END = {"status": "error", "error": "somebody's cause", "finished_at": "2026-01-01T00:00:01+00:00"}
OWNER = {"job": "1", "restart": 0}


# ---- what was measured is written, and read back as it was


@pytest.mark.slow
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_kept(loss, tmp_path):
    row = make_record(losses=[2.5, loss], final_loss=loss, first_nonfinite_loss_step=1)
    path = records.write_row(tmp_path, row)
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    (read,) = records.read_latest_attempts(tmp_path).records
    for found in (read["losses"][1], read["final_loss"], records.load(tmp_path)["final_loss"][0]):
        assert found == loss or (math.isnan(found) and math.isnan(loss))
    assert read["first_nonfinite_loss_step"] == 1
    assert report.main([str(tmp_path), "--output", str(tmp_path / "report")]) == 0
    assert "loss not finite from step 1" in (tmp_path / "report" / "index.html").read_text()


def test_the_lost_row_of_a_nonsense_configuration_is_written(tmp_path):
    row = json.loads(json.dumps(ROW))
    row["config"]["optimizer"]["learning_rate"] = math.inf
    row["config"]["model"]["name"] = row["model"] = "half a pair: \ud800"
    claims.take_claim(tmp_path, row, OWNER, 4096)
    claim = claims.find_claim(tmp_path, RUN.run_id)
    assert write_lost_row(claim, status="error", error="killed")
    assert os.listdir(tmp_path / claims.CLAIMS_FOLDER) == []
    found = records.read_latest_row(tmp_path, RUN.run_id)
    assert found["config"]["optimizer"]["learning_rate"] == math.inf
    assert found["model"] == r"half a pair: \ud800"


# ---- one row that is none


DAMAGE = {
    "format 0": ({"format": 0}, "format"),
    "format -1": ({"format": -1}, "format"),
    "format true": ({"format": True}, "format"),
    "a text for a number": ({"world_size": "abc"}, 'world_size="abc"'),
    "an object for a number": ({"seed": {}}, "seed={}"),
    "a list for a truth": ({"git_clean": []}, "git_clean=[]"),
    "infinity for a whole number": ({"world_size": math.inf}, "world_size=Infinity"),
    "too large": ({"parameters": 10**30}, "parameters=1000"),
    "negative": ({"peak_allocated_bytes": -1}, "peak_allocated_bytes=-1"),
    "status": ({"status": "fine"}, 'status="fine"'),
    "attempt": ({"attempt": []}, "attempt=[]"),
    "sharding factor": ({"sharding_factor": "x"}, 'sharding_factor="x"'),
    "surrogate": ({"model": "\ud800"}, "surrogate"),
    "run_id": ({"run_id": "../../etc"}, 'run_id="../../etc"'),
    "trace": ({"trace": "../secret"}, 'trace="../secret"'),
    "time": ({"started_at": "yesterday"}, 'started_at="yesterday"'),
    "step time nan": ({"step_time_median_s": math.nan}, "step_time_median_s=NaN"),
    "step time inf": ({"step_time_median_s": math.inf}, "step_time_median_s=Infinity"),
    "step time zero": ({"step_time_median_s": 0.0}, "step_time_median_s=0.0"),
    "step time negative": ({"step_time_median_s": -1.0}, "step_time_median_s=-1.0"),
    "step time text": ({"step_time_median_s": "fast"}, 'step_time_median_s="fast"'),
    "step time huge": ({"step_time_median_s": 1e308}, "step_time_median_s=1e+308"),
    "config": ({"config": [1]}, "config=[1]"),
    "model": ({"config": {"model": "t5"}}, 'config.model="t5"'),
    "ranks": ({"ranks": [{"step_times_s": [0.1, "x"]}]}, "ranks[0].step_times_s"),
    "health": ({"ranks": [{"health": "slow"}]}, "ranks[0].health"),
    "health's node": ({"ranks": [{"health": {"matmul_tflops": 1.0}}]}, "ranks[0].health.node"),
    "spans": ({"ranks": [{"busy_spans_s": [[1.0]]}]}, "ranks[0].busy_spans_s"),
    "devices": ({"environment": {"devices": {"rank 0": 5}}}, "environment.devices.rank 0=5"),
    "prediction": ({"prediction": {"memory": {}}}, "prediction.memory"),
    "losses": ({"losses": [1.0, None]}, "losses=null"),
}  # fmt: skip
WHOLE = {
    "nested": (b'{"format": 1, "config": ' + b"[" * 100_000, "nested too deeply"),
    "a list": (b"[]", "format"),
    "nothing": (b"", "not whole JSON"),
    "half": (b'{"format": 1, "run', "not whole JSON"),
    "bytes": (b"\xff\xfe{}", "not text"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> tuple[Path, Path]:
    """Two stores of the same configuration, run five times with one commit and five times with the next."""
    root = tmp_path_factory.mktemp("healthy")
    for name, commit, day in (("base", "a" * 40, "04"), ("candidate", "b" * 40, "05")):
        for repeat in range(5):
            at = f"2026-05-{day}T10:0{repeat}:00+00:00"
            records.write_row(root / name, make_record(repeat=repeat, git_sha=commit, started_at=at))
    return root / "base", root / "candidate"


def damaged(values: dict[str, object]) -> bytes:
    row = {"format": 1, **make_record(repeat=9), **values}
    return json.dumps(row).encode()


@pytest.mark.parametrize("kind", [*DAMAGE, *WHOLE])
def test_a_row_that_is_none_is_left_out_with_a_sentence(kind, healthy, tmp_path, capsys):
    content, names = (damaged(DAMAGE[kind][0]), DAMAGE[kind][1]) if kind in DAMAGE else WHOLE[kind]
    _, candidate = healthy
    for row in candidate.iterdir():
        (tmp_path / row.name).symlink_to(row)
    store = tmp_path / "store"
    store.mkdir()
    for row in (path for path in candidate.iterdir() if path.is_dir()):
        (store / row.name).mkdir()
        (store / row.name / "0.json").write_bytes((row / "0.json").read_bytes())
    file = store / "0123456789abcdef" / "0.json"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.warns(records.UnreadableRecordWarning) as told:
        assert len(records.load(store)) == 5
    (warning,) = told
    assert str(file) in str(warning.message)
    assert names in str(warning.message)
    assert len(records.read_latest_attempts(store).records) == 5
    assert records.read_latest_row(store, "0123456789abcdef") is None
    assert compare.main([str(healthy[0]), str(store)]) == 0
    assert names in capsys.readouterr().out
    assert history.main([str(healthy[0]), str(store)]) == 0
    assert names in capsys.readouterr().out


def test_what_is_no_file_is_left_out(healthy, tmp_path):
    run = tmp_path / "0123456789abcdef"
    run.mkdir()
    os.mkfifo(run / "0.json")
    (run / "1.json").symlink_to("1.json")
    (run / "2.json").symlink_to("/dev/zero")
    Path(os.fsdecode(os.fsencode(run) + b"/\xff")).mkdir()
    (run / "3.json").mkdir()
    found = records.read_latest_attempts(tmp_path)
    assert found.records == []
    assert len(found.unreadable) == 3
    assert records.read_latest_row(tmp_path, run.name) is None


# ---- an interval takes samples enough


INTERVALS = ("step_time_ci_low_s", "step_time_ci_high_s")


ENOUGH = [(1, False, False), (5, False, False), (6, True, False), (20, True, True)]


@pytest.mark.parametrize(("steps", "interval", "p95"), ENOUGH)
def test_rows_of_too_few_steps_have_no_interval(steps, interval, p95, tmp_path):
    row = make_record(steps=steps, step_time_ci_low_s=0.04, step_time_ci_high_s=0.08)
    records.write_row(tmp_path, row)
    (read,) = records.read_latest_attempts(tmp_path).records
    assert [read[name] is not None for name in INTERVALS] == [interval, interval]
    assert (read["step_time_p95_s"] is not None) == p95
    page = build_details(read, "0.json", "a run")
    (times,) = (dict(block["facts"]) for block in page if block["title"].startswith("Step times"))
    assert ("95 % interval of the median" in times) == interval
    assert ("95 %" in times) == p95


@pytest.mark.parametrize(("steps", "interval", "p95"), ENOUGH)
def test_a_run_of_too_few_steps_gets_no_interval(steps, interval, p95):
    config = compose_run_config("model=gpt_tiny", f"measurement.steps={steps}")
    peaks = MemoryPeaks(1, 1, 1, 1, 1, 0)
    times = [0.1 + 0.001 * step for step in range(steps)]
    samples = RankSamples(
        times, [math.nan] * steps, setup_s=1.0, skipped_steps=0, peaks=peaks, exposed_communication=None
    )
    row = build_measured_columns(config, [RankOutcome(0, "node-a", samples=samples)])
    assert [row[name] is not None for name in INTERVALS] == [interval, interval]
    assert (row["step_time_p95_s"] is not None) == p95
    assert row["first_nonfinite_loss_step"] == 0


# ---- claims


FOREIGN = {"attempt": 0, "owner": {"job": "--user=root", "restart": 0}, "row": {**ROW, "attempt": 0}}
GARBAGE = [
    json.dumps(FOREIGN).encode(),
    b"",
    b"\0" * 4096,
    b"[]",
    b'{"attempt": "x", "owner": {}, "row": {}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("content", GARBAGE)
def test_a_claim_that_cannot_be_read_is_put_aside(content, tmp_path):
    claim = claims.take_claim(tmp_path, ROW, OWNER, 4096)
    claim.path.write_bytes(content)
    long_ago = time.time() - 2 * claims.MAX_WRITE_DELAY_S
    os.utime(claim.path, (long_ago, long_ago))
    assert claims.find_claim(tmp_path, RUN.run_id) is None
    again = claims.take_claim(tmp_path, ROW, {"job": "2", "restart": 0}, 4096)
    kept = [path for path in again.path.parent.iterdir() if path.name.startswith(".unreadable-")]
    assert [path.read_bytes() for path in kept] == [content]
    again.write_row({**END, "error": "the second's"})
    claim.write_row({**END, "error": "the first's: it lives"})
    rows = [row["error"] for row in records.read_all_attempts(tmp_path).records]
    assert sorted(rows) == ["the first's: it lives", "the second's"]


def test_a_claim_is_given_time_to_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "MAX_WRITE_DELAY_S", 3600.0)
    claim = claims.take_claim(tmp_path, ROW, OWNER, 4096)
    whole = claim.path.read_bytes()
    claim.path.write_bytes(b"")
    monkeypatch.setattr(time, "sleep", lambda seconds: claim.path.write_bytes(whole))
    with pytest.raises(claims.RunClaimedError):
        claims.take_claim(tmp_path, ROW, {"job": "2", "restart": 0}, 4096)


def test_a_claim_whose_row_is_none_is_put_aside_when_it_is_broken(tmp_path):
    claim = claims.take_claim(tmp_path, {"run_id": RUN.run_id, "colour": "red"}, OWNER, 4096)
    assert not claim.break_claim(END)
    assert [path.name[:12] for path in claim.path.parent.iterdir()] == [".unreadable-"]


def test_a_claim_stays_where_its_row_cannot_be_written(tmp_path, monkeypatch):
    claim = claims.take_claim(tmp_path, ROW, OWNER, 4096)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claims, "write_row", full)
    with pytest.raises(OSError, match="No space"):
        claim.break_claim(END)
    assert claims.find_claim(tmp_path, RUN.run_id) == claim
    monkeypatch.undo()
    assert claim.break_claim(END)


def test_no_link_is_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    store = tmp_path / "store"
    (store / RUN.run_id).mkdir(parents=True)
    (store / RUN.run_id / ".row-0").symlink_to(precious)
    claim = claims.take_claim(store, ROW, OWNER, 4096)
    claim.reserved_file.unlink()
    claim.reserved_file.symlink_to(precious)
    claim.write_row(END)
    assert precious.read_text() == "mine"
    assert records.read_latest_row(store, RUN.run_id)["error"] == END["error"]


# ---- a row that the store does not take


def refused(tmp_path, monkeypatch, write) -> tuple[Attempt, Path]:
    """An attempt, and the empty temporary folder that it has."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(attempts, "WRITE_RETRY_DELAYS_S", (0,))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    attempt = Attempt.begin(RUN, tmp_path / "store", OWNER, {"launcher": "local", "sweep": "test"})
    monkeypatch.setattr(claims, "write_row", write)
    return attempt, folder


def test_a_row_that_is_refused_is_kept_in_a_private_file(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    attempt, folder = refused(tmp_path, monkeypatch, full)
    guess = folder / f"{RUN.run_id}-0.json"
    guess.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="the row is kept in") as told:
        attempt.finish([], {"status": "error", "error": "something"})
    (kept,) = set(folder.iterdir()) - {guess}
    assert str(kept) in str(told.value)
    assert not (tmp_path / "victim").exists()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert records.read_row(kept)["error"] == "something"


def test_a_row_that_came_into_the_store_after_all_leaves_no_copy(tmp_path, monkeypatch):
    def late(*arguments, **options):
        records.write_row(*arguments, **options)
        raise OSError(5, "Input/output error")

    attempt, folder = refused(tmp_path, monkeypatch, late)
    attempt.finish([], {"status": "error", "error": "something"})
    assert list(folder.iterdir()) == []
    assert records.list_attempts(tmp_path / "store", RUN.run_id) == [0]
    assert claims.find_claim(tmp_path / "store", RUN.run_id) is None


# ---- submissions


def submission(store: Path) -> submissions.Submission:
    entry = SubmittedRun(RUN.run_id, RUN.label, False, 0, build_configured_columns(RUN))
    array = JobArray("0-1x1", "fsdp-bench-0", 1, 1, 10, 60.0, [entry])
    return submissions.write_submission(
        store, "test", {"name": "slurm"}, "code", [array], submissions.create_submission_name()
    )


def test_a_submission_is_read_as_it_was_entered(tmp_path):
    entered = submission(tmp_path)
    assert submissions.list_submissions(tmp_path) == [entered]


def changed(**values: object) -> bytes:
    array = {"name": "0-1x1", "job_name": "fsdp-bench-0", "nodes": 1, "tasks_per_node": 1, "time_limit_min": 10}
    entry = {"run_id": RUN.run_id, "label": "x", "search": False, "attempts_before": 0}
    arrays = [{**array, "expected_s": 60.0, "entries": [{**entry, **values.pop("entry", {})}], **values}]
    return json.dumps({"sweep": "s", "submitted_at": "t", "cluster": {}, "code": "c", "arrays": arrays}).encode()


SUBMISSIONS = {
    **{f"garbage {number}": content for number, content in enumerate(GARBAGE)},
    "a name that leaves the folder": changed(name="../../.."),
    "an option for SLURM": changed(job_name="--user=root"),
    "nodes": changed(nodes="many"),
    "unknown field": changed(colour="red"),
    "run_id": changed(entry={"run_id": "../.."}),
    "another's row": changed(entry={"row": {"run_id": "0" * 16}}),
}


@pytest.mark.parametrize("kind", SUBMISSIONS)
def test_a_submission_that_cannot_be_read_blocks_nothing(kind, tmp_path):
    good = submission(tmp_path)
    bad = tmp_path / submissions.JOBS_FOLDER / "20260101-000000-abcdef"
    bad.mkdir()
    (bad / "submission.json").write_bytes(SUBMISSIONS[kind])
    with pytest.warns(records.UnreadableRecordWarning, match=str(bad)):
        assert submissions.list_submissions(tmp_path) == [good]


@pytest.mark.parametrize("text", ["", "--user=root", "12; rm", "x" * 1000])
def test_what_is_no_job_id_is_none(text, tmp_path):
    entered = submission(tmp_path)
    (entered.folder / entered.arrays[0].name / "job_id").write_text(text)
    assert entered.read_job_id(entered.arrays[0]) is None


class Trap:
    """Executes something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_lost_jobs_row_is_written_without_its_pickle(tmp_path):
    import pickle

    from bench.launch.slurm.submission_status import LOST, SubmittedRunStatus

    entered = submission(tmp_path)
    (array,) = entered.arrays
    (entered.folder / array.name / "17_submitted.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    submission_status._write_missing_row(
        tmp_path, SubmittedRunStatus(entered, array, 0, array.entries[0], "17", LOST, None, None, [])
    )
    assert not (tmp_path / "sprung").exists()
    assert "its job 17 never came to the run" in records.read_latest_row(tmp_path, RUN.run_id)["error"]


def test_a_tracker_that_a_store_names_is_not_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    entered = submission(tmp_path / "store")
    path = entered.folder / "submission.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tracker": {"name": ".evil"}}))
    entered.close()
    (found,) = submissions.list_submissions(tmp_path / "store", include_closed=True)
    array = found.arrays[0]
    standing = submission_status.SubmittedRunStatus(
        found, array, 0, array.entries[0], None, submission_status.DONE, None, None, []
    )
    submission_status.send_closed_submissions(tmp_path / "store", [standing])
    assert "is not one of the suite's" in capsys.readouterr().out


# ---- what a row names is not imported


def test_a_model_that_a_row_names_is_not_imported(tmp_path, monkeypatch):
    from bench.validation.measured import parse_recorded_config

    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = build_configured_columns(RUN)["config"]
    assert parse_recorded_config({"config": config}).run_id == RUN.run_id
    for section, field in (("model", "family"), ("strategy", "name")):
        for name in (".evil", "evil.", "os.path", "../evil", 5, None):
            changed = {**config, section: {**config[section], field: name}}
            with pytest.raises(ValueError, match=f"{section}.{field}="):
                parse_recorded_config({"config": changed})
    with pytest.raises(ValueError, match="interpolation"):
        parse_recorded_config({"config": {**config, "model": {**config["model"], "name": "${oc.env:HOME}"}}})


def test_names_of_submissions_sort_by_the_time_they_were_given():
    """The newest submission of a run is known by its name, within one second too."""
    names = [submissions.create_submission_name() for _ in range(50)]
    assert names == sorted(set(names))
