"""One sentence of advice, with the numbers it is derived from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.advice.candidates import LAST_RESORT_STRATEGIES, can_shard
from bench.advice.ranking import RankedCandidate
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.groups import list_config_groups
from bench.config.run_config import RunConfig, build_run_config
from bench.core import presentation
from bench.core.errors import ImpossibleError
from bench.core.presentation import build_variant, format_number
from bench.core.units import GIB
from bench.hardware.derived import describe_assumed_share
from bench.hardware.interconnect import describe_network
from bench.models.checkpointing import describe_checkpointing
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.parameter_facts import find_parameter_facts
from bench.prediction.prediction import FITS

MIN_NETWORK_SHARE = 0.05
"""Share of a step from which waiting for the network is given as a reason."""

NEGLIGIBLE_SLOWDOWN = 0.02
"""Loss of speed for which nobody should put up with sharding."""

MAX_USUAL_STEP_TOKENS = 4 * 2**20
"""Tokens of one optimizer step from which a ranking warns."""

LINKS_PREFIX = "hardware.speeds.links."
"""Of settings that change a single number of the links."""

MIN_VISIBLE_DIFFERENCE = 0.005
"""Difference that no percentage shows."""


def describe_advice(possible: Sequence[RankedCandidate], infeasible: Sequence[RankedCandidate]) -> str:
    """What to do, and why.

    Parameters
    ----------
    possible, infeasible: sequences of rows
        As `rank_with_last_resort` gives them.
    """
    fitting = [candidate for candidate in possible if candidate.does_fit]
    if not possible:
        return _describe_no_fit(infeasible)
    if possible[0].prediction.time is None:
        return _describe_by_memory(fitting or possible)
    if not fitting:
        candidate = min(possible, key=lambda candidate: candidate.prediction.memory.reserved.value)
        return (
            f"Too close to call: {describe_candidate(candidate)} needs about {format_memory_use(candidate)}, and "
            "nothing is predicted to fit; "
            "try it, or take more GPUs."
        )
    if len(possible) + len(infeasible) == 1:
        return _describe_only_candidate(possible[0])
    best = choose_recommended(fitting)
    return (
        f"Use {describe_candidate(best)}: "
        f"{_describe_sharding_reason(best, possible, infeasible)}{_describe_runner_up(best, fitting)}."
    )


def list_warnings(candidates: Sequence[RankedCandidate]) -> list[str]:
    """Why a ranking may not compare like with like: steps of more tokens than models of this size are trained with,
    where no global batch was asked for; and that most of what is known of the hardware is assumed.

    Sources: McCandlish et al. 2018, arXiv:1812.06162 (the largest useful batch, as the gradient noise scale predicts
    it); Llama Team 2024, arXiv:2407.21783, section 3.4.1 (4M tokens at first, then 8M, and 16M after 2.87T tokens).
    """
    assumed_text = describe_assumed_share(candidates[0].config.hardware) if candidates else None
    warnings = [] if assumed_text is None else [assumed_text]
    large_steps = [
        candidate.config.tokens_per_step
        for candidate in candidates
        if candidate.config.global_batch is None and candidate.config.tokens_per_step > MAX_USUAL_STEP_TOKENS
    ]
    if not large_steps:
        return warnings
    return [
        *warnings,
        f"the step of {len(large_steps)} of {presentation.format_plural(len(candidates), 'candidate')} takes more than "
        f"4M tokens (up to {presentation.format_count(max(large_steps))}), and beyond a critical size larger batches "
        "buy little (arXiv:1812.06162; Llama 3 405B took 4M to 16M, arXiv:2407.21783): global_batch=4M_tokens compares "
        "all at one",
    ]


def describe_assumed_network(config: RunConfig, settings: RunSettings) -> str:
    """The first line of an answer: what it takes for granted of the links between GPUs and between nodes.

    Parameters
    ----------
    settings: mapping
        What was typed.
    """
    changed_links = tuple(f"{key}={value}" for key, value in settings.items() if key.startswith(LINKS_PREFIX))
    return describe_network(config.hardware, config.gpus, config.gpus_per_node, changed_links)


def choose_recommended(fitting: Sequence[RankedCandidate]) -> RankedCandidate:
    """The fastest, or a whole copy per GPU where that is as good: it is simpler."""
    replicated = _find_replicated(fitting)
    return (
        replicated
        if replicated is not None
        and _require_tokens_per_second(replicated) > (1 - NEGLIGIBLE_SLOWDOWN) * _require_tokens_per_second(fitting[0])
        else fitting[0]
    )


def _describe_only_candidate(candidate: RankedCandidate) -> str:
    """What becomes of the only candidate."""
    time = candidate.prediction.time
    assert time is not None
    speed_text = (
        f"{presentation.format_count(candidate.tokens_per_second)} tokens/s ({_format_speed_interval(candidate)})"
    )
    peak_share_text = "" if candidate.mfu is None else f"{format_percent(candidate.mfu)} of the peak, "
    return (
        f"{describe_candidate(candidate)} fits, {format_memory_use(candidate)}, and reads {speed_text}: "
        f"{peak_share_text}limited by {time.limited_by}."
    )


def _describe_no_fit(infeasible: Sequence[RankedCandidate]) -> str:
    nearest = infeasible[0]
    return (
        f"Nothing fits: {describe_candidate(nearest)} comes nearest, but {describe_misfit(nearest)}; "
        f"{_describe_scale_out(infeasible)}."
    )


def _describe_scale_out(infeasible: Sequence[RankedCandidate]) -> str:
    scale_out = find_scale_out(infeasible)
    if scale_out.smallest_fit is not None:
        return f"strategy={scale_out.smallest_fit[0]} would fit from {scale_out.smallest_fit[1]} GPUs on"
    if not scale_out.predicted_strategies:
        return "whether it would on more GPUs is not predicted"
    return (
        f"nor would strategy={' or '.join(scale_out.predicted_strategies)} fit on any number of GPUs tried, up to "
        f"{MAX_GPUS_TRIED:,}"
    )


def _describe_by_memory(candidates: Sequence[RankedCandidate]) -> str:
    candidate = candidates[0]
    hardware_hint = ""
    if candidate.config.hardware.speeds is None:
        described_hardware = [
            name
            for name in list_config_groups()["hardware"]
            if compose_config({"hardware": name})["hardware"].get("speeds")
        ]
        hardware_hint = f" (choose one of {', '.join(described_hardware)} to predict time too)"
    reason = f"Only memory is predicted, since {describe_missing_time(candidate.config)}{hardware_hint}"
    return f"{reason}: {describe_candidate(candidate)} needs least, {format_memory_use(candidate)}."


def _describe_sharding_reason(
    best: RankedCandidate, possible: Sequence[RankedCandidate], infeasible: Sequence[RankedCandidate]
) -> str:
    """The reason for how far the best shards."""
    config = best.config
    if config.gpus == 1:
        return f"it fits on the one GPU there is, {format_memory_use(best)}"
    if config.strategy.resolved_sharding_factor == 1:
        return (
            f"a whole copy of the model fits on each GPU ({format_memory_use(best)}), so nothing needs to be gathered"
        )
    replicated = _find_replicated([candidate for candidate in possible if candidate.does_fit])
    if replicated is not None:
        reason = (
            f"a whole copy of the model fits on each GPU too, but {describe_candidate(replicated)} is "
            f"{describe_speed_difference(replicated, best)}"
        )
    elif oversized_candidates := [
        candidate for candidate in infeasible if candidate.config.strategy.resolved_sharding_factor == 1
    ]:
        misfit_text = (
            "for each GPU does not fit"
            if oversized_candidates[0].prediction.memory.is_host_memory_short
            else "does not fit on one GPU"
        )
        reason = f"a whole copy of the model {misfit_text} ({describe_misfit(oversized_candidates[0])})"
    else:
        reason = f"it is the fastest of those that fit ({format_memory_use(best)})"
    return reason + _describe_network_cost(best, possible)


def _find_replicated(candidates: Sequence[RankedCandidate]) -> RankedCandidate | None:
    """The fastest of those with a whole copy per GPU, of those that never gather if there are any."""
    replicated_candidates = [
        candidate for candidate in candidates if candidate.config.strategy.resolved_sharding_factor == 1
    ]
    never_resharded = [
        candidate
        for candidate in replicated_candidates
        if getattr(candidate.config.strategy, "reshard_after_forward", None) is None
    ]
    return next(iter(never_resharded or replicated_candidates), None)


def _describe_network_cost(best: RankedCandidate, possible: Sequence[RankedCandidate]) -> str:
    """What sharding over all GPUs would cost, where it costs waiting for the network."""
    fully_sharded = [
        candidate
        for candidate in possible
        if candidate.config.strategy.resolved_sharding_factor == candidate.config.gpus
    ]
    if best.config.strategy.resolved_sharding_factor == best.config.gpus or not fully_sharded:
        return ""
    assert best.prediction.time is not None
    waiting_share = (
        (_compute_exposed_s_per_token(fully_sharded[0]) - _compute_exposed_s_per_token(best))
        * best.tokens_per_step
        / best.prediction.time.step_s.value
    )
    if waiting_share < MIN_NETWORK_SHARE:
        return ""
    return (
        f", and sharded over all {best.config.gpus} it would wait for the network {format_percent(waiting_share)} of "
        "its time more"
    )


def _describe_runner_up(best: RankedCandidate, fitting: Sequence[RankedCandidate]) -> str:
    """How the next approach compares, and how sure that is."""
    described_approaches = {_find_approach(best)}
    replicated = None if best.config.strategy.resolved_sharding_factor == 1 else _find_replicated(fitting)
    if replicated is not None:
        described_approaches.add(_find_approach(replicated))
    other_candidates = [candidate for candidate in fitting if _find_approach(candidate) not in described_approaches]
    other_candidates = other_candidates or [
        candidate for candidate in fitting if candidate is not best and candidate is not replicated
    ]
    return (
        f"; {describe_candidate(other_candidates[0])} is {describe_speed_difference(other_candidates[0], best)}"
        if other_candidates
        else ""
    )


def describe_speed_difference(candidate: RankedCandidate, best: RankedCandidate) -> str:
    """``4 % slower, within the predictor's uncertainty (−24/+17 %)``."""
    speed_ratio = _require_tokens_per_second(candidate) / _require_tokens_per_second(best)
    certainty = "within" if has_overlapping_speeds(best, candidate) else "beyond"
    difference_text = (
        f"{format_percent(speed_ratio - 1)} faster" if speed_ratio > 1 else f"{format_percent(1 - speed_ratio)} slower"
    )
    speed_text = "as fast" if abs(speed_ratio - 1) < MIN_VISIBLE_DIFFERENCE else difference_text
    less_certain = max(best, candidate, key=_compute_interval_width)
    return f"{speed_text}, {certainty} the predictor's uncertainty ({_format_speed_interval(less_certain)})"


def describe_candidate(candidate: RankedCandidate) -> str:
    """``FSDP2 full shard with no activation checkpointing, bf16, batch 8``."""
    config = candidate.config
    return (
        f"{format_strategy(config)} with {describe_checkpointing(config.activation_checkpointing)}, "
        f"{config.precision.name}, batch {config.batch_size_per_gpu}"
    )


def _find_approach(candidate: RankedCandidate) -> tuple[str, int]:
    return candidate.config.strategy.describe_effective_strategy(
        candidate.config.gpus
    ), candidate.config.strategy.resolved_sharding_factor


def _require_tokens_per_second(candidate: RankedCandidate) -> float:
    assert candidate.tokens_per_second is not None
    return candidate.tokens_per_second


def _compute_exposed_s_per_token(candidate: RankedCandidate) -> float:
    """Seconds of waiting for communication per token that a rank reads."""
    assert candidate.prediction.time is not None
    return candidate.prediction.time.exposed_communication_s / candidate.tokens_per_step


def has_overlapping_speeds(first: RankedCandidate, second: RankedCandidate) -> bool:
    """Whether the intervals of their tokens per second overlap."""
    (first_low, first_high), (second_low, second_high) = _compute_speed_interval(first), _compute_speed_interval(second)
    return first_low <= second_high and second_low <= first_high


def _compute_speed_interval(candidate: RankedCandidate) -> tuple[float, float]:
    """Tokens per second of a rank, at the slowest and at the fastest step expected."""
    assert candidate.prediction.time is not None
    step_time = candidate.prediction.time.step_s
    return candidate.tokens_per_step / step_time.high, candidate.tokens_per_step / step_time.low


def _format_speed_interval(candidate: RankedCandidate) -> str:
    """Of tokens per second: ``−24/+17 %``."""
    assert candidate.prediction.time is not None
    step_time = candidate.prediction.time.step_s
    return presentation.format_interval(1 / step_time.value, 1 / step_time.high, 1 / step_time.low)


def _compute_interval_width(candidate: RankedCandidate) -> float:
    """Of the step time, against it."""
    assert candidate.prediction.time is not None
    step_time = candidate.prediction.time.step_s
    return (step_time.high - step_time.low) / step_time.value


# --- How a candidate and its numbers are called, the same in the table, the details and the advice.

MEMORY_PART_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered parameters",
    "reduced": "buffers for reducing gradients",
    "temporaries": "temporary results",
}
"""Names of `….MEMORY_PARTS` in a sentence."""

MODEL_STATE_PARTS = ("parameters", "gradients", "optimizer")
"""Parts that grow with the model alone, not with the batch."""


NO_RESHARD_SUFFIX = " without resharding"
"""Where gathered parameters are kept until backward."""


def format_strategy(config: RunConfig) -> str:
    """A strategy at its sharding factor: ``DDP``, ``FSDP2 hybrid (F=8)``, ``FSDP2 full shard without resharding``."""
    effective_strategy = config.strategy.describe_effective_strategy(config.gpus).removesuffix("_offload")
    resharded_strategy = effective_strategy.replace("hybrid_shard_grad_op", "hybrid_shard").replace(
        "shard_grad_op", "full_shard"
    )
    label = build_variant(
        config.strategy.name, resharded_strategy, config.strategy.resolved_sharding_factor, config.gpus
    ).label
    offloaded = config.strategy.offloaded_state
    offload_suffix = f" with {offloaded} offloaded" if offloaded else ""
    return label + (NO_RESHARD_SUFFIX if resharded_strategy != effective_strategy else "") + offload_suffix


def format_gib(size_bytes: float) -> str:
    """Bytes in GiB, without the unit."""
    return format_number(size_bytes / GIB)


def format_percent(share: float) -> str:
    """A share as a whole percentage, ``<1 %`` where it is less."""
    rounded_percent = round(100 * share)
    return f"{rounded_percent} %" if rounded_percent or share == 0 else "<1 %"


def format_memory_use(candidate: RankedCandidate) -> str:
    """``46.1 of 79.2 GiB``: what is predicted to be reserved, of what there is."""
    memory = candidate.prediction.memory
    capacity_text = "" if memory.capacity is None else f" of {format_gib(memory.capacity)}"
    return f"{format_gib(memory.reserved.value)}{capacity_text} GiB"


def join_items(items: list[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def format_overrides(settings: RunSettings) -> list[str]:
    """Settings as typed, in the order they were given."""
    return [f"{key}={value.lower() if value in ('True', 'False') else value}" for key, value in settings.items()]


def describe_missing_time(config: RunConfig) -> str:
    """Why no time is predicted for a run."""
    if config.hardware.speeds is None:
        return f"hardware={config.hardware.name} says nothing of its speed"
    name = config.hardware.name
    return f"the machine around the device decides where something is offloaded, and hardware={name} has no host"


# --- Why something does not fit, and from how many GPUs on it would.

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
