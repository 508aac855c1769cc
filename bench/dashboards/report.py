"""The report: the same figures with the text that explains them, for those who do not open a workspace."""

from __future__ import annotations

from typing import Any

import wandb_workspaces.reports.v2 as wr

from bench.dashboards.panels import OUT_OF_MEMORY, STEPS, Figures, against, figures, numbered, short_id

ABOUT = (
    "Written by python -m bench.dashboard, which updates it: text that is changed here is lost. One run is one attempt "
    "of one configuration, as its row in the store says; the row itself is the run's artifact. TFLOP/s count the "
    "model's own matrix products, without what activation checkpointing computes again."
)


def report(
    entity: str, project: str, title: str, *, baseline: str, evidence: str, runs_of: tuple[str, str] | None
) -> wr.Report:
    """The report, complete.

    Parameters
    ----------
    baseline: str
        Tag of the runs that others are compared with.
    evidence: str
        Kind of rows shown.
    runs_of: (entity, project), optional
        Where runs are looked up, for which a server is asked; None for wherever the report lies.
    """
    parts = numbered(figures(baseline, apart=True), "report")
    return wr.Report(
        entity=entity,
        project=project,
        title=title,
        description="Speed, memory, scaling and runs out of memory, commit by commit.",
        width="fluid",
        blocks=[
            wr.P(ABOUT),
            wr.TableOfContents(),
            *(block for part in parts for block in _blocks(part, baseline, evidence, runs_of)),
        ],
    )


def _blocks(part: Figures, baseline: str, evidence: str, runs_of: tuple[str, str] | None) -> list[Any]:
    return [
        wr.H2(part.title),
        wr.P(part.text),
        wr.PanelGrid(runsets=_runsets(part, baseline, evidence, runs_of), panels=part.panels),
    ]


def _runsets(part: Figures, baseline: str, evidence: str, runs_of: tuple[str, str] | None) -> list[wr.Runset]:
    """Whose runs the panels show: all, those out of memory, or the baseline's and the others'."""
    kind = f"Metric('JobType') == '{evidence}'"
    filters = {evidence: kind}
    if part.title == OUT_OF_MEMORY:
        filters = {"out of memory": f"{kind} and SummaryMetric('status') == 'oom'"}
    elif part.title == against(baseline):
        filters = {
            baseline: f"{kind} and Tags() in ['{baseline}']",
            "all others": f"{kind} and Tags() not in ['{baseline}']",
        }
    entity, project = runs_of or ("", "")
    sets = []
    for name, text in filters.items():
        groups = [] if part.title == STEPS else ["config.configuration"]
        runset = wr.Runset(entity=entity, project=project, name=name, filters=text, groupby=groups)
        runset._id = short_id("report", part.title, name)
        sets.append(runset)
    return sets
