"""Trackers on a cluster whose nodes have no way to a server: the login node has."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import bench.sweep
from bench.hardware.hardware_file import read_hardware_file
from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    LONG_RUN,
    ONE_NODE,
    call_main,
    find_run_attempts,
    format_store_override,
    list_job_processes,
    run_jobs_command,
    submit_sweep,
    wait_for_training,
)
from tests.conftest import ROOT
from tests.fake_model import read_attempts_by_run
from tests.fake_wandb import add_wandb_login, fake_wandb, remove_wandb_login
from tests.slurm_cluster import SlurmTestCluster, list_descendants, remove_slurm_variables, running_cluster
from tests.wandb_files import read_offline_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.long
def test_a_requeued_run_has_a_run_for_each_attempt_offline_on_its_node_and_sent_when_it_is_collected(
    idle_slurm: SlurmTestCluster, tmp_path, monkeypatch
):
    remove_wandb_login(monkeypatch, tmp_path / "home")
    store = tmp_path / "store"
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        submit_sweep(
            store,
            *(*FAKE_MODEL_RUN, *ONE_NODE, "+model.step_s=1", "measurement.steps=4", "tracker=wandb"),
            "cluster.setup=['export WANDB_MODE=offline']",
        )
        assert wait_for_training(store)
        idle_slurm.run("scontrol", "requeue", idle_slurm.run("squeue", "--noheader", "--format=%i").split()[0])
        watched = run_jobs_command("watch", store)
        assert watched.returncode == 0, watched.stdout + watched.stderr
        first, second = find_run_attempts(store, model="gpt_tiny")
        assert (first["status"], second["status"]) == ("preempted", "ok")

        # A sender that was killed with its job leaves a run without its end: `watch` sends it whole.
        ids = {run.config["attempt"]: run.id for run in read_offline_runs(store / ".tracking").values()}
        assert ids.keys() == {0, 1}
        taken_off, done = (server.runs[ids[attempt]] for attempt in (0, 1))
        assert (taken_off.summary["status"], done.summary["status"]) == ("preempted", "ok")
        assert (taken_off.preempting, done.preempting) == (True, False)
        assert (taken_off.exit_code, done.exit_code) == (1, 0)
        assert len(server.runs) == 2


# --- Calibration on a real SLURM: tasks on two nodes communicate inside nodes and across, and the first writes.


@pytest.mark.long
def test_tasks_of_srun_time_collectives_inside_nodes_and_across(idle_slurm, tmp_path: Path):
    values = yaml.safe_load((ROOT / "conf" / "hardware" / "h200.yaml").read_text())
    values.update(name="known", device="cpu", gpu_names=[])
    known, output = tmp_path / "known.yaml", tmp_path / "mine.yaml"
    known.write_text(yaml.safe_dump(values))
    said = idle_slurm.run(
        *("srun", "--nodes=2", "--ntasks-per-node=2", f"--chdir={ROOT}"),
        *(sys.executable, "-m", "tests.calibrate_anyway", f"hardware={known}", "only=collectives", "quick=true"),
        f"output={output}",
    )
    assert f"Hardware file: {output}" in said
    hardware = read_hardware_file(output)
    assert hardware.speeds is not None
    assert "4 processes on 2 nodes" in hardware.sources["calibration"]
    assert hardware.sources["speeds.links.latency"] == "measured across nodes"
    assert hardware.sources["speeds.links.gloo"] == "measured inside a node"
    residuals = {name for name in hardware.sources if name.startswith("residual of all-reduce")}
    assert residuals == {
        f"residual of all-reduce, {words}"
        for words in ("4 ranks on 2 nodes", "2 ranks on 2 nodes", "2 ranks on 1 node")
    }


# --- Nodes are checked before a run; one that is slower than its kind is named, and left out afterwards.


ONE = (*FAKE_MODEL_RUN, "cluster=slurm_test", "gpus=2", "cluster.check=quick")


def described_as_fast(folder: Path) -> Path:
    """A description of a CPU that promises more than any CPU does."""
    values = yaml.safe_load((ROOT / "results/calibration/cpu_2core.yaml").read_text())
    values |= {"name": "fast", "peak_tflops": {"fp32": 1000.0}}
    values["speeds"]["matmul"] = {"efficiency": {"fp32": 0.5}, "multiprocessors": 1, "half_depth": 64}
    file = folder / "fast.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.long
def test_a_healthy_node_is_on_the_row_with_its_numbers(idle_slurm, tmp_path: Path) -> None:
    submit_sweep(tmp_path, *ONE)
    run_jobs_command("watch", tmp_path)
    (row,) = find_run_attempts(tmp_path)
    assert row["status"] == "ok", row["error"]
    assert row["health_matmul_tflops"] > 0
    assert row["health_all_reduce_gb_s"] > 0
    assert row["failed_nodes"] is None
    assert {rank["health"]["node"] for rank in row["ranks"]} == {row["hosts"]}


@pytest.mark.long
def test_a_slow_node_is_named_and_left_out_when_the_run_is_submitted_again(idle_slurm, tmp_path: Path) -> None:
    store = tmp_path / "store"
    slow = (*ONE, f"hardware={described_as_fast(tmp_path)}", "cluster.exclude_bad=true")
    submit_sweep(store, *slow)
    run_jobs_command("watch", store)
    (first,) = find_run_attempts(store)
    node = first["failed_nodes"]
    assert first["status"] == "error"
    assert f"node {node} failed the health check: matrix products reach" in first["error"]
    again = submit_sweep(store, *slow)
    assert f"Left out, since their last health check failed: {node}" in again.stdout
    run_jobs_command("watch", store)
    _, second = find_run_attempts(store)
    assert second["failed_nodes"] not in (None, node)
    kept = submit_sweep(store, *slow, "cluster.exclude_bad=false")
    assert "Left out" not in kept.stdout
    run_jobs_command("cancel", store)


# --- A cluster without accounting and without GPUs: what cannot be known is not claimed, what can be is said.


ONE_RANK = ("cluster=slurm_test", "cluster.gpu_request=none", "gpus=1")


@pytest.fixture(scope="module")
def bare() -> Iterator[SlurmTestCluster]:
    """One node without GPUs, and no accounting."""
    with (
        running_cluster({"NODES": "1", "GPUS": "0", "ACCOUNTING": "0"}) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in set(os.environ) - set(remove_slurm_variables(os.environ)):
            patch.delenv(name)
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


def test_nodes_without_gpus_are_not_asked_for_them(bare, tmp_path):
    refused = call_main(
        bench.sweep.main, *FAKE_MODEL_RUN, "cluster=slurm_test", "gpus=1", format_store_override(tmp_path)
    )
    assert refused.returncode == 2
    assert "choose cluster.gpu_request=none" in refused.stderr
    assert (
        call_main(
            bench.sweep.main, *FAKE_MODEL_RUN, *ONE_RANK, "dry_run=true", format_store_override(tmp_path)
        ).returncode
        == 0
    )


def test_cancelled_jobs_are_told_from_lost_ones_and_gpu_hours_are_unknown(bare, tmp_path):
    bare.scontrol("update", "partitionname=main", "state=down")
    try:
        submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK, "seed=1,2,3")
        (array,) = bare.squeue("-o", "%F")
        bare.run("scancel", f"{array}_1")
        collected = run_jobs_command("collect", tmp_path)
        assert "2 queued, 0 done, 1 failed, GPU-hours unknown (sacct does not answer)" in collected.stdout
        assert _ends(tmp_path) == {f"{array}_1": "skipped"}
        assert run_jobs_command("cancel", tmp_path).returncode == 1
    finally:
        bare.scontrol("update", "partitionname=main", "state=up")
    assert _ends(tmp_path) == {f"{array}_{index}": "skipped" for index in range(3)}


@pytest.mark.long
def test_of_a_job_that_died_is_said_what_the_controller_remembers(bare, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK)
    (job,) = bare.squeue("-o", "%A")
    assert wait_for_training(tmp_path)
    found = list_job_processes(os.environ["SLURM_CONF"])
    for process in {*found, *list_descendants(found)}:
        if b"submitit" in _command(process) and b"srun" not in _command(process):
            os.kill(process, signal.SIGKILL)
    bare.wait_for("the end of the job", lambda: bare.read_job_state(job) == "FAILED")
    collected = run_jobs_command("collect", tmp_path)
    assert "GPU-hours unknown" in collected.stdout
    (row,) = find_run_attempts(tmp_path)
    assert row["status"] == "error"
    assert row["error"].startswith(f"SLURM ended job {job}: FAILED on testnode1, NonZeroExitCode")


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _ends(store: Path) -> dict[str, str]:
    return {row["job_id"]: row["status"] for run in read_attempts_by_run(store).values() for row in run}
