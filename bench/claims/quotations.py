"""Where the paper, its figures and course notes that quote it do not agree with each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    get_row,
    select_rows,
)
from bench.records import Record

QUOTED_MEMORY_GB = 80


def _assess_v100(rows: ClaimRows) -> Assessment:
    stated = sorted({row["source"]["gpu"] for row in rows["paper"] if row["source"]["gpu"]})
    sizes_gb = [
        int(match[1])
        for row in rows["all"]
        if (match := re.search(r"V100\D*(\d+) ?GB", row["source"]["gpu"] or "")) is not None
    ]
    is_stated = any("V100" in gpu for gpu in stated)
    exists = max(sizes_gb, default=0) >= QUOTED_MEMORY_GB
    return Assessment(
        HOLDS if is_stated and exists else HOLDS_IN_PART if is_stated or exists else DOES_NOT_HOLD,
        f"The paper says {' and '.join(stated)}. The V100s of {len(sizes_gb)} published rows have "
        f"{max(sizes_gb, default=0)} GB at most.",
        (
            EvidenceStatement(
                "published", f"All {len(rows['paper'])} numbers read in the paper are of {' and '.join(stated)}."
            ),
        ),
        {"largest": float(max(sizes_gb, default=0))},
    )


AGREEMENT = 0.02
"""Relative difference up to which text and figure agree: what is digitised is read no better."""


def _assess_text_and_figures(rows: ClaimRows) -> Assessment:
    paper = rows["paper"]

    def read_text(metric: str, **source: object) -> float:
        where = {
            "source.metric": metric,
            "source.provenance": "text",
            **{f"source.{name}": v for name, v in source.items()},
        }
        return float(select_rows(paper, where)[0]["source"]["value"])

    def read_figure(figure: str, **columns: object) -> list[float]:
        found = select_rows(paper, {"source.figure": figure, **columns})
        return [float(row["source"]["value"]) for row in sorted(found, key=lambda row: row["world_size"] or 0)]

    on, off = (
        read_figure("Figure 6(b)", backward_prefetch=value, **{"source.metric": "tflops_per_gpu"})
        for value in ("pre", "none")
    )
    limiter = {row["nodes"]: _compare_bars(paper, row["nodes"]) for row in _list_limited(paper)}
    losses = [
        100 * (1 - speeds[-1] / speeds[0])
        for speeds in (
            read_figure("Figure 7(c)", batch_size_per_gpu=batch, **{"source.metric": "tflops_per_gpu"})
            for batch in (8, 16)
        )
    ]
    statements = {
        "gain by prefetching, %": (
            read_text("backward_prefetch_speedup_claimed"),
            [100 * (a / b - 1) for a, b in zip(on, off, strict=True)],
        ),
        "gain by the rate limiter, times": (read_text("speedup_claimed_max"), list(limiter.values())),
        "loss from 8 to 512 GPUs, %": (read_text("tflops_per_gpu_regression"), losses),
        **{
            f"TFLOPS of GPT-175B at batch {batch}": (
                read_text("tflops_per_gpu", batch_size_per_gpu=str(batch), figure="Section 5.4 / Figure 7(b)"),
                read_figure("Figure 7(b)", batch_size_per_gpu=batch, **{"source.metric": "tflops_per_gpu"}),
            )
            for batch in (1, 2)
        },
    }
    agreeing = [
        name for name, (text, values) in statements.items() if all(abs(v / text - 1) <= AGREEMENT for v in values)
    ]
    text = "; ".join(
        f"{name}: text {claimed:g}, figure {min(values):.1f} to {max(values):.1f}"
        for name, (claimed, values) in statements.items()
    )
    verdict = HOLDS if len(agreeing) == len(statements) else HOLDS_IN_PART if agreeing else DOES_NOT_HOLD
    return Assessment(
        verdict,
        f"Of {len(statements)} numbers of the text {len(agreeing)} are those of the figure within 2 %"
        + (f" ({', '.join(agreeing)})." if agreeing else "."),
        (EvidenceStatement("published", f"{text}."),),
        {"agreeing": float(len(agreeing)), "compared": float(len(statements))},
    )


def _list_limited(paper: Sequence[Record]) -> list[Record]:
    return select_rows(paper, {"source.figure": "Figure 6(c)", "source.model": "T5-11B", "limit_all_gathers": True})


def _compare_bars(paper: Sequence[Record], nodes: int) -> float:
    bars = select_rows(paper, {"source.figure": "Figure 6(c)", "source.model": "T5-11B", "nodes": nodes})
    without, with_limiter = (get_row(bars, limit_all_gathers=value)["step_time_median_s"] for value in (False, True))
    return float(without / with_limiter)


PAPER_ROWS = RowQuery(PUBLISHED, {"source.source_key": "fsdp_paper"})

QUOTATION_CLAIMS = (
    PaperClaim(
        key="v100_of_80_gb",
        text="The paper's runs were made on V100s of 80 GB.",
        source=COURSE_NOTES,
        needs={"paper": PAPER_ROWS, "all": RowQuery(PUBLISHED, {})},
        assess=_assess_v100,
    ),
    PaperClaim(
        key="text_and_figures",
        text="The paper's text says what its figures show.",
        source=FSDP_PAPER,
        needs={"paper": PAPER_ROWS},
        assess=_assess_text_and_figures,
        caveat="Figures 6(b), 7(b) and 7(c) are read off their pixels; where the two differ, the figure counts here.",
    ),
)
