"""Models: the published sizes, FLOPs against torch's own counter, weights that do not depend on sharding."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.models import Family, load_family
from bench.models.blocks import checkpoint_blocks, group_blocks
from bench.models.materialize import Materializer
from bench.planning.compose import composed, groups
from tests.conftest import configuration


def family(option: str, **dimensions: object) -> Family:
    values = {**composed({"model": option})["model"], **dimensions}
    return load_family(values["family"])(**values)


@pytest.mark.parametrize(
    ("option", "parameters"),
    [("t5_611m", 611_838_976), ("t5_2b", 2_280_642_560), ("t5_11b", 11_307_321_344)],
)
def test_the_papers_t5_models_have_exactly_their_parameters(option: str, parameters: int) -> None:
    assert family(option).num_parameters == parameters


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
    assert family(option).num_parameters / 1e9 == pytest.approx(billions, rel=0.015)


def test_every_model_option_builds_on_meta() -> None:
    for option in groups()["model"]:
        model = family(option).build()
        assert all(parameter.is_meta for parameter in model.parameters()), option
        assert family(option).name == option


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


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize(("option", "dimensions", "length"), T5_SHAPES + GPT_SHAPES)
def test_flops_agree_with_torchs_counter(
    option: str, dimensions: dict[str, int], length: int, checkpointing: str
) -> None:
    # On meta SDPA is its matrix products, which the counter counts; on a CPU it would see a fused kernel as nothing.
    shape = family(option, **dimensions)
    model = shape.build().train()
    checkpoint_blocks(shape, model, checkpointing)
    batch = shape.batch(2, length, torch.Generator())
    with FlopCounterMode(display=False) as counter:
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})["logits"].sum().backward()
    assert 2 * shape.flops_per_sequence(length).hardware(checkpointing) == pytest.approx(
        counter.get_total_flops(), rel=0.005
    )


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_eager_attention_takes_the_same_flops_on_a_cpu(option: str) -> None:
    shape = family(option, attention="eager")
    model = shape.build().to_empty(device="cpu")
    with FlopCounterMode(display=False) as counter:
        model(**shape.batch(1, 16, torch.Generator()).inputs)["logits"].sum().backward()
    assert shape.flops_per_sequence(16).model == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_checkpointing_changes_hardware_flops_alone() -> None:
    count = family("t5_11b").flops_per_sequence(512)
    assert count.hardware("none") == count.model
    assert count.model < count.hardware("selective") < count.hardware("full")
    # Full recomputation repeats at most the whole forward pass, a third of the model's FLOPs.
    assert count.hardware("full") / count.model < 4 / 3


def test_t5_counts_encoder_and_decoder_lengths_apart() -> None:
    long_decoder = family("t5_small", decoder_sequence_length=512).flops_per_sequence(128)
    long_encoder = family("t5_small", decoder_sequence_length=128).flops_per_sequence(512)
    assert long_decoder.model != long_encoder.model
    assert family("t5_small", decoder_sequence_length=512).tokens_per_sequence(128) == 640


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_weights_are_tied_finite_and_those_of_the_seed(option: str) -> None:
    shape = family(option)

    def filled(seed: int) -> torch.nn.Module:
        model = shape.build()
        Materializer(model, shape, torch.device("cpu"), seed).model(model)
        return model

    model, same, other = filled(0), filled(0), filled(1)
    for (name, first), second, third in zip(
        model.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.isfinite(first).all(), name
        assert torch.equal(first, second), name
        assert first.unique().numel() == 1 or not torch.equal(first, third), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    loss = torch.nn.functional.cross_entropy(
        model(**shape.batch(2, 16, torch.Generator()).inputs)["logits"].flatten(0, 1),
        shape.batch(2, 16, torch.Generator()).labels.flatten(),
    )
    # An untrained model knows nothing: the loss is near that of guessing among all words.
    assert loss.item() == pytest.approx(torch.log(torch.tensor(shape.vocabulary_size)).item(), rel=0.2)


def test_weights_of_a_small_model_do_not_depend_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu:0` stands for a GPU: another device than `cpu`, with a generator of its own."""
    shape, drawn_on = family("gpt_tiny"), set()
    generator = torch.Generator

    def noted(device: torch.device) -> torch.Generator:
        drawn_on.add(str(device))
        return generator(device)

    monkeypatch.setattr(torch, "Generator", noted)

    def filled(device: torch.device) -> torch.nn.Module:
        model = shape.build()
        Materializer(model, shape, device, 0).model(model)
        return model

    elsewhere = filled(torch.device("cpu", 0))
    assert drawn_on == {"cpu"}
    for here, there in zip(filled(torch.device("cpu")).parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(here, there)
    monkeypatch.setattr("bench.models.materialize.SAME_EVERYWHERE_ELEMENTS", 2**10)
    filled(torch.device("cpu", 0))
    assert drawn_on == {"cpu", "cpu:0"}


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_grouped_blocks_compute_the_same(option: str) -> None:
    shape = family(option)
    batch = shape.batch(2, 16, torch.Generator()).inputs

    def logits(blocks_per_unit: int) -> torch.Tensor:
        model = shape.build()
        materializer = Materializer(model, shape, torch.device("cpu"), 0)
        units = group_blocks(shape, model, blocks_per_unit)
        assert len(units) == {1: 4, 2: 2, 3: {"t5_tiny": 2, "gpt_tiny": 2}[option]}[blocks_per_unit]
        materializer.model(model)
        return model(**batch)["logits"]

    for blocks_per_unit in (2, 3):
        torch.testing.assert_close(logits(blocks_per_unit), logits(1))


@pytest.mark.parametrize("option", ["t5_tiny", "gpt_tiny"])
def test_ranks_share_the_batch_that_one_process_sees_whole(option: str) -> None:
    from bench.training.engine import micro_batches

    config = configuration(f"model={option}")

    def share(rank: int, world_size: int, batch_size: int) -> list[torch.Tensor]:
        batches = micro_batches(
            config.model,
            num_micro_batches=2,
            batch_size=batch_size,
            sequence_length=16,
            share=rank,
            shares=world_size,
            device=torch.device("cpu"),
            seed=3,
        )
        return [batch.labels for batch in batches]

    whole = share(0, 1, 6)
    parts = [share(rank, 3, 2) for rank in range(3)]
    for micro_batch in range(2):
        assert torch.equal(whole[micro_batch], torch.cat([part[micro_batch] for part in parts]))
