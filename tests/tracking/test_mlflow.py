"""MLflow, through its real client: on its real server, in a database, and where there is no server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import compare, track
from bench.records import read_row
from bench.tracking.tracked_run import build_attempt_id, list_all_attempts
from tests.conftest import needs
from tests.records_fixture import make_record, write_store
from tests.repeated_runs import make_runs

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    needs("mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # SQLAlchemy's, of MLflow
]

STARTED_AT = "2026-05-04T01:00:00+00:00"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63f8cfc0f01f00050001ffa5"
    "3b7a3b0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of MLflow's own server, which keeps runs and artifacts."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = [f"--backend-store-uri=sqlite:///{folder / 'runs.db'}", f"--artifacts-destination={folder / 'artifacts'}"]
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1", *kept]
    log = (folder / "log").open("w")
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    yield address
    os.killpg(process.pid, 15)
    process.wait(60)
    log.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run that ended well, one that failed, one out of memory, and a report."""
    ended = make_record(model="gpt_tiny", started_at=STARTED_AT, losses=[9.9, 9.8], steps=2)
    failed = make_record(strategy="ddp", status="error", error="rank 1 was killed by SIGKILL")
    folder = write_store(tmp_path / "store", [ended, failed, make_record(status="oom", strategy="fsdp1")])
    (folder / "report" / "figures").mkdir(parents=True)
    (folder / "report" / "index.html").write_text("<p>report</p>")
    (folder / "report" / "figures" / "throughput.png").write_bytes(PIXEL)
    return folder


def read_runs(uri: str, experiment: str) -> dict[str, Any]:
    """All runs of an experiment by our id, as a client of its own reads them."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return {run.data.tags["bench.id"]: run for run in client.search_runs([found.experiment_id])}


def list_artifacts(uri: str, run_id: str, folder: str | None = None) -> set[str]:
    from mlflow import MlflowClient

    entries = MlflowClient(tracking_uri=uri).list_artifacts(run_id, folder)
    nested = [list_artifacts(uri, run_id, entry.path) for entry in entries if entry.is_dir]
    return {entry.path for entry in entries if not entry.is_dir}.union(*nested)


def test_a_server_gets_every_attempt_once_with_its_results_files_and_figures(
    server: str, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = [str(store), "tracker=mlflow", f"tracker.tracking_uri={server}", "tracker.experiment=once"]
    assert track.main(typed) == 0
    assert "4 sent" in capfd.readouterr().out
    runs = read_runs(server, "once")
    paths = {build_attempt_id(read_row(path)): path for path in list_all_attempts(store)}
    rows = {attempt_id: read_row(path) for attempt_id, path in paths.items()}
    assert set(rows) < set(runs)
    assert len(runs) == 4
    for attempt_id, row in rows.items():
        run = runs[attempt_id]
        assert run.info.status == ("FAILED" if row["status"] == "error" else "FINISHED")
        assert run.data.params["model.name"] == row["model"]
        assert download(server, run.info.run_id, "record.json", tmp_path) == paths[attempt_id].read_text()
        if row["status"] == "ok":
            assert run.data.metrics["result/tflops_per_gpu"] == row["tflops_per_gpu"]
            assert run.data.metrics["peak_allocated_bytes"] == row["peak_allocated_bytes"]
    (report_id,) = set(runs) - set(rows)
    assert {"index.html", "figures/throughput.png"} <= list_artifacts(server, runs[report_id].info.run_id)

    assert track.main(typed) == 0  # nothing is doubled, whether it is noted what was sent or not
    assert "0 sent, 4 there already" in capfd.readouterr().out
    assert track.main([*typed, f"tracker.folder={tmp_path / 'elsewhere'}"]) == 0
    assert len(read_runs(server, "once")) == 4


def download(uri: str, run_id: str, name: str, folder: Path) -> str:
    from mlflow import MlflowClient

    return Path(MlflowClient(tracking_uri=uri).download_artifacts(run_id, name, str(folder))).read_text()


def test_a_regression_is_a_failed_run_whose_note_says_what_is_slower(server: str, tmp_path: Path) -> None:
    base = write_store(tmp_path / "base", make_runs([0.1, 0.1002, 0.0999, 0.1001, 0.0998]))
    slower = make_runs([0.12, 0.1201, 0.1199, 0.1202, 0.1198], day="2026-05-05")
    candidate = write_store(tmp_path / "candidate", slower)
    alert = ["--alert", "tracker=mlflow", f"tracker.tracking_uri={server}", "tracker.experiment=alerts"]
    assert compare.main([str(base), str(candidate), *alert]) == 1
    (run,) = read_runs(server, "alerts").values()
    assert run.info.status == "FAILED"
    assert run.data.tags["alert"] == "Regression: candidate against base"
    assert "1 regression" in run.data.tags["mlflow.note.content"]
    assert run.data.metrics["regressions"] == 1


def test_without_a_server_runs_are_kept_beside_the_store_and_sent_when_there_is_one(
    server: str, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert track.main([str(store), "tracker=mlflow", "tracker.experiment=later"]) == 0
    database = f"sqlite:///{store / '.tracking' / 'mlflow.db'}"
    assert len(read_runs(database, "later")) == 4
    nowhere = [str(store), "tracker=mlflow", "tracker.tracking_uri=http://127.0.0.1:9", "tracker.experiment=later"]
    assert track.main(nowhere) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capfd.readouterr().err
    assert track.main([str(store), "tracker=mlflow", f"tracker.tracking_uri={server}", "tracker.experiment=later"]) == 0
    assert len(read_runs(server, "later")) == 4


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("tracker.tracking_uri=ftp://host", "tracker.tracking_uri=ftp://host is not valid: choose an address as"),
        ("tracker.experimnt=x", "did you mean tracker.experiment?"),
        ("tracker.tags=['']", "tracker.tags"),
    ],
)
def test_what_is_mistyped_is_a_sentence(typed: str, words: str, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert track.main([str(store), "tracker=mlflow", typed]) == 2
    assert words in capfd.readouterr().err
