"""Alerts: a comparison that found a regression, as a run whose message wandb passes on to whoever wants it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.comparison import REGRESSION, Comparison
from bench.records import Record
from bench.tracking import Courier, Tracker
from bench.tracking.tracked import TrackedRun, identifier

MOST_NAMED = 10
LONGEST_TITLE = 63
"""Characters; wandb takes no longer one."""


def tell(
    comparison: Comparison,
    base: str,
    candidate: str,
    compared: Sequence[Record],
    tracker: Tracker,
    say: Callable[[str], None],
) -> None:
    """Send a comparison, with a message if it found a regression; whatever comes of it, it raises nothing.

    Parameters
    ----------
    base, candidate: str
        The stores that were compared.
    compared: sequence of records
        All their rows.
    say: callable
        Takes a line for the user.
    """
    ids = [identifier(row) for row in compared if row["evidence"] != "published"]
    courier = Courier(tracker, Path(candidate), say)
    courier.send(runs=[comparison_run(comparison, base, candidate, ids)])
    if courier.whereabouts:
        say(courier.summary())


def comparison_run(comparison: Comparison, base: str, candidate: str, run_ids: Sequence[str]) -> TrackedRun:
    """A comparison as a run: its verdict, and a message if it found a regression.

    Parameters
    ----------
    base, candidate: str
        What was compared, for people.
    run_ids: sequence of str
        Ids of all attempts that were compared: equal ones are the same comparison, and nobody is told twice.
    """
    worse = [str(row.name) for row in comparison.of(REGRESSION)]
    more = [f"and {len(worse) - MOST_NAMED} more"] if len(worse) > MOST_NAMED else []
    text = "\n".join([comparison.sentence, f"{base} against {candidate}", *worse[:MOST_NAMED], *more])
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
        summary={"verdict": comparison.verdict, "exit_code": comparison.exit_code, "regressions": len(worse)},
        alert=(title[:LONGEST_TITLE], text) if comparison.exit_code == 1 else None,
    )
