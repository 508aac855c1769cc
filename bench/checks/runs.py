"""The runs that a check is made of: small ones, each with one question."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from bench import records
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.core.units import MIB
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import LaunchTask
from bench.launch.worker import WorkerEvent
from bench.planning.request import parse_sweep_request
from bench.rank.machine_load import NvmlGpu
from bench.records import Record

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"

STATUS_STYLES = {PASSED: "green", FAILED: "bold red", NOT_RUN: "yellow"}


@dataclass(frozen=True)
class CheckResult:
    """One check: what was asked, what was found, and whether that is as it should be."""

    name: str
    status: str
    """passed, failed or not run."""
    found: str
    """In words, with the numbers; of a check that did not run, why."""
    expected: str = ""

    @classmethod
    def from_outcome(cls, name: str, passed: bool, found: str, expected: str) -> CheckResult:
        return cls(name, PASSED if passed else FAILED, found, expected)

    @property
    def has_failed(self) -> bool:
        """Whether something is wrong with the machine; what did not run says nothing about it."""
        return self.status == FAILED

    def to_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def build_results_table(results: Sequence[CheckResult]) -> Table:
    """A row for each check."""
    table = Table("check", "", "found", "expected", box=None, pad_edge=False)
    for result in results:
        texts = (result.name, result.found, result.expected)  # as they are: square brackets are no markup
        name, found, expected = map(Text, texts)
        table.add_row(name, Text(result.status, style=STATUS_STYLES[result.status]), found, expected)
    return table


# --- The runs that a check is made of: small ones, each with one question.

SHORT_RUN_SETTINGS = ("measurement.warmup_steps=2", "measurement.min_warmup_s=0", "measurement.min_timed_s=0")
"""Of runs whose times nobody looks at: as few steps as are asked for, on a GPU, too."""

RUN_TIME_LIMIT_S = 120
"""Of one run: a rank that hangs is a failed check, not a check that never ends."""


@dataclass(frozen=True)
class CheckRun:
    """What became of one run."""

    record: Record | None
    """None if it could not run here, or left no row."""
    reason: str = ""
    """Why not."""
    duration_s: float = 0.0
    """From its start to its end, as its launcher told them."""

    @property
    def row(self) -> Record:
        """The row, where there is one."""
        assert self.record is not None
        return self.record

    @property
    def error(self) -> str:
        """Why there is no measurement; empty if there is one."""
        if self.record is None:
            return self.reason
        return "" if self.record["status"] == "ok" else f"{self.record['status']}: {self.record['error']}"


def build_check_config(device: DetectedDevice, *overrides: str) -> RunConfig:
    """A configuration as the commands compose it on this machine."""
    (point,) = parse_sweep_request(["sweep=adhoc", *overrides], multirun=False, device=device).points
    return build_run_config(compose_config(point))


def execute_runs(
    runs: Mapping[str, tuple[str, ...]], device: DetectedDevice, store: Path, stop_signal: StopSignal
) -> dict[str, CheckRun]:
    """Execute runs one after the other, as a sweep does.

    Parameters
    ----------
    runs: mapping
        The settings of each run, by its name.
    store: Path
        Where the rows go.

    Returns
    -------
    dict
        What became of each, by its name.
    """
    launcher = LocalLauncher({**compose_config({})["cluster"], "time_limit_s": RUN_TIME_LIMIT_S}, device)
    configs: dict[str, RunConfig] = {}
    check_runs: dict[str, CheckRun] = {}
    for name, overrides in runs.items():
        try:
            config = build_check_config(device, *overrides)
            launcher.check(config)
            configs[name] = config
        except ImpossibleError as error:
            check_runs[name] = CheckRun(None, str(error))
    durations_s: dict[str, float] = {}
    last_start_s = time.monotonic()

    def record_duration(event: WorkerEvent) -> None:
        nonlocal last_start_s
        if event["event"] == "start":
            last_start_s = time.monotonic()
        elif event["event"] == "end":
            durations_s[event["run_id"]] = time.monotonic() - last_start_s

    if configs:
        launcher.launch(
            [LaunchTask(config, force=True) for config in configs.values()],
            store,
            "check",
            stop_signal,
            record_duration,
        )
    for name, config in configs.items():
        record = records.read_latest_row(store, config.run_id)
        check_runs[name] = CheckRun(record, "" if record else "it left no row", durations_s.get(config.run_id, 0.0))
    return check_runs


# --- What machine this is, and whether it is free when the check is over.

TOKEN_VARIABLE = "BENCH_CHECK"
"""Environment variable by which the processes of a check are known: all that it starts inherit it."""

MAX_LEFTOVER_BYTES = 256 * MIB
"""How much more of a GPU's memory may be in use after the check than before it."""


def describe_machine(device: DetectedDevice) -> CheckResult:
    """Device, driver and torch: whether they go together was found out when the device was detected."""
    import torch

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    torch_build = next((f"{name} {version}" for name, version in builds.items() if version), "CPU build")
    capability = ".".join(map(str, device.capability)) if device.capability else ""
    count_text = f"{device.count} x " if device.count else ""
    descriptions = [f"{count_text}{device.name}", f"torch {torch.__version__} ({torch_build})"]
    descriptions += [f"compute capability {capability}"] if capability else []
    descriptions += [f"driver {driver}"] if (driver := read_driver_version()) else []
    if device.unusable_reason is not None:
        return CheckResult.from_outcome("machine", False, device.unusable_reason, "GPUs that can be used")
    return CheckResult.from_outcome("machine", True, ", ".join(descriptions), "")


def read_driver_version() -> str:
    """Of NVIDIA's driver; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def read_used_bytes(device: DetectedDevice) -> dict[int, int]:
    """Memory in use, by anybody, on every visible GPU of which NVML says it, by its number; nothing on a CPU."""
    import torch

    gpu_indices = range(device.count) if device.kind == "cuda" else ()
    usage_by_gpu = {gpu_index: NvmlGpu(torch.device("cuda", gpu_index)).read_usage() for gpu_index in gpu_indices}
    return {gpu_index: usage["used_bytes"] for gpu_index, usage in usage_by_gpu.items() if "used_bytes" in usage}


def find_leftover_processes(token: str) -> list[int]:
    """Process ids of this machine, but for this process and its parents, that have the check's token."""
    token_entry = f"{TOKEN_VARIABLE}={token}".encode()
    process_ids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and token_entry in (entry / "environ").read_bytes().split(b"\0"):
                process_ids.append(int(entry.name))
        except OSError:
            continue
    return process_ids


def check_device_free(device: DetectedDevice, token: str, used_before: dict[int, int]) -> CheckResult:
    """No process of the check is left, and no memory of a GPU."""
    leftover_processes = find_leftover_processes(token)
    extra_bytes = [
        used_after - used_before[gpu_index]
        for gpu_index, used_after in read_used_bytes(device).items()
        if gpu_index in used_before
    ]
    leftover_bytes = max(extra_bytes, default=0)
    found_text = f"{len(leftover_processes)} processes left" + (
        f", {leftover_bytes / MIB:,.0f} MiB more in use" if extra_bytes else ""
    )
    expected_text = "none" + (f", and no more than {MAX_LEFTOVER_BYTES / MIB:.0f} MiB" if extra_bytes else "")
    return CheckResult.from_outcome(
        "device free afterwards",
        not leftover_processes and leftover_bytes <= MAX_LEFTOVER_BYTES,
        found_text,
        expected_text,
    )
