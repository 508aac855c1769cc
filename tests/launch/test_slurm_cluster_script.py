"""``slurm/test-cluster``: one command brings a SLURM up, one takes all of it down, and nothing is left of it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_sweeps import check_no_processes, list_job_processes
from tests.slurm_cluster import (
    NODE_NAMES,
    ROOT,
    SCRIPT,
    SlurmTestCluster,
    has_ended,
    list_pids,
    make_idle,
    remove_slurm_variables,
    run_cluster_script,
    send_signal,
    skip_without_slurm,
)

SMALL = {"NODES": "1", "ACCOUNTING": "0"}
"""Without accounting a cluster is up within a second."""

HOSTS = Path("/etc/hosts")

MARK = "# bench test cluster"
"""Of the lines that clusters add to it, followed by their folder."""

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd")


@pytest.fixture(name="idle_slurm")
def idle_slurm_without_processes(idle_slurm: SlurmTestCluster) -> Iterator[SlurmTestCluster]:
    """The test cluster, on which no process of these jobs stays, be it that SLURM has lost sight of one: they are not
    the suite's own, which must leave none."""
    yield idle_slurm
    make_idle(idle_slurm)
    for pid in list_job_processes(idle_slurm.env["SLURM_CONF"]):
        send_signal(pid, signal.SIGKILL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short name; whatever runs in it is ended."""
    path = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    yield path
    run_cluster_script("stop", "--remove", path)
    assert not left(path)
    if path.exists():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


other_folder = folder


def start(folder: Path, **knobs: str) -> SlurmTestCluster:
    """A cluster in this folder, or a skipped test where there is no SLURM."""
    result = run_cluster_script("start", folder, knobs=knobs)
    if "not installed" in result.stderr:
        skip_without_slurm(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    return SlurmTestCluster(folder)


def left(folder: Path) -> list[str]:
    """The live processes that have something open in a folder, or are told of it by their environment."""
    found = []
    for pid in list_pids():
        try:
            files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        told = f"SLURM_CONF={folder}/slurm.conf".encode() in environment
        if (told or any(file.startswith(f"{folder}/") for file in files)) and not has_ended(pid):
            found.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return found


def unmarked_hosts() -> list[str]:
    """The lines of /etc/hosts that no cluster has added; other clusters may be running."""
    return [line for line in HOSTS.read_text().splitlines() if MARK not in line]


def hosts_of(folder: Path) -> list[str]:
    """The lines that the cluster in this folder has added."""
    return [line for line in HOSTS.read_text().splitlines() if line.endswith(f"{MARK} {folder}")]


def daemon_pids(folder: Path) -> dict[str, int]:
    return {file.stem: int(file.read_text()) for file in (folder / "run").glob("*.pid")}


def submit(cluster: SlurmTestCluster, script: str, *options: str) -> str:
    """Submit a job; returns its id."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script).strip()


@pytest.mark.slow
def test_from_the_first_start_to_the_last_stop(folder: Path) -> None:
    before = unmarked_hosts()
    cluster = start(folder)
    assert run_cluster_script("status", folder).returncode == 0

    pids = daemon_pids(folder)
    assert set(pids) == {*DAEMONS[:-1], "slurmd.testnode1", "slurmd.testnode2"}
    again = run_cluster_script("start", folder)
    assert f". {folder}/env.sh" in again.stdout
    assert "cluster=slurm_test" in again.stdout
    assert daemon_pids(folder) == pids, "a second start replaced what was running"

    out = folder / "out.txt"
    cluster.run("sbatch", "--wait", "-N2", "--gpus-per-node=2", f"--output={out}", "--wrap", "srun -l env")
    lines = out.read_text().splitlines()
    assert {f"{rank}: CUDA_VISIBLE_DEVICES=0,1" for rank in (0, 1)} <= set(lines)
    cluster.wait_for("the job in sacct", lambda: cluster.sacct("-X", "-o", "state") == ["COMPLETED"])

    submit(cluster, "sleep 1000")
    assert run_cluster_script("stop", folder).returncode == 0
    assert not left(folder)
    assert unmarked_hosts() == before
    assert not hosts_of(folder)
    assert run_cluster_script("status", folder).returncode == 3

    start(folder)
    assert set(cluster.squeue("-t", "all", "-o", "%T")) == {"COMPLETED", "CANCELLED"}, "the queue was forgotten"
    assert run_cluster_script("stop", "--remove", folder).returncode == 0
    assert not left(folder)
    assert not folder.exists()
    assert run_cluster_script("stop", folder).returncode == 0
    assert run_cluster_script("status", folder).returncode == 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remove", [[], ["--remove"]])
def test_jobs_end_with_the_cluster(folder: Path, tmp_path: Path, remove: list[str]) -> None:
    cluster = start(folder, **SMALL)
    here = shlex.quote(str(tmp_path))
    script = f"""
        trap '' TERM
        echo $$ >{here}/stubborn
        setsid sh -c 'echo $$ >{here}/session; exec sleep 1000' &
        (setsid sh -c 'echo $$ >{here}/daemon; exec sleep 1000' &)
        env -i sh -c 'echo $$ >{here}/nameless; exec sleep 1000' &
        srun sh -c 'echo $$ >{here}/step; exec sleep 1000'"""
    submit(cluster, script)
    cluster.wait_for("the job's processes", lambda: len([file for file in tmp_path.iterdir() if file.read_text()]) == 5)
    pids = {file.name: int(file.read_text()) for file in tmp_path.iterdir()}
    assert run_cluster_script("stop", *remove, folder).returncode == 0
    assert {name for name, pid in pids.items() if not has_ended(pid)} == set()


@pytest.mark.long
@pytest.mark.slow
def test_the_temporary_tables_of_another_database_server_are_left_alone(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="#sql-temptable-", suffix=".MAI") as table:
        start(folder, NODES="1")
        assert Path(table.name).exists()


@pytest.mark.long
@pytest.mark.slow
def test_two_clusters_side_by_side(folder: Path, other_folder: Path) -> None:
    first = start(folder, **SMALL, PORT="23456")
    second = start(other_folder, **SMALL, PORT="23456")  # taken by now
    for cluster in (first, second):
        cluster.run("sbatch", "--wait", f"--output={cluster.state}/out.txt", "--wrap", 'srun sh -c "echo $SLURM_CONF"')
        assert (cluster.state / "out.txt").read_text() == f"{cluster.state}/slurm.conf\n"
    running = submit(second, "sleep 1000")
    second.wait_for("the job", lambda: second.read_job_state(running) == "RUNNING")
    assert run_cluster_script("stop", "--remove", folder).returncode == 0
    assert run_cluster_script("status", other_folder).returncode == 0
    assert second.read_job_state(running) == "RUNNING"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurmctld", "slurmd.testnode1", "munged"])
def test_start_brings_back_what_has_died(folder: Path, name: str) -> None:
    cluster = start(folder, **SMALL)
    job = submit(cluster, "sleep 1000")
    cluster.wait_for("the job", lambda: cluster.read_job_state(job) == "RUNNING")
    cluster.wait_for_saved_state()  # or slurmctld forgets
    pids = daemon_pids(folder)
    send_signal(pids[name], signal.SIGKILL)
    cluster.wait_for(f"the end of {name}", lambda: has_ended(pids[name]))
    status = run_cluster_script("status", folder)
    assert status.returncode == 1
    assert [line for line in status.stdout.splitlines() if line.endswith("down")] == [f"{name:20} down"]

    start(folder)
    assert run_cluster_script("status", folder).returncode == 0
    changed = {daemon for daemon, pid in daemon_pids(folder).items() if pid != pids[daemon]}
    assert changed == {name}
    assert cluster.read_job_state(job) == "RUNNING"


@pytest.mark.long
@pytest.mark.slow
def test_no_job_outlives_a_stop_that_could_not_reach_slurmctld(folder: Path) -> None:
    cluster = start(folder, **SMALL)
    lost, requeued = submit(cluster, "sleep 1000", "--no-requeue"), submit(cluster, "sleep 1000", "--requeue")
    cluster.wait_for("the jobs", lambda: cluster.read_job_state(f"{lost},{requeued}") == "RUNNING")
    cluster.stop_controller()
    assert run_cluster_script("stop", folder).returncode == 0
    assert not left(folder)
    start(folder)
    assert cluster.read_job_state(lost) in ("CANCELLED", "NODE_FAIL")
    cluster.wait_for("the second attempt", lambda: cluster.read_job_state(requeued) == "RUNNING")
    assert "Restarts=1" in cluster.scontrol("show", "job", requeued)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may edit /etc/hosts")
def test_without_namespaces_nodes_are_in_etc_hosts_while_it_runs(folder: Path, other_folder: Path) -> None:
    before = unmarked_hosts()
    start(folder, **SMALL, NAMESPACES="0")
    second = start(other_folder, **SMALL, NAMESPACES="0")
    for each in (folder, other_folder):
        assert sum(line.startswith("127.0.0.1 testnode1 ") for line in hosts_of(each)) == 1
    out = other_folder / "out.txt"
    assert run_cluster_script("stop", folder).returncode == 0
    second.run("sbatch", "--wait", f"--output={out}", "--wrap", "getent hosts $SLURMD_NODENAME")
    assert out.read_text().split() == ["127.0.0.1", "testnode1"]
    assert run_cluster_script("stop", other_folder).returncode == 0
    assert unmarked_hosts() == before
    assert not hosts_of(folder)
    assert not hosts_of(other_folder)


@pytest.mark.slow
def test_nothing_is_left_of_tests_that_were_killed(tmp_path: Path) -> None:
    program = f"""if True:
        import os
        from tests.slurm_cluster import running_cluster
        with running_cluster({SMALL}) as cluster:
            print(cluster.state, flush=True)
            os.kill(os.getpid(), {signal.SIGKILL:d})"""
    killed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=remove_slurm_variables(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if "Skipped: " in killed.stderr:
        pytest.skip(killed.stderr.strip().rpartition("Skipped: ")[2])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    state = Path(killed.stdout.strip())
    SlurmTestCluster(state).wait_for("the end of the cluster", lambda: not state.exists() and not left(state))


@pytest.mark.slow
def test_knobs(folder: Path) -> None:
    extra = "KillWait=7\nschedulerparameters=bf_interval=9"
    cluster = start(folder, **SMALL, MAX_ARRAY_SIZE="3", GPUS="2", EXTRA=extra)
    settings = dict(
        line.split("=", 1) for line in cluster.scontrol("show", "config").replace(" ", "").splitlines() if "=" in line
    )
    assert settings["MaxArraySize"] == "3"
    assert settings["KillWait"] == "7sec"
    assert settings["SchedulerParameters"] == "bf_interval=9"
    refused = [(["--array=0-3"], "Invalid job array"), (["--gpus-per-node=3"], "configuration is not available")]
    refused += [(["-p", "short", "-t", "2"], "time limit is invalid"), (["--gpus-per-node=h100:1"], "not available")]
    for options, why in refused:
        with pytest.raises(AssertionError, match=why):
            submit(cluster, "true", *options)
    submit(cluster, "true", "--array=0-2", "--gpus-per-node=fake:2", "-p", "short")

    other = run_cluster_script("start", folder, knobs={"GPUS": "3"})
    assert other.returncode == 2
    assert "GPUS='2', not '3'" in other.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_job_of_the_higher_partition_takes_the_nodes(idle_slurm: SlurmTestCluster) -> None:
    nodes = f"-N{len(NODE_NAMES)}"
    script = "trap 'scontrol requeue $SLURM_JOB_ID' USR1; sleep 1000 & wait; wait"
    low = submit(idle_slurm, script, nodes, "--exclusive", "--signal=B:USR1@60")
    idle_slurm.wait_for("the low job", lambda: idle_slurm.read_job_state(low) == "RUNNING")
    high = submit(idle_slurm, "true", nodes, "--exclusive", "-p", "high")
    idle_slurm.wait_for("the high job", lambda: idle_slurm.read_job_state(high) == "COMPLETED")
    idle_slurm.wait_for("the low job again", lambda: idle_slurm.read_job_state(low) == "RUNNING")
    assert "Restarts=1" in idle_slurm.scontrol("show", "job", low)


@pytest.mark.long
@pytest.mark.slow
def test_a_node_that_dies_comes_back(idle_slurm: SlurmTestCluster) -> None:
    job = submit(idle_slurm, "srun sleep 1000", "-N2", "--requeue")
    idle_slurm.wait_for("the job", lambda: idle_slurm.read_job_state(job) == "RUNNING")
    (node,) = idle_slurm.squeue("-o", "%B")
    idle_slurm.kill_node(node, mark_down=True)
    assert idle_slurm.read_node_states()[node].startswith("drained")
    idle_slurm.wait_for("the job on other nodes", lambda: idle_slurm.read_job_state(job) == "RUNNING")
    idle_slurm.restore()
    idle_slurm.cancel_all()
    assert idle_slurm.read_node_states() == dict.fromkeys(NODE_NAMES, "idle")


@pytest.mark.slow
def test_what_a_dying_node_is_starting_dies_with_it(idle_slurm: SlurmTestCluster) -> None:
    job = submit(idle_slurm, "for i in $(seq 9000); do sleep 1000 & sleep 0.002; done", "--no-requeue")
    conf = idle_slurm.env["SLURM_CONF"]
    idle_slurm.wait_for("the job's processes", lambda: len(list_job_processes(conf)) > 9)
    (node,) = idle_slurm.squeue("-o", "%B")
    idle_slurm.kill_node(node, mark_down=True)
    check_no_processes(conf)
    idle_slurm.restore()
    assert idle_slurm.read_job_state(job) == "NODE_FAIL"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_survive_a_restart_of_slurmctld(idle_slurm: SlurmTestCluster, how: signal.Signals) -> None:
    job = submit(idle_slurm, "sleep 1000")
    idle_slurm.wait_for("the job", lambda: idle_slurm.read_job_state(job) == "RUNNING")
    idle_slurm.wait_for_saved_state()
    idle_slurm.restart_controller(how)
    assert idle_slurm.read_job_state(job) == "RUNNING"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "choose start [DIR], stop [--remove] [DIR] or status [DIR]"),
        (["begin"], "'begin' is not a command"),
        (["start", "--remove"], "--remove goes with stop"),
        (["stop", "--all"], "'--all' is not an option"),
        (["start", "/tmp/a", "/tmp/b"], "one DIR, please"),
    ],
)
def test_bad_arguments_are_answered_in_one_sentence(arguments: list[str], said: str) -> None:
    result = run_cluster_script(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_help_is_the_head_of_the_script() -> None:
    result = run_cluster_script("--help")
    assert result.returncode == 0
    assert "TEST_CLUSTER_NODES=2" in result.stdout


def test_missing_packages_are_answered_with_what_installs_them(tmp_path: Path) -> None:
    result = run_cluster_script("start", tmp_path / "new", PATH="")
    assert result.returncode == 2
    assert "apt-get install --no-install-recommends slurm-wlm munge slurmdbd mariadb-server-core" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with all of SLURM's programs, none of which is one."""
    path = tmp_path_factory.mktemp("programs")
    for name in (*DAEMONS, "sbatch", "mariadb-install-db", "my_print_defaults"):
        (path / name).write_text("#!/bin/false\n")
        (path / name).chmod(0o755)
    return f"{path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("knob", "value"),
    [("NODES", "0"), ("NODES", "two"), ("GPUS", "-1"), ("PREFIX", "Node"), ("ACCOUNTING", "yes"), ("PORT", "80")],
)
def test_impossible_knobs_are_refused(tmp_path: Path, programs: str, knob: str, value: str) -> None:
    result = run_cluster_script("start", tmp_path / "new", knobs={knob: value}, PATH=programs)
    assert result.returncode == 2
    assert f"TEST_CLUSTER_{knob}='{value}': choose " in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["a b", "a%n", "a#b", "long" * 20])
def test_impossible_folders_are_refused(tmp_path: Path, programs: str, name: str) -> None:
    result = run_cluster_script("start", tmp_path / name, PATH=programs)
    assert result.returncode == 2
    assert "choose a" in result.stderr
    assert not (tmp_path / name).exists()


def test_a_folder_with_something_else_in_it_is_left_alone(programs: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        (Path(path) / "thesis.tex").touch()
        for arguments in (["start"], ["stop", "--remove"]):
            result = run_cluster_script(*arguments, path, PATH=programs)
            assert result.returncode == 2
        assert [file.name for file in Path(path).iterdir()] == ["thesis.tex"]


def test_the_script_runs_from_a_path_with_spaces(tmp_path: Path) -> None:
    copy = tmp_path / "my project"
    copy.mkdir()
    for file in ("test-cluster", "test_cluster"):
        (copy / file).symlink_to(SCRIPT.with_name(file))
    command = (copy / "test-cluster", "status", tmp_path / "none")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (3, "")
