"""What a sweep on a cluster shows in the terminal: the arrays, their scripts, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.launch.slurm.launcher import PlannedArray, SlurmLauncher
from bench.launch.slurm.profile import SlurmProfile
from bench.launch.slurm.submissions import JobArray, Submission
from bench.planning.planned_runs import format_duration


def build_arrays_table(launcher: SlurmLauncher, arrays: Sequence[JobArray]) -> RenderableType:
    """A line per array: its shape, its runs and what they will cost."""
    profile = launcher.profile
    numeric_columns = ("runs", "nodes", "tasks/node", "time limit", "GPU-hours", "at most")
    table = Table(box=None, pad_edge=False, title=f"Arrays for cluster={profile.name}", title_justify="left")
    for name in ("array", *numeric_columns):
        table.add_column(name, no_wrap=True, justify="right" if name in numeric_columns else "left")
    for array in arrays:
        table.add_row(
            array.name,
            str(len(array.entries)),
            str(array.nodes),
            str(array.tasks_per_node),
            f"{array.time_limit_min} min",
            f"{array.gpu_hours:,.2f}",
            f"{array.max_gpu_hours:,.2f}",
        )
    parallelism_text = (
        "one run at a time" if profile.parallelism == 1 else f"at most {profile.parallelism} runs at once"
    )
    exclusive_text = ", on nodes of their own" if profile.exclusive else ""
    expected_gpu_hours, max_gpu_hours = (
        sum(array.gpu_hours for array in arrays),
        sum(array.max_gpu_hours for array in arrays),
    )
    lines = [
        f"{sum(len(array.entries) for array in arrays)} runs in {len(arrays)} arrays, "
        f"{parallelism_text}{exclusive_text}: "
        f"about {expected_gpu_hours:,.2f} GPU-hours, at most {max_gpu_hours:,.2f}.",
        "sbatch: " + " ".join(_list_sbatch_options(profile)),
    ]
    lines += [
        f"Too short: a run of array {array.name} is expected to take {format_duration(array.longest_s)}, its time "
        "limit is "
        f"{array.time_limit_min} min. Choose cluster.time_limit_min."
        for array in arrays
        if array.longest_s > 60 * array.time_limit_min
    ]
    if launcher.unchecked_reason is not None:
        lines.append(f"Nothing of this was checked with the cluster: {launcher.unchecked_reason}.")
    return Group(table, *(Text(line) for line in lines))


def _list_sbatch_options(profile: SlurmProfile) -> Iterator[str]:
    """What all arrays ask for alike, as options of sbatch."""
    parameters = profile.build_sbatch_parameters(job_name="", nodes=1, tasks_per_node=1, time_limit_min=1)
    for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "comment", "wckey", "exclusive"):
        if parameters[name] is not None:
            yield f"--{name}" if parameters[name] is True else f"--{name}={parameters[name]}"
    if profile.gpu_request != "none":
        yield (
            f"--{profile.gpu_request}={'gpu:' if profile.gpu_request == 'gres' else ''}"
            + (f"{profile.gpu_type}:" if profile.gpu_type else "")
            + "<tasks/node>"
        )
    if profile.cpus_per_gpu is not None:
        yield f"--cpus-per-task={profile.cpus_per_gpu}"
    if profile.memory_gb_per_gpu is not None:
        yield f"--mem=<tasks/node x {profile.memory_gb_per_gpu:g} GB>"
    for name, value in parameters["additional_parameters"].items():
        yield f"--{name}" if value is True else f"--{name}={value}"


def list_scripts(
    launcher: SlurmLauncher, planned_arrays: Sequence[PlannedArray], store: Path, submission_name: str
) -> Iterator[str]:
    """The sbatch script of each array."""
    for planned_array in planned_arrays:
        title = f"# ---- array {planned_array.array.name}: {len(planned_array.array.entries)} runs"
        yield f"{title}\n{launcher.build_script(planned_array.array, store, submission_name)}"


def build_submission_text(submission: Submission, store: Path) -> RenderableType:
    """The ids of the jobs, and what to type next."""
    lines = []
    for array in submission.arrays:
        job_id = submission.read_job_id(array)
        element_ids = f"{job_id}_[0-{len(array.entries) - 1}]" if len(array.entries) > 1 else job_id
        lines.append(
            f"Submitted job {element_ids}: {len(array.entries)} runs on {array.nodes} x {array.tasks_per_node}"
        )
    quoted_store = shlex.quote(str(store))
    lines += [
        f"Follow:   python -m bench.jobs watch {quoted_store}",
        f"Collect:  python -m bench.jobs collect {quoted_store}",
        f"Cancel:   python -m bench.jobs cancel {quoted_store}",
    ]
    return Group(*(Text(line) for line in lines))
