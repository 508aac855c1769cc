"""Trackers on a cluster whose nodes have no way to a server: the login node has."""

from __future__ import annotations

import pytest

from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    ONE_NODE,
    find_run_attempts,
    run_jobs_command,
    submit_sweep,
    wait_for_training,
)
from tests.fake_wandb import fake_wandb
from tests.slurm_cluster import SlurmTestCluster
from tests.wandb_files import read_offline_runs
from tests.wandb_login import add_wandb_login, remove_wandb_login

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
