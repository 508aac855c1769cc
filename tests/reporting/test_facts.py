"""The tables that explain the paper's figures: every number in them follows from rows."""

from __future__ import annotations

import pytest

from bench.reporting.notebook.notebook import Notebook
from bench.reporting.paper import paper_tables
from bench.reporting.tables.table import prepare_table
from tests.records_fixture import make_record
from tests.reporting.test_paper_figures import predicted


@pytest.fixture(scope="module")
def shipped() -> Notebook:
    return Notebook()


def test_the_papers_text_beside_its_own_figures():
    rows = predicted("model_scale") + predicted("prefetch") + predicted("rate_limiter")
    paper_rows = paper_tables.compare_text_and_figures(
        prepare_table(rows), ["Figure 6(a)", "Figure 6(b)", "Figure 6(c)"]
    ).to_dict("records")
    rows_by_subject = {row["What"].partition(" (")[0]: row for row in paper_rows}
    fits = rows_by_subject["Models that fit with DDP"]
    assert fits["Text of the paper"] == "runs out of memory when it wraps a model larger than 2.28B (section 5.2)"
    assert fits["Its figure"] == "runs: T5 611M, T5 2.28B; out of memory: T5 11.3B"
    assert fits["Predicted here"] == fits["Its figure"]
    prefetch = rows_by_subject["What backward prefetch gains"]
    assert prefetch["Text of the paper"] == "about 18 % faster (section 5.2)"
    assert prefetch["Its figure"] == "+21.8 % (128 GPUs), +22.3 % (256 GPUs), +23.3 % (512 GPUs)"
    limiter = rows_by_subject["What the rate limiter gains"]
    assert limiter["Text of the paper"] == "up to 5 times faster (section 5.3)"
    assert limiter["Its figure"] == "2.23 times (2 machines), 3.05 times (4 machines)"
    assert limiter["Predicted here"].count("checkpointing none") == 2


def test_the_papers_text_on_scaling_beside_its_figures():
    rows = predicted("t5_11b_scale") + predicted("gpt_175b_scale")
    paper_table = paper_tables.compare_text_and_figures(prepare_table(rows), ["Figure 7(b)", "Figure 7(c)"])
    rows_by_subject = {row["What"]: row for row in paper_table.to_dict("records")}
    decline = rows_by_subject["T5-11B: speed per GPU lost from 8 to 512 GPUs"]
    assert decline["Text of the paper"] == "7 % (section 5.4)"
    assert decline["Its figure"] == "5.9 % (batch 8), 3.4 % (batch 16)"
    assert decline["Predicted here"] == "0.0 % (batch 8), 0.0 % (batch 16)"
    assert rows_by_subject["GPT-175B, batch 1: TFLOPS per GPU"]["Text of the paper"] == "more than 173 (section 5.4)"
    assert rows_by_subject["GPT-175B, batch 2: TFLOPS per GPU"]["Its figure"].startswith(
        "90.20 on 128 GPUs, at most 186.5"
    )


def test_without_rows_there_is_nothing_to_say():
    assert paper_tables.compare_text_and_figures(prepare_table([make_record()]), ["Figure 7(c)"]).empty
    assert paper_tables.build_flops_table(prepare_table([make_record()])).empty


def test_tflops_with_and_without_what_is_computed_again():
    table = prepare_table(predicted("t5_11b_scale"))
    (row,) = paper_tables.build_flops_table(table).to_dict("records")
    assert row["Peak, TFLOPS"] == "312"
    recomputation_ratio = float((table["hardware_tflops_per_gpu"] / table["tflops_per_gpu"]).iloc[0])
    assert 1.2 < recomputation_ratio < 4 / 3
    fastest = float(row["Fastest point, TFLOPS"])
    assert float(row["HFU"].split()[0]) == pytest.approx(100 * fastest / 312, abs=0.06)
    assert float(row["MFU"].split()[0]) == pytest.approx(100 * fastest / 312 / recomputation_ratio, abs=0.06)


def test_parts_of_the_peak_add_up(shipped):
    records = shipped.select_records(model="t5_11b", evidence="predicted", strategy="ddp", precision="bf16")
    table = paper_tables.build_memory_parts_table(records)
    assert len(table) == len(records) > 0
    for row in table.to_dict("records"):
        names = ("Parameters", "Gradients", "Optimizer", "Activations", "Gathered", "Other")
        total = sum(float(row[name].replace(",", "")) for name in names)
        assert total == pytest.approx(float(row["Allocated"].replace(",", "")), rel=0.02)
        assert row[""] == "does not fit"
    assert paper_tables.build_memory_parts_table([make_record()]).empty


def test_traffic_at_both_ends_is_the_papers():
    table = paper_tables.build_traffic_table(10**9, 2, 64, 8).set_index("F")
    assert list(table.index) == [1, 2, 4, 8, 16, 32, 64]
    whole = 2.0
    assert float(table.loc[1, "Sent in all"]) == pytest.approx(2 * whole * 63 / 64, rel=0.01)
    assert float(table.loc[64, "Sent in all"]) == pytest.approx(3 * whole * 63 / 64, rel=0.01)
    assert float(table.loc[8, "Between groups"]) == pytest.approx(2 * whole / 8 * 7 / 8, rel=0.01)
    column = table["Of it in rings that leave the machine"].astype(float)
    assert column.idxmin() == 8
    assert column.loc[16] > column.loc[1]
    assert (paper_tables.build_traffic_table(10**9, 2, 8, 8)["Of it in rings that leave the machine"] == "0").all()


def test_steps_show_the_knob_that_is_varied():
    table = paper_tables.build_step_table(prepare_table(predicted("prefetch")), "backward_prefetch")
    assert list(table["Backward prefetch"]) == ["none", "pre"] * 3
    assert list(table["GPUs"]) == ["128", "128", "256", "256", "512", "512"]
    assert set(table["Evidence"]) == {"predicted"}


def test_parts_of_the_step_add_up(shipped):
    table = paper_tables.build_time_parts_table(
        shipped.select_records(model="t5_2b", evidence="predicted", strategy="fsdp", precision="bf16")
    )
    assert {"1", "8", "64"} <= set(table["F"])
    for row in table.to_dict("records"):
        parts = [float(row[name]) for name in ("Compute", "Optimizer", "Communication not hidden")]
        assert sum(parts) == pytest.approx(float(row["Step"]), rel=0.01)
        assert float(row["Communication"]) >= float(row["Communication not hidden"])
    assert paper_tables.build_time_parts_table([make_record()]).empty


def test_what_was_printed_is_shown_with_how_it_was_obtained():
    table = paper_tables.build_published_table("Figure 7(c)")
    digitised = table[table["How"] == "digitised"]
    assert len(digitised) == 14
    assert set(digitised["±"]) == {"0.1"}
    assert "text" in set(table["How"])


def test_what_is_sharded_falls_by_sixteen_bytes_per_parameter_or_nobody_knows_why(shipped):
    table = paper_tables.build_memory_scaling_table(
        shipped.build_table(hardware="a100_80gb", model=("gpt_175b", "t5_11b"))
    )
    bytes_ = {
        (row["Model"], row["Line"], row["Evidence"]): float(row["Bytes per parameter, sharded"])
        for row in table.to_dict("records")
    }
    assert bytes_["gpt_175b", "batch 1", "published"] == pytest.approx(16, abs=1)
    assert bytes_["t5_11b", "batch 8", "predicted"] == pytest.approx(16, abs=1)
    assert bytes_["t5_11b", "batch 8", "published"] < 6
