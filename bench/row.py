"""The row that comes of a run: columns from its configuration, its ranks' outcomes and where they ran."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from bench.config import RunConfig
from bench.measure import environment
from bench.measure.busyness import CpuLoad, cpu_doubts, others_share
from bench.measure.gpu import Facts, gpu_doubts, others_on
from bench.measure.health import health_columns
from bench.measure.loop import Samples
from bench.measure.processors import ranges
from bench.measure.rehearsal import BACKEND as REHEARSAL
from bench.measure.statistics import median, median_interval, percentile, slowest_rank
from bench.rank import Outcome, backend
from bench.records import Record
from bench.records.schema import STEPS_FOR_P95

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


def measured_row(config: RunConfig, outcomes: list[Outcome]) -> Record:
    """The columns that come from what the ranks measured, or rank 0 alone rehearsed, all of them having ended well.

    Memory is the maximum over ranks, a step's time that of its slowest rank, the loss the mean over ranks that know
    it (each has an equal share of the batch).
    """
    samples = [outcome.samples for outcome in sorted(outcomes, key=lambda outcome: outcome.rank) if outcome.samples]
    steps = slowest_rank([sample.step_times_s for sample in samples])
    step_time_s = median(steps)
    low, high = median_interval(steps) or (None, None)
    known = [sample.losses for sample in samples if sample.losses]  # of a pipeline, the ranks of the last stage
    losses = [sum(losses) / len(losses) for losses in zip(*known, strict=True)]
    retries = sum(sample.peaks.alloc_retries for sample in samples)
    skipped = max(sample.skipped_steps for sample in samples)
    on_cpu = config.hardware.device == "cpu"
    others = others_share(_loads(outcomes))
    reasons = {
        "the allocator flushed its cache": retries > 0,
        "fp16 skipped steps": skipped > 0,
        "a memory limit slows a CPU": on_cpu and config.hardware.memory_limit_gib is not None,
    }
    doubts = [reason for reason, holds in reasons.items() if holds]
    doubts += cpu_doubts(others) if on_cpu else _gpu_doubts(outcomes)
    device_used = [sample.peaks.device_used for sample in samples if sample.peaks.device_used is not None]
    exposed = [sample.exposed_communication for sample in samples if sample.exposed_communication is not None]
    if config.rehearsed:  # nothing was communicated
        exposed = []
    return {
        **speed_row(config, step_time_s),
        "step_time_p95_s": percentile(steps, 0.95) if len(steps) >= STEPS_FOR_P95 else None,
        "step_time_ci_low_s": low,
        "step_time_ci_high_s": high,
        "peak_allocated_bytes": max(sample.peaks.allocated for sample in samples),
        "peak_active_bytes": max(sample.peaks.active for sample in samples),
        "peak_reserved_bytes": max(sample.peaks.reserved for sample in samples),
        "peak_allocated_overall_bytes": max(sample.peaks.allocated_overall for sample in samples),
        "peak_device_used_bytes": max(device_used, default=None),
        "alloc_retries": retries,
        "skipped_steps": skipped,
        "degraded": bool(doubts),
        "degraded_by": "; ".join(doubts) or None,
        "load_average": max((load.load_average for load in _all_loads(samples)), default=None),
        "others_cpu_share": others,
        **_gpu_columns(outcomes),
        "warmup_steps": max(sample.warmup_steps for sample in samples),
        "warmup_s": max(sample.warmup_s for sample in samples),
        "timed_steps": len(steps),
        "timed_s": sum(steps),
        "setup_s": max(sample.setup_s for sample in samples),
        "exposed_communication": max(exposed, default=None),
        "bubble": _idle_share(samples),
        "final_loss": losses[-1] if losses else None,
        "first_nonfinite_loss_step": next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None),
        "losses": losses,
    }


def _all_loads(samples: Sequence[Samples]) -> list[CpuLoad]:
    return [sample.cpu_load for sample in samples if sample.cpu_load is not None]


def _loads(outcomes: Sequence[Outcome]) -> dict[str, list[CpuLoad]]:
    """What was computed on the ranks' processors, by host."""
    hosts = {outcome.host for outcome in outcomes}
    return {
        host: _all_loads([outcome.samples for outcome in outcomes if outcome.host == host and outcome.samples])
        for host in hosts
    }


def _gpus(outcomes: Sequence[Outcome]) -> Iterator[tuple[Facts, list[Facts]]]:
    """Every GPU of the run: who used it before, and how it was under load."""
    for outcome in outcomes:
        states = outcome.samples.gpu_states if outcome.samples else []
        for number, before in enumerate(outcome.device.get("before", ())):
            yield before, [state for state in states if state["gpu"] == number]


def _gpu_doubts(outcomes: Sequence[Outcome]) -> list[str]:
    return sorted({doubt for before, states in _gpus(outcomes) for doubt in gpu_doubts(before, states)})


def _gpu_columns(outcomes: Sequence[Outcome]) -> Record:
    """How the run's GPUs were used by others, and how they were under load: of each number the worst."""
    gpus = list(_gpus(outcomes))
    states = [state for _, states in gpus for state in states]

    def known(name: str) -> list[float]:
        return [state[name] for state in states if name in state]

    reasons = {reason for state in states for reason in state.get("throttle_reasons", ())}
    return {
        "gpu_processes_of_others": max((others_on(before, states) for before, states in gpus), default=None),
        "gpu_used_before_bytes": max(
            (before["used_bytes"] for before, _ in gpus if "used_bytes" in before), default=None
        ),
        "gpu_utilization_before": max(
            (float(before["utilization"]) for before, _ in gpus if "utilization" in before), default=None
        ),
        "sm_clock_mhz": min(known("sm_clock_mhz"), default=None),
        "memory_clock_mhz": min(known("memory_clock_mhz"), default=None),
        "gpu_power_w": max(known("power_w"), default=None),
        "gpu_temperature_c": max(known("temperature_c"), default=None),
        "throttle_reasons": ", ".join(sorted(reasons)) or None,
    }


def _idle_share(samples: Sequence[Samples]) -> float | None:
    """Share of a step in which a rank computes nothing, mean over ranks and steps; None where nobody took note."""
    noted = [(sample.busy_s, sample.step_times_s) for sample in samples if sample.busy_s is not None]
    if not noted:
        return None
    return 1 - sum(sum(busy) / sum(steps) for busy, steps in noted) / len(noted)


def speed_row(config: RunConfig, step_time_s: float) -> Record:
    """The columns that follow from the time of a step."""
    sequences = config.batch_size_per_gpu * config.gradient_accumulation
    count = config.trained.flops_per_sequence(config.sequence_length)
    model_flops = sequences * count.model
    hardware_flops = sequences * count.hardware(config.activation_checkpointing)
    tflops, hardware_tflops = (flops / step_time_s / 1e12 for flops in (model_flops, hardware_flops))
    peak = config.hardware.peak_tflops.get(config.precision.peak)
    return {
        "tflops_per_gpu": tflops,
        "hardware_tflops_per_gpu": hardware_tflops,
        "mfu": tflops / peak if peak else None,
        "hfu": hardware_tflops / peak if peak else None,
        "tokens_per_second_per_gpu": sequences * config.model.tokens_per_sequence(config.sequence_length) / step_time_s,
        "step_time_median_s": step_time_s,
        "flops": {"model": model_flops, "hardware": hardware_flops},
    }


def configured_row(config: RunConfig) -> Record:
    """The columns that are known before a run starts."""
    values = config.to_dict()
    used = values["strategy"]
    return {
        "run_id": config.run_id,
        "evidence": config.evidence,
        "repeat": config.repeat,
        "model": config.model.name,
        "family": config.model.family,
        "parameters": config.model.num_parameters,
        "strategy": config.strategy.name,
        "effective_strategy": config.effective_strategy,
        "sharding_factor": config.strategy.factor,
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
        "mixed_precision": _mixed_precision(config),
        "gradient_accumulation_sync": config.gradient_accumulation_sync,
        "seed": config.seed,
        "config": values,
        "requested": config.requested,
        "effective": {**used, "backend": REHEARSAL if config.rehearsed else backend(config)},
        **{name: value for name, value in used.items() if name in KNOB_COLUMNS},
        # FSDP2 knows it as a switch, FSDP1 as a choice: one column holds both.
        "backward_prefetch": str(used["backward_prefetch"]).lower() if "backward_prefetch" in used else None,
    }


def _mixed_precision(config: RunConfig) -> str:
    if not config.precision.mixed:
        return "none"
    return config.strategy.mixed_precision(config.precision)


def environment_row(outcomes: list[Outcome]) -> Record:
    """The columns that say what a run ran on."""
    devices = {f"rank {outcome.rank}": outcome.device for outcome in outcomes if outcome.device}
    names = sorted({str(facts["name"]) for facts in devices.values() if facts.get("name")})
    hosts = sorted({outcome.host for outcome in outcomes})
    return {
        **environment.commit(),
        "torch_version": torch.__version__,
        "gpu_name": ", ".join(names) or None,
        "hosts": ",".join(hosts) or environment.host(),
        **health_columns(devices.values()),
        "environment": {**environment.software(), "topology": environment.topology(), "devices": devices},
    }


def rank_rows(outcomes: list[Outcome]) -> list[Record]:
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
            noted = {"busy_s": outcome.samples.busy_s, "busy_spans_s": outcome.samples.busy_spans_s}
            row |= {name: value for name, value in noted.items() if value is not None}
            if outcome.samples.cpu_load is not None:
                row["cpu_load"] = asdict(outcome.samples.cpu_load) | {"cpus": ranges(outcome.samples.cpu_load.cpus)}
            if outcome.samples.gpu_states:
                row["gpu_states"] = outcome.samples.gpu_states
        if "health" in outcome.device:
            row["health"] = outcome.device["health"]
        if outcome.error is not None:
            row |= {"error": outcome.error, "phase": outcome.phase}
        rows.append(row)
    return rows
