"""Traces that one process records one after the other share a process group, and are as if each had its own."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from bench.prediction.pipeline.stages import list_stage_traces
from bench.prediction.predictor import _list_traces
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace import trace_cache
from bench.prediction.trace.fake_process_group import join_fake_process_group, keep_process_group
from bench.prediction.trace.trace import Trace
from tests.conftest import SMALL_LLAMA, SMALL_MOE, compose_run_config

ON_H100 = ("hardware=h100_80gb", "mode=predict", "precision=bf16", "sequence_length=64", "batch_size_per_gpu=8")
MESH = (*ON_H100, "gpus=8", "strategy=mesh")
LAYOUTS = {
    "tensor x context x pipeline": (
        *SMALL_LLAMA,
        *MESH,
        "strategy.tensor=2",
        "strategy.context=2",
        "strategy.pipeline=2",
    ),
    "tensor x expert": (*SMALL_MOE, *MESH, "strategy.tensor=2", "strategy.expert=2"),
    "expert x pipeline": (*SMALL_MOE, *MESH, "strategy.expert=2", "strategy.pipeline=2"),
}


def list_needed_traces(layout: tuple[str, ...]) -> list[trace_cache.KeyAndSize]:
    """Of two kinds of checkpointing."""
    configs = [compose_run_config(*layout, f"activation_checkpointing={mode}") for mode in ("none", "full")]
    return list(dict.fromkeys(trace for config in configs for trace in _list_traces(config)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS["expert x pipeline"], id="expert x pipeline"),
        *(
            pytest.param(LAYOUTS[name], id=name, marks=pytest.mark.long)
            for name in ("tensor x expert", "tensor x context x pipeline")
        ),
    ],
)
def test_traces_of_a_group_are_those_recorded_alone(layout: tuple[str, ...]) -> None:
    groups = trace_cache._group_by_shapes(list_needed_traces(layout))
    assert all(len(group) >= 2 for group in groups)
    for group in groups:
        outcomes = trace_cache._record_group(group)
        assert not dist.is_initialized()
        for key_and_size, outcome in outcomes.items():
            assert outcome == trace_cache.record_trace(*key_and_size)
        traces = [outcome for outcome in outcomes.values() if isinstance(outcome, Trace)]
        assert any(segment.collectives for trace in traces for segment in trace.segments)


def test_all_stages_of_a_model_are_one_group_and_other_splits_another() -> None:
    config = compose_run_config(*LAYOUTS["tensor x context x pipeline"])
    stages = list_stage_traces(config, build_trace_key(config))
    other = compose_run_config(*LAYOUTS["tensor x context x pipeline"], "strategy.context=1")
    other_stages = list_stage_traces(other, build_trace_key(other))
    needed = [*stages, *other_stages]
    groups = trace_cache._share_groups(trace_cache._group_by_shapes(needed), num_workers=2)
    assert [len(group) for group in groups] == [2, 2]  # two stages, each at two sizes
    assert all(len({(key.trace_key, sizes) for key, sizes in group}) == 1 for group in groups)  # type: ignore[union-attr]
    shared = trace_cache._share_groups(trace_cache._group_by_shapes(stages), num_workers=2)
    assert [len(group) for group in shared] == [1, 1]
    for some_groups, asked in ((groups, needed), (shared, stages)):
        grouped = [(key, size) for group in some_groups for key, sizes in group for size in sizes]
        assert set(grouped) == set(asked)
        assert len(grouped) == len(asked)


def test_one_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (group, *_) = trace_cache._group_by_shapes(list_needed_traces(LAYOUTS["tensor x expert"]))
    (failing_key, _), (other_key, (other_size,)) = group
    record_trace = trace_cache.record_trace

    def fail_first(key: trace_cache.TraceKey, batch_size: int) -> Trace:
        trace = record_trace(key, batch_size)
        if key == failing_key:
            raise ValueError("planted")
        return trace

    monkeypatch.setattr(trace_cache, "record_trace", fail_first)
    first, second = trace_cache._record_group(group).values()
    assert isinstance(first, ValueError)
    assert second == record_trace(other_key, other_size)


def test_a_group_is_kept_for_as_many_ranks_alone() -> None:
    with keep_process_group():
        with join_fake_process_group(4):
            pass
        assert dist.get_world_size() == 4
        with join_fake_process_group(4):
            assert dist.get_world_size() == 4
        with pytest.raises(RuntimeError, match="a process group of its own"), join_fake_process_group(2):
            pass
    assert not dist.is_initialized()
    with join_fake_process_group(2):
        assert dist.get_world_size() == 2
    assert not dist.is_initialized()
