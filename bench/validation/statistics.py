"""How far off predictions are: signed errors and what they come to, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.config.run_config import RunConfig
from bench.config.step_speed import compute_speed_columns
from bench.prediction.prediction import DOES_NOT_FIT, Prediction
from bench.validation.runs import ACTIVE, ALLOCATED, RESERVED, SPEED, PublishedCase, convert_to_gigabytes


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
    peaks = {ALLOCATED: memory.allocated, ACTIVE: memory.active, RESERVED: memory.reserved}
    return convert_to_gigabytes(peaks[case.quantity].value + case.extra_bytes)


def compute_tflops(config: RunConfig, prediction: Prediction) -> float:
    """Per GPU, counting recomputation."""
    assert prediction.time is not None, f"{config.hardware.name} has no speeds"
    return float(compute_speed_columns(config, prediction.time.step_s.value)["hardware_tflops_per_gpu"])


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
