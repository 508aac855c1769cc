"""Sweeps on the test cluster, as a person types them, and what tests need to see of them."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import bench.jobs
import bench.sweep
from bench.records import Record
from tests.fake_model import FAKE_MODEL_OVERRIDES, read_attempts_by_run, wait_until
from tests.slurm_cluster import SLURM_TIMEOUT_S, list_pids

FAKE_MODEL_RUN = (*(override for override in FAKE_MODEL_OVERRIDES if override != "hardware=cpu"), "strategy=ddp")
"""A run of a second, of a model that misbehaves on request: ``+model.fault=kill:backward:3``."""

TWO_NODES = ("cluster=slurm_test", "cluster.gpus_per_node=2", "gpus=4")
"""Four ranks, two on each of two nodes."""

ONE_NODE = ("cluster=slurm_test", "cluster.gpus_per_node=2", "gpus=2")

ONE_RANK = ("cluster=slurm_test", "gpus=1")

LONG_RUN = ("+model.step_s=1", "measurement.steps=600")
"""Outlives any test."""


def call_main(main: Callable[[list[str]], int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command called in this process, which has torch imported: seconds faster than `run_command`."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def submit_sweep(store: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench.sweep -m OVERRIDES``, which must succeed; the jobs are SLURM's from then on."""
    done = call_main(bench.sweep.main, "-m", *overrides, format_store_override(store))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def format_store_override(store: Path) -> str:
    """A store's path in Hydra's grammar."""
    return "store='" + str(store).replace("'", "\\'") + "'"


def run_jobs_command(action: str, store: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench.jobs ACTION STORE``."""
    return call_main(bench.jobs.main, action, str(store), *options)


def find_run_attempts(store: Path, **columns: object) -> list[Record]:
    """All attempts of the one run that has these columns or fields of its model."""
    matching_runs = [
        run
        for run in read_attempts_by_run(store).values()
        if run and all({**run[-1], **run[-1]["config"]["model"]}.get(name) == value for name, value in columns.items())
    ]
    assert len(matching_runs) == 1, f"{len(matching_runs)} runs with {columns}"
    return matching_runs[0]


def wait_for_training(store: Path, num_runs: int = 1, timeout_s: float = SLURM_TIMEOUT_S) -> bool:
    """Wait until so many runs of a store are past their first forward pass; returns whether they are."""

    def count_training_runs() -> int:
        claimed = list((store / ".running").glob("*.claim"))
        return sum(any("forward" in log.read_text() for log in store.glob(f"{claim.stem}/*.log")) for claim in claimed)

    return wait_until(lambda: count_training_runs() >= num_runs, timeout_s)


def list_job_processes(conf: str) -> list[int]:
    """Live processes that belong to any job of the cluster with this slurm.conf."""
    pids = []
    for pid in list_pids():
        variables = _read_strings(pid, "environ")
        if f"SLURM_CONF={conf}" in variables and any(variable.startswith("SLURM_JOB_ID=") for variable in variables):
            pids.append(pid)
    return pids


def check_no_processes(conf: str) -> None:
    """No process of any job is there any more, after some time to go; else the message says which is."""
    gone = wait_until(lambda: not list_job_processes(conf), SLURM_TIMEOUT_S)
    assert gone, [_describe_job_process(pid) for pid in list_job_processes(conf)]


def _describe_job_process(pid: int) -> str:
    job = " ".join(
        line for line in _read_strings(pid, "environ") if line.startswith(("SLURM_JOB_ID=", "SLURM_STEP_ID="))
    )
    return f"{pid} of {job}: {' '.join(_read_strings(pid, 'cmdline'))}"


def _read_strings(pid: int, file_name: str) -> list[str]:
    """Environment or command line of a process; empty where it has just ended, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/{file_name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
