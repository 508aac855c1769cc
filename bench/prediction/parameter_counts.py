"""Parameters of models, remembered: counting them builds a model, for which all of transformers is imported."""

from __future__ import annotations

from collections.abc import Iterable

from bench.models import Family
from bench.prediction import cache
from bench.prediction.cache import build_cache_key

ENTRY_KIND = "parameters"


def recall_parameter_counts(models: Iterable[Family]) -> None:
    """Have `num_parameters` of models known: those remembered, and the others counted."""
    models_by_name = {
        build_cache_key(repr(model), model): model for model in models if "num_parameters" not in vars(model)
    }
    known_counts = cache.read_entries(ENTRY_KIND, models_by_name)
    for name, count in known_counts.items():
        vars(models_by_name[name])["num_parameters"] = count  # where the cached property keeps it
    cache.write_entries(
        ENTRY_KIND, {name: model.num_parameters for name, model in models_by_name.items() if name not in known_counts}
    )
