"""What is compared: strategies x sharding factors x precisions x checkpointing, as far as the user has not fixed them.

Nothing here knows what a strategy does: what can be varied is told by the fields of its file under conf/strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.config.compose import compose_config, compose_shared_config
from bench.config.global_batch import parse_global_batch
from bench.config.grid import RunSettings
from bench.config.groups import list_config_groups
from bench.config.run_config import EVIDENCE_BY_MODE, RunConfig, build_run_config
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision
from bench.core.typed_config import get_field_types, validate_value
from bench.hardware import Hardware
from bench.models.base import BUDGET
from bench.models.checkpointing import CHECKPOINTING_MODES
from bench.strategies import load_strategy

DEFAULT_STRATEGIES = ("ddp", "fsdp")
"""Compared unless asked otherwise; `SINGLE_GPU_STRATEGIES` where there is nothing to spread."""
SINGLE_GPU_STRATEGIES = ("single",)
ACCUMULATION_KEY = "gradient_accumulation"
SYNC_KEY = "gradient_accumulation_sync"
FALLBACK_STRATEGIES = ("fsdp1", "zero1")
"""Compared where only they have a knob that was set; strategies of other libraries come last."""
LAST_RESORT_STRATEGIES = ("tensor_parallel",)
"""Compared besides where nothing else fits: they make the largest layer smaller, at the price of waiting in each."""
PREFERRED_PRECISIONS = ("bf16", "fp16", "fp32")
"""The first that the GPU has a peak for is taken unless asked otherwise."""
COMPARED_BUDGETS = ("budget_20", "budget_40", "budget_60", "budget_80")
"""What ``activation_checkpointing=budget`` comes to, each with the largest batch that fits."""
MAX_MULTI_NODE_FACTORS = 8
"""Sharding factors compared that span nodes, besides the world size: beyond some hundred ranks a shard is small, and
what the next doubling saves is little."""


@dataclass(frozen=True)
class Candidate:
    """One way to train, its batch size still to be found unless it was asked for."""

    settings: RunSettings
    """What is typed for it, without the batch size."""
    config: RunConfig
    has_requested_batch: bool


@dataclass
class CandidateSet:
    """All that is compared under one heading."""

    to_predict: list[Candidate] = field(default_factory=list)
    impossible_reasons: dict[str, int] = field(default_factory=dict)
    """Why some combinations cannot be, and how many."""


def build_candidates(section_settings: RunSettings, knobs: Mapping[str, Sequence[str]]) -> CandidateSet:
    """Everything to compare.

    Parameters
    ----------
    section_settings: settings
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
    candidates = CandidateSet()
    seen_run_ids = set()
    for settings in _list_combinations(section_settings, knobs):
        requested_batch = settings.get("batch_size_per_gpu")
        mode_setting = {"mode": "predict"} if "predict" in EVIDENCE_BY_MODE else {}
        try:
            config = _build_config({**settings, **mode_setting})
            require_peak(config.hardware, config.precision)
        except ImpossibleError as error:
            candidates.impossible_reasons[str(error)] = candidates.impossible_reasons.get(str(error), 0) + 1
            continue
        if config.run_id not in seen_run_ids:
            seen_run_ids.add(config.run_id)
            settings.pop("batch_size_per_gpu", None)
            has_requested_batch = requested_batch is not None or (
                config.global_batch is not None and "gradient_accumulation" in settings
            )
            candidates.to_predict.append(Candidate(settings, config, has_requested_batch=has_requested_batch))
    if not candidates.to_predict:
        raise ImpossibleError(next(iter(candidates.impossible_reasons)))
    return candidates


def _build_config(settings: RunSettings) -> RunConfig:
    """The run that settings come to. Where they ask for a global batch and for no micro-batch, in the smallest that
    come to it, or those of the accumulation that was asked for."""
    global_batch_text = settings.get("global_batch")
    if global_batch_text in (None, "null") or "batch_size_per_gpu" in settings:
        return build_run_config(compose_shared_config(settings))
    other_settings = {key: value for key, value in settings.items() if key not in ("global_batch", ACCUMULATION_KEY)}
    config = build_run_config(compose_shared_config(other_settings))
    config = config.fill_global_batch(parse_global_batch(global_batch_text))
    if ACCUMULATION_KEY not in settings:
        return config
    hint = get_field_types(RunConfig)[ACCUMULATION_KEY]
    accumulation = validate_value(ACCUMULATION_KEY, hint, compose_config(settings)[ACCUMULATION_KEY])
    sized_configs = [config.resize_batch(size) for size in config.valid_batch_sizes or ()]
    configs_by_accumulation = {sized.gradient_accumulation: sized for sized in sized_configs}
    if accumulation not in configs_by_accumulation:
        valid_values = f"{', '.join(map(str, sorted(configs_by_accumulation)))} (global_batch={global_batch_text})"
        raise invalid_value_error(ACCUMULATION_KEY, accumulation, valid_values, ImpossibleError)
    return configs_by_accumulation[accumulation]


def list_last_resort_candidates(section_settings: RunSettings, knobs: Mapping[str, Sequence[str]]) -> list[Candidate]:
    """What is compared besides where nothing fits; nothing if the user has chosen a strategy or a knob of one."""
    if any(key.partition(".")[0] == "strategy" for key in knobs):
        return []
    try:
        return build_candidates(section_settings, {**knobs, "strategy": LAST_RESORT_STRATEGIES}).to_predict
    except ImpossibleError:
        return []


def _list_combinations(section_settings: RunSettings, knobs: Mapping[str, Sequence[str]]) -> Iterator[RunSettings]:
    section_values = compose_config(section_settings)
    gpus, gpus_per_node = (
        validate_value(key, get_field_types(RunConfig)[key], section_values[key]) for key in ("gpus", "gpus_per_node")
    )
    common_axes: dict[str, Sequence[str]] = {key: values for key, values in knobs.items() if key not in ("strategy",)}
    common_axes.setdefault("precision", [choose_default_precision(section_values["hardware"])])
    common_axes["activation_checkpointing"] = [
        mode
        for asked in common_axes.get("activation_checkpointing", CHECKPOINTING_MODES)
        for mode in (COMPARED_BUDGETS if asked == BUDGET else (asked,))
    ]
    accumulates = SYNC_KEY not in {*section_settings, *knobs} and section_values["global_batch"] is not None
    for strategy in _choose_strategies(knobs, gpus):
        strategy_fields = compose_config({"strategy": strategy})["strategy"]
        axes = {**common_axes, "strategy": [strategy]}
        factor_key, reshard_key = "strategy.sharding_factor", "strategy.reshard_after_forward"
        if "stages" in strategy_fields:  # which decide the factor
            stage_counts = [str(factor) for factor in list_sharding_factors(gpus, gpus_per_node) if factor > 1]
            axes.setdefault("strategy.stages", stage_counts or [str(strategy_fields["stages"])])
        elif (
            can_shard(strategy_fields)
            and not {"degree", "tensor"} & strategy_fields.keys()
            and strategy_fields["sharding_factor"] not in strategy_fields
        ):
            # neither the degree nor a knob that the file names in the factor's place decides it
            min_factor = min(load_strategy(strategy_fields["name"]).min_sharding_factor, gpus)
            factors = [factor for factor in list_sharding_factors(gpus, gpus_per_node) if factor >= min_factor]
            axes.setdefault(factor_key, [str(factor) for factor in factors])
        if (
            strategy_fields.get("reshard_after_forward") is True
        ):  # not where the file says otherwise, or leaves it to a library
            axes.setdefault(reshard_key, ["true", "false"])
        for combination in itertools.product(*axes.values()):
            settings = dict(zip(axes, combination, strict=True))
            is_sharded = settings.get(factor_key) != "1"
            if reshard_key not in knobs and not is_sharded and settings.get(reshard_key) == "false":
                continue  # nothing is gathered, so nothing is freed
            yield {**section_settings, **settings}
            if accumulates and is_sharded and can_shard(strategy_fields):
                # whole gradients need not be kept until the last micro-batch where each reduces its own
                yield {**section_settings, **settings, SYNC_KEY: "true"}


def _choose_strategies(knobs: Mapping[str, Sequence[str]], gpus: int) -> Sequence[str]:
    """Those asked for, or those that have every knob that was set."""
    if "strategy" in knobs:
        return knobs["strategy"]
    default_strategies = SINGLE_GPU_STRATEGIES if gpus == 1 else DEFAULT_STRATEGIES
    other_strategies = [
        name
        for name in list_config_groups()["strategy"]
        if name not in (*SINGLE_GPU_STRATEGIES, *DEFAULT_STRATEGIES, *FALLBACK_STRATEGIES)
    ]
    for choices in (default_strategies, DEFAULT_STRATEGIES, FALLBACK_STRATEGIES, other_strategies):
        capable_strategies = [
            name for name in choices if _takes_knobs(compose_config({"strategy": name})["strategy"], knobs)
        ]
        if capable_strategies:
            return capable_strategies
    return default_strategies


def _takes_knobs(strategy_fields: Mapping[str, Any], knobs: Mapping[str, Sequence[str]]) -> bool:
    knob_names = [key.partition(".")[2].partition(".")[0] for key in knobs if key.startswith("strategy.")]
    requested_factors = knobs.get("strategy.sharding_factor", ["1"])
    return all(name in strategy_fields for name in knob_names) and (
        can_shard(strategy_fields) or "1" in requested_factors
    )


def can_shard(strategy_fields: Mapping[str, Any]) -> bool:
    """Whether a strategy, by the fields of its file, spreads a model over several ranks."""
    return strategy_fields.get("sharding_factor", 1) != 1


def list_sharding_factors(gpus: int, gpus_per_node: int) -> list[int]:
    """The factors worth comparing: 1, those within a node, doublings of the node, the world size."""
    node_size = min(gpus_per_node, gpus)
    node_factors = [factor for factor in range(1, node_size + 1) if node_size % factor == 0 and gpus % factor == 0]
    multi_node_factors = [node_size * 2**power for power in range(1, MAX_MULTI_NODE_FACTORS + 1)]
    return sorted({*node_factors, *(factor for factor in multi_node_factors if gpus % factor == 0), gpus})


def choose_default_precision(hardware_fields: Mapping[str, Any]) -> str:
    """The usual precision of a device: bf16 where it has it, then fp16; fp32 on a CPU."""
    if hardware_fields.get("device") == "cpu":
        return "fp32"
    peaks = hardware_fields.get("peak_tflops") or {}
    return next((name for name in PREFERRED_PRECISIONS if name in peaks), PREFERRED_PRECISIONS[0])


def require_peak(hardware: Hardware, precision: Precision) -> None:
    """Raise `ImpossibleError` where a described device has no peak in the format a run computes in."""
    peaks = hardware.peak_tflops
    if precision.tf32 and hardware.device == "cpu":
        raise invalid_value_error("precision", precision.name, "another: TF32 needs an NVIDIA GPU", ImpossibleError)
    if peaks and precision.peak not in peaks:
        supported_precisions = [
            name
            for name in list_config_groups()["precision"]
            if compose_config({"precision": name})["precision"]["peak"] in peaks
        ]
        raise ImpossibleError(
            f"precision={precision.name} is not valid on hardware={hardware.name}, which has no peak for "
            f"{precision.peak}: choose {', '.join(supported_precisions)}."
        )
