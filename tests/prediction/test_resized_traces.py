"""Traces of other batches are, number by number, what follows from that of one wide batch."""

from __future__ import annotations

import dataclasses

import pytest

from bench.config.run_config import RunConfig
from bench.prediction.predictor import _list_traces
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.trace import trace_cache
from bench.prediction.trace.kernels import WIDE_BATCH
from bench.prediction.trace.resized_trace import can_resize, resize_trace
from bench.prediction.trace.trace import Trace, TraceKey
from bench.prediction.trace.traced_blocks import StageTraceKey
from tests.conftest import SMALL_GPT, SMALL_LLAMA, SMALL_MOE, compose_run_config

ON_H100 = ("hardware=h100_80gb", "mode=predict", "precision=bf16", "sequence_length=64", "batch_size_per_gpu=8")
ON_8_GPUS = (*ON_H100, "gpus=8")
T5 = ("model=t5_tiny",)
RUNS = {
    "gpt": (*SMALL_GPT, *ON_8_GPUS, "strategy=fsdp"),
    "llama, autocast": (*SMALL_LLAMA, *ON_8_GPUS, "strategy=ddp"),
    "t5, checkpointed": (*T5, *ON_8_GPUS, "strategy=fsdp1", "activation_checkpointing=full"),
    "gpt in fp16, accumulated": (*SMALL_GPT, *ON_8_GPUS, "precision=fp16", "gradient_accumulation=2"),
    "eager attention": (*SMALL_GPT, *ON_8_GPUS, "model.attention=eager", "strategy=fsdp"),
    "offloaded": (*SMALL_LLAMA, *ON_8_GPUS, "strategy=fsdp", "activation_offload=true"),
    "tensor x context": (*SMALL_LLAMA, *ON_8_GPUS, "strategy=mesh", "strategy.tensor=2", "strategy.context=2"),
    "tensor x pipeline": (*SMALL_GPT, *ON_8_GPUS, "strategy=mesh", "strategy.tensor=2", "strategy.pipeline=2"),
}


def list_keys(config: RunConfig) -> list[TraceKey | StageTraceKey]:
    return list(dict.fromkeys(key for key, _ in _list_traces(config)))


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_other_batches_follow_from_a_wide_one(run: tuple[str, ...]) -> None:
    key = list_keys(compose_run_config(*run))[0]
    resized = trace_cache.record_traces(key, (2, 3))
    recorded = {size: trace_cache.record_trace(key, size) for size in (2, 3)}
    assert resized == recorded
    assert can_resize(trace_cache._get_trace_key(key))
    assert sum(len(segment.kernels) for segment in resized[2].segments) > 50


def count_recorded(monkeypatch: pytest.MonkeyPatch, run: tuple[str, ...], *batch_sizes: int) -> list[int]:
    """The batches of which traces are recorded to have some."""
    recorded = []
    record_trace = trace_cache.record_trace

    def record(key: TraceKey, batch_size: int) -> Trace:
        recorded.append(batch_size)
        return record_trace(key, batch_size)

    monkeypatch.setattr(trace_cache, "record_trace", record)
    traces = trace_cache.record_traces(build_trace_key(compose_run_config(*run)), batch_sizes)
    assert sorted(traces) == sorted(batch_sizes)
    return recorded


def test_one_trace_is_recorded_for_all_batches_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_recorded(monkeypatch, RUNS["gpt"], 1, 2, 3) == [WIDE_BATCH, 1]
    assert count_recorded(monkeypatch, RUNS["gpt"], 2) == [2]


def test_where_something_is_rounded_each_batch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for rounded in (
        (*SMALL_MOE, *ON_8_GPUS),
        (*SMALL_GPT, *ON_8_GPUS, "loss=chunked"),
        (*SMALL_GPT, *ON_8_GPUS, "precision=fp8", "precision.float8=transformer_engine"),
        (*SMALL_GPT, "hardware=cpu", "mode=predict", "gpus=2"),
    ):
        assert count_recorded(monkeypatch, rounded, 2, 3) == [2, 3], rounded


def test_a_size_of_the_model_that_has_the_prime_as_a_factor_cannot_be_told_apart() -> None:
    key = build_trace_key(compose_run_config(*RUNS["gpt"]))
    assert can_resize(key)
    wide_vocabulary = compose_run_config(*RUNS["gpt"], f"model.vocabulary_size={2 * WIDE_BATCH}")
    assert not can_resize(build_trace_key(wide_vocabulary))
    for sequence_length in (WIDE_BATCH, WIDE_BATCH + 1):  # of the latter so many tokens are predicted
        assert not can_resize(dataclasses.replace(key, sequence_length=sequence_length))
    assert not can_resize(dataclasses.replace(key, compile=True))


def test_a_trace_that_does_not_say_what_grows_is_not_resized() -> None:
    key = build_trace_key(compose_run_config(*RUNS["gpt"]))
    assert resize_trace(trace_cache.record_trace(key, 2), 3) is None
    wide_trace = trace_cache.record_trace(key, WIDE_BATCH)
    assert resize_trace(wide_trace, WIDE_BATCH) == Trace(
        [
            dataclasses.replace(segment, kernels=[kernel._replace(growing_bytes=None) for kernel in segment.kernels])
            for segment in wide_trace.segments
        ],
        wide_trace.inputs_bytes,
        wide_trace.outputs_bytes,
        wide_trace.logits_bytes,
    )
