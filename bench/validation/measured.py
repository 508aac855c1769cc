"""Step times that were measured on a calibrated machine, beside those that are predicted for it."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config import RunConfig, run_config
from bench.errors import UsageError, bad_value
from bench.hardware import Hardware
from bench.hardware.file import read_hardware
from bench.records import Record
from bench.records.encoding import shown
from bench.reporting.reading import read_store
from bench.simulate.predict import predict_all

WITHIN = 0.10
"""The goal."""

PLUGINS = (("model", "family"), ("strategy", "name"))
"""Fields of a configuration that name a module."""

HEAD = """# Step times on a calibrated machine

Measured rows beside predictions for the calibrated description of the same machine: {calibration}

```
python -m bench.calibrate hardware=cpu output=FILE                        # this machine
python -m bench.sweep sweep=cpu_times store=STORE                          # the runs below
python -m bench.predict validate --measured STORE --hardware FILE          # this page; --output writes it
```

Nothing else may run meanwhile. **Measured** is the median of {repeats} runs' median step times, **range** the least and
the most of them. **Error** is predicted against measured: above 0, the run was faster than predicted. None of these
runs was used in the calibration.

{summary}

| model | shape | batch x length | precision | checkpointing | AdamW | predicted ms | measured ms | range | error |
|---|---|---|---|---|---|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class Compared:
    """One configuration that ran, once or several times."""

    config: RunConfig
    measured_s: tuple[float, ...]
    """Median step time of every run."""
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted against measured, as a share."""
        return self.predicted_s / statistics.median(self.measured_s) - 1


def step_times(store: Path, hardware: Path) -> str:
    """The table in Markdown.

    Raises
    ------
    UsageError
        If the store has no rows of runs that can be compared, or the file describes no speeds.
    """
    described = read_hardware(hardware.resolve())
    return page(compared(store, described), described)


def compared(store: Path, hardware: Hardware) -> list[Compared]:
    """Every configuration of the store that ran on such a device in one process, predicted for this one."""
    if hardware.speeds is None:
        raise bad_value("hardware", hardware.name, "a file with speeds, as python -m bench.calibrate writes it")
    runs: dict[str, list[tuple[RunConfig, float]]] = defaultdict(list)
    contents = read_store(store)
    problems = list(contents.unreadable)
    for file, row in zip(contents.files, contents.records, strict=True):
        if row["status"] == "ok" and row["evidence"] == "measured" and row.get("device") == hardware.device:
            try:
                config = dataclasses.replace(recorded_config(row), hardware=hardware, repeat=0)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                problems.append(f"{file}: {error}")
                continue
            if config.gpus == 1 and row.get("step_time_median_s") is not None:
                runs[config.run_id].append((config, row["step_time_median_s"]))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    if not runs:
        raise UsageError(f"{store} has no row of one process on {hardware.device} that ended well.")
    configs = [several[0][0] for several in runs.values()]
    found = []
    for config, several, prediction in zip(configs, runs.values(), predict_all(configs), strict=True):
        if prediction.time is None:
            raise bad_value("hardware", hardware.name, f"one that was calibrated in {config.precision.name}")
        found.append(Compared(config, tuple(sorted(time for _, time in several)), prediction.time.step_s.value))
    return sorted(found, key=lambda each: (each.config.model.num_parameters, statistics.median(each.measured_s)))


def recorded_config(row: Record) -> RunConfig:
    """The configuration of a row, of what the suite has.

    A model or strategy of one's own is a module, and who can write to a store does not choose what is imported here.

    Raises
    ------
    ValueError, TypeError, KeyError, AttributeError
        If the row holds no such configuration.
    """
    config = row.get("config") or {}
    for section, field in PLUGINS:
        name = (config.get(section) or {}).get(field)
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise bad_value(f"{section}.{field}", shown(name), "the name of one that comes with the suite")
    if "${" in json.dumps(config):
        raise UsageError("its configuration holds an interpolation (${...}).")
    return run_config(config)


def page(found: Sequence[Compared], hardware: Hardware) -> str:
    """The table, and what it comes to."""
    errors = [each.error for each in found]
    worst = max(errors, key=abs)
    inside = sum(abs(error) <= WITHIN for error in errors)
    summary = (
        f"**{inside} of {len(found)} within {WITHIN:.0%}; {statistics.fmean(map(abs, errors)):.1%} off on average, "
        f"{worst:+.1%} at worst.**"
    )
    repeats = max(len(each.measured_s) for each in found)
    calibration = hardware.sources.get("calibration", hardware.name)
    head = HEAD.format(calibration=calibration, repeats=repeats, summary=summary)
    return head + "".join(f"{_line(each)}\n" for each in found)


def _line(each: Compared) -> str:
    config, measured = each.config, [1e3 * time for time in each.measured_s]
    width = getattr(config.model, "d_model", None) or getattr(config.model, "hidden_size", "")
    cells = (
        config.model.name,
        f"{config.model.num_parameters / 1e6:.1f} M, width {width}",
        f"{config.batch_size_per_gpu} x {config.sequence_length}",
        config.precision.name,
        config.activation_checkpointing,
        config.optimizer.implementation,
        f"{1e3 * each.predicted_s:,.1f}",
        f"{statistics.median(measured):,.1f}",
        f"{measured[0]:,.1f} to {measured[-1]:,.1f}",
        f"{each.error:+.1%}",
    )
    return f"| {' | '.join(cells)} |"
