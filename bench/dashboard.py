"""``python -m bench.dashboard [key=value …]``: the dashboard in wandb, created or updated.

A workspace and a report: TFLOPs per GPU and peak memory over commits for each configuration, scaling curves, the runs
out of memory, and everything beside the runs tagged as baseline. ``python -m bench.dashboard alert BASE CANDIDATE``
compares two stores as bench.compare does, and sends an alert if the candidate is slower or fatter.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import command
from bench.comparison import compare
from bench.errors import UsageError, bad_value, require_choice
from bench.planning.request import read_tracker
from bench.records.schema import EVIDENCE
from bench.reporting.reading import read_store
from bench.tracking.tracked import LONGEST_TAG
from bench.tracking.wandb import WandbTracker
from bench.tracking.wandb_session import first_line, logged_out, unreachable

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

DEFAULTS = {"name": "FSDP against DDP", "baseline": "baseline", "evidence": "measured", "dry_run": "false"}
MEANINGS = (
    "name: of the workspace and the report; baseline: tag of the runs that others are compared with; evidence: kind of "
    "rows shown; dry_run=true: print the complete specification as JSON, without a server; tracker.project, "
    "tracker.entity, tracker.base_url: where"
)
LONGEST_NAME = 128


@dataclass(frozen=True)
class Wanted:
    """What was asked for."""

    name: str
    baseline: str
    evidence: str
    dry_run: bool
    tracker: WandbTracker


def main(arguments: Sequence[str] | None = None) -> int:
    """Create or update the dashboard, or send an alert.

    Returns
    -------
    int
        0 if it is done, 1 if the server could not be asked, 2 on bad input; of ``alert`` what bench.compare says: 0 no
        regression, 1 regression, 2 nothing comparable.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description=__doc__, epilog=MEANINGS)
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings; or alert BASE CANDIDATE")
    options = parser.parse_args(arguments)
    words = [word for word in options.words if "=" not in word]
    settings = [word for word in options.words if "=" in word]
    try:
        if words[:1] == ["alert"]:
            return _alert(words[1:], settings)
        if words:
            raise UsageError(f"{words[0]} is not valid here: choose settings (key=value), or alert BASE CANDIDATE.")
        wanted = _wanted(settings)
        if wanted.dry_run:
            return _show(wanted)
        return _save(wanted)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2


def _wanted(settings: Sequence[str]) -> Wanted:
    own, others = dict(DEFAULTS), []
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in own:
            own[key] = value
        elif key.partition(".")[0] == "tracker":
            others.append(setting)
        else:
            raise UsageError(f"{key} is not a field here: choose {', '.join(DEFAULTS)}, or tracker.project and others.")
    if not 0 < len(own["name"].strip()) <= LONGEST_NAME:
        raise bad_value("name", own["name"] or "(nothing)", f"1 to {LONGEST_NAME} characters")
    if not 0 < len(own["baseline"]) <= LONGEST_TAG or set(own["baseline"]) & set("'\\"):
        raise bad_value("baseline", own["baseline"] or "(nothing)", f"a tag of 1 to {LONGEST_TAG} characters")
    require_choice("evidence", own["evidence"], [kind for kind in EVIDENCE if kind != "published"])
    require_choice("dry_run", own["dry_run"], ["true", "false"])
    return Wanted(own["name"], own["baseline"], own["evidence"], own["dry_run"] == "true", _tracker(others))


def _tracker(settings: Sequence[str]) -> WandbTracker:
    tracker = read_tracker(settings)
    if not isinstance(tracker, WandbTracker):
        raise bad_value("tracker", tracker.name, "wandb")
    return tracker


def _built(wanted: Wanted, entity: str, *, asks: bool) -> tuple[ws.Workspace, wr.Report]:
    """Workspace and report; `asks` says whether a server may be asked where the runs are."""
    from bench.dashboards.report import report
    from bench.dashboards.workspace import workspace

    project, kind = wanted.tracker.project_name, {"baseline": wanted.baseline, "evidence": wanted.evidence}
    return (
        workspace(entity, project, wanted.name, **kind),
        report(entity, project, wanted.name, **kind, runs_of=(entity, project) if asks else None),
    )


def _show(wanted: Wanted) -> int:
    wanted.tracker.settle_environment()
    from bench.dashboards.server import specification

    made = _built(wanted, wanted.tracker.entity_name or "", asks=False)
    print(json.dumps(specification(*made), indent=1))
    return 0


def _save(wanted: Wanted) -> int:
    """Send both to the server, if there is one to be asked."""
    wanted.tracker.settle_environment()
    import wandb

    url = str(wandb.setup().settings.base_url)
    with contextlib.redirect_stderr(io.StringIO()):  # says whose login it takes
        unable = logged_out(url) or unreachable(url)
    if unable is not None:
        print(f"{unable}: the dashboard is not changed. dry_run=true shows it without a server.", file=sys.stderr)
        return 1
    from bench.dashboards.server import default_entity, ensure_project, save_report, save_workspace

    try:
        entity = wanted.tracker.entity_name or default_entity()
        ensure_project(entity, wanted.tracker.project_name)
        workspace, report = _built(wanted, entity, asks=True)
        print(f"Workspace: {save_workspace(workspace)}")
        print(f"Report: {save_report(report)}")
    except Exception as error:  # the library raises whatever the server's answer makes of it
        print(f"{url} did not take the dashboard: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


def _alert(stores: Sequence[str], settings: Sequence[str]) -> int:
    """Compare two stores; tell whoever wants to be told."""
    if len(stores) != 2:
        raise UsageError("alert needs two stores: choose python -m bench.dashboard alert BASE CANDIDATE.")
    tracker = _tracker(settings)
    base, candidate = (read_store(name).records for name in stores)
    comparison = compare(base, candidate)
    print(comparison.sentence)
    if comparison.exit_code == 2:
        return 2
    from bench.dashboards.alerts import tell

    tell(comparison, stores[0], stores[1], [*base, *candidate], tracker, lambda line: print(line, file=sys.stderr))
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(command.execute(main))
