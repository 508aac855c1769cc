"""Alerts: a comparison that found a regression, as a run whose message wandb passes on to whoever wants it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.comparison import REGRESSION, RunComparison
from bench.records import Record
from bench.tracking import Tracker, TrackerClient
from bench.tracking.tracked_run import TrackedRun, build_attempt_id

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
