"""Candidates with their predictions as rows, in the order of what they are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.advice.batches import search_batches
from bench.advice.candidates import Candidate, Candidates, last_resort
from bench.config import RunConfig
from bench.errors import UsageError
from bench.planning.forecast import Untold, forecasts
from bench.planning.grid import Settings
from bench.simulate.prediction import DOES_NOT_FIT, FITS, Prediction

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


@dataclass(frozen=True)
class Row:
    """One candidate at one batch size."""

    settings: Settings
    """What is typed for it, with the batch size."""
    config: RunConfig
    prediction: Prediction
    largest_batch: int | None
    """Sequences per GPU that fit, 0 if not even one does; None where the memory is unknown."""

    @property
    def possible(self) -> bool:
        """Whether it may fit: it is not sure that it does not."""
        return self.prediction.memory.verdict != DOES_NOT_FIT

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit, or nothing is known that it would have to fit into."""
        return self.prediction.memory.verdict in (FITS, None)

    @property
    def tokens_per_step(self) -> int:
        """Tokens one rank reads in one optimizer step."""
        config = self.config
        tokens = config.model.tokens_per_sequence(config.sequence_length)
        return tokens * config.batch_size_per_gpu * config.gradient_accumulation

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """None where the hardware's speed is unknown."""
        return None if self.prediction.time is None else self.tokens_per_step / self.prediction.time.step_s.value

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        return None if self.tokens_per_second_per_gpu is None else self.tokens_per_second_per_gpu * self.config.gpus

    @property
    def tflops_per_gpu(self) -> float | None:
        """The model's FLOPs, without recomputation, in TFLOP/s."""
        return self._tflops("none")

    @property
    def hardware_tflops_per_gpu(self) -> float | None:
        """What the device executes, recomputation included, in TFLOP/s."""
        return self._tflops(self.config.activation_checkpointing)

    @property
    def mfu(self) -> float | None:
        """Share of the dense peak of the precision that the model's FLOPs reach, from 0 to 1."""
        return self._share_of_peak(self.tflops_per_gpu)

    @property
    def hfu(self) -> float | None:
        """Share of the dense peak that the executed FLOPs reach, from 0 to 1."""
        return self._share_of_peak(self.hardware_tflops_per_gpu)

    @property
    def headroom_bytes(self) -> int | None:
        """Memory left by what is predicted to be reserved; negative where it is not enough."""
        memory = self.prediction.memory
        return None if memory.capacity is None else int(memory.capacity - memory.reserved.value)

    def gpu_hours(self, tokens: float | None) -> float | None:
        """To train on so many tokens, without restarts and evaluation."""
        if tokens is None or self.tokens_per_second_per_gpu is None:
            return None
        return tokens / self.tokens_per_second_per_gpu / SECONDS_PER_HOUR

    def days(self, tokens: float | None) -> float | None:
        """To train on so many tokens with all GPUs, day and night."""
        hours = self.gpu_hours(tokens)
        return None if hours is None else hours / self.config.gpus / HOURS_PER_DAY

    def _tflops(self, activation_checkpointing: str) -> float | None:
        if self.prediction.time is None:
            return None
        config = self.config
        count = config.trained.flops_per_sequence(config.sequence_length).hardware(activation_checkpointing)
        flops = count * config.batch_size_per_gpu * config.gradient_accumulation
        return flops / self.prediction.time.step_s.value / 1e12

    def _share_of_peak(self, tflops: float | None) -> float | None:
        peak = self.config.hardware.peak_tflops.get(self.config.precision.peak)
        return None if tflops is None or not peak else tflops / peak


@dataclass
class Ranking:
    """All candidates, each at the batch asked for, else at the largest that fits."""

    possible: list[Row] = field(default_factory=list)
    """Those that may fit, fastest first; where speeds are unknown, smallest first."""
    infeasible: list[Row] = field(default_factory=list)
    """Those that surely do not fit, those nearest to fitting first."""
    untold: dict[str, int] = field(default_factory=dict)
    """Why there is no prediction of some, and of how many."""

    @property
    def first(self) -> Row:
        """The best, or what is nearest to fitting."""
        return (self.possible or self.infeasible)[0]


def ranked(section: Settings, knobs: Mapping[str, Sequence[str]], found: Candidates) -> Ranking:
    """Everything to compare in order; where nothing of it fits, with what is a last resort.

    Parameters
    ----------
    section, knobs
        What `candidates` was asked.
    found: Candidates
        What it found.

    Raises
    ------
    UsageError
        If nothing can be predicted.
    """
    ranking = rank(found.to_predict)
    if any(row.fits for row in ranking.possible):
        return ranking
    more = last_resort(section, knobs)
    return rank([*found.to_predict, *more]) if more else ranking


def rank(candidates: Sequence[Candidate]) -> Ranking:
    """Predict all candidates and put them in order.

    Raises
    ------
    UsageError
        If none of them can be predicted.
    """
    searches = search_batches([candidate.config for candidate in candidates])
    configs = [
        candidate.config
        if candidate.asked_batch or search.largest is None
        else dataclasses.replace(candidate.config, batch_size_per_gpu=max(search.largest, search.unit))
        for candidate, search in zip(candidates, searches, strict=True)
    ]
    found = Ranking()
    for candidate, config, search, forecast in zip(candidates, configs, searches, forecasts(configs), strict=True):
        told = search.untold or forecast
        if isinstance(told, Untold):
            found.untold[told.reason] = found.untold.get(told.reason, 0) + 1
            continue
        settings = {**candidate.settings, "batch_size_per_gpu": str(config.batch_size_per_gpu)}
        row = Row(settings, config, told, search.largest)
        (found.possible if row.possible else found.infeasible).append(row)
    if not (found.possible or found.infeasible):
        raise UsageError(next(iter(found.untold)))
    found.possible.sort(key=_worth)
    found.infeasible.sort(key=_lack)
    return found


def _worth(row: Row) -> tuple[bool, float, float]:
    speed = row.tokens_per_second
    return speed is None, -(speed or 0.0), _size(row)


def _size(row: Row) -> float:
    return row.prediction.memory.reserved.value


def _lack(row: Row) -> float:
    """Bytes that are too few on the device, or around it where more are lacking there."""
    memory = row.prediction.memory
    pairs = ((memory.reserved.value, memory.capacity), (memory.host, memory.host_capacity))
    return max(needed - available for needed, available in pairs if available is not None)
