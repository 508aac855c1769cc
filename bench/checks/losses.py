"""Do all strategies compute on this machine's devices what one CPU process computes?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources

from bench.checks.runs import NOT_RUN, SHORT_RUN_SETTINGS, CheckResult, CheckRun
from bench.config.compose import compose_config
from bench.config.groups import list_config_groups
from bench.hardware.detect import DetectedDevice
from bench.strategies import load_strategy

GLOBAL_BATCH = 8
"""Sequences per step, however many ranks share them: what a loss depends on."""

MODEL_BY_FAMILY = {"t5": "t5_tiny", "gpt": "gpt_tiny"}

LOSS_RUN_SETTINGS = ("precision=fp32", "sequence_length=32", "measurement.steps=3", *SHORT_RUN_SETTINGS)

T5_STRATEGIES = ("single", "ddp", "fsdp", "fsdp1")
"""Strategies that are run with both families; of the others GPT is enough."""

LOSS_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""Of the largest relative difference: GPUs add up in another order than CPUs."""

COMPARED_STEPS = 5
"""Losses that are compared, from the first step on: of warm-up and timing together."""

REFERENCE_FILE = "losses.json"
"""Beside this file: the losses of one CPU process, by model (a test makes them anew and compares)."""


def build_loss_runs(device: DetectedDevice) -> dict[str, tuple[str, ...]]:
    """The settings of a run of every strategy, at the largest world size up to 4 that this machine has."""
    world_size = (
        next(world_size for world_size in (4, 2, 1) if world_size <= max(device.count, 1))
        if device.kind != "cpu"
        else 2
    )
    runs: dict[str, tuple[str, ...]] = {}
    for family, model in MODEL_BY_FAMILY.items():
        for strategy in T5_STRATEGIES if family == "t5" else list_comparable_strategies():
            gpus = 1 if strategy == "single" else world_size
            runs[f"{strategy} {family}"] = (
                f"model={model}",
                f"strategy={strategy}",
                f"gpus={gpus}",
                f"batch_size_per_gpu={GLOBAL_BATCH // gpus}",
                *LOSS_RUN_SETTINGS,
            )
    return runs


def list_comparable_strategies() -> list[str]:
    """The options whose losses are those of one process."""
    names = {
        option: compose_config({"strategy": option})["strategy"]["name"] for option in list_config_groups()["strategy"]
    }
    return [option for option, name in names.items() if load_strategy(name).trains_as_one_process]


def load_reference_losses() -> dict[str, list[float]]:
    """The committed losses of one CPU process, by family."""
    losses: dict[str, list[float]] = json.loads(resources.files("bench.checks").joinpath(REFERENCE_FILE).read_text())
    return losses


def compare_losses(runs: Mapping[str, CheckRun], device: DetectedDevice) -> list[CheckResult]:
    """A check for each run of `build_loss_runs`."""
    reference, tolerance = load_reference_losses(), LOSS_TOLERANCE[device.torch_device]
    results = []
    for name, run in runs.items():
        expected_losses = reference[name.rpartition(" ")[2]][:COMPARED_STEPS]
        title = f"losses: {name}"
        if run.record is None:
            results.append(CheckResult(title, NOT_RUN, run.reason))
        elif run.error:
            results.append(CheckResult.from_outcome(title, False, run.error, f"losses within {tolerance:g} of a CPU's"))
        else:
            measured_losses = run.row["losses"][:COMPARED_STEPS]
            worst_error = max(
                (
                    abs(loss / expected_loss - 1)
                    for loss, expected_loss in zip(measured_losses, expected_losses, strict=False)
                ),
                default=float("inf"),
            )
            passed = len(measured_losses) == len(expected_losses) and worst_error <= tolerance
            results.append(
                CheckResult.from_outcome(title, passed, f"{worst_error:.1e} from a CPU's", f"at most {tolerance:g}")
            )
    return results
