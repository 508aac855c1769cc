"""Models: the published sizes, FLOPs against torch's own counter, weights that do not depend on sharding."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.config.compose import compose_config
from bench.config.groups import list_config_groups
from bench.core.errors import UsageError
from bench.models import Family, load_family
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.blocks import group_blocks
from bench.models.materialize import Materializer
from tests.conftest import compose_run_config


def build_family(option: str, **dimensions: object) -> Family:
    values = {**compose_config({"model": option})["model"], **dimensions}
    return load_family(values["family"])(**values)


@pytest.mark.parametrize(
    ("option", "parameters"),
    [("t5_611m", 611_838_976), ("t5_2b", 2_280_642_560), ("t5_11b", 11_307_321_344)],
)
def test_the_papers_t5_models_have_exactly_their_parameters(option: str, parameters: int) -> None:
    assert build_family(option).num_parameters == parameters


@pytest.mark.parametrize(
    ("option", "billions"),
    [
        ("gpt_125m", 0.125),
        ("gpt_350m", 0.355),
        ("gpt_760m", 0.760),
        ("gpt_1b3", 1.3),
        ("gpt_2b7", 2.65),
        ("gpt_6b7", 6.7),
        ("gpt_13b", 12.9),
        ("gpt_30b", 30.0),
        ("gpt_66b", 65.7),
        ("gpt_175b", 174.6),
    ],
)
def test_gpt_models_have_the_size_in_their_name(option: str, billions: float) -> None:
    assert build_family(option).num_parameters / 1e9 == pytest.approx(billions, rel=0.015)


@pytest.mark.long
@pytest.mark.slow
def test_every_model_option_builds_on_meta() -> None:
    for option in set(list_config_groups()["model"]) - {"hf"}:  # whose shape a file says
        model = build_family(option).build_model()
        assert all(parameter.is_meta for parameter in model.parameters()), option
        assert build_family(option).name == option


T5_SHAPES = [
    ("t5_tiny", {}, 32),
    ("t5_tiny", {"decoder_sequence_length": 7}, 40),
    ("t5_tiny", {"d_ff": 4096, "d_kv": 64, "num_encoder_layers": 1, "num_decoder_layers": 3}, 24),
    ("t5_611m", {"num_encoder_layers": 2, "num_decoder_layers": 2}, 512),
    ("t5_11b", {"num_encoder_layers": 2, "num_decoder_layers": 1}, 512),
]
GPT_SHAPES = [
    ("gpt_tiny", {}, 32),
    ("gpt_tiny", {"intermediate_size": 96, "vocabulary_size": 50000}, 48),
    ("gpt_125m", {}, 1024),
    ("gpt_175b", {"num_layers": 2}, 2048),
]


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "operators", "every_2"])
@pytest.mark.parametrize(("option", "dimensions", "length"), T5_SHAPES + GPT_SHAPES)
def test_flops_agree_with_torchs_counter(
    option: str, dimensions: dict[str, int], length: int, checkpointing: str
) -> None:
    # On meta SDPA is its matrix products, which the counter counts; on a CPU it would see a fused kernel as nothing.
    shape = build_family(option, **dimensions)
    model = shape.build_model().train()
    checkpoint_blocks(shape, model, checkpointing)
    batch = shape.build_batch(2, length, torch.Generator())
    with FlopCounterMode(display=False) as counter:
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})["logits"].sum().backward()
    assert 2 * shape.count_flops_per_sequence(length).compute_hardware_flops(checkpointing) == pytest.approx(
        counter.get_total_flops(), rel=0.005
    )


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_eager_attention_takes_the_same_flops_on_a_cpu(option: str) -> None:
    shape = build_family(option, attention="eager")
    model = shape.build_model().to_empty(device="cpu")
    with FlopCounterMode(display=False) as counter:
        model(**shape.build_batch(1, 16, torch.Generator()).inputs)["logits"].sum().backward()
    assert shape.count_flops_per_sequence(16).model_flops == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_checkpointing_changes_hardware_flops_alone() -> None:
    count = build_family("t5_11b").count_flops_per_sequence(512)
    assert count.compute_hardware_flops("none") == count.model_flops
    assert count.model_flops < count.compute_hardware_flops("selective") < count.compute_hardware_flops("full")
    # Full recomputation repeats at most the whole forward pass, a third of the model's FLOPs.
    assert count.compute_hardware_flops("full") / count.model_flops < 4 / 3


def test_t5_counts_encoder_and_decoder_lengths_apart() -> None:
    long_decoder = build_family("t5_small", decoder_sequence_length=512).count_flops_per_sequence(128)
    long_encoder = build_family("t5_small", decoder_sequence_length=128).count_flops_per_sequence(512)
    assert long_decoder.model_flops != long_encoder.model_flops
    assert build_family("t5_small", decoder_sequence_length=512).count_tokens_per_sequence(128) == 640


@pytest.mark.long
@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_weights_are_tied_finite_and_those_of_the_seed(option: str) -> None:
    shape = build_family(option)

    def build_filled_model(seed: int) -> torch.nn.Module:
        model = shape.build_model()
        Materializer(model, shape, torch.device("cpu"), seed).fill_model(model)
        return model

    model, same, other = build_filled_model(0), build_filled_model(0), build_filled_model(1)
    for (name, first), second, third in zip(
        model.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.isfinite(first).all(), name
        assert torch.equal(first, second), name
        assert first.unique().numel() == 1 or not torch.equal(first, third), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    loss = torch.nn.functional.cross_entropy(
        model(**shape.build_batch(2, 16, torch.Generator()).inputs)["logits"].flatten(0, 1),
        shape.build_batch(2, 16, torch.Generator()).labels.flatten(),
    )
    # An untrained model knows nothing: the loss is near that of guessing among all words.
    assert loss.item() == pytest.approx(torch.log(torch.tensor(shape.vocabulary_size)).item(), rel=0.2)


def test_weights_of_a_small_model_do_not_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu:0` stands for a GPU: another device than `cpu`, with a generator of its own."""
    shape, drawn_on = build_family("gpt_tiny"), set()
    generator = torch.Generator

    def record_device(device: torch.device) -> torch.Generator:
        drawn_on.add(str(device))
        return generator(device)

    monkeypatch.setattr(torch, "Generator", record_device)

    def build_filled_model(device: torch.device) -> torch.nn.Module:
        model = shape.build_model()
        Materializer(model, shape, device, 0).fill_model(model)
        return model

    elsewhere = build_filled_model(torch.device("cpu", 0))
    assert drawn_on == {"cpu"}
    for here, there in zip(build_filled_model(torch.device("cpu")).parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(here, there)
    monkeypatch.setattr("bench.models.materialize.MAX_CPU_DRAWN_NUMEL", 2**10)
    build_filled_model(torch.device("cpu", 0))
    assert drawn_on == {"cpu", "cpu:0"}


@pytest.mark.long
@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_grouped_blocks_compute_the_same(option: str) -> None:
    shape = build_family(option)
    batch = shape.build_batch(2, 16, torch.Generator()).inputs

    def compute_logits(blocks_per_unit: int) -> torch.Tensor:
        model = shape.build_model()
        materializer = Materializer(model, shape, torch.device("cpu"), 0)
        units = group_blocks(shape, model, blocks_per_unit)
        assert len(units) == {1: 4, 2: 2, 3: {"t5_tiny": 2, "gpt_tiny": 2}[option]}[blocks_per_unit]
        materializer.fill_model(model)
        return model(**batch)["logits"]

    for blocks_per_unit in (2, 3):
        torch.testing.assert_close(compute_logits(blocks_per_unit), compute_logits(1))


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_ranks_share_the_batch_that_one_process_sees_whole(option: str) -> None:
    from bench.rank.engine import build_micro_batches

    config = compose_run_config(f"model={option}")

    def list_labels(rank: int, world_size: int, batch_size: int) -> list[torch.Tensor]:
        batches = build_micro_batches(
            config.model,
            num_micro_batches=2,
            batch_size=batch_size,
            sequence_length=16,
            share_index=rank,
            num_shares=world_size,
            device=torch.device("cpu"),
            seed=3,
        )
        return [batch.labels for batch in batches]

    whole = list_labels(0, 1, 6)
    parts = [list_labels(rank, 3, 2) for rank in range(3)]
    for micro_batch in range(2):
        assert torch.equal(whole[micro_batch], torch.cat([part[micro_batch] for part in parts]))


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (("model=moe_tiny", "model.hidden_size=36"), "model.hidden_size=36 is not valid: choose a multiple of 8"),
        (("model=llama_tiny", "model.hidden_size=36"), "model.hidden_size=36 is not valid: choose a multiple of 8"),
        (("model=gpt_oss_20b", "model.head_size=7"), "model.head_size=7 is not valid: choose an even number"),
        (("model=deepseek_v3", "model.rotary_size=7"), "model.rotary_size=7 is not valid: choose an even number"),
        (("model=deepseek_v2_lite", "model.kv_rank=3"), "model.kv_rank=3 is not valid: choose an even number"),
        (("model=gemma2_2b", "model.sliding_window=null"), "model.sliding_window=null is not valid: choose a number"),
        (("model=deepseek_v2_lite", "model.hidden_size=40"), "choose a multiple of model.num_heads=16"),
    ],
)
def test_shapes_that_transformers_does_not_build_are_refused(settings: tuple[str, ...], refused: str) -> None:
    with pytest.raises(UsageError, match=re.escape(refused)):
        compose_run_config("mode=predict", *settings)
