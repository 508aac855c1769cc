"""Llama and its likes have the published numbers of parameters, and FLOPs that agree with a trace."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from bench.config.groups import list_config_groups
from bench.models import Family
from bench.models.llama import ARCHITECTURES, LlamaFamily
from bench.models.traced_flops import trace_flops
from tests.conftest import compose_run_config
from tests.models.test_models import build_family

NUM_PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "olmo_1b": 1_176_764_416,
    "olmo_7b": 6_888_095_744,
    "phi3_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
}
"""As the models' pages on the Hugging Face hub count them, each named in its file under conf/model."""


def load_model(name: str, **fields: object) -> Family:
    return dataclasses.replace(compose_run_config(f"model={name}").model, **fields)


TINY = load_model("llama_tiny")
WINDOWED = ("mistral", "gemma2", "gemma3_text")


def build_tiny(architecture: str, **fields: object) -> LlamaFamily:
    attention = "eager" if architecture == "gemma2" else "sdpa"
    window = 16 if architecture in WINDOWED else None
    model = load_model("llama_tiny", architecture=architecture, attention=attention, sliding_window=window, **fields)
    assert isinstance(model, LlamaFamily)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "published"), NUM_PARAMETERS.items(), ids=list(NUM_PARAMETERS))
def test_a_preset_has_the_published_number_of_parameters(name: str, published: int) -> None:
    assert load_model(name).num_parameters == published


def test_every_preset_is_held_against_a_published_number() -> None:
    presets = [
        name for name in list_config_groups()["model"] if name != "hf" if isinstance(build_family(name), LlamaFamily)
    ]
    assert {*presets} == {*NUM_PARAMETERS, "llama_tiny"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flops_agree_with_a_trace(architecture: str) -> None:
    model = build_tiny(architecture, num_kv_heads=1)
    assert model.count_flops_per_sequence(64) == trace_flops(model, 64)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_sliding_window_is_attended_to_and_no_further(architecture: str) -> None:
    """A token that is out of the reach of all layers changes no logits."""
    model = build_tiny(architecture, num_layers=2)
    if architecture != "mistral":  # every second layer or more attends to everything
        model = dataclasses.replace(model, num_layers=1)
    module = model.build_model().to_empty(device="cpu")
    filled = model.build_model()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    for name, buffer in filled.named_buffers():
        module.get_buffer(name).copy_(buffer)
    module.eval()
    tokens = torch.randint(0, 2048, (1, 64), generator=generator)
    other_tokens = tokens.clone()
    other_tokens[0, 0] = (tokens[0, 0] + 1) % 2048
    with torch.no_grad():
        logits, other_logits = (module(input_ids=ids)["logits"][0] for ids in (tokens, other_tokens))
    reach = model.num_layers * 15
    changed = (logits != other_logits).any(dim=-1)
    assert changed[: reach + 1].any()
    assert changed[min(15, reach)]
    assert not changed[reach + 1 :].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_starts_as_no_matter_what_it_reads_alike(architecture: str) -> None:
    """Norms leave their input as it is: they are ones, or zeros where one is added to them."""
    model = build_tiny(architecture)
    expected = 0.0 if architecture.startswith("gemma") else None
    norms = [name for name, _ in model.build_model().named_parameters() if "norm" in name.rsplit(".", 2)[-2]]
    assert bool(norms) == (architecture != "olmo")  # whose norms have no weights
    assert all(model.find_init_std(name, torch.empty(0)) == expected for name in norms)
    assert model.find_init_std("model.layers.0.self_attn.q_proj.weight", torch.empty(0)) == 0.02
    biases = [name for name, _ in model.build_model().named_parameters() if name.endswith("bias")]
    assert bool(biases) == (architecture == "qwen2")
    assert all(model.find_init_std(name, torch.empty(0)) == 0.0 for name in biases)


def test_a_shorter_model_stands_for_a_longer_one() -> None:
    assert TINY.limit_blocks(2) == dataclasses.replace(TINY, num_layers=2)
    assert build_tiny("mistral").limit_blocks(2) is not None
    alternating = build_tiny("gemma3_text", num_layers=40)
    assert alternating.block_period == 6
    short = alternating.limit_blocks(19, 6)
    assert short is not None
    # The last layers are as those of the whole model, of which every sixth attends to everything.
    assert [kind == "full_attention" for kind in short.layer_types or ()].count(True) == 3
    assert (short.layer_types or ())[-6:] == ("sliding_attention",) + ("full_attention",) + ("sliding_attention",) * 4


def test_buffers_hold_what_transformers_would_fill_them_with() -> None:
    frequencies = TINY.build_model().get_buffer("model.rotary_emb.inv_freq")
    assert torch.allclose(frequencies, 1 / 10_000 ** (torch.arange(0, 32, 2) / 32))
    scale = build_tiny("gemma").build_model().get_buffer("model.embed_tokens.embed_scale")
    assert scale.item() == pytest.approx(128**0.5)
    assert isinstance(TINY.build_model(), nn.Module)
