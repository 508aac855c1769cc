"""How far off predictions are: signed errors and what they come to, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.config import RunConfig
from bench.simulate.prediction import DOES_NOT_FIT, Prediction
from bench.validation.runs import ACTIVE, ALLOCATED, RESERVED, SPEED, Case, in_gigabytes


@dataclass(frozen=True)
class Result:
    """A published number and what was predicted for it."""

    case: Case
    predicted: float
    verdict: str | None
    """Whether the run was predicted to fit."""
    degraded: bool
    strategy: str
    """What the strategy comes to: fsdp1/full_shard."""
    parameters: int
    gpus: int
    hardware: str

    @property
    def error(self) -> float:
        """Predicted against published, as a share of the published value; above 0 is too fast, or too much memory."""
        return self.predicted / self.case.published - 1

    @property
    def runs(self) -> bool:
        """Not predicted to run out of memory: right for every run that was published as running."""
        return self.verdict != DOES_NOT_FIT


def result(case: Case, prediction: Prediction) -> Result:
    """Compare one prediction with the published number."""
    config = case.config
    return Result(
        case=case,
        predicted=_predicted(case, prediction),
        verdict=prediction.memory.verdict,
        degraded=prediction.time is not None and prediction.time.degraded,
        strategy=config.strategy.effective(config.gpus),
        parameters=config.model.num_parameters,
        gpus=config.gpus,
        hardware=config.hardware.name,
    )


def _predicted(case: Case, prediction: Prediction) -> float:
    memory = prediction.memory
    if case.quantity == SPEED:
        return tflops(case.config, prediction)
    peaks = {ALLOCATED: memory.allocated, ACTIVE: memory.active, RESERVED: memory.reserved}
    return in_gigabytes(peaks[case.quantity].value + case.held_bytes)


def tflops(config: RunConfig, prediction: Prediction) -> float:
    """Per GPU, counting recomputation."""
    assert prediction.time is not None, f"{config.hardware.name} has no speeds"
    flops = config.model.flops_per_sequence(config.sequence_length).hardware(config.activation_checkpointing)
    sequences = config.batch_size_per_gpu * config.gradient_accumulation
    return flops * sequences / prediction.time.step_s.value / 1e12


@dataclass(frozen=True)
class Summary:
    """Errors of some results, as shares."""

    count: int
    mean: float
    """Of absolute errors."""
    worst: float
    """The largest error, with its sign."""
    bias: float
    """Mean of signed errors."""
    tight: float
    """Share of results within 5 %."""


def summary(results: Sequence[Result]) -> Summary:
    """Mean, worst and bias of at least one result."""
    errors = [each.error for each in results]
    return Summary(
        count=len(errors),
        mean=fmean(map(abs, errors)),
        worst=max(errors, key=abs),
        bias=fmean(errors),
        tight=sum(abs(error) <= 0.05 for error in errors) / len(errors),
    )


def grouped(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Results by a property, in the order the properties first appear."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        groups.setdefault(key(each), []).append(each)
    return groups


SIZES = (
    (1e9, "below 1B"),
    (5e9, "1B to 5B"),
    (20e9, "5B to 20B"),
    (100e9, "20B to 100B"),
    (float("inf"), "above 100B"),
)


def size_class(each: Result) -> str:
    """How large the model is, in words."""
    return next(name for limit, name in SIZES if each.parameters < limit)


def gpu_class(each: Result) -> str:
    """How many GPUs, in words."""
    limits = ((8, "8 (one node)"), (64, "16 to 64"), (256, "128 to 256"))
    return next((name for limit, name in limits if each.gpus <= limit), "384 and more")
