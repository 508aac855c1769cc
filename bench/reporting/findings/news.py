"""What is new since the last report in a folder: runs, and outcomes that changed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from bench.core.files import replace_file
from bench.core.presentation import format_list, format_plural
from bench.reporting.findings.finding import Finding

REPORTED_RUNS_FILE = ".reported-runs"
"""In the folder of a report: what it showed, by which the next one knows what is new."""

ReportedRuns = Mapping[str, list[str]]
"""By a run's anchor on the page: its status, and when its row was written."""


def list_reported_runs(table: pd.DataFrame) -> dict[str, list[str]]:
    """The runs of a table as the file keeps them."""
    finished_at = table["finished_at"].astype(object).where(table["finished_at"].notna(), "")
    return {
        str(link): [str(status), str(finished)]
        for link, status, finished in zip(table["link"], table["status"], finished_at, strict=True)
    }


def read_reported_runs(folder: Path) -> ReportedRuns | None:
    """What the last report in a folder showed; None where there is none, or its file cannot be read."""
    try:
        runs = json.loads((folder / REPORTED_RUNS_FILE).read_text(encoding="utf-8"))
        return {str(link): [str(value) for value in values] for link, values in runs.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def write_reported_runs(folder: Path, runs: ReportedRuns) -> None:
    """Replace what the folder says of its last report."""
    replace_file(folder / REPORTED_RUNS_FILE, json.dumps(runs, separators=(",", ":"), sort_keys=True))


def find_news(table: pd.DataFrame, last_runs: ReportedRuns | None) -> list[Finding]:
    """Runs that the last report did not have, those that ended otherwise than it said, and those that are gone."""
    if last_runs is None:
        return [Finding("This is the first report in its folder; the next one says what is new since.", ())]
    runs = list_reported_runs(table)
    newest = max((finished for _, finished in last_runs.values()), default="")
    since = f"the last report ({format_plural(len(last_runs), 'run')}"
    since += f", the newest of {newest[:16].replace('T', ' ')} UTC)" if newest else ")"
    added = [link for link in runs if link not in last_runs]
    again = [link for link in runs if link in last_runs and runs[link] != last_runs[link]]
    changed = [link for link in again if runs[link][0] != last_runs[link][0]]
    gone = [link for link in last_runs if link not in runs]
    findings = []
    if added:
        of_added = table[table["link"].isin(added)]
        statuses = Counter(of_added["status"].astype(str))
        counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        variants = format_list(list(dict.fromkeys(of_added["variant"].astype(str))), 4)
        models = format_list(list(dict.fromkeys(of_added["model"].astype(str))), 4)
        text = f"{format_plural(len(added), 'new run')} since {since}: {counts}; {models} with {variants}."
        findings.append(Finding(text, tuple(added)))
    if changed:
        changes = Counter(f"{last_runs[link][0]} to {runs[link][0]}" for link in changed)
        counts = ", ".join(f"{count} from {change}" for change, count in changes.most_common())
        verb = "ends" if len(changed) == 1 else "end"
        text = f"{format_plural(len(changed), 'run')} {verb} otherwise than in {since}: {counts}."
        findings.append(Finding(text, tuple(changed)))
    if len(again) > len(changed):
        unchanged = [link for link in again if link not in set(changed)]
        text = f"{format_plural(len(unchanged), 'run')} took place again since {since}, with the same outcome."
        findings.append(Finding(text, tuple(unchanged)))
    if gone:
        text = f"{format_plural(len(gone), 'run')} of {since} {'is' if len(gone) == 1 else 'are'} no longer here."
        findings.append(Finding(text, ()))
    return findings or [Finding(f"Nothing is new since {since}.", ())]
