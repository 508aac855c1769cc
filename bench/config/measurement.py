"""How long a run is timed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

from bench.config.run_id import DEFAULT_SETTLING_S, get_fields
from bench.core.typed_config import Within


@dataclass(frozen=True)
class Measurement:
    """How a run is timed."""

    warmup_steps: Annotated[int, Within(2, 10**6)]
    """Optimizer steps before timing starts: at least 2, for the allocator and DDP's bucket rebuild."""
    steps: Annotated[int, Within(1, 10**6)]
    """Optimizer steps that are timed."""
    profile: bool
    """Add a profiled pass after the timed one: writes a trace and the share of exposed communication."""
    min_warmup_s: Annotated[float | None, Within(0, 3600, unit="seconds")] = 0.0
    """Seconds of steps before timing, at least, after the first `warmup_steps`; null for what the device needs."""
    min_timed_s: Annotated[float | None, Within(0, 3600, unit="seconds")] = 0.0
    """Seconds of steps that are timed, at least; null for what the device needs."""


@functools.cache  # the same object for the same values, which `bench.config.run_id` relies on to be quick
def fill_measurement_defaults(measurement: Measurement, device: str) -> Measurement:
    """The same with every null filled in for a kind of device."""
    values = get_fields(measurement)
    unset_fields = [name for name in DEFAULT_SETTLING_S if values[name] is None]
    return Measurement(**{**values, **{name: DEFAULT_SETTLING_S[name].get(device, 0.0) for name in unset_fields}})
