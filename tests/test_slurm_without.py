"""A cluster without accounting and without GPUs: what cannot be known is not claimed, what can be is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.sweep
from tests.cluster_sweeps import FAKE, LONG, attempts, called, job_processes, jobs, quoted, submit, training
from tests.fake_model import rows
from tests.slurm_cluster import Cluster, descendants, running_cluster, without_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE_RANK = ("cluster=slurm_test", "cluster.gpu_request=none", "gpus=1")


@pytest.fixture(scope="module")
def bare() -> Iterator[Cluster]:
    """One node without GPUs, and no accounting."""
    with (
        running_cluster({"NODES": "1", "GPUS": "0", "ACCOUNTING": "0"}) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in set(os.environ) - set(without_slurm(os.environ)):
            patch.delenv(name)
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


def test_nodes_without_gpus_are_not_asked_for_them(bare, tmp_path):
    refused = called(bench.sweep.main, *FAKE, "cluster=slurm_test", "gpus=1", quoted(tmp_path))
    assert refused.returncode == 2
    assert "choose cluster.gpu_request=none" in refused.stderr
    assert called(bench.sweep.main, *FAKE, *ONE_RANK, "dry_run=true", quoted(tmp_path)).returncode == 0


def test_cancelled_jobs_are_told_from_lost_ones_and_gpu_hours_are_unknown(bare, tmp_path):
    bare.scontrol("update", "partitionname=main", "state=down")
    try:
        submit(tmp_path, *FAKE, *LONG, *ONE_RANK, "seed=1,2,3")
        (array,) = bare.squeue("-o", "%F")
        bare.run("scancel", f"{array}_1")
        collected = jobs("collect", tmp_path)
        assert "2 queued, 0 done, 1 failed, GPU-hours unknown (sacct does not answer)" in collected.stdout
        assert _ends(tmp_path) == {f"{array}_1": "skipped"}
        assert jobs("cancel", tmp_path).returncode == 1
    finally:
        bare.scontrol("update", "partitionname=main", "state=up")
    assert _ends(tmp_path) == {f"{array}_{index}": "skipped" for index in range(3)}


def test_of_a_job_that_died_is_said_what_the_controller_remembers(bare, tmp_path):
    submit(tmp_path, *FAKE, *LONG, *ONE_RANK)
    (job,) = bare.squeue("-o", "%A")
    assert training(tmp_path)
    found = job_processes(os.environ["SLURM_CONF"])
    for process in {*found, *descendants(found)}:
        if b"submitit" in _command(process) and b"srun" not in _command(process):
            os.kill(process, signal.SIGKILL)
    bare.wait_for("the end of the job", lambda: bare.job_state(job) == "FAILED")
    collected = jobs("collect", tmp_path)
    assert "GPU-hours unknown" in collected.stdout
    (row,) = attempts(tmp_path)
    assert row["status"] == "error"
    assert row["error"].startswith(f"SLURM ended job {job}: FAILED on testnode1, NonZeroExitCode")


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _ends(store: Path) -> dict[str, str]:
    return {row["job_id"]: row["status"] for run in rows(store).values() for row in run}
