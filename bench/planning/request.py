"""What the user asks for: the sweep, the settings of the command line, and how it is to be carried out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from bench.errors import UsageError, bad_value, require_at_least, require_choice
from bench.hardware.detect import Device
from bench.planning.compose import composed, groups, parse, values_of
from bench.planning.grid import Grid, Settings, read_grids
from bench.tracking import NO_TRACKER, Tracker, load_tracker

EXECUTION = (
    *("store", "dry_run", "force", "time_budget_min", "skip_oom", "report", "search", "sweep", "cluster", "tracker"),
)
"""Keys (and groups) that say how a sweep is carried out, not what runs are."""

CONTEXT = (*EXECUTION, "mode", "hardware", "measurement", "seed")
"""Keys that apply to any sweep; naming none but these, and no search, asks for the default sweep."""

SEARCHES = ("none", "largest_batch")


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
    base = composed(once)
    name = once["sweep"]
    run_axes = {key: values for key, values in given.items() if key not in execution}
    grids = [grid.overridden(run_axes) for grid in read_grids(name, base["sweep"])]
    require_choice("search", base["search"], SEARCHES)
    if not isinstance(base["dry_run"], bool) and base["dry_run"] != "script":
        raise bad_value("dry_run", base["dry_run"], "true or false, or script for the batch scripts too")
    for key in ("force", "skip_oom", "report"):
        if not isinstance(base[key], bool):
            raise bad_value(key, base[key], "true or false")
    _check_budget(base["time_budget_min"], base["cluster"]["launcher"])
    repeats = base["sweep"].get("repeats", 1)
    if not isinstance(repeats, int) or isinstance(repeats, bool):
        raise bad_value("sweep.repeats", repeats, "a whole number of at least 1")
    require_at_least("sweep.repeats", repeats, 1)
    if not isinstance(base["store"], (str, int, float)) or isinstance(base["store"], bool) or base["store"] == "":
        raise bad_value("store", base["store"], "the path of a folder")
    cluster = {key: value for key, value in once.items() if _belongs(key, ("cluster",))}
    hardware = base["cluster"].get("hardware") or description_of(device)
    mode = str(base["mode"])
    points = _points(grids, repeats, cluster, hardware, mode)
    if not points:
        raise UsageError(f"sweep={name} comes to no run: choose values that its exclusions leave.")
    executed = [point for point in points if point.get("mode", mode) != "predict"]
    executes = bool(executed)
    _check_device(name, base["sweep"].get("device"), {point["hardware"] for point in executed})
    if base["skip_oom"] and not executes:
        raise UsageError("skip_oom=true is not valid with mode=predict, which executes nothing: choose false.")
    if base["skip_oom"] and base["search"] != "none":
        raise UsageError("skip_oom=true is not valid with a search, which must try what does not fit: choose false.")
    return Request(
        sweep=name,
        points=points,
        executes=executes,
        store=Path(str(base["store"])),
        dry_run=bool(base["dry_run"]),
        show_script=base["dry_run"] == "script",
        force=base["force"],
        skip_oom=base["skip_oom"],
        time_budget_min=base["time_budget_min"],
        report=base["report"],
        search=base["search"],
        cluster=base["cluster"],
        tracker=load_tracker(base["tracker"]),
    )


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
        if needed is not None and composed({"hardware": name})["hardware"]["device"] != needed:
            raise UsageError(
                f"sweep={sweep} is for {needed}, and hardware={name} is not: choose another sweep, or mode=predict "
                "with a hardware that is."
            )


def _check_budget(minutes: Any, launcher: str) -> None:
    """Raise `UsageError` unless `minutes` is a time after which this launcher can stop."""
    if minutes is None:
        return
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes < math.inf:
        raise bad_value("time_budget_min", minutes, "a number of minutes above 0, or null")
    if launcher == "slurm":
        raise UsageError(
            f"time_budget_min={minutes} is not valid on a cluster, where every run has a job of its own: choose null, "
            "and cluster.time_limit_min for the time of a job."
        )


def _points(grids: list[Grid], repeats: int, cluster: Settings, hardware: str, mode: str) -> list[Settings]:
    """All runs: a whole pass over the grids per repetition, so that slow drift does not fall on one configuration.

    A prediction has no repetitions. ``hardware=auto`` becomes `hardware`: what the cluster names, or this machine's
    device.
    """
    points = []
    for repeat in range(repeats):
        for grid in grids:
            for point in grid.points():
                point = {**cluster, **point}
                predicted = point.get("mode", mode) == "predict"
                if predicted and repeat > 0:
                    continue
                if point.get("hardware", "auto") == "auto":
                    point["hardware"] = hardware
                if repeats > 1 and not predicted:
                    point["repeat"] = str(repeat)
                points.append(point)
    return points


@functools.cache
def description_of(device: Device) -> str:
    """Name of the hardware description that knows this device: `cpu`, a GPU's, or `gpu` where nobody described it."""
    if device.kind == "cpu":
        return "cpu"
    for option in groups()["hardware"]:
        if device.name in composed({"hardware": option})["hardware"].get("gpu_names", []):
            return option
    return "gpu"


def _key(override: Override) -> str:
    return ("+" if override.is_add() else "") + override.key_or_group


def _belongs(key: str, sections: Sequence[str]) -> bool:
    return key.lstrip("+").partition(".")[0] in sections
