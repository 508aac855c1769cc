"""Predictions held against readings of published rows: values in the row's own metric, errors, intervals, verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.config.flop_conventions import SUITE_COLUMNS, count_flops_per_sequence
from bench.config.run_config import RunConfig
from bench.config.speed_columns import compute_speed_columns
from bench.core.errors import UsageError
from bench.prediction.intervals import (
    COMPLETE,
    ROUGH,
    STEP_TIME,
    UNKNOWN,
    classify_hardware,
    find_factors,
    find_rough_verdict,
    is_layout,
    is_time_known,
)
from bench.prediction.intervals import DEVICE_USED as DEVICE_USED_METRIC
from bench.prediction.other_software_memory import predict_peak
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE, MemoryPrediction, Prediction
from bench.prediction.predictor import predict_runs
from bench.validation.metrics import (
    ACTIVE,
    ALLOCATED,
    BETWEEN_STEPS,
    DEVICE_USED,
    FIT,
    METRICS,
    RESERVED,
    SPEED,
    Quantity,
)
from bench.validation.other_software import read_as_published
from bench.validation.readings import Reading, Settings, build_published_config
from bench.validation.unstated import list_checkpointed_readings, list_smaller_readings

RESTING_PARTS = ("parameters", "optimizer")
"""What is allocated between steps; of FSDP1 gradients, too, until they are set to None."""

INTERVAL_METRICS = {
    SPEED: STEP_TIME,
    ALLOCATED: "allocated",
    ACTIVE: "allocated",
    RESERVED: "reserved",
    DEVICE_USED: DEVICE_USED_METRIC,
    BETWEEN_STEPS: "allocated",
}
"""What a kind of row is compared with, as `bench.prediction.intervals` calls it."""


@dataclass(frozen=True)
class Score:
    """A row, and what was predicted for it."""

    reading: Reading
    quantity: Quantity
    predicted_value: float
    """In the row's metric and unit; of an outcome 1 for out of memory, 0.5 for too close to call."""
    low: float
    high: float
    """Where the published value is expected 19 times of 20."""
    verdict: str | None
    hardware: str
    device_class: str
    strategy: str
    is_layout: bool
    is_time_known: bool
    family: str
    parameters: int
    gpus: int
    limited_by: str | None = None
    predicted_step_s: float | None = None
    retry_probability: float = 0.0
    """That the allocator has to retry in every step."""
    fullness: float | None = None
    """Predicted allocated memory against what the allocator may have, None where that is not known, or where the
    prediction has a margin of its own."""
    exceeds_capacity: bool = False
    """Whether more memory is predicted than there is, however uncertain that is."""

    @property
    def kind(self) -> str:
        return self.quantity.kind

    @property
    def error(self) -> float:
        """Predicted against published, as a share; above 0 is too fast (also of times), or too much memory."""
        ratio = self.predicted_value / self.quantity.value
        return (1 / ratio if METRICS[self.quantity.metric].is_time else ratio) - 1

    @property
    def is_counted(self) -> bool:
        """Whether it has an error; outcomes have none."""
        return self.kind != FIT

    @property
    def is_within(self) -> bool:
        """Whether the published value, or any within its uncertainty, lies in the interval; a verdict: is not wrong."""
        if self.kind == FIT:
            return not self.is_verdict_wrong
        value, uncertainty = self.quantity.value, self.quantity.uncertainty
        return self.low <= value + uncertainty and value - uncertainty <= self.high

    @property
    def is_verdict_wrong(self) -> bool:
        """A run that ran is said not to fit, or one that ran out of memory to fit."""
        return self.verdict == (DOES_NOT_FIT if self.quantity.ran else FITS)

    @property
    def is_too_large(self) -> bool:
        """Whether a run that ran is said not to fit."""
        return self.quantity.ran and self.is_verdict_wrong

    @property
    def is_misread(self) -> bool:
        """Whether a run that ran is of a source that nobody has looked up, and as it was read takes more than there
        is."""
        return self.quantity.ran and self.exceeds_capacity and self.reading.assumed_class == UNKNOWN

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of true against predicted: of step time, or of bytes."""
        ratio = self.quantity.value / self.predicted_value
        is_rate = self.kind == SPEED and not METRICS[self.quantity.metric].is_time
        return math.log(1 / ratio if is_rate else ratio)


def score_readings(readings: Sequence[Reading]) -> tuple[list[Score], dict[int, str]]:
    """Predict every reading that is a run, each run once.

    Returns
    -------
    scores: list of Score
    reasons: dict
        By number of the row: why it has no score.
    """
    reasons = {reading.row: reading.reason for reading in readings if reading.reason is not None}
    runnable = [reading for reading in readings if reading.reason is None]
    predictions = _predict(runnable, reasons)
    scores = {reading.row: _score(reading, predictions, reasons) for reading in runnable}
    found = {row: score for row, score in scores.items() if score is not None}
    read_again = [score for score in found.values() if score.is_too_large or score.is_misread]
    found |= _score_again(read_again, predictions)
    return list(found.values()), reasons


def _score(reading: Reading, predictions: Predictions, reasons: dict[int, str]) -> Score | None:
    """None, and a reason, where nothing is predicted of what the row measured."""
    if any(run not in predictions for run in reading.runs):
        return None
    try:
        return build_score(reading, *(predictions[run] for run in reading.runs))
    except UsageError as error:
        reasons[reading.row] = str(error)
        return None


def _score_again(scores: Sequence[Score], predictions: Predictions) -> dict[int, Score]:
    """Runs that ran and are said not to fit, or are misread, by their rows, as the first of what else a row may mean
    that is neither, or at least is not said not to fit; where that is activations computed again, what fits is open.
    What is predicted for that is added."""
    readings = {score.reading.row: score.reading for score in scores}
    smaller = {row: list_smaller_readings(reading) for row, reading in readings.items()}
    checkpointed = {
        score.reading.row: list_checkpointed_readings(score.reading) for score in scores if score.is_too_large
    }
    predictions |= _predict(list(itertools.chain(*smaller.values(), *checkpointed.values())), {})

    def find_fitting(candidates: Iterable[Reading], is_refused: Callable[[Score], bool]) -> Score | None:
        found_scores = (_score(reading, predictions, {}) for reading in candidates)
        return next((score for score in found_scores if score is not None and not is_refused(score)), None)

    found = {}
    for row, reading in readings.items():
        score = find_fitting(smaller[row], lambda score: score.is_too_large or score.is_misread)
        if score is None and row in checkpointed:
            score = find_fitting(smaller[row], lambda score: score.is_too_large)
            if score is None and find_fitting(checkpointed[row], lambda score: score.is_too_large) is not None:
                score = _score(dataclasses.replace(reading, is_read_again=True, is_fit_open=True), predictions, {})
        if score is not None:
            found[row] = score
    return found


Predictions = dict[Settings, Prediction]
"""By the settings of runs."""


def _predict(readings: Sequence[Reading], reasons: dict[int, str]) -> Predictions:
    """All at once; one by one where something is refused only then."""
    settings = list(dict.fromkeys(run for reading in readings for run in reading.runs))
    configs = {run: build_published_config(run) for run in settings}
    try:
        return dict(zip(settings, predict_runs([configs[key] for key in settings]), strict=True))
    except Exception:  # one row that cannot be predicted costs the others nothing
        predictions = {}
        for key in settings:
            try:
                (predictions[key],) = predict_runs([configs[key]])
            except UsageError as error:
                reasons |= {reading.row: str(error) for reading in readings if key in reading.runs}
            except Exception as error:
                reason = f"the predictor failed: {error}"
                reasons |= {reading.row: reason for reading in readings if key in reading.runs}
        return predictions


def build_score(reading: Reading, first_prediction: Prediction, *further_predictions: Prediction) -> Score:
    """Compare one prediction, or what follows from those of several runs, with the published number.

    Raises
    ------
    UsageError
        If nothing is predicted of what the row measured.
    """
    prediction = read_as_published(reading, (first_prediction, *further_predictions))
    config, quantity, memory = reading.config, reading.quantity, prediction.memory
    assert quantity is not None
    knows_time = prediction.time is not None and is_time_known(config, prediction.time)
    value, low, high = _compute_range(reading, config, prediction, quantity, knows_time=knows_time)
    return Score(
        reading=reading,
        quantity=quantity,
        predicted_value=value,
        low=low,
        high=high,
        verdict=_find_verdict(reading, prediction),
        hardware=config.hardware.name,
        device_class=classify_hardware(config.hardware),
        strategy=config.effective_strategy,
        is_layout=is_layout(config),
        is_time_known=knows_time,
        family=config.model.family,
        parameters=config.model.num_parameters,
        gpus=config.gpus,
        limited_by=None if prediction.time is None else prediction.time.limited_by,
        predicted_step_s=None if prediction.time is None else _compute_step_seconds(reading, config, prediction),
        retry_probability=0.0 if prediction.time is None else prediction.time.retry_probability,
        fullness=_compute_fullness(config, memory),
        exceeds_capacity=memory.capacity is not None and memory.allocated.value > memory.capacity,
    )


def _compute_fullness(config: RunConfig, memory: MemoryPrediction) -> float | None:
    has_own_margin = config.precision.uses_transformer_engine
    return None if has_own_margin or not memory.capacity else memory.allocated.value / memory.capacity


def _compute_range(
    reading: Reading, config: RunConfig, prediction: Prediction, quantity: Quantity, *, knows_time: bool
) -> tuple[float, float, float]:
    if quantity.kind == FIT:
        value = {FITS: 0.0, DOES_NOT_FIT: 1.0}.get(_find_verdict(reading, prediction) or "", 0.5)
        return value, value, value
    factors = find_factors(
        INTERVAL_METRICS[quantity.kind],
        classify_hardware(config.hardware),
        row_class=_find_row_class(reading, quantity, knows_time=knows_time),
        is_layout=is_layout(config),
    )
    if quantity.kind != SPEED:
        size = _compute_bytes(reading, config, prediction, quantity)
        return size, size * factors.low, size * factors.high
    step_s = _compute_step_seconds(reading, config, prediction)
    assert prediction.time is not None
    own = prediction.time.step_s  # as wide as complete rows need, and wider where the allocator may have to retry
    shares = (1.0, min(factors.low, own.low / own.value), max(factors.high, own.high / own.value))
    values = [_compute_speed(reading, config, quantity, step_s * share) for share in shares]
    return values[0], min(values[1:]), max(values[1:])


def _find_row_class(reading: Reading, quantity: Quantity, *, knows_time: bool) -> str:
    if not reading.is_complete:
        return reading.assumed_class
    return COMPLETE if quantity.kind != SPEED or knows_time else ROUGH


def _find_verdict(reading: Reading, prediction: Prediction) -> str | None:
    """Whether the run fits; of a row of which something was assumed, as the wider interval says. None where that is not
    known, or not to be compared."""
    if reading.frees_by_hand:
        return None
    if reading.is_fit_open:
        return TOO_CLOSE
    return prediction.memory.verdict if reading.is_complete else find_rough_verdict(reading.config, prediction.memory)


def _compute_bytes(reading: Reading, config: RunConfig, prediction: Prediction, quantity: Quantity) -> float:
    memory = prediction.memory
    if quantity.kind == BETWEEN_STEPS:
        return float(sum(memory.parts[part] for part in RESTING_PARTS) + _find_resting_gradients(config, memory))
    added_bytes = _compute_reentrant_bytes(reading, config)
    if quantity.kind in (ALLOCATED, ACTIVE):
        return added_bytes + (memory.allocated if quantity.kind == ALLOCATED else memory.active).value
    reserved_bytes = memory.reserved.value
    if added_bytes:
        most_bytes = math.inf if memory.capacity is None else memory.capacity
        reserved_bytes = max(memory.active.value + added_bytes, min(memory.wanted.value + added_bytes, most_bytes))
    if quantity.kind == RESERVED:
        return reserved_bytes
    devices = config.gpus if quantity.metric == "device_used_all_gpus" else 1
    return (reserved_bytes + memory.device_used.value - memory.reserved.value) * devices


def _find_resting_gradients(config: RunConfig, memory: MemoryPrediction) -> float:
    """FSDP's shards of gradients stay until the next step: one for each of the parameters, wherever the peak is. Of
    adapters, there are as many as at the peak."""
    if not config.strategy.name.startswith("fsdp"):
        return 0.0
    return memory.parts["parameters" if config.finetune.name == "full" else "gradients"]


def _compute_reentrant_bytes(reading: Reading, config: RunConfig) -> float:
    """What a reentrant checkpoint, and another loss, hold more than the suite's at the peak; for models that are
    trained as a whole, checkpoints make no difference."""
    if not reading.recomputes_whole or config.finetune.name == "full":
        return 0.0
    loss = reading.loss_memory
    return predict_peak(config, is_reentrant=True, loss=loss) - predict_peak(config, loss=loss)


def _compute_step_seconds(reading: Reading, config: RunConfig, prediction: Prediction) -> float:
    """A step of the source's software, in seconds.

    Predictions stop recomputing when backward has what it needs, as torch does from 2.1 on. Where whole blocks are
    computed again, computation takes longer as a whole forward pass against the part of it, in FLOPs.
    """
    if prediction.time is None:
        raise UsageError(f"the speed of {config.hardware.name} in {config.precision.name} is not known")
    step_s = prediction.time.step_s.value
    if reading.measures == "forward_and_backward":
        step_s -= prediction.time.optimizer_s
    if reading.recomputes_whole:
        step_s += prediction.time.compute_s * (_compute_whole_recomputation_share(config) - 1)
    return step_s


def _compute_whole_recomputation_share(config: RunConfig) -> float:
    """FLOPs with a whole second forward pass, against those that the device executes in a prediction."""
    model_flops = config.trained_model.count_flops_per_sequence(config.sequence_length).model_flops
    return max(1.0, model_flops * 4 / 3 / config.hardware_flops_per_sequence)


def _compute_speed(reading: Reading, config: RunConfig, quantity: Quantity, step_s: float) -> float:
    sequences = reading.sequences_per_gpu
    tokens_per_s = sequences * config.model.count_tokens_per_sequence(config.sequence_length) / step_s
    rates: dict[str, Callable[[], float]] = {
        "tokens_per_second_per_gpu": lambda: tokens_per_s,
        "tokens_per_second": lambda: tokens_per_s * config.gpus,
        "samples_per_second": lambda: sequences * config.gpus / step_s,
        "samples_per_second_per_gpu": lambda: sequences / step_s,
        "steps_per_second": lambda: 1 / step_s,
        "step_time": lambda: step_s,
    }
    if quantity.metric in rates:
        return rates[quantity.metric]()
    tflops = sequences * _count_flops(reading, config, quantity) / step_s / 1e12
    if quantity.metric in ("tflops_per_gpu", "hardware_tflops_per_gpu"):
        return tflops
    peak = config.hardware.peak_tflops.get(config.precision.peak)
    if not peak:
        raise UsageError(f"the peak of {config.hardware.name} in {config.precision.name} is not known")
    return tflops / peak


def _count_flops(reading: Reading, config: RunConfig, quantity: Quantity) -> float:
    """FLOPs of a sequence as the source counts them; ``hfu`` is with recomputation whatever it says."""
    convention = reading.flops
    is_checkpointed = config.activation_checkpointing == "full"
    if METRICS[quantity.metric].flops == "hardware" and convention not in ("hardware", "megatron"):
        share = 4 / 3 if is_checkpointed else 1.0
        return share * _count_flops(reading, config, dataclasses.replace(quantity, metric="mfu"))
    if convention == "hardware" and reading.recomputes_whole:
        return 4 / 3 * config.trained_model.count_flops_per_sequence(config.sequence_length).model_flops
    if convention in SUITE_COLUMNS:
        columns = compute_speed_columns(config, 1.0)["flops"]
        return columns[convention] / config.sequences_per_gpu
    flops = count_flops_per_sequence(convention, config.model, config.sequence_length)
    return flops * 3 / 4 if convention == "megatron" and not is_checkpointed else flops
