"""Tensor parallelism whose exchanges go on beside products, as TransformerEngine's kernels have it."""

from __future__ import annotations

import pytest

from bench.core.errors import UsageError
from bench.prediction.predictor import predict_run
from bench.prediction.trace.kernels import MATMUL, MEMORY_BOUND, KernelRecord
from bench.prediction.trace.overlapped_exchanges import overlap_exchanges
from bench.prediction.trace.trace import LOSS_PLACE, BlockPlace, CollectiveEvent, TraceSegment
from bench.strategies.step_plan import EXPERT_GROUP, TENSOR_GROUP
from tests.conftest import compose_run_config

PRODUCT = KernelRecord("mm", MATMUL, 1, (1, 8, 8, 8), 1024, 384)
SUM = KernelRecord("add", MEMORY_BOUND, 1, (), 0, 384)


def overlap(
    phase: str, kernels: list[KernelRecord], event: CollectiveEvent, place: BlockPlace = (0, 0)
) -> tuple[int, int | None]:
    """From and until which kernel an exchange goes on."""
    segment = TraceSegment(phase, 0, place, kernels=kernels, collectives=[event])
    overlap_exchanges([segment])
    (changed,) = segment.collectives
    return changed.kernel, changed.waited_kernel


def test_what_a_product_needs_comes_while_it_is_computed() -> None:
    kernels = [SUM, PRODUCT, PRODUCT, PRODUCT, SUM, PRODUCT]
    assert overlap("forward", kernels, CollectiveEvent(1, "all-gather", 64)) == (1, 4)


def test_what_a_product_makes_goes_while_it_is_computed() -> None:
    assert overlap("forward", [SUM, PRODUCT, SUM], CollectiveEvent(2, "reduce-scatter", 64)) == (1, 2)


def test_backward_one_of_a_layer_s_two_products_goes_on_meanwhile() -> None:
    kernels = [PRODUCT, PRODUCT, SUM, PRODUCT, PRODUCT, PRODUCT, PRODUCT, SUM]
    assert overlap("backward", kernels, CollectiveEvent(0, "all-gather", 64)) == (0, 1)
    assert overlap("backward", kernels, CollectiveEvent(8, "reduce-scatter", 64)) == (5, 8)


def test_where_no_product_is_next_to_it_an_exchange_is_waited_for() -> None:
    for event in (CollectiveEvent(0, "all-gather", 64), CollectiveEvent(1, "reduce-scatter", 64)):
        first, until = overlap("forward", [SUM, SUM], event)
        assert first == until == event.kernel


@pytest.mark.parametrize(
    ("event", "place"),
    [
        (CollectiveEvent(0, "all-gather", 64, EXPERT_GROUP), (0, 0)),
        (CollectiveEvent(0, "all-reduce", 64), (0, 0)),
        (CollectiveEvent(0, "all-gather", 64), None),
        (CollectiveEvent(0, "all-gather", 64), LOSS_PLACE),
        (CollectiveEvent(0, "all-gather", 64, TENSOR_GROUP, 2), (0, 0)),
    ],
)
def test_other_exchanges_stay_as_they_are(event: CollectiveEvent, place: BlockPlace) -> None:
    assert overlap("forward", [PRODUCT, PRODUCT], event, place) == (event.kernel, event.waited_kernel)


RUN = (
    *("mode=predict", "hardware=h100_80gb", "model=llama3_8b", "model.num_layers=8", "gpus=8", "batch_size_per_gpu=1"),
    *("sequence_length=4096", "precision=bf16", "strategy=mesh", "strategy.tensor=8"),
)
OVERLAPPED = ("strategy.async_tensor_parallel=true", "strategy.overlap_kernels=transformer_engine")


@pytest.mark.parametrize("pipelined", [(), ("gpus=16", "strategy.pipeline=2", "batch_size_per_gpu=2")])
def test_exchanges_beside_products_cost_less_and_hold_as_much(pipelined: tuple[str, ...]) -> None:
    plain, overlapped = (predict_run(compose_run_config(*RUN, *pipelined, *extra)) for extra in ((), OVERLAPPED))
    assert plain.time is not None
    assert overlapped.time is not None
    assert overlapped.memory.allocated == plain.memory.allocated
    assert overlapped.time.communication_s <= plain.time.communication_s
    assert overlapped.time.exposed_communication_s < 0.8 * plain.time.exposed_communication_s
    assert overlapped.time.compute_s == pytest.approx(plain.time.compute_s, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("mode=rehearse", *OVERLAPPED), "since no run has Megatron's kernels: choose torch, or mode=predict"),
        ((*OVERLAPPED, "strategy.sequence_parallel=false"), "choose torch, or strategy.sequence_parallel=true"),
        ((*OVERLAPPED, "strategy.overlap_kernels=cutlass"), "choose torch, transformer_engine"),
    ],
)
def test_kernels_that_are_not_there_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compose_run_config(*RUN, *overrides)
