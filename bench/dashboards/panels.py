"""The figures of the dashboard, once: workspace and report arrange the same panels.

Their axes are what `bench.tracking.tracked_run` sends: ``result/…`` is one point per attempt, ``configuration`` and
``scaling_series`` name what may be joined by a line, ``labels`` are the user's own tags.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr
from wandb_workspaces.workspaces import internal as views

from bench.tracking.tracked_run import OOM_TABLE

START_METRIC = "result/started_unix_s"
START_TITLE = "start of the run (Unix time, s)"
OOM_TITLE, STEPS_TITLE = "Out of memory", "Steps"
MAX_RUNS = 500
"""Runs that one panel shows: a history is long."""

COMMIT_LEGEND = "${config:commit} ${config:configuration}"
"""What a point's legend says, in wandb's own template."""


@dataclass(frozen=True)
class PanelGroup:
    """Panels that answer one question."""

    title: str
    text: str
    """What a reader needs to know to read them."""
    panels: list[Any]


def build_panel_groups(baseline: str, *, separate_baseline: bool) -> list[PanelGroup]:
    """All figures, in the order of the questions.

    Parameters
    ----------
    baseline: str
        Tag of the runs that others are compared with.
    separate_baseline: bool
        Whether the baseline's runs are a set of their own; otherwise the table of runs, which is grouped by
        configuration and labels, tells them from the others.
    """
    return [
        PanelGroup(
            "Speed over commits",
            "Model TFLOP/s per GPU of every configuration, by the time its runs started: a line per configuration, a "
            "band from the slowest to the fastest repeat. A step down that stays is a regression; the single points "
            "name its commit.",
            [
                _build_time_plot("TFLOP/s per GPU over commits", "result/tflops_per_gpu", "model TFLOP/s per GPU"),
                _build_run_scatter("TFLOP/s per GPU of every run", "tflops_per_gpu"),
                _build_commit_bars("TFLOP/s per GPU, mean of a commit", "tflops_per_gpu", "model TFLOP/s per GPU"),
            ],
        ),
        PanelGroup(
            "Memory over commits",
            "Peak of allocated memory (what tensors took) and of reserved memory (what the allocator held) in a step "
            "after warm-up, the largest over ranks.",
            [
                _build_time_plot("Peak allocated memory over commits", "result/peak_allocated_gib", "GiB per GPU"),
                _build_time_plot("Peak reserved memory over commits", "result/peak_reserved_gib", "GiB per GPU"),
                _build_commit_bars("Peak allocated memory, mean of a commit", "peak_allocated_bytes", "bytes per GPU"),
            ],
        ),
        PanelGroup(
            "Scaling",
            "What one GPU does while there are more and more of them: a line per configuration without its world size. "
            "A flat line is perfect scaling.",
            [
                _build_scaling_plot("TFLOP/s per GPU over GPUs", "result/tflops_per_gpu", "model TFLOP/s per GPU"),
                _build_scaling_plot(
                    "Tokens per GPU and second over GPUs", "result/tokens_per_second_per_gpu", "tokens/s per GPU"
                ),
                _build_scaling_plot("Peak allocated memory over GPUs", "result/peak_allocated_gib", "GiB per GPU"),
            ],
        ),
        PanelGroup(
            OOM_TITLE,
            "Every run that did not fit: where memory ran out, on which rank, and how much was asked for. It is a "
            "result, so such runs are finished, not failed.",
            [wr.WeavePanelSummaryTable(table_name=OOM_TABLE, layout=wr.Layout(w=24, h=12))],
        ),
        PanelGroup(
            format_baseline_title(baseline),
            f"Runs tagged {baseline} beside all others, configuration by configuration. Differences smaller than the "
            "spread of repeats say nothing: python -m bench.compare judges them.",
            [
                _build_baseline_bars("TFLOP/s per GPU", "tflops_per_gpu", "model TFLOP/s per GPU", separate_baseline),
                _build_baseline_bars("Step time", "step_time_median_s", "seconds per step", separate_baseline),
                _build_baseline_bars(
                    "Peak allocated memory", "peak_allocated_bytes", "bytes per GPU", separate_baseline
                ),
            ],
        ),
        PanelGroup(
            STEPS_TITLE,
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


def format_baseline_title(baseline: str) -> str:
    """Title of the figures that compare with a baseline."""
    return f"Against {baseline}"


def assign_panel_ids(panel_groups: list[PanelGroup], page: str) -> list[PanelGroup]:
    """The figures with fixed ids for a workspace or a report, so that an update changes nothing but what changed."""
    for panel_group in panel_groups:
        for position, panel in enumerate(panel_group.panels):
            panel._id = build_short_id(page, panel_group.title, str(position))
    return panel_groups


def build_short_id(*parts: str) -> str:
    """An identifier that is always the same for the same words: eleven characters, as wandb makes them."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:11]


def _build_time_plot(title: str, metric: str, unit: str) -> wr.LinePlot:
    return wr.LinePlot(
        title=title,
        x=START_METRIC,
        y=[metric],
        title_x=START_TITLE,
        title_y=unit,
        groupby=wr.Config("configuration"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MAX_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _build_run_scatter(title: str, column: str) -> wr.ScatterPlot:
    return wr.ScatterPlot(
        title=title,
        x=wr.SummaryMetric("started_unix_s"),
        y=wr.SummaryMetric(column),
        legend_template=COMMIT_LEGEND,
        layout=wr.Layout(w=12, h=8),
    )


def _build_commit_bars(title: str, column: str, unit: str) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[column],
        title_x=unit,
        groupby=wr.Config("commit"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MAX_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _build_scaling_plot(title: str, metric: str, unit: str) -> wr.LinePlot:
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
        max_runs_to_show=MAX_RUNS,
        layout=wr.Layout(w=12, h=8),
    )


def _build_baseline_bars(title: str, column: str, unit: str, separate_baseline: bool) -> wr.BarPlot:
    return wr.BarPlot(
        title=title,
        metrics=[column],
        title_x=unit,
        groupby=wr.Config("configuration") if separate_baseline else None,
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MAX_RUNS,
        layout=wr.Layout(w=8, h=8),
    )


# --- The report: the same figures with the text that explains them, for those who do not open a workspace.

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


# --- The workspace: what a team opens to see whether the last commits were slower or fatter.

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


# --- Dashboards on their way to a server: what is there under the same name is updated, never doubled.


def get_default_entity() -> str:
    """User or team of whoever is logged in."""
    import wandb

    return str(wandb.Api().default_entity)


def ensure_project(entity: str, project: str) -> None:
    """Make a project unless it is there: both a view and a report need one."""
    import wandb

    api = wandb.Api()
    if all(existing_project.name != project for existing_project in api.projects(entity)):
        api.create_project(project, entity)


def save_workspace(workspace: ws.Workspace) -> str:
    """Create the workspace, or update the one with its internal name; returns its address."""
    name = workspace._internal_name
    try:
        view = views.get_view_dict(workspace.entity, workspace.project, views._internal_name_to_url_query_str(name))
    except ValueError:  # there is none yet
        view = {}
    workspace._internal_id = view.get("id", "")
    with _silence_stderr():
        workspace.save()
    return str(workspace.url)


def save_report(report: wr.Report) -> str:
    """Create the report, or update the one with its title; returns its address."""
    import wandb

    with contextlib.suppress(ValueError):  # no such project: saving makes it
        for existing_report in wandb.Api().reports(f"{report.entity}/{report.project}"):
            if existing_report.display_name == report.title:
                report.id = existing_report.id
                break
    with _silence_stderr():
        report.save()
    return str(report.url)


def build_specification(workspace: ws.Workspace, report: wr.Report) -> dict[str, Any]:
    """Everything that would be sent, as plain values."""
    view = workspace._to_model()
    page = report._to_model()
    return {
        "workspace": {
            "entity": workspace.entity or None,
            "project": workspace.project,
            "name": view.display_name,
            "internal_name": view.name,
            "spec": view.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        },
        "report": {
            "entity": report.entity or None,
            "project": report.project,
            "title": page.display_name,
            "description": page.description,
            "spec": page.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        },
    }


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Without the library's own lines, which say the address in their way."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
