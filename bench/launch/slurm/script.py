"""The scripts that sbatch is given."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from bench.launch.slurm import ledger
from bench.launch.slurm.ledger import Array
from bench.launch.slurm.profile import SlurmProfile


def array_script(profile: SlurmProfile, array: Array, store: Path, name: str, before: str | None = None) -> str:
    """The script of an array of the submission `name`, to start when the job `before` is over.

    Before it starts Python, an element names what it is to execute as submitit looks for it, and the array writes
    down its id: whoever submitted it need not have lived long enough to do so.
    """
    parameters = profile.sbatch_parameters(
        job_name=array.job_name,
        nodes=array.nodes,
        tasks_per_node=array.tasks_per_node,
        minutes=array.time_limit_min,
        gpus_per_task=array.gpus_per_task,
    )
    # Relative to the snapshot, in which jobs run: sbatch would read % and quotes in a store's path its own way.
    folder = f"../../{ledger.FOLDER}/{name}/{array.name}"
    log = f"{folder}/{'%A_%a' if len(array.entries) > 1 else '%j'}"
    parameters["additional_parameters"] |= {"output": f"{log}_0_log.out"}
    parameters["srun_args"] = ["--output", f"{log}_%t_log.out", "--open-mode=append", *parameters["srun_args"]]
    parameters["setup"] = [
        'array="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"',
        f'[ -s {folder}/job_id ] || echo "$array" >{folder}/job_id',
        'element="$array${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
        f'ln -sfn "${{SLURM_ARRAY_TASK_ID:-0}}.pkl" "{folder}/${{element}}_submitted.pkl"',
        *parameters["setup"],
    ]
    parameters["dependency"] = before and f"afterany:{before}"
    at = store.resolve() / ledger.FOLDER / name / array.name
    command = f"{profile.command} -u -m submitit.core._submit {shlex.quote(str(at))}"
    return script(parameters, at, count=len(array.entries), command=command)


def script(parameters: dict[str, Any], folder: Path, *, count: int, command: str) -> str:
    """The text submitit gives sbatch for an array of `count` elements."""
    return str(
        _make_sbatch_string(command=command, folder=folder, map_count=count if count > 1 else None, **parameters)
    )
