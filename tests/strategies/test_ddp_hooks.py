"""DDP's communication hooks: gradients compressed to 16 bits on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.core.errors import ImpossibleError, UsageError
from bench.prediction.predictor import predict_run
from tests.conftest import SMALL_T5, compose_run_config
from tests.strategies.test_strategy_plans import Notebook, config, plan_of, step

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")


@pytest.mark.slow
def test_a_hook_rounds_and_otherwise_computes_the_same(execute: Callable[..., list[dict[str, Any]]]) -> None:
    run = (*SMALL_T5, *STEPS, "strategy=ddp", "gpus=2")
    overrides_by_hook = {hook: (*run, f"strategy.communication_hook={hook}") for hook in ("none", "fp16", "bf16")}
    runs = dict(zip(overrides_by_hook, execute(*overrides_by_hook.values()), strict=True))
    plain = runs["none"]["losses"]
    assert plain[-1] < plain[0] - 0.005
    for hook in ("fp16", "bf16"):
        record = runs[hook]
        assert record["status"] == "ok", record["error"]
        losses = record["losses"][: len(plain)]  # there is one step more
        assert losses == pytest.approx(plain, rel=1e-3)
        assert losses != plain
        assert record["effective"]["communication_hook"] == hook
        expected = predict_run(compose_run_config(*overrides_by_hook[hook])).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_what_is_held_while_the_last_bucket_is_sent_is_predicted(execute: Callable[..., list[dict[str, Any]]]) -> None:
    """Its last gradient is the embedding's, the largest of all: autograd may have it beside what DDP keeps of it."""
    run = ("model=t5_tiny", "strategy=ddp", "gpus=2", "batch_size_per_gpu=1", "sequence_length=16")
    compressed = (*run, "measurement.warmup_steps=3", "measurement.steps=1", "strategy.communication_hook=bf16")
    powersgd = (*run, "measurement.warmup_steps=4", "measurement.steps=1", "strategy.communication_hook=powersgd")
    beside = "strategy.gradient_as_bucket_view=false"
    every = ("gradient_accumulation=2", "gradient_accumulation_sync=true")
    runs = [
        compressed,
        (*compressed, beside),
        powersgd,
        (*powersgd, beside),
        (*powersgd, beside, *every),
        (*powersgd, beside, "optimizer.keep_gradients=true"),
        (*powersgd, "strategy.bucket_cap_mb=1"),
    ]
    for overrides, record in zip(runs, execute(*runs), strict=True):
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=1e-3), overrides


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_half_as_much_is_sent(hook: str) -> None:
    volumes = []
    for chosen in ("none", hook):
        device = Notebook()
        plan, plan_inputs = plan_of(config(strategy="ddp", **{"strategy.communication_hook": chosen}))
        plan.allocate_persistent_state(device)
        step(plan, plan_inputs, device)
        volumes.append(device.volume("all-reduce", "world"))
    assert volumes[1] == volumes[0] / 2


def test_what_has_16_bits_is_not_compressed() -> None:
    with pytest.raises(ImpossibleError, match=r"communication_hook=fp16 is not valid with precision=bf16_pure"):
        compose_run_config(
            *SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=fp16", "precision=bf16_pure"
        )
    with pytest.raises(UsageError, match=r"communication_hook=fp8 .* none, fp16, bf16"):
        compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=fp8")


def test_without_a_hook_a_run_is_what_it_was() -> None:
    assert compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2").run_id == compose_run_config(
        *SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=none"
    ).run_id  # fmt: skip
    other = compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2", "strategy.communication_hook=bf16")
    assert other.run_id != compose_run_config(*SMALL_T5, "strategy=ddp", "gpus=2").run_id
