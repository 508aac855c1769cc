"""What a sweep on a cluster shows in the terminal: the arrays, their scripts, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.launch.slurm.launcher import Batch, SlurmLauncher
from bench.launch.slurm.ledger import Array, Submission
from bench.launch.slurm.profile import SlurmProfile
from bench.outlook import duration


def arrays_table(launcher: SlurmLauncher, arrays: Sequence[Array]) -> RenderableType:
    """A line per array: its shape, its runs and what they will cost."""
    profile = launcher.profile
    numbers = ("runs", "nodes", "tasks/node", "time limit", "GPU-hours", "at most")
    table = Table(box=None, pad_edge=False, title=f"Arrays for cluster={profile.name}", title_justify="left")
    for name in ("array", *numbers):
        table.add_column(name, no_wrap=True, justify="right" if name in numbers else "left")
    for array in arrays:
        table.add_row(
            array.name,
            str(len(array.entries)),
            str(array.nodes),
            str(array.tasks_per_node),
            f"{array.time_limit_min} min",
            f"{array.gpu_hours:,.2f}",
            f"{array.most_gpu_hours:,.2f}",
        )
    at_once = "one run at a time" if profile.parallelism == 1 else f"at most {profile.parallelism} runs at once"
    shared = ", on nodes of their own" if profile.exclusive else ""
    expected, most = sum(array.gpu_hours for array in arrays), sum(array.most_gpu_hours for array in arrays)
    lines = [
        f"{sum(len(array.entries) for array in arrays)} runs in {len(arrays)} arrays, {at_once}{shared}: "
        f"about {expected:,.2f} GPU-hours, at most {most:,.2f}.",
        "sbatch: " + " ".join(_options(profile)),
    ]
    lines += [
        f"Too short: a run of array {array.name} is expected to take {duration(array.longest_s)}, its time limit is "
        f"{array.time_limit_min} min. Choose cluster.time_limit_min."
        for array in arrays
        if array.longest_s > 60 * array.time_limit_min
    ]
    if launcher.unasked is not None:
        lines.append(f"Nothing of this was checked with the cluster: {launcher.unasked}.")
    return Group(table, *(Text(line) for line in lines))


def _options(profile: SlurmProfile) -> Iterator[str]:
    """What all arrays ask for alike, as options of sbatch."""
    parameters = profile.sbatch_parameters(job_name="", nodes=1, tasks_per_node=1, minutes=1)
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


def scripts(launcher: SlurmLauncher, batches: Sequence[Batch], store: Path, name: str) -> Iterator[str]:
    """The sbatch script of each array."""
    for batch in batches:
        title = f"# ---- array {batch.array.name}: {len(batch.array.entries)} runs"
        yield f"{title}\n{launcher.script(batch.array, store, name)}"


def submitted_text(submission: Submission, store: Path) -> RenderableType:
    """The ids of the jobs, and what to type next."""
    lines = []
    for array in submission.arrays:
        job_id = submission.job_id(array)
        elements = f"{job_id}_[0-{len(array.entries) - 1}]" if len(array.entries) > 1 else job_id
        lines.append(f"Submitted job {elements}: {len(array.entries)} runs on {array.nodes} x {array.tasks_per_node}")
    quoted = shlex.quote(str(store))
    lines += [
        f"Follow:   python -m bench.jobs watch {quoted}",
        f"Collect:  python -m bench.jobs collect {quoted}",
        f"Cancel:   python -m bench.jobs cancel {quoted}",
    ]
    return Group(*(Text(line) for line in lines))
