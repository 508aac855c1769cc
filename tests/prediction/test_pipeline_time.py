"""The time of pipelines: gradients that stages share, idle shares, and memory that runs short."""

from __future__ import annotations

import pytest

from bench.config.run_config import RunConfig
from bench.models.t5 import T5Family
from bench.prediction.cost import rank_speed
from bench.prediction.cost.collectives import CollectiveGroup
from bench.prediction.pipeline import predictor
from bench.prediction.pipeline.stages import find_shared_parameters
from bench.prediction.pipeline.time import TiedGradientAllReduce, add_tied_all_reduces, list_tied_all_reduces
from bench.prediction.prediction import TimePrediction
from bench.prediction.predictor import build_predicted_row, build_trace_key, predict_run
from bench.prediction.simulation import step
from tests.conftest import compose_run_config


def pipelined(*overrides: str) -> RunConfig:
    return compose_run_config("strategy=pipeline", "mode=predict", "precision=bf16", *overrides)


def tied(*overrides: str) -> list[TiedGradientAllReduce]:
    config = pipelined(*overrides)
    assert config.strategy.timetable is not None
    return list_tied_all_reduces(config, config.strategy.timetable)


def timed(config: RunConfig) -> TimePrediction:
    found = predict_run(config).time
    assert found is not None
    return found


def test_stages_of_models_without_ties_share_nothing() -> None:
    run = ("model=gpt_2b7", "gpus=8", "hardware=a100_80gb")
    (embedding,) = tied(*run)
    assert embedding.ranks == (0, 7)
    assert embedding.seconds > 1e-3
    assert tied(*run, "model.family=mingpt") == []
    without = timed(pipelined(*run, "model.family=mingpt"))
    assert timed(pipelined(*run)).exposed_communication_s == pytest.approx(
        without.exposed_communication_s + embedding.seconds / 4, rel=0.01
    )


def test_gradients_that_several_stages_share_are_reduced_among_all_of_them() -> None:
    run = ("model=t5_611m", "strategy.stages=4", "hardware=v100_32gb", "precision=fp32")
    # Tables of position biases, and the embedding that is the decoder's and the head too.
    assert [each.ranks for each in tied(*run, "gpus=4")] == [(0, 1), (0, 2, 3), (2, 3)]
    assert tied(*run, "gpus=4")[1].group == CollectiveGroup(3, 3)
    # On 8 GPUs stages 0 and 1 are on one half of a node, and so are 2 and 3.
    assert tied(*run, "gpus=8", "gpus_per_node=4")[1].group == CollectiveGroup(3, 1, 2)
    spread = tied(*run, "gpus=32")[1]
    assert spread.group == CollectiveGroup(3, 1, 8)  # eight copies of the pipeline share the adapters
    assert spread.seconds == pytest.approx(31.8e-3, rel=0.01)
    # Shards of what FSDP divides among copies.
    assert tied(*run, "gpus=32", "strategy.data_parallel=fsdp")[1].seconds < spread.seconds / 4


def test_what_stages_share_is_named_as_the_run_names_it() -> None:
    family = compose_run_config("model=t5_611m").model
    assert isinstance(family, T5Family)
    shared = find_shared_parameters(family, 4)
    assert shared["shared.weight"] == (family.vocabulary_size * family.d_model, [0, 2, 3])
    assert len(shared) == 3


def test_ranks_wait_for_those_they_share_gradients_with() -> None:
    group = CollectiveGroup(2, 2)
    assert add_tied_all_reduces(
        [1.0, 5.0, 2.0], [TiedGradientAllReduce((0, 1), group, 1.0), TiedGradientAllReduce((1, 2), group, 0.5)]
    ) == [6.0, 6.5, 6.5]
    assert add_tied_all_reduces([1.0, 5.0], []) == [1.0, 5.0]


def test_a_predicted_bubble_counts_what_a_measured_one_counts() -> None:
    """Kernels that a stage waits for are part of it: small batches on a fast GPU are all launching."""
    config = pipelined("model=gpt_125m", "gpus=2", "batch_size_per_gpu=1", "sequence_length=64", "hardware=h100_80gb")
    time = timed(config)
    assert time.idle_share is not None
    assert time.idle_share < 0.38 < 1 - (time.compute_s + time.optimizer_s) / time.step_s.value
    row = build_predicted_row(config, predict_run(config))
    assert row["bubble"] == time.idle_share
    alone = compose_run_config("model=gpt_125m", "mode=predict", "gpus=2", "hardware=h100_80gb")
    assert "bubble" not in build_predicted_row(alone, predict_run(alone))


def test_an_allocator_that_retries_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ("model=gpt_2b7", "strategy.stages=4", "gpus=16", "hardware=a100_80gb", "batch_size_per_gpu=8")
    sharded = pipelined(*run, "strategy.data_parallel=fsdp")

    def degraded(config: RunConfig, on: bool) -> TimePrediction:
        monkeypatch.setattr(step, "RETRY_CAPACITY_SHARE", 0.0 if on else 2.0)
        found = predictor.predict_pipeline(config, build_trace_key(config), timeline=False).time
        assert found is not None
        assert found.degraded is on
        return found

    fast, slow = degraded(sharded, False), degraded(sharded, True)
    # A stage is gathered once, in the format it computes with, and reduced once: at least that is taken anew.
    stage = sharded.model.num_parameters / 4 * 2 * 2
    assert slow.step_s.value - fast.step_s.value > 0.5 * stage * rank_speed.ALLOCATOR_RETRY_S_PER_BYTE
    assert slow.bubble_s - fast.bubble_s == pytest.approx(slow.step_s.value - fast.step_s.value)
    assert slow.limited_by == "allocator" != fast.limited_by
    # A rank that stands still in its stage is no bubble to the stopwatch, but those that wait for it are.
    assert slow.idle_share is not None
    assert fast.idle_share is not None
    assert 0 < slow.idle_share < fast.idle_share
    # DDP's buckets are there before a step begins.
    replicated = pipelined(*run, "strategy.data_parallel=ddp")
    assert degraded(replicated, True).step_s.value == pytest.approx(degraded(replicated, False).step_s.value)
