"""What others published of ZeRO and of offloading, as far as single numbers cannot be compared: orders and ratios.

Nothing was tuned on these rows, but for one assumption that says so in its line.
"""

from __future__ import annotations

import re

from bench.config.run_config import RunConfig
from bench.prediction.prediction import Prediction
from bench.validation.runs import FSDP_PAPER_OVERRIDES, SPEED, build_published_config, load_cases, load_published_rows
from bench.validation.shapes import PredictFunction, QualitativeComparison
from bench.validation.statistics import compute_tflops
from bench.validation.zero_paper import compare_zero_paper

ONE_ADAPTER_OVERRIDES = {"hardware.speeds.links.node_gb_s": "25", "hardware.speeds.links.adapters": "1"}
"""One adapter of 200 Gb/s of the eight that a node of Megatron's cluster has."""

BIGSCIENCE_OVERRIDES = {
    "model": "gpt_13b",
    "model.num_layers": "6",
    "model.hidden_size": "5120",
    "model.num_heads": "40",
    "model.vocabulary_size": "2048",
    "hardware": "a100_80gb",
    "hardware.speeds.links.node_gb_s": "25",
    "hardware.speeds.links.adapters": "1",
    "precision": "fp16",
    "gpus": "4",
    "gpus_per_node": "1",
    "batch_size_per_gpu": "2",
    "gradient_accumulation": "256",
    "sequence_length": "2048",
    "activation_checkpointing": "full",
}
"""One of the 96 parts that tensor and pipeline parallelism make of a GPT of 181 billion parameters: a GPT of as many as
one GPU had, 1.9 billion, in 4 replicas on 4 machines, 2048 sequences a step. GPU, length and network are assumed."""

TENSOR_PARALLEL_MODELS = {1: (2304, 24, 24, 16), 2: (3072, 32, 30, 16), 4: (4096, 32, 36, 16), 8: (6144, 48, 40, 32)}
"""Megatron's Table 1 (https://arxiv.org/abs/2104.04473) as far as it divides layers alone: by degree of tensor
parallelism width, heads, layers, and sequences of a step for each of its 32 groups."""

ASSUMED_MICRO_BATCH = 8
"""Sequences that a group of Megatron's Table 1 takes at a time: assumed."""

MEGATRON_OVERRIDES = {
    "model": "gpt_2b7",
    "model.vocabulary_size": "51200",
    "model.block_size": "2048",
    "hardware": "a100_80gb",
    "precision": "bf16",
    "strategy": "ddp",
    "sequence_length": "2048",
    "activation_checkpointing": "full",
}
"""Its vocabulary and length. It computed in fp16, which tensor parallelism does not here; bf16 is as fast."""

TENSOR_PARALLEL_OVERRIDES = {
    "strategy": "tensor_parallel",
    "strategy.data_parallel": "ddp",
    "strategy.sequence_parallel": "false",
}
"""Before sequence parallelism was thought of."""

OFFLOADING_OVERRIDES = {
    **FSDP_PAPER_OVERRIDES,
    "model": "gpt_175b",
    "model.family": "mingpt",
    "model.activation": "gelu",
    "model.dropout": "0.1",
    "hardware": "a100_80gb",
    "hardware.speeds.links.node_gb_s": "50",
    "hardware.speeds.links.adapters": "4",
    "precision": "fp16",
    "precision.reduce": "fp16",
    "optimizer": "sgd",
    "optimizer.keep_gradients": "false",
    "strategy.cpu_offload": "true",
    "gpus": "128",
    "sequence_length": "512",
    "batch_size_per_gpu": "20",
}
"""PyTorch's introduction of FSDP: 128 A100 of 40 GB, 400 Gb/s between nodes, SGD. Its batch of 20 is taken to be a
GPU's, and does not fit the 40 GB then: the speed is predicted on GPUs of 80 GB."""


def compare_strategies(predict: PredictFunction) -> list[QualitativeComparison]:
    """All of them."""
    return [
        _compare_tensor_parallel(predict),
        _compare_megatron_zero_3(predict),
        _compare_bigscience_zero_1(predict),
        *compare_zero_paper(predict),
        _compare_offloading(predict),
    ]


def _compare_tensor_parallel(predict: PredictFunction) -> QualitativeComparison:
    configs = []
    for degree, (width, heads, layers, sequences) in TENSOR_PARALLEL_MODELS.items():
        model_overrides = {"model.hidden_size": width, "model.num_heads": heads, "model.num_layers": layers}
        batch_overrides = {
            "batch_size_per_gpu": ASSUMED_MICRO_BATCH // degree,
            "gradient_accumulation": sequences // ASSUMED_MICRO_BATCH,
        }
        overrides = {
            name: str(value) for name, value in {**model_overrides, **batch_overrides, "gpus": 32 * degree}.items()
        }
        configs.append(
            _build_config(
                MEGATRON_OVERRIDES
                | overrides
                | (TENSOR_PARALLEL_OVERRIDES | {"strategy.degree": str(degree)} if degree > 1 else {})
            )
        )
    predicted_speeds = [
        compute_tflops(config, prediction) for config, prediction in zip(configs, predict(configs), strict=True)
    ]
    speeds_by_sharding = {
        row["sharding"]: float(row["value"]) for row in load_published_rows("megatron_a100_readme", "tflops_per_gpu")
    }
    published_speeds = [speeds_by_sharding[f"model-parallel {degree}"] for degree in TENSOR_PARALLEL_MODELS]
    return QualitativeComparison(
        f"Megatron's Table 1: {SPEED} at a tensor parallel degree of 1, 2, 4 and 8 (no pipeline; micro-batches of "
        f"{ASSUMED_MICRO_BATCH} assumed)",
        ", ".join(f"{speed:.0f}" for speed in published_speeds),
        ", ".join(f"{speed:.0f}" for speed in predicted_speeds),
    )


def _compare_megatron_zero_3(predict: PredictFunction) -> QualitativeComparison:
    zero_3_cases = [case for case in load_cases() if case.source == "megatron_sc21" and "174.6B" in case.label]
    texts = []
    for label, extra_overrides in (("as FSDP1", {}), ("with one of 8 adapters", ONE_ADAPTER_OVERRIDES)):
        configs = [
            build_published_config(tuple({**dict(case.settings), **extra_overrides}.items())) for case in zero_3_cases
        ]
        predictions = predict(configs)
        speeds = [compute_tflops(config, prediction) for config, prediction in zip(configs, predictions, strict=True)]
        texts.append(f"{label} {', '.join(f'{speed:.0f}' for speed in speeds)}")
    return QualitativeComparison(
        f"Megatron's Table 2: {SPEED} of DeepSpeed's ZeRO-3 of 2021, GPT-175B on 384, 768 and 1536 GPUs (one adapter: "
        "chosen with these rows in sight)",
        ", ".join(f"{case.published_value:.0f}" for case in zero_3_cases),
        "; ".join(texts),
    )


def _compare_bigscience_zero_1(predict: PredictFunction) -> QualitativeComparison:
    ddp_prediction, zero_1_prediction = predict(
        [_build_config({**BIGSCIENCE_OVERRIDES, "strategy": name}) for name in ("ddp", "zero1")]
    )
    saved_bytes = ddp_prediction.memory.allocated.value - zero_1_prediction.memory.allocated.value
    notes_by_strategy = {
        row["sharding"][:6]: row["note"] for row in load_published_rows("bigscience_zero1", "tflops_per_gpu")
    }
    step_times, peaks_gb = (
        {name: re.findall(rf"([\d.]+) {unit}", note)[0] for name, note in notes_by_strategy.items()}
        for unit in ("s/it", "GB")
    )
    time_ratio = float(step_times["ZeRO-1"]) / float(step_times["ZeRO-0"])
    saved_gb = float(peaks_gb["ZeRO-0"]) - float(peaks_gb["ZeRO-1"])
    return QualitativeComparison(
        "BigScience: ZeRO-1 against ZeRO-0, 4 replicas of 96 GPUs (predicted for one GPU's part): time, memory saved",
        f"{step_times['ZeRO-1']} / {step_times['ZeRO-0']} s = {time_ratio:.2f}; "
        f"{peaks_gb['ZeRO-0']} - {peaks_gb['ZeRO-1']} = {saved_gb:.0f} GB",
        f"{_get_step_time_s(zero_1_prediction) / _get_step_time_s(ddp_prediction):.2f}; {saved_bytes / 1e9:.0f} GB",
    )


def _compare_offloading(predict: PredictFunction) -> QualitativeComparison:
    configs = [
        _build_config({**OFFLOADING_OVERRIDES, "strategy.cpu_offload": cpu_offload})
        for cpu_offload in ("true", "false")
    ]
    offloaded_tflops, plain_tflops = (
        compute_tflops(config, prediction) for config, prediction in zip(configs, predict(configs), strict=True)
    )
    published_row = next(
        row for row in load_published_rows("pytorch_blog_fsdp_intro", "tflops_per_gpu") if row["parameters"] == "175B"
    )
    return QualitativeComparison(
        f"FSDP's introduction: {SPEED} of GPT-175B, parameters offloaded, 128 A100 (of 80 GB, predicted)",
        published_row["value"],
        f"{offloaded_tflops:.0f} (not offloaded {plain_tflops:.0f})",
    )


def _build_config(settings: dict[str, str]) -> RunConfig:
    return build_published_config(tuple(settings.items()))


def _get_step_time_s(prediction: Prediction) -> float:
    assert prediction.time is not None
    return prediction.time.step_s.value
