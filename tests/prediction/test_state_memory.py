"""What a run holds whatever its batch, said without a trace, is what its prediction holds, and never more."""

from __future__ import annotations

from typing import Any

import pytest

from bench.config.groups import list_config_groups
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.prediction.predictor import predict_run
from bench.prediction.state_memory import predict_state_alone
from bench.prediction.trace import trace_cache
from tests.conftest import compose_run_config

WITHOUT = ("pipeline", "naive_pipeline", "data_parallel")
"""Strategies of which it is not said."""
KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16_pure"},
    {"precision": "fp32", "optimizer": "sgd"},
    {"gradient_accumulation": 3},
    {"finetune": "lora"},
)


COMMON = {"mode": "predict", "gpus": 4, "model": "gpt_tiny", "hardware": "a100_80gb", "precision": "bf16"}


def config(**settings: Any) -> RunConfig:
    return compose_run_config(*(f"{key}={value}" for key, value in {**COMMON, **settings}.items()))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", list_config_groups()["strategy"])
def test_state_alone_is_within_the_memory_of_any_batch(strategy):
    num_compared = 0
    for knobs in KNOBS:
        try:
            num_gpus = 1 if strategy == "single" else 4
            run = config(strategy=strategy, gpus=num_gpus, batch_size_per_gpu=4, sequence_length=16, **knobs)
            prediction = predict_run(run)
        except UsageError:
            continue
        state = predict_state_alone(run)
        if state is None:
            continue
        num_compared += 1
        assert state.time is None
        for part in ("parameters", "optimizer"):
            assert state.memory.parts[part] == prediction.memory.parts[part], (knobs, part)
        assert state.memory.allocated.value <= prediction.memory.allocated.value, knobs
    assert (num_compared == 0) == (strategy in WITHOUT)


def test_where_state_alone_does_not_fit_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(trace_cache, "load_traces", lambda needed: pytest.fail(f"{needed} are traced"))
    state = predict_state_alone(config(model="llama3_8b", strategy="ddp", gpus=8))
    assert state is not None
    num_parameters = 8_030_261_248  # of the model card: 8.03B
    expected = 16 * num_parameters
    assert expected <= state.memory.allocated.value <= 1.01 * expected
