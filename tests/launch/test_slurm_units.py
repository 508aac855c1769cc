"""The parts of the SLURM launcher that need no SLURM: what is asked for, in which words, and by whom."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from bench.config.compose import compose_config
from bench.config.groups import list_config_groups
from bench.config.hydra_calls import parse_overrides
from bench.core.errors import ImpossibleError, UsageError
from bench.core.typed_config import build_dataclass
from bench.launch import attempt
from bench.launch.attempt import build_outcome_columns
from bench.launch.ranks import RankExit
from bench.launch.slurm import queue, submission_status, submissions
from bench.launch.slurm.job import refuse_too_few_visible_gpus
from bench.launch.slurm.job_environment import SlurmJobEnvironment
from bench.launch.slurm.launcher import SlurmLauncher, compute_job_shape
from bench.launch.slurm.profile import SlurmProfile, build_sbatch_script
from bench.launch.task import LaunchTask
from bench.rank.coordinates import RankCoordinates
from bench.rank.row import build_configured_columns
from bench.records import claims
from tests.conftest import ROOT, compose_run_config

EXAMPLES = sorted((ROOT / "slurm").glob("*.yaml"))


def profile(**fields: object) -> SlurmProfile:
    values = {**compose_config({"cluster": "slurm"})["cluster"], **fields}
    made: SlurmProfile = build_dataclass("cluster", SlurmProfile, values)
    return made


def flags(**fields: object) -> list[str]:
    """Lines of the batch script for two nodes of eight."""
    parameters = profile(**fields).build_sbatch_parameters(
        job_name="name", nodes=2, tasks_per_node=8, time_limit_min=10
    )
    return build_sbatch_script(parameters, Path("/jobs"), num_elements=3, command="command").splitlines()


def test_every_example_is_a_valid_profile():
    assert len(EXAMPLES) >= 3
    for path in EXAMPLES:
        values = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(values, dict)
        made = build_dataclass("cluster", SlurmProfile, {str(key): value for key, value in values.items()})
        assert made.launcher == "slurm"
        assert made.hardware in list_config_groups()["hardware"]


@pytest.mark.parametrize("option", ["slurm", "slurm_test"])
def test_every_field_of_a_cluster_can_be_set_on_the_command_line(option):
    assert set(compose_config({"cluster": option})["cluster"]) == set(SlurmProfile.__dataclass_fields__)


def test_a_shape_is_asked_for_exactly():
    assert compute_job_shape(compose_run_config("gpus=8", "cluster.gpus_per_node=8")) == (1, 8, 1)
    assert compute_job_shape(compose_run_config("gpus=2", "cluster.gpus_per_node=8")) == (1, 2, 1)
    assert compute_job_shape(compose_run_config("gpus=512", "cluster.gpus_per_node=8")) == (64, 8, 1)
    lines = flags()
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=10", "--array=0-2%1", "--requeue"):
        assert f"#SBATCH {line}" in lines
    assert not any("cpus-per-task" in line or "--mem" in line or "wckey" in line for line in lines)


def test_what_a_profile_names_is_in_the_script():
    lines = flags(
        partition="p",
        account="a",
        qos="q",
        constraint="c",
        reservation="r",
        nodelist="n[1-2]",
        exclude="n3",
        gpu_type="a100",
        cpus_per_gpu=12,
        memory_gb_per_gpu=100.0,
        exclusive=True,
        parallelism=2,
        requeue=False,
        sbatch=["--mail-type=END", "--overcommit"],
        srun=["--container-image=image.sqsh"],
        setup=["module load cuda", "export NCCL_DEBUG=WARN"],
        comment="a comment",
        wckey="w",
    )
    for line in (
        *("--partition=p", "--account=a", "--qos=q", "--constraint=c", "--reservation=r", "--nodelist='n[1-2]'"),
        *("--exclude=n3", "--gpus-per-node=a100:8", "--cpus-per-task=12", f"--mem={8 * 100 * 1024}M", "--exclusive"),
        *("--array=0-2%2", "--no-requeue", "--mail-type=END", "--overcommit", "--comment='a comment'", "--wckey=w"),
    ):
        assert f"#SBATCH {line}" in lines
    (srun,) = [line for line in lines if line.startswith("srun")]
    assert "--cpus-per-task=12 --container-image=image.sqsh" in srun
    assert "--distribution=block --kill-on-bad-exit=0" in srun
    setup = lines.index("module load cuda")
    assert lines.index(srun) > setup
    assert lines[setup + 1] == "export NCCL_DEBUG=WARN"


def test_all_memory_of_a_node_can_be_asked_for():
    assert "#SBATCH --mem=0M" in flags(memory_gb_per_gpu=0)
    with pytest.raises(UsageError, match=r"cluster\.memory_gb_per_gpu=-1 is not valid: choose a number of GB"):
        profile(memory_gb_per_gpu=-1)


def test_gpus_are_asked_for_as_the_cluster_wants_it():
    assert "#SBATCH --gres=gpu:8" in flags(gpu_request="gres")
    assert "#SBATCH --gres=gpu:h100:8" in flags(gpu_request="gres", gpu_type="h100")
    assert not any("gpu" in line for line in flags(gpu_request="none"))


@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "comment", "wckey", "nodelist"])
@pytest.mark.parametrize("text", ["two\nlines", "back\\slash", "bell\a"])
def test_what_sbatch_would_misread_is_refused(field, text):
    with pytest.raises(UsageError, match=f"cluster.{field}=.* choose printable characters"):
        profile(**{field: text})


def test_a_cluster_without_slurm_here_can_still_be_planned(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    queue.query_max_array_size.cache_clear()
    cluster = compose_config({"cluster": "slurm"})["cluster"]
    launcher = SlurmLauncher(cluster, dry_run=True)
    launcher.check(compose_run_config("gpus=512", "cluster.gpus_per_node=8"))
    assert launcher.unchecked_reason == "scontrol is not on this machine's PATH"
    with pytest.raises(UsageError, match="cluster=slurm cannot be asked: scontrol is not on this machine's PATH"):
        SlurmLauncher(cluster, dry_run=False)


@pytest.mark.parametrize(
    ("clock", "seconds"), [("0:05", 5), ("12:34", 754), ("1:00:00", 3600), ("2-01:00:00", 176400), ("INVALID", 0)]
)
def test_slurms_clock_is_read(clock, seconds):
    assert queue.parse_duration_s(clock) == seconds


def test_a_line_of_accounting_may_stand_for_many_jobs():
    assert queue.expand_element_ids("12") == ["12"]
    assert queue.expand_element_ids("12_3") == ["12_3"]
    assert queue.expand_element_ids("12_[0,2-4,7%2]") == ["12_0", "12_2", "12_3", "12_4", "12_7"]


@pytest.mark.parametrize(
    ("visible", "each", "tasks"),
    [(1, 1, 8), (8, 1, 8), (8, 1, 2), (4, 2, 2), (2, 2, 4), (8, 8, 1)],
)
def test_a_task_may_see_its_own_gpus_or_all_of_its_node(visible, each, tasks):
    """Of an exclusive node whose GPUs nobody asked for (gpu_request=none) it sees more than its job drives."""
    refuse_too_few_visible_gpus(visible, each, tasks)


@pytest.mark.parametrize(("visible", "each", "tasks"), [(0, 1, 1), (4, 1, 8), (1, 2, 1), (3, 2, 2)])
def test_too_few_gpus_are_refused(visible, each, tasks):
    with pytest.raises(ImpossibleError, match=f"{visible} GPUs are visible to {tasks} tasks, each of which drives"):
        refuse_too_few_visible_gpus(visible, each, tasks)


@pytest.mark.parametrize(
    ("typed_as", "options"),
    [
        ("cluster.sbatch=[--mail-type=END]", ["--mail-type=END"]),
        ("cluster.sbatch=[--mail-type=END,FAIL, --switches=1@1:00]", ["--mail-type=END,FAIL", "--switches=1@1:00"]),
        ("cluster.srun=[--container-image=/a/b.sqsh,--overcommit]", ["--container-image=/a/b.sqsh", "--overcommit"]),
        ("cluster.sbatch=['--mail-type=END']", ["--mail-type=END"]),
        ("cluster.sbatch=[]", []),
    ],
)
def test_options_can_be_typed_as_the_profiles_have_them(typed_as, options):
    (override,) = parse_overrides([typed_as])
    assert override.value() == options


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (4, 3), (1, 0)])
def test_a_rank_uses_its_own_of_the_gpus_it_sees(monkeypatch, visible, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert RankCoordinates(rank=11, local_rank=3, world_size=16).select_device("cuda") == torch.device("cuda", index)


TASK = {
    "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_JOB_ID": "7",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "n[3,5]",
}


def test_a_task_knows_its_place(monkeypatch):
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    place = SlurmJobEnvironment.from_environment()
    assert place.coordinates == RankCoordinates(3, 1, 4)
    assert (place.job_id, place.restart_count, place.node_index, place.nodes) == ("5_2", 0, 1, ["n3", "n5"])
    monkeypatch.setenv("SLURM_NODEID", "0")  # dealt out like cards
    with pytest.raises(RuntimeError, match="not numbered by node"):
        SlurmJobEnvironment.from_environment()


def test_ranks_that_ended_alike_are_told_of_once():
    gone = "on n5 has not been heard of again"
    row = build_outcome_columns(
        compose_run_config(),
        [
            RankExit(2, exit_description=gone),
            RankExit(3, exit_description=gone),
            RankExit(0, exit_description="was killed by SIGKILL"),
        ],
    )
    assert row["error"] == "rank 2 (and 3) on n5 has not been heard of again; rank 0 was killed by SIGKILL"


def test_before_ranks_are_forked_is_imported_what_model_and_strategy_need():
    t5 = "transformers.models.t5.modeling_t5"
    assert compose_run_config("model=t5_tiny", "strategy=ddp").modules_to_preload == (t5,)
    assert "torch.distributed.optim" in compose_run_config("model=t5_tiny", "strategy=zero1").modules_to_preload
    layout = ("strategy=mesh", "strategy.pipeline=2", "strategy.data=zero1", "gpus=4")
    for staged in (("strategy=pipeline", "gpus=2"), layout):
        modules = compose_run_config("model=gpt_tiny", *staged).modules_to_preload
        assert "bench.strategies.pipeline.torch_stages" in modules
        assert ("torch.distributed.optim" in modules) == (staged is layout)
    engine = compose_run_config("model=t5_tiny", "strategy=deepspeed").modules_to_preload
    assert engine == (t5, "torch._inductor.compile_fx")
    on_gpus = compose_run_config("model=t5_tiny", "strategy=deepspeed", "mode=predict", "hardware=a100_80gb")
    assert on_gpus.modules_to_preload == (t5,)


# ---- stores that cannot be written, submissions that are stopped


@pytest.fixture
def launcher(monkeypatch, tmp_path) -> SlurmLauncher:
    """One that has no SLURM to ask."""
    monkeypatch.setenv("PATH", str(tmp_path))
    queue.query_max_array_size.cache_clear()
    return SlurmLauncher(compose_config({"cluster": "slurm"})["cluster"], dry_run=True)


@pytest.mark.parametrize("folder", [".code", submissions.JOBS_FOLDER])
def test_a_store_that_cannot_take_a_submission_is_refused(folder, launcher, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (store / folder).touch()
    valid = r"store=\S+ is not valid: choose a folder that can be written to \(.*: nothing was submitted\)\."
    with pytest.raises(UsageError, match=valid):
        launcher.submit([], store, "adhoc", "name")


def test_a_file_where_the_ledger_should_be_is_named(tmp_path):
    (tmp_path / submissions.JOBS_FOLDER).touch()
    with pytest.raises(UsageError, match=r"choose a folder that can be read \(.*\.jobs: Not a directory\)"):
        submissions.list_submissions(tmp_path)
    with (
        pytest.raises(UsageError, match=r"choose a folder that can be written to \(.*"),
        submissions.hold_submission_lock(tmp_path),
    ):
        pass


STOPPING = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


@pytest.fixture
def usual_handlers():
    """A shell has what it starts in the background ignore some of them."""
    before = {number: signal.signal(number, handler) for number, handler in STOPPING.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_what_a_signal_leaves_in_the_queue_is_said(number, launcher, tmp_path, monkeypatch, capsys, usual_handlers):
    def silent(*_args):
        raise queue.SlurmError("it does not answer")

    monkeypatch.setattr(queue, "submit_script", lambda *_args: signal.raise_signal(number))
    monkeypatch.setattr(queue, "find_job_ids_by_name", silent)
    batches = launcher.plan_arrays([LaunchTask(compose_run_config("gpus=1"))], tmp_path, "name")
    with pytest.raises(KeyboardInterrupt):
        launcher.submit(batches, tmp_path, "adhoc", "name")
    assert "could not be cancelled (it does not answer): bench.jobs cancel does it later" in capsys.readouterr().err
    assert {number: signal.getsignal(number) for number in STOPPING} == STOPPING


# ---- following submissions


def standing(
    folder: Path, *, job_id: str | None, tracker: dict[str, object] | None = None
) -> submission_status.SubmittedRunStatus:
    """A run of a submission that is over."""
    config = compose_run_config("gpus=1")
    entry = submissions.SubmittedRun(config.run_id, config.label, False, 0, build_configured_columns(config))
    array = submissions.JobArray("0-1x1", "bench-0", 1, 1, 10, 1.0, [entry])
    submission = submissions.Submission(folder, "adhoc", "2026-01-01T00:00:00Z", {}, "code", [array], tracker)
    submission.folder.mkdir(parents=True)
    submission.close()
    state = submission_status.UNSUBMITTED if job_id is None else submission_status.DONE
    return submission_status.SubmittedRunStatus(submission, array, 0, entry, job_id, state, None, None, [])


def test_a_tracker_this_version_does_not_know_leaves_the_other_submissions(tmp_path, monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(submission_status.TrackerClient, "send_runs", lambda courier, runs: sent.append(list(runs)))
    foreign = standing(tmp_path / "foreign", job_id="1", tracker={"name": "none", "colour": "red"})
    known = standing(tmp_path / "known", job_id="2", tracker=compose_config({"tracker": "none"})["tracker"])
    submission_status.send_closed_submissions(tmp_path, [foreign, known])
    assert sent == [[known.submitted_run.run_id]]
    assert "submission foreign: tracker.colour is not a field" in "".join(capsys.readouterr())


def test_a_local_sweep_keeps_the_run_that_was_never_submitted(tmp_path):
    """Neither has a job's id."""
    never = standing(tmp_path / "never", job_id=None)
    row = {**build_configured_columns(compose_run_config("gpus=1"))}
    claims.take_claim(tmp_path, row, {"process": attempt.describe_this_process()}, 4096)
    assert not submission_status._has_orphaned_claim(tmp_path, never)
