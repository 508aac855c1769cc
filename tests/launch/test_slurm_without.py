"""A cluster without accounting and without GPUs: what cannot be known is not claimed, what can be is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.sweep
from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    LONG_RUN,
    call_main,
    find_run_attempts,
    format_store_override,
    list_job_processes,
    run_jobs_command,
    submit_sweep,
    wait_for_training,
)
from tests.fake_model import read_attempts_by_run
from tests.slurm_cluster import SlurmTestCluster, list_descendants, remove_slurm_variables, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
