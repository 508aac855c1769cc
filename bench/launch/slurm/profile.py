"""A cluster as its file under conf/cluster describes it, and the sbatch parameters that come of it."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from submitit.slurm.slurm import _make_sbatch_string

from bench.core.errors import UsageError, invalid_value_error
from bench.core.typed_config import OneOf, TextRule, Within
from bench.launch.slurm import submissions
from bench.launch.slurm.submissions import JobArray

GPU_REQUESTS = ("gpus-per-node", "gres", "none")

SIGNAL_DELAY_S = 30
"""How long before the time limit SLURM warns the job, which by then has ended by itself."""

OPTION_PATTERN = re.compile(r"^--([a-z][a-z-]*)(?:=(.*))?$", re.DOTALL)

RESERVED_OPTIONS = {
    *("array", "chdir", "dependency", "error", "export", "job-name", "kill-on-bad-exit", "nodes", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "signal", "time", "wait", "wrap", "distribution"),
}
"""Options that the suite sets itself."""

FIELD_BY_OPTION = {
    **{name: name for name in ("account", "comment", "constraint", "exclude", "nodelist", "partition", "qos")},
    **{"reservation": "reservation", "wckey": "wckey", "exclusive": "exclusive", "requeue": "requeue"},
    **{"no-requeue": "requeue", "cpus-per-task": "cpus_per_gpu", "mem": "memory_gb_per_gpu"},
    **{"gpus-per-node": "gpu_request", "gres": "gpu_request"},
}
"""Options that have a field."""


@dataclass(frozen=True)
class SlurmProfile:
    """One SLURM cluster, and how this suite uses it."""

    name: str
    launcher: Annotated[str, OneOf("slurm")]
    hardware: str
    """Option of conf/hardware that `hardware=auto` means: a login node cannot ask a GPU."""
    gpus_per_node: Annotated[int, Within(1, 2**17)]
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    time_limit_min: Annotated[int | None, Within(1, 525_600, unit="minutes")] = None
    """Of each job; None takes the plan's estimate."""
    gpu_request: Annotated[str, OneOf(*GPU_REQUESTS)] = "gpus-per-node"
    """Which option asks for GPUs: gpus-per-node, gres, or none."""
    gpu_type: str | None = None
    cpus_per_gpu: Annotated[int | None, Within(1, 4096)] = None
    memory_gb_per_gpu: Annotated[float | None, Within(0, 1e6, unit="GB")] = None
    """Host memory; None for what the partition gives, 0 for all that a node has."""
    exclusive: bool = False
    """Share nodes with no other job."""
    parallelism: Annotated[int, Within(1, 10**5)] = 1
    """Runs of one sweep at once, over all its arrays."""
    requeue: bool = True
    """Let SLURM start a job anew after preemption or a node's failure."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, as typed: --mail-type=END."""
    srun: list[str] = field(default_factory=list)
    """Further options of srun: a container's, for example."""
    setup: list[Annotated[str, TextRule("shell lines", is_multiline=True, can_be_empty=True)]] = field(
        default_factory=list
    )
    """Shell lines before srun: modules, activation of an environment, exports."""
    python: str | None = None
    """Shell command that starts Python on a node; None for the interpreter that submits."""
    comment: str | None = None
    wckey: str | None = None
    check: Annotated[str, OneOf("quick", "none")] = "quick"
    """Check every node before a run: quick, some matrix products and an all-reduce; or none."""
    exclude_bad: bool = False
    """Leave out nodes whose last check failed when runs are submitted again."""
    start_timeout_s: Annotated[int, Within(1, 86_400, unit="seconds")] = 300
    """How long the processes of a job may take to find each other."""

    def __post_init__(self) -> None:
        for name in sorted({*FIELD_BY_OPTION.values(), "gpu_type"}):
            if isinstance(getattr(self, name), str):
                _refuse_unprintable(f"cluster.{name}", getattr(self, name))
        for text in self.sbatch:
            self._check_option(text)
        for text in self.srun:
            if not text.startswith("-"):
                raise invalid_value_error("cluster.srun", text, "options as typed behind srun, each an item of its own")
            match = OPTION_PATTERN.match(text)
            if match is not None and match[1] in RESERVED_OPTIONS:
                raise invalid_value_error("cluster.srun", text, f"another option: the suite sets --{match[1]} itself")
        for text in (*self.setup, self.python or ""):
            if "\0" in text:
                raise invalid_value_error("cluster.setup", repr(text), "shell lines")

    def _check_option(self, text: str) -> None:
        match = OPTION_PATTERN.match(text)
        if match is None:
            raise invalid_value_error("cluster.sbatch", text, "options such as --mail-type=END")
        if match[1] in RESERVED_OPTIONS:
            raise invalid_value_error("cluster.sbatch", text, f"another option: the suite sets --{match[1]} itself")
        if match[1] in FIELD_BY_OPTION:
            raise invalid_value_error("cluster.sbatch", text, f"cluster.{FIELD_BY_OPTION[match[1]]} for it")
        _refuse_unprintable("cluster.sbatch", text)

    @property
    def python_command(self) -> str:
        """What starts Python in each task.

        Until `SlurmJob` is ready for it, it would not survive the warning signal, which for short jobs comes at once:
        the shell has it ignored, and submitit, which ends a job by it, is told to listen to one that nobody sends.
        """
        python = shlex.quote(sys.executable) if self.python is None else self.python
        return f"""sh -c 'trap "" USR2; export SUBMITIT_PREEMPT_SIGNAL=URG; exec "$@"' sh {python}"""

    def build_sbatch_parameters(
        self, *, job_name: str, nodes: int, tasks_per_node: int, time_limit_min: int, gpus_per_task: int = 1
    ) -> dict[str, Any]:
        """Parameters of submitit's SlurmExecutor for jobs of one resource shape.

        Parameters
        ----------
        nodes, tasks_per_node: int
            Machines, and ranks on each: one task per rank.
        time_limit_min: int
            Time limit.
        gpus_per_task: int
            GPUs, and shares of the node's processors and memory, of a task: more where one process drives several.
        """
        additional_parameters: dict[str, Any] = {"requeue" if self.requeue else "no-requeue": True}
        if self.reservation is not None:
            additional_parameters["reservation"] = self.reservation
        for text in self.sbatch:
            match = OPTION_PATTERN.match(text)
            assert match is not None
            additional_parameters[match[1]] = True if match[2] is None else match[2]
        # srun does not take --cpus-per-task over from sbatch (SLURM 22.05 and later).
        cpus_per_task = None if self.cpus_per_gpu is None else self.cpus_per_gpu * gpus_per_task
        srun_options = [] if cpus_per_task is None else [f"--cpus-per-task={cpus_per_task}"]
        num_gpus = tasks_per_node * gpus_per_task
        gpu_request_text = f"{self.gpu_type}:{num_gpus}" if self.gpu_type else str(num_gpus)
        memory_text = None if self.memory_gb_per_gpu is None else f"{round(self.memory_gb_per_gpu * num_gpus * 1024)}M"
        parameters = {
            "job_name": job_name,
            "nodes": nodes,
            "ntasks_per_node": tasks_per_node,
            "time": time_limit_min,
            "gpus_per_node": gpu_request_text if self.gpu_request == "gpus-per-node" else None,
            "gres": f"gpu:{gpu_request_text}" if self.gpu_request == "gres" else None,
            "cpus_per_task": cpus_per_task,
            "mem": memory_text,
            "exclusive": self.exclusive or None,
            "array_parallelism": self.parallelism,
            "signal_delay_s": SIGNAL_DELAY_S,
            "setup": ["unset PYTHONSAFEPATH", *self.setup],
            "stderr_to_stdout": True,
            "wckey": self.wckey,
            "additional_parameters": additional_parameters,
            # Ranks are numbered node by node. One process that dies does not end the others: they report.
            "srun_args": ["--distribution=block", "--kill-on-bad-exit=0", *srun_options, *self.srun],
        }
        for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "comment"):
            parameters[name] = getattr(self, name)
        return parameters


def _refuse_unprintable(name: str, text: str) -> None:
    """Refuse what sbatch does not read back as it was written into the script."""
    if not text.isprintable() or "\\" in text:
        raise UsageError(f"{name}={text!r} is not valid: choose printable characters other than backslashes.")


# --- The scripts that sbatch is given.


def build_array_script(
    profile: SlurmProfile, array: JobArray, store: Path, submission_name: str, previous_job_id: str | None = None
) -> str:
    """The script of an array of the submission `submission_name`, to start when the job `previous_job_id` is over.

    Before it starts Python, an element names what it is to execute as submitit looks for it, and the array writes
    down its id: whoever submitted it need not have lived long enough to do so.
    """
    parameters = profile.build_sbatch_parameters(
        job_name=array.job_name,
        nodes=array.nodes,
        tasks_per_node=array.tasks_per_node,
        time_limit_min=array.time_limit_min,
        gpus_per_task=array.gpus_per_task,
    )
    # Relative to the snapshot, in which jobs run: sbatch would read % and quotes in a store's path its own way.
    relative_folder = f"../../{submissions.JOBS_FOLDER}/{submission_name}/{array.name}"
    log_prefix = f"{relative_folder}/{'%A_%a' if len(array.entries) > 1 else '%j'}"
    parameters["additional_parameters"] |= {"output": f"{log_prefix}_0_log.out"}
    parameters["srun_args"] = ["--output", f"{log_prefix}_%t_log.out", "--open-mode=append", *parameters["srun_args"]]
    parameters["setup"] = [
        'array="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"',
        f'[ -s {relative_folder}/job_id ] || echo "$array" >{relative_folder}/job_id',
        'element="$array${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
        f'ln -sfn "${{SLURM_ARRAY_TASK_ID:-0}}.pkl" "{relative_folder}/${{element}}_submitted.pkl"',
        *parameters["setup"],
    ]
    parameters["dependency"] = previous_job_id and f"afterany:{previous_job_id}"
    array_folder = store.resolve() / submissions.JOBS_FOLDER / submission_name / array.name
    command = f"{profile.python_command} -u -m submitit.core._submit {shlex.quote(str(array_folder))}"
    return build_sbatch_script(parameters, array_folder, num_elements=len(array.entries), command=command)


def build_sbatch_script(parameters: dict[str, Any], folder: Path, *, num_elements: int, command: str) -> str:
    """The text submitit gives sbatch for an array of `num_elements` elements."""
    return str(
        _make_sbatch_string(
            command=command, folder=folder, map_count=num_elements if num_elements > 1 else None, **parameters
        )
    )
