"""The runs that a check is made of: small ones, each with one question."""

from __future__ import annotations

import dataclasses
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
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import LaunchTask
from bench.launch.worker import WorkerEvent
from bench.planning.request import parse_sweep_request
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
        """A check that ran."""
        return cls(name, PASSED if passed else FAILED, found, expected)

    @property
    def has_failed(self) -> bool:
        """Whether something is wrong with the machine; what did not run says nothing about it."""
        return self.status == FAILED

    def to_dict(self) -> dict[str, str]:
        """As plain values."""
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
