"""The workspace: what a team opens to see whether the last commits were slower or fatter."""

from __future__ import annotations

import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from bench.dashboards.panels import MOST_RUNS, STEPS, figures, numbered, short_id

COLUMNS = (
    "status",
    "git_sha",
    "tflops_per_gpu",
    "step_time_median_s",
    "peak_allocated_bytes",
    "world_size",
    "oom_phase",
)
"""Columns of the record that the table of runs shows."""


def workspace(entity: str, project: str, name: str, *, baseline: str, evidence: str) -> ws.Workspace:
    """The workspace, complete, as yet known to no server.

    Parameters
    ----------
    name: str
        Of the saved view. Its internal name follows from it, so that there is one view of a name.
    baseline: str
        Tag of the runs that others are compared with.
    evidence: str
        Kind of rows shown: kinds are never mixed.
    """
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(
                name=part.title,
                panels=part.panels,
                is_open=part.title != STEPS,
                layout_settings=ws.SectionLayoutSettings(columns=min(3, len(part.panels)), rows=1),
            )
            for part in numbered(figures(baseline, apart=False), "workspace")
        ],
        settings=ws.WorkspaceSettings(max_runs=MOST_RUNS, tooltip_number_of_runs="all_runs"),
        runset_settings=ws.RunsetSettings(
            filters=f"Metric('JobType') == '{evidence}'",
            groupby=[expr.Config("configuration"), expr.Config("labels")],
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[f"summary:{column}" for column in COLUMNS],
        ),
    )
    made._internal_name = f"nw-{short_id(entity, project, name)}-v"
    made._internal_runset_id = short_id("workspace", "runs")
    return made
