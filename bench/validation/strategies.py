"""What others published of ZeRO and of offloading, as far as single numbers cannot be compared: orders and ratios.

Nothing was tuned on these rows, but for one assumption that says so in its line.
"""

from __future__ import annotations

import re

from bench.config import RunConfig
from bench.simulate.prediction import Prediction
from bench.validation.runs import FSDP_PAPER, SPEED, cases, configured, lines
from bench.validation.shapes import Predict, Shape
from bench.validation.statistics import tflops
from bench.validation.zero_paper import zero_paper_shapes

ONE_ADAPTER = {"hardware.speeds.links.node_gb_s": "25", "hardware.speeds.links.adapters": "1"}
"""One adapter of 200 Gb/s of the eight that a node of Megatron's cluster has."""

BIGSCIENCE = {
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

TENSOR_PARALLEL = {1: (2304, 24, 24, 16), 2: (3072, 32, 30, 16), 4: (4096, 32, 36, 16), 8: (6144, 48, 40, 32)}
"""Megatron's Table 1 (https://arxiv.org/abs/2104.04473) as far as it divides layers alone: by degree of tensor
parallelism width, heads, layers, and sequences of a step for each of its 32 groups."""

TOGETHER = 8
"""Sequences that a group of Megatron's Table 1 takes at a time: assumed."""

MEGATRON = {
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

DIVIDED = {
    "strategy": "tensor_parallel",
    "strategy.data_parallel": "ddp",
    "strategy.sequence_parallel": "false",
}
"""Before sequence parallelism was thought of."""

OFFLOADED = {
    **FSDP_PAPER,
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


def strategy_shapes(predict: Predict) -> list[Shape]:
    """All of them."""
    return [
        _tensor_parallel(predict),
        _megatron(predict),
        _bigscience(predict),
        *zero_paper_shapes(predict),
        _offloaded(predict),
    ]


def _tensor_parallel(predict: Predict) -> Shape:
    runs = []
    for degree, (width, heads, layers, sequences) in TENSOR_PARALLEL.items():
        shape = {"model.hidden_size": width, "model.num_heads": heads, "model.num_layers": layers}
        batch = {"batch_size_per_gpu": TOGETHER // degree, "gradient_accumulation": sequences // TOGETHER}
        numbers = {name: str(value) for name, value in {**shape, **batch, "gpus": 32 * degree}.items()}
        runs.append(_run(MEGATRON | numbers | (DIVIDED | {"strategy.degree": str(degree)} if degree > 1 else {})))
    speeds = [tflops(run, each) for run, each in zip(runs, predict(runs), strict=True)]
    said = {line["sharding"]: float(line["value"]) for line in lines("megatron_a100_readme", "tflops_per_gpu")}
    published = [said[f"model-parallel {degree}"] for degree in TENSOR_PARALLEL]
    return Shape(
        f"Megatron's Table 1: {SPEED} at a tensor parallel degree of 1, 2, 4 and 8 (no pipeline; micro-batches of "
        f"{TOGETHER} assumed)",
        ", ".join(f"{speed:.0f}" for speed in published),
        ", ".join(f"{speed:.0f}" for speed in speeds),
    )


def _megatron(predict: Predict) -> Shape:
    found = [case for case in cases() if case.source == "megatron_sc21" and "174.6B" in case.label]
    said = []
    for words, more in (("as FSDP1", {}), ("with one of 8 adapters", ONE_ADAPTER)):
        runs = [configured(tuple({**dict(case.settings), **more}.items())) for case in found]
        predictions = predict(runs)
        speeds = [tflops(run, each) for run, each in zip(runs, predictions, strict=True)]
        said.append(f"{words} {', '.join(f'{speed:.0f}' for speed in speeds)}")
    return Shape(
        f"Megatron's Table 2: {SPEED} of DeepSpeed's ZeRO-3 of 2021, GPT-175B on 384, 768 and 1536 GPUs (one adapter: "
        "chosen with these rows in sight)",
        ", ".join(f"{case.published:.0f}" for case in found),
        "; ".join(said),
    )


def _bigscience(predict: Predict) -> Shape:
    whole, divided = predict([_run({**BIGSCIENCE, "strategy": name}) for name in ("ddp", "zero1")])
    saved = whole.memory.allocated.value - divided.memory.allocated.value
    notes = {line["sharding"][:6]: line["note"] for line in lines("bigscience_zero1", "tflops_per_gpu")}
    took, gigabytes = (
        {name: re.findall(rf"([\d.]+) {unit}", note)[0] for name, note in notes.items()} for unit in ("s/it", "GB")
    )
    ratio = float(took["ZeRO-1"]) / float(took["ZeRO-0"])
    less = float(gigabytes["ZeRO-0"]) - float(gigabytes["ZeRO-1"])
    return Shape(
        "BigScience: ZeRO-1 against ZeRO-0, 4 replicas of 96 GPUs (predicted for one GPU's part): time, memory saved",
        f"{took['ZeRO-1']} / {took['ZeRO-0']} s = {ratio:.2f}; "
        f"{gigabytes['ZeRO-0']} - {gigabytes['ZeRO-1']} = {less:.0f} GB",
        f"{_seconds(divided) / _seconds(whole):.2f}; {saved / 1e9:.0f} GB",
    )


def _offloaded(predict: Predict) -> Shape:
    runs = [_run({**OFFLOADED, "strategy.cpu_offload": offload}) for offload in ("true", "false")]
    offloaded, plain = (tflops(run, each) for run, each in zip(runs, predict(runs), strict=True))
    published = next(
        line for line in lines("pytorch_blog_fsdp_intro", "tflops_per_gpu") if line["parameters"] == "175B"
    )
    return Shape(
        f"FSDP's introduction: {SPEED} of GPT-175B, parameters offloaded, 128 A100 (of 80 GB, predicted)",
        published["value"],
        f"{offloaded:.0f} (not offloaded {plain:.0f})",
    )


def _run(settings: dict[str, str]) -> RunConfig:
    return configured(tuple(settings.items()))


def _seconds(prediction: Prediction) -> float:
    assert prediction.time is not None
    return prediction.time.step_s.value
