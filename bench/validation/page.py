"""The accuracy page: what was compared, how far off it is, and on what it was tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.config.run_config import RunConfig, compute_speed_columns
from bench.prediction.prediction import DOES_NOT_FIT, Prediction
from bench.validation import llama_runs
from bench.validation.runs import (
    ACTIVE,
    ALLOCATED,
    EXCLUSION_REASONS,
    RESERVED,
    SPEED,
    TOKENS,
    TUNED_GPU_COUNTS,
    PublishedCase,
    convert_to_gigabytes,
)
from bench.validation.shapes import QualitativeComparison

PAGE_HEAD = """# Accuracy of predictions

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


def render_accuracy_page(
    results: Sequence[CaseResult],
    other_results: dict[str, list[CaseResult]],
    comparisons: Sequence[QualitativeComparison],
    llama_results: Sequence[CaseResult],
    figure_file: str,
) -> str:
    """The whole page, in Markdown.

    Parameters
    ----------
    results: sequence of Result
        One per published number.
    other_results: dict
        By source: results of its rows with constants chosen on the other sources alone.
    llama_results: sequence of Result
        One per published number of models of the Llama family.
    figure_file: str
        Name of the picture beside the page.
    """
    speed_results = [result for result in results if result.case.is_counted and result.case.quantity == SPEED]
    memory_results = [result for result in results if result.case.is_counted and result.case.quantity != SPEED]
    held_out_results = [result for result in speed_results if not result.case.is_tuned]
    parts = [PAGE_HEAD.format(tuned=" and ".join(map(str, TUNED_GPU_COUNTS)))]
    parts += [
        "## In short",
        _format_table(SUMMARY_HEAD, _list_summary_rows(speed_results, held_out_results, memory_results, other_results)),
        _describe_fit(results),
    ]
    parts += [f"![predicted against published]({figure_file})"]
    parts += ["## Speed, by what varies", "Rows left out of tuning."]
    for title, get_key in (
        ("source", lambda result: result.case.source),
        ("hardware", lambda result: result.hardware),
        ("model", classify_model_size),
        ("GPUs", classify_gpu_count),
        ("strategy", lambda result: result.strategy),
        ("checkpointing", lambda result: result.case.config.activation_checkpointing),
    ):
        parts.append(_format_table((title, *SUMMARY_HEAD[1:]), _list_group_rows(held_out_results, get_key)))
    parts += [
        "## Memory, by what is measured",
        _format_table(SUMMARY_HEAD, _list_group_rows(memory_results, lambda result: result.case.quantity)),
    ]
    parts += [
        "## What must come out of the mechanism",
        _format_table(COMPARISON_HEAD, map(_format_comparison, comparisons)),
    ]
    parts += _list_llama_parts(llama_results)
    parts += ["## Every row", _format_result_table(speed_results), _format_result_table(memory_results)]
    parts += [
        "### Shown, not counted",
        _format_result_table([result for result in results if not result.case.is_counted]),
    ]
    exclusion_reasons = {**EXCLUSION_REASONS, **llama_runs.EXCLUSION_REASONS}
    parts += ["## Not compared", _format_table(("rows", "why"), exclusion_reasons.items())]
    return "\n\n".join(parts) + "\n"


def _list_llama_parts(results: Sequence[CaseResult]) -> list[str]:
    return [
        "## Models of the Llama family",
        "No constant was chosen with these rows in sight. Several rows of a source may be one configuration.",
        _format_table(
            SUMMARY_HEAD,
            _list_group_rows([result for result in results if result.case.is_counted], _name_llama_group),
        ),
        "Shown, not counted:",
        _format_table(
            SUMMARY_HEAD,
            _list_group_rows([result for result in results if not result.case.is_counted], _name_llama_group),
        ),
        _format_table(("source", "assumed"), llama_runs.ASSUMPTIONS.items()),
        _format_result_table(results),
    ]


def _name_llama_group(result: CaseResult) -> str:
    return f"{result.case.source}, {result.case.quantity}, {result.strategy}"


SUMMARY_HEAD = ("rows", "count", "mean error", "worst", "bias", "within 5 %")
COMPARISON_HEAD = ("what", "published", "predicted")


def _list_summary_rows(
    speed_results: list[CaseResult],
    held_out_results: list[CaseResult],
    memory_results: list[CaseResult],
    other_results: dict[str, list[CaseResult]],
) -> Iterable[tuple[str, ...]]:
    yield ("**speed, left out**", *_format_summary(summarize_errors(held_out_results)))
    yield (
        "speed, tuned on",
        *_format_summary(summarize_errors([result for result in speed_results if result.case.is_tuned])),
    )
    for source, results in other_results.items():
        for gpu_kind, group in group_results(results, lambda result: result.hardware[:4].upper()).items():
            yield (
                f"speed, {source} on {gpu_kind}, tuned on the other source alone",
                *_format_summary(summarize_errors(group)),
            )
    reserved_results = [result for result in memory_results if result.case.quantity == RESERVED]
    yield (
        "memory, allocated and active",
        *_format_summary(summarize_errors([result for result in memory_results if result not in reserved_results])),
    )
    yield (
        "memory, reserved (its share of active memory was chosen on these rows)",
        *_format_summary(summarize_errors(reserved_results)),
    )


def _describe_fit(results: Sequence[CaseResult]) -> str:
    configuration_results = {result.case.settings: result for result in results if result.case.is_counted}.values()
    missed_labels = [result.case.label for result in configuration_results if not result.is_predicted_to_run]
    close_call_labels = [result.case.label for result in configuration_results if result.fit == "too close to call"]
    summary_text = (
        f"{len(configuration_results) - len(missed_labels)} of {len(configuration_results)} configurations that ran "
        "are predicted to run"
    )
    summary_text += f" ({len(close_call_labels)} of them too close to call)." if close_call_labels else "."
    degraded_labels = [result.case.label for result in configuration_results if result.is_degraded]
    summary_text += (
        f" {len(degraded_labels)} are predicted to be slowed by an allocator that is nearly out of memory."
        if degraded_labels
        else ""
    )
    return summary_text + (f" Wrongly predicted not to fit: {'; '.join(missed_labels)}." if missed_labels else "")


def _list_group_rows(results: Sequence[CaseResult], get_key: Callable[[CaseResult], str]) -> Iterable[tuple[str, ...]]:
    return (
        (name, *_format_summary(summarize_errors(group)))
        for name, group in sorted(group_results(results, get_key).items())
    )


def _format_summary(summary: ErrorSummary) -> tuple[str, ...]:
    return (
        str(summary.count),
        f"{summary.mean:.1%}",
        f"{summary.worst:+.1%}",
        f"{summary.bias:+.1%}",
        f"{summary.share_within_5_percent:.0%}",
    )


def _format_result_table(results: Sequence[CaseResult]) -> str:
    head = ("source", "where", "hardware", "run", "quantity", "published", "predicted", "error", "")
    return _format_table(head, map(_format_result, results))


def _format_result(result: CaseResult) -> tuple[str, ...]:
    case = result.case
    published = f"{case.published_value:.1f}" + (f" ± {case.uncertainty:g}" if case.uncertainty else "")
    role = "tuned on" if case.is_tuned else ""
    notes = [
        role,
        "degraded" if result.is_degraded and case.quantity == SPEED else "",
        "" if result.is_predicted_to_run else "does not fit",
    ]
    return (
        case.source,
        case.figure_or_table,
        result.hardware,
        case.label,
        case.quantity,
        published,
        f"{result.predicted_value:.1f}",
        f"{result.error:+.1%}",
        ", ".join(filter(None, notes)),
    )


def _format_comparison(comparison: QualitativeComparison) -> tuple[str, str, str]:
    return comparison.statement, comparison.published, comparison.predicted


def _format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


# --- How far off predictions are: signed errors and what they come to, without I/O.


@dataclass(frozen=True)
class CaseResult:
    """A published number and what was predicted for it."""

    case: PublishedCase
    predicted_value: float
    fit: str | None
    """Whether the run was predicted to fit."""
    is_degraded: bool
    strategy: str
    """What the strategy comes to: fsdp1/full_shard."""
    parameters: int
    gpus: int
    hardware: str

    @property
    def error(self) -> float:
        """Predicted against published, as a share of the published value; above 0 is too fast, or too much memory."""
        return self.predicted_value / self.case.published_value - 1

    @property
    def is_predicted_to_run(self) -> bool:
        """Not predicted to run out of memory: right for every run that was published as running."""
        return self.fit != DOES_NOT_FIT


def build_result(case: PublishedCase, prediction: Prediction) -> CaseResult:
    """Compare one prediction with the published number."""
    config = case.config
    return CaseResult(
        case=case,
        predicted_value=_compute_predicted_value(case, prediction),
        fit=prediction.memory.verdict,
        is_degraded=prediction.time is not None and prediction.time.degraded,
        strategy=config.strategy.describe_effective_strategy(config.gpus),
        parameters=config.model.num_parameters,
        gpus=config.gpus,
        hardware=config.hardware.name,
    )


def _compute_predicted_value(case: PublishedCase, prediction: Prediction) -> float:
    memory = prediction.memory
    if case.quantity == SPEED:
        return compute_tflops(case.config, prediction)
    if case.quantity == TOKENS:
        return compute_tokens_per_second(case.config, prediction)
    peaks = {ALLOCATED: memory.allocated, ACTIVE: memory.active, RESERVED: memory.reserved}
    return convert_to_gigabytes(peaks[case.quantity].value + case.extra_bytes)


def compute_tflops(config: RunConfig, prediction: Prediction) -> float:
    return _compute_rate(config, prediction, "hardware_tflops_per_gpu")


def compute_tokens_per_second(config: RunConfig, prediction: Prediction) -> float:
    return _compute_rate(config, prediction, "tokens_per_second_per_gpu")


def _compute_rate(config: RunConfig, prediction: Prediction, column: str) -> float:
    assert prediction.time is not None, f"{config.hardware.name} has no speeds"
    return float(compute_speed_columns(config, prediction.time.step_s.value)[column])


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some results, as shares."""

    count: int
    mean: float
    """Of absolute errors."""
    worst: float
    """The largest error, with its sign."""
    bias: float
    """Mean of signed errors."""
    share_within_5_percent: float
    """Share of results within 5 %."""


def summarize_errors(results: Sequence[CaseResult]) -> ErrorSummary:
    """Mean, worst and bias of at least one result."""
    errors = [result.error for result in results]
    return ErrorSummary(
        count=len(errors),
        mean=fmean(map(abs, errors)),
        worst=max(errors, key=abs),
        bias=fmean(errors),
        share_within_5_percent=sum(abs(error) <= 0.05 for error in errors) / len(errors),
    )


def group_results(results: Iterable[CaseResult], get_key: Callable[[CaseResult], str]) -> dict[str, list[CaseResult]]:
    """Results by a property, in the order the properties first appear."""
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(get_key(result), []).append(result)
    return groups


SIZE_CLASSES = (
    (1e9, "below 1B"),
    (5e9, "1B to 5B"),
    (20e9, "5B to 20B"),
    (100e9, "20B to 100B"),
    (float("inf"), "above 100B"),
)


def classify_model_size(result: CaseResult) -> str:
    """How large the model is, in words."""
    return next(name for limit, name in SIZE_CLASSES if result.parameters < limit)


def classify_gpu_count(result: CaseResult) -> str:
    """How many GPUs, in words."""
    limits = ((8, "8 (one node)"), (64, "16 to 64"), (256, "128 to 256"))
    return next((name for limit, name in limits if result.gpus <= limit), "384 and more")
