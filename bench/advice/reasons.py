"""Why something does not fit, and from how many GPUs on it would."""

from __future__ import annotations

import functools

from bench.advice.candidates import can_shard
from bench.advice.ranking import Row
from bench.advice.words import PARTS, STATES, gib, listing, of_capacity
from bench.config import RunConfig, run_config
from bench.errors import ImpossibleError
from bench.models import Family
from bench.planning.compose import composed
from bench.planning.forecast import Untold, forecasts
from bench.simulate.prediction import FITS

MOST_GPUS = 16_384
SHARDING = "fsdp"
"""What shards where the strategy asked for does not."""


def states_bytes(row: Row) -> int:
    """What does not depend on the batch: parameters, gradients and optimizer state, as they are at the peak."""
    return sum(row.prediction.memory.parts.get(name, 0) for name in STATES)


def hopeless(row: Row) -> bool:
    """Whether no batch however small would fit."""
    capacity = row.prediction.memory.capacity
    return capacity is not None and states_bytes(row) > capacity


def why_not(row: Row) -> str:
    """Why a candidate does not fit, in a sentence part: what needs the memory."""
    memory = row.prediction.memory
    if memory.host_is_short:
        assert memory.host_capacity is not None
        share = f"its share of its machine's memory is {gib(memory.host_capacity)} GiB"
        return f"what a rank offloads needs {gib(memory.host)} GiB, and {share}"
    assert memory.capacity is not None
    if hopeless(row):
        present = [PARTS[name] for name in STATES if memory.parts.get(name)]
        return f"{listing(present)} alone need {gib(states_bytes(row))} of {gib(memory.capacity)} GiB"
    largest = sorted(memory.parts.items(), key=lambda item: -item[1])[:2]
    named = listing([f"{gib(size)} {PARTS[name]}" for name, size in largest if size])
    where = f"in {memory.phase}" + (f" of {memory.module}" if memory.module else "")
    still = f"; the largest batch that fits is {row.largest_batch}" if row.largest_batch else ""
    return f"batch {row.config.batch_size_per_gpu} needs {of_capacity(row)} {where}: {named}{still}"


def gpus_needed(row: Row) -> tuple[str, int] | None:
    """A strategy, and the number of GPUs from which on a candidate fits with it when spread over all of them.

    The strategy is the candidate's own if it can shard. Doublings of the number of GPUs are tried; None if none does.
    """
    settings = {key: value for key, value in row.settings.items() if not key.lstrip("+").startswith("strategy")}
    name = row.config.strategy.name
    if not can_shard(composed({"strategy": name})["strategy"]):
        name = SHARDING
    several = []
    count = row.config.gpus
    while (count := 2 * count) <= MOST_GPUS:
        spread = {"strategy": name, "strategy.sharding_factor": "full", "gpus": str(count)}
        try:
            several.append(run_config(composed({**settings, **spread})))
        except ImpossibleError:
            continue
    fitting = [
        config.gpus
        for config, forecast in zip(several, forecasts(several), strict=True)
        if not isinstance(forecast, Untold) and forecast.memory.verdict == FITS
    ]
    return (name, min(fitting)) if fitting else None


def notes(config: RunConfig) -> list[str]:
    """What is odd about a candidate, though possible."""
    factor, name = config.strategy.factor, config.strategy.name
    rows = _most_rows(config.model)
    if factor > config.model.num_parameters:
        return [f"{name} with F={factor} has more shards than the model has parameters: most ranks hold nothing of it"]
    if name == SHARDING and factor > rows:
        return [
            f"{name} with F={factor} leaves ranks with nothing to hold: parameters are sharded on their first "
            f"dimension, and the longest is {rows}"
        ]
    return []


@functools.cache
def _most_rows(model: Family) -> int:
    """The longest first dimension of any parameter."""
    return max(parameter.shape[0] for parameter in model.build().parameters())
