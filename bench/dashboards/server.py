"""Dashboards on their way to a server: what is there under the same name is updated, never doubled."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces import internal as views


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
