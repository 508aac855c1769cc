"""What the paper's figures say beyond single numbers: orders and ratios that have to come out of the mechanism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.prediction.prediction import Prediction
from bench.validation.readings import build_published_config
from bench.validation.runs import FSDP_PAPER_OVERRIDES

PredictFunction = Callable[[Sequence[RunConfig]], list[Prediction]]


@dataclass(frozen=True)
class QualitativeComparison:
    """One statement, as published and as predicted, both in words."""

    statement: str
    published: str
    predicted: str


def compare_fsdp_paper(predict: PredictFunction) -> list[QualitativeComparison]:
    return [
        *_compare_strategy_order(predict),
        _compare_prefetch(predict),
        *_compare_rate_limiter(predict),
        _compare_decline(predict, "8", "5.9 % (batch 8)"),
        _compare_decline(predict, "16", "3.4 % (batch 16)"),
        _compare_allocator_cliff(predict),
        *_compare_ddp_fit(predict),
    ]


def _compare_strategy_order(predict: PredictFunction) -> list[QualitativeComparison]:
    published_speeds = {"t5_611m": (14.65, 14.61, 15.28, 15.18), "t5_2b": (26.04, 25.76, 27.70, 27.40)}
    labels = ("DDP", "full replication", "hybrid", "full shard")
    strategy_factors = (("ddp", "1"), ("fsdp1", "1"), ("fsdp1", "node"), ("fsdp1", "full"))
    comparisons = []
    for model, speeds in published_speeds.items():
        configs = [
            _build_config(
                model=model,
                precision="tf32",
                gpus="64",
                batch_size_per_gpu="8",
                sequence_length="512",
                strategy=strategy,
                activation_checkpointing="none",
                **{"strategy.sharding_factor": factor, "precision.reduce": "fp32"},
            )
            for strategy, factor in strategy_factors
        ]
        step_times_s = _predict_step_times_s(predict, configs)
        comparisons.append(
            QualitativeComparison(
                f"Figure 6(a), {model}: speed relative to DDP (assumed: TF32, 64 GPUs, batch 8, length 512)",
                _format_ratios(labels, [speed / speeds[0] for speed in speeds]),
                _format_ratios(labels, [step_times_s[0] / step_time_s for step_time_s in step_times_s]),
            )
        )
    return comparisons


def _compare_prefetch(predict: PredictFunction) -> QualitativeComparison:
    gains = []
    for gpus in ("128", "256", "512"):
        on_s, off_s = _predict_step_times_s(
            predict,
            [_build_gpt_config(gpus, "1"), _build_gpt_config(gpus, "1", **{"strategy.backward_prefetch": "none"})],
        )
        gains.append(f"{off_s / on_s - 1:+.1%}")
    return QualitativeComparison(
        "Figure 6(b): gain by backward prefetch, GPT-175B, 128, 256 and 512 GPUs",
        "+21.8%, +22.3%, +23.3%",
        ", ".join(gains),
    )


def _compare_rate_limiter(predict: PredictFunction) -> list[QualitativeComparison]:
    comparisons = []
    for nodes, published in ((2, "18.61 / 8.36 = 2.2"), (4, "15.33 / 5.02 = 3.1")):
        configs = [
            _build_t5_config(
                str(8 * nodes),
                "2",
                activation_checkpointing="none",
                **{"strategy.limit_all_gathers": limit_all_gathers},
            )
            for limit_all_gathers in ("true", "false")
        ]
        limited_prediction, unlimited_prediction = predict(configs)
        assert limited_prediction.time is not None
        assert unlimited_prediction.time is not None
        texts = [f"{unlimited_prediction.time.step_s.value / limited_prediction.time.step_s.value:.2f}"]
        for label, prediction in (("with it", limited_prediction), ("without", unlimited_prediction)):
            assert prediction.time is not None
            texts.append(
                f"{label} {prediction.memory.wanted.value / 1e9:.0f} GB wanted, retries in "
                f"{prediction.time.retry_probability:.0%} of cases"
            )
        comparisons.append(
            QualitativeComparison(
                f"Figure 6(c): time without over time with the rate limiter, T5-11B, {nodes} machines, batch 2",
                published,
                "; ".join(texts),
            )
        )
    return comparisons


def _compare_decline(predict: PredictFunction, batch: str, published: str) -> QualitativeComparison:
    few_gpus_s, many_gpus_s = _predict_step_times_s(
        predict, [_build_t5_config("8", batch), _build_t5_config("512", batch)]
    )
    return QualitativeComparison(
        "Figure 7(c): speed lost from 8 to 512 GPUs, T5-11B",
        published,
        f"{1 - few_gpus_s / many_gpus_s:.1%} (batch {batch})",
    )


def _compare_allocator_cliff(predict: PredictFunction) -> QualitativeComparison:
    configs = [_build_gpt_config("128", "2"), _build_gpt_config("192", "2")]
    texts = []
    for config, prediction in zip(configs, predict(configs), strict=True):
        capacity, time = prediction.memory.capacity, prediction.time
        assert capacity is not None
        assert time is not None
        wanted_bytes = prediction.memory.wanted.value
        texts.append(
            f"in {time.retry_probability:.0%} of cases at {config.gpus} ({wanted_bytes / 1e9:.0f} GB wanted of "
            f"{capacity / 1e9:.0f}, a step {time.step_s.low:.0f} to {time.step_s.high:.0f} s)"
        )
    return QualitativeComparison(
        "Figure 7(b): GPT-175B, batch 2: the allocator retries at 128 GPUs, not at 192",
        "90.2 TFLOPS at 128 (80 GB reserved), 186.5 at 192 (79 GB)",
        ", ".join(texts),
    )


def _compare_ddp_fit(predict: PredictFunction) -> list[QualitativeComparison]:
    comparisons = []
    for model, published in (("t5_2b", "fits"), ("t5_11b", "out of memory")):
        config = _build_config(
            model=model,
            strategy="ddp",
            gpus="64",
            batch_size_per_gpu="8",
            sequence_length="512",
            activation_checkpointing="full",
        )
        (prediction,) = predict([config])
        comparisons.append(
            QualitativeComparison(
                f"Section 5.2: {model} with DDP on 80 GB", published, prediction.memory.verdict or "unknown"
            )
        )
    return comparisons


def _build_t5_config(gpus: str, batch: str, **settings: str) -> RunConfig:
    return _build_config(
        **{"model": "t5_11b", "gpus": gpus, "batch_size_per_gpu": batch, "sequence_length": "512", **settings}
    )


def _build_gpt_config(gpus: str, batch: str, **settings: str) -> RunConfig:
    values = {
        "model": "gpt_175b",
        "model.family": "mingpt",
        "model.activation": "gelu",
        "model.dropout": "0.1",
        "sequence_length": "2048",
    }
    return _build_config(**{**values, "gpus": gpus, "batch_size_per_gpu": batch, **settings})


def _build_config(**settings: str) -> RunConfig:
    return build_published_config(tuple({**FSDP_PAPER_OVERRIDES, **settings}.items()))


def _predict_step_times_s(predict: PredictFunction, configs: Sequence[RunConfig]) -> list[float]:
    step_times_s = []
    for prediction in predict(configs):
        assert prediction.time is not None
        step_times_s.append(prediction.time.step_s.value)
    return step_times_s


def _format_ratios(names: Sequence[str], values: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in zip(names, values, strict=True))
