"""The row that comes of a run: columns from its configuration, its ranks' outcomes and where they ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bench.config.run_config import RunConfig
from bench.config.speed_columns import compute_speed_columns
from bench.core.installation import read_torch_version
from bench.rank import environment
from bench.rank.backend import REHEARSAL_BACKEND, choose_backend
from bench.rank.machine_load import (
    CpuLoad,
    GpuInfo,
    compute_others_cpu_share,
    count_other_processes,
    find_cpu_degradations,
    find_gpu_degradations,
    format_ranges,
)
from bench.records import Record
from bench.records.schema import MIN_STEPS_FOR_P95

if TYPE_CHECKING:
    from bench.rank.run_rank import RankOutcome
    from bench.rank.timed_loop import RankSamples


def compute_slowest_rank_times(step_times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Time of each step: that of its slowest rank. A run is as fast as the rank the others wait for.

    Raises
    ------
    ValueError
        If the ranks timed different numbers of steps.
    """
    return [max(times) for times in zip(*step_times_by_rank, strict=True)]


def compute_period_means(step_times_s: Sequence[float], period: int) -> list[float]:
    """Mean step time of each period of so many consecutive steps: with 1 the step times as they are.

    Raises
    ------
    ValueError
        If the steps are not whole periods.
    """
    if len(step_times_s) % period:
        raise ValueError(f"{len(step_times_s)} steps are not whole periods of {period}")
    return [statistics.fmean(step_times_s[start : start + period]) for start in range(0, len(step_times_s), period)]


def compute_percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` (0 to 1) of the values lie, linear between neighbours."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def compute_median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the median from order statistics, whatever the distribution.

    The number of values below the true median is binomial(n, 1/2); the interval runs from the k-th smallest to the
    k-th largest value for the largest k that keeps the confidence (Conover, Practical Nonparametric Statistics,
    section 3.2).

    Returns
    -------
    tuple or None
        None where there are too few values: even their whole range does not hold the median so often. For 95 % it
        takes 6.
    """
    ordered = sorted(values)
    n = len(ordered)
    if 2 * 0.5**n > 1 - confidence:
        return None
    tail_probability, k = 0.0, 0
    for num_below in range(n // 2):
        tail_probability += math.comb(n, num_below) / 2**n
        if 2 * tail_probability > 1 - confidence:
            break
        k = num_below + 1
    return ordered[k - 1], ordered[n - k]


def compute_median(values: Sequence[float]) -> float:
    return statistics.median(values)


# --- The row that comes of a run: columns from its configuration, its ranks' outcomes and where they ran.

KNOB_COLUMNS = {
    "bucket_cap_mb",
    "gradient_as_bucket_view",
    "static_graph",
    "reshard_after_forward",
    "forward_prefetch",
    "limit_all_gathers",
    "blocks_per_unit",
    "cpu_offload",
}
"""Knobs of strategies that have a column of their own; others are under `effective` alone."""


def build_measured_columns(config: RunConfig, outcomes: list[RankOutcome]) -> Record:
    """The columns that come from what the ranks measured, or rank 0 alone rehearsed, all of them having ended well.

    Memory is the maximum over ranks, a step's time that of its slowest rank, the loss the mean over ranks that know
    it (each has an equal share of the batch). Where a strategy's steps are not alike, the mean step of each period
    stands for a step.
    """
    rank_samples = [
        outcome.samples for outcome in sorted(outcomes, key=lambda outcome: outcome.rank) if outcome.samples
    ]
    step_times_s = compute_slowest_rank_times([sample.step_times_s for sample in rank_samples])
    period_times_s = compute_period_means(step_times_s, config.strategy.step_period)
    step_time_s = compute_median(period_times_s)
    low, high = compute_median_interval(period_times_s) or (None, None)
    known_losses = [
        sample.losses for sample in rank_samples if sample.losses
    ]  # of a pipeline, the ranks of the last stage
    losses = [sum(step_losses) / len(step_losses) for step_losses in zip(*known_losses, strict=True)]
    retries = sum(sample.peaks.alloc_retries for sample in rank_samples)
    skipped = max(sample.skipped_steps for sample in rank_samples)
    on_cpu = config.hardware.device == "cpu"
    others_cpu_share = compute_others_cpu_share(_group_cpu_loads_by_host(outcomes))
    applies_by_reason = {
        "the allocator flushed its cache": retries > 0,
        "fp16 skipped steps": skipped > 0,
        "a memory limit slows a CPU": on_cpu and config.hardware.memory_limit_gib is not None,
    }
    degradations = [reason for reason, applies in applies_by_reason.items() if applies]
    degradations += find_cpu_degradations(others_cpu_share) if on_cpu else _find_gpu_degradations(outcomes)
    device_used = [sample.peaks.device_used for sample in rank_samples if sample.peaks.device_used is not None]
    exposed_shares = [
        sample.exposed_communication for sample in rank_samples if sample.exposed_communication is not None
    ]
    if config.is_rehearsed:  # nothing was communicated
        exposed_shares = []
    return {
        **compute_speed_columns(config, step_time_s),
        "step_time_p95_s": compute_percentile(period_times_s, 0.95)
        if len(period_times_s) >= MIN_STEPS_FOR_P95
        else None,
        "step_time_ci_low_s": low,
        "step_time_ci_high_s": high,
        "peak_allocated_bytes": max(sample.peaks.allocated for sample in rank_samples),
        "peak_active_bytes": max(sample.peaks.active for sample in rank_samples),
        "peak_reserved_bytes": max(sample.peaks.reserved for sample in rank_samples),
        "peak_allocated_overall_bytes": max(sample.peaks.allocated_overall for sample in rank_samples),
        "peak_device_used_bytes": max(device_used, default=None),
        "alloc_retries": retries,
        "skipped_steps": skipped,
        "degraded": bool(degradations),
        "degraded_by": "; ".join(degradations) or None,
        "load_average": max((load.load_average for load in _list_cpu_loads(rank_samples)), default=None),
        "others_cpu_share": others_cpu_share,
        **_build_gpu_columns(outcomes),
        "warmup_steps": max(sample.warmup_steps for sample in rank_samples),
        "warmup_s": max(sample.warmup_s for sample in rank_samples),
        "timed_steps": len(step_times_s),
        "timed_s": sum(step_times_s),
        "setup_s": max(sample.setup_s for sample in rank_samples),
        "exposed_communication": max(exposed_shares, default=None),
        "bubble": _compute_idle_share(rank_samples),
        "final_loss": losses[-1] if losses else None,
        "first_nonfinite_loss_step": next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None),
        "losses": losses,
    }


def _list_cpu_loads(samples: Sequence[RankSamples]) -> list[CpuLoad]:
    return [sample.cpu_load for sample in samples if sample.cpu_load is not None]


def _group_cpu_loads_by_host(outcomes: Sequence[RankOutcome]) -> dict[str, list[CpuLoad]]:
    """What was computed on the ranks' processors, by host."""
    hosts = {outcome.host for outcome in outcomes}
    return {
        host: _list_cpu_loads([outcome.samples for outcome in outcomes if outcome.host == host and outcome.samples])
        for host in hosts
    }


def _list_gpu_states(outcomes: Sequence[RankOutcome]) -> Iterator[tuple[GpuInfo, list[GpuInfo]]]:
    """Every GPU of the run: who used it before, and how it was under load."""
    for outcome in outcomes:
        states = outcome.samples.gpu_states if outcome.samples else []
        for gpu_index, usage_before in enumerate(outcome.device.get("before", ())):
            yield usage_before, [state for state in states if state["gpu"] == gpu_index]


def _find_gpu_degradations(outcomes: Sequence[RankOutcome]) -> list[str]:
    return sorted(
        {
            degradation
            for usage_before, states in _list_gpu_states(outcomes)
            for degradation in find_gpu_degradations(usage_before, states)
        }
    )


def _build_gpu_columns(outcomes: Sequence[RankOutcome]) -> Record:
    """How the run's GPUs were used by others, and how they were under load: of each number the worst."""
    gpus = list(_list_gpu_states(outcomes))
    states = [state for _, states in gpus for state in states]

    def list_readings(name: str) -> list[float]:
        return [state[name] for state in states if name in state]

    reasons = {reason for state in states for reason in state.get("throttle_reasons", ())}
    return {
        "gpu_processes_of_others": max(
            (count_other_processes(usage_before, states) for usage_before, states in gpus), default=None
        ),
        "gpu_used_before_bytes": max(
            (usage_before["used_bytes"] for usage_before, _ in gpus if "used_bytes" in usage_before), default=None
        ),
        "gpu_utilization_before": max(
            (float(usage_before["utilization"]) for usage_before, _ in gpus if "utilization" in usage_before),
            default=None,
        ),
        "sm_clock_mhz": min(list_readings("sm_clock_mhz"), default=None),
        "memory_clock_mhz": min(list_readings("memory_clock_mhz"), default=None),
        "gpu_power_w": max(list_readings("power_w"), default=None),
        "gpu_temperature_c": max(list_readings("temperature_c"), default=None),
        "throttle_reasons": ", ".join(sorted(reasons)) or None,
    }


def _compute_idle_share(samples: Sequence[RankSamples]) -> float | None:
    """Share of a step in which a rank computes nothing, mean over ranks and steps; None where nobody took note."""
    busy_and_step_times = [(sample.busy_s, sample.step_times_s) for sample in samples if sample.busy_s is not None]
    if not busy_and_step_times:
        return None
    return 1 - sum(sum(busy_s) / sum(step_times_s) for busy_s, step_times_s in busy_and_step_times) / len(
        busy_and_step_times
    )


def build_configured_columns(config: RunConfig) -> Record:
    """The columns that are known before a run starts."""
    values = config.to_dict()
    strategy_values = values["strategy"]
    backend = REHEARSAL_BACKEND if config.is_rehearsed else choose_backend(config)
    return {
        "run_id": config.run_id,
        "evidence": config.evidence,
        "repeat": config.repeat,
        "model": config.model.name,
        "family": config.model.family,
        "parameters": config.model.num_parameters,
        "active_parameters": config.model.num_active_parameters,
        "strategy": config.strategy.name,
        "effective_strategy": config.effective_strategy,
        "sharding_factor": config.strategy.resolved_sharding_factor,
        "precision": config.precision.name,
        "device": config.hardware.device,
        "hardware": config.hardware.name,
        "world_size": config.gpus,
        "nodes": config.nodes,
        "batch_size_per_gpu": config.batch_size_per_gpu,
        "sequence_length": config.sequence_length,
        "gradient_accumulation": config.gradient_accumulation,
        "activation_checkpointing": config.activation_checkpointing,
        "compile": config.compile,
        "memory_limit_bytes": config.hardware.memory_limit_bytes,
        "attention": config.model.attention,
        "optimizer": config.optimizer.name,
        "optimizer_implementation": config.optimizer.implementation,
        "parameter_dtype": config.precision.parameters,
        "compute_dtype": config.precision.compute,
        "reduce_dtype": config.precision.reduce,
        "mixed_precision": _describe_mixed_precision(config),
        "gradient_accumulation_sync": config.gradient_accumulation_sync,
        "gradient_clip_norm": config.gradient_clip_norm,
        "loss_chunks": config.loss_chunks,
        "compiled_loss": config.compiles_loss or None,
        "activation_offload": config.activation_offload or None,
        "expandable_segments": config.expandable_segments or None,
        "seed": config.seed,
        "config": values,
        "requested": config.requested,
        "effective": {**strategy_values, "backend": backend},
        **{name: value for name, value in strategy_values.items() if name in KNOB_COLUMNS},
        # FSDP2 knows it as a switch, FSDP1 as a choice: one column holds both.
        "backward_prefetch": str(strategy_values["backward_prefetch"]).lower()
        if "backward_prefetch" in strategy_values
        else None,
    }


def _describe_mixed_precision(config: RunConfig) -> str:
    if not config.precision.is_mixed:
        return "none"
    return config.strategy.describe_mixed_precision(config.precision)


def build_environment_columns(outcomes: list[RankOutcome]) -> Record:
    """The columns that say what a run ran on."""
    device_by_rank = {f"rank {outcome.rank}": outcome.device for outcome in outcomes if outcome.device}
    gpu_names = sorted({str(device_info["name"]) for device_info in device_by_rank.values() if device_info.get("name")})
    hosts = sorted({outcome.host for outcome in outcomes})
    return {
        **environment.find_commit(),
        "torch_version": read_torch_version()["__version__"],
        "gpu_name": ", ".join(gpu_names) or None,
        "hosts": ",".join(hosts) or environment.get_host_name(),
        **environment.build_health_columns(device_by_rank.values()),
        "environment": {
            **environment.describe_software(),
            "topology": environment.query_gpu_topology(),
            "devices": device_by_rank,
        },
    }


def build_rank_rows(outcomes: list[RankOutcome]) -> list[Record]:
    """What each rank measured, raw."""
    rows = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.rank):
        row: Record = {"rank": outcome.rank, "host": outcome.host, "status": outcome.status}
        if outcome.samples is not None:
            peaks = {
                f"peak_{name}_bytes" if name != "alloc_retries" else name: value
                for name, value in asdict(outcome.samples.peaks).items()
            }
            row |= {"step_times_s": outcome.samples.step_times_s, "setup_s": outcome.samples.setup_s, **peaks}
            busy_values = {"busy_s": outcome.samples.busy_s, "busy_spans_s": outcome.samples.busy_spans_s}
            row |= {name: value for name, value in busy_values.items() if value is not None}
            if outcome.samples.cpu_load is not None:
                row["cpu_load"] = asdict(outcome.samples.cpu_load) | {
                    "cpus": format_ranges(outcome.samples.cpu_load.cpus)
                }
            if outcome.samples.collectives is not None:
                row["collectives"] = outcome.samples.collectives
            if outcome.samples.gpu_states:
                row["gpu_states"] = outcome.samples.gpu_states
        if "health" in outcome.device:
            row["health"] = outcome.device["health"]
        if outcome.error is not None:
            row |= {"error": outcome.error, "phase": outcome.phase}
        rows.append(row)
    return rows
