"""Tokens that go to experts beside another micro-batch's computation, or to every node once."""

from __future__ import annotations

import dataclasses

import pytest

from bench.core.errors import UsageError
from bench.prediction.cost.collectives import ALL_TO_ALL, CollectiveGroup, compute_collective_seconds
from bench.prediction.cost.rank_groups import list_layer_groups
from bench.prediction.pipeline.rank_timelines import StageSeconds, list_hidden_seconds, simulate_timetable
from bench.prediction.prediction import TimePrediction
from bench.prediction.predictor import predict_run
from bench.strategies.pipeline.schedule import BACKWARD, FORWARD, ONE_F_ONE_B, PipelineAction, Timetable
from bench.strategies.step_plan import EXPERT_GROUP
from tests.conftest import compose_run_config

RUN = (
    *("mode=predict", "hardware=h100_80gb", "model=mixtral_8x7b", "model.num_layers=8", "gpus=32", "compile=false"),
    *("sequence_length=4096", "precision=bf16", "strategy=mesh", "strategy.pipeline=2", "strategy.expert=8"),
    *("strategy.micro_batches=8", "batch_size_per_gpu=4", "gpus_per_node=4", "activation_checkpointing=full"),
)
OVERLAPPED, DEEPEP = "strategy.overlap_experts=true", "strategy.token_dispatcher=deepep"


def predict_time(*overrides: str) -> TimePrediction:
    time = predict_run(compose_run_config(*RUN, *overrides)).time
    assert time is not None
    return time


def hide(forward: StageSeconds, backward: StageSeconds, overlap_loss: float = 0.0) -> list[float]:
    actions = [PipelineAction(FORWARD, 0, 1), PipelineAction(BACKWARD, 1, 0)]
    return list_hidden_seconds(actions, [forward, backward], overlap_loss)


def test_tokens_go_while_the_other_micro_batch_computes() -> None:
    stage = StageSeconds(5.0, 9.0, forward_tokens=2.0, backward_tokens=2.0)
    assert hide(stage, stage) == [2.0, 2.0]
    assert hide(stage, stage, 0.25) == [1.5, 1.5]


def test_what_takes_longer_than_the_other_computes_is_waited_for() -> None:
    sending, computing = StageSeconds(20.0, 9.0, forward_tokens=19.0), StageSeconds(1.0, 8.0)
    assert hide(sending, computing) == [8.0, 0.0]
    # Both send all the time: together they take what they send.
    both = StageSeconds(10.0, 10.0, forward_tokens=9.0, backward_tokens=8.0)
    assert 20.0 - sum(hide(both, both)) == 9.0 + 8.0


def test_passes_that_are_alone_hide_nothing() -> None:
    timetable = Timetable(ONE_F_ONE_B, 2, 1, 4)
    stages = [StageSeconds(2.0, 3.0, forward_tokens=1.0, backward_tokens=1.0)] * 2
    actions = timetable.list_actions(0)
    hidden = list_hidden_seconds(actions, stages, 0.0)
    assert [action.kind for action, seconds in zip(actions, hidden, strict=True) if not seconds] == [FORWARD, BACKWARD]
    plain, overlapped = (
        simulate_timetable(timetable, stages, [0.0], hidden_seconds) for hidden_seconds in (None, [hidden, hidden])
    )
    assert plain[0].end_s - plain[0].busy_s == pytest.approx(overlapped[0].end_s - overlapped[0].busy_s, abs=2.0)
    assert plain[0].busy_s - overlapped[0].busy_s == sum(hidden) == 6.0


def test_overlapped_tokens_are_sent_as_long_and_waited_for_less() -> None:
    plain, overlapped = predict_time(), predict_time(OVERLAPPED)
    assert overlapped.communication_s == plain.communication_s
    assert overlapped.compute_s == plain.compute_s
    saved_s = plain.step_s.value - overlapped.step_s.value
    assert saved_s > 0.1 * plain.step_s.value
    assert plain.exposed_communication_s - overlapped.exposed_communication_s == pytest.approx(saved_s, rel=0.1)


def test_rows_say_how_tokens_are_sent() -> None:
    config = compose_run_config(*RUN, OVERLAPPED, DEEPEP)
    plain = compose_run_config(*RUN).strategy.describe_effective_strategy(32)
    assert config.strategy.describe_effective_strategy(32) == f"{plain}+overlapped_experts+deepep"


def test_a_token_goes_to_a_node_once() -> None:
    groups = dict(list_layer_groups(compose_run_config(*RUN, DEEPEP)))
    # Two of eight experts, four of which are on each of two nodes: both on the same one for 3 of 7 tokens.
    assert groups[EXPERT_GROUP].merged_share == pytest.approx(2 * (1 - 6 / 28) / 2)
    assert dict(list_layer_groups(compose_run_config(*RUN)))[EXPERT_GROUP].merged_share is None
    in_node = compose_run_config(*RUN, DEEPEP, "gpus_per_node=8")
    assert dict(list_layer_groups(in_node))[EXPERT_GROUP].merged_share is None
    assert predict_time(DEEPEP).communication_s < 0.9 * predict_time().communication_s


def test_what_is_merged_goes_over_the_links_within_a_node() -> None:
    speeds = compose_run_config(*RUN).hardware.speeds
    assert speeds is not None
    group = CollectiveGroup(32, 8)
    plain_s = compute_collective_seconds(ALL_TO_ALL, 2.0**30, group, speeds.links)
    merged = dataclasses.replace(group, merged_share=0.5)
    assert compute_collective_seconds(ALL_TO_ALL, 2.0**30, merged, speeds.links) == pytest.approx(plain_s / 2, rel=0.01)
    # However little crosses, all of it has its way to go inside.
    little = dataclasses.replace(group, merged_share=1e-6)
    inside_s = compute_collective_seconds(ALL_TO_ALL, 2.0**30, CollectiveGroup(8, 8), speeds.links)
    assert compute_collective_seconds(ALL_TO_ALL, 2.0**30, little, speeds.links) == pytest.approx(inside_s, rel=0.1)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("mode=rehearse", OVERLAPPED), "no run has Megatron's schedule: choose false, or mode=predict"),
        (("mode=rehearse", DEEPEP), "no run has Megatron's dispatchers: choose all_to_all, or mode=predict"),
        (("strategy.expert=1", OVERLAPPED), "choose false, or strategy.expert of 2 or more"),
        (("strategy.expert=1", DEEPEP), "choose all_to_all, or strategy.expert of 2 or more"),
        (("strategy.schedule=gpipe", OVERLAPPED), "choose false, or one of 1f1b, interleaved_1f1b, dualpipev"),
        (("strategy.token_dispatcher=nccl",), "choose all_to_all, deepep"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compose_run_config(*RUN, *overrides)
