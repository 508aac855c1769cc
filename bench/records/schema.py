"""The row: which columns a record has, their types, units and meanings.

A record is one JSON object: these columns, and beside them the nested parts that a table cannot hold (`NESTED_PARTS`).
`results/README.md` documents the same format for people; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 1

EVIDENCE_KINDS = ("measured", "rehearsed", "predicted", "published")
STATUSES = ("ok", "oom", "error", "timeout", "preempted", "skipped")
FINISHED_STATUSES = ("ok", "oom")
"""Statuses that are results: such a run is not executed again unless forced."""
MIN_STEPS_FOR_INTERVAL, MIN_STEPS_FOR_P95 = 6, 20
"""Timed steps from which on there is a 95 % interval of their median (fewer do not hold it 19 times of 20, all of them
together), and a 95th percentile (of fewer it is the slowest one, more or less)."""
OOM_PHASES = ("init", "forward", "backward", "optimizer")

Record = dict[str, Any]


@dataclass(frozen=True)
class RecordColumn:
    """One column of the table: its name, its pandas dtype and what a reader needs to know."""

    name: str
    dtype: str
    meaning: str


def _build_columns(dtype: str, **meanings: str) -> tuple[RecordColumn, ...]:
    return tuple(RecordColumn(name, dtype, meaning) for name, meaning in meanings.items())


COLUMNS: tuple[RecordColumn, ...] = (
    *_build_columns(
        "string",
        run_id="hash of the complete resolved configuration that can change the result",
        evidence="measured, rehearsed, predicted or published: what kind of statement the row is",
        sweep="name of the sweep that first asked for the run",
    ),
    *_build_columns("Int64", repeat="number of the repetition, from 0", attempt="number of the try, from 0"),
    *_build_columns(
        "string",
        status="ok, oom, error, timeout, preempted or skipped",
        model="name of the model configuration",
        family="model family: the name of its file or installed module, or its module path",
    ),
    *_build_columns(
        "Int64",
        parameters="number of parameters of the whole model, counted before sharding",
        active_parameters="those of them that one token meets: fewer in a mixture of experts",
    ),
    *_build_columns(
        "string",
        strategy="strategy asked for: the name of its file or installed module, or its module path",
        effective_strategy="strategy the run really used, with how it shards and, where only adapters are trained, "
        "lora or qlora: fsdp/full_shard_lora",
    ),
    *_build_columns(
        "Int64",
        sharding_factor="ranks that one copy of the model is spread over: 1 replicates; of zero1/hybrid ranks that one "
        "copy of optimizer state is divided among",
    ),
    *_build_columns(
        "string",
        precision="precision asked for (fp32, tf32, bf16, fp16, bf16_pure, fp8)",
        device="cpu or cuda",
        hardware="name of the hardware description the run was checked against",
    ),
    *_build_columns(
        "Int64",
        world_size="ranks, one per GPU (or CPU process)",
        nodes="machines the ranks ran on",
        batch_size_per_gpu="sequences per rank and micro-batch",
        sequence_length="tokens per sequence (T5: of the encoder)",
        gradient_accumulation="micro-batches per optimizer step",
    ),
    *_build_columns(
        "string",
        activation_checkpointing="none, full, selective, operators, operators_every_2, every_K (every K-th block), or "
        "budget_P (P %)",
    ),
    *_build_columns("boolean", compile="blocks compiled with torch.compile"),
    *_build_columns(
        "Float64",
        tflops_per_gpu="model TFLOP/s per rank: FLOPs of forward and backward without recomputation / median step time",
        hardware_tflops_per_gpu="TFLOP/s per rank including what activation checkpointing computes again",
        mfu="tflops_per_gpu / dense peak of the precision used; empty where the peak is unknown",
        hfu="hardware_tflops_per_gpu / the same peak",
        causal_tflops_per_gpu="tflops_per_gpu with half of the scores where attention is causal (T5: the decoder's "
        "own); equal to it for encoders, a sliding window counted as if it were not there",
        causal_mfu="causal_tflops_per_gpu / the same peak",
        tokens_per_second_per_gpu="tokens read per rank and second (T5: encoder and decoder tokens together)",
        step_time_median_s="median over the timed steps of the slowest rank's time, in seconds; of a strategy whose "
        "steps are not alike (every k-th averages parameters, say) median over periods of k steps of their mean, as "
        "predictions are the mean over a period",
        step_time_p95_s="95th percentile of the same, in seconds; from 20 timed steps (or periods) on",
        step_time_ci_low_s="lower end of the 95 % interval: of the median (order statistics; from 6 timed "
        "steps on), or of the prediction",
        step_time_ci_high_s="upper end of the same interval",
    ),
    *_build_columns(
        "Int64",
        peak_allocated_bytes="peak of allocated tensor memory in a step after warm-up, maximum over ranks",
        peak_active_bytes="the same with blocks freed but still in use by a stream; on CPU equal to allocated",
        peak_reserved_bytes="peak the caching allocator held; on CPU, which does not cache, equal to allocated",
        peak_allocated_overall_bytes="peak of allocated memory over construction and warm-up as well",
        peak_device_used_bytes="memory in use as the driver sees it after the timed steps; on CPU peak resident size",
        alloc_retries="times the caching allocator had to flush and retry during the timed steps, sum over ranks",
        skipped_steps="timed steps in which fp16 gradients overflowed, so that the optimizer did nothing",
    ),
    *_build_columns(
        "boolean",
        degraded="time not representative, for a reason in degraded_by (older rows: allocator retries, skipped steps, "
        "or a CPU slowed by a memory limit)",
    ),
    *_build_columns(
        "string",
        degraded_by="why the time is not representative: allocator retries, skipped steps, a CPU slowed by a memory "
        "limit, other processes on the processors (above 10 % of their time) or on the GPU, a GPU held back by heat or "
        "its power supply",
    ),
    *_build_columns(
        "Float64",
        load_average="load average of the machine over the last minute when timing ended, highest of the machines",
        others_cpu_share="share of the time of the processors the ranks may use that other processes used during the "
        "timed steps (from warm-up on where these took under 0.5 s), of the machine where it was most",
    ),
    *_build_columns(
        "Int64",
        gpu_processes_of_others="other processes that computed on a GPU of the run, before it or beside it, most of "
        "any; 0 within containers that hide them",
        gpu_used_before_bytes="memory of a GPU that was in use before the run, most of any",
    ),
    *_build_columns(
        "Float64",
        gpu_utilization_before="percent of about a second before the run in which a GPU computed, most of any",
        sm_clock_mhz="clock of the multiprocessors under load, lowest of the GPUs, in the middle and at the end",
        memory_clock_mhz="clock of the memory under load, lowest of the same",
        gpu_power_w="power drawn under load, highest of the same",
        gpu_temperature_c="temperature under load, highest of the same",
    ),
    *_build_columns("string", throttle_reasons="what NVML names as holding a GPU's clocks down under load"),
    *_build_columns(
        "Int64", warmup_steps="steps before the timed ones, without those that only memory was observed in"
    ),
    *_build_columns("Float64", warmup_s="seconds that these took, on the host's clock"),
    *_build_columns(
        "Int64", timed_steps="steps that were timed: measurement.steps, or more to last measurement.min_timed_s"
    ),
    *_build_columns("Float64", timed_s="sum of their times, each that of its slowest rank"),
    *_build_columns(
        "string",
        fit="predicted: fits, too close to call (status ok) or does not fit (status oom); empty where nobody knows "
        "how much memory there is",
    ),
    *_build_columns(
        "Int64",
        peak_allocated_low_bytes="predicted: lower end of the interval that holds peak_allocated 19 times of 20",
        peak_allocated_high_bytes="predicted: upper end of the same interval",
        peak_reserved_low_bytes="predicted: lower end of the interval that holds peak_reserved 19 times of 20",
        peak_reserved_high_bytes="predicted: upper end of the same interval",
    ),
    *_build_columns(
        "string",
        limited_by="predicted: what a step waits for most: compute, memory bandwidth, network, kernel launches, "
        "allocator, pipeline bubble or, with offloading, host link or host memory",
    ),
    *_build_columns(
        "Int64",
        memory_limit_bytes="memory each rank was allowed, on a GPU of what "
        "its caching allocator holds, without CUDA's context and NCCL's buffers; empty for no limit",
    ),
    *_build_columns("string", oom_phase="where memory ran out: init, forward, backward or optimizer"),
    *_build_columns(
        "Int64",
        oom_bytes="bytes asked for when memory ran out: on a CPU of the tensor, on a GPU of the segment that its "
        "allocator asked the driver for (2 MiB, 20 MiB or a multiple of 2 MiB)",
        oom_rank="rank that ran out of memory first",
    ),
    *_build_columns("Float64", setup_s="seconds from the start of the ranks to the first timed step"),
    *_build_columns(
        "Float64",
        exposed_communication="share of a profiled or predicted step in communication not hidden by compute, waiting "
        "for slower ranks included; empty where the profiler saw no kernel",
        bubble="pipelines: share of a step in which a rank computes nothing, mean over ranks",
    ),
    *_build_columns("string", error="cause of a failure, one sentence"),
    *_build_columns(
        "string",
        launcher="what started the ranks: local, slurm or alone (`bench.run`); predict where there are none",
        job_id="SLURM job, as array_task; empty elsewhere",
    ),
    *_build_columns("Int64", concurrent_runs="other runs of this store that were on at any time during this one"),
    *_build_columns(
        "string",
        git_sha="commit the run was made with",
        torch_version="version of torch",
    ),
    *_build_columns("boolean", git_clean="code and configuration were as in that commit"),
    *_build_columns(
        "string",
        predictor="predicted: version of the predictor: its number, a hyphen, and a hash of the libraries it traces "
        "and of code that is not the suite's (older rows: a hash of all code)",
    ),
    *_build_columns(
        "string",
        started_at="UTC time the run started, ISO 8601",
        finished_at="UTC time the row was written, ISO 8601",
        attention="attention implementation asked for (sdpa, eager)",
        optimizer="optimizer (adamw, sgd, adafactor, muon, lion, adamw_8bit, adamw_8bit_torchao)",
        optimizer_implementation="fused, foreach or for_loop (muon: of the AdamW beside it), or the library",
        parameter_dtype="dtype parameters are stored in",
        compute_dtype="dtype matmuls run in",
        reduce_dtype="dtype gradients are reduced in",
    ),
    *_build_columns(
        "string",
        mixed_precision="how compute came to be narrower (precision.mixing): autocast; fsdp policy or deepspeed bf16, "
        "which cast parameters; or none",
    ),
    *_build_columns(
        "Float64",
        gradient_clip_norm="norm that gradients were scaled to be within, before the step; empty: left alone",
    ),
    *_build_columns(
        "Int64",
        loss_chunks="parts of a sequence whose loss was computed one after the other; empty: the whole loss",
    ),
    *_build_columns(
        "boolean",
        compiled_loss="true: the loss was computed by torch.compile; empty: by torch's operators",
        activation_offload="true: what blocks keep for backward waited in the host's memory; empty: on the device",
        expandable_segments="true: torch's caching allocator grew its segments by pages; empty: fixed segments",
    ),
    *_build_columns(
        "boolean", gradient_accumulation_sync="gradients communicated after every micro-batch, not only the last"
    ),
    *_build_columns(
        "Int64", bucket_cap_mb="DDP: size of a gradient bucket in MiB; empty for torch's default: 25, the first one 1"
    ),
    *_build_columns(
        "boolean",
        gradient_as_bucket_view="DDP: gradients are views into the buckets",
        static_graph="DDP: every step uses the same parameters in the same order",
        reshard_after_forward="FSDP: free a unit's parameters after its forward (ZeRO-3) or keep them (ZeRO-2)",
        forward_prefetch="FSDP: gather the next unit before the current unit's forward",
    ),
    *_build_columns("string", backward_prefetch="FSDP2: true or false; FSDP1: pre, post or none"),
    *_build_columns("boolean", limit_all_gathers="FSDP1: at most two all-gathers in flight"),
    *_build_columns("Int64", blocks_per_unit="FSDP: transformer blocks gathered as one"),
    *_build_columns(
        "boolean", cpu_offload="FSDP: shards on the CPU and, unless optimizer_on_device, the optimizer step"
    ),
    *_build_columns("Float64", final_loss="loss of the last step, mean over ranks; may be NaN or infinite"),
    *_build_columns(
        "Int64",
        first_nonfinite_loss_step="first step (from 0, warm-up included) whose loss is NaN or infinite; empty if all "
        "are finite",
    ),
    *_build_columns("Int64", seed="seed of weights and data"),
    *_build_columns(
        "string",
        gpu_name="name the device reports; on CPU the processor's",
        hosts="host names, separated by commas",
        trace="file name of the profiler trace beside the row",
        failed_nodes="hosts that failed the health check before the run, separated by commas",
    ),
    *_build_columns(
        "Float64",
        health_matmul_tflops="TFLOP/s of matrix products in the health check before the run, of the slowest rank",
        health_all_reduce_gb_s="bus bandwidth in GB/s of an all-reduce among all ranks in the health check",
    ),
)

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)

NESTED_PARTS: dict[str, str] = {
    "format": "version of this format",
    "config": "the complete resolved configuration",
    "requested": "the strategy's knobs as they were asked for, before `full`, `node` and null were resolved",
    "effective": "the strategy's knobs as the run used them, and the backend of its process group",
    "environment": "versions, variables, each rank's device (what it is, how it is set, who used it before, torch's "
    "settings), topology",
    "flops": "FLOPs per rank and step: model, hardware and causal (model FLOPs with half of causal scores)",
    "losses": "loss of every step from the first, mean over ranks; NaN and infinity as texts",
    "prediction": "predicted rows: memory (ranges and parts in bytes, phase and module of the peak, capacity, verdict) "
    "and time (range and parts in seconds, what limits it)",
    "ranks": "per rank: host, status (ok, oom, error, or killed: still in `phase` when another had failed or time was "
    "up), raw step times in seconds, memory peaks in bytes, allocator retries, who computed how "
    "long on its processors (cpu_load), how its GPUs were under load (gpu_states); of a pipeline also "
    "the seconds of each timed step in which the rank computed, and if profiled the spans of the first of them; "
    "if profiled, of rank 0 the collectives of a step: how many, and the elements of its own tensors in them",
    "concurrent": "the other runs that were on at any time during this one: run_id, launcher, job and hosts",
    "source": "published rows: source, figure, provenance, uncertainty, note and the quantity as it was printed",
}

PREDICTION_ORIGIN = frozenset(
    {
        "attempt",  # which try it was
        "started_at",  # when it was made
        "finished_at",
        "setup_s",
        "git_sha",  # by which code
        "git_clean",
        "predictor",
        "torch_version",  # with which libraries, on which machine
        "environment",
        "hosts",
        "launcher",  # started by what, beside what else
        "job_id",
        "concurrent",
        "concurrent_runs",
        "load_average",
    }
)
"""What differs between two predictions of one run that are equal: when, where and by what each was made. All other
columns and parts are the question (`config` and what follows from it, the sweep that asked) or its answer."""
