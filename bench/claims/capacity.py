"""Claims on what fits: DDP out of memory, retries of the allocator, offloading."""

from __future__ import annotations

from bench.claims.claim import (
    COURSE_NOTES,
    DOES_NOT_HOLD,
    FSDP_PAPER,
    HOLDS,
    HOLDS_IN_PART,
    PUBLISHED,
    Assessment,
    ClaimRows,
    EvidenceStatement,
    PaperClaim,
    RowQuery,
    format_share,
    get_row,
)
from bench.claims.large_runs import WITHOUT_PAPER, query_left_out
from bench.prediction.prediction import DOES_NOT_FIT, FITS
from bench.records import Record


def _assess_ddp_out_of_memory(rows: ClaimRows) -> Assessment:
    fits = {
        (row["model"], row["effective_strategy"]): row["fit"]
        for row in rows["predicted"]
        if row["effective_strategy"] in ("ddp", "fsdp1/full_shard")
    }
    measured = {row["effective_strategy"]: row["status"] for row in rows["measured"]}
    ddp = get_row(rows["predicted"], model="t5_11b", strategy="ddp")
    needed_gb = ddp["peak_allocated_bytes"] / 1e9
    is_predicted = (
        fits["t5_2b", "ddp"] == FITS
        and fits["t5_11b", "ddp"] == DOES_NOT_FIT
        and fits["t5_11b", "fsdp1/full_shard"] == FITS
    )
    is_measured = measured["ddp"] == "oom" and measured["fsdp/full_shard"] == "ok"
    published = [row["status"] for row in rows["published"]]
    verdict = (
        HOLDS
        if is_predicted and is_measured and "oom" in published
        else HOLDS_IN_PART
        if is_predicted or is_measured
        else DOES_NOT_HOLD
    )
    failed = get_row(rows["measured"], strategy="ddp", status="oom") if is_measured else None
    return Assessment(
        verdict,
        "A whole copy with its gradients and optimizer state does not fit 80 GB at 11.3B, and does at 2.28B."
        if verdict == HOLDS
        else "Not every kind of evidence shows it.",
        (
            EvidenceStatement(
                "published", "Section 5.2: DDP runs out of memory beyond 2.28B; FSDP's bars at 11.3B are there."
            ),
            EvidenceStatement(
                "predicted",
                f"80 GB A100, bf16, batch 8 of 512, full checkpointing: DDP {fits['t5_2b', 'ddp']} at 2.28B and "
                f"{fits['t5_11b', 'ddp']} at 11.3B ({needed_gb:.0f} GB allocated); fully sharded on 64 GPUs 11.3B "
                f"{fits['t5_11b', 'fsdp1/full_shard']}.",
            ),
            EvidenceStatement(
                "measured",
                "The same in miniature, 4 processes of a CPU with 0.27 GiB each, "
                f"{rows['measured'][0]['parameters'] / 1e6:.1f} M parameters: DDP {measured['ddp']}"
                + (f" in {failed['oom_phase']}" if failed else "")
                + f", full sharding {measured['fsdp/full_shard']}.",
            ),
        ),
        {"needed_gb": needed_gb},
    )


CLIFF_SHARE = 0.6
"""Share of the neighbouring point's speed below which a point counts as slowed down by retries."""

LIKELY = 0.5


def _assess_retries(rows: ClaimRows) -> Assessment:
    def read_speed(batch: int, gpus: int) -> float:
        return float(get_row(rows["published"], world_size=gpus, batch_size_per_gpu=batch)["hardware_tflops_per_gpu"])

    is_published = read_speed(2, 128) < CLIFF_SHARE * read_speed(2, 192) and read_speed(
        1, 128
    ) > CLIFF_SHARE * read_speed(1, 192)
    probabilities = {
        (row["batch_size_per_gpu"], row["world_size"]): row["prediction"]["time"]["retry_probability"]
        for row in rows["predicted"]
    }
    most_likely = max(probabilities, key=lambda key: probabilities[key])
    is_predicted = probabilities[2, 128] >= LIKELY
    is_ordered = most_likely == (2, 128) and probabilities[2, 128] > 0
    verdict = HOLDS if is_published and is_predicted else HOLDS_IN_PART if is_published or is_ordered else DOES_NOT_HOLD
    row = get_row(rows["predicted"], world_size=128, batch_size_per_gpu=2)
    wanted = row["prediction"]["memory"]["wanted_bytes"]["value"] / 1e9
    capacity = row["prediction"]["memory"]["capacity_bytes"] / 1e9
    return Assessment(
        verdict,
        "The paper's speed collapses there and nowhere else."
        + (
            " A prediction calls it likely."
            if is_predicted
            else " A prediction calls that point the likeliest of all, without being sure of it."
            if is_ordered
            else " A prediction does not single that point out."
        ),
        (
            EvidenceStatement(
                "published",
                f"Figure 7(b): {read_speed(2, 128):.1f} TFLOP/s on 128 GPUs, {read_speed(2, 192):.1f} on 192; at batch "
                f"1 {read_speed(1, 128):.1f} and {read_speed(1, 192):.1f}.",
            ),
            EvidenceStatement(
                "predicted",
                f"{100 * probabilities[2, 128]:.0f} % likely to retry at batch 2 on 128 GPUs, where {wanted:.0f} of "
                f"{capacity:.0f} GB are wanted, {100 * probabilities[2, 192]:.0f} % on 192; at batch 1 "
                f"{100 * probabilities[1, 128]:.0f} % on 128 ({WITHOUT_PAPER}).",
            ),
        ),
        {f"batch {batch}, {gpus}": value for (batch, gpus), value in probabilities.items()},
    )


def _assess_offloading(rows: ClaimRows) -> Assessment:
    plain = get_row(rows["predicted"], cpu_offload=False)
    offloaded = sorted((row for row in rows["predicted"] if row["cpu_offload"]), key=_describe_offload)
    saved = {
        _describe_offload(row): 1 - row["peak_allocated_bytes"] / plain["peak_allocated_bytes"] for row in offloaded
    }
    slower = {_describe_offload(row): row["step_time_median_s"] / plain["step_time_median_s"] - 1 for row in offloaded}
    zero = {
        (row["source"]["sharding"], row["source"]["metric"]): float(row["source"]["value"]) for row in rows["published"]
    }
    batches = [zero[name, "max_batch_size_per_gpu"] for name in ("ZeRO-2", "ZeRO-2 + CPU offload")]
    times_s = [zero[name, "training_time"] for name in ("ZeRO-2", "ZeRO-2 + CPU offload")]
    is_published = batches[1] > batches[0] and times_s[1] > times_s[0]
    is_predicted = min(saved.values()) > 0 and min(slower.values()) > 0
    verdict = (
        HOLDS if is_published and is_predicted else HOLDS_IN_PART if is_published or is_predicted else DOES_NOT_HOLD
    )
    return Assessment(
        verdict,
        "Both are seen: memory is freed, and every step waits for the link to the host and for its processors."
        if verdict == HOLDS
        else "Not every kind of evidence shows both.",
        (
            EvidenceStatement(
                "predicted",
                "GPT-6.7B, FSDP2, 8 A100, batch 4 of 512: "
                + "; ".join(
                    f"{name} {format_share(-saved[name])} memory, {format_share(slower[name])} time" for name in saved
                )
                + ".",
            ),
            EvidenceStatement(
                "published",
                "t5-large with DeepSpeed's ZeRO-2 on two Titan RTX (Hugging Face's blog, 2021): offloading raises the "
                f"largest batch from {batches[0]:.0f} to {batches[1]:.0f} and the time from {times_s[0]:.1f} to "
                f"{times_s[1]:.1f} s.",
            ),
        ),
        {
            **{f"saved {name}": value for name, value in saved.items()},
            **{f"slower {name}": value for name, value in slower.items()},
        },
    )


def _describe_offload(row: Record) -> str:
    is_on_device = row["config"]["strategy"].get("optimizer_on_device")
    return "parameters offloaded, optimizer on the GPU" if is_on_device else "parameters and optimizer offloaded"


CAPACITY_CLAIMS = (
    PaperClaim(
        key="ddp_out_of_memory",
        text="Beyond 2.28B parameters DDP runs out of memory, where FSDP trains 11.3B.",
        source=f"{FSDP_PAPER}, section 5.2",
        needs={
            "published": RowQuery(PUBLISHED, {"source.source_key": "fsdp_paper", "model": "t5_11b", "strategy": "ddp"}),
            "predicted": RowQuery(
                "predicted/a100_80gb",
                {
                    "sweep": "model_scale",
                    "precision": "bf16",
                    "mixed_precision": "autocast",
                    "model": ("t5_2b", "t5_11b"),
                },
            ),
            "measured": RowQuery(
                "measured/cpu_2core",
                {"model": "t5_mini", "precision": "fp32", "world_size": 4, "memory_limit_bytes": (289910292,)},
            ),
        },
        assess=_assess_ddp_out_of_memory,
    ),
    PaperClaim(
        key="allocation_retries",
        text="GPT-175B at batch 2 on 128 GPUs exhausts memory, so that the allocator retries and training slows down.",
        source=f"{FSDP_PAPER}, section 5.4",
        needs={
            "published": RowQuery(
                PUBLISHED,
                {
                    "source.source_key": "fsdp_paper",
                    "source.figure": "Figure 7(b)",
                    "source.metric": "tflops_per_gpu",
                },
            ),
            "predicted": query_left_out(
                model="gpt_175b", backward_prefetch="pre", world_size=(128, 192, 256, 384, 512)
            ),
        },
        assess=_assess_retries,
        caveat="`alloc_retries` of sweep=gpt_175b_scale on GPUs would tell.",
        is_from_same_source=True,
    ),
    PaperClaim(
        key="offloading",
        text="Offloading to the CPU saves GPU memory and costs time.",
        source=f"{COURSE_NOTES}; {FSDP_PAPER}, section 3.2 mentions it",
        needs={
            "predicted": RowQuery(
                "predicted/claims",
                {"model": "gpt_6b7", "strategy": "fsdp", "world_size": 8, "batch_size_per_gpu": 4},
            ),
            "published": RowQuery(
                PUBLISHED,
                {
                    "source.source_key": "hf_blog_zero_2021",
                    "source.model": "t5-large",
                    "source.sharding": ("ZeRO-2", "ZeRO-2 + CPU offload"),
                },
            ),
        },
        assess=_assess_offloading,
        caveat="No run of this suite has offloaded yet.",
    ),
)
