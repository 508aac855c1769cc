"""The dashboard in wandb: asked for in settings, printed, saved; and alerts of a comparison."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.comparison import compare_records
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.planning.request import parse_tracker
from bench.records.schema import EVIDENCE_KINDS
from bench.reporting.builder import read_store
from bench.tracking.tracked_run import MAX_TAG_CHARS
from bench.tracking.wandb import WandbTracker
from bench.tracking.wandb_session import find_connection_problem, find_login_problem, format_error

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
import hashlib
from collections.abc import Callable
from pathlib import Path

from bench.comparison import REGRESSION, RunComparison
from bench.records import Record
from bench.tracking import Tracker, TrackerClient
from bench.tracking.tracked_run import TrackedRun, build_attempt_id

DEFAULT_SETTINGS = {"name": "FSDP against DDP", "baseline": "baseline", "evidence": "measured", "dry_run": "false"}
SETTINGS_HELP = """\
name: of the workspace and the report; baseline: tag of the runs that others are compared with; evidence: kind of rows
shown; dry_run=true: print the complete specification as JSON, without a server; tracker.project, tracker.entity,
tracker.base_url: where
"""
MAX_NAME_CHARS = 128


@dataclass(frozen=True)
class DashboardRequest:
    name: str
    baseline: str
    evidence: str
    dry_run: bool
    tracker: WandbTracker


def parse_dashboard_request(settings: Sequence[str]) -> DashboardRequest:
    """Read ``key=value`` settings.

    Raises
    ------
    UsageError
        On a setting that is none.
    """
    values, tracker_settings = dict(DEFAULT_SETTINGS), []
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in values:
            values[key] = value
        elif key.partition(".")[0] == "tracker":
            tracker_settings.append(setting)
        else:
            raise UsageError(
                f"{key} is not a field here: choose {', '.join(DEFAULT_SETTINGS)}, or tracker.project and others."
            )
    if not 0 < len(values["name"].strip()) <= MAX_NAME_CHARS:
        raise invalid_value_error("name", values["name"] or "(nothing)", f"1 to {MAX_NAME_CHARS} characters")
    if not 0 < len(values["baseline"]) <= MAX_TAG_CHARS or set(values["baseline"]) & set("'\\"):
        raise invalid_value_error(
            "baseline", values["baseline"] or "(nothing)", f"a tag of 1 to {MAX_TAG_CHARS} characters"
        )
    require_choice("evidence", values["evidence"], [kind for kind in EVIDENCE_KINDS if kind != "published"])
    require_choice("dry_run", values["dry_run"], ["true", "false"])
    return DashboardRequest(
        values["name"],
        values["baseline"],
        values["evidence"],
        values["dry_run"] == "true",
        _read_wandb_tracker(tracker_settings),
    )


def _read_wandb_tracker(settings: Sequence[str]) -> WandbTracker:
    tracker = parse_tracker(settings)
    if not isinstance(tracker, WandbTracker):
        raise invalid_value_error("tracker", tracker.name, "wandb")
    return tracker


def _build_dashboard(request: DashboardRequest, entity: str, *, asks_server: bool) -> tuple[ws.Workspace, wr.Report]:
    """Workspace and report; `asks_server` says whether a server may be asked where the runs are."""
    from bench.dashboards.panels import build_report, build_workspace

    project, selection = request.tracker.project_name, {"baseline": request.baseline, "evidence": request.evidence}
    return (
        build_workspace(entity, project, request.name, **selection),
        build_report(
            entity, project, request.name, **selection, runs_project=(entity, project) if asks_server else None
        ),
    )


def print_dashboard(request: DashboardRequest) -> int:
    """Print the complete specification as JSON, without a server."""
    request.tracker.set_environment()
    from bench.dashboards.panels import build_specification

    dashboard = _build_dashboard(request, request.tracker.entity_name or "", asks_server=False)
    print(json.dumps(build_specification(*dashboard), indent=1))
    return 0


def save_dashboard(request: DashboardRequest) -> int:
    """Send workspace and report to the server; 1 if there is none, or it does not take them."""
    request.tracker.set_environment()
    import wandb

    url = str(wandb.setup().settings.base_url)
    with contextlib.redirect_stderr(io.StringIO()):  # says whose login it takes
        problem = find_login_problem(url) or find_connection_problem(url)
    if problem is not None:
        print(f"{problem}: the dashboard is not changed. dry_run=true shows it without a server.", file=sys.stderr)
        return 1
    from bench.dashboards.panels import ensure_project, get_default_entity, save_report, save_workspace

    try:
        entity = request.tracker.entity_name or get_default_entity()
        ensure_project(entity, request.tracker.project_name)
        workspace, report = _build_dashboard(request, entity, asks_server=True)
        print(f"Workspace: {save_workspace(workspace)}")
        print(f"Report: {save_report(report)}")
    except Exception as error:  # the library raises whatever the server's answer makes of it
        print(f"{url} did not take the dashboard: {format_error(error)}", file=sys.stderr)
        return 1
    return 0


def compare_and_alert(stores: Sequence[str], settings: Sequence[str]) -> int:
    """Compare two stores, and send an alert of a regression; the exit code of bench.compare.

    Raises
    ------
    UsageError
        On anything but two stores and settings of a tracker.
    """
    if len(stores) != 2:
        raise UsageError("alert needs two stores: choose python -m bench.dashboard alert BASE CANDIDATE.")
    tracker = _read_wandb_tracker(settings)
    base, candidate = (read_store(name).records for name in stores)
    comparison = compare_records(base, candidate)
    print(comparison.sentence)
    if comparison.exit_code == 2:
        return 2
    from bench.dashboards.dashboard import send_alert

    send_alert(
        comparison, stores[0], stores[1], [*base, *candidate], tracker, lambda line: print(line, file=sys.stderr)
    )
    return comparison.exit_code


# --- Alerts: a comparison that found a regression, as a run whose message wandb passes on to whoever wants it.

MAX_NAMED_CONFIGURATIONS = 10
MAX_TITLE_CHARS = 63
"""Characters; wandb takes no longer one."""


def send_alert(
    comparison: RunComparison,
    base: str,
    candidate: str,
    compared_rows: Sequence[Record],
    tracker: Tracker,
    print_line: Callable[[str], None],
) -> None:
    """Send a comparison, with a message if it found a regression; whatever comes of it, it raises nothing.

    Parameters
    ----------
    base, candidate: str
        The stores that were compared.
    compared_rows: sequence of records
        All their rows.
    say: callable
        Takes a line for the user.
    """
    run_ids = [build_attempt_id(row) for row in compared_rows if row["evidence"] != "published"]
    client = TrackerClient(tracker, Path(candidate), print_line)
    client.send(runs=[build_comparison_run(comparison, base, candidate, run_ids)])
    if client.location:
        print_line(client.format_summary())


def build_comparison_run(comparison: RunComparison, base: str, candidate: str, run_ids: Sequence[str]) -> TrackedRun:
    """A comparison as a run: its verdict, and a message if it found a regression.

    Parameters
    ----------
    base, candidate: str
        What was compared, for people.
    run_ids: sequence of str
        Ids of all attempts that were compared: equal ones are the same comparison, and nobody is told twice.
    """
    regressed_names = [str(row.name) for row in comparison.list_with_verdict(REGRESSION)]
    more_note = (
        [f"and {len(regressed_names) - MAX_NAMED_CONFIGURATIONS} more"]
        if len(regressed_names) > MAX_NAMED_CONFIGURATIONS
        else []
    )
    text = "\n".join(
        [comparison.sentence, f"{base} against {candidate}", *regressed_names[:MAX_NAMED_CONFIGURATIONS], *more_note]
    )
    title = f"Regression: {Path(candidate).name} against {Path(base).name}"
    digest = hashlib.sha256("|".join(run_ids).encode()).hexdigest()[:16]
    return TrackedRun(
        id=f"comparison-{digest}",
        name=f"{candidate} against {base}: {comparison.verdict}",
        group="comparisons",
        job_type="comparison",
        tags=["comparison", comparison.verdict],
        notes=text,
        config={"base": base, "candidate": candidate},
        summary={"verdict": comparison.verdict, "exit_code": comparison.exit_code, "regressions": len(regressed_names)},
        alert=(title[:MAX_TITLE_CHARS], text) if comparison.exit_code == 1 else None,
    )
