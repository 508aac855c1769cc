"""The report: the same figures with the text that explains them, for those who do not open a workspace."""

from __future__ import annotations

from typing import Any

import wandb_workspaces.reports.v2 as wr

from bench.dashboards.panels import (
    OOM_TITLE,
    STEPS_TITLE,
    PanelGroup,
    assign_panel_ids,
    build_panel_groups,
    build_short_id,
    format_baseline_title,
)

ABOUT_TEXT = (
    "Written by python -m bench.dashboard, which updates it: text that is changed here is lost. One run is one attempt "
    "of one configuration, as its row in the store says; the row itself is the run's artifact. TFLOP/s count the "
    "model's own matrix products, without what activation checkpointing computes again."
)


def build_report(
    entity: str, project: str, title: str, *, baseline: str, evidence: str, runs_project: tuple[str, str] | None
) -> wr.Report:
    """The report, complete.

    Parameters
    ----------
    baseline: str
        Tag of the runs that others are compared with.
    evidence: str
        Kind of rows shown.
    runs_project: (entity, project), optional
        Where runs are looked up, for which a server is asked; None for wherever the report lies.
    """
    panel_groups = assign_panel_ids(build_panel_groups(baseline, separate_baseline=True), "report")
    return wr.Report(
        entity=entity,
        project=project,
        title=title,
        description="Speed, memory, scaling and runs out of memory, commit by commit.",
        width="fluid",
        blocks=[
            wr.P(ABOUT_TEXT),
            wr.TableOfContents(),
            *(
                block
                for panel_group in panel_groups
                for block in _build_blocks(panel_group, baseline, evidence, runs_project)
            ),
        ],
    )


def _build_blocks(
    panel_group: PanelGroup, baseline: str, evidence: str, runs_project: tuple[str, str] | None
) -> list[Any]:
    return [
        wr.H2(panel_group.title),
        wr.P(panel_group.text),
        wr.PanelGrid(runsets=_build_runsets(panel_group, baseline, evidence, runs_project), panels=panel_group.panels),
    ]


def _build_runsets(
    panel_group: PanelGroup, baseline: str, evidence: str, runs_project: tuple[str, str] | None
) -> list[wr.Runset]:
    """Whose runs the panels show: all, those out of memory, or the baseline's and the others'."""
    evidence_filter = f"Metric('JobType') == '{evidence}'"
    filters = {evidence: evidence_filter}
    if panel_group.title == OOM_TITLE:
        filters = {"out of memory": f"{evidence_filter} and SummaryMetric('status') == 'oom'"}
    elif panel_group.title == format_baseline_title(baseline):
        filters = {
            baseline: f"{evidence_filter} and Tags() in ['{baseline}']",
            "all others": f"{evidence_filter} and Tags() not in ['{baseline}']",
        }
    entity, project = runs_project or ("", "")
    runsets = []
    for name, filter_text in filters.items():
        group_keys = [] if panel_group.title == STEPS_TITLE else ["config.configuration"]
        runset = wr.Runset(entity=entity, project=project, name=name, filters=filter_text, groupby=group_keys)
        runset._id = build_short_id("report", panel_group.title, name)
        runsets.append(runset)
    return runsets
