"""The runs that a check is made of: small ones, each with one question."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import records
from bench.config import RunConfig, run_config
from bench.errors import ImpossibleError
from bench.hardware.detect import Device
from bench.launch.local import LocalLauncher
from bench.launch.stop import StopSignal
from bench.launch.task import Task
from bench.launch.worker import Event
from bench.planning.compose import composed
from bench.planning.request import read_request
from bench.records import Record

SHORT = ("measurement.warmup_steps=2", "measurement.min_warmup_s=0", "measurement.min_timed_s=0")
"""Of runs whose times nobody looks at: as few steps as are asked for, on a GPU, too."""

TIME_LIMIT_S = 120
"""Of one run: a rank that hangs is a failed check, not a check that never ends."""


@dataclass(frozen=True)
class Ran:
    """What became of one run."""

    record: Record | None
    """None if it could not run here, or left no row."""
    reason: str = ""
    """Why not."""
    took_s: float = 0.0
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


def configure(device: Device, *overrides: str) -> RunConfig:
    """A configuration as the commands compose it on this machine."""
    (point,) = read_request(["sweep=adhoc", *overrides], multirun=False, device=device).points
    return run_config(composed(point))


def execute(runs: Mapping[str, tuple[str, ...]], device: Device, store: Path, stop: StopSignal) -> dict[str, Ran]:
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
    launcher = LocalLauncher({**composed({})["cluster"], "time_limit_s": TIME_LIMIT_S}, device)
    configs: dict[str, RunConfig] = {}
    ran: dict[str, Ran] = {}
    for name, overrides in runs.items():
        try:
            config = configure(device, *overrides)
            launcher.check(config)
            configs[name] = config
        except ImpossibleError as impossible:
            ran[name] = Ran(None, str(impossible))
    took_s: dict[str, float] = {}
    last_start = time.monotonic()

    def keep_time(event: Event) -> None:
        nonlocal last_start
        if event["event"] == "start":
            last_start = time.monotonic()
        elif event["event"] == "end":
            took_s[event["run_id"]] = time.monotonic() - last_start

    if configs:
        launcher.launch([Task(config, force=True) for config in configs.values()], store, "check", stop, keep_time)
    for name, config in configs.items():
        record = records.latest(store, config.run_id)
        ran[name] = Ran(record, "" if record else "it left no row", took_s.get(config.run_id, 0.0))
    return ran
