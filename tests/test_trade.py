"""Memory against throughput: which runs stand in one figure, what they are called, and what is drawn of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.planning.compose import groups
from bench.planning.plan import make_plan
from bench.planning.request import read_request
from bench.records import Record
from bench.reporting import style
from bench.reporting.drawing import Section, save
from bench.reporting.figures import trade
from bench.reporting.table import prepare
from tests.conftest import CPU
from tests.records_fixture import record


def rows(**columns: Any) -> list[Record]:
    four = {"world_size": 4, "device": "cpu", **columns}
    return [
        record(strategy="ddp", effective_strategy="ddp", **four),
        record(strategy="zero1", effective_strategy="zero1", **four),
        record(strategy="fsdp", effective_strategy="fsdp/full_shard", sharding_factor=4, **four),
    ]


def drawn(records: list[Record]) -> Section:
    table = prepare(records)
    with style.context():
        return trade.section(table, style.palette(table["variant_key"]))


def test_three_strategies_of_one_workload_are_a_figure(tmp_path: Path) -> None:
    result = drawn([*rows(), *rows(model="t5_small")[:2]])
    (drawing,) = result.drawings
    assert "t5_tiny" in drawing.title
    assert "4 processes" in drawing.title
    for name in ("DDP", "ZeRO-1", "FSDP2 full shard"):
        assert name in drawing.alt
    assert "Fastest: DDP" in drawing.caption
    assert "Least memory: FSDP2 full shard" in drawing.caption
    assert save(drawing, tmp_path).count("<path") > 10


def test_two_are_no_choice() -> None:
    result = drawn(rows()[:2])
    assert result.drawings == []
    assert "3 strategies" in result.nothing


def test_runs_without_a_peak_are_no_points() -> None:
    assert drawn([one | {"peak_allocated_bytes": None} for one in rows()]).drawings == []


def test_what_ran_out_of_memory_has_a_name_and_no_throughput() -> None:
    lost = record(
        strategy="fsdp", effective_strategy="fsdp/hybrid_shard", sharding_factor=2, world_size=4, device="cpu",
        status="oom", oom_phase="backward",
    )  # fmt: skip
    table = prepare([*rows(), lost])
    selected = trade.select(table)
    assert list(selected[selected["median"].isna()]["choice"]) == ["FSDP2 hybrid (F=2)"]
    (drawing,) = drawn([*rows(), lost]).drawings
    crosses = [line for line in drawing.figure.axes[0].lines if line.get_marker() == "X"]
    assert len(crosses) == 1
    assert crosses[0].get_ydata()[0] == 0
    drawing.figure.draw_without_rendering()
    axes = drawing.figure.axes[0]
    half = crosses[0].get_markersize() / 2 * drawing.figure.dpi / 72
    assert axes.transData.transform(crosses[0].get_xydata()[0])[0] + half < axes.bbox.x1


def test_a_precision_of_few_strategies_stands_among_the_usual() -> None:
    few = [record(strategy="ddp", effective_strategy="ddp", precision="fp8", world_size=4, device="cpu")]
    (drawing,) = drawn([*rows(precision="bf16"), *few]).drawings
    assert ", bf16, " in drawing.title
    assert "DDP, fp8" in drawing.alt
    assert len(drawn([*rows(precision="bf16"), *rows(precision="fp8")]).drawings) == 2


def test_what_differs_from_most_is_part_of_the_name() -> None:
    checkpointed = rows(activation_checkpointing="full")[2]
    choices = set(trade.select(prepare([*rows(), checkpointed]))["choice"])
    assert choices == {"DDP", "ZeRO-1", "FSDP2 full shard", "FSDP2 full shard, checkpointing full"}


def test_the_sweep_has_every_strategy_once_for_each_model() -> None:
    request = read_request(["sweep=strategies"], multirun=False, device=CPU)
    planned = make_plan(request.points, Path("nowhere"), force=True, check=lambda config: None).to_run
    kinds = [(config.model.name, config.strategy.effective(config.gpus)) for config in planned]
    of_t5 = {kind for model, kind in kinds if model == "t5_mini"}
    assert of_t5 == {kind for model, kind in kinds if model == "gpt_mini"}
    assert of_t5 >= {
        *("ddp", "zero1", "fsdp/full_replication", "fsdp/hybrid_shard", "fsdp/full_shard", "fsdp/shard_grad_op"),
        *("fsdp1/no_shard", "fsdp1/hybrid_shard", "fsdp1/full_shard", "fsdp1/shard_grad_op"),
        *("tensor_parallel/2x2+sequence+fsdp", "tensor_parallel/2x2+fsdp", "tensor_parallel/2x2+sequence+ddp"),
        *("pipeline/gpipe", "pipeline/1f1b", "pipeline/interleaved_1f1b+ddp", "pipeline/1f1b+fsdp", "naive_pipeline"),
    }
    here = set(groups()["strategy"]) - {"single", "data_parallel", "zero2", "zero2_fsdp1"}  # zero2: a knob of FSDP
    here -= {name for name in ("accelerate", "deepspeed", "lightning") if find_spec(name) is None}
    assert {config.strategy.name for config in planned} == here
    assert len({config.run_id for config in planned}) == len(planned) == len(kinds)
