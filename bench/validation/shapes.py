"""What the paper's figures say beyond single numbers: orders and ratios that have to come out of the mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.simulate.memory import NEARLY_FULL
from bench.simulate.prediction import Prediction
from bench.validation.runs import FSDP_PAPER, configured, held_by_masks

Predict = Callable[[Sequence[RunConfig]], list[Prediction]]


@dataclass(frozen=True)
class Shape:
    """One statement, as published and as predicted, both in words."""

    what: str
    published: str
    predicted: str


def shapes(predict: Predict) -> list[Shape]:
    """All of them."""
    return [
        *_order_of_strategies(predict),
        _prefetch(predict),
        *_rate_limiter(predict),
        _decline(predict, "8", "5.9 % (batch 8)"),
        _decline(predict, "16", "3.4 % (batch 16)"),
        _cliff(predict),
        *_largest_ddp(predict),
    ]


def _order_of_strategies(predict: Predict) -> list[Shape]:
    published = {"t5_611m": (14.65, 14.61, 15.28, 15.18), "t5_2b": (26.04, 25.76, 27.70, 27.40)}
    names = ("DDP", "full replication", "hybrid", "full shard")
    kinds = (("ddp", "1"), ("fsdp1", "1"), ("fsdp1", "node"), ("fsdp1", "full"))
    found = []
    for model, values in published.items():
        runs = [
            _run(
                model=model,
                precision="tf32",
                gpus="64",
                batch_size_per_gpu="8",
                sequence_length="512",
                strategy=strategy,
                activation_checkpointing="none",
                **{"strategy.sharding_factor": factor, "precision.reduce": "fp32"},
            )
            for strategy, factor in kinds
        ]
        seconds = _seconds(predict, runs)
        found.append(
            Shape(
                f"Figure 6(a), {model}: speed relative to DDP (assumed: TF32, 64 GPUs, batch 8, length 512)",
                _ratios(names, [value / values[0] for value in values]),
                _ratios(names, [seconds[0] / each for each in seconds]),
            )
        )
    return found


def _prefetch(predict: Predict) -> Shape:
    gains = []
    for gpus in ("128", "256", "512"):
        on, off = _seconds(predict, [_gpt(gpus, "1"), _gpt(gpus, "1", **{"strategy.backward_prefetch": "none"})])
        gains.append(f"{off / on - 1:+.1%}")
    return Shape(
        "Figure 6(b): gain by backward prefetch, GPT-175B, 128, 256 and 512 GPUs",
        "+21.8%, +22.3%, +23.3%",
        ", ".join(gains),
    )


def _rate_limiter(predict: Predict) -> list[Shape]:
    found = []
    for machines, published in ((2, "18.61 / 8.36 = 2.2"), (4, "15.33 / 5.02 = 3.1")):
        runs = [
            _t5(str(8 * machines), "2", activation_checkpointing="none", **{"strategy.limit_all_gathers": limited})
            for limited in ("true", "false")
        ]
        on, off = predict(runs)
        assert on.time is not None
        assert off.time is not None
        said = [f"{off.time.step_s.value / on.time.step_s.value:.2f}"]
        for words, each in (("with it", on), ("without", off)):
            assert each.time is not None
            degraded = ", degraded" if each.time.degraded else ""
            said.append(f"{words} {each.memory.reserved.value / 1e9:.0f} GB reserved{degraded}")
        found.append(
            Shape(
                f"Figure 6(c): time without over time with the rate limiter, T5-11B, {machines} machines, batch 2",
                published,
                "; ".join(said),
            )
        )
    return found


def _decline(predict: Predict, batch: str, published: str) -> Shape:
    few, many = _seconds(predict, [_t5("8", batch), _t5("512", batch)])
    return Shape(
        "Figure 7(c): speed lost from 8 to 512 GPUs, T5-11B", published, f"{1 - few / many:.1%} (batch {batch})"
    )


def _cliff(predict: Predict) -> Shape:
    runs = [_gpt("128", "2"), _gpt("192", "2")]
    said = []
    for run, prediction in zip(runs, predict(runs), strict=True):
        reserved, capacity = prediction.memory.reserved.value, prediction.memory.capacity
        assert capacity is not None
        # What is held throughout is reserved, too, with as much lost between blocks as of all the rest.
        reserved *= 1 + held_by_masks(run) / prediction.memory.active.value
        word = "degraded" if reserved > NEARLY_FULL * capacity else "not degraded"
        said.append(f"{word} at {run.gpus} ({reserved / 1e9:.0f} of {capacity / 1e9:.0f} GB reserved)")
    return Shape(
        "Figure 7(b): GPT-175B, batch 2: the allocator retries at 128 GPUs, not at 192",
        "90.2 TFLOPS at 128 (80 GB reserved), 186.5 at 192 (79 GB)",
        ", ".join(said),
    )


def _largest_ddp(predict: Predict) -> list[Shape]:
    found = []
    for model, published in (("t5_2b", "fits"), ("t5_11b", "out of memory")):
        run = _run(
            model=model,
            strategy="ddp",
            gpus="64",
            batch_size_per_gpu="8",
            sequence_length="512",
            activation_checkpointing="full",
        )
        (prediction,) = predict([run])
        found.append(
            Shape(f"Section 5.2: {model} with DDP on 80 GB", published, prediction.memory.verdict or "unknown")
        )
    return found


def _t5(gpus: str, batch: str, **settings: str) -> RunConfig:
    return _run(**{"model": "t5_11b", "gpus": gpus, "batch_size_per_gpu": batch, "sequence_length": "512", **settings})


def _gpt(gpus: str, batch: str, **settings: str) -> RunConfig:
    values = {
        "model": "gpt_175b",
        "model.family": "mingpt",
        "model.activation": "gelu",
        "model.dropout": "0.1",
        "sequence_length": "2048",
    }
    return _run(**{**values, "gpus": gpus, "batch_size_per_gpu": batch, **settings})


def _run(**settings: str) -> RunConfig:
    return configured(tuple({**FSDP_PAPER, **settings}.items()))


def _seconds(predict: Predict, runs: Sequence[RunConfig]) -> list[float]:
    found = []
    for prediction in predict(runs):
        assert prediction.time is not None
        found.append(prediction.time.step_s.value)
    return found


def _ratios(names: Sequence[str], values: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in zip(names, values, strict=True))
