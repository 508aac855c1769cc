"""The accuracy page, and the summary that a test holds later predictions against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.prediction.prediction import TOO_CLOSE
from bench.records.published import PublishedLine
from bench.validation.layouts import format_layouts
from bench.validation.leave_out import LEFT_OUT_KINDS, LeftOut
from bench.validation.metrics import ACTIVE, ALLOCATED, BETWEEN_STEPS, DEVICE_USED, FIT, RESERVED, SPEED
from bench.validation.readings import Reading
from bench.validation.score_summaries import group_by, pick_configurations, summarize_scores
from bench.validation.scores import Score
from bench.validation.shapes import QualitativeComparison
from bench.validation.sources import load_sources
from bench.validation.tables import SUMMARY_HEAD, format_groups, format_summary, format_table

PAGE_HEAD = """# Accuracy of predictions

What `python -m bench.predict validate` writes. Nothing here was run by the suite: every row is a number that somebody
published (`results/published`), and the prediction of the same configuration.

* **Error** is predicted against published, as a share of the published value: above 0 is too fast (or too much memory).
  Several metrics of one step count once.
* **Complete** rows state all that decides the number, in the source or its public scripts; of **rough** rows something
  was assumed. `results/published/sources.yaml` has, source by source, the software and what was assumed.
* **Left out**: predicted with constants chosen without the rows of the same source, device or model family. What is
  chosen on training rows at all is a few constants that all devices share (`bench/validation/leave_out.py`).
* **Within interval**: the published number lies in the interval that predictions state for 19 of 20
  (`results/predicted/intervals.json`, fitted to these rows by `validate --fit-intervals`).
* Torch versions: before 2.1 checkpointing computed whole blocks again, since then it stops when backward has what it
  needs. Rows are compared as their version (`torch_version`) does it.
* FP8 is torchao's, without which (the extra `fp8`) rows in FP8 cannot be predicted: this page is made with it.
"""

TARGETS = (
    ("speed, known devices", 0.04, 0.15),
    ("speed, a device kind left out", 0.10, 0.20),
    ("memory (allocator's peak), complete rows", 0.01, None),
    ("memory (allocator's peak), all rows", 0.03, None),
)
"""What, and the largest mean and single error aimed at."""

MISS_LIMIT = 0.10
"""Mean error of a source from which on the page names a cause."""


def render_accuracy_page(
    readings: Sequence[Reading],
    scores: Sequence[Score],
    reasons: Mapping[int, str],
    left_out: Sequence[LeftOut],
    comparisons: Sequence[QualitativeComparison],
    intervals: Mapping[str, Any],
    figure_file: str,
) -> str:
    """The whole page, in Markdown; `comparisons` are what figures say beyond single numbers."""
    counted = pick_configurations(score for score in scores if score.is_counted)
    complete = [score for score in counted if score.reading.is_complete]
    speed = [score for score in complete if score.kind == SPEED]
    parts = [
        PAGE_HEAD,
        "## In short",
        format_table(SUMMARY_HEAD, _list_summary_rows(counted, left_out)),
        describe_verdicts(scores),
        "Targets, and what is reached:",
        format_table(
            ("what", "mean, aimed at", "reached", "worst, aimed at", "reached"), _list_targets(counted, left_out)
        ),
        f"![predicted against published]({figure_file})",
    ]
    parts += ["## Left out in turn", *_format_left_out(left_out)]
    parts += [
        "## Speed, complete rows",
        format_groups("source", speed, lambda score: score.reading.source),
        format_groups("device", speed, lambda score: score.hardware),
        format_groups("strategy", speed, lambda score: score.strategy),
        format_groups("checkpointing", speed, lambda score: score.reading.config.activation_checkpointing),
        format_groups("torch", speed, lambda score: score.reading.torch_version),
        "## Layouts",
        *format_layouts(counted),
        "## Memory",
        format_groups(
            "what",
            [score for score in counted if score.kind != SPEED],
            lambda score: f"{score.kind}, {score.reading.source_class}",
        ),
        "## Rough rows",
        format_groups(
            "rows",
            [score for score in counted if not score.reading.is_complete],
            lambda score: f"{score.reading.source}, {score.kind}, {score.strategy}",
        ),
        "## Intervals",
        _format_intervals(intervals),
        "## Where it misses",
        _format_misses(counted),
        "## What must come out of the mechanism",
        format_table(
            ("what", "published", "predicted"),
            ((comparison.statement, comparison.published, comparison.predicted) for comparison in comparisons),
        ),
        "## Every complete configuration",
        _format_configurations(complete),
        "## Not compared",
        _format_not_compared(readings, reasons),
    ]
    return "\n\n".join(parts) + "\n"


def _list_summary_rows(counted: Sequence[Score], left_out: Sequence[LeftOut]) -> Iterable[tuple[str, ...]]:
    def select(*kinds: str, is_complete: bool | None = None) -> list[Score]:
        return [
            score
            for score in counted
            if score.kind in kinds and (is_complete is None or score.reading.is_complete == is_complete)
        ]

    yield ("**speed, left out (each source in turn)**", *format_summary(_join(left_out, "source")))
    yield ("speed, each device left out in turn", *format_summary(_join(left_out, "device")))
    yield ("speed, each model family left out in turn", *format_summary(_join(left_out, "model family")))
    yield ("speed of complete rows", *format_summary(select(SPEED, is_complete=True)))
    yield ("speed of rough rows", *format_summary(select(SPEED, is_complete=False)))
    yield ("memory, allocated or active, complete rows", *format_summary(select(ALLOCATED, ACTIVE, is_complete=True)))
    yield ("memory between steps, all rows", *format_summary(select(BETWEEN_STEPS)))
    yield ("memory that is reserved, complete rows", *format_summary(select(RESERVED, is_complete=True)))
    yield ("memory used on the device, complete rows", *format_summary(select(DEVICE_USED, is_complete=True)))
    yield ("memory of rough rows", *format_summary(select(ALLOCATED, RESERVED, DEVICE_USED, is_complete=False)))


def _join(left_out: Sequence[LeftOut], kind: str) -> list[Score]:
    return [score for part in left_out if part.kind == kind for score in part.scores]


def describe_verdicts(scores: Sequence[Score]) -> str:
    """A sentence on whether runs that ran are said to fit."""
    configurations = list({score.reading.settings: score for score in scores if score.quantity.ran}.values())
    wrong = [score for score in configurations if score.is_verdict_wrong]
    too_close = sum(score.verdict == TOO_CLOSE for score in configurations)
    text = (
        f"Of {len(configurations)} configurations that ran {len(wrong)} are said not to fit, and {too_close} to be too "
        "close to call."
    )
    out_of_memory = [score for score in scores if score.kind == FIT and not score.quantity.ran]
    missed = sum(score.is_verdict_wrong for score in out_of_memory)
    return text + f" Of {len(out_of_memory)} that ran out of memory {missed} are said to fit."


def _list_targets(counted: Sequence[Score], left_out: Sequence[LeftOut]) -> Iterable[tuple[str, ...]]:
    peaks = [score for score in counted if score.kind in (ALLOCATED, ACTIVE)]
    groups = (
        [score for score in counted if score.kind == SPEED and score.reading.is_complete],
        _join(left_out, "device"),
        [score for score in peaks if score.reading.is_complete],
        peaks,
    )
    for (name, mean, worst), scores in zip(TARGETS, groups, strict=True):
        summary = summarize_scores(scores) if scores else None
        yield (
            name,
            f"{mean:.0%}",
            "-" if summary is None else f"{summary.mean:.1%}",
            "-" if worst is None else f"{worst:.0%}",
            "-" if summary is None else f"{summary.worst:+.1%}",
        )


def _format_left_out(left_out: Sequence[LeftOut]) -> list[str]:
    tables = []
    for kind in LEFT_OUT_KINDS:
        rows = [
            (
                part.name,
                *format_summary(part.scores),
                ", ".join(f"{key}={value}" for key, value in part.constants) or "-",
            )
            for part in left_out
            if part.kind == kind
        ]
        tables.append(format_table((kind, *SUMMARY_HEAD[1:], "chosen otherwise"), rows))
    return tables


def _format_intervals(intervals: Mapping[str, Any]) -> str:
    def format_share(share: float | None) -> str:
        return "-" if share is None else f"{share:.0%}"

    rows = [
        (
            f"{metric}, {device_class}, {row_class}",
            f"{entry['low'] - 1:+.0%} to {entry['high'] - 1:+.0%}",
            f"{entry['residuals']} of {entry['groups']}",
            format_share(entry["coverage_by_source"]),
            format_share(entry["coverage_by_device"]),
            entry["basis"],
        )
        for metric, classes in intervals["factors"].items()
        for device_class, row_classes in classes.items()
        for row_class, entry in row_classes.items()
    ]
    head = (
        "what, device known by, rows",
        "truth against prediction",
        "rows of groups",
        "sources left out",
        "devices left out",
        "",
    )
    return format_table((*head[:3], f"{head[3]}: within", f"{head[4]}: within", "chosen"), rows)


def _format_misses(counted: Sequence[Score]) -> str:
    rows = []
    for source, scores in group_by(counted, lambda score: score.reading.source).items():
        for kind, group in group_by(scores, lambda score: score.kind).items():
            summary = summarize_scores(group)
            if summary.mean > MISS_LIMIT:
                cause = load_sources().get(source, {}).get("miss_cause", "not found")
                rows.append((source, kind, str(summary.count), f"{summary.mean:.1%}", f"{summary.bias:+.1%}", cause))
    return format_table(("source", "what", "count", "mean error", "bias", "cause, as far as known"), rows)


def _format_configurations(scores: Sequence[Score]) -> str:
    head = ("source", "where", "device", "model", "strategy", "run", "metric", "published", "predicted", "error", "")
    return format_table(head, map(_format_configuration, scores))


def _format_configuration(score: Score) -> tuple[str, ...]:
    line, config = score.reading.line, score.reading.config
    scale = 1.0 if score.kind == SPEED else 1e9
    run = f"{config.gpus} GPUs, batch {config.batch_size_per_gpu}, length {config.sequence_length}"
    notes = ["" if score.is_within else "outside", "does not fit" if score.is_verdict_wrong else ""]
    return (
        score.reading.source,
        line["figure_or_table"].split(" with ")[0],
        score.hardware,
        line["model"].rpartition("/")[2],
        score.strategy,
        run,
        score.quantity.metric,
        f"{score.quantity.value / scale:.4g}",
        f"{score.predicted_value / scale:.4g}",
        f"{score.error:+.1%}",
        ", ".join(filter(None, notes)),
    )


def _format_not_compared(readings: Sequence[Reading], reasons: Mapping[int, str]) -> str:
    sources = {reading.row: reading.source for reading in readings}
    groups = group_by(sorted(reasons), lambda row: f"{sources[row]}\t{reasons[row]}")
    rows = ((*key.split("\t", 1), str(len(numbers))) for key, numbers in sorted(groups.items()))
    return format_table(("source", "why", "rows"), rows)


# --- The summary that later predictions are held against.


def build_accuracy_summary(scores: Sequence[Score], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """Mean errors by group, and the error of every configuration: what ``accuracy.json`` holds."""
    counted = pick_configurations(score for score in scores if score.is_counted)
    return {
        "groups": {
            name: {"count": len(group), "mean_absolute_error": round(fmean(abs(score.error) for score in group), 5)}
            for name, group in sorted(group_by(counted, name_group).items())
        },
        "left out": {
            f"{part.kind}: {part.name}": round(fmean(abs(score.error) for score in part.scores), 5)
            for part in left_out
            if part.scores
        },
        "configurations": {
            build_configuration_key(score.reading.line): {"group": name_group(score), "error": round(score.error, 5)}
            for score in counted
        },
    }


def name_group(score: Score) -> str:
    """What errors are held against each other by."""
    return f"{score.reading.source}, {score.kind}, {score.hardware}, {score.reading.source_class}"


def build_configuration_key(line: PublishedLine) -> str:
    """What a row is found by again: the source, where in it, and what was run."""
    columns = ("source_key", "figure_or_table", "model", "strategy", "sharding", "precision", "gpu", "gpu_count")
    more = ("sequence_length", "batch_size_per_gpu", "activation_checkpointing", "metric", "value", "note")
    return " | ".join((line[column] or "")[:40] for column in (*columns, *more))
