"""Words of published tables mean what people mean by them, or are refused with a reason."""

from __future__ import annotations

import pytest

from bench.validation.mesh_words import read_degrees
from bench.validation.metrics import read_quantity
from bench.validation.model_words import read_model
from bench.validation.overrides import NotExpressibleError
from bench.validation.printed_numbers import NoNumberError, parse_bytes, parse_count, parse_rate, parse_seconds
from bench.validation.readings import Reading, read_line
from bench.validation.training_words import (
    read_checkpointing,
    read_gpu,
    read_precision,
    read_strategy,
)

LINE = {
    "model": "GPT-2 XL",
    "parameters": "1.5B",
    "strategy": "FSDP2",
    "sharding": "full_shard",
    "precision": "bf16 mixed",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "gpu_count": "8x",
    "sequence_length": "1k",
    "batch_size_per_gpu": "4",
    "activation_checkpointing": "full",
    "metric": "tokens_per_second_per_gpu",
    "value": "9,500",
    "unit": "tokens/s",
    "note": "",
}


def read(**changed: str) -> Reading:
    return read_line(1, {**LINE, **changed})


@pytest.mark.parametrize(
    ("text", "hardware"),
    [
        ("A100-80GB", "a100_80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("a100 40 GB", "a100_40gb"),
        ("A100-SXM4-40GB", "a100_40gb"),
        ("H100 SXM", "h100_80gb"),
        ("8 x H100-80GB-HBM3", "h100_80gb"),
        ("h100_80gb", "h100_80gb"),
        ("MI355", "mi355x"),
        ("AMD MI300", "mi300x"),
    ],
)
def test_gpus_are_found_by_their_names(text: str, hardware: str) -> None:
    assert read_gpu(text).settings["hardware"] == hardware


def test_a_kind_with_half_the_links_is_that_kind_with_half_the_links() -> None:
    overrides = read_gpu("A800-80GB").settings
    assert overrides["hardware"] == "a100_80gb"
    assert overrides["hardware.speeds.links.gpu_gb_s"] == "200"


@pytest.mark.parametrize("text", ["TPU v4", "Gaudi 2", "", "?"])
def test_gpus_that_nothing_describes_are_refused(text: str) -> None:
    with pytest.raises(NotExpressibleError):
        read_gpu(text)


@pytest.mark.parametrize(
    ("strategy", "sharding", "gpus", "expected"),
    [
        ("DDP", "", 8, {"strategy": "ddp"}),
        ("DDP", "", 1, {"strategy": "single"}),
        ("FSDP", "full_shard", 8, {"strategy": "fsdp1"}),
        ("FSDP2", "", 8, {"strategy": "fsdp"}),
        ("HSDP", "", 16, {"strategy": "fsdp1", "strategy.sharding_factor": "node"}),
        ("FSDP", "shard_grad_op", 8, {"strategy": "fsdp1", "strategy.reshard_after_forward": "false"}),
        ("DeepSpeed ZeRO-3", "", 8, {"strategy": "deepspeed", "strategy.stage": "3"}),
        ("DeepSpeed", "stage 2", 8, {"strategy": "deepspeed", "strategy.stage": "2"}),
        (
            "ZeRO-2",
            "optimizer offload",
            8,
            {"strategy": "deepspeed", "strategy.stage": "2", "strategy.offload_optimizer": "cpu"},
        ),
        ("ZeRO-1", "", 8, {"strategy": "zero1"}),
        ("LoRA", "", 1, {"strategy": "single", "finetune": "lora"}),
        ("FSDP + QLoRA", "", 4, {"strategy": "fsdp1", "finetune": "qlora"}),
        ("FSDP2 + TP", "tp 4", 8, {"strategy": "tensor_parallel", "strategy.degree": "4"}),
        ("DDP", "TP1 PP1", 8, {"strategy": "ddp"}),
        ("Megatron TP+PP+DP", "FSDP 0, TP 1, PP 1, distributed optimizer", 8, {"strategy": "zero1"}),
        (
            *("Megatron TP+PP+DP", "TP8 PP4, VP 3, FSDP 0", 64),
            {
                **{"strategy": "mesh", "strategy.tensor": "8", "strategy.pipeline": "4", "strategy.data": "ddp"},
                **{"strategy.schedule": "interleaved_1f1b", "strategy.virtual_stages": "3"},
            },
        ),
        ("Megatron-FSDP", "FSDP 64, TP 1, PP 1, GA 2; distributed optimizer with overlap", 64, {"strategy": "fsdp"}),
        (
            *("Megatron TP+PP+DP", "FSDP 1, TP 2, PP 2", 64),
            {"strategy": "mesh", "strategy.tensor": "2", "strategy.pipeline": "2", "strategy.data": "fsdp"},
        ),
        (
            *("Megatron-DeepSpeed", "DP2 TP4 PP8 ZeRO-1", 64),
            {"strategy": "mesh", "strategy.tensor": "4", "strategy.pipeline": "8", "strategy.data": "zero1"},
        ),
        (
            *("Megatron", "TP4 PP2 ZeRO-1", 8),
            {"strategy": "mesh", "strategy.tensor": "4", "strategy.pipeline": "2", "strategy.data": "ddp"},
        ),
        (
            *("FSDP2 + Async TP", "tp 8", 64),
            {
                **{"strategy": "mesh", "strategy.tensor": "8", "strategy.data": "fsdp"},
                **{"strategy.async_tensor_parallel": "true", "compile": "true"},
            },
        ),
        ("FSDP + CP", "CP 4", 64, {"strategy": "mesh", "strategy.context": "4", "strategy.data": "fsdp"}),
        (
            *("Megatron, distributed optimizer", "tp1ep8pp1", 8),
            {"strategy": "mesh", "strategy.expert": "8", "strategy.data": "ddp"},
        ),
    ],
)
def test_strategies_are_found_by_their_words(strategy: str, sharding: str, gpus: int, expected: dict[str, str]) -> None:
    assert read_strategy(strategy, sharding, gpus).settings == expected


@pytest.mark.parametrize(
    ("strategy", "sharding", "reason"),
    [
        ("Megatron", "TP8 PP6", "do not come to 64 GPUs"),
        ("Megatron", "TP8 PP2 DP8", "do not come to 64 GPUs"),
        ("FSDP + TP", "", "degree of TP is not stated"),
        ("DeepSpeed", "", "stage of DeepSpeed's ZeRO is not stated"),
        ("ZeRO-1/2", "", "more than one stage"),
        ("", "", "not stated"),
        ("DoRA", "", "adapters"),
        ("Horovod elastic", "", "none of the suite's"),
    ],
)
def test_strategies_that_the_suite_does_not_have_are_refused_with_a_reason(
    strategy: str, sharding: str, reason: str
) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        read_strategy(strategy, sharding, 64)


def test_degrees_of_parallelism_are_read_in_every_spelling() -> None:
    assert read_degrees("tp1pp2") == {"tensor": 1, "pipeline": 2, "context": 1, "expert": 1}
    assert read_degrees("TP2 PP0") == {"tensor": 2, "pipeline": 1, "context": 1, "expert": 1}
    assert read_degrees("Tensor Parallel=8, CP-4, expert parallelism 2")["tensor"] == 8
    assert read_degrees("TP8 PP6 CP2 EP4") == {"tensor": 8, "pipeline": 6, "context": 2, "expert": 4}


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16 mixed", "bf16"),
        ("amp_bf16", "bf16"),
        ("bf16_pure", "bf16_pure"),
        ("FP16 (AMP)", "fp16"),
        ("float8 rowwise", "fp8"),
        ("TF32", "tf32"),
        ("float32", "fp32"),
    ],
)
def test_precisions_are_found_by_their_words(text: str, precision: str) -> None:
    assert read_precision(text).settings["precision"] == precision


def test_formats_that_the_suite_does_not_have_are_refused() -> None:
    with pytest.raises(NotExpressibleError, match="scale per block"):
        read_precision("MXFP8")
    with pytest.raises(NotExpressibleError, match="products in int8"):
        read_precision("int8 matmuls, bf16 weights")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        *(("yes", "full"), ("Full", "full"), ("no", "none"), ("operators", "operators"), ("selective", "selective")),
        *(("selective op", "operators_every_2"), ("per-op SAC", "operators_every_2")),
        *(("every 2 layers", "every_2"), ("every layer", "full")),
    ],
)
def test_checkpointing_is_found_by_its_words(text: str, mode: str) -> None:
    assert read_checkpointing(text).settings == {"activation_checkpointing": mode}


@pytest.mark.parametrize(
    ("name", "parameters", "actual"),
    [
        *(("MPT-7b", "7B", 6.65e9), ("T5-11B", "11B", 11.3e9), ("GPT-2 XL", "1.5B", 1.56e9)),
        *(("meta-llama/Llama-2-7b-hf", "", 6.74e9), ("Llama 3.1 8B", "8B", 8.03e9)),
        *(("mistralai/Mistral-7B-v0.1", "7B", 7.24e9), ("Qwen2.5-7B-Instruct", "", 7.62e9)),
        *(("Mixtral-8x7B", "", 46.7e9), ("GPT (hidden 2048, 24 layers, 16 heads)", "", 1.31e9)),
    ],
)
def test_models_are_found_by_their_names(name: str, parameters: str, actual: float) -> None:
    reading = read(model=name, parameters=parameters)
    assert reading.reason is None
    assert reading.config.model.num_parameters == pytest.approx(actual, rel=0.02)


def test_a_model_that_is_not_there_or_has_other_parameters_is_refused() -> None:
    assert "no shape of a model called Nonesuch" in (read(model="Nonesuch-9B").reason or "")
    assert "parameters are printed" in (read(parameters="70B").reason or "")


NOT_LOOKED_UP = "software, kernels and network, which nobody has looked up"
"""Of all sources that ``sources.yaml`` does not have."""


def test_a_row_is_read_as_the_run_it_describes() -> None:
    reading = read(note="grad accum 4; 2 nodes of 4")
    config = reading.config
    assert (reading.reason, reading.assumptions, reading.is_complete) == (None, (NOT_LOOKED_UP,), False)
    assert (config.gpus, config.sequence_length, config.batch_size_per_gpu) == (8, 1024, 4)
    assert config.gradient_accumulation == 4
    assert config.gpus_per_node == 4
    assert config.activation_checkpointing == "full"
    assert reading.quantity is not None
    assert reading.quantity.value == 9500


def test_what_is_not_stated_is_assumed_and_listed() -> None:
    reading = read(precision="", activation_checkpointing="")
    assert not reading.is_complete
    assert reading.assumptions == (
        *("precision is not stated: bf16 mixed", "checkpointing is not stated: none"),
        NOT_LOOKED_UP,
    )


def test_the_micro_batch_follows_from_a_global_batch_and_is_then_an_assumption() -> None:
    reading = read(batch_size_per_gpu="", note="global batch 64")
    assert reading.config.batch_size_per_gpu == 8
    assert not reading.is_complete
    assert read(batch_size_per_gpu="4", note="global batch 64").config.gradient_accumulation == 2


@pytest.mark.parametrize(
    ("note", "batch", "accumulation"),
    [
        ("MBS 2, GBS 64", 2, 4),
        ("micro_batch_size 4, global_batch_size 32", 4, 1),
        ("batch size 64 (global)", 8, 1),
        ("MBS 1, 4 accumulation steps", 1, 4),
    ],
)
def test_batches_are_found_by_what_people_call_them(note: str, batch: int, accumulation: int) -> None:
    config = read(batch_size_per_gpu="", note=note).config
    assert (config.batch_size_per_gpu, config.gradient_accumulation) == (batch, accumulation)


def test_a_time_of_a_micro_batch_is_that_of_a_step_of_one() -> None:
    note = "global batch 64; the printed time is one iteration = one micro-batch"
    timed, held = (
        read(note=note, metric=metric, value="1", unit=unit).config.gradient_accumulation
        for metric, unit in (("iteration_time", "s"), ("peak_memory_allocated", "GB"))
    )
    assert (timed, held) == (1, 2)


@pytest.mark.parametrize("column", ["gpu_count", "sequence_length", "batch_size_per_gpu"])
def test_counts_that_are_missing_or_ranges_are_reasons(column: str) -> None:
    assert "not stated" in (read(**{column: ""}).reason or "")
    assert column in (read(**{column: "128-512"}).reason or "")


def test_numbers_are_read_as_people_print_them() -> None:
    assert [parse_count(text) for text in ("8x", "8", "1k", "1,024", "4K", "2048 tokens")][:5] == [
        8,
        8,
        1024,
        1024,
        4096,
    ]
    assert parse_bytes("12.5 GiB", "") == parse_bytes("12.5", "GiB") == parse_bytes("12800", "MiB") == 12.5 * 2**30
    assert parse_bytes("40", "GB") == 40e9
    assert parse_rate("1.2M", "tokens/s") == parse_rate("1,200k", "") == 1.2e6
    assert parse_rate("1200", "thousand tokens/s") == parse_rate("1.2", "million tokens/s") == 1.2e6
    assert parse_seconds("620", "ms") == parse_seconds("0.62 s", "") == pytest.approx(0.62)


@pytest.mark.parametrize("text", ["", "n/a", ">40", "10-20", "—"])
def test_bounds_ranges_and_blanks_are_no_numbers(text: str) -> None:
    with pytest.raises(NoNumberError):
        parse_rate(text, "")


@pytest.mark.parametrize(
    ("metric", "value", "unit", "name", "number"),
    [
        ("iteration_time", "620", "ms", "step_time", 0.62),
        ("TFLOPS", "150", "", "tflops_per_gpu", 150),
        ("MFU", "45", "%", "mfu", 0.45),
        ("max_memory_allocated", "30", "GiB", "peak_memory_allocated", 30 * 2**30),
        ("tokens_per_second", "OOM", "", "outcome", 1),
        ("outcome", "ok", "", "outcome", 0),
        ("peak_memory_reserved", "OOM", "GB", "outcome", 1),
        ("outcome", "OutOfMemoryError", "", "outcome", 1),
    ],
)
def test_metrics_are_found_by_their_names(metric: str, value: str, unit: str, name: str, number: float) -> None:
    quantity = read_quantity(1, {**LINE, "metric": metric, "value": value, "unit": unit}, {})
    assert (quantity.metric, quantity.value) == (name, pytest.approx(number))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("DeepSeekV3 (w/o MTP)", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2_lite"),
        ("meta-llama/Llama-3-8B", "llama3_8b"),
        ("deepseekv3 cut to 4 layers", "deepseek_v3"),
        ("Llama3 70B 2-node", "llama3_70b"),
        ("Qwen3 MoE 30B", "qwen3_30b_a3b"),
    ],
)
def test_names_with_organisations_remarks_and_layers_mean_a_model(name: str, model: str) -> None:
    settings = read_model(name, "").settings
    assert settings["model"] == model
    assert settings.get("model.num_layers") == ("4" if "cut" in name else None)


def test_a_size_behind_a_name_that_needs_none_says_nothing_new() -> None:
    assert read_model("DeepSeek V3 671B", "671B").settings["model"] == "deepseek_v3"
    with pytest.raises(NotExpressibleError, match="no shape of a model called Llama 12B"):
        read_model("Llama 12B", "12B")
