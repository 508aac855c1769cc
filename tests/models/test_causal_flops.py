"""Attention counted two ways: over the full square of scores, and half of it where attention is causal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.config.speed_columns import compute_speed_columns
from bench.models.base import FlopCount
from bench.models.traced_flops import trace_flops
from tests.conftest import compose_run_config

LENGTH = 64
CONFIGS = {
    "llama": ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, '
              '"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}'),
    "bert": ('{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 96, "hidden_size": 32, '
             '"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}'),
    "t5": ('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 96, "d_model": 32, '
           '"d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}'),
    "bart": ('{"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": 96, '
             '"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, '
             '"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, '
             '"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2, '
             '"max_position_embeddings": 128}'),
}  # fmt: skip


@pytest.mark.parametrize("model", ["gpt_tiny", "llama_tiny", "moe_tiny"])
def test_all_attention_of_a_decoder_is_causal(model: str) -> None:
    count = compose_run_config(f"model={model}").model.count_flops_per_sequence(LENGTH)
    assert count.causal_attention == count.blocks_attention > 0
    assert count.causal_model_flops == count.model_flops - 3 * count.blocks_attention // 2


def test_of_t5_only_the_decoders_own_attention_is() -> None:
    family = compose_run_config("model=t5_tiny", "model.decoder_sequence_length=32").model
    count = family.count_flops_per_sequence(LENGTH)
    width = family.num_heads * family.d_kv  # type: ignore[attr-defined]
    assert count.causal_attention == family.num_decoder_layers * 4 * 32 * 32 * width  # type: ignore[attr-defined]


def trace(name: str, folder: Path) -> FlopCount:
    (folder / "config.json").write_text(CONFIGS[name], encoding="utf-8")
    return trace_flops(compose_run_config("model=hf", f"model.path={folder}").model, LENGTH)


@pytest.mark.parametrize(("name", "share"), [("llama", 1.0), ("bert", 0.0), ("t5", 1 / 3), ("bart", 1 / 3)])
def test_a_trace_tells_causal_attention_from_the_rest(name: str, share: float, tmp_path: Path) -> None:
    """Encoder, decoder and cross-attention of models with equal sides take a third each."""
    count = trace(name, tmp_path)
    assert count.blocks_attention > 0
    assert count.causal_attention == pytest.approx(share * count.blocks_attention)


def test_a_row_has_both_columns() -> None:
    run = ("gpus=1", "sequence_length=64", "hardware=a100_80gb", "precision=bf16", "mode=predict")
    decoder = compose_run_config("model=gpt_tiny", "strategy=single", *run)
    columns = compute_speed_columns(decoder, 0.5)
    count = decoder.model.count_flops_per_sequence(64)
    assert columns["causal_tflops_per_gpu"] == pytest.approx(4 * count.causal_model_flops / 0.5e12)
    assert columns["causal_mfu"] == pytest.approx(columns["causal_tflops_per_gpu"] / 312)
    assert columns["causal_tflops_per_gpu"] < columns["tflops_per_gpu"]
    assert columns["tflops_per_gpu"] == pytest.approx(4 * count.model_flops / 0.5e12)
