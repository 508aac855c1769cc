"""Claims on memory: what ZeRO's stages save, 16 bytes per parameter, 20 times the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.claims.claim import (
    COURSE_NOTES,
    DOES_NOT_HOLD,
    FSDP_PAPER,
    HOLDS,
    HOLDS_IN_PART,
    PUBLISHED,
    ZERO_PAPER,
    Assessment,
    ClaimRows,
    EvidenceStatement,
    PaperClaim,
    RowQuery,
    count_state_bytes_per_parameter,
    get_row,
    select_rows,
)
from bench.records import Record

ADAM_BYTES = 16
"""Bytes per parameter of mixed precision with Adam, replicated (ZeRO, section 3.1): the baseline of what is saved."""

PARTLY_SAVED = 0.95
"""Share of what ZeRO's formula gives at a number of ranks from which on a saving counts as reached."""

STAGE_FORMULAS: dict[int, Callable[[int], float]] = {
    1: lambda ranks: 4 + 12 / ranks,
    2: lambda ranks: 2 + 14 / ranks,
    3: lambda ranks: 16 / ranks,
}
"""Bytes per parameter by stage, for so many ranks (ZeRO, section 5)."""

TORCH_STRATEGIES: dict[int, dict[str, Any]] = {
    1: {"strategy": "zero1"},
    2: {"strategy": "fsdp1", "reshard_after_forward": False},
    3: {"strategy": "fsdp1", "reshard_after_forward": True},
}
TORCH_NAMES = {1: "ZeroRedundancyOptimizer", 2: "FSDP1 SHARD_GRAD_OP", 3: "FSDP1 FULL_SHARD"}
STORED_BETWEEN_STEPS = ("parameters", "optimizer")


def _build_stage_claim(stage: int, text: str, claimed: Callable[[int], float]) -> PaperClaim:
    def assess(rows: ClaimRows) -> Assessment:
        return _assess_stage(rows, stage, claimed)

    predicted = {"model": "gpt_6b7", "sequence_length": 512, "world_size": (4, 64, 512)}
    measured = {"world_size": 4, "sequence_length": 16, "precision": "fp32", "status": "ok"}
    return PaperClaim(
        key=f"zero_{stage}_memory",
        text=text,
        source=f"{ZERO_PAPER}, sections 5 and 8.1 (Table 1); course notes quote it",
        needs={
            "DDP, measured": RowQuery("measured/claims", {**measured, "strategy": "ddp"}),
            "torch, measured": RowQuery(
                "measured/claims",
                {**measured, **TORCH_STRATEGIES[stage], "sharding_factor": 1 if stage == 1 else 4},
            ),
            "torch, predicted": RowQuery("predicted/claims", {**predicted, **TORCH_STRATEGIES[stage]}),
            "DeepSpeed, predicted": RowQuery(
                "predicted/claims", {**predicted, "strategy": "deepspeed", "config.strategy.stage": stage}
            ),
            "published": RowQuery(
                PUBLISHED,
                {
                    "source.source_key": "zero_paper",
                    "source.figure": "Table 1",
                    "source.model": "transformer 7.5B",
                    "source.sharding": (f"ZeRO-{stage} ({_SHARDED_PARTS[stage]})",),
                },
            ),
        },
        assess=assess,
        caveat="Only model states are meant: activations, buffers and fragmentation come on top and are not divided. "
        "Peaks of GPUs that ran DeepSpeed's stages at several numbers of ranks would tell more.",
    )


_SHARDED_PARTS = {1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}


def _assess_stage(rows: ClaimRows, stage: int, claimed: Callable[[int], float]) -> Assessment:
    savings = {
        name: {
            row["world_size"]: ADAM_BYTES / _count_stored_bytes(row, stage, is_deepspeed=name == "DeepSpeed")
            for row in rows[f"{name}, predicted"]
        }
        for name in ("torch", "DeepSpeed")
    }
    most_ranks = max(savings["torch"])
    reached = {name: saved[most_ranks] / claimed(most_ranks) for name, saved in savings.items()}
    arithmetic = ADAM_BYTES / STAGE_FORMULAS[stage](most_ranks)
    table = {row["world_size"]: float(row["source"]["value"]) for row in rows["published"]}
    measured = rows["DDP, measured"][0]["peak_allocated_bytes"] / rows["torch, measured"][0]["peak_allocated_bytes"]
    verdict = (
        HOLDS
        if min(reached.values()) >= PARTLY_SAVED
        else HOLDS_IN_PART
        if max(reached.values()) >= PARTLY_SAVED
        else DOES_NOT_HOLD
    )
    reason = {
        HOLDS: "Model states shrink that much."
        + (" FSDP1 keeps shards alone between steps, and whole parameters within them." if stage == 2 else ""),
        HOLDS_IN_PART: "It holds of DeepSpeed's layout, 2 + 2 + 12 bytes, not of torch's, 4 + 4 + 8."
        if reached["DeepSpeed"] > reached["torch"]
        else "It holds of torch's layout, not of DeepSpeed's.",
        DOES_NOT_HOLD: "Neither torch nor DeepSpeed comes near it.",
    }[verdict]
    return Assessment(
        verdict,
        reason,
        (
            EvidenceStatement(
                "published",
                f"ZeRO's Table 1, arithmetic: {_format_ratio(table)} for 7.5 billion parameters.",
            ),
            EvidenceStatement(
                "predicted",
                f"GPT-6.7B, bf16 mixed precision, model states against {ADAM_BYTES} bytes per parameter on "
                f"{', '.join(str(ranks) for ranks in sorted(savings['torch']))} GPUs: "
                f"{TORCH_NAMES[stage]} {_join_savings(savings['torch'])}; "
                f"DeepSpeed stage {stage} {_join_savings(savings['DeepSpeed'])}; ZeRO's formula gives "
                f"{arithmetic:.2f} at {most_ranks}.",
            ),
            EvidenceStatement(
                "measured",
                f"4 processes of a CPU, fp32, whole peak: DDP needs {measured:.2f} times as much as "
                f"{TORCH_NAMES[stage]}.",
            ),
        ),
        {**{f"{name} reached": share for name, share in reached.items()}, "measured": measured},
    )


def _count_stored_bytes(row: Record, stage: int, *, is_deepspeed: bool) -> float:
    """Bytes per parameter of model states, gradients as the stage keeps them at the end of backward.

    At the moment of the peak some gradients may not be there yet, so that they are counted by what the strategy keeps:
    whole up to stage 1, else a rank's share; of 4 bytes in torch, which keeps the dtype of the parameters, of 2 in
    DeepSpeed.
    """
    parts = row["prediction"]["memory"]["parts_bytes"]
    gradient_bytes = (2 if is_deepspeed else 4) / (1 if stage == 1 else row["world_size"])
    return sum(parts[name] for name in STORED_BETWEEN_STEPS) / row["parameters"] + gradient_bytes


def _join_savings(savings: dict[int, float]) -> str:
    return ", ".join(f"{saved:.2f}" for _, saved in sorted(savings.items())) + " times less"


def _format_ratio(table_gb: dict[int, float]) -> str:
    replicated = table_gb[1]
    shown = {ranks: size for ranks, size in sorted(table_gb.items()) if ranks in (4, 64, 1024)}
    return ", ".join(f"{replicated / size:.1f} times less on {ranks}" for ranks, size in shown.items())


STATES_MARGIN = 0.05
"""Of a peak with next to no activations, above the model states."""

SLOPE_MARGIN = 0.15
"""Relative error of the slope of points that were printed in whole GB."""


def _assess_sixteen_bytes(rows: ClaimRows) -> Assessment:
    measured = {
        (row["model"], row["precision"]): row["peak_allocated_bytes"] / row["parameters"]
        for row in sorted(rows["measured"], key=lambda row: (row["model"], row["precision"]))
    }
    predicted = count_state_bytes_per_parameter(get_row(rows["predicted"], world_size=4))
    slope = _fit_state_bytes(rows["published"])
    checks = [
        min(measured.values()) <= ADAM_BYTES * (1 + STATES_MARGIN) and min(measured.values()) >= ADAM_BYTES,
        abs(predicted / ADAM_BYTES - 1) <= STATES_MARGIN,
        abs(slope / ADAM_BYTES - 1) <= SLOPE_MARGIN,
    ]
    verdict = HOLDS if all(checks) else HOLDS_IN_PART if any(checks) else DOES_NOT_HOLD
    text = "; ".join(f"{model}, {precision} {size:.2f}" for (model, precision), size in measured.items())
    return Assessment(
        verdict,
        "It is what parameters, gradients and Adam's two states come to, in fp32 as in mixed precision."
        if verdict == HOLDS
        else "Not every kind of evidence comes to it.",
        (
            EvidenceStatement(
                "measured",
                f"One process, batch 1 of 16 tokens, bytes at the peak per parameter, activations included: {text}.",
            ),
            EvidenceStatement(
                "predicted", f"GPT-6.7B, DDP, bf16 mixed precision: {predicted:.2f} bytes of model states."
            ),
            EvidenceStatement(
                "published",
                f"Figure 8(b), GPT-175B on 128 to 512 GPUs: what is allocated falls with the number of GPUs as "
                f"{slope:.1f} bytes per parameter divided among them (a straight line in 1 / N).",
            ),
        ),
        {"measured": min(measured.values()), "predicted": predicted, "slope": slope},
    )


def _fit_state_bytes(points: Sequence[Record]) -> float:
    """Bytes per parameter that fall as 1 / N, of each batch's points of Figure 8(b), mean over batches."""
    slopes = []
    for batch in sorted({row["batch_size_per_gpu"] for row in points}):
        batch_points = select_rows(points, {"batch_size_per_gpu": batch})
        shares = [1 / row["world_size"] for row in batch_points]
        slope, _ = np.polyfit(shares, [row["peak_allocated_bytes"] for row in batch_points], 1)
        slopes.append(slope / batch_points[0]["parameters"])
    return float(np.mean(slopes))


CLAIMED_TIMES_WEIGHTS = 20


def _assess_twenty_times(rows: ClaimRows) -> Assessment:
    ratios = {
        name: [row["peak_allocated_bytes"] / (4 * row["parameters"]) for row in rows[name]] for name in ("few", "many")
    }
    fewest, most = min(ratios["few"]), max(ratios["many"])
    is_bound = most <= CLAIMED_TIMES_WEIGHTS
    return Assessment(
        HOLDS if is_bound else DOES_NOT_HOLD,
        "There is no such factor: model states are 4 times the weights in fp32, and the rest are activations, which "
        f"grow with batch and length without bound{'' if is_bound else ', past 20 times here'}.",
        (
            EvidenceStatement(
                "measured",
                f"One process, fp32 weights: {fewest:.1f} to {max(ratios['few']):.1f} times the weights with batch 1 "
                f"of 16 tokens, {min(ratios['many']):.1f} to {most:.1f} times with batch 20 of 256.",
            ),
        ),
        {"fewest": fewest, "most": most},
    )


MEASURED_ALONE = {"strategy": "single", "status": "ok", "world_size": 1}

MEMORY_CLAIMS = (
    _build_stage_claim(
        1, "ZeRO-1 divides the memory of model states by up to 4.", lambda ranks: 4 * ranks / (ranks + 3)
    ),
    _build_stage_claim(2, "ZeRO-2 divides it by up to 8.", lambda ranks: 8 * ranks / (ranks + 7)),
    _build_stage_claim(3, "ZeRO-3 divides it by the number of GPUs.", lambda ranks: ranks),
    PaperClaim(
        key="sixteen_bytes",
        text="Training with Adam in mixed precision takes 16 bytes per parameter before any activation.",
        source=f"{ZERO_PAPER}, section 3.1; course notes",
        needs={
            "measured": RowQuery("measured/claims", {**MEASURED_ALONE, "sequence_length": 16}),
            "predicted": RowQuery("predicted/claims", {"model": "gpt_6b7", "strategy": "ddp"}),
            "published": RowQuery(
                PUBLISHED,
                {
                    "source.source_key": "fsdp_paper",
                    "source.figure": "Figure 8(b)",
                    "source.metric": "peak_memory_allocated",
                },
            ),
        },
        assess=_assess_sixteen_bytes,
    ),
    PaperClaim(
        key="twenty_times_weights",
        text="Training takes up to 20 times the memory of the weights.",
        source=COURSE_NOTES,
        needs={
            "few": RowQuery("measured/claims", {**MEASURED_ALONE, "sequence_length": 16}),
            "many": RowQuery("measured/claims", {**MEASURED_ALONE, "sequence_length": 256}),
        },
        assess=_assess_twenty_times,
        caveat=f"{FSDP_PAPER} says nothing of the kind.",
    ),
)
