"""Memory against throughput: which runs stand in one figure, what they are called, and what is drawn of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.records import Record
from bench.records.reading import read_all_attempts, read_latest_attempts
from bench.reporting.builder import read_store
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import ReportSection, save_drawing
from bench.reporting.figures import trade
from bench.reporting.tables.table import prepare_table
from tests.conftest import CPU, ROOT
from tests.records_fixture import make_record

ROWS = ROOT / "results" / "measured" / "strategies"


def rows(**columns: Any) -> list[Record]:
    four = {"world_size": 4, "device": "cpu", **columns}
    return [
        make_record(strategy="ddp", effective_strategy="ddp", **four),
        make_record(strategy="zero1", effective_strategy="zero1", **four),
        make_record(strategy="fsdp", effective_strategy="fsdp/full_shard", sharding_factor=4, **four),
    ]


def drawn(records: list[Record]) -> ReportSection:
    table = prepare_table(records)
    with style.apply_report_style():
        return trade.build_section(table, style.build_palette(table["variant_key"]))


def test_three_strategies_of_one_workload_are_a_figure(tmp_path: Path) -> None:
    result = drawn([*rows(), *rows(model="t5_small")[:2]])
    (drawing,) = result.drawings
    assert "t5_tiny" in drawing.title
    assert "4 processes" in drawing.title
    for name in ("DDP", "ZeRO-1", "FSDP2 full shard"):
        assert name in drawing.alt
    assert "Fastest: DDP" in drawing.caption
    assert "Least memory: FSDP2 full shard" in drawing.caption
    assert save_drawing(drawing, tmp_path).count("<path") > 10


def test_one_process_is_one_process() -> None:
    (drawing,) = drawn([row | {"world_size": 1} for row in rows()]).drawings
    assert drawing.title.endswith(", 1 process")


def test_two_are_no_choice() -> None:
    result = drawn(rows()[:2])
    assert result.drawings == []
    assert "3 strategies" in result.notice


def test_runs_without_a_peak_are_no_points() -> None:
    assert drawn([one | {"peak_allocated_bytes": None} for one in rows()]).drawings == []


def test_what_ran_out_of_memory_has_a_name_and_no_throughput() -> None:
    lost = make_record(
        strategy="fsdp", effective_strategy="fsdp/hybrid_shard", sharding_factor=2, world_size=4, device="cpu",
        status="oom", oom_phase="backward",
    )  # fmt: skip
    table = prepare_table([*rows(), lost])
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
    few = [make_record(strategy="ddp", effective_strategy="ddp", precision="fp8", world_size=4, device="cpu")]
    (drawing,) = drawn([*rows(precision="bf16"), *few]).drawings
    assert ", bf16, " in drawing.title
    assert "DDP, fp8" in drawing.alt
    assert len(drawn([*rows(precision="bf16"), *rows(precision="fp8")]).drawings) == 2


def test_what_differs_from_most_is_part_of_the_name() -> None:
    checkpointed = rows(activation_checkpointing="full")[2]
    choices = set(trade.select(prepare_table([*rows(), checkpointed]))["choice"])
    assert choices == {"DDP", "ZeRO-1", "FSDP2 full shard", "FSDP2 full shard, checkpointing full"}


def test_what_one_strategy_alone_does_is_part_of_its_name() -> None:
    chunked, compiled = rows(loss_chunks=8)[2], rows(compile=True)[2]
    choices = set(trade.select(prepare_table([*rows(compile=False), chunked, compiled]))["choice"])
    assert {"FSDP2 full shard", "FSDP2 full shard, loss in 8 chunks", "FSDP2 full shard, compiled"} <= choices


KINDS = {
    *("ddp", "ddp bf16", "ddp powersgd", "zero1"),
    *("fsdp/full_replication", "fsdp/hybrid_shard", "fsdp/full_shard", "fsdp/full_shard full", "fsdp/shard_grad_op"),
    *("fsdp1/no_shard", "fsdp1/hybrid_shard", "fsdp1/full_shard", "fsdp1/shard_grad_op"),
    *("tensor_parallel/2x2+sequence+fsdp", "tensor_parallel/2x2+fsdp", "tensor_parallel/2x2+sequence+ddp"),
    *("pipeline/gpipe", "pipeline/1f1b", "pipeline/interleaved_1f1b+ddp", "pipeline/1f1b+fsdp", "naive_pipeline"),
}
OF_LIBRARIES = {
    ("deepspeed",): {"deepspeed/stage_1", "deepspeed/stage_2", "deepspeed/stage_3"},
    ("accelerate",): {"accelerate/ddp", "accelerate/full_shard"},
    ("lightning",): {"lightning/ddp", "lightning/full_shard"},
    ("torchao",): {"ddp fp8"},
    ("peft",): {"ddp/lora", "fsdp/full_shard_lora"},
    ("peft", "bitsandbytes"): {"ddp/qlora"},
}
"""What needs them, and is left out where one is not installed."""
MODELS = ("t5_mini", "gpt_mini")


def kind(effective: str, config: Mapping[str, Any]) -> str:
    """What strategy and adapters come to, and which other knob is not as in the first run."""
    knobs = (config["strategy"].get("communication_hook"), config["precision"]["name"])
    turned = [value for value in (*knobs, config["activation_checkpointing"]) if value not in (None, "none", "fp32")]
    return " ".join([effective, *turned])


def test_the_sweep_has_every_kind_once_for_each_model() -> None:
    request = parse_sweep_request(["sweep=strategies"], multirun=False, device=CPU)
    plan = build_sweep_plan(
        request.points,
        Path("nowhere"),
        force=True,
        check_run=lambda config: (config.strategy.check_installed(), config.finetune.check_installed()),
    )
    here = KINDS.union(*(kinds for names, kinds in OF_LIBRARIES.items() if all(map(find_spec, names))))
    found = sorted((config.model.name, kind(config.effective_strategy, config.to_dict())) for config in plan.to_run)
    assert found == sorted((model, each) for model in MODELS for each in here)


# The rows of the sweep, as they were measured


def test_every_row_of_the_sweep_trains_as_ddp_does() -> None:
    """Four processes, both families. What rounds on purpose, by narrower numbers or factors, is not held to it; what
    trains adapters is held to other adapters."""
    found = {
        (row["model"], kind(row["effective_strategy"], row["config"])): row
        for row in read_latest_attempts(ROWS).records
    }
    every = KINDS.union(*OF_LIBRARIES.values())
    assert found.keys() == {(model, each) for model in MODELS for each in every}
    assert {row["world_size"] for row in found.values()} == {4}
    exact = every - {"ddp bf16", "ddp powersgd", "ddp fp8", "ddp/lora", "ddp/qlora", "fsdp/full_shard_lora"}
    for model in MODELS:
        expected = found[model, "ddp"]["losses"]
        assert expected[-1] < 0.7 * expected[0]
        for each in exact:
            assert found[model, each]["losses"] == pytest.approx(expected, rel=1e-4), (model, each)
        adapters = found[model, "ddp/lora"]["losses"]
        assert adapters[-1] < adapters[0] - 0.2
        assert found[model, "fsdp/full_shard_lora"]["losses"] == pytest.approx(adapters, rel=1e-6)


def test_the_sweep_takes_less_than_ten_minutes() -> None:
    first = [row for row in read_all_attempts(ROWS).records if row["attempt"] == 0]
    assert len(first) == len(MODELS) * len(KINDS.union(*OF_LIBRARIES.values()))
    seconds = [
        (datetime.fromisoformat(row["finished_at"]) - datetime.fromisoformat(row["started_at"])).total_seconds()
        for row in first
    ]
    assert sum(seconds) < 600


# --- The figure of the committed rows of all strategies: each is a point, has a name, and can be told from the others.


COMMITTED = ROOT / "results" / "measured" / "strategies"


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return prepare_table(read_store(COMMITTED).records)


def test_every_committed_strategy_is_a_point(committed: pd.DataFrame) -> None:
    ran = committed[committed["status"] == "ok"]
    identity = ["model", "precision", "variant", "settings"]
    selected = trade.select(committed)
    assert set(ran[identity].itertuples(index=False)) == set(selected[identity].itertuples(index=False))
    assert set(ran["effective_strategy"]) >= {"ddp", "ddp/lora", "ddp/qlora", "fsdp/full_shard_lora"}
    assert set(ran["precision"]) == {"fp32", "fp8 autocast"}
    with style.apply_report_style():
        drawings = trade.build_section(committed, style.build_palette(committed["variant_key"])).drawings
    assert len(drawings) == committed["model"].nunique() == 2
    for drawing in drawings:
        points = [line for line in drawing.figure.axes[0].lines if line.get_marker() in style.MARKERS]
        assert len(points) == len(selected) / 2


def test_committed_names_say_nothing_that_tells_nothing_apart(committed: pd.DataFrame) -> None:
    names = set(trade.select(committed)["choice"])
    assert not [name for name in names if "git_sha" in name or "torch_version" in name]
    hooks = {f"DDP · communication_hook={hook}" for hook in ("bf16", "powersgd")}
    assert {name for name in names if name.startswith("DDP ·")} == hooks, "a default is in no name"
    assert {"DDP", "DDP, fp8 autocast"} <= names


def test_points_of_the_committed_strategies_can_be_told_apart(committed: pd.DataFrame) -> None:
    palette = style.build_palette(committed["variant_key"])
    assert len(set(palette.values())) == len(palette)
    for _, facet in trade.select(committed).groupby("model"):
        looks = trade._assign_marks(facet, palette)
        for one, other in itertools.combinations(looks, 2):
            alike = math.dist(to_rgb(looks[one].colour), to_rgb(looks[other].colour)) < 0.2
            assert looks[one].marker != looks[other].marker or not alike, (one, other)


@pytest.mark.parametrize(
    ("adapters", "kind"),
    [
        ("DDP LoRA", "ddp"),
        ("DDP QLoRA", "ddp"),
        ("FSDP2 full shard LoRA", "fsdp/full_shard"),
    ],
)
def test_adapters_have_the_colour_of_their_strategy(committed: pd.DataFrame, adapters: str, kind: str) -> None:
    mark = style.build_palette(committed["variant_key"])[adapters]
    assert mark.colour == style.find_strategy_colour(kind)
    assert mark.marker != style.find_strategy_marker(kind)
