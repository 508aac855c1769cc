"""Questions that people ask and that once had no answer, for want of a model, an optimizer or a library."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import predict
from bench.advice import question as questions
from bench.hardware.detect import DetectedDevice

pytestmark = pytest.mark.slow

ONE_WAY = ("strategy=fsdp", "activation_checkpointing=full", "precision=bf16", "batch_size_per_gpu=1")
SHORT = ("sequence_length=2048", *ONE_WAY)

QUESTIONS = {
    "Llama 3 8B": ("model=llama3_8b", "gpus=8", "hardware=h100_80gb", *SHORT),
    "grouped-query attention": ("model=qwen2_5_7b", "gpus=8", "hardware=a100_80gb", *SHORT),
    "a mixture of experts": ("model=qwen3_30b_a3b", "model.num_layers=4", "gpus=16", "hardware=h100_80gb", *SHORT),
    "a small model on consumer cards": ("model=llama3_2_1b", "gpus=2", "hardware=rtx_4090", *SHORT),
    "Adafactor": ("model=llama3_2_1b", "optimizer=adafactor", "gpus=8", "hardware=a100_40gb", *SHORT, "strategy=fsdp1"),
    "8-bit Adam": ("model=llama3_2_1b", "optimizer=adamw_8bit", "gpus=8", "hardware=a100_40gb", *SHORT, "strategy=ddp"),
    "LoRA without its library": ("model=llama3_2_1b", "finetune=lora", "gpus=2", "hardware=a100_40gb", *SHORT),
    "QLoRA without its libraries": (
        *("model=llama3_2_1b", "finetune=qlora", "gpus=1", "hardware=a100_40gb", "sequence_length=2048"),
        *("strategy=ddp", "activation_checkpointing=full", "precision=bf16", "batch_size_per_gpu=1"),
    ),
    "a global batch in tokens": ("model=llama3_2_1b", "gpus=8", "hardware=h100_80gb", "global_batch=1M_tokens", *SHORT),
}


def ask_best(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The first way of the answer."""
    assert predict.main([*arguments, "format=json"]) == 0
    best: dict[str, Any] = json.loads(capsys.readouterr().out)["sections"][0]["ranked"][0]
    return best


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_answered(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    best = ask_best(capsys, *QUESTIONS[question])
    assert best["memory"]["verdict"] == "fits"
    assert best["tflops_per_gpu"] > 10
    assert best["memory"]["allocated"]["value"] > 1e9


def test_optimizers_with_smaller_states_need_less(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("model=llama3_2_1b", "gpus=1", "hardware=h100_80gb", "sequence_length=512", "strategy=single")
    run = (*run, "batch_size_per_gpu=1", "activation_checkpointing=full", "precision=bf16")
    adamw, adamw_8bit, adafactor = (
        ask_best(capsys, *run, f"optimizer={name}")["memory"]["allocated"]["value"]
        for name in ("adamw", "adamw_8bit", "adafactor")
    )
    num_parameters = 1_235_814_400
    assert adamw - adamw_8bit == pytest.approx(6 * num_parameters, rel=0.03)  # two states of 4 bytes, or of 1
    assert adafactor < adamw_8bit


@pytest.mark.parametrize(("hardware", "asks"), [(("hardware=h100_80gb",), 0), (("hardware=auto",), 1), ((), 1)])
def test_this_machines_device_is_looked_for_where_none_is_named(hardware: tuple[str, ...], asks: int) -> None:
    asked = []

    def detect() -> DetectedDevice:
        asked.append(True)
        return DetectedDevice("cpu", "a processor", 0)

    questions.read_question(["model=gpt_tiny", "gpus=8", *hardware], {}, detect)
    assert len(asked) == asks
