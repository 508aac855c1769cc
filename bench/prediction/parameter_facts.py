"""Parameters of models, remembered: counting them builds a model, for which all of transformers is imported."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from bench.core import processes
from bench.models import Family
from bench.prediction import cache
from bench.prediction.cache import build_cache_key

ENTRY_KIND = "parameters"


@dataclass(frozen=True)
class ParameterFacts:
    """What answers say of a whole model's parameters."""

    count: int
    """Tied ones once."""
    active_count: int
    """Of those that one token meets."""
    longest_first_dimension: int
    """Of any parameter: FSDP shards them on it."""


@functools.cache
def find_parameter_facts(model: Family) -> ParameterFacts:
    """Of one model: remembered, or found by building it on meta."""
    key = build_cache_key(repr(model), model)
    entry = cache.read_entries(ENTRY_KIND, [key]).get(key)
    if entry is not None:
        return ParameterFacts(**entry)
    processes.prepare_isolation()  # for traces: it imports torch while this process does
    module = model.build_model()
    vars(model).setdefault("num_parameters", model.count_parameters(module))
    longest_dimension = max(parameter.shape[0] for parameter in module.parameters())
    facts = ParameterFacts(model.num_parameters, model.num_active_parameters, longest_dimension)
    cache.write_entries(ENTRY_KIND, {key: vars(facts)})
    return facts


def recall_parameter_counts(models: Iterable[Family]) -> None:
    """Have the numbers of parameters of some models known, without building those whose facts are remembered."""
    for model in models:
        facts = find_parameter_facts(model)
        vars(model).setdefault("num_parameters", facts.count)  # where cached properties look
        vars(model).setdefault("num_active_parameters", facts.active_count)
