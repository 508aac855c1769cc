"""Two accounts that share a store through a Unix group, on a real SLURM: nothing twice, nobody ends another's job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import records
from bench.launch.slurm import submissions
from bench.records import Record, claims
from tests.cluster_sweeps import FAKE_MODEL_RUN, ONE_RANK, format_store_override, list_job_processes
from tests.fake_model import read_attempts_by_run
from tests.slurm_cluster import SlurmTestCluster
from tests.unix_accounts import Account, create_team

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SWEEP = (*FAKE_MODEL_RUN, *ONE_RANK, "+model.step_s=0.5", "measurement.steps=10")


@dataclass
class Shared:
    """A store, and whose it is."""

    store: Path
    alice: Account
    bob: Account

    def sweep(self, account: Account, *overrides: str) -> str:
        """What a sweep of an account says, which must succeed."""
        done = account.run("bench.sweep", "-m", *SWEEP, *overrides, format_store_override(self.store))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self, account: Account, action: str) -> str:
        """What ``bench.jobs`` of an account says."""
        done = account.run("bench.jobs", action, str(self.store))
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    @property
    def rows(self) -> list[Record]:
        return [row for run in read_attempts_by_run(self.store).values() for row in run]


@pytest.fixture(scope="module")
def accounts(slurm: SlurmTestCluster) -> Iterator[tuple[str, dict[str, Account]]]:
    """Alice's umask leaves nothing to her group, Bob's lets it read; both may use the cluster."""
    with create_team(slurm.env, {"alice": 0o077, "bob": 0o022}) as (group, members):
        manager = ("sacctmgr", "--immediate")
        for account in members.values():
            slurm.run(*manager, "add", "user", account.name, "account=bench", "defaultaccount=bench")
        try:
            yield group, members
        finally:
            slurm.cancel_all()
            slurm.run(*manager, "delete", "user", ",".join(account.name for account in members.values()), check=False)


@pytest.fixture
def shared(idle_slurm: SlurmTestCluster, accounts: tuple[str, dict[str, Account]]) -> Iterator[Shared]:
    """A store outside of pytest's folders, which only we can enter."""
    group, members = accounts
    store = Path(tempfile.mkdtemp(dir="/tmp", prefix="team-"))
    shutil.chown(store, members["alice"].name, group)
    store.chmod(0o2770)
    yield Shared(store, members["alice"], members["bob"])
    idle_slurm.cancel_all()
    shutil.rmtree(store)


@pytest.mark.long
def test_what_one_has_queued_the_other_neither_submits_nor_ends(idle_slurm, shared):
    idle_slurm.scontrol("update", "partitionname=main", "state=down")
    try:
        assert "3 runs in 1 arrays" in shared.sweep(shared.alice, "seed=1,2,3")
        (array,) = idle_slurm.squeue("-o", "%F")
        assert "3 queued or running on a cluster" in (said := shared.sweep(shared.bob, "seed=1,2,3,4"))
        assert "1 runs in 1 arrays" in said
        (second,) = {job for job in idle_slurm.squeue("-o", "%F") if job != array}
        users = dict(line.split() for line in idle_slurm.squeue("-r", "-o", "%i %u"))
        assert users == {**{f"{array}_{i}": shared.alice.name for i in range(3)}, second: shared.bob.name}

        collected = shared.jobs(shared.bob, "collect")
        assert re.search(rf" of {shared.alice.name} \(.*\), open: 3 queued, 0 done", collected), collected
        assert shared.rows == []
        cancelled = shared.jobs(shared.bob, "cancel")
        assert "Left alone: " in cancelled
        assert f" of {shared.alice.name}." in cancelled
        assert "Cancelled 1 job(s)." in cancelled
        assert [row["job_id"] for row in shared.rows] == [second]
        assert "nothing here is yours" in shared.jobs(shared.bob, "cancel")

        assert shared.alice.command("scancel", f"{array}_2").returncode == 0
        shared.jobs(shared.bob, "collect")
        assert {row["job_id"]: row["error"] for row in shared.rows}[f"{array}_2"] == (
            f"its job {array}_2 was cancelled before it came to run"
        )
        assert len(shared.rows) == 2
    finally:
        idle_slurm.scontrol("update", "partitionname=main", "state=up")

    idle_slurm.wait_for("a claim", lambda: claims.list_claimed_runs(shared.store))
    (run_id,) = claims.list_claimed_runs(shared.store)
    read = shared.bob.command("cat", str(shared.store / claims.CLAIMS_FOLDER / f"{run_id}.claim"))
    assert f'"user": "{shared.alice.name}"' in read.stdout, read.stderr
    shared.jobs(shared.bob, "collect")
    assert records.list_attempts(shared.store, run_id) == []

    again = shared.sweep(shared.bob, "seed=1,2,3,4")  # one was cancelled, one never submitted again
    assert "2 runs in 1 arrays" in again
    watched = shared.bob.run("bench.jobs", "watch", str(shared.store))
    assert watched.returncode == 0, watched.stdout + watched.stderr
    ends = {run_id: [row["status"] for row in run] for run_id, run in read_attempts_by_run(shared.store).items()}
    assert sorted(ends.values()) == [["ok"], ["ok"], ["skipped", "ok"], ["skipped", "ok"]]
    owners = {path.stat().st_uid for path in shared.store.glob("*/*.json")}
    assert len(owners) == 2
    assert submissions.list_submissions(shared.store) == []


@pytest.mark.long
def test_a_run_whose_owner_died_is_taken_over_by_another_account(idle_slurm, shared):
    """Its claim is broken when SLURM says that its job has ended, and not before."""
    long = ("measurement.steps=600", "seed=1")
    shared.sweep(shared.alice, *long)
    idle_slurm.wait_for("a claim", lambda: claims.list_claimed_runs(shared.store))
    (job,) = idle_slurm.squeue("-o", "%A")
    processes = list_job_processes(str(idle_slurm.state / "slurm.conf"))
    assert processes
    for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody lives to write down that another died
        for process in processes:
            os.kill(process, number)
    idle_slurm.wait_for("the end of the job", lambda: idle_slurm.read_job_state(job) not in ("RUNNING", "COMPLETING"))
    (run_id,) = claims.list_claimed_runs(shared.store)
    submitted = shared.sweep(shared.bob, *long)
    assert "Submitted job" in submitted
    idle_slurm.wait_for("a claim of the other", lambda: _owner(shared.store, run_id) == shared.bob.name)
    (row,) = read_attempts_by_run(shared.store)[run_id]
    assert (row["status"], row["job_id"]) == ("error", job)
    assert f"SLURM ended job {job}: " in row["error"]


def _owner(store: Path, run_id: str) -> object:
    claim = claims.find_claim(store, run_id)
    return claim and claim.owner.get("user")


@pytest.mark.long
def test_a_store_of_ones_own_says_what_keeps_others_out(idle_slurm, shared):
    shared.sweep(shared.alice, "seed=1")
    (shared.store / submissions.JOBS_FOLDER / ".lock").chmod(0o600)
    os.chown(shared.store / submissions.JOBS_FOLDER / ".lock", 0, 0)
    done = shared.bob.run("bench.sweep", *SWEEP, format_store_override(shared.store))
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"store={shared.store} is not valid: choose a folder that can be written to")
