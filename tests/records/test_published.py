"""What papers print comes out in the right columns, with where it comes from and how firm it is."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from bench.core.errors import UsageError
from bench.records import COLUMN_NAMES, Record, read_latest_attempts, write_row
from bench.records.published import PUBLISHED_CSV, load_published, read_published_lines, read_published_records
from bench.records.schema import COLUMNS
from bench.records.store import validate_record
from bench.reporting import read_store

HARDWARE = PUBLISHED_CSV.with_name("hardware.csv")


@pytest.fixture(scope="module")
def lines() -> list[dict[str, str]]:
    with PUBLISHED_CSV.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rows() -> list[Record]:
    return read_published_records()


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return load_published()


def paper(table: pd.DataFrame, figure: str) -> pd.DataFrame:
    return table[(table["source_key"] == "fsdp_paper") & (table["source_figure"] == figure)]


def test_every_line_is_one_valid_row(lines: list[dict[str, str]], rows: list[Record]) -> None:
    assert len(rows) == len(lines) == 592
    for row in rows:
        validate_record(row)
    assert len({row["run_id"] for row in rows}) == len(rows)
    assert all(re.fullmatch("[0-9a-f]{16}", row["run_id"]) for row in rows)
    assert {row["evidence"] for row in rows} == {"published"}
    assert [row["run_id"] for row in read_published_records()] == [row["run_id"] for row in rows]


def test_what_was_printed_is_kept_with_its_provenance(lines: list[dict[str, str]], rows: list[Record]) -> None:
    for line, row in zip(lines, rows, strict=True):
        source = {**row["source"], "figure_or_table": row["source"]["figure"]}
        uncertainty = line["uncertainty"]
        assert source["uncertainty"] == (float(uncertainty) if uncertainty else None)
        assert {key: source[key] or "" for key in line if key != "uncertainty"} == {
            key: value for key, value in line.items() if key != "uncertainty"
        }
    digitised = [row["source"] for row in rows if row["source"]["provenance"] == "digitised"]
    certain = [source for source in digitised if source["uncertainty"] is None]
    assert len(digitised) == 130
    assert {source["figure"] for source in certain} == {"Figure 8(b)", "Figure 8(c)"}  # whole GB, see its README


def test_figure_6a_as_printed_on_its_bars(table: pd.DataFrame) -> None:
    bars = paper(table, "Figure 6(a)")
    expected = {
        ("t5_611m", "fsdp1/full_shard"): 15.18,
        ("t5_611m", "fsdp1/hybrid_shard"): 15.28,
        ("t5_611m", "fsdp1/no_shard"): 14.61,
        ("t5_611m", "ddp"): 14.65,
        ("t5_2b", "fsdp1/full_shard"): 27.40,
        ("t5_2b", "fsdp1/hybrid_shard"): 27.70,
        ("t5_2b", "fsdp1/no_shard"): 25.76,
        ("t5_2b", "ddp"): 26.04,
        ("t5_11b", "fsdp1/full_shard"): 148.48,
        ("t5_11b", "fsdp1/hybrid_shard"): 145.81,
    }
    printed = zip(bars["model"], bars["effective_strategy"], bars["hardware_tflops_per_gpu"], strict=True)
    assert {(model, kind): tflops for model, kind, tflops in printed} == expected
    assert bars["tflops_per_gpu"].isna().all()  # very probably hardware FLOPs; model FLOPs nobody printed
    assert bars["source_counts"].str.contains("inferred").all()
    assert set(bars["source_provenance"]) == {"printed-label"}
    unstated = bars[["world_size", "batch_size_per_gpu", "sequence_length", "nodes"]]
    assert unstated.isna().all(axis=None)
    assert bars[bars["model"] != "t5_11b"]["precision"].isna().all()
    assert set(bars[bars["strategy"] == "ddp"]["sharding_factor"]) == {1}
    assert bars[bars["effective_strategy"] == "fsdp1/hybrid_shard"]["sharding_factor"].isna().all()


def test_ddp_runs_out_of_memory_beyond_two_billion(table: pd.DataFrame) -> None:
    (row,) = table[table["status"] == "oom"].to_dict("records")
    assert (row["model"], row["strategy"], row["oom_phase"]) == ("t5_11b", "ddp", "init")
    assert "2.28B" in row["source_note"]
    assert pd.isna(row["oom_bytes"])


def test_figures_6b_and_6c_name_the_knob_they_vary(rows: list[Record]) -> None:
    of = {
        figure: [row for row in rows if row["source"]["figure"] == figure] for figure in ("Figure 6(b)", "Figure 6(c)")
    }
    prefetch = {
        (row["world_size"], row["backward_prefetch"]): row["hardware_tflops_per_gpu"] for row in of["Figure 6(b)"]
    }
    assert prefetch[512, "pre"] == 170.4
    assert prefetch[512, "none"] == 138.2
    limiter = {
        (row["nodes"], row["limit_all_gathers"]): row["step_time_median_s"]
        for row in of["Figure 6(c)"]
        if row["model"] == "t5_11b"
    }
    assert limiter == {(2, True): 8.36, (2, False): 18.61, (4, True): 5.02, (4, False): 15.33}
    assert all(row["world_size"] is None for row in of["Figure 6(c)"])  # the panel counts machines


def test_figure_7_has_its_configuration_and_its_error_bars(table: pd.DataFrame) -> None:
    gpt = paper(table, "Figure 7(b)")
    (point,) = gpt[(gpt["world_size"] == 128) & (gpt["batch_size_per_gpu"] == 2)].to_dict("records")
    assert (point["hardware_tflops_per_gpu"], point["source_uncertainty"]) == (90.2, 0.5)
    assert (point["model"], point["precision"], point["hardware"]) == ("gpt_175b", "bf16", "a100_80gb")
    assert (point["sequence_length"], point["activation_checkpointing"]) == (2048, "full")
    assert point["sharding_factor"] == 128
    assert len(gpt) == 10
    assert len(paper(table, "Figure 7(c)")) == 14


def test_memory_is_in_bytes_and_in_the_column_of_its_kind(table: pd.DataFrame) -> None:
    points = paper(table, "Figure 8(b)")
    fullest = points[(points["world_size"] == 128) & (points["batch_size_per_gpu"] == 2)]
    assert fullest["peak_allocated_bytes"].dropna().tolist() == [54 * 10**9]
    assert fullest["peak_active_bytes"].dropna().tolist() == [69 * 10**9]
    assert fullest["peak_reserved_bytes"].dropna().tolist() == [80 * 10**9]
    columns = ["peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes"]
    unnamed = table["source_metric"].isin(["peak_memory", "memory_per_gpu", "model_state_memory_per_gpu"])
    assert table[unnamed][columns].isna().all(axis=None)


def test_model_and_hardware_flops_are_kept_apart(table: pd.DataFrame) -> None:
    tflops = table[table["source_metric"] == "tflops_per_gpu"]
    columns = ["tflops_per_gpu", "hardware_tflops_per_gpu"]
    assert not tflops[columns].notna().all(axis=1).any()
    assert tflops[tflops["source_counts"] == "not stated"][columns].isna().all(axis=None)
    model = set(tflops[tflops["tflops_per_gpu"].notna()]["source_key"])
    hardware = set(tflops[tflops["hardware_tflops_per_gpu"].notna()]["source_key"])
    assert model == {"llm_foundry", "megatron_h100_readme", "llama3_paper"}
    assert {"fsdp_paper", "megatron_sc21", "megatron_a100_readme"} <= hardware
    assert not model & hardware


def test_llm_foundry_rows(table: pd.DataFrame) -> None:
    foundry = table[table["source_key"] == "llm_foundry"]
    assert set(foundry["strategy"]) == {"fsdp1"}
    assert set(foundry["effective_strategy"]) == {"fsdp1/full_shard", "fsdp1/shard_grad_op"}
    assert (foundry["sharding_factor"] == foundry["world_size"]).all()
    assert set(foundry["precision"]) == {"bf16", "bf16_pure", "amp_fp8"}
    assert foundry["gradient_accumulation"].notna().all()
    assert Counter(foundry["hardware"].fillna("-")) == {"h100_80gb": 80, "a100_80gb": 28, "-": 36}
    first = foundry[foundry["mfu"].notna()].iloc[0]
    assert first["mfu"] == pytest.approx(0.4242)
    full = foundry[(foundry["activation_checkpointing"] == "full")]
    ratio = full["hfu"].dropna().to_numpy() / full["mfu"].dropna().to_numpy()
    assert ratio == pytest.approx(4 / 3, rel=0.01)


def test_other_strategies_keep_their_name_and_claims_fill_no_column(table: pd.DataFrame) -> None:
    assert {"ZeRO-DP", "FSDP2 + TP", "Megatron TP+PP+DP"} <= set(table["strategy"])
    together = table["source_strategy"].isin(["FSDP2 + TP", "FSDP + TP + PP + CP"])
    assert table[together]["sharding_factor"].isna().all()
    measured = [column.name for column in COLUMNS if column.dtype == "Float64"]
    bounds = ~table["source_value"].str.fullmatch(r"-?\d+(\.\d+)?")
    claims = table["source_metric"].str.contains("claim")
    assert table[bounds | claims][measured].isna().all(axis=None)


def test_the_table_has_the_columns_of_every_other_row(table: pd.DataFrame) -> None:
    assert list(table.columns[: len(COLUMN_NAMES)]) == list(COLUMN_NAMES)
    for column in COLUMNS:
        assert str(table[column.name].dtype) == column.dtype
    assert str(table["source_uncertainty"].dtype) == "Float64"


def test_a_published_row_can_be_stored_and_read_back(tmp_path: Path, rows: list[Record]) -> None:
    write_row(tmp_path, rows[0])
    assert read_latest_attempts(tmp_path).records == [rows[0]]


def test_the_folder_is_no_store_and_does_no_harm_beside_one(tmp_path: Path, rows: list[Record]) -> None:
    assert read_latest_attempts(PUBLISHED_CSV.parent).records == []
    assert read_latest_attempts(PUBLISHED_CSV.parent).unreadable == []
    with pytest.raises(UsageError, match="no rows"):
        read_store(PUBLISHED_CSV.parent)
    (tmp_path / "published").symlink_to(PUBLISHED_CSV.parent)
    (tmp_path / "copied").mkdir()
    for file in (PUBLISHED_CSV, HARDWARE):
        (tmp_path / "copied" / file.name).write_bytes(file.read_bytes())
    write_row(tmp_path / "measured", rows[0])
    contents = read_store(tmp_path)
    assert len(contents.records) == 1
    assert contents.unreadable == []


def test_the_readme_counts_every_source_and_provenance(lines: list[dict[str, str]]) -> None:
    text = PUBLISHED_CSV.with_name("README.md").read_text()
    more_lines = [
        line
        for name in ("published_more.csv", "held_out.csv")
        for line in read_published_lines(PUBLISHED_CSV.with_name(name))
    ]
    sources = Counter(line["source_key"] for line in [*lines, *more_lines])
    listed: dict[str, int] = {}
    for keys, counts in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([\d, ]+) \|", text.partition("## Sources")[2], re.M):
        listed |= zip(re.findall(r"\w+", keys), map(int, counts.split(",")), strict=True)
    assert listed == sources
    provenance = Counter(line["provenance"] for line in lines)
    kinds = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|.*\| (\d+) \|$", text.partition("`provenance`,")[2], re.M)
    counted = {tuple(re.findall(r"[\w-]+", names)): int(count) for names, count in kinds[:5]}
    assert set(provenance) == {name for names in counted for name in names}
    assert all(sum(provenance[name] for name in names) == count for names, count in counted.items())


def test_the_hardware_numbers_are_shipped_with_their_sources() -> None:
    with HARDWARE.open(newline="", encoding="utf-8") as file:
        hardware = list(csv.DictReader(file))
    assert len(hardware) == 34
    assert all(line["source_url"].startswith("https://") for line in hardware)
