"""A fast wrong number is a bug: every strategy and knob trains like one process. Real gloo process groups."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from bench.core.errors import ImpossibleError
from tests.conftest import SMALL_GPT, SMALL_T5

pytestmark = pytest.mark.slow

Execute = Callable[..., list[dict[str, Any]]]

# Two observed steps, two of warm-up and one timed: five losses.
STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")

STRATEGIES = [("ddp", 1), *((name, factor) for name in ("fsdp", "fsdp1") for factor in (1, 2, 4))]


def losses(record: dict[str, Any]) -> list[float]:
    assert record["status"] == "ok", record["error"]
    assert len(record["losses"]) == 5
    return record["losses"]


@pytest.mark.long
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT], ids=["t5", "gpt"])
def test_every_strategy_and_factor_has_the_losses_of_one_process(execute: Execute, model: tuple[str, ...]) -> None:
    four = [
        (*model, *STEPS, f"strategy={name}", f"strategy.sharding_factor={factor}", "gpus=4", "batch_size_per_gpu=2")
        for name, factor in STRATEGIES
    ]
    single, *sharded = execute((*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"), *four)
    runs = dict(zip(STRATEGIES, sharded, strict=True))
    for key, record in runs.items():
        assert losses(record) == pytest.approx(losses(single), rel=1e-5), key
    # Losses that fall by more than rounding: the optimizer really stepped.
    assert losses(single)[-1] < losses(single)[0] - 0.01
    # The more ranks share parameters, gradients and optimizer state, the less memory each takes.
    for name in ("fsdp", "fsdp1"):
        peaks = [runs[name, factor]["peak_allocated_bytes"] for factor in (4, 2, 1)]
        assert peaks == sorted(peaks)
        assert peaks[0] < 0.8 * peaks[-1]
    # Every rank of a run allocates the same, but for the padding of its shards.
    for key, record in runs.items():
        peaks = [rank["peak_allocated_bytes"] for rank in record["ranks"]]
        assert max(peaks) - min(peaks) < 256, key
    assert {key: record["effective_strategy"] for key, record in runs.items()} == {
        ("ddp", 1): "ddp",
        ("fsdp", 1): "fsdp/full_replication",
        ("fsdp", 2): "fsdp/hybrid_shard",
        ("fsdp", 4): "fsdp/full_shard",
        ("fsdp1", 1): "fsdp1/no_shard",
        ("fsdp1", 2): "fsdp1/hybrid_shard",
        ("fsdp1", 4): "fsdp1/full_shard",
    }


KNOBS = [
    ("strategy=fsdp", "strategy.reshard_after_forward=false"),
    ("strategy=fsdp", "strategy.forward_prefetch=true", "strategy.blocks_per_unit=2"),
    ("strategy=fsdp", "strategy.backward_prefetch=false", "activation_checkpointing=selective"),
    ("strategy=fsdp1", "strategy.reshard_after_forward=false", "strategy.limit_all_gathers=false"),
    ("strategy=fsdp1", "strategy.backward_prefetch=none", "strategy.blocks_per_unit=2"),
    ("strategy=fsdp1", "strategy.sharding_factor=1", "activation_checkpointing=full"),
    (
        "strategy=ddp",
        "strategy.bucket_cap_mb=1",
        "strategy.gradient_as_bucket_view=false",
        "strategy.static_graph=false",
    ),
    ("strategy=ddp", "activation_checkpointing=full"),
    ("strategy=fsdp", "optimizer.implementation=foreach", "model.attention=eager"),
]
ACCUMULATION = [
    ("strategy=ddp",),
    ("strategy=ddp", "gradient_accumulation_sync=true"),
    ("strategy=fsdp",),
    ("strategy=fsdp1", "gradient_accumulation_sync=true"),
]


@pytest.mark.long
def test_no_knob_changes_what_is_computed(execute: Execute) -> None:
    two = (*SMALL_T5, *STEPS, "gpus=2")
    plain, *others = execute(
        (*two, "strategy=ddp"),
        *((*two, *knobs) for knobs in KNOBS),
        *((*two, *knobs, "gradient_accumulation=2", "batch_size_per_gpu=2") for knobs in ACCUMULATION),
    )
    for knobs, record in zip(KNOBS, others[: len(KNOBS)], strict=True):
        assert losses(record) == pytest.approx(losses(plain), rel=1e-5), knobs
    # Two micro-batches are another draw of the data: equal among themselves.
    accumulated = others[len(KNOBS) :]
    for knobs, record in zip(ACCUMULATION, accumulated, strict=True):
        assert losses(record) == pytest.approx(losses(accumulated[0]), rel=1e-5), knobs
    assert losses(accumulated[0]) != losses(plain)
    assert accumulated[0]["effective"]["static_graph"] is False
    assert accumulated[1]["effective"]["static_graph"] is True


@pytest.mark.long
def test_narrow_formats_train_close_to_fp32(execute: Execute) -> None:
    keys = [
        (name, precision) for name in ("ddp", "fsdp", "fsdp1") for precision in ("fp32", "bf16", "fp16", "bf16_pure")
    ]
    two = (*SMALL_T5, *STEPS, "gpus=2")
    records = execute(*((*two, f"strategy={name}", f"precision={precision}") for name, precision in keys))
    runs = dict(zip(keys, records, strict=True))
    for (name, precision), record in runs.items():
        expected = losses(runs[name, "fp32"])
        assert losses(record) == pytest.approx(expected, rel=0.02), (name, precision)
        if precision != "fp32":
            assert losses(record) != expected
        assert record["skipped_steps"] == 0
    for name in ("ddp", "fsdp", "fsdp1"):
        mixed = "autocast" if name == "ddp" else "fsdp policy"
        assert [runs[name, precision]["mixed_precision"] for precision in ("fp32", "bf16", "bf16_pure")] == [
            "none",
            mixed,
            "none",
        ]
        assert runs[name, "bf16_pure"]["peak_allocated_bytes"] < 0.75 * runs[name, "fp32"]["peak_allocated_bytes"]


@pytest.mark.long
def test_compiled_blocks_compute_the_same(execute: Execute) -> None:
    one = (*SMALL_GPT, "model.num_layers=1", *STEPS, "gpus=2", "strategy=fsdp")
    compiled = (*one, "compile=true", "activation_checkpointing=full")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        with pytest.raises(ImpossibleError, match="compile=true on a CPU needs"):
            execute(compiled)
        return
    plain, faster = execute(one, compiled)
    assert losses(faster) == pytest.approx(losses(plain), rel=1e-4)
    assert (plain["compile"], faster["compile"]) == (False, True)
    assert faster["setup_s"] > plain["setup_s"]
