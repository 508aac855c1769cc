"""What the user asks for: the sweep, the settings of the command line, and how it is to be carried out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from hydra.core.override_parser.types import Override

from bench.config import RANKS
from bench.errors import UsageError, bad_value
from bench.hardware import Hardware
from bench.hardware.detect import Device
from bench.paths import require_path
from bench.planning.compose import MEMORY, composed, groups, parse, values_of
from bench.planning.grid import Grid, Settings, read_grids
from bench.tracking import NO_TRACKER, Tracker, load_tracker
from bench.typed import OneOf, Text, Within, checked, type_hints

EXECUTION = (
    *("store", "dry_run", "force", "time_budget_min", "skip_oom", "report", "search", "sweep", "cluster", "tracker"),
    "check",
)
"""Keys (and groups) that say how a sweep is carried out, not what runs are."""

CONTEXT = (*EXECUTION, "mode", "hardware", "measurement", "seed")
"""Keys that apply to any sweep; naming none but these, and no search, asks for the default sweep."""

SEARCHES = ("none", "largest_batch")

DEFAULT_ON_GPUS = "default_gpu"
"""What ``sweep=default`` is where runs are on GPUs."""

ALL_GPUS = "all"
"""``gpus=all``: as many as this machine has or, of another hardware, as a machine takes ranks."""

REPEATS = Annotated[int, Within(1, 1000)]
DEVICE = Annotated[str | None, OneOf("cpu", "cuda")]

MOST_RUNS = 100_000
"""Of a sweep, repetitions included: as many are planned in minutes."""


class Execution(TypedDict):
    """How a sweep is carried out, besides its sections: what no run is hashed by."""

    store: Annotated[str, Text("the path of a folder")]
    dry_run: Annotated[bool | str, OneOf(True, False, "script")]
    force: bool
    skip_oom: bool
    time_budget_min: Annotated[float | None, Within(0, 1e6, above=True, unit="minutes")]
    report: bool
    check: bool
    search: Annotated[str, OneOf(*SEARCHES)]


@dataclass(frozen=True)
class Request:
    """A sweep as the user asked for it, expanded but not yet composed run by run."""

    sweep: str
    points: list[Settings]
    """Settings of each run, in order."""
    executes: bool
    """Whether any run is to be executed, not just predicted."""
    store: Path
    dry_run: bool
    show_script: bool
    """Show the batch scripts of a dry run, too."""
    force: bool
    skip_oom: bool
    """Leave out what surely does not fit."""
    time_budget_min: float | None
    """Minutes after which no further run is started; None for as long as it takes."""
    report: bool
    check: bool
    """Check a machine with GPUs before its first sweep."""
    search: str
    cluster: dict[str, Any]
    tracker: Tracker
    """Where attempts are shown beside the store."""


def read_request(arguments: Sequence[str], *, multirun: bool, device: Device) -> Request:
    """Read a command line.

    Parameters
    ----------
    arguments: sequence of str
        Hydra overrides.
    multirun: bool
        Whether ``-m`` was given: values with commas are axes.
    device: Device
        This machine's device, for ``hardware=auto``.

    Raises
    ------
    UsageError
        On anything that cannot be asked for.
    """
    overrides = parse(list(arguments))
    given: dict[str, list[str]] = {}
    for override in overrides:
        values = values_of(override)
        if not values:
            raise bad_value(override.key_or_group, "(nothing)", "at least one value")
        if len(values) > 1 and not multirun:
            raise UsageError(f"{override.input_line} has several values: add -m to run each of them.")
        given[_key(override)] = values
    execution = {key: values for key, values in given.items() if _belongs(key, EXECUTION)}
    for key, values in execution.items():
        if len(values) > 1:
            raise bad_value(key, ",".join(values), "one value")
    if "sweep" not in execution:
        described = multirun or any(key == "search" or not _belongs(key, CONTEXT) for key in given)
        execution["sweep"] = ["adhoc" if described else "default"]
    once = {key: values[0] for key, values in execution.items()}
    if once["sweep"] == "default" and _on_gpus(once, given, device):
        once["sweep"] = DEFAULT_ON_GPUS
    base = composed(once)
    name = once["sweep"]
    run_axes = {key: values for key, values in given.items() if key not in execution}
    listed = read_grids(name, base["sweep"])
    _refuse_execution_keys(name, listed)
    grids = [grid.overridden(run_axes) for grid in listed]
    how = {key: checked(key, hint, base[key]) for key, hint in type_hints(Execution).items()}
    _check_budget(how["time_budget_min"], base["cluster"].get("launcher"))
    repeats = checked("sweep.repeats", REPEATS, base["sweep"].get("repeats", 1))
    cluster = {key: value for key, value in once.items() if _belongs(key, ("cluster",))}
    hardware = _hardware_of(base["cluster"]) or description_of(device)
    mode = str(base["mode"])
    points = _points(grids, repeats, cluster, hardware, mode, device)
    if not points:
        raise UsageError(f"sweep={name} comes to no run: choose values that its exclusions leave.")
    executed = [point for point in points if point.get("mode", mode) != "predict"]
    executes = bool(executed)
    needed = checked("sweep.device", DEVICE, base["sweep"].get("device"))
    _check_device(name, needed, {point["hardware"] for point in executed})
    if how["skip_oom"] and not executes:
        raise UsageError("skip_oom=true is not valid with mode=predict, which executes nothing: choose false.")
    if how["skip_oom"] and how["search"] != "none":
        raise UsageError("skip_oom=true is not valid with a search, which must try what does not fit: choose false.")
    return Request(
        sweep=name,
        points=points,
        executes=executes,
        store=_store(how["store"]),
        dry_run=bool(how["dry_run"]),
        show_script=how["dry_run"] == "script",
        force=how["force"],
        skip_oom=how["skip_oom"],
        time_budget_min=how["time_budget_min"],
        report=how["report"],
        check=how["check"],
        search=how["search"],
        cluster=base["cluster"],
        tracker=load_tracker(base["tracker"]),
    )


def _refuse_execution_keys(sweep: str, grids: list[Grid]) -> None:
    """Raise `UsageError` where a sweep file sets what runs do not have, which would have no effect."""
    found = sorted(key for grid in grids for key in grid.keys if _belongs(key, EXECUTION))
    if found:
        raise UsageError(f"sweep={sweep} sets {found[0]}, which is no setting of a run: give it on the command line.")


def _store(text: str) -> Path:
    """The folder that rows go to, whether it is there or not."""
    store = require_path("store", text)
    try:
        if store.exists() and not store.is_dir():
            raise bad_value("store", text, "a folder that can be written to (this is a file)")
    except PermissionError as error:
        raise bad_value("store", text, f"a folder that can be read ({error.strerror})") from None
    return store


def read_tracker(arguments: Sequence[str]) -> Tracker:
    """Read the command line of what only sends: ``tracker.mode=offline`` and its like; wandb unless another is named.

    Raises
    ------
    UsageError
        On anything but a tracker that keeps something, and its fields.
    """
    given = {"tracker": "wandb"}
    for override in parse(list(arguments)):
        key, values = override.key_or_group, values_of(override)
        if not _belongs(key, ("tracker",)):
            fields = ", ".join(f"tracker.{field}" for field in composed(given)["tracker"] if field != "name")
            raise UsageError(f"{key} is not a field here: choose tracker, {fields}.")
        if len(values) != 1:
            raise bad_value(key, ",".join(values) or "(nothing)", "one value")
        given[key] = values[0]
    tracker = load_tracker(composed(given)["tracker"])
    if tracker == NO_TRACKER:
        raise bad_value("tracker", tracker.name, [name for name in groups()["tracker"] if name != tracker.name])
    return tracker


def _check_device(sweep: str, needed: str | None, hardware: set[str]) -> None:
    """Raise `UsageError` for a sweep that is for one kind of device and would be executed on another."""
    for name in sorted(hardware):
        if needed is not None and _described({"hardware": name}, "device") != needed:
            raise UsageError(
                f"sweep={sweep} is for {needed}, and hardware={name} is not: choose another sweep, or mode=predict "
                "with a hardware that is."
            )


def _check_budget(minutes: float | None, launcher: Any) -> None:
    """Raise `UsageError` for a time after which this launcher cannot stop."""
    if minutes is not None and launcher == "slurm":
        raise UsageError(
            f"time_budget_min={minutes:g} is not valid on a cluster, where every run has a job of its own: choose "
            "null, and cluster.time_limit_min for the time of a job."
        )


def _points(
    grids: list[Grid], repeats: int, cluster: Settings, hardware: str, mode: str, device: Device
) -> list[Settings]:
    """All runs: a whole pass over the grids per repetition, so that slow drift does not fall on one configuration.

    A prediction has no repetitions. ``hardware=auto`` becomes `hardware`: what the cluster names, or this machine's
    device.
    """
    runs = repeats * sum(grid.size for grid in grids)
    if runs > MOST_RUNS:
        raise UsageError(f"The sweep has {runs} runs: choose values and sweep.repeats that make at most {MOST_RUNS}.")
    points = []
    memory_gb = functools.cache(functools.partial(_memory_gb, device))
    for repeat in range(repeats):
        for grid in grids:
            for point in grid.points():
                point = {**cluster, **point}
                named = point.get("hardware", "auto")
                described = hardware if named == "auto" else named
                own_memory = tuple((key, value) for key, value in point.items() if key.lstrip("+") == MEMORY)
                if not grid.takes(memory_gb(described, own_memory)):
                    continue
                if point.get("gpus") == ALL_GPUS:
                    point["gpus"] = str(_all_gpus(described, cluster, device))
                predicted = point.get("mode", mode) == "predict"
                if predicted and repeat > 0:
                    continue
                if point.get("hardware", "auto") == "auto":
                    point["hardware"] = hardware
                if repeats > 1 and not predicted:
                    point["repeat"] = str(repeat)
                points.append(point)
    return points


def _on_gpus(once: Settings, given: dict[str, list[str]], device: Device) -> bool:
    """Whether the runs are on GPUs: those of the hardware that is named, or of this machine."""
    named = given.get("hardware", ["auto"])[0]
    cluster = composed({key: value for key, value in once.items() if _belongs(key, ("cluster",))})["cluster"]
    described = (_hardware_of(cluster) or description_of(device)) if named == "auto" else named
    return bool(_described({"hardware": described}, "device") == "cuda")


def _hardware_of(cluster: dict[str, Any]) -> str | None:
    """The hardware that a cluster names, if it does."""
    named: str | None = checked("cluster.hardware", Annotated[str | None, Text()], cluster.get("hardware"))
    return named


def _described(settings: Settings, field: str) -> Any:
    """One field of the hardware that some settings choose, checked."""
    values = composed(settings)["hardware"]
    return checked(f"hardware.{field}", type_hints(Hardware)[field], values.get(field))


def _memory_gb(device: Device, hardware: str, own: tuple[tuple[str, str], ...]) -> float | None:
    """Memory of one device: what a run's `own` setting is, or the hardware's description says, or this machine has."""
    described: float | None = _described({"hardware": hardware, **dict(own)}, "memory_gb")
    if described is None and device.memory_bytes is not None:
        return device.memory_bytes / 1e9
    return described


def _all_gpus(hardware: str, cluster: Settings, device: Device) -> int:
    """GPUs of a machine: of this one, if it has such GPUs."""
    if device.kind == "cuda" and description_of(device) == hardware:
        return device.count
    count: int = checked("cluster.gpus_per_node", Annotated[int, RANKS], composed(cluster)["cluster"]["gpus_per_node"])
    return count


@functools.cache
def description_of(device: Device) -> str:
    """Name of the hardware description that knows this device: `cpu`, a GPU's, or `gpu` where nobody described it."""
    if device.kind == "cpu":
        return "cpu"
    for option in groups()["hardware"]:
        names = composed({"hardware": option})["hardware"].get("gpu_names", [])
        if device.name in checked("hardware.gpu_names", type_hints(Hardware)["gpu_names"], names):
            return option
    return "gpu"


def _key(override: Override) -> str:
    return ("+" if override.is_add() else "") + override.key_or_group


def _belongs(key: str, sections: Sequence[str]) -> bool:
    return key.lstrip("+").partition(".")[0] in sections
