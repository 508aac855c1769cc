"""What a comparison says beside its verdicts: what did not count, what else differs, all of it in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.comparison import status_and_memory
from bench.comparison.hosts import EnvironmentDifference
from bench.comparison.pairing import PUBLISHED, ConfigurationRuns
from bench.comparison.result import (
    CANNOT_TELL,
    IMPROVEMENT,
    NO_CHANGE,
    REGRESSION,
    STEP_TIME,
    VERDICTS,
    ComparedConfiguration,
    ComparisonSettings,
    OverallComparison,
    describe_exclusion,
    format_percent,
)
from bench.records import Record

SIDES = ("base", "candidate")


def list_left_out(pair: ConfigurationRuns) -> list[str]:
    """What of a configuration's runs does not count, in words."""
    notes = []
    for side, rows in (("base", pair.base), ("candidate", pair.candidate)):
        num_degraded = sum(bool(row.get("degraded")) for row in rows)
        if num_degraded:
            notes.append(f"{num_degraded} of {len(rows)} {side} runs degraded: time left out")
        status_counts = Counter(row["status"] for row in rows if row["status"] in status_and_memory.NO_RESULT_STATUSES)
        notes += [f"{count} of {len(rows)} {side} runs {status}: no result" for status, count in status_counts.items()]
    return notes


def list_other_differences(sides: Sequence[Sequence[Record]]) -> list[str]:
    """Differences that are no part of a configuration and may matter all the same."""
    notes = []
    step_counts = [
        {((row.get("config") or {}).get("measurement") or {}).get("steps") for row in side} for side in sides
    ]
    if step_counts[0] != step_counts[1] and all(None not in side for side in step_counts):
        count_texts = [" and ".join(sorted(str(count) for count in side)) for side in step_counts]
        notes.append(f"timed steps per run: {count_texts[0]}, now {count_texts[1]}")
    concurrent_runs = [max((row.get("concurrent_runs") or 0 for row in side), default=0) for side in sides]
    if concurrent_runs[0] != concurrent_runs[1]:
        notes.append(f"other runs of the store at the same time: up to {concurrent_runs[0]}, now {concurrent_runs[1]}")
    step_flops = [{(row.get("flops") or {}).get("model") for row in side} - {None} for side in sides]
    if all(step_flops) and step_flops[0] != step_flops[1]:
        notes.append("a step's FLOPs are counted otherwise than before: TFLOPS do not follow the time")
    return notes


def list_notes(base: Sequence[Record], candidate: Sequence[Record]) -> tuple[str, ...]:
    """What of both sides is not compared at all."""
    num_published = sum(row["evidence"] == PUBLISHED for row in (*base, *candidate))
    return (f"{num_published} published rows left out: nobody runs them again",) if num_published else ()


def list_drift_warnings(
    pairs: Sequence[ConfigurationRuns], rows: Sequence[ComparedConfiguration], overall: Sequence[OverallComparison]
) -> tuple[str, ...]:
    """A word of caution where a time changed and the two sides were not run in turn: a machine may change as well."""
    time_changes = [row.get(STEP_TIME.column) for row in rows] + [
        kind_overall.get(STEP_TIME.column) for kind_overall in overall
    ]
    run_pairs = [pair for pair in pairs if pair.evidence != "predicted"]
    if not run_pairs or not any(change and change.verdict in (REGRESSION, IMPROVEMENT) for change in time_changes):
        return ()
    start_times = [
        sorted(str(row.get("started_at")) for pair in run_pairs for row in getattr(pair, side)) for side in SIDES
    ]
    if start_times[0][-1] >= start_times[1][0] and start_times[1][-1] >= start_times[0][0]:
        return ()
    return (
        "one side was run after the other had ended: if the machine changed its speed in between, it looks the same. "
        "Runs of base and candidate in turn would tell",
    )


def format_sentence(
    verdict: str,
    rows: Sequence[ComparedConfiguration],
    overall: Sequence[OverallComparison],
    machine_differences: Sequence[EnvironmentDifference],
    is_comparable: bool,
    settings: ComparisonSettings,
) -> str:
    """The verdict in one sentence."""
    if not rows:
        return "Nothing to compare: base and candidate have no configuration in common."
    if not is_comparable:
        reason = "the machines differ" if machine_differences else "no configuration has a result on both sides"
        return f"Nothing comparable: {reason}" + (
            " (--across-machines compares anyway)." if machine_differences else "."
        )
    verdict_labels = {
        REGRESSION: "Regression",
        IMPROVEMENT: "Improvement",
        NO_CHANGE: "No change",
        CANNOT_TELL: "Cannot tell",
    }
    parts = [f"{sum(row.verdict == listed_verdict for row in rows)} {listed_verdict}" for listed_verdict in VERDICTS]
    counts_text = ", ".join(part for part in parts if not part.startswith("0 "))
    text = f"{verdict_labels[verdict]}. Of {len(rows)} configuration{'' if len(rows) == 1 else 's'}: {counts_text}."
    for kind_overall in overall:
        time_change = kind_overall.get(STEP_TIME.column)
        if time_change is not None and time_change.change is not None:
            interval_text = ""
            if time_change.low is not None and time_change.high is not None:
                ends_text = f"{format_percent(time_change.low)} to {format_percent(time_change.high)}"
                interval_text = (
                    f" ({format_percent(settings.confidence, signed=False)} interval {ends_text}, which "
                    f"{describe_exclusion(time_change)})"
                )
            evidence_text = "" if len(overall) == 1 else f" ({kind_overall.evidence})"
            text += f" Step time{evidence_text} {format_percent(time_change.change)}{interval_text}."
    return text
