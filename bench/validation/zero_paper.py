"""The ZeRO paper (https://arxiv.org/abs/1910.02054): the largest models that fit, and ZeRO-2's speed.

Nothing was tuned on these rows.
"""

from __future__ import annotations

from bisect import bisect_left

from bench.config import RunConfig
from bench.simulate.prediction import DOES_NOT_FIT, FITS
from bench.validation.runs import SPEED, configured, lines
from bench.validation.shapes import Predict, Shape
from bench.validation.statistics import tflops

CLUSTER = {
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

AS_FEW_BYTES = {
    "precision": "bf16_pure",
    "+hardware.peak_tflops.bf16": "125",
    "+hardware.speeds.matmul.efficiency.bf16": "0.74",
}
"""Parameters and gradients of two bytes, as its fp16 has; the suite's fp16 keeps both in fp32. V100 does not compute in
bf16: the speed of fp16 stands in, which memory does not depend on. Optimizer state is in bf16 too, 4 bytes for its 12,
all of it divided by 64."""

LARGEST = {
    "measured, baseline": {"as DDP": {"model": "gpt_1b3", "strategy": "ddp"}},
    "measured, ZeRO-1 (P_os)": {
        "as zero1 with parameters and gradients of 2 bytes": {"model": "gpt_6b7", "strategy": "zero1", **AS_FEW_BYTES},
        "of 4, the suite's fp16": {"model": "gpt_6b7", "strategy": "zero1"},
    },
}
"""By what Table 2 calls it: runs whose largest model is predicted. Widths, which it does not state, are those of models
of GPT-3 of about the size; the number of layers is what is looked for."""

DEPTHS = range(4, 49)


def zero_paper_shapes(predict: Predict) -> list[Shape]:
    """All of them."""
    return [_largest(predict), *_section_10_4(predict)]


def _largest(predict: Predict) -> Shape:
    rows = [line for line in lines("zero_paper", "max_model_parameters") if line["gpu_count"] == "64"]
    published = {line["sharding"]: line["value"] for line in rows}
    return Shape(
        "ZeRO's Table 2: the largest GPT on 64 V100 of 32 GB, measured: without ZeRO and with ZeRO-1 (batch 4 assumed)",
        ", ".join(published[name] for name in LARGEST),
        "; ".join(f"{words} {_deepest(predict, more)}" for runs in LARGEST.values() for words, more in runs.items()),
    )


def _deepest(predict: Predict, settings: dict[str, str]) -> str:
    """Sizes of the deepest model that surely fits, and of the deepest that may."""

    def run(layers: int) -> RunConfig:
        return _run({**settings, "gpus": "64", "model.num_layers": str(layers)})

    def verdict(layers: int) -> str | None:
        return predict([run(layers)])[0].memory.verdict

    surely = bisect_left(DEPTHS, True, key=lambda layers: verdict(layers) != FITS)
    at_most = bisect_left(DEPTHS, True, key=lambda layers: verdict(layers) == DOES_NOT_FIT, lo=surely)
    assert surely > 0, "the smallest of them does not surely fit"
    return " to ".join(f"{run(DEPTHS[count - 1]).model.num_parameters / 1e9:.1f}B" for count in (surely, at_most))


def _section_10_4(predict: Predict) -> list[Shape]:
    divided, whole = lines("zero_paper", "tflops_per_gpu", "Section 10.4")
    models = (("gpt_1b3", "ddp"), ("gpt_2b7", "ddp"), ("gpt_13b", "zero2_fsdp1"))
    runs = [_run({"model": model, "strategy": strategy}) for model, strategy in models]
    predictions = predict(runs)
    fits = ["does not fit" if each.memory.verdict == DOES_NOT_FIT else "fits" for each in predictions]
    return [
        Shape(
            "ZeRO's section 10.4: what fits V100 of 32 GB, DDP (predicted: 1.3B, 2.7B) and ZeRO-2 (13B)",
            f"DDP up to {whole['parameters']}; ZeRO-2 up to {divided['parameters']}",
            f"{fits[0]}, {fits[1]}; {predictions[2].memory.verdict}",
        ),
        Shape(
            f"ZeRO's section 10.4: {SPEED} of ZeRO-2 at 13B on 128 V100 (batch 4 assumed)",
            divided["value"].replace(">", "more than "),
            f"{tflops(runs[2], predictions[2]):.0f}",
        ),
    ]


def _run(settings: dict[str, str]) -> RunConfig:
    return configured(tuple({**CLUSTER, **settings}.items()))
