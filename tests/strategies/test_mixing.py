"""Two ways of mixed precision: one at a time they compute the same under every strategy, and need what is predicted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from bench.config.run_config import build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.prediction.predictor import predict_run
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.records import Record, read_latest_attempts
from bench.records.matching import build_run_key
from bench.strategies.step_plan import SHARD_GROUP
from bench.sweeps.tables import _describe_differing_settings
from tests.conftest import ROOT, SMALL_GPT, SMALL_T5, compose_run_config
from tests.strategies.test_strategy_plans import config, sent

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
AUTOCAST, PARAMETERS = "precision.mixing=autocast", "precision.mixing=parameters"
HALF_REDUCED = "precision.reduce=bf16"

MIXING_OPTIONS = {
    "ddp autocast": ("strategy=ddp", AUTOCAST),
    "fsdp autocast": ("strategy=fsdp", AUTOCAST),
    "fsdp autocast F=1": ("strategy=fsdp", "strategy.sharding_factor=1", AUTOCAST),
    "fsdp1 autocast": ("strategy=fsdp1", AUTOCAST),
    "fsdp1 autocast F=1": ("strategy=fsdp1", "strategy.sharding_factor=1", AUTOCAST),
    "fsdp parameters": ("strategy=fsdp", PARAMETERS),
    "fsdp parameters F=1": ("strategy=fsdp", "strategy.sharding_factor=1", PARAMETERS),
    "fsdp1 parameters": ("strategy=fsdp1", PARAMETERS),
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"),
    [(SMALL_T5, "bf16"), (SMALL_GPT, "bf16"), (SMALL_GPT, "fp16")],
    ids=["t5", "gpt", "gpt fp16"],
)
def test_within_one_way_every_strategy_has_the_same_losses_and_needs_what_is_predicted(
    execute: Execute, model: tuple[str, ...], precision: str
) -> None:
    two = (*model, *STEPS, "gpus=2", f"precision={precision}", "batch_size_per_gpu=4", "sequence_length=64")
    overrides_by_name = {name: (*two, *option_overrides) for name, option_overrides in MIXING_OPTIONS.items()}
    runs = dict(zip(overrides_by_name, execute(*overrides_by_name.values()), strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", record["error"]
        mixing = "autocast" if "autocast" in name else "parameters"
        reference = runs["ddp autocast" if mixing == "autocast" else "fsdp parameters"]
        assert record["losses"] == pytest.approx(reference["losses"], rel=1e-3), name
        assert record["mixed_precision"] == ("autocast" if mixing == "autocast" else "fsdp policy"), name
        predicted = predict_run(compose_run_config(*overrides_by_name[name])).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(predicted, rel=0.01), name
    assert runs["ddp autocast"]["losses"] != runs["fsdp parameters"]["losses"]


@pytest.mark.long
@pytest.mark.slow
def test_meshes_of_one_and_two_dimensions_compute_the_same_and_need_what_is_predicted(execute: Execute) -> None:
    """What is reduced in another format than it is stored in stays until backward is over where replicas reduce it."""
    shape = ("batch_size_per_gpu=4", "sequence_length=64")
    two = (*SMALL_GPT, *STEPS, "strategy=fsdp", "gpus=2", "precision=bf16", HALF_REDUCED, *shape)
    variants = [(*two, f"strategy.mesh_2d={value}") for value in ("false", "true")]
    mesh_1d_record, mesh_2d_record = execute(*variants)
    assert mesh_1d_record["losses"] == mesh_2d_record["losses"]
    for overrides, record in zip(variants, (mesh_1d_record, mesh_2d_record), strict=True):
        predicted = predict_run(compose_run_config(*overrides)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(predicted, rel=0.01), overrides
    assert (mesh_1d_record["effective"]["mesh_2d"], mesh_2d_record["effective"]["mesh_2d"]) == (False, True)


def test_the_usual_way_asked_for_is_the_same_run() -> None:
    half = ("precision=bf16", "gpus=2")
    for strategy, usual, other in (
        ("ddp", AUTOCAST, None),
        ("fsdp", PARAMETERS, AUTOCAST),
        ("fsdp1", PARAMETERS, AUTOCAST),
    ):
        run = compose_run_config(f"strategy={strategy}", *half)
        assert compose_run_config(f"strategy={strategy}", *half, usual).run_id == run.run_id
        if other is not None:
            assert compose_run_config(f"strategy={strategy}", *half, other).run_id != run.run_id
    plain = compose_run_config("strategy=fsdp", "gpus=2")
    assert {compose_run_config("strategy=fsdp", "gpus=2", mixing).run_id for mixing in (AUTOCAST, PARAMETERS)} == {
        plain.run_id
    }


REFUSED_OVERRIDES = {
    ("strategy=ddp", "gpus=2", PARAMETERS): ("strategy=ddp", "wrong gradients", "choose autocast, or strategy"),
    ("strategy=zero1", "gpus=2", PARAMETERS): ("strategy=zero1", "choose autocast, or strategy", "fsdp"),
    ("strategy=single", PARAMETERS): ("strategy=single", "choose autocast, or strategy", "fsdp1"),
    ("strategy=tensor_parallel", "strategy.degree=2", "gpus=4", AUTOCAST): (
        "strategy=tensor_parallel",
        "choose parameters",
    ),
    ("strategy=pipeline", "strategy.stages=2", "gpus=2", PARAMETERS): ("strategy=pipeline", "choose autocast"),
    ("strategy=accelerate", "strategy.backend=fsdp", "gpus=2", AUTOCAST): ("strategy=accelerate", "choose parameters"),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED_OVERRIDES.items(), ids=str)
def test_a_way_that_a_strategy_does_not_have_is_refused_in_a_sentence(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ImpossibleError) as refusal:
        compose_run_config("precision=bf16", *overrides)
    sentence = str(refusal.value)
    assert sentence.startswith("precision.mixing=")
    assert all(word in sentence for word in words)
    assert sentence.count(". ") == 0


@pytest.mark.parametrize("whole", [("gpus=1",), ("gpus=2", "strategy.sharding_factor=1")])
def test_fsdp1_keeps_no_gradients_of_whole_parameters_that_it_casts(whole: tuple[str, ...]) -> None:
    """torch fails in the second micro-batch."""
    run = ("strategy=fsdp1", *whole, "precision=bf16", "gradient_accumulation=2")
    with pytest.raises(
        ImpossibleError, match=r"^gradient_accumulation_sync=false .*: choose true, or strategy fsdp1 w"
    ):
        compose_run_config(*run)
    for other in (("gradient_accumulation_sync=true",), (AUTOCAST,), ("precision=fp32",)):
        compose_run_config(*run, *other)


def test_what_lightnings_fsdp1_does_not_accumulate_is_refused_by_its_name() -> None:
    run = ("strategy=lightning", "strategy.backend=fsdp1", "gpus=1", "precision=bf16", "gradient_accumulation=2")
    with pytest.raises(
        ImpossibleError, match=r"for strategy=lightning with strategy\.backend=fsdp1, .* or strategy fsdp"
    ):
        compose_run_config(*run)
    compose_run_config(*run, "gradient_accumulation_sync=true")


def test_a_way_that_nobody_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"precision\.mixing=both is not valid: choose autocast, parameters"):
        compose_run_config("precision=bf16", "precision.mixing=both")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_under_autocast_parameters_are_gathered_as_they_are_stored(strategy: str) -> None:
    cast = sent(config(strategy=strategy, precision="bf16"))
    whole = sent(config(strategy=strategy, precision="bf16", **{"precision.mixing": "autocast"}))
    assert whole.volume("all-gather", SHARD_GROUP) == pytest.approx(
        2 * cast.volume("all-gather", SHARD_GROUP), rel=1e-3
    )
    assert whole.volume("reduce-scatter", SHARD_GROUP) == pytest.approx(
        cast.volume("reduce-scatter", SHARD_GROUP), rel=1e-3
    )


MEASURED = ("cpu_2core", "cpu_frameworks", "cpu_frontier", "cpu_memory", "cpu_pipelines", "strategies")


def read_earlier_rows(store: str) -> Iterator[Record]:
    """Rows from before there was a choice that can be composed with what is installed."""
    for row in read_latest_attempts(ROOT / "results" / "measured" / store).records:
        with contextlib.suppress(ImpossibleError):
            build_run_config(row["config"])
            yield row


@pytest.mark.parametrize("store", MEASURED)
def test_rows_from_before_there_was_a_choice_are_the_same_runs(store: str) -> None:
    rows = list(read_earlier_rows(store))
    assert rows
    for row in rows:
        today = build_run_config(row["config"])
        assert today.run_id == row["run_id"], row["effective_strategy"]
        again = {**row, "config": today.to_dict()}
        assert build_run_key(again) == build_run_key(row)


def test_what_was_done_before_can_still_be_asked_for() -> None:
    known_run_ids = {row["run_id"] for row in read_earlier_rows("cpu_memory")}
    run = ("hardware=cpu", "model=gpt_mini", "gpus=2", "batch_size_per_gpu=2", "sequence_length=64")
    run = (*run, "measurement.warmup_steps=2", "measurement.steps=1", "model.activation=gelu_new")
    for before in (("strategy=ddp", "strategy.bucket_cap_mb=25"), ("strategy=fsdp", "strategy.mesh_2d=true")):
        assert compose_run_config(*run, *before).run_id in known_run_ids
        assert compose_run_config(*run, before[0]).run_id not in known_run_ids
    assert (
        compose_run_config(*run, "strategy=fsdp", "strategy.sharding_factor=1").run_id in known_run_ids
    )  # two dimensions anyway


class FakeStream:
    """Stands for streams and events of accelerators, which DDP's mixed precision needs even on a CPU."""

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self) -> None:
        """Nothing is going on beside."""

    def wait(self, stream: Any = None) -> None:
        """So there is nothing to wait for."""

    wait_stream = wait


@pytest.fixture
def two_ranks() -> Iterator[None]:
    init_rehearsal_group(2)
    yield
    dist.destroy_process_group()


def test_torchs_ddp_casts_parameters_with_wrong_gradients(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is refused. Where this fails torch has mended it: then take it in.

    Its first backward reduces a bucket in 16 bits that was never filled: gradients were copied into the one in fp32.
    """
    monkeypatch.setattr(torch, "Event", FakeStream)
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", FakeStream)
    model = nn.Linear(64, 64, bias=False)
    batch = torch.ones(8, 64)
    expected = torch.autograd.grad(model(batch).sum(), model.weight)[0]
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(model, mixed_precision=half, init_sync=False)
    wrapped(batch).float().sum().backward()
    assert model.weight.grad is not None
    assert not torch.allclose(model.weight.grad, expected, rtol=0.1)


def test_a_mesh_that_nobody_asked_for_is_no_setting_that_tells_runs_apart() -> None:
    four = ("model=t5_tiny", "gpus=4", "strategy=fsdp")
    derived = [compose_run_config(*four, f"strategy.sharding_factor={factor}") for factor in (2, "full")]
    assert [config.strategy.mesh_2d for config in derived] == [True, False]
    assert set(_describe_differing_settings(derived).values()) == {""}
    explicit = [compose_run_config(*four, f"strategy.mesh_2d={value}") for value in ("true", "false")]
    assert sorted(_describe_differing_settings(explicit).values()) == ["mesh_2d=false", "mesh_2d=true"]
