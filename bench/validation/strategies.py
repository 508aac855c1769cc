"""What others published of ZeRO and of offloading, as far as single numbers cannot be compared: orders and ratios.

Nothing was tuned on these rows, but for one assumption that says so in its line.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from bench.config.run_config import RunConfig
from bench.prediction.prediction import DOES_NOT_FIT, FITS, Prediction
from bench.validation.readings import build_published_config
from bench.validation.runs import FSDP_PAPER_OVERRIDES, TFLOPS, compute_tflops, load_published_rows
from bench.validation.shapes import PredictFunction, QualitativeComparison

ONE_ADAPTER_OVERRIDES = {"hardware.speeds.links.node_gb_s": "25", "hardware.speeds.links.adapters": "1"}
"""One adapter of 200 Gb/s of the eight that a node of Megatron's cluster has."""

MEGATRON_ZERO_3_OVERRIDES = {
    "model": "gpt_175b",
    "model.vocabulary_size": "51200",
    "model.attention": "eager",
    "hardware": "a100_80gb",
    "hardware.speeds.links.node_gb_s": "200",
    "precision": "fp16",
    "precision.reduce": "fp16",
    "strategy": "fsdp1",
    "gpus_per_node": "8",
    "sequence_length": "2048",
    "activation_checkpointing": "full",
}
"""DeepSpeed's ZeRO-3 of 2021 as FSDP1."""

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
        f"Megatron's Table 1: {TFLOPS} at a tensor parallel degree of 1, 2, 4 and 8 (no pipeline; micro-batches of "
        f"{ASSUMED_MICRO_BATCH} assumed)",
        ", ".join(f"{speed:.0f}" for speed in published_speeds),
        ", ".join(f"{speed:.0f}" for speed in predicted_speeds),
    )


def _compare_megatron_zero_3(predict: PredictFunction) -> QualitativeComparison:
    rows = [
        row
        for row in load_published_rows("megatron_sc21", "tflops_per_gpu")
        if row["model"] == "GPT-174.6B" and row["strategy"] == "DeepSpeed ZeRO-3"
    ]
    texts = []
    for label, extra_overrides in (("as FSDP1", {}), ("with one of 8 adapters", ONE_ADAPTER_OVERRIDES)):
        configs = [
            _build_config(
                {
                    **MEGATRON_ZERO_3_OVERRIDES,
                    **extra_overrides,
                    "gpus": row["gpu_count"],
                    "batch_size_per_gpu": row["batch_size_per_gpu"],
                }
            )
            for row in rows
        ]
        predictions = predict(configs)
        speeds = [compute_tflops(config, prediction) for config, prediction in zip(configs, predictions, strict=True)]
        texts.append(f"{label} {', '.join(f'{speed:.0f}' for speed in speeds)}")
    return QualitativeComparison(
        f"Megatron's Table 2: {TFLOPS} of DeepSpeed's ZeRO-3 of 2021, GPT-175B on 384, 768 and 1536 GPUs (one adapter: "
        "chosen with these rows in sight)",
        ", ".join(f"{float(row['value']):.0f}" for row in rows),
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
        f"FSDP's introduction: {TFLOPS} of GPT-175B, parameters offloaded, 128 A100 (of 80 GB, predicted)",
        published_row["value"],
        f"{offloaded_tflops:.0f} (not offloaded {plain_tflops:.0f})",
    )


def _build_config(settings: dict[str, str]) -> RunConfig:
    return build_published_config(tuple(settings.items()))


def _get_step_time_s(prediction: Prediction) -> float:
    assert prediction.time is not None
    return prediction.time.step_s.value


# --- The ZeRO paper (https://arxiv.org/abs/1910.02054): the largest models that fit, and ZeRO-2's speed.

CLUSTER_OVERRIDES = {
    "hardware": "v100_32gb",
    "hardware.speeds.links.node_gb_s": "100",
    "hardware.speeds.links.adapters": "8",
    "gpus": "128",
    "gpus_per_node": "16",
    "precision": "fp16",
    "model.block_size": "1024",
    "sequence_length": "1024",
    "batch_size_per_gpu": "4",
    "activation_checkpointing": "full",
}
"""Its DGX-2 with 800 Gb/s between nodes. Batches are not in its text: a batch of 4 is assumed."""

TWO_BYTE_OVERRIDES = {
    "precision": "bf16_pure",
    "+hardware.peak_tflops.bf16": "125",
    "+hardware.speeds.matmul.efficiency.bf16": "0.74",
}
"""Parameters and gradients of two bytes, as its fp16 has; the suite's fp16 keeps both in fp32. V100 does not compute in
bf16: the speed of fp16 stands in, which memory does not depend on. Optimizer state is in bf16 too, 4 bytes for its 12,
all of it divided by 64."""

LARGEST_MODEL_RUNS = {
    "measured, baseline": {"as DDP": {"model": "gpt_1b3", "strategy": "ddp"}},
    "measured, ZeRO-1 (P_os)": {
        "as zero1 with parameters and gradients of 2 bytes": {
            "model": "gpt_6b7",
            "strategy": "zero1",
            **TWO_BYTE_OVERRIDES,
        },
        "of 4, the suite's fp16": {"model": "gpt_6b7", "strategy": "zero1"},
    },
}
"""By what Table 2 calls it: runs whose largest model is predicted. Widths, which it does not state, are those of models
of GPT-3 of about the size; the number of layers is what is looked for."""

CANDIDATE_LAYERS = range(4, 49)


def compare_zero_paper(predict: PredictFunction) -> list[QualitativeComparison]:
    return [_compare_largest_models(predict), *_compare_section_10_4(predict)]


def _compare_largest_models(predict: PredictFunction) -> QualitativeComparison:
    rows = [row for row in load_published_rows("zero_paper", "max_model_parameters") if row["gpu_count"] == "64"]
    published = {row["sharding"]: row["value"] for row in rows}
    return QualitativeComparison(
        "ZeRO's Table 2: the largest GPT on 64 V100 of 32 GB, measured: without ZeRO and with ZeRO-1 (batch 4 assumed)",
        ", ".join(published[name] for name in LARGEST_MODEL_RUNS),
        "; ".join(
            f"{label} {_find_max_model_sizes(predict, overrides)}"
            for runs_by_label in LARGEST_MODEL_RUNS.values()
            for label, overrides in runs_by_label.items()
        ),
    )


def _find_max_model_sizes(predict: PredictFunction, settings: dict[str, str]) -> str:
    """Sizes of the deepest model that surely fits, and of the deepest that may."""

    def build_config(layers: int) -> RunConfig:
        return _build_cluster_config({**settings, "gpus": "64", "model.num_layers": str(layers)})

    def predict_fit(layers: int) -> str | None:
        return predict([build_config(layers)])[0].memory.verdict

    fitting_count = bisect_left(CANDIDATE_LAYERS, True, key=lambda layers: predict_fit(layers) != FITS)
    possible_count = bisect_left(
        CANDIDATE_LAYERS, True, key=lambda layers: predict_fit(layers) == DOES_NOT_FIT, lo=fitting_count
    )
    assert fitting_count > 0, "the smallest of them does not surely fit"
    return " to ".join(
        f"{build_config(CANDIDATE_LAYERS[count - 1]).model.num_parameters / 1e9:.1f}B"
        for count in (fitting_count, possible_count)
    )


def _compare_section_10_4(predict: PredictFunction) -> list[QualitativeComparison]:
    zero_2_row, ddp_row = load_published_rows("zero_paper", "tflops_per_gpu", "Section 10.4")
    models = (("gpt_1b3", "ddp"), ("gpt_2b7", "ddp"), ("gpt_13b", "zero2_fsdp1"))
    configs = [_build_cluster_config({"model": model, "strategy": strategy}) for model, strategy in models]
    predictions = predict(configs)
    fit_texts = ["does not fit" if prediction.memory.verdict == DOES_NOT_FIT else "fits" for prediction in predictions]
    return [
        QualitativeComparison(
            "ZeRO's section 10.4: what fits V100 of 32 GB, DDP (predicted: 1.3B, 2.7B) and ZeRO-2 (13B)",
            f"DDP up to {ddp_row['parameters']}; ZeRO-2 up to {zero_2_row['parameters']}",
            f"{fit_texts[0]}, {fit_texts[1]}; {predictions[2].memory.verdict}",
        ),
        QualitativeComparison(
            f"ZeRO's section 10.4: {TFLOPS} of ZeRO-2 at 13B on 128 V100 (batch 4 assumed)",
            zero_2_row["value"].replace(">", "more than "),
            f"{compute_tflops(configs[2], predictions[2]):.0f}",
        ),
    ]


def _build_cluster_config(settings: dict[str, str]) -> RunConfig:
    return build_published_config(tuple({**CLUSTER_OVERRIDES, **settings}.items()))
