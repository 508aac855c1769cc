"""Rehearsals: rank 0 of a job alone must do and hold what rank 0 does among the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import records
from bench import sweep as command
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.slurm.launcher import compute_job_shape
from bench.launch.task import LaunchTask
from bench.rank.engine import Engine, build_engine
from bench.rank.rehearsal_group import CompletedWork, init_rehearsal_group
from tests.conftest import CPU, ROOT, SMALL_GPT, compose_run_config

MEASURED = ROOT / "results" / "measured" / "cpu_memory"
WORST = 0.01
"""Of a rehearsed peak against the measured one."""

SHORT = ("batch_size_per_gpu=2", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=3")

Execute = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def lone() -> Iterator[dist.ProcessGroup]:
    """Rank 0 of eight, alone."""
    init_rehearsal_group(8)
    yield dist.group.WORLD
    dist.destroy_process_group()


# The group


def test_a_gather_repeats_what_this_rank_has(lone: dist.ProcessGroup) -> None:
    own, whole = torch.randn(3), torch.full((24,), math.nan)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, own.repeat(8))
    parts = [torch.full((3,), math.nan) for _ in range(8)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)


def test_a_gather_in_place_keeps_its_own_part(lone: dist.ProcessGroup) -> None:
    whole = torch.full((24,), math.nan)
    own = whole[:3]
    own.copy_(torch.tensor([1.0, 2.0, 3.0]))
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    work.wait()
    assert torch.equal(whole, torch.tensor([1.0, 2.0, 3.0]).repeat(8))


def test_reductions_leave_what_this_rank_contributes(lone: dist.ProcessGroup) -> None:
    whole, mine = torch.arange(24.0), torch.full((3,), math.nan)
    dist.reduce_scatter_tensor(mine, whole)
    assert torch.equal(mine, torch.tensor([0.0, 1.0, 2.0]))
    dist.all_reduce(whole)
    assert torch.equal(whole, torch.arange(24.0))
    dist.barrier()


def test_an_asynchronous_reduction_has_a_future_with_its_tensors(lone: dist.ProcessGroup) -> None:
    tensor = torch.ones(4)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.wait()[0] is tensor


def test_the_group_knows_who_is_there_only_by_name(lone: dist.ProcessGroup) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 8, "rehearsal")


# What rank 0 computes with


def engine_of(config: RunConfig) -> Engine:
    return build_engine(
        config.model,
        config.strategy,
        config.precision,
        config.optimizer,
        device=torch.device("cpu"),
        world_size=config.gpus,
        activation_checkpointing=config.activation_checkpointing,
        loss_chunks=config.loss_chunks,
        activation_offload=config.activation_offload,
        rehearsed=config.is_rehearsed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
def test_gathered_parameters_hold_sensible_values(strategy: str, precision: str) -> None:
    """In the forward pass of 512 ranks no weight is zero, none is no number, and they are as large as true ones."""
    config = compose_run_config(
        "model=gpt_tiny", f"strategy={strategy}", f"precision={precision}", "gpus=512", "mode=rehearse", *SHORT
    )
    init_rehearsal_group(512)
    try:
        engine = engine_of(config)
        seen: dict[str, torch.Tensor] = {}

        def look(name: str) -> Callable[..., None]:
            def keep(module: torch.nn.Module, inputs: Any) -> None:
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    seen[f"{name}.{parameter_name}"] = parameter.detach().float().clone()

            return keep

        hooks = [module.register_forward_pre_hook(look(name)) for name, module in engine.module.named_modules()]
        batch = config.model.build_batch(2, 32, torch.Generator().manual_seed(0)).select_sequences(
            slice(0, 2), torch.device("cpu")
        )
        first = engine.step([batch])
        for hook in hooks:
            hook.remove()
        losses = [first, *(engine.step([batch]) for _ in range(3))]
    finally:
        dist.destroy_process_group()
    weights = {name: value for name, value in seen.items() if value.dim() == 2 and "c_" in name}
    assert len(weights) >= 4 * config.model.num_layers
    for name, value in weights.items():
        assert torch.isfinite(value).all(), name
        assert (value == 0).float().mean() < 0.01, name
        assert 0.001 < value.std() < 0.3, name
    assert all(torch.isfinite(loss) for loss in losses)
    assert losses[0].item() == pytest.approx(math.log(config.model.vocabulary_size), rel=0.15)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp strategy.sharding_factor=1", "fsdp1 strategy.sharding_factor=1"])
def test_with_whole_copies_a_rehearsal_starts_as_one_process_does(strategy: str, execute: Execute) -> None:
    """Rank 0's share of the batch and its weights are the true ones: its first loss is that of the real rank 0."""
    name, *knobs = strategy.split()
    alone, measured = execute(
        (*SMALL_GPT, f"strategy={name}", *knobs, "gpus=2", "mode=rehearse", *SHORT),
        (*SMALL_GPT, f"strategy={name}", *knobs, "gpus=2", *SHORT),
    )
    assert alone["evidence"] == "rehearsed"
    own = compose_run_config(*SMALL_GPT, "strategy=single", *SHORT)
    init_rehearsal_group(1)
    try:
        engine = engine_of(own)
        batch = own.model.build_batch(4, 32, torch.Generator().manual_seed(0)).select_sequences(
            slice(0, 2), torch.device("cpu")
        )
        assert alone["losses"][0] == pytest.approx(engine.step([batch]).item(), rel=1e-6)
    finally:
        dist.destroy_process_group()
    assert alone["losses"][0] == pytest.approx(measured["losses"][0], rel=0.05)  # whose batch is twice as large


# What rank 0 holds


def rank_0_peaks(row: dict[str, Any]) -> tuple[int, int]:
    rank = next(rank for rank in row["ranks"] if rank["rank"] == 0)
    return rank["peak_allocated_bytes"], rank["peak_allocated_overall_bytes"]


def pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Committed rows of the same configuration, measured among others and rehearsed alone."""
    table = records.load(MEASURED)
    rehearsed = {}
    for run_id in table[table.evidence == "rehearsed"].run_id:
        row = records.read_latest_row(MEASURED, run_id)
        assert row is not None
        config = dataclasses.replace(build_run_config(row["config"]), mode="measure")
        rehearsed[config.run_id] = row
    found = []
    for run_id in table[table.evidence == "measured"].run_id:
        row = records.read_latest_row(MEASURED, run_id)
        assert row is not None
        measured_id = build_run_config(row["config"]).run_id
        if measured_id in rehearsed:
            found.append((row, rehearsed[measured_id]))
    return found


def test_committed_rehearsals_hold_what_the_real_rank_0_held() -> None:
    """Every strategy and sharding factor at 2 and 4 processes, fp32 and bf16, with and without checkpointing."""
    compared = pairs()
    covered = {
        (
            row["strategy"],
            row["sharding_factor"],
            row["world_size"],
            row["precision"],
            row["activation_checkpointing"],
            row["family"],
        )
        for row, _ in compared
    }
    for strategy, factors in {"ddp": {2: [1], 4: [1]}, "fsdp": {2: [1, 2], 4: [1, 2, 4]}}.items():
        for name in [strategy, "fsdp1"] if strategy == "fsdp" else [strategy]:
            for world, values in factors.items():
                for factor in values:
                    for precision in ("fp32", "bf16"):
                        for checkpointing in ("none", "full"):
                            for family in ("t5", "gpt"):
                                key = (name, factor, world, precision, checkpointing, family)
                                assert key in covered, key
    for measured, rehearsed in compared:
        for real, alone in zip(rank_0_peaks(measured), rank_0_peaks(rehearsed), strict=True):
            assert alone == pytest.approx(real, rel=WORST), (measured["run_id"], rehearsed["run_id"])


REHEARSED_AGAIN = (
    ("t5", "ddp", 1, "fp32", "none"),
    ("gpt", "ddp", 1, "bf16", "full"),
    ("t5", "fsdp", 4, "bf16", "full"),
    ("gpt", "fsdp", 2, "fp32", "none"),
    ("t5", "fsdp", 1, "bf16", "none"),
    ("t5", "fsdp1", 4, "fp32", "none"),
    ("gpt", "fsdp1", 2, "bf16", "full"),
    ("gpt", "fsdp1", 1, "fp32", "full"),
)


@pytest.mark.long
@pytest.mark.slow
def test_rehearsals_hold_what_the_real_rank_0_held(tmp_path: Path) -> None:
    """Rehearsed here and now, against rows measured with 4 real processes."""
    table = records.load(MEASURED)
    rows = []
    for family, strategy, factor, precision, checkpointing in REHEARSED_AGAIN:
        alike = table[
            (table.evidence == "measured")
            & (table.world_size == 4)
            & (table.family == family)
            & (table.strategy == strategy)
            & (table.sharding_factor == factor)
            & (table.precision == precision)
            & (table.activation_checkpointing == checkpointing)
        ]
        (run_id,) = alike.run_id
        row = records.read_latest_row(MEASURED, run_id)
        assert row is not None
        rows.append(row)
    configs = [dataclasses.replace(build_run_config(row["config"]), mode="rehearse") for row in rows]
    launcher = LocalLauncher(compose_config({})["cluster"], CPU)
    with StopSignal() as stop:
        launcher.launch([LaunchTask(config) for config in configs], tmp_path, "test", stop, lambda event: None)
    for measured, config in zip(rows, configs, strict=True):
        rehearsed = records.read_latest_row(tmp_path, config.run_id)
        assert rehearsed is not None
        assert (rehearsed["status"], rehearsed["evidence"], rehearsed["world_size"]) == ("ok", "rehearsed", 4)
        for real, alone in zip(rank_0_peaks(measured), rank_0_peaks(rehearsed), strict=True):
            assert alone == pytest.approx(real, rel=WORST), rehearsed["config"]["strategy"]


@pytest.mark.long
@pytest.mark.slow
def test_both_hold_the_same_when_made_now(execute: Execute) -> None:
    """Not against committed rows: two real processes beside the rehearsal, with knobs those rows do not have."""
    # In the first, threads of gloo allocate buffers of their own, which are not the run's.
    variants = (
        ("model=t5_tiny", "strategy=fsdp"),
        (*SMALL_GPT, "strategy=ddp", "precision=bf16_pure", "strategy.gradient_as_bucket_view=false"),
        (*SMALL_GPT, "strategy=fsdp", "strategy.reshard_after_forward=false", "gradient_accumulation=2"),
        (*SMALL_GPT, "strategy=fsdp1", "precision=bf16", "strategy.backward_prefetch=none", "gradient_accumulation=2"),
    )
    runs = [(*variant, "gpus=2", "batch_size_per_gpu=1", "sequence_length=64", *SHORT[2:]) for variant in variants]
    rows = execute(*runs, *((*run, "mode=rehearse") for run in runs))
    for measured, rehearsed in zip(rows[: len(runs)], rows[len(runs) :], strict=True):
        assert measured["run_id"] != rehearsed["run_id"]
        for real, alone in zip(rank_0_peaks(measured), rank_0_peaks(rehearsed), strict=True):
            assert alone == pytest.approx(real, rel=WORST)


@pytest.mark.long
@pytest.mark.slow
def test_what_runs_out_of_memory_says_where(execute: Execute) -> None:
    """The miniature of Figure 6(a): DDP bursts, full sharding among more ranks fits.

    DDP's limit is reached in the middle of the largest state of the optimizer: which of many small ones would burst it
    depends on what threads hold at that moment.
    """
    limit = ("model=t5_mini", "hardware.memory_limit_gib=0.164", "batch_size_per_gpu=1", *SHORT[1:])
    real, ddp, few, many = execute(
        (*limit, "strategy=ddp", "gpus=1"),
        (*limit, "strategy=ddp", "gpus=64", "mode=rehearse"),
        (*limit, "strategy=fsdp", "gpus=16", "mode=rehearse"),
        (*limit, "strategy=fsdp", "gpus=64", "mode=rehearse"),
    )
    assert (ddp["status"], ddp["oom_phase"], ddp["oom_bytes"]) == ("oom", real["oom_phase"], real["oom_bytes"])
    assert (few["status"], many["status"]) == ("ok", "ok")
    assert many["peak_allocated_bytes"] < few["peak_allocated_bytes"]
    assert len(many["ranks"]) == 1


# What is planned and refused


def test_a_rehearsal_needs_one_device_however_many_ranks_it_stands_for() -> None:
    config = compose_run_config("model=gpt_175b", "strategy=fsdp", "gpus=512", "mode=rehearse", "sequence_length=2048")
    assert (config.active_processes, config.active_nodes, config.nodes) == (1, 1, 64)
    assert compute_job_shape(config) == (1, 1, 1)
    assert (
        compose_run_config("gpus=4").active_processes,
        compose_run_config("gpus=4", "mode=predict").active_processes,
    ) == (4, 0)


def test_a_rehearsal_is_another_run_than_a_measurement() -> None:
    ids = {compose_run_config("gpus=4", f"mode={mode}").run_id for mode in ("measure", "rehearse", "predict")}
    assert len(ids) == 3


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_communicated_so_nothing_is_exposed(execute: Execute) -> None:
    (row,) = execute((*SMALL_GPT, "strategy=fsdp", "gpus=16", "mode=rehearse", "measurement.profile=true", *SHORT))
    assert row["exposed_communication"] is None
    assert (row["effective"]["backend"], len(row["ranks"])) == ("rehearsal", 1)


# Pieces


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_goes_on_where_its_time_was_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However short a piece, one run is made in it, and none twice."""
    typed = ["-m", *SMALL_GPT, "strategy=ddp", "gpus=2,4,8", "mode=rehearse", f"store={tmp_path}", "report=false"]
    codes = [command.main([*typed, *SHORT, "time_budget_min=0.0001"]) for _ in range(3)]
    assert codes == [1, 1, 0]
    assert "Stopped by time_budget_min=0.0001" in capsys.readouterr().out
    table = records.load(tmp_path)
    assert list(table.status) == ["ok"] * 3
    assert list(table.attempt) == [0] * 3


def test_waiting_for_a_rehearsed_collective_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future's wait has the allocator keep its tensors for the stream that waits, which NCCL's work does not."""
    calls: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self._name = name

        def record_event(self) -> str:
            calls.append(f"{self._name} records")
            return f"event of {self._name}"

        def wait_event(self, event: str) -> None:
            calls.append(f"{self._name} waits for the {event}")

    streams = iter([Stream("gather stream"), Stream("compute stream")])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    work = CompletedWork([torch.ones(1)], torch.device("cuda"))
    monkeypatch.setattr(torch.futures, "Future", None)
    assert work.wait()
    assert calls == ["gather stream records", "compute stream waits for the event of gather stream"]
