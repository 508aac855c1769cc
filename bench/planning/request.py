"""What the user asks for: the sweep, the settings of the command line, and how it is to be carried out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from hydra.core.override_parser.types import Override

from bench.config.compose import compose_config
from bench.config.grid import RunSettings, SettingsGrid, parse_grids
from bench.config.groups import list_config_groups
from bench.config.hydra_calls import list_override_values, parse_overrides
from bench.config.parts import MEMORY_KEY
from bench.config.price import POWER_SHARE_HINT, PRICE_HINT, PUE_HINT, CostTerms, parse_cost_terms
from bench.config.run_config import RANK_COUNT_BOUNDS
from bench.core.command_line import require_path
from bench.core.errors import UsageError, invalid_value_error
from bench.core.typed_config import OneOf, TextRule, Within, get_field_types, validate_value
from bench.hardware import Hardware
from bench.hardware.detect import DetectedDevice
from bench.tracking import NO_TRACKER, Tracker, load_tracker

EXECUTION_KEYS = (
    *("store", "dry_run", "force", "time_budget_min", "skip_oom", "report", "search", "sweep", "cluster", "tracker"),
    *("check", "price", "pue", "power_share"),
)
"""Keys (and groups) that say how a sweep is carried out, not what runs are."""

CONTEXT_KEYS = (*EXECUTION_KEYS, "mode", "hardware", "measurement", "seed")
"""Keys that apply to any sweep; naming none but these, and no search, asks for the default sweep."""

SEARCH_KINDS = ("none", "largest_batch")

ASSUMED_KEYS = ("model", "hardware", "precision", "sequence_length")
"""What decides results, and is said where it was not given; what predictions assume of the network is said, too."""

DEFAULT_GPU_SWEEP = "default_gpu"
"""What ``sweep=default`` is where runs are on GPUs."""

ALL_GPUS = "all"
"""``gpus=all``: as many as this machine has or, of another hardware, as a machine takes ranks."""

UNKNOWN_GPU_OPTIONS = {"cuda": "gpu", "rocm": "gpu_rocm"}
"""Descriptions of GPUs that no other one names, by their kind."""

REPEATS_HINT = Annotated[int, Within(1, 1000)]
DEVICE_HINT = Annotated[str | None, OneOf("cpu", "cuda")]

MAX_RUNS = 100_000
"""Of a sweep, repetitions included: as many are planned in minutes."""


class ExecutionOptions(TypedDict):
    """How a sweep is carried out, besides its sections: what no run is hashed by."""

    store: Annotated[str, TextRule("the path of a folder")]
    dry_run: Annotated[bool | str, OneOf(True, False, "script")]
    force: bool
    skip_oom: bool
    time_budget_min: Annotated[float | None, Within(0, 1e6, exclusive_minimum=True, unit="minutes")]
    report: bool
    check: bool
    search: Annotated[str, OneOf(*SEARCH_KINDS)]
    price: PRICE_HINT
    pue: PUE_HINT
    power_share: POWER_SHARE_HINT


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as the user asked for it, expanded but not yet composed run by run."""

    sweep: str
    points: list[RunSettings]
    """Settings of each run, in order."""
    executes_runs: bool
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
    cost_terms: CostTerms
    """What a dry run tells of dollars and kWh."""
    not_given: dict[str, str] = field(default_factory=dict)
    """Of `ASSUMED_KEYS`, those that neither command line nor sweep set, with the value that runs have."""


def parse_sweep_request(arguments: Sequence[str], *, multirun: bool, device: DetectedDevice) -> SweepRequest:
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
    overrides = parse_overrides(list(arguments))
    values_by_key: dict[str, list[str]] = {}
    for override in overrides:
        values = list_override_values(override)
        if not values:
            raise invalid_value_error(override.key_or_group, "(nothing)", "at least one value")
        if len(values) > 1 and not multirun:
            raise UsageError(f"{override.input_line} has several values: add -m to run each of them.")
        values_by_key[_format_key(override)] = values
    execution_values = {key: values for key, values in values_by_key.items() if _is_in_section(key, EXECUTION_KEYS)}
    for key, values in execution_values.items():
        if len(values) > 1:
            raise invalid_value_error(key, ",".join(values), "one value")
    if "sweep" not in execution_values:
        describes_runs = multirun or any(
            key == "search" or not _is_in_section(key, CONTEXT_KEYS) for key in values_by_key
        )
        execution_values["sweep"] = ["adhoc" if describes_runs else "default"]
    execution_settings = {key: values[0] for key, values in execution_values.items()}
    if execution_settings["sweep"] == "default" and _runs_on_gpus(execution_settings, values_by_key, device):
        execution_settings["sweep"] = DEFAULT_GPU_SWEEP
    base_config = compose_config(execution_settings)
    name = execution_settings["sweep"]
    run_axes = {key: values for key, values in values_by_key.items() if key not in execution_values}
    file_grids = parse_grids(name, base_config["sweep"])
    _refuse_execution_keys(name, file_grids)
    grids = [grid.override_axes(run_axes) for grid in file_grids]
    execution_options = {
        key: validate_value(key, hint, base_config[key]) for key, hint in get_field_types(ExecutionOptions).items()
    }
    _check_time_budget(execution_options["time_budget_min"], base_config["cluster"].get("launcher"))
    repeats = validate_value("sweep.repeats", REPEATS_HINT, base_config["sweep"].get("repeats", 1))
    cluster = {key: value for key, value in execution_settings.items() if _is_in_section(key, ("cluster",))}
    hardware = _get_cluster_hardware(base_config["cluster"]) or find_hardware_description(device)
    mode = str(base_config["mode"])
    points = _expand_points(grids, repeats, cluster, hardware, mode, device)
    if not points:
        raise UsageError(f"sweep={name} comes to no run: choose values that its exclusions leave.")
    executed_points = [point for point in points if point.get("mode", mode) != "predict"]
    executes_runs = bool(executed_points)
    required_device = validate_value("sweep.device", DEVICE_HINT, base_config["sweep"].get("device"))
    _check_sweep_device(name, required_device, {point["hardware"] for point in executed_points})
    if execution_options["skip_oom"] and not executes_runs:
        raise UsageError("skip_oom=true is not valid with mode=predict, which executes nothing: choose false.")
    if execution_options["skip_oom"] and execution_options["search"] != "none":
        raise UsageError("skip_oom=true is not valid with a search, which must try what does not fit: choose false.")
    return SweepRequest(
        sweep=name,
        points=points,
        executes_runs=executes_runs,
        store=_parse_store_path(execution_options["store"]),
        dry_run=bool(execution_options["dry_run"]),
        show_script=execution_options["dry_run"] == "script",
        force=execution_options["force"],
        skip_oom=execution_options["skip_oom"],
        time_budget_min=execution_options["time_budget_min"],
        report=execution_options["report"],
        check=execution_options["check"],
        search=execution_options["search"],
        cluster=base_config["cluster"],
        tracker=load_tracker(base_config["tracker"]),
        cost_terms=parse_cost_terms(*(execution_options[key] for key in ("price", "pue", "power_share"))),
        not_given=_find_not_given(grids, base_config, hardware),
    )


def _find_not_given(grids: list[SettingsGrid], base_config: dict[str, Any], hardware: str) -> dict[str, str]:
    """Of `ASSUMED_KEYS`, those that some grid leaves open, with what they come to."""
    sections = [{key.lstrip("+").partition(".")[0] for key in grid.keys} for grid in grids]
    values = {key: base_config[key] for key in ASSUMED_KEYS} | {"hardware": hardware}
    return {
        key: str(value["name"] if isinstance(value, dict) else value)
        for key, value in values.items()
        if not all(key in grid_sections for grid_sections in sections)
    }


def _refuse_execution_keys(sweep: str, grids: list[SettingsGrid]) -> None:
    """Raise `UsageError` where a sweep file sets what runs do not have, which would have no effect."""
    execution_keys = sorted(key for grid in grids for key in grid.keys if _is_in_section(key, EXECUTION_KEYS))
    if execution_keys:
        raise UsageError(
            f"sweep={sweep} sets {execution_keys[0]}, which is no setting of a run: give it on the command line."
        )


def _parse_store_path(text: str) -> Path:
    """The folder that rows go to, whether it is there or not."""
    store = require_path("store", text)
    try:
        if store.exists() and not store.is_dir():
            raise invalid_value_error("store", text, "a folder that can be written to (this is a file)")
    except PermissionError as error:
        raise invalid_value_error("store", text, f"a folder that can be read ({error.strerror})") from None
    return store


def parse_tracker(arguments: Sequence[str]) -> Tracker:
    """Read the command line of what only sends: ``tracker.mode=offline`` and its like; wandb unless another is named.

    Raises
    ------
    UsageError
        On anything but a tracker that keeps something, and its fields.
    """
    tracker_settings = {"tracker": "wandb"}
    for override in parse_overrides(list(arguments)):
        key, values = override.key_or_group, list_override_values(override)
        if not _is_in_section(key, ("tracker",)):
            fields = ", ".join(
                f"tracker.{field}" for field in compose_config(tracker_settings)["tracker"] if field != "name"
            )
            raise UsageError(f"{key} is not a field here: choose tracker, {fields}.")
        if len(values) != 1:
            raise invalid_value_error(key, ",".join(values) or "(nothing)", "one value")
        tracker_settings[key] = values[0]
    tracker = load_tracker(compose_config(tracker_settings)["tracker"])
    if tracker == NO_TRACKER:
        raise invalid_value_error(
            "tracker", tracker.name, [name for name in list_config_groups()["tracker"] if name != tracker.name]
        )
    return tracker


def _check_sweep_device(sweep: str, required_device: str | None, hardware_names: set[str]) -> None:
    """Raise `UsageError` for a sweep that is for one kind of device and would be executed on another."""
    for name in sorted(hardware_names):
        device = _get_hardware_field({"hardware": name}, "device")
        if required_device is not None and ("cuda" if device == "rocm" else device) != required_device:
            raise UsageError(
                f"sweep={sweep} is for {required_device}, and hardware={name} is not: choose another sweep, or "
                "mode=predict "
                "with a hardware that is."
            )


def _check_time_budget(minutes: float | None, launcher: Any) -> None:
    """Raise `UsageError` for a time after which this launcher cannot stop."""
    if minutes is not None and launcher == "slurm":
        raise UsageError(
            f"time_budget_min={minutes:g} is not valid on a cluster, where every run has a job of its own: choose "
            "null, and cluster.time_limit_min for the time of a job."
        )


def _expand_points(
    grids: list[SettingsGrid], repeats: int, cluster: RunSettings, hardware: str, mode: str, device: DetectedDevice
) -> list[RunSettings]:
    """All runs: a whole pass over the grids per repetition, so that slow drift does not fall on one configuration.

    A prediction has no repetitions. ``hardware=auto`` becomes `hardware`: what the cluster names, or this machine's
    device.
    """
    num_runs = repeats * sum(grid.size for grid in grids)
    if num_runs > MAX_RUNS:
        raise UsageError(
            f"The sweep has {num_runs} runs: choose values and sweep.repeats that make at most {MAX_RUNS}."
        )
    points = []
    get_memory_gb = functools.cache(functools.partial(_get_memory_gb, device))
    for repeat in range(repeats):
        for grid in grids:
            for point in grid.iterate_points():
                point = {**cluster, **point}
                requested_hardware = point.get("hardware", "auto")
                point_hardware = hardware if requested_hardware == "auto" else requested_hardware
                own_memory = tuple((key, value) for key, value in point.items() if key.lstrip("+") == MEMORY_KEY)
                if not grid.takes_memory_gb(get_memory_gb(point_hardware, own_memory)):
                    continue
                if point.get("gpus") == ALL_GPUS:
                    point["gpus"] = str(_count_all_gpus(point_hardware, cluster, device))
                is_prediction = point.get("mode", mode) == "predict"
                if is_prediction and repeat > 0:
                    continue
                if point.get("hardware", "auto") == "auto":
                    point["hardware"] = hardware
                if repeats > 1 and not is_prediction:
                    point["repeat"] = str(repeat)
                points.append(point)
    return points


def _runs_on_gpus(execution_settings: RunSettings, values_by_key: dict[str, list[str]], device: DetectedDevice) -> bool:
    """Whether the runs are on GPUs: those of the hardware that is named, or of this machine."""
    requested_hardware = values_by_key.get("hardware", ["auto"])[0]
    cluster = compose_config(
        {key: value for key, value in execution_settings.items() if _is_in_section(key, ("cluster",))}
    )["cluster"]
    hardware_name = (
        (_get_cluster_hardware(cluster) or find_hardware_description(device))
        if requested_hardware == "auto"
        else requested_hardware
    )
    return bool(_get_hardware_field({"hardware": hardware_name}, "device") != "cpu")


def _get_cluster_hardware(cluster: dict[str, Any]) -> str | None:
    """The hardware that a cluster names, if it does."""
    hardware_name: str | None = validate_value(
        "cluster.hardware", Annotated[str | None, TextRule()], cluster.get("hardware")
    )
    return hardware_name


def _get_hardware_field(settings: RunSettings, field: str) -> Any:
    """One field of the hardware that some settings choose, checked."""
    values = compose_config(settings)["hardware"]
    return validate_value(f"hardware.{field}", get_field_types(Hardware)[field], values.get(field))


def _get_memory_gb(device: DetectedDevice, hardware: str, own_settings: tuple[tuple[str, str], ...]) -> float | None:
    """Memory of one device: what a run's `own_settings` setting is, or the hardware's description says, or this machine
    has."""
    memory_gb: float | None = _get_hardware_field({"hardware": hardware, **dict(own_settings)}, "memory_gb")
    if memory_gb is None and device.memory_bytes is not None:
        return device.memory_bytes / 1e9
    return memory_gb


def _count_all_gpus(hardware: str, cluster: RunSettings, device: DetectedDevice) -> int:
    """GPUs of a machine: of this one, if it has such GPUs."""
    if device.kind != "cpu" and find_hardware_description(device) == hardware:
        return device.count
    count: int = validate_value(
        "cluster.gpus_per_node", Annotated[int, RANK_COUNT_BOUNDS], compose_config(cluster)["cluster"]["gpus_per_node"]
    )
    return count


@functools.cache
def find_hardware_description(device: DetectedDevice) -> str:
    """Name of the hardware description that knows this device: `cpu`, a GPU's, or of `UNKNOWN_GPU_OPTIONS` where nobody
    described it."""
    if device.kind == "cpu":
        return "cpu"
    for option in list_config_groups()["hardware"]:
        names = compose_config({"hardware": option})["hardware"].get("gpu_names", [])
        if device.name in validate_value("hardware.gpu_names", get_field_types(Hardware)["gpu_names"], names):
            return option
    return UNKNOWN_GPU_OPTIONS[device.kind]


def _format_key(override: Override) -> str:
    return ("+" if override.is_add() else "") + override.key_or_group


def _is_in_section(key: str, sections: Sequence[str]) -> bool:
    return key.lstrip("+").partition(".")[0] in sections
