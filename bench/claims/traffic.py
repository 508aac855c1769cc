"""Claims on what is sent: ZeRO's stages and FSDP against DDP, sharding factors, resharding, small all-gathers."""

from __future__ import annotations

import itertools

from bench.claims.claim import (
    DOES_NOT_HOLD,
    FSDP_PAPER,
    HOLDS,
    HOLDS_IN_PART,
    MICROBENCHMARKS,
    PUBLISHED,
    ZERO_PAPER,
    Assessment,
    ClaimRows,
    EvidenceStatement,
    PaperClaim,
    RowQuery,
    count_sent_elements,
    format_share,
)
from bench.core.presentation import format_number

SAME_TRAFFIC = 0.02
"""Relative difference up to which two runs send the same: parameters are padded to whole shards."""

MEASURED = "measured/claims"
PROFILED = {"world_size": 4, "batch_size_per_gpu": 1, "sequence_length": 16, "status": "ok"}
COUNTED = (
    "collectives counted by the profiler, and what each rank sends for them by the algorithms that send least; gloo's "
    "own may send more"
)


def _query_measured(**where: object) -> RowQuery:
    return RowQuery(MEASURED, {**PROFILED, "precision": "fp32", **where})


NEEDS_DDP = {"ddp": _query_measured(strategy="ddp")}


def _assess_equal_traffic(rows: ClaimRows) -> Assessment:
    ddp = count_sent_elements(rows["ddp"][0])
    ratios = {name: count_sent_elements(rows[name][0]) / ddp for name in rows if name != "ddp"}
    equal = [name for name, ratio in ratios.items() if abs(ratio - 1) <= SAME_TRAFFIC]
    verdict = HOLDS if len(equal) == len(ratios) else HOLDS_IN_PART if equal else DOES_NOT_HOLD
    text = "; ".join(f"{name} {ratio:.2f} times DDP's" for name, ratio in ratios.items())
    reason = {
        HOLDS: "Every implementation sends what DDP sends.",
        HOLDS_IN_PART: f"It holds of {' and '.join(equal)}, not of {' and '.join(set(ratios) - set(equal))}.",
        DOES_NOT_HOLD: "No implementation here sends what DDP sends.",
    }[verdict]
    return Assessment(
        verdict,
        reason,
        (
            EvidenceStatement(
                "measured", f"4 processes, DDP sends {ddp:.2f} elements per parameter: {text} ({COUNTED})."
            ),
        ),
        ratios,
    )


def _assess_fsdp_traffic(rows: ClaimRows) -> Assessment:
    ddp = count_sent_elements(rows["ddp"][0])
    ratios = {name: count_sent_elements(rows[name][0]) / ddp for name in ("FSDP1", "FSDP2")}
    ddp_bytes = 4 * ddp
    mixed_bytes = _count_mixed_bytes(rows)
    verdict = HOLDS if all(abs(ratio / 1.5 - 1) <= SAME_TRAFFIC for ratio in ratios.values()) else DOES_NOT_HOLD
    text = " and ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return Assessment(
        verdict,
        "Parameters are gathered twice and gradients reduced once, against an all-reduce that is worth two; what is "
        "gathered once, the unit of the embedding, takes a little off. In bytes it depends on the formats.",
        (
            EvidenceStatement("measured", f"4 processes: {text} times DDP's elements ({COUNTED})."),
            EvidenceStatement(
                "measured",
                f"With bf16 parameters gathered and gradients reduced in fp32 FSDP sends {mixed_bytes:.1f} bytes per "
                f"parameter, DDP under autocast {ddp_bytes:.1f}: {mixed_bytes / ddp_bytes:.2f} times.",
            ),
        ),
        {**ratios, "bytes": mixed_bytes / ddp_bytes},
    )


def _count_mixed_bytes(rows: ClaimRows) -> float:
    """Bytes per parameter that FSDP1 sends with two bytes for what is gathered and four for what is reduced."""
    row = rows["FSDP1 bf16"][0]
    collectives = row["ranks"][0]["collectives"]
    sizes = {"all_gather": 2, "reduce_scatter": 4}
    sent = sum(size * collectives[name]["elements"] for name, size in sizes.items())
    return sent * (row["world_size"] - 1) / row["parameters"]


def _assess_sharding_factor(rows: ClaimRows) -> Assessment:
    measured = sorted(rows["measured"], key=lambda row: row["sharding_factor"])
    peaks_mib = [row["peak_allocated_bytes"] / 2**20 for row in measured]
    sent = [count_sent_elements(row) for row in measured]
    predicted = sorted(rows["predicted"], key=lambda row: row["sharding_factor"])
    predicted_gb = [row["peak_allocated_bytes"] / 1e9 for row in predicted]
    communication_s = [row["prediction"]["time"]["communication_s"] for row in predicted]
    memory_falls = _is_sorted(peaks_mib, descending=True) and _is_sorted(predicted_gb, descending=True)
    traffic_grows = _is_sorted(sent)
    time_grows = _is_sorted(communication_s)
    verdict = (
        HOLDS
        if memory_falls and traffic_grows and time_grows
        else (HOLDS_IN_PART if memory_falls or traffic_grows else DOES_NOT_HOLD)
    )
    factors = [str(row["sharding_factor"]) for row in predicted]
    parts = [
        "memory falls at every step" if memory_falls else "memory does not fall at every step",
        "what is sent grows at every step" if traffic_grows else "what is sent does not grow at every step",
        "so does the predicted time in collectives"
        if time_grows
        else "the predicted time in collectives does not: within a node, and where little is left to all-reduce, more "
        "elements take less",
    ]
    return Assessment(
        verdict,
        f"{parts[0].capitalize()}; {parts[1]}; {parts[2]}.",
        (
            EvidenceStatement(
                "measured",
                f"FSDP2, 4 processes, F = 1, 2, 4: {_join(peaks_mib, 1)} MiB at the peak; {_join(sent, 2)} elements "
                "sent per parameter.",
            ),
            EvidenceStatement(
                "predicted",
                f"T5-2.28B, FSDP1, 64 A100, F = {', '.join(factors)}: {_join(predicted_gb, 1)} GB at the peak; "
                f"{_join([1000 * value for value in communication_s], 0)} ms in collectives.",
            ),
        ),
        {"memory falls": memory_falls, "traffic grows": traffic_grows, "time grows": time_grows},
    )


def _is_sorted(values: list[float], *, descending: bool = False) -> bool:
    pairs = itertools.pairwise(values)
    return all(first > second if descending else first < second for first, second in pairs)


def _join(values: list[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _assess_resharding(rows: ClaimRows) -> Assessment:
    freed, kept = rows["freed"][0], rows["kept"][0]
    freed_gpu, kept_gpu = rows["freed, predicted"][0], rows["kept, predicted"][0]
    sent_less = 1 - count_sent_elements(kept) / count_sent_elements(freed)
    more_memory = kept["peak_allocated_bytes"] / freed["peak_allocated_bytes"] - 1
    more_gb = (kept_gpu["peak_allocated_bytes"] - freed_gpu["peak_allocated_bytes"]) / 1e9
    less_communication = 1 - (
        kept_gpu["prediction"]["time"]["communication_s"] / freed_gpu["prediction"]["time"]["communication_s"]
    )
    dhen_gb, dhen_speed = _compare_dhen(rows)
    trades = [more_memory > 0 and sent_less > 0, more_gb > 0 and less_communication > 0, dhen_gb > 0 and dhen_speed > 0]
    verdict = HOLDS if all(trades) else HOLDS_IN_PART if any(trades) else DOES_NOT_HOLD
    return Assessment(
        verdict,
        "Keeping gathered parameters takes memory and saves one all-gather of two."
        if verdict == HOLDS
        else "Not every kind of evidence shows more memory and less traffic.",
        (
            EvidenceStatement(
                "measured",
                f"FSDP1, 4 processes: without resharding {format_share(more_memory)} memory at the peak, "
                f"{format_share(-sent_less)} elements sent.",
            ),
            EvidenceStatement(
                "predicted",
                f"T5-11B, 64 A100, batch 8: without resharding {more_gb:+.1f} GB, {format_share(-less_communication)} "
                "time in collectives.",
            ),
            EvidenceStatement(
                "published",
                f"Figures 7(a) and 8(a), DHEN, full sharding, over the GPU counts that both have: without resharding "
                f"{dhen_gb:+.1f} GB and {format_share(dhen_speed)} speed on average.",
            ),
        ),
        {"memory": more_memory, "sent": sent_less, "dhen_gb": dhen_gb, "dhen_speed": dhen_speed},
    )


def _compare_dhen(rows: ClaimRows) -> tuple[float, float]:
    """Mean difference of memory in GB and of speed, without resharding against with it, of fully sharded DHEN."""

    def read_points(metrics: tuple[str, ...], sharding: str) -> dict[int, float]:
        return {
            row["world_size"]: float(row["source"]["value"])
            for row in rows["dhen"]
            if row["source"]["metric"] in metrics and row["source"]["sharding"] == sharding
        }

    memory, speed = (
        ("peak_memory",),
        tuple({row["source"]["metric"] for row in rows["dhen"] if "7(a)" in row["source"]["figure"]}),
    )
    kept_gb, freed_gb = (read_points(memory, f"full_shard {kind}") for kind in ("NRAF", "RAF"))
    kept_speed, freed_speed = (read_points(speed, f"full_shard {kind}") for kind in ("NRAF", "RAF"))
    both_gb, both_speed = sorted(kept_gb.keys() & freed_gb), sorted(kept_speed.keys() & freed_speed)
    return (
        sum(kept_gb[gpus] - freed_gb[gpus] for gpus in both_gb) / len(both_gb),
        sum(kept_speed[gpus] / freed_speed[gpus] - 1 for gpus in both_speed) / len(both_speed),
    )


SMALL_ELEMENTS, BYTES_PER_ELEMENT = 33e6, 4
"""Below which an all-gather is said to be inefficient, in fp32."""

EFFICIENT_SHARE = 0.9
"""Share of the best bandwidth from which on a collective counts as efficient here; the paper draws no line."""


def _assess_small_gathers(rows: ClaimRows) -> Assessment:
    threshold_bytes = SMALL_ELEMENTS * BYTES_PER_ELEMENT
    shares = {}
    for name, lines in rows.items():
        bandwidths = {int(line["size"].split()[0]): float(line["value"]) for line in lines}
        best = max(bandwidths.values())
        nearest = min(bandwidths, key=lambda size: abs(size - threshold_bytes))
        smallest_efficient = min(size for size, value in bandwidths.items() if value >= EFFICIENT_SHARE * best)
        quarter = min(bandwidths, key=lambda size: abs(size - threshold_bytes / 8))
        shares[name] = (bandwidths[nearest] / best, bandwidths[quarter] / best, smallest_efficient)
    reached = [at_threshold for at_threshold, _, _ in shares.values()]
    below = [at_eighth for _, at_eighth, _ in shares.values()]
    verdict = (
        HOLDS
        if min(reached) >= EFFICIENT_SHARE > max(below)
        else HOLDS_IN_PART
        if all(at_eighth < at_threshold for at_threshold, at_eighth, _ in shares.values())
        else DOES_NOT_HOLD
    )
    text = "; ".join(
        f"{name}: {format_number(100 * at_threshold, 3)} % of its best bandwidth at 33 M elements, "
        f"{format_number(100 * at_eighth, 3)} % at an eighth of them, {100 * EFFICIENT_SHARE:.0f} % from "
        f"{smallest / BYTES_PER_ELEMENT / 1e6:.1f} M elements on"
        for name, (at_threshold, at_eighth, smallest) in shares.items()
    )
    return Assessment(
        verdict,
        "Bandwidth falls below that size, gradually; where it counts as inefficient is a matter of the line one draws.",
        (EvidenceStatement("published", f"All-gathers by NCCL in fp32, measured by others: {text}."),),
        {f"{name} {label}": value for name, parts in shares.items() for label, value in zip("tes", parts, strict=True)},
    )


TRAFFIC_CLAIMS = (
    PaperClaim(
        key="zero_1_traffic",
        text="ZeRO-1 sends no more than DDP.",
        source=f"{ZERO_PAPER}, section 7; {FSDP_PAPER} and course notes quote it",
        needs={**NEEDS_DDP, "ZeRO-1 (ZeroRedundancyOptimizer)": _query_measured(strategy="zero1")},
        assess=_assess_equal_traffic,
        caveat="torch's ZeRO-1 all-reduces whole gradients and then broadcasts what was updated. ZeRO's own design "
        "reduces to shards and gathers; DeepSpeed's collectives were not counted here: its rows with "
        "`measurement.profile=true` would tell.",
    ),
    PaperClaim(
        key="zero_2_traffic",
        text="ZeRO-2 sends no more than DDP.",
        source=f"{ZERO_PAPER}, section 7",
        needs={
            **NEEDS_DDP,
            "FSDP1 (SHARD_GRAD_OP)": _query_measured(strategy="fsdp1", sharding_factor=4, reshard_after_forward=False),
            "FSDP2 (no resharding)": _query_measured(strategy="fsdp", sharding_factor=4, reshard_after_forward=False),
        },
        assess=_assess_equal_traffic,
    ),
    PaperClaim(
        key="zero_3_traffic",
        text="ZeRO-3 and FSDP with full sharding send 1.5 times as much as DDP.",
        source=f"{ZERO_PAPER}, section 7; {FSDP_PAPER}, section 3.2 (3 M (W - 1) / W against 2 M (W - 1) / W)",
        needs={
            **NEEDS_DDP,
            "FSDP1": _query_measured(strategy="fsdp1", sharding_factor=4, reshard_after_forward=True),
            "FSDP2": _query_measured(strategy="fsdp", sharding_factor=4, reshard_after_forward=True),
            "FSDP1 bf16": _query_measured(
                strategy="fsdp1", sharding_factor=4, reshard_after_forward=True, precision="bf16"
            ),
        },
        assess=_assess_fsdp_traffic,
    ),
    PaperClaim(
        key="sharding_factor",
        text="With the sharding factor memory falls and communication grows.",
        source=f"{FSDP_PAPER}, section 3.2",
        needs={
            "measured": _query_measured(strategy="fsdp", reshard_after_forward=True),
            "predicted": RowQuery(
                "predicted/a100_80gb",
                {
                    "model": "t5_2b",
                    "strategy": "fsdp1",
                    "world_size": 64,
                    "mixed_precision": "fsdp policy",
                    "activation_checkpointing": "full",
                    "reshard_after_forward": True,
                },
            ),
        },
        assess=_assess_sharding_factor,
        caveat="Which factor is fastest on a cluster only runs on it tell: sweep=sharding_factor.",
    ),
    PaperClaim(
        key="resharding",
        text="Resharding after forward saves memory and costs communication.",
        source=f"{FSDP_PAPER}, sections 3.2 and 5.4",
        needs={
            "freed": _query_measured(strategy="fsdp1", sharding_factor=4, reshard_after_forward=True),
            "kept": _query_measured(strategy="fsdp1", sharding_factor=4, reshard_after_forward=False),
            "freed, predicted": RowQuery(
                "predicted/claims",
                {"model": "t5_11b", "world_size": 64, "precision": "bf16", "reshard_after_forward": True},
            ),
            "kept, predicted": RowQuery(
                "predicted/claims",
                {"model": "t5_11b", "world_size": 64, "precision": "bf16", "reshard_after_forward": False},
            ),
            "dhen": RowQuery(PUBLISHED, {"source.source_key": "fsdp_paper", "model": "dhen"}),
        },
        assess=_assess_resharding,
    ),
    PaperClaim(
        key="small_all_gathers",
        text="All-gathers of fewer than 33 million elements use the network badly.",
        source=f"{FSDP_PAPER}, section 3.2.1",
        needs={
            f"{gpu}, {ranks} GPUs of one node": RowQuery(
                MICROBENCHMARKS, {"gpu": gpu, "what": f"all_gather busbw, {ranks} GPUs, one node"}
            )
            for gpu, ranks in (("A100-SXM-80GB", 8), ("H100-SXM", 8))
        },
        assess=_assess_small_gathers,
        caveat="The microbenchmarks are of one node, where small messages cost less than across a network. "
        "`all_gather_perf` of nccl-tests on two nodes of A100 would tell.",
    ),
)
