"""Why something does not fit, and from how many GPUs on it would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.advice.candidates import LAST_RESORT_STRATEGIES, can_shard
from bench.advice.ranking import RankedCandidate
from bench.advice.wording import MEMORY_PART_LABELS, MODEL_STATE_PARTS, format_gib, format_memory_use, join_items
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.parameter_facts import find_parameter_facts
from bench.prediction.prediction import FITS

MAX_GPUS_TRIED = 16_384
SHARDING_STRATEGY = "fsdp"
SCALE_OUT_STRATEGIES = (SHARDING_STRATEGY, *LAST_RESORT_STRATEGIES)
"""What is spread where the strategies compared do not fit however far, or shard nothing."""


def count_state_bytes(candidate: RankedCandidate) -> int:
    """What does not depend on the batch: parameters, gradients and optimizer state, as they are at the peak."""
    return sum(candidate.prediction.memory.parts.get(name, 0) for name in MODEL_STATE_PARTS)


def is_too_large_at_any_batch(candidate: RankedCandidate) -> bool:
    """Whether no batch however small would fit."""
    capacity = candidate.prediction.memory.capacity
    return capacity is not None and count_state_bytes(candidate) > capacity


def describe_misfit(candidate: RankedCandidate) -> str:
    """Why a candidate does not fit, in a sentence part: what needs the memory."""
    memory = candidate.prediction.memory
    if memory.is_host_memory_short:
        assert memory.host_capacity is not None
        host_share_text = f"its share of its machine's memory is {format_gib(memory.host_capacity)} GiB"
        return f"what a rank offloads needs {format_gib(memory.host)} GiB, and {host_share_text}"
    assert memory.capacity is not None
    if is_too_large_at_any_batch(candidate):
        state_labels = [MEMORY_PART_LABELS[name] for name in MODEL_STATE_PARTS if memory.parts.get(name)]
        return (
            f"{join_items(state_labels)} alone need {format_gib(count_state_bytes(candidate))} of "
            f"{format_gib(memory.capacity)} GiB"
        )
    largest_parts = sorted(memory.parts.items(), key=lambda item: -item[1])[:2]
    parts_text = join_items([f"{format_gib(size)} {MEMORY_PART_LABELS[name]}" for name, size in largest_parts if size])
    peak_location = f"in {memory.phase}" + (f" of {memory.module}" if memory.module else "")
    largest_batch_text = (
        f"; the largest batch that fits is {candidate.largest_batch}" if candidate.largest_batch else ""
    )
    return (
        f"batch {candidate.config.batch_size_per_gpu} needs {format_memory_use(candidate)} {peak_location}: "
        f"{parts_text}{largest_batch_text}"
    )


@dataclass(frozen=True)
class ScaleOutResult:
    """What spreading over more GPUs comes to."""

    predicted_strategies: tuple[str, ...]
    """The strategies of which something was predicted."""
    smallest_fit: tuple[str, int] | None
    """The one that fits on the fewest GPUs, and on how many; None if none does."""


def find_scale_out(infeasible: Sequence[RankedCandidate]) -> ScaleOutResult:
    """Spread what comes nearest to fitting over more GPUs, doubling their number again and again.

    With the strategies compared, as far as they can shard; where none of them fits, or none can, with
    `SCALE_OUT_STRATEGIES`.

    Parameters
    ----------
    infeasible: sequence of rows
        What does not fit, nearest first.
    """
    strategy_names = {candidate.config.strategy.name for candidate in infeasible}
    sharding_strategies = [name for name in strategy_names if can_shard(compose_config({"strategy": name})["strategy"])]
    sharding_strategies.sort(key=lambda name: (name in LAST_RESORT_STRATEGIES, name))
    scale_out = _find_scale_out_with(infeasible[0], sharding_strategies)
    if scale_out.smallest_fit is not None:
        return scale_out
    fallback_scale_out = _find_scale_out_with(
        infeasible[0], [name for name in SCALE_OUT_STRATEGIES if name not in sharding_strategies]
    )
    return ScaleOutResult(
        (*scale_out.predicted_strategies, *fallback_scale_out.predicted_strategies), fallback_scale_out.smallest_fit
    )


def _find_scale_out_with(candidate: RankedCandidate, strategy_names: Sequence[str]) -> ScaleOutResult:
    """The same with some strategies; of those that need equally few GPUs the first."""
    settings = {
        key: value
        for key, value in candidate.settings.items()
        if not key.lstrip("+").startswith("strategy") and key != "global_batch"
    }
    settings["gradient_accumulation"] = str(candidate.config.gradient_accumulation)
    named_configs = []
    for name in strategy_names:
        gpu_count = candidate.config.gpus
        while (gpu_count := 2 * gpu_count) <= MAX_GPUS_TRIED:
            larger_settings = {"strategy": name, "strategy.sharding_factor": "full", "gpus": str(gpu_count)}
            try:
                named_configs.append((name, build_run_config(compose_config({**settings, **larger_settings}))))
            except ImpossibleError:
                continue
    predicted_fits = [
        (name, config.gpus, prediction.memory.verdict == FITS)
        for (name, config), prediction in zip(
            named_configs, predict_configs([config for _, config in named_configs]), strict=True
        )
        if not isinstance(prediction, Unpredictable)
    ]
    fitting_counts = [(name, gpu_count) for name, gpu_count, does_fit in predicted_fits if does_fit]
    smallest_fit = min(fitting_counts, key=lambda fit: fit[1], default=None)
    return ScaleOutResult(tuple(dict.fromkeys(name for name, *_ in predicted_fits)), smallest_fit)


def list_notes(config: RunConfig) -> list[str]:
    """What is odd about a candidate, though possible."""
    factor, name = config.strategy.resolved_sharding_factor, config.strategy.name
    longest_dimension = find_parameter_facts(config.model).longest_first_dimension
    if factor > config.model.num_parameters:
        return [f"{name} with F={factor} has more shards than the model has parameters: most ranks hold nothing of it"]
    if name == SHARDING_STRATEGY and factor > longest_dimension:
        return [
            f"{name} with F={factor} leaves ranks with nothing to hold: parameters are sharded on their first "
            f"dimension, and the longest is {longest_dimension}"
        ]
    return []
