"""Candidates with their predictions as rows, in the order of what they are worth."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.advice.candidates import SYNC_KEY, Candidate, CandidateSet, list_last_resort_candidates
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig
from bench.config.speed_columns import compute_speed_columns
from bench.core import processes
from bench.core.errors import ImpossibleError, UsageError
from bench.core.progress import observe_progress, track_progress
from bench.planning.batch_search import BatchTrial, search_largest_batches
from bench.planning.run_predictions import RunPrediction, Unpredictable, add_predictions, predict_configs
from bench.prediction.prediction import DOES_NOT_FIT, FITS, Prediction
from bench.prediction.state_memory import predict_state_alone

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


@dataclass(frozen=True)
class RankedCandidate:
    """One candidate at one batch size."""

    settings: RunSettings
    """What is typed for it, with the batch size."""
    config: RunConfig
    prediction: Prediction
    largest_batch: int | None
    """Sequences per GPU that fit, 0 if not even one does; None where the memory is unknown."""

    @property
    def can_fit(self) -> bool:
        """Whether it may fit: it is not sure that it does not."""
        return self.prediction.memory.verdict != DOES_NOT_FIT

    @property
    def does_fit(self) -> bool:
        """Whether it is predicted to fit, or nothing is known that it would have to fit into."""
        return self.prediction.memory.verdict in (FITS, None)

    @property
    def tokens_per_step(self) -> float:
        """Tokens one rank reads in one optimizer step."""
        config = self.config
        return config.tokens_per_step / config.gpus

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step; infinite where the hardware's speed is unknown."""
        return math.inf if self.prediction.time is None else self.prediction.time.step_s.value

    @property
    def compute_s(self) -> float:
        """Of these, what a rank computes."""
        return 0.0 if self.prediction.time is None else self.prediction.time.compute_s

    @functools.cached_property
    def _speed_columns(self) -> dict[str, Any]:
        """Empty where the hardware's speed is unknown."""
        time = self.prediction.time
        return {} if time is None else compute_speed_columns(self.config, time.step_s.value)

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """None where the hardware's speed is unknown."""
        return self._speed_columns.get("tokens_per_second_per_gpu")

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens_per_second_per_gpu is None else self.tokens_per_second_per_gpu * self.config.gpus

    @property
    def tflops_per_gpu(self) -> float | None:
        """The model's FLOPs, without recomputation, in TFLOP/s."""
        return self._speed_columns.get("tflops_per_gpu")

    @property
    def hardware_tflops_per_gpu(self) -> float | None:
        """What the device executes, recomputation included, in TFLOP/s."""
        return self._speed_columns.get("hardware_tflops_per_gpu")

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak of the precision that the model's FLOPs reach, from 0 to 1."""
        return self._speed_columns.get("mfu")

    @property
    def causal_tflops_per_gpu(self) -> float | None:
        """The model's FLOPs with half of the scores where attention is causal, in TFLOP/s."""
        return self._speed_columns.get("causal_tflops_per_gpu")

    @property
    def causal_mfu(self) -> float | None:
        """Share of the dense peak that these reach, from 0 to 1."""
        return self._speed_columns.get("causal_mfu")

    @property
    def hfu(self) -> float | None:
        """Share of the dense peak that the executed FLOPs reach, from 0 to 1."""
        return self._speed_columns.get("hfu")

    @property
    def headroom_bytes(self) -> int | None:
        """Memory left by what is predicted to be reserved; negative where it is not enough."""
        memory = self.prediction.memory
        return None if memory.capacity is None else int(memory.capacity - memory.reserved.value)

    def compute_gpu_hours(self, tokens: float | None) -> float | None:
        """To train on so many tokens, without restarts and evaluation."""
        if tokens is None or self.tokens_per_second_per_gpu is None:
            return None
        return tokens / self.tokens_per_second_per_gpu / SECONDS_PER_HOUR

    def compute_days(self, tokens: float | None) -> float | None:
        """To train on so many tokens with all GPUs, day and night."""
        hours = self.compute_gpu_hours(tokens)
        return None if hours is None else hours / self.config.gpus / HOURS_PER_DAY


@dataclass
class CandidateRanking:
    """All candidates, each at the batch asked for, else at the largest that fits."""

    possible: list[RankedCandidate] = field(default_factory=list)
    """Those that may fit, fastest first; where speeds are unknown, smallest first."""
    infeasible: list[RankedCandidate] = field(default_factory=list)
    """Those that surely do not fit, those nearest to fitting first."""
    unpredictable_reasons: dict[str, int] = field(default_factory=dict)
    """Why there is no prediction of some, and of how many."""

    @property
    def best_candidate(self) -> RankedCandidate:
        """The best of those that are predicted to fit, or of all where it is too close to call for each."""
        return next((candidate for candidate in self.possible if candidate.does_fit), self.top_candidate)

    @property
    def top_candidate(self) -> RankedCandidate:
        """The best, or what is nearest to fitting."""
        return (self.possible or self.infeasible)[0]


def rank_with_last_resort(
    section_settings: RunSettings, knobs: Mapping[str, Sequence[str]], candidates: CandidateSet
) -> CandidateRanking:
    """Everything to compare in order; where nothing of it fits, with what is a last resort.

    Parameters
    ----------
    section_settings, knobs
        What `build_candidates` was asked.
    candidates: CandidateSet
        What it found.

    Raises
    ------
    UsageError
        If nothing can be predicted.
    """
    ranking = rank_candidates(candidates.to_predict)
    if any(candidate.does_fit for candidate in ranking.possible):
        return ranking
    last_resort_candidates = list_last_resort_candidates(section_settings, knobs)
    return rank_candidates([*candidates.to_predict, *last_resort_candidates]) if last_resort_candidates else ranking


def rank_candidates(candidates: Sequence[Candidate]) -> CandidateRanking:
    """Predict all candidates and put them in order.

    Raises
    ------
    UsageError
        If none of them can be predicted.
    """
    ranking = CandidateRanking()
    candidates, ranking.infeasible = _set_oversized_apart(candidates)
    largest_batches = _find_largest_batches([candidate.config for candidate in candidates])
    configs = [_resize(*pair) for pair in zip(candidates, largest_batches, strict=True)]
    for candidate, config, largest_batch, prediction in zip(
        candidates, configs, largest_batches, predict_configs(configs), strict=True
    ):
        if SYNC_KEY in candidate.settings and config.gradient_accumulation == 1:
            continue  # of steps that are one micro-batch each once
        if isinstance(prediction, Unpredictable):
            ranking.unpredictable_reasons[prediction.reason] = (
                ranking.unpredictable_reasons.get(prediction.reason, 0) + 1
            )
            continue
        ranked_candidate = _build_row(candidate, config, prediction, largest_batch)
        (ranking.possible if ranked_candidate.can_fit else ranking.infeasible).append(ranked_candidate)
    if not (ranking.possible or ranking.infeasible):
        raise UsageError(next(iter(ranking.unpredictable_reasons)))
    ranking.possible.sort(key=_compute_rank_key)
    ranking.infeasible.sort(key=_compute_shortfall_bytes)
    return ranking


def list_faster_candidates(candidates: Sequence[Candidate], step_s: float) -> list[Candidate]:
    """Those of a global batch that may take less than `step_s` seconds a step.

    First those that may with the whole step as one batch, whether it fits or not: smaller batches are gathered for more
    often, and are faster by no more than the products of some sizes are. Of these each at the largest batch of which
    what is allocated fits, without a replay of the allocator, which takes several times as long: it may ask for smaller
    batches, which are not faster.
    """
    candidates, _ = _set_oversized_apart(candidates)
    as_one_batch = [_take_step_as_one_batch(candidate.config) for candidate in candidates]
    candidates = _select_faster(candidates, as_one_batch, (1 + MAX_GAIN_OF_SMALLER_BATCHES) * step_s)
    batches = _search_batches([candidate.config for candidate in candidates])
    return _select_faster(candidates, [_resize(*pair) for pair in zip(candidates, batches, strict=True)], step_s)


MAX_GAIN_OF_SMALLER_BATCHES = 0.05
"""Of a step's time, without what the allocator's retries take of it."""


def _take_step_as_one_batch(config: RunConfig) -> RunConfig | None:
    """None where no run takes so much at once."""
    sizes = config.valid_batch_sizes
    with contextlib.suppress(ImpossibleError):
        return config.resize_batch(sizes[-1]) if sizes else config
    return None


def _select_faster(
    candidates: Sequence[Candidate], configs: Sequence[RunConfig | None], step_s: float
) -> list[Candidate]:
    """Those that, each as it is configured, would take less than `step_s` seconds a step, the allocator's retries left
    out; and those of which nobody knows."""
    known_configs = [config for config in configs if config is not None]
    predictions = iter(predict_configs(known_configs, replay_allocator=False))
    return [
        candidate
        for candidate, config in zip(candidates, configs, strict=True)
        if config is None or _is_faster(next(predictions), step_s)
    ]


def _is_faster(prediction: RunPrediction, step_s: float) -> bool:
    if isinstance(prediction, Unpredictable):
        return False
    return prediction.time is None or prediction.time.step_s.value - prediction.time.retry_s < step_s


def _resize(candidate: Candidate, largest_batch: int | None) -> RunConfig:
    """A candidate at its largest batch, or its smallest if none fits; as it was asked for where that says the batch."""
    if candidate.has_requested_batch or largest_batch is None:
        return candidate.config
    return _take_batch(candidate.config, largest_batch)


def _build_row(
    candidate: Candidate, config: RunConfig, prediction: Prediction, largest_batch: int | None
) -> RankedCandidate:
    settings = {**candidate.settings, "batch_size_per_gpu": str(config.batch_size_per_gpu)}
    return RankedCandidate(settings, config, prediction, largest_batch)


def _set_oversized_apart(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[RankedCandidate]]:
    """The candidates without those whose parameters, gradients and optimizer state alone do not fit, and these as rows:
    nothing else of them is predicted. Where that is all of them, each is predicted in full, to say by how much."""
    others, oversized = [], []
    for candidate in candidates:
        config = candidate.config
        prediction = None
        if not candidate.has_requested_batch:
            config = config.resize_batch(_find_smallest_batch(config))
            with contextlib.suppress(ImpossibleError):  # which its prediction says
                prediction = predict_state_alone(config)
        if prediction is None or prediction.memory.verdict != DOES_NOT_FIT:
            others.append(candidate)
        else:
            oversized.append(_build_row(candidate, config, prediction, 0))
    return (others, oversized) if others else (list(candidates), [])


def _find_largest_batches(configs: Sequence[RunConfig]) -> list[int | None]:
    """Sequences per GPU that fit, 0 if not even one does; None where the memory is unknown or nothing is predicted."""
    num_workers = min(processes.count_workers(), len(configs) // MIN_SEARCHES_PER_PROCESS)
    if num_workers < 2 or not processes.forks_children():  # others would import for longer than they search
        return _search_replayed_batches(configs)
    predict_configs([_begin_search(config) for config in configs], replay_allocator=False)  # records traces, for all
    parts = [configs[first : first + SEARCHES_PER_TASK] for first in range(0, len(configs), SEARCHES_PER_TASK)]
    sizes: list[int | None] = []
    with processes.open_worker_pool(num_workers) as pool:
        found = track_progress(pool.map(_search_part, parts), len(parts), "searching batch sizes")
        for part, (found_sizes, predictions) in zip(parts, found, strict=True):
            sizes += found_sizes
            add_predictions(_resize_all(part, found_sizes), predictions)
    return sizes


MIN_SEARCHES_PER_PROCESS, SEARCHES_PER_TASK = 4, 2
"""From how many on a process is worth its start, and how many it takes at a time."""


def _search_part(configs: Sequence[RunConfig]) -> tuple[list[int | None], list[RunPrediction]]:
    """The largest batches of some of the runs, and what is predicted of these; the process that shares them out tells
    how far it is."""
    with observe_progress(None):
        sizes = _search_replayed_batches(configs)
        return sizes, predict_configs(_resize_all(configs, sizes))


def _resize_all(configs: Sequence[RunConfig], largest_batches: Sequence[int | None]) -> list[RunConfig]:
    """The runs whose largest batch is known, each at it."""
    return [
        _take_batch(config, largest_batch)
        for config, largest_batch in zip(configs, largest_batches, strict=True)
        if largest_batch is not None
    ]


def _take_batch(config: RunConfig, largest_batch: int) -> RunConfig:
    """A run at its largest batch, or its smallest if none fits."""
    return config.resize_batch(largest_batch or _find_smallest_batch(config))


def _search_replayed_batches(configs: Sequence[RunConfig]) -> list[int | None]:
    """The largest batches, in this process.

    The search goes by what is allocated, which grows linearly with the batch. Then the allocator is replayed for what
    was found: where a block finds no place, smaller batches are tried.
    """
    sizes = _search_batches(configs)
    untried = [index for index, size in enumerate(sizes) if size]
    for step in SHARES_OF_LARGEST_BATCH:
        predictions = predict_configs([configs[index].resize_batch(sizes[index] or 0) for index in untried])
        untried = [
            index
            for index, prediction in zip(untried, predictions, strict=True)
            if not isinstance(prediction, Unpredictable) and prediction.memory.verdict not in (FITS, None)
        ]
        for index in untried:
            sizes[index] = _find_smaller_batch(configs[index], sizes[index] or 0, step)
        untried = [index for index in untried if sizes[index]]
    for index in untried:
        sizes[index] = 0
    return sizes


def _search_batches(configs: Sequence[RunConfig]) -> list[int | None]:
    """The same by what is allocated alone."""
    searches = search_largest_batches(
        [_begin_search(config) for config in configs],
        lambda sized_configs: [
            _read_trial(prediction) for prediction in predict_configs(sized_configs, replay_allocator=False)
        ],
    )
    return [None if search.is_aborted else search.largest_batch_size or 0 for search in searches]


SHARES_OF_LARGEST_BATCH = (0.97, 0.94, 0.88, 0.76, 0.5, 0.25, 0.0)
"""Of one batch size, what is tried next if no place is found for it."""


def _find_smaller_batch(config: RunConfig, size: int, share: float) -> int:
    """The largest batch size that a run may have of at most a share of another, 0 if there is none."""
    sizes = config.valid_batch_sizes or range(0, size, config.strategy.batch_size_multiple)
    return max((smaller for smaller in sizes if smaller <= size * share), default=0)


def _begin_search(config: RunConfig) -> RunConfig:
    """With the batch to try first: several sequences where training state leaves memory for them, since what a batch of
    one costs is traced by itself, and need not be known then."""
    smallest, hardware = _find_smallest_batch(config), config.hardware
    state_bytes = TRAINING_STATE_BYTES * config.model.num_parameters / config.strategy.num_parameter_shards
    if config.valid_batch_sizes or hardware.memory_gb is None or state_bytes >= hardware.memory_gb * 1e9:
        return config.resize_batch(smallest)
    num_sequences = FIRST_SEQUENCES if state_bytes < hardware.memory_gb * 1e9 / 2 else FIRST_SEQUENCES // 2
    with contextlib.suppress(ImpossibleError):  # more tokens than a run may have
        return config.resize_batch(num_sequences * smallest)
    return config.resize_batch(smallest)


TRAINING_STATE_BYTES = 16
"""Per parameter: fp32 parameter and gradient, and Adam's two moments."""

FIRST_SEQUENCES = 4


def _find_smallest_batch(config: RunConfig) -> int:
    return config.valid_batch_sizes[0] if config.valid_batch_sizes else config.strategy.batch_size_multiple


def _read_trial(prediction: RunPrediction) -> BatchTrial | None:
    if isinstance(prediction, Unpredictable) or prediction.memory.capacity is None:
        return None
    memory = prediction.memory
    return BatchTrial(memory.allocated.high, memory.capacity, memory.verdict == FITS)


def _compute_rank_key(candidate: RankedCandidate) -> tuple[bool, float, float]:
    tokens_per_second = candidate.tokens_per_second
    return tokens_per_second is None, -(tokens_per_second or 0.0), _find_reserved_bytes(candidate)


def _find_reserved_bytes(candidate: RankedCandidate) -> float:
    return candidate.prediction.memory.reserved.value


def _compute_shortfall_bytes(candidate: RankedCandidate) -> float:
    """Bytes that are too few on the device, or around it where more are lacking there."""
    memory = candidate.prediction.memory
    needs_and_capacities = ((memory.reserved.value, memory.capacity), (memory.host, memory.host_capacity))
    return max(needed - available for needed, available in needs_and_capacities if available is not None)
