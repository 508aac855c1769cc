"""What others count as FLOPs, against numbers that were published with their formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.compare import main as compare
from bench.config.flop_conventions import (
    FLOP_CONVENTIONS,
    SUITE_COLUMNS,
    compute_convention_tflops,
    compute_record_tflops,
    convert_speeds,
    count_flops_per_sequence,
    count_llm_foundry_flops,
    count_megatron_flops,
    count_nanogpt_flops,
    count_palm_flops,
    count_position_parameters,
)
from bench.config.speed_columns import compute_speed_columns
from bench.core.errors import ImpossibleError, UsageError
from bench.rank.row import build_configured_columns
from bench.records import Record
from bench.records.published import read_published_lines
from bench.report import main as report
from bench.reporting.drawing import style
from bench.reporting.figures import throughput
from bench.reporting.tables.table import prepare_table
from bench.validation.model_words import read_model
from tests.conftest import compose_run_config, run_command
from tests.records_fixture import make_record, write_store

RUN = ("gpus=1", "strategy=single", "hardware=a100_80gb", "precision=bf16", "mode=predict", "sequence_length=64")
OTHER_CONVENTIONS = [convention for convention in FLOP_CONVENTIONS if convention not in SUITE_COLUMNS]
H100_TFLOPS = 989.5
"""The dense peak in bf16 that llm-foundry divides by."""


def test_palm_540b_reaches_the_utilization_that_its_paper_prints() -> None:
    """238.3K tokens/s on 6,144 TPU v4 of 275 TFLOP/s are 46.2 %, and 45.7 % without attention (section 4.1)."""
    tokens_per_second, peak_flops = 238.3e3, 6144 * 275e12
    whole = count_palm_flops(540_350_000_000, layers=118, heads=48, head_size=256, length=2048)
    assert whole * tokens_per_second / peak_flops == pytest.approx(0.462, abs=0.0005)
    without_attention = count_palm_flops(540_350_000_000, layers=118, heads=48, head_size=256, length=0)
    assert without_attention * tokens_per_second / peak_flops == pytest.approx(0.457, abs=0.0005)


def test_megatrons_end_to_end_days_follow_from_its_flops() -> None:
    """Section 5.1: GPT-3 of 175B, 300B tokens, 1,024 GPUs at 140 TFLOP/s: 34 days, with 8 T P for the equation."""
    flops = count_megatron_flops(1, 2048, layers=96, width=12288, vocabulary=51200) * 300e9 / 2048
    assert flops / (1024 * 140e12) / 86400 == pytest.approx(34, rel=0.03)


def test_llm_foundrys_rows_have_the_utilization_they_print() -> None:
    """Every H100 row in bf16 with its tokens per second and its MFU."""
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    shapes: dict[tuple[str, ...], tuple[str, int]] = {}
    for line in read_published_lines():
        if line["source_key"] == "llm_foundry" and line["gpu"] == "h100_80gb" and line["precision"] == "amp_bf16":
            key = tuple(line[name] for name in ("model", "gpu_count", "sequence_length", "batch_size_per_gpu", "note"))
            rows.setdefault(key, {})[line["metric"]] = float(line["value"])
            shapes[key] = line["model"].removeprefix("MPT-"), int(line["sequence_length"])
    errors = []
    for key, values in rows.items():
        if {"mfu", "tokens_per_second_per_gpu"} <= values.keys():
            name, length = shapes[key]
            model = read_model(f"MPT-{name}", "").settings | {"model.block_size": str(length)}
            config = compose_run_config(*(f"{field}={value}" for field, value in model.items()))
            layers, width = config.model.num_layers, config.model.hidden_size
            flops = count_llm_foundry_flops(config.model.num_parameters, layers, width, length)
            mfu = 100 * flops * values["tokens_per_second_per_gpu"] / (H100_TFLOPS * 1e12)
            errors.append(mfu / values["mfu"] - 1)
    assert len(errors) >= 15
    assert max(map(abs, errors)) < 0.01


def test_nanogpts_parameters_leave_out_the_positions() -> None:
    """GPT-2 of 124M: 124,439,808 parameters, of which 786,432 are positions; n_positions x n_embd."""
    assert count_nanogpt_flops(124_439_808, 786_432, 12, 12, 64, 1024) == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024
    assert count_position_parameters(compose_run_config("model=gpt_125m").model) == 2048 * 768
    assert count_position_parameters(compose_run_config("model=llama_tiny").model) == 0


def test_the_suites_own_are_those_of_its_columns() -> None:
    config = compose_run_config("model=gpt_tiny", "activation_checkpointing=full", *RUN)
    columns = compute_speed_columns(config, 0.5)
    assert compute_convention_tflops("model", config, 0.5) == pytest.approx((columns["tflops_per_gpu"], columns["mfu"]))
    assert compute_convention_tflops("hardware", config, 0.5) == pytest.approx(
        (columns["hardware_tflops_per_gpu"], columns["hfu"])
    )


def test_of_a_mixture_the_parameters_of_a_token_are_counted() -> None:
    config = compose_run_config("model=moe_tiny", *RUN)
    model = config.model
    attention = 12 * model.num_layers * model.num_heads * (model.head_size or model.hidden_size // model.num_heads) * 64  # type: ignore[attr-defined]
    assert count_flops_per_sequence("palm", model, 64) == 64 * (6 * model.num_active_parameters + attention)  # type: ignore[attr-defined]


@pytest.mark.parametrize("convention", OTHER_CONVENTIONS)
def test_a_formula_is_refused_for_layers_it_is_not_for(convention: str) -> None:
    config = compose_run_config("model=t5_tiny", *RUN)
    with pytest.raises(ImpossibleError, match=f"flops={convention} is not valid for model=t5_tiny"):
        compute_convention_tflops(convention, config, 0.5)


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UsageError, match=r"flops=mosaic is not valid: choose model, hardware, causal, megatron, palm"):
        compute_convention_tflops("mosaic", compose_run_config("model=gpt_tiny", *RUN), 0.5)


def make_timed_row(*overrides: str, step_time_s: float = 0.5, **columns: Any) -> Record:
    """A row of a run of `RUN` that took so long per step."""
    config = compose_run_config(*overrides, *RUN)
    return {**build_configured_columns(config), "status": "ok", **compute_speed_columns(config, step_time_s), **columns}


@pytest.mark.parametrize("convention", FLOP_CONVENTIONS)
@pytest.mark.parametrize("model", ["gpt_tiny", "llama_tiny", "moe_tiny"])
def test_a_row_says_what_its_configuration_says(convention: str, model: str) -> None:
    overrides = (f"model={model}", "batch_size_per_gpu=4", "gradient_accumulation=3", "activation_checkpointing=full")
    row = json.loads(json.dumps(make_timed_row(*overrides)))
    expected = compute_convention_tflops(convention, compose_run_config(*overrides, *RUN), 0.5)
    assert compute_record_tflops(convention, row) == pytest.approx(expected)
    assert expected[1] == pytest.approx(expected[0] / 312)  # type: ignore[operator]


def test_conventions_of_rows_differ() -> None:
    row = make_timed_row("model=gpt_tiny", "activation_checkpointing=full")
    tflops = {convention: compute_record_tflops(convention, row)[0] for convention in FLOP_CONVENTIONS}
    assert tflops["megatron"] > tflops["palm"] == tflops["llm_foundry"] > tflops["nanogpt"]  # type: ignore[operator]
    assert tflops["hardware"] > tflops["model"] > tflops["causal"]  # type: ignore[operator]


def test_rows_that_a_formula_is_not_for_are_counted_and_say_why() -> None:
    published = {"evidence": "published", "status": "ok", "tflops_per_gpu": 100.0, "step_time_median_s": 1.0}
    foreign = make_timed_row("model=gpt_tiny")
    foreign["config"]["model"]["family"] = "somebodys.module"
    out_of_memory = {"evidence": "measured", "status": "oom"}
    rows = [make_timed_row("model=gpt_tiny"), make_timed_row("model=t5_tiny"), published, foreign, out_of_memory]
    speeds = convert_speeds("palm", rows)
    assert [tflops is not None for tflops in speeds.tflops] == [True, False, False, False, False]
    assert sum(speeds.reasons.values()) == 3
    for reason in (
        "model=t5_tiny, whose layers",
        "without a configuration",
        "model=gpt_tiny of a row, whose family=somebodys.module",
    ):
        assert reason in speeds.note
    own = convert_speeds("model", rows)
    assert (own.note, own.tflops[2]) == ("", 100.0)


def test_a_report_and_a_comparison_show_the_convention_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = make_timed_row("model=gpt_tiny", "activation_checkpointing=full")
    t5 = make_timed_row("model=t5_tiny")
    texts = {}
    for convention in ("model", "megatron"):
        table = prepare_table([row, t5], convert_speeds(convention, [row, t5]))
        palette = style.build_palette(table["variant_key"])
        with style.apply_report_style():
            section = throughput.build_section(table, palette)
            texts[convention] = [drawing.caption for drawing in section.drawings]
        tflops, mfu = compute_record_tflops(convention, row)
        assert table["counted_tflops"].iloc[0] == tflops
        assert table["counted_mfu"].iloc[0] == mfu
    assert any(text.startswith("Model TFLOP/s per GPU") for text in texts["model"])
    assert any(text.startswith("Megatron TFLOP/s per GPU") for text in texts["megatron"])
    store = write_store(tmp_path / "store", [make_record(model="gpt_tiny")])
    for main, arguments in ((report, [str(store)]), (compare, [str(store), str(store)])):
        assert main([*arguments, "flops=mosaic"]) == 2
        assert "flops=mosaic is not valid: choose model, hardware" in capsys.readouterr().err
    assert report([str(store), "--output", str(tmp_path / "page"), "--no-interactive", "flops=megatron"]) == 0
    assert "1 row without: flops=megatron is not valid for model=gpt_tiny" in capsys.readouterr().out
    page = (tmp_path / "page" / "index.html").read_text()
    assert "TFLOP/s per rank (megatron)" in page
    assert "counted as flops=megatron" in page
    compare([str(store), str(store), "--flops", "hardware"])
    assert "counted as flops=hardware" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
def test_the_table_of_a_prediction_is_in_the_convention_that_was_asked_for() -> None:
    typed = ("model=gpt_tiny", *RUN[:-2], "sequence_length=64", "batch_size_per_gpu=8", "activation_checkpointing=none")
    answer = run_command("bench.predict", *typed, "flops=megatron")
    assert answer.returncode == 0, answer.stderr
    assert "TFLOP/s (megatron)" in answer.stdout
    refused = run_command("bench.predict", *typed, "flops=mosaic")
    assert refused.returncode == 2
    assert "flops=mosaic is not valid: choose model, hardware" in refused.stderr
