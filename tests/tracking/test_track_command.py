"""``python -m bench.track``: a store sent later, as often and as interruptedly as one likes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import records, track
from bench.records import COLUMN_NAMES
from bench.records.packing import pack_store
from bench.tracking.tracked_run import build_attempt_id, list_all_attempts
from tests.conftest import ROOT
from tests.fake_model import wait_until
from tests.fake_wandb import add_wandb_login, fake_wandb, remove_wandb_login
from tests.records_fixture import make_record, write_store
from tests.wandb_files import read_offline_runs


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    remove_wandb_login(monkeypatch, tmp_path / "home")


@pytest.fixture
def store(tmp_path) -> Path:
    """A run that failed, was taken off its machine and then ended well; one out of memory; what was foretold of one."""
    failed = make_record(model="gpt_tiny", status="error", error="rank 1 was killed by SIGKILL", started_at=at(1))
    tried = {"run_id": failed["run_id"], "model": "gpt_tiny"}
    foretold = make_record(evidence="predicted", strategy="fsdp", sharding_factor=2, steps=0)
    return write_store(
        tmp_path / "store",
        [
            failed,
            make_record(**tried, attempt=1, status="preempted", error="stopped by SIGTERM", started_at=at(2)),
            make_record(**tried, attempt=2, started_at=at(3), losses=[9.9, 9.8], steps=2),
            make_record(status="oom", strategy="fsdp1"),
            make_record(evidence="rehearsed", world_size=8),
            foretold,
        ],
    )


def at(hour: int) -> str:
    """An hour of a day."""
    return f"2026-05-04T{hour:02}:00:00+00:00"


def recorded(store: Path) -> dict[str, records.Record]:
    """Every attempt by its id in wandb."""
    return {build_attempt_id(row): row for row in map(records.read_row, list_all_attempts(store))}


def columns(row: records.Record) -> dict[str, object]:
    """What a row says in its columns."""
    return {name: row[name] for name in COLUMN_NAMES if row.get(name) is not None}


@pytest.mark.slow
def test_every_attempt_is_written_offline_once(store, capfd):
    assert track.main([str(store)]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("6 sent, 0 there already\n")
    assert "nobody is logged in" in said.err
    runs, rows = read_offline_runs(store / ".tracking"), recorded(store)
    assert runs.keys() == rows.keys()
    for number, row in rows.items():
        assert runs[number].summary.items() >= columns(row).items()
        assert runs[number].job_type == row["evidence"]
    ends = {row["status"]: (runs[number].exit_code, runs[number].preempting) for number, row in rows.items()}
    assert ends == {"ok": (0, False), "oom": (0, False), "error": (1, False), "preempted": (1, True)}

    assert track.main([str(store), "tracker.mode=offline"]) == 0
    assert capfd.readouterr().out.startswith("0 sent, 6 there already\n")
    (gone,) = (run.folder for run in runs.values() if run.exit_code == 1 and run.preempting)
    shutil.rmtree(gone)
    assert track.main([str(store)]) == 0
    assert capfd.readouterr().out.startswith("1 sent, 5 there already\n")
    assert read_offline_runs(store / ".tracking").keys() == rows.keys()


@pytest.mark.long
@pytest.mark.slow
def test_a_server_gets_every_attempt_once_however_often_it_is_sent(store, monkeypatch, capfd):
    rows = recorded(store)
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        assert track.main([str(store), "tracker.project=ours", "tracker.tags=[baseline]"]) == 0
        said = capfd.readouterr()
        assert said.out == f"6 sent, 0 there already\nwandb: 6 runs at {server.url}/team/ours\n"
        assert server.runs.keys() == rows.keys()
        for number, row in rows.items():
            run = server.runs[number]
            assert run.summary.items() >= columns(row).items()
            assert run.config["model"]["value"] == row["config"]["model"]
            assert run.creation_variables["groupName"] == "default"
            assert run.creation_variables["tags"][-1] == "baseline"
            assert run.complete
            assert run.exit_code == int(row["status"] in ("error", "preempted"))
            assert run.preempting == (row["status"] == "preempted")
        (well,) = [run for number, run in server.runs.items() if rows[number].get("losses")]
        assert [line.get("step/loss") for line in well.history.values()] == [9.9, 9.8, None]
        kept = {artifact.run: artifact for artifact in server.artifacts.values() if artifact.type == "record"}
        written = {build_attempt_id(records.read_row(path)): path.read_bytes() for path in list_all_attempts(store)}
        assert {number: artifact.files["record.json"] for number, artifact in kept.items()} == written
        assert all(artifact.committed for artifact in server.artifacts.values())

        before = len(server.operations)
        assert track.main([str(store), "tracker.project=ours"]) == 0
        assert capfd.readouterr().out.startswith("0 sent, 6 there already\n")
        assert set(server.operations[before:]) <= {"Viewer"}

        pack_store(store)
        assert not list(store.glob("*/0.json"))
        assert track.main([str(store), "tracker.project=ours"]) == 0
        assert capfd.readouterr().out.startswith("0 sent, 6 there already\n")

        history = {number: dict(run.history) for number, run in server.runs.items()}
        shutil.rmtree(store / ".tracking" / "sent")  # as if every note had been lost
        assert track.main([str(store), "tracker.project=ours"]) == 0
        assert server.runs.keys() == rows.keys()
        assert {number: run.history for number, run in server.runs.items()} == history
        kept = {artifact.run: artifact for artifact in server.artifacts.values() if artifact.type == "record"}
        assert {number: artifact.files["record.json"] for number, artifact in kept.items()} == written
        assert server.unknown_requests == []


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupted_upload_is_completed_by_the_next(store, monkeypatch):
    command = [sys.executable, "-m", "bench.track", str(store)]
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        server.silent_after = ("CommitArtifact", 4)
        sending = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert wait_until(lambda: server.is_silent, 60)
        sending.send_signal(signal.SIGKILL)
        sending.wait()
        server.is_silent, server.silent_after = False, None
        noted = list(store.glob(".tracking/sent/*/*.json"))
        assert 0 < len(noted) < 6
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.stdout.startswith(f"{6 - len(noted)} sent, {len(noted)} there already\n"), done.stderr
        assert server.runs.keys() == recorded(store).keys()
        assert all(run.complete for run in server.runs.values())


@pytest.mark.long
@pytest.mark.slow
def test_offline_runs_that_wandb_itself_synchronises_are_not_doubled(store, monkeypatch, capfd):
    assert track.main([str(store)]) == 0
    runs = read_offline_runs(store / ".tracking")
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        folders = [str(run.folder) for run in runs.values()]
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *folders],
            cwd=store.parent,  # where it leaves a log
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        history = {number: dict(run.history) for number, run in server.runs.items()}
        assert history.keys() == runs.keys()
        assert track.main([str(store)]) == 0
        assert {number: run.history for number, run in server.runs.items()} == history


@pytest.mark.long
@pytest.mark.slow
def test_a_server_that_cannot_be_reached_is_said_and_nothing_is_noted(store, monkeypatch, capfd):
    add_wandb_login(monkeypatch, "http://127.0.0.1:1")
    assert track.main([str(store)]) == 1
    said = capfd.readouterr()
    assert said.out == "0 sent, 0 there already, 6 not sent\n"
    assert "cannot be reached" in said.err
    assert not list(store.glob(".tracking/sent/*/*"))
    assert not read_offline_runs(store / ".tracking")


@pytest.mark.slow
def test_a_folder_of_stores_and_a_file_that_is_torn(tmp_path, capfd):
    write_store(tmp_path / "all" / "one", [make_record()])
    write_store(tmp_path / "all" / "two", [make_record(started_at=at(1))])
    torn = tmp_path / "all" / "two" / ("0" * 16) / "0.json"
    torn.parent.mkdir()
    torn.write_text('{"format": 1, "run_id"')
    assert track.main([str(tmp_path / "all"), f"tracker.folder={tmp_path / 'elsewhere'}"]) == 1
    said = capfd.readouterr()
    assert said.out.startswith("2 sent, 0 there already, 1 not sent\n")
    assert str(torn) in said.err
    assert len(read_offline_runs(tmp_path / "elsewhere")) == 2
    assert not (tmp_path / "all" / ".tracking").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nowhere"], ("STORE=nowhere", "a folder")),
        (["README.md"], ("STORE=README.md", "a folder")),
        (["bench"], ("holds no rows",)),
        (["STORE", "tracker.mode=onlin"], ("tracker.mode=onlin", "auto, online, offline")),
        (["STORE", "tracker.mod=online"], ("tracker.mod ", "tracker.mode")),
        (["STORE", "mode=online"], ("mode ", "tracker.mode")),
        (["STORE", "tracker=none"], ("tracker=none", "choose mlflow, wandb")),
        (["STORE", "tracker=neptune"], ("tracker=neptune", "mlflow, none, wandb")),
        (["STORE", "tracker.project=a/b"], ("tracker.project=a/b", "128 characters")),
        (["STORE", "tracker.entity="], ("tracker.entity=", "a name or null")),
        (["STORE", "tracker.base_url=wandb.example.org"], ("tracker.base_url=wandb.example.org", "https://")),
        (["STORE", "tracker.tags=baseline"], ("tracker.tags=baseline", "a list")),
        (["STORE", f"tracker.tags=[{'x' * 65}]"], ("tracker.tags=xxx", "64 characters")),
        (["STORE", "tracker.time_limit_s=0"], ("tracker.time_limit_s=0", "at least 1")),
        (["STORE", "tracker.time_limit_s=nan"], ("tracker.time_limit_s=nan", "at least 1")),
        (["STORE", "tracker.time_limit_s=soon"], ("tracker.time_limit_s=soon", "a number")),
        (["STORE", "tracker.folder=README.md"], ("tracker.folder=README.md", "a folder")),
        (["STORE", "gpus"], ("'gpus'", "key=value")),
    ],
)
def test_what_is_mistyped_is_said_in_one_sentence_and_nothing_is_sent(arguments, parts, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    store = write_store(tmp_path / "STORE", [make_record()])
    assert track.main([str(store) if word == "STORE" else word for word in arguments]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert all(part in said.err for part in parts), said.err
    assert not (store / ".tracking").exists()
