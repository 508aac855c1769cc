"""What is compared: strategies x sharding factors x precisions x checkpointing, as far as the user has not fixed them.

Nothing here knows what a strategy does: what can be varied is told by the fields of its file under conf/strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.config import MODES, RunConfig, run_config
from bench.errors import ImpossibleError, bad_value
from bench.hardware import Hardware
from bench.models.blocks import CHECKPOINTING
from bench.planning.compose import composed, groups
from bench.planning.grid import Settings
from bench.precision import Precision
from bench.typed import checked, type_hints

STRATEGIES = ("ddp", "fsdp")
"""Compared unless asked otherwise; `ON_ONE_GPU` where there is nothing to spread."""
ON_ONE_GPU = ("single",)
ALSO_PLAIN = ("fsdp1", "zero1")
"""Compared where only they have a knob that was set; strategies of other libraries come last."""
WHERE_NOTHING_FITS = ("tensor_parallel",)
"""Compared besides where nothing else fits: they make the largest layer smaller, at the price of waiting in each."""
PRECISIONS = ("bf16", "fp16", "fp32")
"""The first that the GPU has a peak for is taken unless asked otherwise."""
MOST_BEYOND_NODE = 8
"""Sharding factors compared that span nodes, besides the world size: beyond some hundred ranks a shard is small, and
what the next doubling saves is little."""


@dataclass(frozen=True)
class Candidate:
    """One way to train, its batch size still to be found unless it was asked for."""

    settings: Settings
    """What is typed for it, without the batch size."""
    config: RunConfig
    asked_batch: bool


@dataclass
class Candidates:
    """All that is compared under one heading."""

    to_predict: list[Candidate] = field(default_factory=list)
    impossible: dict[str, int] = field(default_factory=dict)
    """Why some combinations cannot be, and how many."""


def candidates(section: Settings, knobs: Mapping[str, Sequence[str]]) -> Candidates:
    """Everything to compare.

    Parameters
    ----------
    section: settings
        What all candidates have in common.
    knobs: mapping
        The values that were given for what is compared.

    Raises
    ------
    UsageError
        If a setting is a mistake whatever it is combined with.
    ImpossibleError
        If nothing that was asked for can be.
    """
    found = Candidates()
    seen = set()
    for settings in _points(section, knobs):
        batch = settings.get("batch_size_per_gpu")
        mode = {"mode": "predict"} if "predict" in MODES else {}
        try:
            config = run_config(composed({**settings, **mode}))
            _check_format(config.hardware, config.precision)
        except ImpossibleError as error:
            found.impossible[str(error)] = found.impossible.get(str(error), 0) + 1
            continue
        if config.run_id not in seen:
            seen.add(config.run_id)
            settings.pop("batch_size_per_gpu", None)
            found.to_predict.append(Candidate(settings, config, asked_batch=batch is not None))
    if not found.to_predict:
        raise ImpossibleError(next(iter(found.impossible)))
    return found


def last_resort(section: Settings, knobs: Mapping[str, Sequence[str]]) -> list[Candidate]:
    """What is compared besides where nothing fits; nothing if the user has chosen a strategy or a knob of one."""
    if any(key.partition(".")[0] == "strategy" for key in knobs):
        return []
    try:
        return candidates(section, {**knobs, "strategy": WHERE_NOTHING_FITS}).to_predict
    except ImpossibleError:
        return []


def _points(section: Settings, knobs: Mapping[str, Sequence[str]]) -> Iterator[Settings]:
    """Settings of every combination."""
    values = composed(section)
    gpus, per_node = (checked(key, type_hints(RunConfig)[key], values[key]) for key in ("gpus", "gpus_per_node"))
    common: dict[str, Sequence[str]] = {key: given for key, given in knobs.items() if key not in ("strategy",)}
    common.setdefault("precision", [usual_precision(values["hardware"])])
    common.setdefault("activation_checkpointing", CHECKPOINTING)
    for strategy in _strategies(knobs, gpus):
        fields = composed({"strategy": strategy})["strategy"]
        axes = {**common, "strategy": [strategy]}
        factor, reshard = "strategy.sharding_factor", "strategy.reshard_after_forward"
        if "stages" in fields:  # which decide the factor
            several = [str(number) for number in sharding_factors(gpus, per_node) if number > 1]
            axes.setdefault("strategy.stages", several or [str(fields["stages"])])
        elif can_shard(fields) and "degree" not in fields and fields["sharding_factor"] not in fields:
            # neither the degree nor a knob that the file names in the factor's place decides it
            axes.setdefault(factor, [str(number) for number in sharding_factors(gpus, per_node)])
        if fields.get("reshard_after_forward") is True:  # not where the file says otherwise, or leaves it to a library
            axes.setdefault(reshard, ["true", "false"])
        for combination in itertools.product(*axes.values()):
            settings = dict(zip(axes, combination, strict=True))
            gathers = settings.get(factor) != "1"
            if reshard not in knobs and not gathers and settings.get(reshard) == "false":
                continue  # nothing is gathered, so nothing is freed
            yield {**section, **settings}


def _strategies(knobs: Mapping[str, Sequence[str]], gpus: int) -> Sequence[str]:
    """Those asked for, or those that have every knob that was set."""
    if "strategy" in knobs:
        return knobs["strategy"]
    usual = ON_ONE_GPU if gpus == 1 else STRATEGIES
    others = [name for name in groups()["strategy"] if name not in (*ON_ONE_GPU, *STRATEGIES, *ALSO_PLAIN)]
    for options in (usual, STRATEGIES, ALSO_PLAIN, others):
        able = [name for name in options if _takes(composed({"strategy": name})["strategy"], knobs)]
        if able:
            return able
    return usual


def _takes(fields: Mapping[str, Any], knobs: Mapping[str, Sequence[str]]) -> bool:
    names = [key.partition(".")[2].partition(".")[0] for key in knobs if key.startswith("strategy.")]
    factors = knobs.get("strategy.sharding_factor", ["1"])
    return all(name in fields for name in names) and (can_shard(fields) or "1" in factors)


def can_shard(fields: Mapping[str, Any]) -> bool:
    """Whether a strategy, by the fields of its file, spreads a model over several ranks."""
    return fields.get("sharding_factor", 1) != 1


def sharding_factors(gpus: int, per_node: int) -> list[int]:
    """The factors worth comparing: 1, those within a node, doublings of the node, the world size."""
    node = min(per_node, gpus)
    within = [factor for factor in range(1, node + 1) if node % factor == 0 and gpus % factor == 0]
    doublings = [node * 2**power for power in range(1, MOST_BEYOND_NODE + 1)]
    return sorted({*within, *(factor for factor in doublings if gpus % factor == 0), gpus})


def usual_precision(hardware: Mapping[str, Any]) -> str:
    """The usual precision of a device: bf16 where it has it, then fp16; fp32 on a CPU."""
    if hardware.get("device") == "cpu":
        return "fp32"
    peaks = hardware.get("peak_tflops") or {}
    return next((name for name in PRECISIONS if name in peaks), PRECISIONS[0])


def _check_format(hardware: Hardware, precision: Precision) -> None:
    """Raise `ImpossibleError` where a described device has no peak in the format a run computes in."""
    peaks = hardware.peak_tflops
    if precision.tf32 and hardware.device == "cpu":
        raise bad_value("precision", precision.name, "another: TF32 needs an NVIDIA GPU", ImpossibleError)
    if peaks and precision.peak not in peaks:
        able = [name for name in groups()["precision"] if composed({"precision": name})["precision"]["peak"] in peaks]
        raise ImpossibleError(
            f"precision={precision.name} is not valid on hardware={hardware.name}, which has no peak for "
            f"{precision.peak}: choose {', '.join(able)}."
        )
