"""Numbers of parameters that are remembered are those of the model."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from bench.prediction.cache import find_user_packages
from bench.prediction.parameter_facts import find_parameter_facts, recall_parameter_counts
from tests.conftest import compose_run_config

SETTINGS = {
    "dense": ("model=gpt_tiny",),
    "experts": ("model=moe_tiny",),
    "tables": ("model=dhen_tiny", "sequence_length=1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_recalled_is_what_a_built_model_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))
    model = compose_run_config(*SETTINGS[name], "strategy=ddp", "gpus=2").model
    recalled, built = dataclasses.replace(model), dataclasses.replace(model)
    find_parameter_facts.cache_clear()
    find_parameter_facts(model)  # remembers
    find_parameter_facts.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "build_model", lambda family: pytest.fail("built again"))
        recall_parameter_counts([recalled])
        numbers = recalled.num_parameters, recalled.num_active_parameters
    assert numbers == (built.num_parameters, built.num_active_parameters)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_model_has_worked_out_is_no_code_of_the_users(name: str) -> None:
    """Some of it is a library's, as transformers' configurations are."""
    model = compose_run_config(*SETTINGS[name], "strategy=ddp", "gpus=2").model
    cached = [key for kind in type(model).__mro__ for key, value in vars(kind).items() if is_cached(value)]
    kept = [getattr(model, key) for key in dict.fromkeys(cached)]
    assert kept
    assert find_user_packages(model) == ()


def is_cached(attribute: object) -> bool:
    return isinstance(attribute, functools.cached_property)
