"""The accuracy page: what was compared, how far off it is, and on what it was tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench.validation.runs import LEFT_OUT, RESERVED, SPEED, TUNED_AT
from bench.validation.shapes import Shape
from bench.validation.statistics import Result, Summary, gpu_class, grouped, size_class, summary

HEAD = """# Accuracy of predictions

What `python -m bench.predict validate` writes; a test compares it with this file. Nothing here was run by the suite:
every row is a number that somebody published, and the prediction of the same configuration.

* **Error** is predicted against published, as a share of the published value: above 0 is too fast (or too much memory).
* **TFLOPS** count recomputation, on both sides. A rate in tokens is converted with the suite's own count of FLOPs.
* **Tuned on**: rows at {tuned} GPUs. The constants marked `fitted` in `conf/hardware` were chosen with these rows in
  sight. **Left out**: all other GPU counts, and memory that is allocated or active.
* **Tuned on the other source alone**: what the constants are worth on a source they have not seen. The FSDP paper has
  no H100, so llm-foundry's H100 rows are then predicted with the shares of peak that A100 reach: what a prediction for
  a GPU that nobody has measured is worth.
* Conversions and assumptions, row by row, are in `bench/validation/runs.py`. Two were made with tuned rows in sight: T5
  without dropout, and FlashAttention's speed on H100 (one row). One came of seeing rows that were left out, since at
  512 GPUs they were predicted up to 14 % too fast: rings over many nodes have the latency that an issue about NCCL
  reports, not what NCCL assumes (`latency` in `conf/hardware`; without it the mean error is the same).
"""


def page(results: Sequence[Result], others: dict[str, list[Result]], shapes: Sequence[Shape], figure: str) -> str:
    """The whole page, in Markdown.

    Parameters
    ----------
    results: sequence of Result
        One per published number.
    others: dict
        By source: results of its rows with constants chosen on the other sources alone.
    figure: str
        Name of the picture beside the page.
    """
    speeds = [each for each in results if each.case.counted and each.case.quantity == SPEED]
    memory = [each for each in results if each.case.counted and each.case.quantity != SPEED]
    left_out = [each for each in speeds if not each.case.tuned]
    parts = [HEAD.format(tuned=" and ".join(map(str, TUNED_AT)))]
    parts += ["## In short", _table(SUMMARY_HEAD, _in_short(speeds, left_out, memory, others)), _fits(results)]
    parts += [f"![predicted against published]({figure})"]
    parts += ["## Speed, by what varies", "Rows left out of tuning."]
    for title, key in (
        ("source", lambda each: each.case.source),
        ("hardware", lambda each: each.hardware),
        ("model", size_class),
        ("GPUs", gpu_class),
        ("strategy", lambda each: each.strategy),
        ("checkpointing", lambda each: each.case.config.activation_checkpointing),
    ):
        parts.append(_table((title, *SUMMARY_HEAD[1:]), _by(left_out, key)))
    parts += ["## Memory, by what is measured", _table(SUMMARY_HEAD, _by(memory, lambda each: each.case.quantity))]
    parts += ["## What must come out of the mechanism", _table(SHAPE_HEAD, map(_shape_row, shapes))]
    parts += ["## Every row", _rows(speeds), _rows(memory)]
    parts += ["### Shown, not counted", _rows([each for each in results if not each.case.counted])]
    parts += ["## Not compared", _table(("rows", "why"), LEFT_OUT.items())]
    return "\n\n".join(parts) + "\n"


SUMMARY_HEAD = ("rows", "count", "mean error", "worst", "bias", "within 5 %")
SHAPE_HEAD = ("what", "published", "predicted")


def _in_short(
    speeds: list[Result], left_out: list[Result], memory: list[Result], others: dict[str, list[Result]]
) -> Iterable[tuple[str, ...]]:
    yield ("**speed, left out**", *_cells(summary(left_out)))
    yield ("speed, tuned on", *_cells(summary([each for each in speeds if each.case.tuned])))
    for source, results in others.items():
        for kind, group in grouped(results, lambda each: each.hardware[:4].upper()).items():
            yield (f"speed, {source} on {kind}, tuned on the other source alone", *_cells(summary(group)))
    reserved = [each for each in memory if each.case.quantity == RESERVED]
    yield ("memory, allocated and active", *_cells(summary([each for each in memory if each not in reserved])))
    yield ("memory, reserved (its share of active memory was chosen on these rows)", *_cells(summary(reserved)))


def _fits(results: Sequence[Result]) -> str:
    configurations = {each.case.settings: each for each in results if each.case.counted}.values()
    missed = [each.case.label for each in configurations if not each.runs]
    close = [each.case.label for each in configurations if each.verdict == "too close to call"]
    said = f"{len(configurations) - len(missed)} of {len(configurations)} configurations that ran are predicted to run"
    said += f" ({len(close)} of them too close to call)." if close else "."
    full = [each.case.label for each in configurations if each.degraded]
    said += f" {len(full)} are predicted to be slowed by an allocator that is nearly out of memory." if full else ""
    return said + (f" Wrongly predicted not to fit: {'; '.join(missed)}." if missed else "")


def _by(results: Sequence[Result], key: Callable[[Result], str]) -> Iterable[tuple[str, ...]]:
    return ((name, *_cells(summary(group))) for name, group in sorted(grouped(results, key).items()))


def _cells(found: Summary) -> tuple[str, ...]:
    return str(found.count), f"{found.mean:.1%}", f"{found.worst:+.1%}", f"{found.bias:+.1%}", f"{found.tight:.0%}"


def _rows(results: Sequence[Result]) -> str:
    head = ("source", "where", "hardware", "run", "quantity", "published", "predicted", "error", "")
    return _table(head, map(_row, results))


def _row(each: Result) -> tuple[str, ...]:
    case = each.case
    published = f"{case.published:.1f}" + (f" ± {case.uncertainty:g}" if case.uncertainty else "")
    role = "tuned on" if case.tuned else ""
    notes = [role, "degraded" if each.degraded and case.quantity == SPEED else "", "" if each.runs else "does not fit"]
    return (
        case.source,
        case.where,
        each.hardware,
        case.label,
        case.quantity,
        published,
        f"{each.predicted:.1f}",
        f"{each.error:+.1%}",
        ", ".join(filter(None, notes)),
    )


def _shape_row(shape: Shape) -> tuple[str, str, str]:
    return shape.what, shape.published, shape.predicted


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
