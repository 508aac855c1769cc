"""What a comparison says beside its verdicts: what did not count, what else differs, all of it in one sentence.

Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.comparison import judging
from bench.comparison.machines import Difference
from bench.comparison.pairing import PUBLISHED, Pair
from bench.comparison.result import Overall, Row
from bench.comparison.settings import Settings
from bench.comparison.words import CANNOT_TELL, IMPROVEMENT, NO_CHANGE, REGRESSION, TIME, VERDICTS, percent
from bench.records import Record

SIDES = ("base", "candidate")


def left_out(pair: Pair) -> list[str]:
    """What of a configuration's runs does not count, in words."""
    found = []
    for name, rows in (("base", pair.base), ("candidate", pair.candidate)):
        degraded = sum(bool(row.get("degraded")) for row in rows)
        if degraded:
            found.append(f"{degraded} of {len(rows)} {name} runs degraded: time left out")
        ended = Counter(row["status"] for row in rows if row["status"] in judging.NO_RESULT)
        found += [f"{count} of {len(rows)} {name} runs {status}: no result" for status, count in ended.items()]
    return found


def kept_apart(sides: Sequence[Sequence[Record]]) -> list[str]:
    """Differences that are no part of a configuration and may matter all the same."""
    found = []
    steps = [{((row.get("config") or {}).get("measurement") or {}).get("steps") for row in side} for side in sides]
    if steps[0] != steps[1] and all(None not in side for side in steps):
        told = [" and ".join(sorted(str(count) for count in side)) for side in steps]
        found.append(f"timed steps per run: {told[0]}, now {told[1]}")
    beside = [max((row.get("concurrent_runs") or 0 for row in side), default=0) for side in sides]
    if beside[0] != beside[1]:
        found.append(f"other runs of the store at the same time: up to {beside[0]}, now {beside[1]}")
    flops = [{(row.get("flops") or {}).get("model") for row in side} - {None} for side in sides]
    if all(flops) and flops[0] != flops[1]:
        found.append("a step's FLOPs are counted otherwise than before: TFLOPS do not follow the time")
    return found


def notes(base: Sequence[Record], candidate: Sequence[Record]) -> tuple[str, ...]:
    """What of both sides is not compared at all."""
    published = sum(row["evidence"] == PUBLISHED for row in (*base, *candidate))
    return (f"{published} published rows left out: nobody runs them again",) if published else ()


def drift(matched: Sequence[Pair], rows: Sequence[Row], overall: Sequence[Overall]) -> tuple[str, ...]:
    """A word of caution where a time changed and the two sides were not run in turn: a machine may change as well."""
    changes = [each.get(TIME.column) for each in rows] + [each.get(TIME.column) for each in overall]
    runs = [pair for pair in matched if pair.evidence != "predicted"]
    if not runs or not any(change and change.verdict in (REGRESSION, IMPROVEMENT) for change in changes):
        return ()
    times = [sorted(str(row.get("started_at")) for pair in runs for row in getattr(pair, side)) for side in SIDES]
    if times[0][-1] >= times[1][0] and times[1][-1] >= times[0][0]:
        return ()
    return (
        "one side was run after the other had ended: if the machine changed its speed in between, it looks the same. "
        "Runs of base and candidate in turn would tell",
    )


def sentence(
    verdict: str,
    rows: Sequence[Row],
    overall: Sequence[Overall],
    different: Sequence[Difference],
    comparable: bool,
    settings: Settings,
) -> str:
    """The verdict in one sentence."""
    if not rows:
        return "Nothing to compare: base and candidate have no configuration in common."
    if not comparable:
        why = "the machines differ" if different else "no configuration has a result on both sides"
        return f"Nothing comparable: {why}" + (" (--across-machines compares anyway)." if different else ".")
    told = {REGRESSION: "Regression", IMPROVEMENT: "Improvement", NO_CHANGE: "No change", CANNOT_TELL: "Cannot tell"}
    parts = [f"{sum(row.verdict == each for row in rows)} {each}" for each in VERDICTS]
    counts = ", ".join(part for part in parts if not part.startswith("0 "))
    words = f"{told[verdict]}. Of {len(rows)} configuration{'' if len(rows) == 1 else 's'}: {counts}."
    for each in overall:
        time = each.get(TIME.column)
        if time is not None and time.change is not None:
            interval = ""
            if time.low is not None and time.high is not None:
                ends = f"{percent(time.low)} to {percent(time.high)}"
                interval = f" ({percent(settings.confidence, signed=False)} interval {ends})"
            kind = "" if len(overall) == 1 else f" ({each.evidence})"
            words += f" Step time{kind} {percent(time.change)}{interval}."
    return words
