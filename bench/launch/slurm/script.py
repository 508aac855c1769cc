"""The scripts that sbatch is given."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from bench.launch.slurm import ledger
from bench.launch.slurm.ledger import JobArray
from bench.launch.slurm.profile import SlurmProfile


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
    relative_folder = f"../../{ledger.JOBS_FOLDER}/{submission_name}/{array.name}"
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
    array_folder = store.resolve() / ledger.JOBS_FOLDER / submission_name / array.name
    command = f"{profile.python_command} -u -m submitit.core._submit {shlex.quote(str(array_folder))}"
    return build_sbatch_script(parameters, array_folder, num_elements=len(array.entries), command=command)


def build_sbatch_script(parameters: dict[str, Any], folder: Path, *, num_elements: int, command: str) -> str:
    """The text submitit gives sbatch for an array of `num_elements` elements."""
    return str(
        _make_sbatch_string(
            command=command, folder=folder, map_count=num_elements if num_elements > 1 else None, **parameters
        )
    )
