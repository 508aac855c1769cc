"""Submitting to a SLURM that refuses, does not answer, or accepts what nobody lives to see; what is asked before."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.sweep
from bench.launch.slurm import submissions
from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    LONG_RUN,
    ONE_RANK,
    call_main,
    find_run_attempts,
    format_store_override,
    run_jobs_command,
    submit_sweep,
)
from tests.fake_model import read_attempts_by_run, wait_until
from tests.slurm_cluster import SLURM_TIMEOUT_S, SlurmTestCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPES = ("-m", *FAKE_MODEL_RUN, "cluster=slurm_test", "gpus=1,2")
"""Two arrays."""

SBATCH = """#!/bin/sh
case "$*" in *--test-only*) exec {sbatch} "$@" ;; esac
if mkdir {used} 2>/dev/null; then
  {first}
  exit 1
fi
exec {sbatch} "$@"
"""

TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2"


@pytest.fixture
def first_sbatch(tmp_path, monkeypatch):
    """Puts another sbatch in SLURM's place, which does something else the first time that it is to submit a job."""

    def replace(first: str) -> None:
        sbatch, folder = shutil.which("sbatch"), tmp_path / "bin"
        folder.mkdir()
        program = folder / "sbatch"
        program.write_text(SBATCH.format(sbatch=sbatch, used=tmp_path / "used", first=first.format(sbatch=sbatch)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return replace


@contextlib.contextmanager
def nothing_starts(cluster: SlurmTestCluster) -> Iterator[None]:
    """Jobs wait, of every partition that sweeps of this file name."""
    cluster.scontrol("update", "partitionname=main", "state=down")
    try:
        yield
    finally:
        cluster.scontrol("update", "partitionname=main", "state=up")


def refused(store: Path, *command: str) -> str:
    """The one sentence in which a command refuses."""
    done = call_main(bench.sweep.main, *command, format_store_override(store))
    assert done.returncode == 2, done.stdout
    (sentence,) = done.stderr.splitlines()
    return sentence


def test_an_array_that_is_refused_takes_those_before_it_along(idle_slurm, tmp_path):
    """Each alone could be submitted, as far as can be asked beforehand; both together are one too many."""
    limit = ("sacctmgr", "--immediate", "modify", "qos", "bench", "set")
    idle_slurm.run(*limit, "MaxSubmitJobsPerUser=2")
    held = idle_slurm.run("sbatch", "--parsable", "--qos=bench", "--hold", "--output=/dev/null", "--wrap=true").strip()
    limits = ("show", "assoc_mgr", "flags=qos", "qos=bench")
    try:
        with nothing_starts(idle_slurm):
            idle_slurm.wait_for("the limit", lambda: "MaxSubmitJobsPU=2(1)" in idle_slurm.scontrol(*limits))
            sentence = refused(tmp_path, *SHAPES, "cluster.qos=bench")
    finally:
        idle_slurm.run(*limit, "MaxSubmitJobsPerUser=-1")
    assert sentence.startswith("cluster=slurm_test does not take these jobs: ")
    assert "Job violates accounting/QOS policy" in sentence
    assert sentence.endswith("Nothing of it is left in the queue.")
    assert idle_slurm.squeue("-o", "%A") == [held]
    assert read_attempts_by_run(tmp_path) == {}
    assert run_jobs_command("collect", tmp_path).stdout == f"Nothing submitted from {tmp_path} is open.\n"


@pytest.mark.parametrize("dry_run", ["false", "true"])
def test_a_limit_of_the_partition_is_known_before_anything_is_submitted(idle_slurm, tmp_path, dry_run):
    """The time limit comes from the plan: ten minutes, of which a partition of one knows nothing."""
    sentence = refused(tmp_path, *SHAPES, "cluster.partition=short", f"dry_run={dry_run}")
    assert sentence.startswith("cluster=slurm_test refuses array 0-1x1, of 10 min a run: ")
    assert "Requested time limit is invalid" in sentence
    assert "choose cluster.time_limit_min" in sentence
    assert submissions.list_submissions(tmp_path, include_closed=True) == []


def test_a_limit_shorter_than_the_estimate_is_said(idle_slurm, tmp_path):
    plan = (*FAKE_MODEL_RUN, *ONE_RANK, "measurement.steps=1000000", "dry_run=true", format_store_override(tmp_path))
    short = call_main(bench.sweep.main, *plan, "cluster.time_limit_min=2")
    assert short.returncode == 0, short.stderr
    assert "Too short: a run of array 0-1x1 is expected to take" in short.stdout
    assert "its time limit is 2 min. Choose cluster.time_limit_min." in " ".join(short.stdout.split())
    assert "Too short" not in call_main(bench.sweep.main, *plan).stdout


@pytest.mark.parametrize("taken", [False, True])
def test_a_passing_fault_is_passed_over_and_nothing_is_submitted_twice(idle_slurm, tmp_path, first_sbatch, taken):
    """A controller that is too slow to answer may have taken the job."""
    first_sbatch(('{sbatch} "$@" >/dev/null; ' if taken else "") + TIMED_OUT)
    with nothing_starts(idle_slurm):
        done = submit_sweep(tmp_path / "store", *SHAPES[1:])
        assert "Socket timed out on send/recv operation; trying again in 2 s." in done.stderr
        names = idle_slurm.squeue("-o", "%j")
    assert len(names) == len(set(names)) == 2


@pytest.mark.long
def test_jobs_run_though_their_submitter_died_the_moment_they_were_accepted(idle_slurm, tmp_path, first_sbatch):
    store = tmp_path / "store"
    first_sbatch('{sbatch} "$@"; kill -KILL $PPID')
    died = subprocess.run([sys.executable, "-m", "bench.sweep", *SHAPES, format_store_override(store)], check=False)
    assert died.returncode == -9
    cut_short = run_jobs_command("collect", store)
    assert cut_short.returncode == 1
    assert "1 not submitted" in cut_short.stdout
    assert "The same sweep command submits again what has no result." in cut_short.stdout
    again = submit_sweep(store, *SHAPES[1:])
    assert "Submitted job" in again.stdout
    started = time.monotonic()
    watched = run_jobs_command("watch", store)
    assert watched.returncode == 0, watched.stdout
    assert "2 done" in watched.stdout
    assert "not submitted" not in watched.stdout
    assert "None" not in watched.stdout
    assert time.monotonic() - started < SLURM_TIMEOUT_S
    found = read_attempts_by_run(store)
    assert [[row["status"] for row in run] for run in found.values()] == [["ok"], ["ok"]]
    assert len({row["job_id"] for run in found.values() for row in run}) == 2
    assert len(idle_slurm.squeue("--states=all", "--format=%j", "--name", ",".join(_names(store)))) == 2


def _names(store: Path) -> list[str]:
    return [
        array.job_name
        for submission in submissions.list_submissions(store, include_closed=True)
        for array in submission.arrays
    ]


@pytest.mark.long
def test_a_submission_that_is_interrupted_leaves_nothing_behind(idle_slurm, tmp_path, first_sbatch):
    """By Ctrl-C, when the first of two arrays has been accepted."""
    store = tmp_path / "store"
    first_sbatch('{sbatch} "$@"; kill -INT $PPID; sleep 1')
    with nothing_starts(idle_slurm):
        command = [sys.executable, "-m", "bench.sweep", *SHAPES, format_store_override(store)]
        stopped = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's & has it ignored
        )
        assert stopped.returncode == 1, stopped.stderr
        assert "Traceback" not in stopped.stderr
        assert idle_slurm.squeue() == []
    assert "Submitted" not in stopped.stdout
    assert submissions.list_submissions(store) == []


def test_a_job_that_is_held_says_how_it_is_released(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_RANK, "cluster.sbatch=[--hold,--mail-type=END]")
    (job,) = idle_slurm.squeue("-o", "%A")
    assert f"waits: held: scontrol release {job}" in run_jobs_command("collect", tmp_path).stdout
    assert "MailType=END" in idle_slurm.scontrol("show", "job", job)


def test_a_store_that_the_nodes_do_not_see_is_said(idle_slurm, tmp_path):
    store = tmp_path / "store"
    submit_sweep(store, *FAKE_MODEL_RUN, *ONE_RANK, "cluster.sbatch=[--hold]")
    (job,) = idle_slurm.squeue("-o", "%A")
    store.rename(tmp_path / "elsewhere")
    idle_slurm.scontrol("release", job)
    idle_slurm.wait_for("the end of the job", lambda: idle_slurm.read_job_state(job) == "FAILED")
    (tmp_path / "elsewhere").rename(store)
    assert run_jobs_command("collect", store).returncode == 1
    (row,) = find_run_attempts(store)
    assert row["status"] == "error"
    assert f"its job {job} could not open the file for its output" in row["error"]
    assert f"may not see store={store}" in row["error"]


def test_an_element_cancelled_alone_before_it_ran_is_noted_as_that(idle_slurm, tmp_path):
    with nothing_starts(idle_slurm):
        submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK, "seed=1,2,3")
        (array,) = idle_slurm.squeue("-o", "%F")
        idle_slurm.run("scancel", f"{array}_1")
        collected = run_jobs_command("collect", tmp_path)
        assert "2 queued, 0 done, 1 failed" in collected.stdout
        found = [row for run in read_attempts_by_run(tmp_path).values() for row in run]
        assert [(row["status"], row["error"]) for row in found] == [
            ("skipped", f"its job {array}_1 was cancelled before it came to run")
        ]
        assert run_jobs_command("cancel", tmp_path).returncode == 1
    found = [row for run in read_attempts_by_run(tmp_path).values() for row in run]
    assert [row["status"] for row in found] == ["skipped"] * 3
    assert wait_until(lambda: submissions.list_submissions(tmp_path) == [], 1)
