"""Claims on speed: FSDP against DDP, and 16 bits.

Nothing here was measured on a GPU by this suite: published rows are the paper's own or others', and predicted rows say
how far a model of the mechanism agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.claims.claim import (
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
    select_rows,
)
from bench.records import Record

ON_GPUS = "The same sweep on GPUs would tell: {}."


def query_paper(figure: str, **source: Any) -> RowQuery:
    values = {f"source.{name}": value for name, value in source.items()}
    return RowQuery(PUBLISHED, {"source.source_key": "fsdp_paper", "source.figure": figure, **values})


def get_speed(row: Record) -> float:
    return float(row["hardware_tflops_per_gpu"])


# --- FSDP against DDP, and 16 bits.

AS_FAST = 0.05
"""Relative difference up to which two speeds count as equal; how far from each other the paper's own bars are."""

SMALL_MODELS = {"t5_611m": "611M", "t5_2b": "2.28B"}


def _assess_as_fast_as_ddp(rows: ClaimRows) -> Assessment:
    published = {model: _compare_with_ddp(rows["published"], model) for model in SMALL_MODELS}
    predicted = {model: _compare_with_ddp(rows["predicted"], model) for model in SMALL_MODELS}

    def list_ratios(ratios: Mapping[str, Mapping[str, float]]) -> list[float]:
        return [ratio for by_strategy in ratios.values() for ratio in by_strategy.values()]

    both_hold = [min(list_ratios(ratios)) >= 1 - AS_FAST for ratios in (published, predicted)]
    verdict = HOLDS if all(both_hold) else HOLDS_IN_PART if any(both_hold) else DOES_NOT_HOLD
    slowest = min(list_ratios(predicted))
    return Assessment(
        verdict,
        "FSDP is even a little faster where it shards, since the optimizer's update is divided."
        if verdict == HOLDS
        else f"It holds of {'the paper’s bars' if both_hold[0] else 'predictions'}, not of "
        f"{'predictions' if both_hold[0] else 'the paper’s bars'}: the slowest is {format_share(slowest - 1)} there.",
        (
            EvidenceStatement("published", f"Figure 6(a), speed against DDP's: {_format_by_model(published)}."),
            EvidenceStatement(
                "predicted",
                f"64 A100, autocast for all, batch 8 of 512 (the paper's setting is not known): "
                f"{_format_by_model(predicted)}.",
            ),
        ),
        {
            **{f"published {model} {name}": ratio for model, by in published.items() for name, ratio in by.items()},
            **{f"predicted {model} {name}": ratio for model, by in predicted.items() for name, ratio in by.items()},
        },
    )


def _compare_with_ddp(rows: Sequence[Record], model: str) -> dict[str, float]:
    of_model = [row for row in select_rows(rows, {"model": model}) if row["hardware_tflops_per_gpu"] is not None]
    ddp = get_speed(get_row(of_model, strategy="ddp"))
    return {
        row["effective_strategy"].partition("/")[2]: get_speed(row) / ddp
        for row in sorted(of_model, key=lambda row: row["effective_strategy"])
        if row["strategy"] == "fsdp1"
    }


def _format_by_model(ratios: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(
        f"{SMALL_MODELS[model]} "
        + ", ".join(f"{name.replace('_', ' ')} {format_share(ratio - 1)}" for name, ratio in by_strategy.items())
        for model, by_strategy in ratios.items()
    )


MUCH_HIGHER = 1.5
"""Times as fast from which on 16 bits count as giving much higher TFLOPS; the paper gives no number."""


def _assess_sixteen_bits(rows: ClaimRows) -> Assessment:
    speeds = {row["precision"]: get_speed(row) for row in rows["predicted"] if row["status"] == "ok"}
    others = _compare_formats_of_others(rows)
    ratios = [speeds["bf16"] / speeds[name] for name in ("tf32", "fp32")]
    verdict = (
        HOLDS
        if min([*ratios, *others]) >= MUCH_HIGHER
        else (HOLDS_IN_PART if max([*ratios, *others]) >= MUCH_HIGHER else DOES_NOT_HOLD)
    )
    return Assessment(
        verdict,
        "On GPUs with tensor cores 16 bits are much faster than fp32, and clearly faster than TF32."
        if verdict == HOLDS
        else "Against fp32 without tensor cores it does; against TF32 the difference is smaller at some sizes.",
        (
            EvidenceStatement(
                "predicted",
                f"T5-11B, full sharding, 64 A100, batch 8: bf16 {speeds['bf16']:.0f}, TF32 {speeds['tf32']:.0f}, fp32 "
                f"{speeds['fp32']:.0f} TFLOP/s per GPU: {ratios[0]:.1f} and {ratios[1]:.1f} times.",
            ),
            EvidenceStatement(
                "published",
                f"Lambda's benchmarks, BERT and Transformer-XL on one A100 80GB SXM4: fp16 is {min(others):.1f} to "
                f"{max(others):.1f} times as fast as fp32, whose products PyTorch of that time did in TF32.",
            ),
        ),
        {"tf32": ratios[0], "fp32": ratios[1], "least of others": min(others)},
    )


def _compare_formats_of_others(rows: ClaimRows) -> list[float]:
    """Speed in fp16 against fp32, of models that both tables have."""
    by_format = {
        name: {row["source"]["figure"]: float(row["source"]["value"]) for row in rows[f"{name} of others"]}
        for name in ("fp16", "fp32")
    }
    return [value / by_format["fp32"][name] for name, value in by_format["fp16"].items() if name in by_format["fp32"]]


SPEED_CLAIMS = (
    PaperClaim(
        key="as_fast_as_ddp",
        text="At 611M and 2.28B parameters FSDP is as fast as DDP.",
        source=f"{FSDP_PAPER}, section 5.2, Figure 6(a)",
        needs={
            "published": query_paper("Figure 6(a)", metric="tflops_per_gpu"),
            "predicted": RowQuery(
                "predicted/a100_80gb",
                {
                    "model": tuple(SMALL_MODELS),
                    "sweep": "model_scale",
                    "world_size": 64,
                    "mixed_precision": "autocast",
                    "strategy": ("ddp", "fsdp1"),
                    "sharding_factor": (1, 8, 64),
                },
            ),
        },
        assess=_assess_as_fast_as_ddp,
        caveat=ON_GPUS.format("sweep=model_scale"),
        is_from_same_source=True,
    ),
    PaperClaim(
        key="sixteen_bits",
        text="16-bit formats give much higher TFLOPS than 32 bits.",
        source=f"{FSDP_PAPER}, section 5.2; course notes",
        needs={
            "predicted": RowQuery(
                "predicted/claims",
                {"model": "t5_11b", "world_size": 64, "batch_size_per_gpu": 8, "reshard_after_forward": True},
            ),
            **{
                f"{name} of others": RowQuery(
                    PUBLISHED,
                    {
                        "source.source_key": "lambda_benchmark_v1",
                        "source.gpu": "A100 80GB SXM4",
                        "source.precision": precision,
                        "source.gpu_count": "1.0",
                    },
                )
                for name, precision in (("fp16", "fp16 (amp)"), ("fp32", "fp32 (TF32 where on by default)"))
            },
        },
        assess=_assess_sixteen_bits,
        caveat="In Figure 6(a) the format changes with the size of the model, so it shows both at once. "
        + ON_GPUS.format("sweep=model_scale, which has both formats at the small sizes"),
    ),
)
