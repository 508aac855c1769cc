"""The workspace: what a team opens to see whether the last commits were slower or fatter."""

from __future__ import annotations

import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from bench.dashboards.panels import MAX_RUNS, STEPS_TITLE, assign_panel_ids, build_panel_groups, build_short_id

RUN_TABLE_COLUMNS = (
    "status",
    "git_sha",
    "tflops_per_gpu",
    "step_time_median_s",
    "peak_allocated_bytes",
    "world_size",
    "oom_phase",
)
"""Columns of the record that the table of runs shows."""


def build_workspace(entity: str, project: str, name: str, *, baseline: str, evidence: str) -> ws.Workspace:
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
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(
                name=panel_group.title,
                panels=panel_group.panels,
                is_open=panel_group.title != STEPS_TITLE,
                layout_settings=ws.SectionLayoutSettings(columns=min(3, len(panel_group.panels)), rows=1),
            )
            for panel_group in assign_panel_ids(build_panel_groups(baseline, separate_baseline=False), "workspace")
        ],
        settings=ws.WorkspaceSettings(max_runs=MAX_RUNS, tooltip_number_of_runs="all_runs"),
        runset_settings=ws.RunsetSettings(
            filters=f"Metric('JobType') == '{evidence}'",
            groupby=[expr.Config("configuration"), expr.Config("labels")],
            order=[expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)],
            pinned_columns=[f"summary:{column}" for column in RUN_TABLE_COLUMNS],
        ),
    )
    workspace._internal_name = f"nw-{build_short_id(entity, project, name)}-v"
    workspace._internal_runset_id = build_short_id("workspace", "runs")
    return workspace
