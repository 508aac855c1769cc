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
from tests.fake_model import OVERRIDES, rows, wait_until
from tests.slurm_cluster import PATIENCE_S

FAKE = (*(override for override in OVERRIDES if override != "hardware=cpu"), "strategy=ddp")
"""A run of a second, of a model that misbehaves on request: ``+model.fault=kill:backward:3``."""

TWO_NODES = ("cluster=slurm_test", "cluster.gpus_per_node=2", "gpus=4")
"""Four ranks, two on each of two nodes."""

ONE_NODE = ("cluster=slurm_test", "cluster.gpus_per_node=2", "gpus=2")

ONE_RANK = ("cluster=slurm_test", "gpus=1")

LONG = ("+model.step_s=1", "measurement.steps=600")
"""Outlives any test."""


def called(main: Callable[[list[str]], int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command called in this process, which has torch imported: seconds faster than `run_command`."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def submit(store: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench.sweep -m OVERRIDES``, which must succeed; the jobs are SLURM's from then on."""
    done = called(bench.sweep.main, "-m", *overrides, quoted(store))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def quoted(store: Path) -> str:
    """A store's path in Hydra's grammar."""
    return "store='" + str(store).replace("'", "\\'") + "'"


def jobs(action: str, store: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench.jobs ACTION STORE``."""
    return called(bench.jobs.main, action, str(store), *options)


def attempts(store: Path, **wanted: object) -> list[Record]:
    """All attempts of the one run that has these columns or fields of its model."""
    found = [
        run
        for run in rows(store).values()
        if run and all({**run[-1], **run[-1]["config"]["model"]}.get(name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, f"{len(found)} runs with {wanted}"
    return found[0]


def training(store: Path, number: int = 1, timeout_s: float = PATIENCE_S) -> bool:
    """Wait until so many runs of a store are past their first forward pass; returns whether they are."""

    def logs() -> int:
        claimed = list((store / ".running").glob("*.claim"))
        return sum(any("forward" in log.read_text() for log in store.glob(f"{claim.stem}/*.log")) for claim in claimed)

    return wait_until(lambda: logs() >= number, timeout_s)


def job_processes(conf: str) -> list[int]:
    """Live processes that belong to any job of the cluster with this slurm.conf."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or is a zombie
            variables = (folder / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={conf}".encode() in variables
            if ours and any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables):
                found.append(int(folder.name))
    return found


def nothing_left(conf: str, within_s: float = PATIENCE_S) -> bool:
    """Whether no process of any job is there any more, after some time to go."""
    return wait_until(lambda: not job_processes(conf), within_s)
