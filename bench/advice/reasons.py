"""Why something does not fit, and from how many GPUs on it would."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.advice.candidates import WHERE_NOTHING_FITS, can_shard
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
OTHERS = (SHARDING, *WHERE_NOTHING_FITS)
"""What is spread where the strategies compared do not fit however far, or shard nothing."""


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


@dataclass(frozen=True)
class Spread:
    """What spreading over more GPUs comes to."""

    tried: tuple[str, ...]
    """The strategies of which something was predicted."""
    fits: tuple[str, int] | None
    """The one that fits on the fewest GPUs, and on how many; None if none does."""


def spread(infeasible: Sequence[Row]) -> Spread:
    """Spread what comes nearest to fitting over more GPUs, doubling their number again and again.

    With the strategies compared, as far as they can shard; where none of them fits, or none can, with `OTHERS`.

    Parameters
    ----------
    infeasible: sequence of rows
        What does not fit, nearest first.
    """
    names = {row.config.strategy.name for row in infeasible}
    compared = [name for name in names if can_shard(composed({"strategy": name})["strategy"])]
    compared.sort(key=lambda name: (name in WHERE_NOTHING_FITS, name))
    found = _spread(infeasible[0], compared)
    if found.fits is not None:
        return found
    others = _spread(infeasible[0], [name for name in OTHERS if name not in compared])
    return Spread((*found.tried, *others.tried), others.fits)


def _spread(row: Row, names: Sequence[str]) -> Spread:
    """The same with some strategies; of those that need equally few GPUs the first."""
    settings = {key: value for key, value in row.settings.items() if not key.lstrip("+").startswith("strategy")}
    several = []
    for name in names:
        count = row.config.gpus
        while (count := 2 * count) <= MOST_GPUS:
            more = {"strategy": name, "strategy.sharding_factor": "full", "gpus": str(count)}
            try:
                several.append((name, run_config(composed({**settings, **more}))))
            except ImpossibleError:
                continue
    told = [
        (name, config.gpus, forecast.memory.verdict == FITS)
        for (name, config), forecast in zip(several, forecasts([config for _, config in several]), strict=True)
        if not isinstance(forecast, Untold)
    ]
    fitting = [(name, count) for name, count, fits in told if fits]
    fewest = min(fitting, key=lambda found: found[1], default=None)
    return Spread(tuple(dict.fromkeys(name for name, *_ in told)), fewest)


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
