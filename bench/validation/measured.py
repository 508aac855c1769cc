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

from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import UsageError, invalid_value_error
from bench.core.files import format_value
from bench.hardware import Hardware
from bench.hardware.hardware_file import read_hardware_file
from bench.prediction.predictor import predict_runs
from bench.records import Record
from bench.reporting.builder import read_store

MAX_GOAL_ERROR = 0.10
"""The goal."""

PLUGIN_FIELDS = (("model", "family"), ("strategy", "name"))
"""Fields of a configuration that name a module."""

PAGE_HEAD = """# Step times on a calibrated machine

Measured rows beside predictions for the calibrated description of the same machine: {calibration}

```bash not executed: takes an hour of a quiet machine
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
class StepTimeComparison:
    """One configuration that ran, once or several times."""

    config: RunConfig
    measured_s: tuple[float, ...]
    """Median step time of every run."""
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted against measured, as a share."""
        return self.predicted_s / statistics.median(self.measured_s) - 1


def render_step_times(store_path: Path, hardware_path: Path) -> str:
    """The table in Markdown.

    Raises
    ------
    UsageError
        If the store has no rows of runs that can be compared, or the file describes no speeds.
    """
    hardware = read_hardware_file(hardware_path.resolve())
    return render_step_time_page(compare_step_times(store_path, hardware), hardware)


def compare_step_times(store_path: Path, hardware: Hardware) -> list[StepTimeComparison]:
    """Every configuration of the store that ran on such a device in one process, predicted for this one."""
    if hardware.speeds is None:
        raise invalid_value_error(
            "hardware", hardware.name, "a file with speeds, as python -m bench.calibrate writes it"
        )
    runs_by_id: dict[str, list[tuple[RunConfig, float]]] = defaultdict(list)
    contents = read_store(store_path)
    problems = list(contents.unreadable)
    for file, row in zip(contents.files, contents.records, strict=True):
        if row["status"] == "ok" and row["evidence"] == "measured" and row.get("device") == hardware.device:
            try:
                config = dataclasses.replace(parse_recorded_config(row), hardware=hardware, repeat=0)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                problems.append(f"{file}: {error}")
                continue
            if config.gpus == 1 and row.get("step_time_median_s") is not None:
                runs_by_id[config.run_id].append((config, row["step_time_median_s"]))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    if not runs_by_id:
        raise UsageError(f"{store_path} has no row of one process on {hardware.device} that ended well.")
    configs = [repeats[0][0] for repeats in runs_by_id.values()]
    comparisons = []
    for config, repeats, prediction in zip(configs, runs_by_id.values(), predict_runs(configs), strict=True):
        if prediction.time is None:
            raise invalid_value_error("hardware", hardware.name, f"one that was calibrated in {config.precision.name}")
        comparisons.append(
            StepTimeComparison(config, tuple(sorted(time_s for _, time_s in repeats)), prediction.time.step_s.value)
        )
    return sorted(
        comparisons,
        key=lambda comparison: (comparison.config.model.num_parameters, statistics.median(comparison.measured_s)),
    )


def parse_recorded_config(row: Record) -> RunConfig:
    """The configuration of a row, of what the suite has.

    A model or strategy of one's own is a module, and who can write to a store does not choose what is imported here.

    Raises
    ------
    ValueError, TypeError, KeyError, AttributeError
        If the row holds no such configuration.
    """
    config = row.get("config") or {}
    for section, field in PLUGIN_FIELDS:
        name = (config.get(section) or {}).get(field)
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise invalid_value_error(
                f"{section}.{field}", format_value(name), "the name of one that comes with the suite"
            )
    if "${" in json.dumps(config):
        raise UsageError("its configuration holds an interpolation (${...}).")
    return build_run_config(config)


def render_step_time_page(comparisons: Sequence[StepTimeComparison], hardware: Hardware) -> str:
    """The table, and what it comes to."""
    errors = [comparison.error for comparison in comparisons]
    worst_error = max(errors, key=abs)
    within_goal_count = sum(abs(error) <= MAX_GOAL_ERROR for error in errors)
    summary = (
        f"**{within_goal_count} of {len(comparisons)} within {MAX_GOAL_ERROR:.0%}; "
        f"{statistics.fmean(map(abs, errors)):.1%} off on average, "
        f"{worst_error:+.1%} at worst.**"
    )
    repeats = max(len(comparison.measured_s) for comparison in comparisons)
    calibration = hardware.sources.get("calibration", hardware.name)
    page_head = PAGE_HEAD.format(calibration=calibration, repeats=repeats, summary=summary)
    return page_head + "".join(f"{_format_comparison(comparison)}\n" for comparison in comparisons)


def _format_comparison(comparison: StepTimeComparison) -> str:
    config, measured_ms = comparison.config, [1e3 * time_s for time_s in comparison.measured_s]
    width = getattr(config.model, "d_model", None) or getattr(config.model, "hidden_size", "")
    cells = (
        config.model.name,
        f"{config.model.num_parameters / 1e6:.1f} M, width {width}",
        f"{config.batch_size_per_gpu} x {config.sequence_length}",
        config.precision.name,
        config.activation_checkpointing,
        config.optimizer.implementation,
        f"{1e3 * comparison.predicted_s:,.1f}",
        f"{statistics.median(measured_ms):,.1f}",
        f"{measured_ms[0]:,.1f} to {measured_ms[-1]:,.1f}",
        f"{comparison.error:+.1%}",
    )
    return f"| {' | '.join(cells)} |"
