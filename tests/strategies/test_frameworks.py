"""Accelerate and Lightning: the same training as the plain strategy that they wrap, and what is not left to them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from bench.core.errors import ImpossibleError, UsageError
from bench.core.option_files import CONF_FOLDER
from bench.prediction.predictor import predict_run
from bench.rank.environment import describe_software
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.accelerate import ENVIRONMENT_PREFIXES, _build_rank_environment, require_supported_driver
from bench.strategies.framework import BACKEND_KNOB_DEFAULTS as OFFERED
from bench.strategies.framework import FIXED_BACKEND_KNOBS, PLAIN_STRATEGIES, isolate_environment
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config, needs

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
FRAMEWORKS = ("accelerate", "lightning")
BACKENDS = ("ddp", "fsdp", "fsdp1")


def predict_allocated_bytes(*overrides: str) -> float:
    return predict_run(compose_run_config(*overrides)).memory.allocated.value


SINGLE = ("strategy=single", "gpus=1", "batch_size_per_gpu=8")
FOUR_GPUS = ("gpus=4", "batch_size_per_gpu=2")
HYBRID = ("strategy.backend=fsdp", "strategy.sharding_factor=2")

PARITY: dict[str, list[tuple[tuple[str, ...], tuple[str, ...], str]]] = {
    "accelerate": [
        (SMALL_T5, ("strategy.backend=ddp",), "ddp"),
        (SMALL_T5, ("strategy.backend=fsdp",), "full_shard"),
        (SMALL_GPT, HYBRID, "hybrid_shard"),
        (SMALL_GPT, ("strategy.backend=fsdp1",), "fsdp1_full_shard"),
    ],
    "lightning": [(SMALL_T5, ("strategy.backend=ddp",), "ddp"), (SMALL_GPT, HYBRID, "hybrid_shard")],
}
"""What four processes train as one does: model, knobs and what the strategy comes to. Lightning's import costs every
rank a second, so it has fewer of them."""

KNOBS: dict[str, list[tuple[str, str, str]]] = {
    "accelerate": [("ddp", "gpus=2", "precision=bf16"), ("fsdp", "gpus=2", "gradient_accumulation=2")],
    "lightning": [("ddp", "gpus=1", "precision=bf16"), ("fsdp1", "gpus=2", "gradient_accumulation=2")],
}
"""What is trained as the plain strategy does it: backend, processes and a setting."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(name, marks=needs(name)) for name in FRAMEWORKS])
def test_a_framework_computes_what_the_plain_strategy_does_and_keeps_what_is_predicted(
    execute: Execute, framework: str
) -> None:
    parity = [(*model, *STEPS, *FOUR_GPUS, f"strategy={framework}", *knobs) for model, knobs, _ in PARITY[framework]]
    run = (*SMALL_T5, *STEPS)
    knobs = [(*run, f"strategy={framework}", f"strategy.backend={name}", *rest) for name, *rest in KNOBS[framework]]
    plain = [(*run, f"strategy={name}", *rest) for name, *rest in KNOBS[framework]]
    alone = [(*run, f"strategy={framework}", "strategy.backend=fsdp", "gpus=8", "mode=rehearse")]
    singles = {model: (*model, *STEPS, *SINGLE) for model in (SMALL_T5, SMALL_GPT)}
    all_runs = [*parity, *knobs, *plain, *alone, *singles.values()]
    runs = dict(zip(all_runs, execute(*all_runs), strict=True))
    for run, record in runs.items():
        assert record["status"] == "ok", (run, record["error"])
        assert record["peak_allocated_bytes"] == pytest.approx(predict_allocated_bytes(*run), rel=0.01), run
    for run, (model, _, kind) in zip(parity, PARITY[framework], strict=True):
        assert runs[run]["losses"] == pytest.approx(runs[singles[model]]["losses"], rel=1e-5), run
        assert runs[run]["effective_strategy"] == f"{framework}/{kind}"
    for run, of_plain in zip(knobs, plain, strict=True):
        assert runs[run]["losses"] == pytest.approx(runs[of_plain]["losses"], rel=1e-6), run
    for losses in (runs[single]["losses"] for single in singles.values()):
        assert losses[-1] < losses[0] - 0.01
    packages = runs[parity[0]]["environment"]["packages"]
    assert packages[framework] == importlib.metadata.version(framework)
    assert [runs[run]["reshard_after_forward"] for run in parity[:2]] == [None, True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("strategy.backend=zero",), r"strategy.backend=zero is not valid: choose ddp, fsdp, fsdp1"),
        (("strategy.reshard_after_forward=false",), r"reshard_after_forward=false .* null: strategy.backend=ddp"),
        (("strategy.backend=fsdp", "strategy.forward_prefetch=true"), r"forward_prefetch=true .* choose null"),
        (("strategy.sharding_factor=2",), r"sharding_factor=2 is not valid for strategy=\w+ with strategy.backend=ddp"),
        (("strategy.backend=fsdp", "strategy.sharding_factor=3"), r"sharding_factor=3 is not valid"),
        (("precision=fp16",), r"precision=fp16 is not valid for strategy=\w+, .* choose bf16"),
        (("precision.reduce=bf16",), r"precision.reduce=bf16 .* reduces gradients as they are stored: choose fp32"),
        (("gradient_accumulation=2", "strategy.static_graph=true"), r"static_graph=true is not valid"),
        (
            ("strategy.backend=fsdp", "optimizer=sgd", "optimizer.implementation=fused"),
            r"optimizer.implementation=fused is not valid",
        ),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_makes_no_sense_is_refused(framework: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compose_run_config(*SMALL_T5, f"strategy={framework}", "gpus=4", *overrides)


def test_accelerate_has_no_mesh_for_fsdp1_and_none_without_shards() -> None:
    run = (*SMALL_T5, "strategy=accelerate", "gpus=4")
    with pytest.raises(ImpossibleError, match=r"sharding_factor=2 .*backend=fsdp1: choose full, or strategy fsdp1"):
        compose_run_config(*run, "strategy.backend=fsdp1", "strategy.sharding_factor=2")
    with pytest.raises(ImpossibleError, match=r"sharding_factor=1 .*backend=fsdp: choose more than 1"):
        compose_run_config(*run, "strategy.backend=fsdp", "strategy.sharding_factor=1")


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_library_it_can_be_predicted_and_nothing_else(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == framework else original_find_spec(name, *rest)
    )
    run = (*SMALL_T5, f"strategy={framework}", "gpus=4")
    config = compose_run_config(*run)
    with pytest.raises(ImpossibleError, match=rf'strategy={framework} needs .* pip install -e "\.\[{framework}\]"'):
        config.strategy.check_installed()
    assert predict_allocated_bytes(*run) == predict_allocated_bytes(*SMALL_T5, "strategy=ddp", "gpus=4")


def test_a_knob_that_is_not_given_is_the_plain_strategys() -> None:
    for backend in BACKENDS:
        plain = compose_run_config(*SMALL_T5, f"strategy={backend}", "gpus=4").strategy
        for framework in FRAMEWORKS:
            strategy: Any = compose_run_config(
                *SMALL_T5, f"strategy={framework}", f"strategy.backend={backend}", "gpus=4"
            ).strategy
            assert strategy.plain_strategy == plain


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_null_stands_for_is_in_the_plain_strategys_yaml(backend: str) -> None:
    file = yaml.safe_load((CONF_FOLDER / "strategy" / f"{backend}.yaml").read_text())
    knobs = {**OFFERED[backend], **FIXED_BACKEND_KNOBS[backend]}
    plain = PLAIN_STRATEGIES[backend](name=backend, sharding_factor=file["sharding_factor"], **knobs)
    assert {name: getattr(plain, name) for name in file} == file


def test_frameworks_read_nothing_of_how_to_train_from_the_environment_and_keep_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    before, threads = dict(os.environ), torch.get_num_threads()
    with isolate_environment(("ACCELERATE_",), RANK="3"):
        assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in os.environ
        assert os.environ["RANK"] == "3"
        torch.set_num_threads(threads + 1)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads


@needs("accelerate")
def test_ranks_of_several_machines_need_no_address_where_a_process_group_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import PartialState

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    PartialState._reset_state()  # what tests before this one left
    init_rehearsal_group(4)
    try:
        with isolate_environment(ENVIRONMENT_PREFIXES, **_build_rank_environment(torch.device("cpu"))):
            state = PartialState(cpu=True)
            assert (state.num_processes, state.process_index) == (4, 0)
            PartialState._reset_state()
            os.environ["LOCAL_WORLD_SIZE"] = "2"
            with pytest.raises(ValueError, match="MASTER_ADDR"):
                PartialState(cpu=True)
    finally:
        PartialState._reset_state()
        dist.destroy_process_group()


def test_what_accelerate_refuses_is_said_with_the_ways_out() -> None:
    require_supported_driver(is_supported=True)
    with pytest.raises(ImpossibleError, match=r"NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1.*strategy ddp"):
        require_supported_driver(is_supported=False)


@needs("accelerate")
def test_accelerate_still_says_which_gpus_it_refuses() -> None:
    from accelerate.utils import check_cuda_p2p_ib_support

    assert check_cuda_p2p_ib_support() is True  # without such GPUs


def test_versions_are_recorded() -> None:
    assert set(FRAMEWORKS) <= set(describe_software()["packages"])
