"""What ``validate --published FILE`` says: how rows were read, and how far predictions are from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.prediction.prediction import TOO_CLOSE
from bench.validation.metrics import FIT, KINDS
from bench.validation.readings import Reading, describe_settings
from bench.validation.score_summaries import classify_model_size, group_by, pick_configurations, summarize_scores
from bench.validation.scores import Score
from bench.validation.tables import SUMMARY_HEAD, format_groups, format_summary, format_table

MAX_ROWS_SHOWN = 20
"""Of a table that is shown row by row."""

MAX_NUMBERS_SHOWN = 8
"""Of rows that share a reason."""


def render_report(readings: Sequence[Reading], scores: Sequence[Score], reasons: Mapping[int, str]) -> str:
    """The report in Markdown."""
    counted = [score for score in scores if score.is_counted]
    parts = [_describe_counts(readings, scores)]
    if counted:
        parts += ["Errors: predicted against published; above 0 is too fast, or too much memory. Rows of all metrics:"]
        by_kind = group_by(counted, lambda score: score.kind)
        rows = ((kind, *format_summary(by_kind[kind])) for kind in KINDS if kind in by_kind)
        parts += [format_table(("what", *SUMMARY_HEAD[1:]), rows)]
        for kind in KINDS:
            if kind in by_kind:
                parts += _describe_kind(kind, pick_configurations(by_kind[kind]))
    if scores:
        parts += [_describe_fit(scores)]
    if len(readings) <= MAX_ROWS_SHOWN:
        parts += ["Every row:", _format_rows(readings, scores, reasons)]
    elif reasons:
        parts += ["Not runs of this suite:", _format_reasons(readings, reasons)]
    return "\n\n".join(parts) + "\n"


def _describe_counts(readings: Sequence[Reading], scores: Sequence[Score]) -> str:
    complete = sum(score.reading.is_complete for score in scores)
    text = f"{len(readings)} rows: {len(scores)} are runs that can be predicted"
    if scores:
        text += f" ({complete} complete; {len(scores) - complete} rough, where something had to be assumed)"
        text += f", in {len({score.reading.settings for score in scores})} configurations"
    return text + f"; {len(readings) - len(scores)} are not."


def _describe_kind(kind: str, scores: Sequence[Score]) -> list[str]:
    parts = [f"{kind[0].upper()}{kind[1:]}, each configuration once:"]
    parts += [
        format_groups("class", scores, lambda score: score.reading.source_class),
        format_groups("source", scores, lambda score: score.reading.source),
        format_groups("device", scores, lambda score: f"{score.hardware} ({score.device_class})"),
        format_groups("strategy", scores, lambda score: score.strategy),
        format_groups("model", scores, classify_model_size),
    ]
    return parts


def _describe_fit(scores: Sequence[Score]) -> str:
    configurations = list({score.reading.settings: score for score in scores if score.quantity.ran}.values())
    wrong = [score for score in configurations if score.is_verdict_wrong]
    too_close = sum(score.verdict == TOO_CLOSE for score in configurations)
    rows = f" (rows {_list_numbers([score.reading.row for score in wrong])})" if wrong else ""
    text = (
        f"Memory: of {len(configurations)} configurations that ran {len(wrong)} are said not to fit{rows}, and "
        f"{too_close} to be too close to call"
    )
    read_again = sum(score.reading.is_read_again for score in configurations)
    if read_again:
        text += f"; {read_again} of them are read so that they may fit, where their rows do not say"
    out_of_memory = [score for score in scores if not score.quantity.ran]
    if out_of_memory:
        missed = [score for score in out_of_memory if score.is_verdict_wrong]
        text += f"; of {len(out_of_memory)} that ran out of memory {len(missed)} are said to fit"
        text += f" (rows {_list_numbers([score.reading.row for score in missed])})" if missed else ""
    return text + "."


def _format_reasons(readings: Sequence[Reading], reasons: Mapping[int, str]) -> str:
    sources = {reading.row: reading.source for reading in readings}
    groups = group_by(sorted(reasons), lambda row: f"{sources[row]}\t{reasons[row]}")
    rows = sorted(groups.items(), key=lambda item: (item[0].partition("\t")[0], -len(item[1])))
    return format_table(
        ("source", "why", "count", "rows"),
        ((*key.split("\t", 1), str(len(numbers)), _list_numbers(numbers)) for key, numbers in rows),
    )


def _list_numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MAX_NUMBERS_SHOWN]))
    return shown + (" and others" if len(numbers) > MAX_NUMBERS_SHOWN else "")


def _format_rows(readings: Sequence[Reading], scores: Sequence[Score], reasons: Mapping[int, str]) -> str:
    scores_by_row = {score.reading.row: score for score in scores}
    head = ("row", "metric", "published", "predicted", "interval", "error", "fits", "read as", "assumed, or why not")
    rows: list[tuple[str, ...]] = []
    for reading in readings:
        score = scores_by_row.get(reading.row)
        label = (str(reading.row), reading.line.get("metric") or "-")
        published = f"{reading.line.get('value') or '-'} {reading.line.get('unit') or ''}".strip()
        if score is None:
            rows.append((*label, published, "-", "-", "-", "-", "-", reasons.get(reading.row, "")))
            continue
        rows.append((*label, published, *_format_score(score), "; ".join(reading.assumptions)))
    return format_table(head, rows)


def _format_score(score: Score) -> tuple[str, ...]:
    settings = describe_settings(score.reading.settings)
    if score.kind == FIT:
        return ("-", "-", "wrong" if score.is_verdict_wrong else "-", score.verdict or "-", settings)
    outside = "" if score.is_within else " (outside)"
    return (
        _format_value(score, score.predicted_value),
        f"{_format_value(score, score.low)} to {_format_value(score, score.high)}{outside}",
        f"{score.error:+.1%}",
        score.verdict or "-",
        settings,
    )


def _format_value(score: Score, value: float) -> str:
    """In the unit that the row's value was read as: sizes in GB."""
    return f"{value / 1e9:.2f} GB" if score.kind not in ("speed", FIT) else f"{value:.4g}"


def build_report_data(
    readings: Sequence[Reading], scores: Sequence[Score], reasons: Mapping[int, str]
) -> dict[str, Any]:
    """The same as plain values: what `--json` writes."""
    scores_by_row = {score.reading.row: score for score in scores}
    counted = [score for score in scores if score.is_counted]
    return {
        "rows": [_build_row(reading, scores_by_row.get(reading.row), reasons.get(reading.row)) for reading in readings],
        "summary": {
            kind: {
                "rows": summary.count,
                "mean_absolute_error": summary.mean,
                "worst_error": summary.worst,
                "bias": summary.bias,
                "share_within_interval": summary.share_within,
            }
            for kind, group in group_by(counted, lambda score: score.kind).items()
            for summary in [summarize_scores(group)]
        },
        "verdicts": {
            "ran": sum(score.quantity.ran for score in scores),
            "ran_said_not_to_fit": sum(score.is_too_large for score in scores),
            "out_of_memory": sum(not score.quantity.ran for score in scores),
            "out_of_memory_said_to_fit": sum(not score.quantity.ran and score.is_verdict_wrong for score in scores),
        },
    }


def _build_row(reading: Reading, score: Score | None, reason: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "row": reading.row,
        "source_key": reading.source,
        "metric": reading.line.get("metric"),
        "value": reading.line.get("value"),
        "unit": reading.line.get("unit"),
        "expressed": score is not None,
        "reason": reason,
    }
    if score is None:
        return row
    return {
        **row,
        "settings": dict(reading.settings),
        "assumptions": list(reading.assumptions),
        "class": reading.source_class,
        "device_class": score.device_class,
        "torch_version": reading.torch_version,
        "kind": score.kind,
        "published": score.quantity.value,
        "predicted": score.predicted_value,
        "predicted_low": score.low,
        "predicted_high": score.high,
        "error": score.error if score.is_counted else None,
        "within_interval": score.is_within,
        "verdict": score.verdict,
        "verdict_is_wrong": score.is_verdict_wrong,
        "hardware": score.hardware,
        "strategy": score.strategy,
        "parameters": score.parameters,
        "gpus": score.gpus,
    }
