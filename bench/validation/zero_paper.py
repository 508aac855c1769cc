"""The ZeRO paper (https://arxiv.org/abs/1910.02054): the largest models that fit, and ZeRO-2's speed.

Nothing was tuned on these rows.
"""

from __future__ import annotations

from bisect import bisect_left

from bench.config.run_config import RunConfig
from bench.prediction.prediction import DOES_NOT_FIT, FITS
from bench.validation.runs import SPEED, build_published_config, load_published_rows
from bench.validation.shapes import PredictFunction, QualitativeComparison
from bench.validation.statistics import compute_tflops

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
    """All of them."""
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
        return _build_config({**settings, "gpus": "64", "model.num_layers": str(layers)})

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
    configs = [_build_config({"model": model, "strategy": strategy}) for model, strategy in models]
    predictions = predict(configs)
    fit_texts = ["does not fit" if prediction.memory.verdict == DOES_NOT_FIT else "fits" for prediction in predictions]
    return [
        QualitativeComparison(
            "ZeRO's section 10.4: what fits V100 of 32 GB, DDP (predicted: 1.3B, 2.7B) and ZeRO-2 (13B)",
            f"DDP up to {ddp_row['parameters']}; ZeRO-2 up to {zero_2_row['parameters']}",
            f"{fit_texts[0]}, {fit_texts[1]}; {predictions[2].memory.verdict}",
        ),
        QualitativeComparison(
            f"ZeRO's section 10.4: {SPEED} of ZeRO-2 at 13B on 128 V100 (batch 4 assumed)",
            zero_2_row["value"].replace(">", "more than "),
            f"{compute_tflops(configs[2], predictions[2]):.0f}",
        ),
    ]


def _build_config(settings: dict[str, str]) -> RunConfig:
    return build_published_config(tuple({**CLUSTER_OVERRIDES, **settings}.items()))
