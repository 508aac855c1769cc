"""When each rank of a pipeline computed in one step, and when it waited: drawn of runs that were profiled."""

from __future__ import annotations

import pandas as pd

from bench.core.presentation import CPU_NOTE, build_slug, format_number
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import (
    Drawing,
    ReportFigure,
    ReportSection,
    compute_header_height_in,
    create_figure,
    draw_header,
)
from bench.reporting.tables.cells import iterate_groups, sort_rows
from bench.reporting.tables.table import RowNeeds

HOW_TO_READ = (
    "One block of lanes is one run, one lane one rank, from the first stage at the top to the last one. Filled: the "
    "rank computes; empty: it waits for another stage. At the right, the share of the step in which it waits. In a "
    "naive pipeline one stage computes at a time; micro-batches let stages work at the same time, and what remains "
    "empty is the bubble. The step is the first timed one of a run with measurement.profile=true."
)
FIGURE = ReportFigure(
    name="idle",
    page_position=90,
    title="Idle ranks of pipelines",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(present=("busy",)),
)
WIDTH_IN, LANE_HEIGHT_IN, RUN_GAP_IN = 9.4, 0.24, 0.62
MAX_RUNS_PER_FIGURE, MAX_RANKS_PER_RUN = 8, 16
"""Of one figure, and of one run."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """The runs that noted when their ranks computed, of repeats the first.

    ``busy`` has each rank's spans and its step's seconds.
    """
    profiled_runs = table[table["busy"].map(len) > 0]
    return sort_rows(profiled_runs).drop_duplicates(["place", "model", "variant", "heading", "settings"])


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per place and model. Nothing at all where no pipeline was profiled."""
    section = FIGURE.create_section()
    for (place, model), model_runs in iterate_groups(select(table), "place", "model"):
        for start in range(0, len(model_runs), MAX_RUNS_PER_FIGURE):
            section.plan_figure(
                _draw_idle_ranks, model_runs.iloc[start : start + MAX_RUNS_PER_FIGURE], str(place), str(model), palette
            )
    return section


def _draw_idle_ranks(
    shown_runs: pd.DataFrame, place: str, model: str, palette: dict[str, style.VariantStyle]
) -> Drawing:
    cpu_note = CPU_NOTE if shown_runs["device"].iloc[0] == "cpu" else ""
    title = f"When ranks compute and when they wait: one step of {model}"
    heights_in = [min(len(busy), MAX_RANKS_PER_RUN) * LANE_HEIGHT_IN + RUN_GAP_IN for busy in shown_runs["busy"]]
    subtitle = f"{place}\n{cpu_note}"
    figure = create_figure(WIDTH_IN, compute_header_height_in(title, subtitle, WIDTH_IN) + sum(heights_in))
    draw_header(figure, title, subtitle)
    subplots = figure.subplots(len(shown_runs), 1, squeeze=False, height_ratios=heights_in)[:, 0]
    idle_texts = []
    for axes, (_, row) in zip(subplots, shown_runs.iterrows(), strict=True):
        rank_activity = row["busy"][:MAX_RANKS_PER_RUN]
        run_label = f"{lanes.format_lane_label(row)}, {row['heading']}"
        axes.set_title(run_label, loc="left", fontsize=8)
        longest_step_s = max(step_s for _, step_s in rank_activity)
        idle_shares = []
        for rank, (spans, step_s) in enumerate(rank_activity):
            bars = [(1e3 * start, 1e3 * (stop - start)) for start, stop in spans]
            axes.broken_barh(
                bars, (rank - 0.36, 0.72), facecolor=palette[row["variant"]].colour, edgecolor="white", linewidth=0.3
            )
            idle_shares.append(1 - sum(stop - start for start, stop in spans) / step_s)
            axes.text(
                1e3 * longest_step_s * 1.01,
                rank,
                f"waits {format_number(100 * idle_shares[-1], 2)} %",
                va="center",
                fontsize=7.5,
            )
        axes.set_yticks(range(len(rank_activity)), [f"rank {rank}" for rank in range(len(rank_activity))])
        axes.set_ylim(len(rank_activity) - 0.5, -0.5)
        axes.set_xlim(0, 1e3 * longest_step_s * 1.12)
        idle_texts.append(
            f"{run_label}: waits " + ", ".join(f"{format_number(100 * share, 2)}" for share in idle_shares) + " percent"
        )
    subplots[-1].set_xlabel("milliseconds from the beginning of the step", loc="left")
    alt_text = (
        f"Lanes of computing and waiting, one per rank, in one step of {len(shown_runs)} runs. {'; '.join(idle_texts)}."
    )
    caption = f"Computing and waiting ranks in one step of {model} on {place}. " + (f"{cpu_note}." if cpu_note else "")
    return Drawing(build_slug("idle", model, place), title, figure, caption.strip(), alt_text)
