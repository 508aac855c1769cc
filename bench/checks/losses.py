"""Do all strategies compute on this machine's devices what one CPU process computes?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources

from bench.checks.result import NOT_RUN, Result
from bench.checks.runs import SHORT, Ran
from bench.hardware.detect import Device
from bench.planning.compose import groups

GLOBAL_BATCH = 8
"""Sequences per step, however many ranks share them: what a loss depends on."""

MODELS = {"t5": "t5_tiny", "gpt": "gpt_tiny"}

SETTINGS = ("precision=fp32", "sequence_length=32", "measurement.steps=3", *SHORT)

T5_TOO = ("single", "ddp", "fsdp", "fsdp1")
"""Strategies that are run with both families; of the others GPT is enough."""

TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""Of the largest relative difference: GPUs add up in another order than CPUs."""

STEPS = 5
"""Losses that are compared, from the first step on: of warm-up and timing together."""

REFERENCE = "losses.json"
"""Beside this file: the losses of one CPU process, by model (``tests/test_check.py`` makes them anew and compares)."""


def loss_runs(device: Device) -> dict[str, tuple[str, ...]]:
    """The settings of a run of every strategy, at the largest world size up to 4 that this machine has."""
    size = next(size for size in (4, 2, 1) if size <= max(device.count, 1)) if device.kind == "cuda" else 2
    runs: dict[str, tuple[str, ...]] = {}
    for family, model in MODELS.items():
        for strategy in T5_TOO if family == "t5" else groups()["strategy"]:
            gpus = 1 if strategy == "single" else size
            runs[f"{strategy} {family}"] = (
                f"model={model}",
                f"strategy={strategy}",
                f"gpus={gpus}",
                f"batch_size_per_gpu={GLOBAL_BATCH // gpus}",
                *SETTINGS,
            )
    return runs


def reference_losses() -> dict[str, list[float]]:
    """The committed losses of one CPU process, by family."""
    losses: dict[str, list[float]] = json.loads(resources.files("bench.checks").joinpath(REFERENCE).read_text())
    return losses


def compare_losses(ran: Mapping[str, Ran], device: Device) -> list[Result]:
    """A check for each run of `loss_runs`."""
    reference, tolerance = reference_losses(), TOLERANCE[device.kind]
    results = []
    for name, run in ran.items():
        expected = reference[name.rpartition(" ")[2]][:STEPS]
        title = f"losses: {name}"
        if run.record is None:
            results.append(Result(title, NOT_RUN, run.reason))
        elif run.error:
            results.append(Result.of(title, False, run.error, f"losses within {tolerance:g} of a CPU's"))
        else:
            found = run.row["losses"][:STEPS]
            worst = max(
                (abs(one / other - 1) for one, other in zip(found, expected, strict=False)), default=float("inf")
            )
            passed = len(found) == len(expected) and worst <= tolerance
            results.append(Result.of(title, passed, f"{worst:.1e} from a CPU's", f"at most {tolerance:g}"))
    return results
