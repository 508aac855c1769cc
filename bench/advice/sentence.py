"""One sentence of advice, with the numbers it is derived from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.advice.misfits import MAX_GPUS_TRIED, describe_misfit, find_scale_out
from bench.advice.ranking import RankedCandidate
from bench.advice.wording import describe_missing_time, format_memory_use, format_percent, format_strategy
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.groups import list_config_groups
from bench.config.run_config import WHOLE_LOSS, RunConfig
from bench.core import presentation
from bench.hardware.derived import describe_assumed_share
from bench.hardware.interconnect import describe_network
from bench.models.checkpointing import describe_checkpointing
from bench.prediction.cost.kernels import HALF_PRECISION_FORMATS
from bench.prediction.prediction import TOO_CLOSE
from bench.prediction.trace.kernels import ALIGNED_ROW_BYTES

MIN_NETWORK_SHARE = 0.05
"""Share of a step from which waiting for the network is given as a reason."""

NEGLIGIBLE_SLOWDOWN = 0.02
"""Loss of speed for which nobody should put up with sharding."""

MAX_USUAL_STEP_TOKENS = 4 * 2**20
"""Tokens of one optimizer step from which a ranking warns."""

USUAL_VOCABULARY_MULTIPLE = 64
"""To which vocabularies are rounded up (https://github.com/rasbt/LLMs-from-scratch/pull/582: 50,257 to 50,304)."""

MAX_WARNED_SHARE = 0.9
"""Of the speed of a head's products, below which its vocabulary is warned about."""

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
    where no global batch was asked for; that most of what is known of the hardware is assumed; what slows every
    candidate alike and need not, a vocabulary whose rows are not aligned; and that one step decides whether some fit.

    Sources: McCandlish et al. 2018, arXiv:1812.06162 (the largest useful batch, as the gradient noise scale predicts
    it); Llama Team 2024, arXiv:2407.21783, section 3.4.1 (4M tokens at first, then 8M, and 16M after 2.87T tokens).
    """
    config = candidates[0].config if candidates else None
    texts = [] if config is None else [describe_assumed_share(config.hardware), _describe_unaligned_head(config)]
    warnings = [text for text in (*texts, _describe_second_step(candidates)) if text is not None]
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


def _describe_second_step(candidates: Sequence[RankedCandidate]) -> str | None:
    """That what DDP holds in its second step alone decides whether a candidate fits; None where it decides nothing."""
    decided = [
        memory
        for candidate in candidates
        if candidate.config.hardware.device != "cpu"
        and (memory := candidate.prediction.memory).verdict == TOO_CLOSE
        and memory.capacity is not None
        and memory.allocated.high <= memory.capacity < memory.allocated.high + memory.beside
    ]
    if not decided:
        return None
    extra_text = presentation.format_memory(max(memory.beside for memory in decided))
    return (
        f"DDP holds its gradients twice in its second step, up to {extra_text} more, while it makes its buckets anew: "
        f"of {presentation.format_plural(len(decided), 'candidate')} that decides whether it fits"
    )


def _describe_unaligned_head(config: RunConfig) -> str | None:
    """That the vocabulary makes the head slow; None where it does not."""
    tokens, speeds = getattr(config.model, "vocabulary_size", None), config.hardware.speeds
    if tokens is None or speeds is None or speeds.matmul is None:
        return None
    if config.precision.compute not in HALF_PRECISION_FORMATS:
        return None
    row_bytes = math.gcd(ALIGNED_ROW_BYTES, 2 * tokens)
    share = speeds.matmul.unaligned_share.get(str(row_bytes), 1.0)
    if share > MAX_WARNED_SHARE:
        return None
    multiple = USUAL_VOCABULARY_MULTIPLE * math.ceil(tokens / USUAL_VOCABULARY_MULTIPLE)
    return (
        f"vocabulary_size={tokens} is no multiple of 8, so that the head reaches {format_percent(share)} "
        f"of its speed on {config.hardware.name}: model.vocabulary_size={multiple} has rows that are aligned"
    )


def describe_assumed_network(config: RunConfig, settings: RunSettings) -> str:
    """The first line of an answer: what it takes for granted of the links between GPUs and between nodes.

    Parameters
    ----------
    settings: mapping
        What was typed.
    """
    changed_links = tuple(f"{key}={value}" for key, value in settings.items() if key.startswith(LINKS_PREFIX))
    return describe_network(config.hardware, config.gpus, config.gpus_per_node, changed_links)


def describe_not_given(config: RunConfig, keys: Sequence[str], pattern: str = " (not given: {})") -> str:
    """`` (not given: precision=bf16)``: settings that nobody typed, and what they are; empty where there are none."""
    values = {
        "hardware": config.hardware.name,
        "precision": config.precision.name,
        "sequence_length": config.sequence_length,
        "gpus": config.gpus,
    }
    return pattern.format(", ".join(f"{key}={values[key]}" for key in keys)) if keys else ""


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
    if config.strategy.num_parameter_shards == 1:
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
        candidate for candidate in infeasible if candidate.config.strategy.num_parameter_shards == 1
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
        candidate for candidate in candidates if candidate.config.strategy.num_parameter_shards == 1
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
    replicated = None if best.config.strategy.num_parameter_shards == 1 else _find_replicated(fitting)
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
    """``FSDP2 full shard with no activation checkpointing, bf16, batch 8``; behind it ``loss compiled`` or the like."""
    config = candidate.config
    loss_text = "" if config.loss == WHOLE_LOSS else f", loss {config.loss}"
    return (
        f"{format_strategy(config)} with {describe_checkpointing(config.activation_checkpointing)}, "
        f"{config.precision.name}, batch {config.batch_size_per_gpu}{loss_text}"
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
