"""Sweeps on a real SLURM: what is asked for, what runs where, and that nothing is submitted or measured twice."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import records
from bench.records import claims
from bench.sweep import main as sweep_main
from tests.cluster_sweeps import (
    FAKE_MODEL_RUN,
    LONG_RUN,
    ONE_NODE,
    ONE_RANK,
    TWO_NODES,
    find_run_attempts,
    format_store_override,
    run_jobs_command,
    submit_sweep,
    wait_for_training,
)
from tests.conftest import ROOT, SMALL_GPT, limit_cpu_time, run_command
from tests.fake_model import read_attempts_by_run, wait_until
from tests.slurm_cluster import SLURM_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = ("measurement.warmup_steps=2", "measurement.steps=2", "sequence_length=32", "report=false")


def one_rows(store: Path) -> list[records.Record]:
    """The row of each run, every one of which has a single attempt."""
    found = list(read_attempts_by_run(store).values())
    assert all(len(run) == 1 for run in found)
    return [run[0] for run in found]


# Ranks over nodes


@pytest.fixture(scope="module")
def two_nodes(slurm, tmp_path_factory) -> dict[str, records.Record]:
    """DDP and FSDP with shards inside nodes and replicas across, four ranks on two nodes; rows by strategy."""
    store = tmp_path_factory.mktemp("nodes") / "store"
    submit_sweep(store, *TWO_NODES, *SMALL_GPT, *QUICK, "strategy=ddp")
    submit_sweep(store, *TWO_NODES, *SMALL_GPT, *QUICK, "strategy=fsdp", "strategy.sharding_factor=node")
    done = run_jobs_command("watch", store)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["effective_strategy"]: row for row in one_rows(store)}


def test_ranks_are_spread_over_nodes_node_by_node(two_nodes):
    assert sorted(two_nodes) == ["ddp", "fsdp/hybrid_shard"]
    for row in two_nodes.values():
        assert row["status"] == "ok"
        assert (row["nodes"], row["world_size"], row["launcher"]) == (2, 4, "slurm")
        hosts = [rank["host"] for rank in row["ranks"]]
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
        assert row["hosts"] == f"{hosts[0]},{hosts[2]}"
    assert two_nodes["fsdp/hybrid_shard"]["sharding_factor"] == 2


@pytest.mark.long
def test_nodes_make_no_difference_to_what_is_computed(two_nodes, execute):
    (here,) = execute((*SMALL_GPT, *QUICK, "gpus=4", "strategy=ddp"))
    for row in two_nodes.values():
        assert row["losses"] == pytest.approx(here["losses"], rel=1e-5)


def test_the_row_says_what_the_job_was(two_nodes, slurm):
    for row in two_nodes.values():
        job = row["environment"]["slurm"]
        assert job["job_id"] == row["job_id"]
        assert slurm.sacct("-X", "-o", "State", "-j", row["job_id"]) == ["COMPLETED"]
        assert (job["cluster"], job["partition"], job["restart"], job["parallelism"]) == ("slurm_test", "main", 0, 1)
        # The node's other GPUs may be another job's: ranks count in what SLURM shows them.
        assert len(set(row["environment"]["variables"]["CUDA_VISIBLE_DEVICES"].split(","))) == 2
        assert row["git_sha"] is not None


@pytest.mark.long
def test_a_rehearsal_is_a_job_of_one_task(idle_slurm, tmp_path):
    submit_sweep(tmp_path, "cluster=slurm_test", *SMALL_GPT, *QUICK, "strategy=fsdp", "gpus=64", "mode=rehearse")
    done = run_jobs_command("watch", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = one_rows(tmp_path)
    assert (row["status"], row["evidence"], row["world_size"], row["nodes"]) == ("ok", "rehearsed", 64, 8)
    assert (len(row["ranks"]), row["environment"]["slurm"]["tasks_per_node"]) == (1, 1)


# Shapes, arrays, concurrency


def test_every_run_asks_for_exactly_its_own_resources(idle_slurm, tmp_path):
    submit_sweep(
        tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, "cluster=slurm_test", "cluster.cpus_per_gpu=1", "gpus=1,2,8,16,32"
    )
    lines = [line.split() for line in idle_slurm.squeue("-r", "-o", "%D %C %b")]
    asked = sorted((int(nodes), int(cpus), gpus) for nodes, cpus, gpus in lines)
    per_node = [gpus.rpartition(":")[2] for _, _, gpus in asked]
    assert [(nodes, cpus) for nodes, cpus, _ in asked] == [(1, 1), (1, 2), (1, 8), (2, 16), (4, 32)]
    assert per_node == ["1", "2", "8", "8", "8"]


@pytest.mark.long
def test_a_shape_the_cluster_does_not_have_is_left_out_with_its_reason(idle_slurm, tmp_path):
    plan = run_command(
        "bench.sweep",
        "-m",
        *FAKE_MODEL_RUN,
        "cluster=slurm_test",
        "gpus=1,64",
        "dry_run=true",
        format_store_override(tmp_path),
    )
    assert plan.returncode == 0
    assert "1 to run, 1 impossible" in plan.stdout
    assert "refuses 8 node(s) with 8 task(s) each" in plan.stdout
    assert "allocation failure" in plan.stdout


@pytest.mark.long
def test_runs_go_one_at_a_time_unless_asked_otherwise(idle_slurm, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    several = (*FAKE_MODEL_RUN, *ONE_NODE, "+model.step_s=0.5", "measurement.steps=4", "seed=1,2")
    submit_sweep(alone, *several, "batch_size_per_gpu=2")
    assert run_jobs_command("watch", alone).returncode == 0
    submit_sweep(together, *several, "measurement.steps=16", "cluster.parallelism=2")
    assert run_jobs_command("watch", together).returncode == 0
    for row in one_rows(alone):
        assert row["concurrent_runs"] == 0
        assert row["concurrent"] == []
    first, second = one_rows(together)
    assert first["concurrent_runs"] == second["concurrent_runs"] == 1
    assert first["concurrent"][0]["run_id"] == second["run_id"]
    assert first["concurrent"][0]["job_id"] == second["job_id"]
    # They shared a node and its network, and met at ports of their own.
    assert first["hosts"] == second["hosts"]
    assert second["environment"]["slurm"]["on_the_same_nodes"] or first["environment"]["slurm"]["on_the_same_nodes"]


def test_arrays_of_different_shapes_wait_for_each_other(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, "cluster=slurm_test", "gpus=1,2", "seed=1,2")
    states = idle_slurm.squeue("-r", "-o", "%T %r")
    assert sum(line.startswith("RUNNING") for line in states) <= 1
    assert wait_until(lambda: "Dependency" in idle_slurm.squeue("-r", "-o", "%r"), SLURM_TIMEOUT_S)
    assert wait_until(lambda: "JobArrayTaskLimit" in idle_slurm.squeue("-r", "-o", "%r"), SLURM_TIMEOUT_S)


def test_arrays_are_cut_at_the_clusters_largest(idle_slurm, tmp_path, monkeypatch):
    from bench.config.compose import compose_config
    from bench.launch.slurm.launcher import SlurmLauncher
    from bench.launch.task import LaunchTask
    from tests.fake_model import plan_runs

    launcher = SlurmLauncher(compose_config({"cluster": "slurm_test"})["cluster"], dry_run=False)
    tasks = [
        LaunchTask(config) for config in plan_runs(*FAKE_MODEL_RUN, "gpus=2", f"seed={','.join(map(str, range(25)))}")
    ]
    assert [len(batch.tasks) for batch in launcher.plan_arrays(tasks, tmp_path, "name")] == [25]
    largest = int(idle_slurm.scontrol("show", "config").split("MaxArraySize")[1].split()[1])
    assert launcher._max_array_size == largest
    monkeypatch.setattr(launcher, "_max_array_size", 10)
    batches = launcher.plan_arrays(tasks, tmp_path, "name")
    assert [len(batch.tasks) for batch in batches] == [10, 10, 5]
    assert [task for batch in batches for task in batch.tasks] == tasks
    assert len({batch.array.name for batch in batches}) == 3


# Nothing twice


def test_a_second_identical_sweep_submits_nothing(idle_slurm, tmp_path):
    sweep = (*FAKE_MODEL_RUN, *ONE_RANK, "+model.step_s=1", "measurement.steps=8", "seed=1,2")
    first = submit_sweep(tmp_path, *sweep)
    assert "2 to run" in first.stdout
    assert wait_for_training(tmp_path)
    second = submit_sweep(tmp_path, *sweep)
    assert "0 to run, 2 queued or running on a cluster" in second.stdout
    assert "Submitted" not in second.stdout
    assert run_jobs_command("watch", tmp_path).returncode == 0
    third = submit_sweep(tmp_path, *sweep)
    assert "2 done, 0 to run" in third.stdout
    assert "Submitted" not in third.stdout
    assert len(one_rows(tmp_path)) == 2
    assert idle_slurm.squeue() == []


@pytest.mark.long
def test_a_sweep_here_leaves_alone_what_the_cluster_has(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK)
    here = run_command("bench.sweep", *FAKE_MODEL_RUN, *LONG_RUN, "gpus=1", format_store_override(tmp_path))
    assert "1 queued or running on a cluster" in here.stdout


@pytest.mark.long
def test_a_run_that_somebody_else_is_executing_is_left_to_them(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_NODE)
    (run,) = {entry["run_id"] for entry in _ledger(tmp_path)["arrays"][0]["entries"]}
    row = {"run_id": run, "launcher": "local"}
    owner = {"process": {"host": "elsewhere", "pid": 1, "started": 1}}
    claims.take_claim(tmp_path, row, owner, 1024)
    assert wait_until(lambda: idle_slurm.squeue() == [], SLURM_TIMEOUT_S)
    assert records.list_attempts(tmp_path, run) == []
    log = next((tmp_path / ".jobs").glob("*/*/*_0_log.out")).read_text()
    assert "who is executing it" in log


def _ledger(store: Path) -> dict:
    (path,) = (store / ".jobs").glob("*/submission.json")
    return json.loads(path.read_text())


@pytest.mark.long
def test_force_measures_again_once(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_RANK)
    assert run_jobs_command("watch", tmp_path).returncode == 0
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_RANK, "force=true")
    assert run_jobs_command("watch", tmp_path).returncode == 0
    assert [row["status"] for row in find_run_attempts(tmp_path)] == ["ok", "ok"]


# From another shell


@pytest.mark.long
def test_whoever_submitted_need_not_live(idle_slurm, tmp_path):
    command = [sys.executable, "-m", "bench.sweep", *FAKE_MODEL_RUN, *ONE_RANK, format_store_override(tmp_path)]
    sweep = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert sweep.stdout is not None
    while b"Submitted" not in sweep.stdout.readline():
        pass
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate()
    watch = subprocess.Popen(
        [sys.executable, "-m", "bench.jobs", "watch", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    time.sleep(3)
    watch.kill()
    watch.wait()
    assert wait_until(lambda: bool(read_attempts_by_run(tmp_path)) and idle_slurm.squeue() == [], SLURM_TIMEOUT_S)
    collected = run_jobs_command("collect", tmp_path)
    assert collected.returncode == 0
    assert "over: 1 done" in collected.stdout
    assert find_run_attempts(tmp_path)[0]["status"] == "ok"
    assert run_jobs_command("collect", tmp_path).stdout == f"Nothing submitted from {tmp_path} is open.\n"


@pytest.mark.long
def test_watch_tells_of_every_state_and_of_gpu_hours(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_NODE, "+model.step_s=1", "+model.fault=none,raise:forward:0:3")
    watched = run_jobs_command("watch", tmp_path)
    assert watched.returncode == 1
    assert "1 queued, " in watched.stdout
    assert "1 running, " in watched.stdout
    assert "1 done, 1 failed, " in watched.stdout
    hours = float(watched.stdout.rpartition(" GPU-hours so far")[0].rpartition(" ")[2])
    spent = idle_slurm.sacct("-X", "-o", "JobName,ElapsedRaw")
    seconds = [int(line.rpartition("|")[2]) for line in spent if line.startswith(f"bench-{_name(tmp_path)}")]
    assert hours == pytest.approx(2 * sum(seconds) / 3600, abs=0.005)
    assert "raise" not in watched.stderr
    assert "ArithmeticError: the fake model was told to fail" in watched.stdout


def _name(store: Path) -> str:
    (folder,) = [path.parent for path in (store / ".jobs").glob("*/submission.json")]
    return folder.name


# What runs is what was submitted

PLUGIN = """
from tests.fake_model import FakeModel as Base
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(Base):
    def count_tokens_per_sequence(self, sequence_length):
        return {tokens}
"""


@pytest.mark.long
def test_an_edit_after_submission_does_not_change_queued_runs(idle_slurm, tmp_path):
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "mine.py").write_text(PLUGIN.format(tokens=1000))
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    store = tmp_path / "store"
    idle_slurm.run(
        "sbatch", "--exclusive", "--nodes=4", "--wrap", "sleep 600", "--output=/dev/null", "--job-name=blocker"
    )
    overrides = [*FAKE_MODEL_RUN, *ONE_RANK, "model.family=my_models.mine", format_store_override(store)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.sweep", *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Submitted" in done.stdout, done.stderr
    (package / "mine.py").write_text(PLUGIN.format(tokens=2000))
    idle_slurm.run("scancel", "--name=blocker")
    assert run_jobs_command("watch", store).returncode == 0
    (row,) = find_run_attempts(store)
    assert row["tokens_per_second_per_gpu"] * row["step_time_median_s"] == pytest.approx(2 * 1000)
    assert (store / ".code").exists()


def test_equal_code_is_copied_once_and_knows_its_commit(idle_slurm, tmp_path):
    for seed in (1, 2):
        submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_RANK, f"seed={seed}")
    (code,) = (tmp_path / ".code").iterdir()
    commit = json.loads((code / "COMMIT.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert commit["git_sha"] == head.strip()
    assert (code / "tests" / "fake_model.py").exists()
    assert (code / "bench" / "sweep.py").read_bytes() == (ROOT / "bench" / "sweep.py").read_bytes()


# Plans


@pytest.mark.long
def test_a_dry_run_shows_arrays_costs_and_scripts_and_submits_nothing(idle_slurm, tmp_path):
    store = tmp_path / "store"
    before = idle_slurm.squeue("-t", "all")
    arguments = (
        *FAKE_MODEL_RUN,
        "cluster=slurm_test",
        "gpus=1,16",
        "seed=1,2",
        "cluster.comment=ours",
        format_store_override(store),
    )
    plan = run_command("bench.sweep", "-m", *arguments, "dry_run=true")
    assert plan.returncode == 0
    assert "#SBATCH" not in plan.stdout
    assert ["0-1x1", "2", "1", "1", "10", "min"] in [line.split()[:6] for line in plan.stdout.splitlines()]
    assert ["1-2x8", "2", "2", "8", "10", "min"] in [line.split()[:6] for line in plan.stdout.splitlines()]
    assert "4 runs in 2 arrays, one run at a time: about" in plan.stdout
    assert "--comment=ours" in plan.stdout
    script = run_command("bench.sweep", "-m", *arguments, "dry_run=script").stdout
    assert script.count("#!/bin/bash") == 2
    assert "#SBATCH --array=0-1%1" in script
    assert "#SBATCH --ntasks-per-node=8" in script
    assert "#SBATCH --gpus-per-node=8" in script
    assert not store.exists()
    assert idle_slurm.squeue("-t", "all") == before


@pytest.mark.long
def test_the_script_shown_is_the_script_submitted(idle_slurm, tmp_path):
    arguments = (*FAKE_MODEL_RUN, *TWO_NODES, "seed=1,2", "cluster.setup=['export GREETING=hello']", "cluster.wckey=w")
    shown = run_command("bench.sweep", "-m", *arguments, "dry_run=script", format_store_override(tmp_path)).stdout
    submit_sweep(tmp_path, *arguments)
    (path,) = (tmp_path / ".jobs").glob("*/*/submission.sh")
    name = _name(tmp_path)
    planned = shown[shown.index("#!/bin/bash") :].strip()
    planned_name = planned.partition("--job-name=bench-")[2].partition("\n")[0].rpartition("-")[0]
    assert path.read_text().strip() == planned.replace(planned_name, name)


def test_the_time_limit_comes_from_the_plan_unless_set(idle_slurm, tmp_path):
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK)
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *LONG_RUN, *ONE_RANK, "seed=1", "cluster.time_limit_min=77")
    limits = {line.split()[-1] for line in idle_slurm.squeue("-o", "%j %l")}
    assert limits == {"10:00", "1:17:00"}


# Searches


@pytest.mark.long
def test_a_search_for_the_largest_batch_is_one_job(idle_slurm, tmp_path):
    search = ("search=largest_batch", "hardware.memory_limit_gib=0.1", "measurement.steps=1", "batch_size_per_gpu=32")
    two_nodes = ("cluster=slurm_test", "cluster.gpus_per_node=1", "gpus=2")
    submit_sweep(
        tmp_path, *SMALL_GPT, *two_nodes, "strategy=fsdp", "measurement.warmup_steps=2", *search, "report=false"
    )
    done = run_jobs_command("watch", tmp_path)
    assert done.returncode == 0, done.stdout
    found = {row["batch_size_per_gpu"]: row["status"] for row in one_rows(tmp_path)}
    assert len({row["job_id"] for row in one_rows(tmp_path)}) == 1
    largest = max(size for size, status in found.items() if status == "ok")
    assert found[largest + 1] == "oom"


# Names and paths


ODD = 'a b $(touch pwned) `touch pwned` ; touch pwned # it\'s "naïve":x'


@pytest.mark.long
@pytest.mark.parametrize("name", [ODD, "new\nline"])
def test_a_store_path_may_hold_anything(idle_slurm, tmp_path, name):
    store = tmp_path / name / "store"
    typed = store
    if "\n" in name:  # cannot be typed as an override, but a folder may be called so
        store.mkdir(parents=True)
        typed = tmp_path / "plain"
        typed.symlink_to(store)
    submit_sweep(typed, *FAKE_MODEL_RUN, *ONE_RANK)
    watched = run_jobs_command("watch", store)
    assert watched.returncode == 0, watched.stdout
    assert find_run_attempts(store)[0]["status"] == "ok"
    assert not list(tmp_path.rglob("pwned"))
    assert not (ROOT / "pwned").exists()


def test_a_comment_arrives_unchanged(idle_slurm, tmp_path):
    text = 'a b $(touch pwned) `touch pwned` ; touch pwned # it\'s "naïve" %j'
    submit_sweep(tmp_path, *FAKE_MODEL_RUN, *ONE_RANK, "cluster.comment='" + text.replace("'", "\\'") + "'")
    assert idle_slurm.squeue("-o", "%k") == [text]
    assert not list(tmp_path.rglob("pwned"))


# Speed


@pytest.mark.alone
def test_thousands_of_runs_are_planned_and_submitted_in_seconds(idle_slurm, tmp_path):
    overrides = (
        *FAKE_MODEL_RUN,
        "cluster=slurm_test",
        "strategy=ddp,fsdp",
        "gpus=1,2,4,8",
        "batch_size_per_gpu=1,2,3,4,5",
    )
    seeds = f"seed={','.join(map(str, range(100)))}"
    idle_slurm.scontrol("update", "partitionname=main", "state=down")
    try:
        with limit_cpu_time(1800):
            done = submit_sweep(tmp_path, *overrides, seeds)
        assert "4000 runs in 4 arrays" in done.stdout
        assert len(idle_slurm.squeue("-r", "-o", "%i")) == 4000
        with limit_cpu_time(1800):
            again = submit_sweep(tmp_path, *overrides, seeds)
        assert "4000 queued or running" in again.stdout
    finally:
        idle_slurm.cancel_all()
        idle_slurm.scontrol("update", "partitionname=main", "state=up")


# Bad input


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("cluster.partition=nope",), "Invalid partition name specified"),
        (("cluster.constraint=nope",), "Invalid feature specification"),
        (("cluster.reservation=nope",), "reservation is invalid"),
        (("gpus=10", "cluster.gpus_per_node=10"), "node configuration is not available"),
        (("cluster.partition=short", "cluster.time_limit_min=5"), "Requested time limit is invalid"),
        (("cluster.memory_gb_per_gpu=100000",), "refuses 1 node(s) with 2 task(s) each"),
        (("cluster.account='a\\\\b'",), "choose printable characters other than backslashes"),
        (("cluster.gpu_request=some",), "choose gpus-per-node, gres, none"),
        (("cluster.gpu_request=gres", "cluster.gpu_type=h100"), "refuses 1 node(s)"),
        (("cluster.parallelism=0",), "cluster.parallelism=0 is not valid: choose a whole number of at least 1"),
        (
            ("cluster.time_limit_min=soon",),
            "time_limit_min=soon is not valid: choose a whole number of minutes",
        ),
        (("cluster.sbatch=['--output=x']",), "the suite sets --output itself"),
        (("cluster.sbatch=['--partition=x']",), "choose cluster.partition for it"),
        (("cluster.sbatch=['rm -rf']",), "choose options such as --mail-type=END"),
        (("cluster.srun=['bash']",), "choose options as typed behind srun"),
        (("cluster.hardware=abacus",), "hardware=abacus is not valid: choose a10, a100_40gb, a100_80gb"),
        (("cluster.launcher=pbs",), "cluster.launcher=pbs is not valid: choose local, slurm."),
        (("cluster.speed=3",), "cluster.speed is not a field"),
        (("dry_run=maybe",), "dry_run=maybe is not valid: choose true, false, script"),
        (("store='/tmp/a%j'",), "choose a path without % and backslashes"),
        (("store='/proc/nowhere'",), "choose a folder that can be written to"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_submitted(slurm, tmp_path, capsys, overrides, sentence):
    before = slurm.squeue("-t", "all", "-o", "%A")
    assert sweep_main([*FAKE_MODEL_RUN, *ONE_NODE, f"store={tmp_path / 'store'}", *overrides]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert slurm.squeue("-t", "all", "-o", "%A") == before
    assert not (tmp_path / "store").exists()


def test_a_job_that_would_wait_for_ever_is_taken_back(idle_slurm, tmp_path, capsys):
    """SLURM's default is to take jobs that no partition will ever start."""
    configuration = idle_slurm.state / "slurm.conf"
    strict = configuration.read_text()
    configuration.write_text(strict.replace("EnforcePartLimits=ALL", "EnforcePartLimits=NO"))
    assert configuration.read_text() != strict
    idle_slurm.scontrol("reconfigure")
    try:
        asked = ("cluster.partition=short", "cluster.time_limit_min=5", "seed=1,2")
        assert sweep_main(["-m", *FAKE_MODEL_RUN, *ONE_RANK, *asked, f"store={tmp_path}"]) == 2
    finally:
        configuration.write_text(strict)
        idle_slurm.scontrol("reconfigure")
    shown = capsys.readouterr()
    assert "would wait for ever, says SLURM: PartitionTimeLimit" in shown.err
    assert idle_slurm.squeue() == []
    assert run_jobs_command("collect", tmp_path).stdout == f"Nothing submitted from {tmp_path} is open.\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("watch", "nowhere"), "store=nowhere is not valid"),
        (("collect", ".", "--submission=x"), "--submission=x is not valid: choose"),
    ],
)
def test_bench_jobs_names_what_is_wrong(arguments, sentence):
    done = run_command("bench.jobs", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


@pytest.mark.long
def test_bench_jobs_has_nothing_to_do_where_nothing_was_submitted(tmp_path):
    done = run_command("bench.jobs", "watch", str(tmp_path))
    assert done.returncode == 0
    assert "Nothing submitted" in done.stdout


def test_estimates_grow_with_the_work():
    from bench.planning.run_predictions import compute_time_limit_min, predict_duration_s
    from tests.conftest import compose_run_config

    small, large = compose_run_config("model=gpt_tiny"), compose_run_config("model=gpt_tiny", "measurement.steps=2000")
    assert predict_duration_s(large) > predict_duration_s(small) > 60
    assert predict_duration_s(small, search=True) > 5 * predict_duration_s(small)
    assert compute_time_limit_min(60) == 10
    assert math.isclose(compute_time_limit_min(3600) % 5, 0)
