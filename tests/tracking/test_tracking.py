"""Attempts on their way to a tracker: real sweeps, read back from what the real client of wandb wrote."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path

import pytest
from matplotlib import figure

from bench import records
from bench.config.compose import compose_config
from bench.core.errors import UsageError
from bench.hardware.detect import DetectedDevice
from bench.planning.request import parse_sweep_request
from bench.records import COLUMN_NAMES
from bench.tracking import TrackerClient, load_tracker
from bench.tracking.tracked_run import (
    build_attempt_id,
    build_report_run,
    build_tracked_run,
    format_configuration,
    format_scaling_series,
    list_all_attempts,
)
from tests.fake_model import FAKE_MODEL_OVERRIDES, OOM_REQUEST_BYTES, SweepProcess, read_attempts_by_run, run_sweep
from tests.fake_wandb import add_wandb_login, fake_wandb, remove_wandb_login
from tests.records_fixture import make_record, write_store
from tests.slow_tracker import SlowTracker
from tests.wandb_files import OfflineRun, read_offline_runs, read_run

CPU = DetectedDevice("cpu", "a processor", 0)
FAULTS = ("none", "oom:forward:1", "raise:forward:1")


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    remove_wandb_login(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> SweepProcess:
    """A sweep with a run that is well, one that runs out of memory and one that fails; nobody is logged in."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        remove_wandb_login(monkeypatch, tmp_path_factory.mktemp("home"))
        return run_sweep(
            tmp_path_factory.mktemp("tracked") / "store",
            *(
                "-m",
                *FAKE_MODEL_OVERRIDES,
                "gpus=2",
                "strategy=ddp",
                "hardware.memory_limit_gib=1",
                "measurement.steps=3",
            ),
            *(f"+model.fault={','.join(FAULTS)}", "tracker=wandb", "tracker.tags=[baseline,mine]"),
        )


def run_and_row(swept: SweepProcess, fault: str) -> tuple[OfflineRun, records.Record]:
    """What the client wrote of a run, and the run's row."""
    (row,) = [row for (row,) in read_attempts_by_run(swept.store).values() if row["config"]["model"]["fault"] == fault]
    return read_offline_runs(swept.store / ".tracking")[build_attempt_id(row)], row


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_holds_everything_its_row_says(swept, fault):
    run, row = run_and_row(swept, fault)
    assert run.id.startswith(f"{row['run_id']}-{row['attempt']}-")
    assert (run.project, run.group, run.job_type) == ("fsdp-bench", "adhoc", "measured")
    assert run.tags == ["ddp", "gpt_tiny", "fp32", row["status"], "measured", "baseline", "mine"]
    assert run.config.items() >= row["config"].items()
    for name in ("environment", "effective", "requested", "git_sha", "torch_version", "attempt"):
        assert run.config[name] == row[name]
    assert run.config["labels"] == "baseline, mine"
    columns = {name: row[name] for name in COLUMN_NAMES if row.get(name) is not None}
    assert run.summary.items() >= columns.items()
    (artifact,) = [files for name, files in run.artifacts.items() if name == f"record-{run.id}"]
    assert json.loads(artifact["record.json"].read_text()) == row
    assert run.notes == (row.get("error") or "")


@pytest.mark.slow
def test_every_step_is_logged(swept):
    run, row = run_and_row(swept, "none")
    *steps, result = run.history
    assert [step["step/loss"] for step in steps] == row["losses"]
    timed = [step for step in steps if step["step/timed"]]
    assert timed == steps[-3:]
    samples = list(zip(*(rank["step_times_s"] for rank in row["ranks"]), strict=True))
    assert [step["step/time_s"] for step in timed] == [max(times) for times in samples]
    assert [step["step/time_fastest_rank_s"] for step in timed] == [min(times) for times in samples]
    for step in timed:
        tokens = 2 * 16  # batch x sequence length
        assert step["step/tokens_per_second_per_gpu"] == pytest.approx(tokens / step["step/time_s"])
        assert step["step/tflops_per_gpu"] == pytest.approx(row["flops"]["model"] / step["step/time_s"] / 1e12)
    assert result["result/tflops_per_gpu"] == row["tflops_per_gpu"]
    assert result["result/world_size"] == 2
    assert result["result/peak_allocated_gib"] == row["peak_allocated_bytes"] / 2**30
    assert [step["_step"] for step in run.history] == list(range(len(run.history)))


@pytest.mark.slow
def test_out_of_memory_is_finished_and_an_error_has_failed_and_both_can_be_seen(swept):
    well, out_of_memory, failed = (run_and_row(swept, fault)[0] for fault in FAULTS)
    assert [run.exit_code for run in (well, out_of_memory, failed)] == [0, 0, 1]
    assert (out_of_memory.name.rpartition(" ")[2], failed.name.rpartition(" ")[2]) == ("oom", "error")
    assert out_of_memory.summary["oom_phase"] == "forward"
    (table,) = out_of_memory.artifacts[f"run-{out_of_memory.id}-out_of_memory"].values()
    values = json.loads(table.read_text())
    shown = dict(zip(values["columns"], values["data"][0], strict=True))
    assert (shown["model"], shown["phase"], shown["rank"]) == ("gpt_tiny", "forward", 1)
    assert shown["oom_gib"] == OOM_REQUEST_BYTES / 2**30


@pytest.mark.slow
def test_a_sweep_says_where_its_runs_are_and_leaves_nothing_behind(swept):
    assert swept.process.returncode == 1  # for the error
    assert "nobody is logged in" in swept.output
    assert "3 runs offline under" in swept.output
    assert swept.output.count("wandb: nobody") == 1
    assert len(read_offline_runs(swept.store / ".tracking")) == 3
    assert not swept.wait_for_leftover_pids()
    assert not list(Path.cwd().glob("wandb"))


@pytest.mark.slow
def test_what_is_sent_goes_out_between_runs_never_during_one(swept):
    """Each run's file was begun after its row was written, and finished before the next run started."""
    found = sorted(
        (run_and_row(swept, fault) for fault in FAULTS),
        key=lambda pair: records.get_row_path(swept.store, pair[1]["run_id"], 0).stat().st_mtime,
    )
    times = []
    for run, row in found:
        times.append(records.get_row_path(swept.store, row["run_id"], 0).stat().st_mtime)
        times.append(max(path.stat().st_mtime for path in run.folder.glob("*.wandb")))
    assert times == sorted(times)


# A server that cannot be reached, or does not answer


def closed_port() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.long
@pytest.mark.slow
def test_an_unreachable_server_fails_and_delays_nothing(monkeypatch, tmp_path):
    add_wandb_login(monkeypatch, closed_port())
    ran = run_sweep(
        tmp_path / "store", *FAKE_MODEL_OVERRIDES, "gpus=1", "strategy=ddp", "tracker=wandb", "tracker.time_limit_s=30"
    )
    assert ran.process.returncode == 0
    assert "cannot be reached: runs are kept offline" in ran.output
    assert ran.output.count("cannot be reached") == 1
    assert "Traceback" not in ran.output
    (run,) = read_offline_runs(tmp_path / "store" / ".tracking").values()
    assert run.exit_code == 0


def wandb_tracker(**fields: object):
    return load_tracker({**compose_config({"tracker": "wandb"})["tracker"], **fields})


@pytest.mark.long
@pytest.mark.slow
def test_a_server_that_never_answers_costs_the_time_limit_once(monkeypatch, tmp_path):
    store = write_store(tmp_path / "store", [make_record(repeat=repeat) for repeat in range(3)])
    said: list[str] = []
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        server.is_silent = True
        client = TrackerClient(wandb_tracker(time_limit_s=10), store, said.append)
        started = time.monotonic()
        client.send(list_all_attempts(store))
        client.send(list_all_attempts(store))  # as after the next run
        assert time.monotonic() - started < 30
    assert len(said) == 1
    assert "runs are kept offline" in said[0]
    assert len(read_offline_runs(store / ".tracking")) == 3


@pytest.mark.long
@pytest.mark.slow
def test_a_tracker_that_hangs_is_killed_at_its_time_limit(tmp_path):
    store = write_store(tmp_path / "store", [make_record(repeat=repeat) for repeat in range(3)])
    said: list[str] = []
    client = TrackerClient(SlowTracker("tests.slow_tracker"), store, said.append)
    started = time.monotonic()
    client.send(list_all_attempts(store))
    client.send(list_all_attempts(store))
    assert 5 <= time.monotonic() - started < 20
    assert client.counts["sent"] == 1
    assert len(said) == 1
    assert "not sent within 5 s" in said[0]
    assert "python -m bench.track" in said[0]


@pytest.mark.slow
def test_a_login_that_is_none_is_said_and_runs_are_kept(monkeypatch, tmp_path):
    store = write_store(tmp_path / "store", [make_record()])
    said: list[str] = []
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        server.rejects_key = True
        TrackerClient(wandb_tracker(), store, said.append).send(list_all_attempts(store))
    assert len(said) == 1
    assert "invalid API key" in said[0]
    assert len(read_offline_runs(store / ".tracking")) == 1


# What a run is made of


def test_ids_are_fixed_and_tell_every_attempt_from_every_other():
    row = make_record()
    others = [{"attempt": 1}, {"started_at": "2026-05-05T10:00:00+00:00"}, {"hosts": "node-b"}, {"git_sha": "f" * 40}]
    ids = [
        build_attempt_id(row),
        *(build_attempt_id(row | other) for other in others),
        build_attempt_id(make_record(repeat=1)),
    ]
    assert len(set(ids)) == len(ids)
    assert build_attempt_id(json.loads(json.dumps(row))) == ids[0]
    assert build_attempt_id(row | {"finished_at": "2026-05-04T11:00:00+00:00"}) == ids[0]


def test_a_configuration_is_the_same_at_every_commit_and_repeat_and_another_with_any_other_knob():
    row = make_record()
    assert format_configuration(make_record(repeat=3, git_sha="f" * 40)) == format_configuration(row)
    config = {**row["config"], "compile": True}
    assert format_configuration(make_record(config=config)) != format_configuration(row)
    two, four = (make_record(world_size=size, strategy="fsdp", sharding_factor=size) for size in (2, 4))
    assert format_configuration(two) != format_configuration(four)
    assert format_scaling_series(two) == format_scaling_series(four)
    assert format_scaling_series(two) != format_scaling_series(make_record(world_size=2, strategy="ddp"))


@pytest.mark.parametrize(
    ("status", "failed", "preempted"),
    [
        ("ok", False, False),
        ("oom", False, False),
        ("skipped", False, False),
        ("error", True, False),
        ("timeout", True, False),
        ("preempted", True, True),
    ],
)
def test_what_counts_as_failed(status, failed, preempted, tmp_path):
    run = build_tracked_run(make_record(status=status, error=None if status == "ok" else "why"), tmp_path / "0.json")
    assert (run.failed, run.preempted) == (failed, preempted)
    assert status in run.tags
    assert run.notes == ("" if status == "ok" else "why")
    assert status == "ok" or run.name.endswith(status)


@pytest.mark.parametrize("folder", ["measured/cpu_2core", "measured/cpu_memory", "predicted/a100_80gb"])
def test_rows_of_every_evidence_become_runs(folder):
    for path in list_all_attempts(Path("results") / folder)[:40]:
        row = records.read_row(path)
        run = build_tracked_run(row, path)
        assert run.job_type == row["evidence"]
        assert run.summary["status"] == row["status"]
        assert len(run.name) <= 128
        assert all(0 < len(tag) <= 64 for tag in run.tags)
        json.dumps(run.to_plain_values(), allow_nan=False)


def test_a_trace_is_sent_with_its_row(tmp_path):
    (tmp_path / "0.trace.json.gz").write_bytes(b"trace")
    files = build_tracked_run(make_record(trace="0.trace.json.gz"), tmp_path / "0.json").files
    assert files == {"record.json": str(tmp_path / "0.json"), "trace.json.gz": str(tmp_path / "0.trace.json.gz")}


@pytest.mark.long
@pytest.mark.slow
def test_a_report_in_the_store_is_a_run_with_its_figures(tmp_path):
    assert build_report_run(tmp_path, "default") is None
    (tmp_path / "report" / "figures").mkdir(parents=True)
    for ending in ("png", "svg"):
        figure.Figure().savefig(tmp_path / "report" / "figures" / f"speed.{ending}")
    page = tmp_path / "report" / "index.html"
    said: list[str] = []
    client = TrackerClient(wandb_tracker(), tmp_path, said.append)
    for text in ("first", "first", "second"):
        page.write_text(text)
        run = build_report_run(tmp_path, "default")
        assert run is not None
        client.send(runs=[run])
    assert (client.counts["sent"], client.counts["known"]) == (2, 1)
    written = sorted((tmp_path / ".tracking").glob("wandb/offline-run-*"))
    assert all(folder.name.endswith(run.id) for folder in written)
    sent = [read_run(next(folder.glob("*.wandb"))) for folder in written]
    texts = [made.artifacts[f"report-{run.id}"]["index.html"].read_text() for made in sent]
    assert texts == ["first", "second"]  # as they were when they were sent
    assert sent[0].artifacts[f"report-{run.id}"].keys() == {"index.html", "figures/speed.png", "figures/speed.svg"}
    assert any(key.startswith("figures/speed") for key in sent[0].history[0])
    assert (sent[0].job_type, sent[0].group) == ("report", "default")


# Settings


def test_a_tracker_is_no_part_of_a_runs_identity():
    plain = parse_sweep_request(["model=gpt_tiny"], multirun=False, device=CPU)
    tracked = parse_sweep_request(["model=gpt_tiny", "tracker=wandb", "tracker.tags=[a]"], multirun=False, device=CPU)
    assert tracked.points == plain.points
    assert not plain.tracker.is_active
    assert tracked.tracker == dataclasses.replace(wandb_tracker(), tags=["a"])


def test_wandb_can_be_turned_off_altogether(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not wandb_tracker().is_active


def test_projects_and_entities_come_from_wandbs_own_variables_where_nothing_is_said(monkeypatch):
    assert (wandb_tracker().project_name, wandb_tracker().entity_name) == ("fsdp-bench", None)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert (wandb_tracker().project_name, wandb_tracker().entity_name) == ("ours", "team")
    assert wandb_tracker(project="mine", entity="me").project_name == "mine"


def test_a_trackers_folder_is_the_same_wherever_a_job_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wandb_tracker(folder="here").get_local_folder(Path("store")) == tmp_path / "here"
    assert wandb_tracker().get_local_folder(Path("store")) == Path("store/.tracking")


def test_a_tracker_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"tracker.name=neptune is not valid: choose mlflow, none, wandb"):
        wandb_tracker(name="neptune")


@pytest.mark.slow
def test_the_fake_server_knows_all_that_it_is_asked(monkeypatch, tmp_path):
    """So that a new version of the client, which asks for more, is noticed here first."""
    store = write_store(tmp_path / "store", [make_record(), make_record(status="oom")])
    said: list[str] = []
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        for name, value in {"RUN_ID": "one", "RESUME": "must", "TAGS": "theirs", "NAME": "theirs"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)  # of somebody's own run
        monkeypatch.delenv("WANDB_BASE_URL")
        TrackerClient(wandb_tracker(base_url=server.url), store, said.append).send(list_all_attempts(store))
        assert server.unknown_requests == []
        assert server.runs.keys() == {build_attempt_id(records.read_row(path)) for path in list_all_attempts(store)}
        assert not any("theirs" in json.dumps(run.creation_variables) for run in server.runs.values())
    assert said == []
