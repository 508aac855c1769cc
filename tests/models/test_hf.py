"""``model=hf``: models of very different make, each from its config.json alone, train and are predicted as others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.core.errors import UsageError
from bench.models.blocks import group_blocks
from bench.models.checkpointing import BlockPositions, shorten_family
from bench.models.hf import HfFamily, read_model_config
from bench.models.materialize import Materializer
from bench.models.pretrained_modules import describe_block
from bench.prediction.predictor import predict_runs
from tests.conftest import FULL_SCALE, compose_run_config

CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "configs.json").read_text())
"""By the type of the model: small ones, otherwise as they are published."""

EAGER = ("bloom", "gptj", "mamba", "gpt_oss")
"""Those for which transformers has no SDPA."""

MEMORY_TOLERANCE = 0.01

STEPS = ("hardware=cpu", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
SINGLE = ("strategy=single", "gpus=1", "batch_size_per_gpu=4")
STRATEGIES = [("strategy=ddp", "gpus=2"), ("strategy=fsdp", "gpus=2"), ("strategy=fsdp1", "gpus=2")]
ALL_STRATEGIES = [
    *((f"strategy={name}", "gpus=4") for name in ("ddp", "zero1")),
    *(
        (f"strategy={name}", "gpus=4", f"strategy.sharding_factor={factor}")
        for name in ("fsdp", "fsdp1")
        for factor in (1, 2, 4)
    ),
]
"""What `make scale` runs for every model."""

Execute = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path))


def write_config(folder: Path, name: str, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**CONFIGS[name], **fields}))
    return file


def list_overrides(path: Path, *overrides: str) -> tuple[str, ...]:
    """What chooses a model by its file, with a sequence that it takes."""
    attention = ("model.attention=eager",) if path.stem in EAGER else ()
    length = 17 if path.stem == "vit" else 32
    return ("model=hf", f"model.path={path}", f"sequence_length={length}", *attention, *overrides)


def build_model(path: Path, *overrides: str) -> HfFamily:
    model = compose_run_config(*list_overrides(path, *overrides)).model
    assert isinstance(model, HfFamily)
    return model


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_strategy_trains_it_as_one_process_does_and_needs_what_is_predicted(
    execute: Execute, tmp_path: Path, name: str
) -> None:
    model = (*list_overrides(write_config(tmp_path / "configs", name)), *STEPS)
    strategies = ALL_STRATEGIES if FULL_SCALE else STRATEGIES
    batch = 4 // int(strategies[0][1].removeprefix("gpus="))
    runs = [(*model, *SINGLE), *((*model, *strategy, f"batch_size_per_gpu={batch}") for strategy in strategies)]
    single, *others = records = execute(*runs)
    for record in records:
        assert record["status"] == "ok", record["error"]
    assert single["losses"][-1] < single["losses"][0] - 0.01
    for record in others:
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), record["effective_strategy"]
    for record, predicted in zip(records, predict_runs([compose_run_config(*run) for run in runs]), strict=True):
        expected = pytest.approx(record["peak_allocated_bytes"], rel=MEMORY_TOLERANCE)
        assert predicted.memory.allocated.value == expected, record["effective_strategy"]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_family_must_know_is_found_from_the_modules(tmp_path: Path, name: str) -> None:
    model = build_model(write_config(tmp_path, name))
    module = model.build_model()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    block_lists = model.find_block_lists(module)
    assert len(block_lists) == (2 if name in ("bart", "t5") else 1)
    blocks = {id(parameter) for blocks in block_lists for parameter in blocks.parameters()}
    outside = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in blocks)
    assert outside <= 2 * 512 * 64 + 2 * 258 * 64 + 10_000  # embeddings, a head, positions
    Materializer(module, model, torch.device("cpu"), 0).fill_model(module)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    flops = model.count_flops_per_sequence(17 if name == "vit" else 32)
    recomputed = sum(map(sum, flops.recomputed_by_block))
    assert recomputed == flops.blocks_linear + flops.blocks_attention - flops.blocks_last_linear > 0
    assert flops.blocks_linear > flops.blocks_last_linear


def test_a_model_is_named_after_its_file_or_folder_and_its_row_needs_neither(tmp_path: Path) -> None:
    folder = tmp_path / "My-OPT-125m"
    folder.mkdir()
    (folder / "config.json").write_text(write_config(tmp_path, "opt").read_text())
    config = compose_run_config("model=hf", f"model.path={folder}")
    assert config.model.name == "my-opt-125m"
    assert build_model(tmp_path / "opt.json").name == "opt"
    assert build_model(tmp_path / "opt.json", "model.name=mine").name == "mine"
    from bench.config.run_config import build_run_config

    (folder / "config.json").unlink()
    assert build_run_config(config.to_dict()).run_id == config.run_id


def test_every_field_of_the_configuration_can_be_set(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3_moe")
    model = build_model(path, "model.num_hidden_layers=5", "model.num_experts=4")
    assert len(model.find_block_lists(model.build_model())[0]) == 5
    assert model.config["num_experts"] == 4
    assert model.config["num_experts_per_tok"] == 2


def test_a_shorter_model_stands_for_a_longer_one_where_blocks_repeat(tmp_path: Path) -> None:
    long = {"num_hidden_layers": 18}
    for name, fields, num_first, period in (
        ("gpt_neox", long, 1, 1),
        ("bart", {"encoder_layers": 18, "decoder_layers": 16}, 1, 1),
        ("gpt_oss", long, 1, 2),
        ("deepseek_v2", long, 1, 1),
        ("deepseek_v2", {**long, "first_k_dense_replace": 3}, 3, 1),
        ("cohere2", long, 1, 4),
    ):
        model = build_model(write_config(tmp_path / str(num_first), name, **fields))
        assert (model.num_first_blocks, model.block_period) == (num_first, period)
        short = shorten_family(model, num_first + 3 * period, period)
        assert short is not None
        lists, short_lists = (family.find_block_lists(family.build_model()) for family in (model, short))
        for blocks, short_blocks in zip(lists, short_lists, strict=True):
            positions = BlockPositions(len(blocks), len(short_blocks), period)
            assert len(short_blocks) == num_first + 3 * period
            for position, block in enumerate(blocks):
                assert describe_block(short_blocks[positions.find_traced(position)]) == describe_block(block)


def test_blocks_that_do_not_repeat_are_traced_one_by_one(tmp_path: Path) -> None:
    layer_types = ["full_attention" if layer in {1, 2, 4, 9, 10, 15} else "sliding_attention" for layer in range(18)]
    model = build_model(write_config(tmp_path, "cohere2", num_hidden_layers=18, layer_types=layer_types))
    assert shorten_family(model, 12, model.block_period) is None
    dense_first = build_model(write_config(tmp_path, "deepseek_v2", num_hidden_layers=8, first_k_dense_replace=3))
    assert shorten_family(dense_first, 5, dense_first.block_period) is None  # of the last kind too few would be there


def test_blocks_that_hand_on_more_than_hidden_states_are_not_grouped(tmp_path: Path) -> None:
    model = build_model(write_config(tmp_path, "t5"))
    module = model.build_model()
    group_blocks(model, module, 2)
    with pytest.raises(UsageError, match=r"strategy.blocks_per_unit is not valid for T5Block.*choose 1"):
        module(
            **{name: tensor.to("meta") for name, tensor in model.build_batch(1, 8, torch.Generator()).inputs.items()}
        )


def test_blocks_can_be_named(tmp_path: Path) -> None:
    path = write_config(tmp_path, "opt")
    named = build_model(path, "model.block_lists=[model.decoder.layers]")
    assert named.find_block_lists(named.build_model())[0][0] is not None
    assert named._module_facts == build_model(path)._module_facts


def test_a_masked_model_predicts_as_many_tokens_of_every_sequence(tmp_path: Path) -> None:
    batch = build_model(write_config(tmp_path, "bert")).build_batch(6, 40, torch.Generator().manual_seed(0))
    is_predicted = batch.labels != -100
    assert is_predicted.sum(dim=1).tolist() == [6] * 6
    assert torch.equal(batch.labels[is_predicted], batch.inputs["input_ids"][is_predicted])
    assert len({tuple(row.tolist()) for row in is_predicted}) == 6


REFUSED = [
    ("opt", ("model.num_hidden_layers=many",), "transformers refuses the configuration.*num_hidden_layers"),
    ("opt", ("model.num_hidden_layer=4",), "model.num_hidden_layer is not a field .* choose model.num_hidden_layers"),
    ("opt", ("model.model_type=nothing",), "model.model_type=nothing is not valid: choose a type"),
    ("opt", ("sequence_length=300",), "sequence_length=300 is not valid: choose a whole number from 2 to 256"),
    ("roberta", ("sequence_length=257",), "sequence_length=257 is not valid: choose a whole number from 2 to 256"),
    ("vit", ("sequence_length=18",), "sequence_length=18 is not valid: choose 17, the image's"),
    ("opt", ("model.block_lists=[model.decoder.layer]",), "model.block_lists=.*choose model.decoder.layers"),
    ("bloom", ("model.attention=sdpa",), "model.attention=sdpa is not valid: choose eager"),
    ("opt", ("strategy=pipeline", "gpus=2"), "does not say how it is cut into stages"),
    ("opt", ("strategy=tensor_parallel", "gpus=2"), "must know how layers are divided"),
]


@pytest.mark.parametrize(("name", "overrides", "reason"), REFUSED, ids=str)
def test_what_makes_no_sense_is_refused(tmp_path: Path, name: str, overrides: tuple[str, ...], reason: str) -> None:
    path = write_config(tmp_path, name)
    with pytest.raises(UsageError, match=reason):
        compose_run_config(*list_overrides(path, *overrides)).model.build_model()


def test_a_file_that_is_no_configuration_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model.path has no value: choose a config\.json"):
        compose_run_config("model=hf")
    for text, reason in (("{", "is not JSON"), ('{"a": 1}', "with a model_type"), ("[]", "with a model_type")):
        file = tmp_path / "broken.json"
        file.write_text(text)
        read_model_config.cache_clear()
        with pytest.raises(UsageError, match=reason):
            read_model_config(str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        read_model_config(str(tmp_path / "missing.json"))


def test_a_name_on_the_hub_that_cannot_be_reached_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"model.path=nobody/nothing .*choose model.path=FILE"):
        read_model_config("nobody/nothing")
