"""The figures of the dashboard, once: workspace and report arrange the same panels.

Their axes are what `bench.tracking.tracked` sends: ``result/…`` is one point per attempt, ``configuration`` and
``scaling_series`` name what may be joined by a line, ``labels`` are the user's own tags.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import wandb_workspaces.reports.v2 as wr

from bench.tracking.tracked import OOM_TABLE

STARTED = "result/started_unix_s"
STARTED_TITLE = "start of the run (Unix time, s)"
OUT_OF_MEMORY, STEPS = "Out of memory", "Steps"
MOST_RUNS = 500
"""Runs that one panel shows: a history is long."""

COMMIT_LEGEND = "${config:commit} ${config:configuration}"
"""What a point's legend says, in wandb's own template."""


@dataclass(frozen=True)
class Figures:
    """Panels that answer one question."""

    title: str
    text: str
    """What a reader needs to know to read them."""
    panels: list[Any]


def figures(baseline: str, *, apart: bool) -> list[Figures]:
    """All figures, in the order of the questions.

    Parameters
    ----------
    baseline: str
        Tag of the runs that others are compared with.
    apart: bool
        Whether the baseline's runs are a set of their own; otherwise the table of runs, which is grouped by
        configuration and labels, tells them from the others.
    """
    return [
        Figures(
            "Speed over commits",
            "Model TFLOP/s per GPU of every configuration, by the time its runs started: a line per configuration, a "
            "band from the slowest to the fastest repeat. A step down that stays is a regression; the single points "
            "name its commit.",
            [
                _over_time("TFLOP/s per GPU over commits", "result/tflops_per_gpu", "model TFLOP/s per GPU"),
                _every_run("TFLOP/s per GPU of every run", "tflops_per_gpu"),
                _by_commit("TFLOP/s per GPU, mean of a commit", "tflops_per_gpu", "model TFLOP/s per GPU"),
            ],
        ),
        Figures(
            "Memory over commits",
            "Peak of allocated memory (what tensors took) and of reserved memory (what the allocator held) in a step "
            "after warm-up, the largest over ranks.",
            [
                _over_time("Peak allocated memory over commits", "result/peak_allocated_gib", "GiB per GPU"),
                _over_time("Peak reserved memory over commits", "result/peak_reserved_gib", "GiB per GPU"),
                _by_commit("Peak allocated memory, mean of a commit", "peak_allocated_bytes", "bytes per GPU"),
            ],
        ),
        Figures(
            "Scaling",
            "What one GPU does while there are more and more of them: a line per configuration without its world size. "
            "A flat line is perfect scaling.",
            [
                _scaling("TFLOP/s per GPU over GPUs", "result/tflops_per_gpu", "model TFLOP/s per GPU"),
                _scaling("Tokens per GPU and second over GPUs", "result/tokens_per_second_per_gpu", "tokens/s per GPU"),
                _scaling("Peak allocated memory over GPUs", "result/peak_allocated_gib", "GiB per GPU"),
            ],
        ),
        Figures(
            OUT_OF_MEMORY,
            "Every run that did not fit: where memory ran out, on which rank, and how much was asked for. It is a "
            "result, so such runs are finished, not failed.",
            [wr.WeavePanelSummaryTable(table_name=OOM_TABLE, layout=wr.Layout(w=24, h=12))],
        ),
        Figures(
            against(baseline),
            f"Runs tagged {baseline} beside all others, configuration by configuration. Differences smaller than the "
            "spread of repeats say nothing: python -m bench.compare judges them.",
            [
                _beside("TFLOP/s per GPU", "tflops_per_gpu", "model TFLOP/s per GPU", apart),
                _beside("Step time", "step_time_median_s", "seconds per step", apart),
                _beside("Peak allocated memory", "peak_allocated_bytes", "bytes per GPU", apart),
            ],
        ),
        Figures(
            STEPS,
            "Single runs: the time of every timed step and the loss of all. Choose a few runs in the table.",
            [
                wr.LinePlot(
                    title="Time of every timed step",
                    x="step/number",
                    y=["step/time_s"],
                    title_x="step",
                    title_y="seconds (slowest rank)",
                ),
                wr.LinePlot(title="Loss", x="step/number", y=["step/loss"], title_x="step", title_y="loss"),
            ],
        ),
    ]


def against(baseline: str) -> str:
    """Title of the figures that compare with a baseline."""
    return f"Against {baseline}"


def numbered(parts: list[Figures], place: str) -> list[Figures]:
    """The figures with fixed ids for a workspace or a report, so that an update changes nothing but what changed."""
    for part in parts:
        for position, panel in enumerate(part.panels):
            panel._id = short_id(place, part.title, str(position))
    return parts


def short_id(*words: str) -> str:
    """An identifier that is always the same for the same words: eleven characters, as wandb makes them."""
    return hashlib.sha256("|".join(words).encode()).hexdigest()[:11]


def _over_time(title: str, metric: str, unit: str) -> wr.LinePlot:
    return wr.LinePlot(
        title=title,
        x=STARTED,
        y=[metric],
        title_x=STARTED_TITLE,
        title_y=unit,
        groupby=wr.Config("configuration"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MOST_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _every_run(title: str, column: str) -> wr.ScatterPlot:
    return wr.ScatterPlot(
        title=title,
        x=wr.SummaryMetric("started_unix_s"),
        y=wr.SummaryMetric(column),
        legend_template=COMMIT_LEGEND,
        layout=wr.Layout(w=12, h=8),
    )


def _by_commit(title: str, column: str, unit: str) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[column],
        title_x=unit,
        groupby=wr.Config("commit"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MOST_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _scaling(title: str, metric: str, unit: str) -> wr.LinePlot:
    return wr.LinePlot(
        title=title,
        x="result/world_size",
        y=[metric],
        log_x=True,
        title_x="GPUs (world size)",
        title_y=unit,
        groupby=wr.Config("scaling_series"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MOST_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _beside(title: str, column: str, unit: str, apart: bool) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[column],
        title_x=unit,
        groupby=wr.Config("configuration") if apart else None,
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MOST_RUNS,
        layout=wr.Layout(w=8, h=8),
    )
