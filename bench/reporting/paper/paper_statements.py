"""What the FSDP paper's text says of its figures, beside the figures and the rows of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from bench.core.presentation import (
    MISSING,
    format_number,
)
from bench.records.published import load_published
from bench.reporting.drawing.style import sort_evidence
from bench.reporting.paper.comparisons import PAPER_COMPARISONS, PAPER_MODEL_LABELS, PAPER_SHARDING_LABELS
from bench.reporting.paper.paper import compare_with_paper


@dataclass(frozen=True)
class PaperStatement:
    """One sentence of the paper about one of its figures."""

    figure: str
    subject: str
    published_columns: Mapping[str, object]
    """Columns of the published row that quotes it."""
    sentence: str
    """The sentence, with the quoted ``{value}``."""
    describe_points: Callable[[pd.DataFrame], str]
    """The same quantity of one kind's points of the figure; empty if they do not have it."""


def _describe_prefetch_gain(points: pd.DataFrame) -> str:
    """Speed with prefetching over speed without, by number of GPUs."""
    table = points.pivot_table(index="world_size", columns="series", values="value")
    if table.shape[1] < 2:
        return ""
    gains = table["backward prefetch on"] / table["backward prefetch off"] - 1
    return ", ".join(f"{100 * gain:+.1f} % ({size} GPUs)" for size, gain in gains.dropna().items())


def _describe_rate_limiter_gain(points: pd.DataFrame) -> str:
    """Seconds without the rate limiter over seconds with it, by number of machines."""
    table = points.pivot_table(index=["column", "panel"], columns="series", values="value")
    if table.shape[1] < 2:
        return ""
    ratios = (table["rate limiter off"] / table["rate limiter on"]).dropna()
    rows = ratios.rename("ratio").reset_index().to_dict("records")
    return ", ".join(
        f"{format_number(row['ratio'])} times ({row['panel']}{', ' + row['column'] if row['column'] else ''})"
        for row in rows
    )


def _build_batch_description(batch: int) -> Callable[[pd.DataFrame], str]:
    """The range of speeds of one batch size, and the speed on the most GPUs."""

    def describe_speeds(points: pd.DataFrame) -> str:
        batch_points = points[(points["series"] == f"batch {batch}") & points["value"].notna()].sort_values(
            "world_size"
        )
        if batch_points.empty:
            return ""
        first_point, last_point = batch_points.iloc[0], batch_points.iloc[-1]
        max_value = batch_points["value"].max()
        return (
            f"{format_number(first_point['value'], 4)} on {int(first_point['world_size'])} GPUs, at most "
            f"{format_number(max_value, 4)}, "
            f"{format_number(last_point['value'], 4)} on {int(last_point['world_size'])}"
        )

    return describe_speeds


def _describe_decline(points: pd.DataFrame) -> str:
    """Speed lost between the fewest and the most GPUs, by batch size."""
    parts = []
    for series, series_points in points[points["value"].notna()].groupby("series"):
        end_values = series_points.sort_values("world_size")["value"].iloc[[0, -1]].tolist()
        parts.append((int(str(series).split()[-1]), f"{100 * (1 - end_values[1] / end_values[0]):.1f} % ({series})"))
    return ", ".join(text for _, text in sorted(parts))


def _describe_ddp_models(points: pd.DataFrame) -> str:
    """Which models ran under DDP, and which ran out of memory."""
    ddp_points = points[points["series"] == PAPER_SHARDING_LABELS["ddp"]]
    if ddp_points.empty:
        return ""
    fitting_models = [
        name for name in PAPER_MODEL_LABELS.values() if (ddp_points[ddp_points["value"].notna()]["panel"] == name).any()
    ]
    oom_models = [
        name for name in PAPER_MODEL_LABELS.values() if (ddp_points[ddp_points["out_of_memory"]]["panel"] == name).any()
    ]
    return f"runs: {', '.join(fitting_models) or MISSING}; out of memory: {', '.join(oom_models) or MISSING}"


_GPT_COLUMNS = {"model": "gpt_175b", "source_metric": "tflops_per_gpu"}
PAPER_STATEMENTS = (
    PaperStatement(
        "Figure 6(a)",
        "Models that fit with DDP",
        {"source_metric": "outcome", "model": "t5_11b"},
        "runs out of memory when it wraps a model larger than 2.28B",
        _describe_ddp_models,
    ),
    PaperStatement(
        "Figure 6(b)",
        "What backward prefetch gains",
        {"source_metric": "backward_prefetch_speedup_claimed"},
        "about {value} % faster",
        _describe_prefetch_gain,
    ),
    PaperStatement(
        "Figure 6(c)",
        "What the rate limiter gains",
        {"source_metric": "speedup_claimed_max", "model": "t5_11b"},
        "up to {value} times faster",
        _describe_rate_limiter_gain,
    ),
    PaperStatement(
        "Figure 7(b)",
        "GPT-175B, batch 1: TFLOPS per GPU",
        {**_GPT_COLUMNS, "batch_size_per_gpu": 1},
        "more than {value}",
        _build_batch_description(1),
    ),
    PaperStatement(
        "Figure 7(b)",
        "GPT-175B, batch 2: TFLOPS per GPU",
        {**_GPT_COLUMNS, "batch_size_per_gpu": 2},
        "more than {value}",
        _build_batch_description(2),
    ),
    PaperStatement(
        "Figure 7(c)",
        "T5-11B: speed per GPU lost from 8 to 512 GPUs",
        {"source_metric": "tflops_per_gpu_regression", "model": "t5_11b"},
        "{value} %",
        _describe_decline,
    ),
)


def compare_text_and_figures(table: pd.DataFrame, figures: Sequence[str]) -> pd.DataFrame:
    """What the paper's text says, what its own figure shows, and what the rows of `table` say.

    Returns
    -------
    DataFrame
        ``What``, ``Text of the paper``, ``Its figure``, and a column per kind of evidence in `table`. One row per
        `PaperStatement` and per setting of our choice that the figure is drawn for.
    """
    published_rows = load_published()
    rows = []
    for statement in PAPER_STATEMENTS:
        if statement.figure not in figures:
            continue
        comparison = next(candidate for candidate in PAPER_COMPARISONS if candidate.figure == statement.figure)
        quotation = _quote_statement(published_rows, statement)
        for setting, points in compare_with_paper(comparison, table):
            row = {"What": statement.subject, "Text of the paper": quotation}
            row["What"] += f" ({setting})" if setting and not comparison.setting else ""
            for evidence in reversed(sort_evidence(points["evidence"])):
                name = "Its figure" if evidence == "published" else f"{evidence.capitalize()} here"
                row[name] = statement.describe_points(points[points["evidence"] == evidence])
            rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _quote_statement(published_rows: pd.DataFrame, statement: PaperStatement) -> str:
    """What the text says, with its section."""
    text_rows = published_rows[
        (published_rows["source_key"] == "fsdp_paper") & (published_rows["source_provenance"] == "text")
    ]
    for column, value in statement.published_columns.items():
        text_rows = text_rows[(text_rows[column] == value).fillna(False)]
    (row,) = text_rows.to_dict("records")
    section = str(row["source_figure"]).partition(" / ")[0]
    return f"{statement.sentence.format(value=row['source_value'])} ({section.lower()})"
