"""Accelerate and Lightning: the same training as the plain strategy that they wrap, and what is not left to them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

from bench.errors import ImpossibleError, UsageError
from bench.measure.environment import software
from bench.simulate.predict import predict
from bench.strategies.framework import environment
from tests.conftest import SMALL_GPT, SMALL_T5, configuration, run_command

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
FRAMEWORKS = ("accelerate", "lightning")
BACKENDS = ("ddp", "fsdp", "fsdp1")


def require(framework: str) -> None:
    """Skip where the library is missing, or fail where it must be there."""
    if importlib.util.find_spec(framework) is None:
        message = f"the package {framework} is not installed"
        if os.environ.get("REQUIRE_FRAMEWORKS") == "1":
            pytest.fail(message)
        pytest.skip(message)


def predicted(*overrides: str) -> float:
    return predict(configuration(*overrides)).memory.allocated.value


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_a_framework_computes_what_one_process_does_and_keeps_what_is_predicted(
    execute: Execute, model: tuple[str, ...], framework: str
) -> None:
    require(framework)
    four = (*model, *STEPS, f"strategy={framework}", "gpus=4", "batch_size_per_gpu=2")
    asked = {backend: (*four, f"strategy.backend={backend}") for backend in BACKENDS}
    asked["hybrid"] = (*four, "strategy.backend=fsdp", "strategy.sharding_factor=2")
    single, *others = execute((*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"), *asked.values())
    runs = dict(zip(asked, others, strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), name
        assert record["peak_allocated_bytes"] == pytest.approx(predicted(*asked[name]), rel=0.01), name
    assert single["losses"][-1] < single["losses"][0] - 0.01
    assert [record["effective_strategy"] for record in runs.values()] == [
        f"{framework}/{kind}" for kind in ("ddp", "full_shard", "fsdp1_full_shard", "hybrid_shard")
    ]
    assert runs["ddp"]["environment"]["packages"][framework]
    assert runs["fsdp"]["reshard_after_forward"] is True
    assert runs["ddp"]["reshard_after_forward"] is None


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_knobs_reach_the_plain_strategy_and_a_rank_can_be_rehearsed(execute: Execute, framework: str) -> None:
    require(framework)
    two = (*SMALL_T5, *STEPS, "gpus=2")
    accumulated = ("gradient_accumulation=2", "batch_size_per_gpu=2")
    knobs: dict[tuple[str, ...], tuple[str, ...]] = {
        ("precision=bf16",): ("ddp", "fsdp"),
        accumulated: ("ddp", "fsdp", "fsdp1"),
        ("strategy.reshard_after_forward=false", "strategy.blocks_per_unit=2"): ("fsdp", "fsdp1"),
    }
    asked = [
        (
            (*two, f"strategy={framework}", f"strategy.backend={backend}", *settings),
            (*two, f"strategy={backend}", *settings),
        )
        for settings, backends in knobs.items()
        for backend in backends
    ]
    rehearsed = [
        (*two, f"strategy={framework}", f"strategy.backend={name}", "mode=rehearse") for name in ("ddp", "fsdp")
    ]
    records = execute(*(run for pair in asked for run in pair), *rehearsed)
    for (run, _), wrapped, plain in zip(asked, records[::2], records[1::2], strict=False):
        assert wrapped["status"] == "ok", wrapped["error"]
        assert wrapped["losses"] == pytest.approx(plain["losses"], rel=1e-6), run
        assert wrapped["peak_allocated_bytes"] == pytest.approx(predicted(*run), rel=0.01), run
    for run, record in zip(rehearsed, records[2 * len(asked) :], strict=True):
        assert record["status"] == "ok", record["error"]
        assert record["peak_allocated_bytes"] == pytest.approx(predicted(*run), rel=0.01), run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("strategy.backend=zero",), r"strategy.backend=zero is not valid: choose ddp, fsdp, fsdp1"),
        (("strategy.reshard_after_forward=false",), r"reshard_after_forward=false .* backend=ddp has no such knob"),
        (("strategy.backend=fsdp", "strategy.forward_prefetch=true"), r"forward_prefetch=true .* choose null"),
        (("strategy.sharding_factor=2",), r"sharding_factor=2 is not valid for strategy=ddp"),
        (("strategy.backend=fsdp", "strategy.sharding_factor=3"), r"sharding_factor=3 is not valid"),
        (("precision=fp16",), r"precision=fp16 is not valid for strategy=\w+, .* choose bf16"),
        (("precision.reduce=bf16",), r"precision.reduce=bf16 .* reduces gradients as they are stored: choose fp32"),
        (("gradient_accumulation=2", "strategy.static_graph=true"), r"static_graph=true is not valid"),
        (
            ("strategy.backend=fsdp", "optimizer=sgd", "optimizer.implementation=fused"),
            r"optimizer.implementation=fused is not valid",
        ),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_makes_no_sense_is_refused(framework: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configuration(*SMALL_T5, f"strategy={framework}", "gpus=4", *overrides)


def test_accelerate_has_no_mesh_for_fsdp1_and_none_without_shards() -> None:
    run = (*SMALL_T5, "strategy=accelerate", "gpus=4")
    with pytest.raises(ImpossibleError, match=r"sharding_factor=2 .* backend=fsdp1: choose full, or strategy fsdp1"):
        configuration(*run, "strategy.backend=fsdp1", "strategy.sharding_factor=2")
    with pytest.raises(ImpossibleError, match=r"sharding_factor=1 .* backend=fsdp: choose more than 1"):
        configuration(*run, "strategy.backend=fsdp", "strategy.sharding_factor=1")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_library_it_can_be_predicted_and_nothing_else(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == framework else find(name, *rest)
    )
    run = (*SMALL_T5, f"strategy={framework}", "gpus=4")
    config = configuration(*run)
    with pytest.raises(
        ImpossibleError, match=rf'strategy={framework} needs .* pip install "fsdp-bench\[{framework}\]"'
    ):
        config.strategy.check_installed()
    assert predicted(*run) == predicted(*SMALL_T5, "strategy=ddp", "gpus=4")


def test_a_knob_that_is_not_given_is_the_plain_strategys() -> None:
    for backend in BACKENDS:
        plain = configuration(*SMALL_T5, f"strategy={backend}", "gpus=4").strategy
        for framework in FRAMEWORKS:
            strategy: Any = configuration(
                *SMALL_T5, f"strategy={framework}", f"strategy.backend={backend}", "gpus=4"
            ).strategy
            assert strategy.plain == plain


def test_frameworks_read_nothing_of_how_to_train_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    before = dict(os.environ)
    with environment(("ACCELERATE_",), RANK="3"):
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ
        assert os.environ["RANK"] == "3"
    assert dict(os.environ) == before


def test_versions_are_recorded() -> None:
    assert set(FRAMEWORKS) <= set(software()["packages"])
