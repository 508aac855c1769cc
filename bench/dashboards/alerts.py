"""Alerts: a comparison that found a regression, as a run whose message wandb passes on to whoever wants it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from bench.tracking.tracked import TrackedRun

MOST_NAMED = 10
LONGEST_TITLE = 63
"""Characters; wandb takes no longer one."""


class Verdict(Protocol):
    """What of a `bench.comparison.Comparison` an alert needs."""

    @property
    def verdict(self) -> str:
        """regression, improvement, no change or cannot tell."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""

    @property
    def exit_code(self) -> int:
        """0 no regression, 1 regression, 2 nothing comparable."""

    def of(self, verdict: str) -> Sequence[Any]:
        """The configurations with a verdict."""


def comparison_run(comparison: Verdict, base: str, candidate: str, run_ids: Sequence[str]) -> TrackedRun:
    """A comparison as a run: its verdict, and a message if it found a regression.

    Parameters
    ----------
    base, candidate: str
        What was compared, for people.
    run_ids: sequence of str
        Ids of all attempts that were compared: equal ones are the same comparison, and nobody is told twice.
    """
    worse = [str(row.name) for row in comparison.of("regression")]
    more = [f"and {len(worse) - MOST_NAMED} more"] if len(worse) > MOST_NAMED else []
    text = "\n".join([comparison.sentence, f"{base} against {candidate}", *worse[:MOST_NAMED], *more])
    regression = comparison.exit_code == 1
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
        alert=(f"Regression: {candidate}"[:LONGEST_TITLE], text) if regression else None,
    )
