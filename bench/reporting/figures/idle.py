"""When each rank of a pipeline computed in one step, and when it waited: drawn of runs that were profiled."""

from __future__ import annotations

import pandas as pd

from bench.reporting import marks, style
from bench.reporting.cells import by, in_order
from bench.reporting.drawing import Drawing, Section, header, header_height_in, new_figure
from bench.reporting.labels import CPU_NOTE, number, slug

TITLE = "Idle ranks of pipelines"
HOW_TO_READ = (
    "One block of lanes is one run, one lane one rank, from the first stage at the top to the last one. Filled: the "
    "rank computes; empty: it waits for another stage. At the right, the share of the step in which it waits. In a "
    "naive pipeline one stage computes at a time; micro-batches let stages work at the same time, and what remains "
    "empty is the bubble. The step is the first timed one of a run with measurement.profile=true."
)
WIDTH_IN, LANE_IN, GAP_IN = 9.4, 0.24, 0.62
MOST_RUNS, MOST_RANKS = 8, 16
"""Of one figure, and of one run."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """The runs that noted when their ranks computed, of repeats the first.

    ``busy`` has each rank's spans and its step's seconds.
    """
    noted = table[table["busy"].map(len) > 0]
    return in_order(noted).drop_duplicates(["place", "model", "variant", "heading", "settings"])


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per place and model. Nothing at all where no pipeline was profiled."""
    result = Section("idle", TITLE, HOW_TO_READ)
    for (place, model), here in by(select(table), "place", "model"):
        for start in range(0, len(here), MOST_RUNS):
            result.plan(_draw, here.iloc[start : start + MOST_RUNS], str(place), str(model), palette)
    return result


def _draw(shown: pd.DataFrame, place: str, model: str, palette: dict[str, style.Mark]) -> Drawing:
    note = CPU_NOTE if shown["device"].iloc[0] == "cpu" else ""
    title = f"When ranks compute and when they wait: one step of {model}"
    heights = [min(len(busy), MOST_RANKS) * LANE_IN + GAP_IN for busy in shown["busy"]]
    subtitle = f"{place}\n{note}"
    figure = new_figure(WIDTH_IN, header_height_in(title, subtitle, WIDTH_IN) + sum(heights))
    header(figure, title, subtitle)
    subplots = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    words = []
    for axes, (_, row) in zip(subplots, shown.iterrows(), strict=True):
        lanes = row["busy"][:MOST_RANKS]
        name = f"{marks.label(row)}, {row['heading']}"
        axes.set_title(name, loc="left", fontsize=8)
        end = max(step_s for _, step_s in lanes)
        shares = []
        for lane, (spans, step_s) in enumerate(lanes):
            bars = [(1e3 * start, 1e3 * (stop - start)) for start, stop in spans]
            axes.broken_barh(
                bars, (lane - 0.36, 0.72), facecolor=palette[row["variant"]].colour, edgecolor="white", linewidth=0.3
            )
            shares.append(1 - sum(stop - start for start, stop in spans) / step_s)
            axes.text(1e3 * end * 1.01, lane, f"waits {number(100 * shares[-1], 2)} %", va="center", fontsize=7.5)
        axes.set_yticks(range(len(lanes)), [f"rank {lane}" for lane in range(len(lanes))])
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(0, 1e3 * end * 1.12)
        words.append(f"{name}: waits " + ", ".join(f"{number(100 * share, 2)}" for share in shares) + " percent")
    subplots[-1].set_xlabel("milliseconds from the beginning of the step", loc="left")
    alt = f"Lanes of computing and waiting, one per rank, in one step of {len(shown)} runs. {'; '.join(words)}."
    caption = f"Computing and waiting ranks in one step of {model} on {place}. " + (f"{note}." if note else "")
    return Drawing(slug("idle", model, place), title, figure, caption.strip(), alt)
