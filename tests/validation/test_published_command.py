"""Any table of published rows is scored, or refused in one sentence."""

from __future__ import annotations

import contextlib
import csv
import json
import random
from pathlib import Path

import pytest

from bench.core.errors import ImpossibleError, UsageError
from bench.core.installation import DATA_FOLDER
from bench.prediction.intervals import UNKNOWN, find_factors
from bench.prediction.prediction import DOES_NOT_FIT, TOO_CLOSE
from bench.records.published import PUBLISHED_CSV, read_published_lines
from bench.validation.command import MORE_PUBLISHED_CSV, list_published_lines, main
from bench.validation.metrics import SPEED
from bench.validation.published_table import REQUIRED_COLUMNS, read_published_table
from bench.validation.readings import Reading, build_published_config, order_settings, read_line, read_lines
from bench.validation.scores import score_readings
from bench.validation.sources import (
    find_source_knowledge,
    find_torch_version,
    load_sources,
    recomputes_whole_blocks,
    records_nccl_stream,
)

ROW = {
    "model": "gpt_tiny",
    "strategy": "DDP",
    "precision": "bf16 mixed",
    "gpu": "A100-80GB",
    "gpu_count": "8",
    "sequence_length": "64",
    "batch_size_per_gpu": "1",
    "activation_checkpointing": "no",
    "metric": "iteration_time",
    "value": "10",
    "unit": "ms",
}


def write_table(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = REQUIRED_COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "choose a CSV file whose first line has the columns"),
        (b"hello\nworld\n", "choose a CSV file whose first line has the columns"),
        (b"\xff\xfe\x00\x01", "choose a CSV file in UTF-8"),
        (",".join(REQUIRED_COLUMNS).encode() + b"\n", "at least one row"),
        (",".join(REQUIRED_COLUMNS[:-1]).encode() + b"\nx\n", "the column unit"),
        (b"PK\x03\x04\x00\x00", "is not valid"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused_in_one_sentence(
    content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    assert main(["--published", str(path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--published", str(tmp_path / "none.csv")]) == 2
    assert main(["--published", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2


@pytest.mark.parametrize("value", ["fast", "1.2.3", "0", "-5"])
def test_a_bad_number_names_its_row(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--published", str(write_table(tmp_path / "t.csv", [ROW, ROW | {"value": value}]))]) == 2
    error = capsys.readouterr().err
    assert "row 2" in error
    assert value in error
    assert len(error.splitlines()) == 1


def test_columns_may_stand_in_any_order_case_and_company(tmp_path: Path) -> None:
    columns = (*(name.upper() for name in reversed(REQUIRED_COLUMNS)), "colour")
    row = {name.upper(): value for name, value in ROW.items()} | {"colour": "red"}
    path = write_table(tmp_path / "table.csv", [row, {}], columns)
    (line,) = read_published_table(path)
    assert {name: line[name] for name in ROW} == ROW
    assert "colour" not in line


HOSTILE_CELLS = (
    *("", "-", "n/a", "?", "8x", "1k", "1e9", "1e400", "-1", "0", "½", "GPU", "128-512", ">40", "12.3 GiB", "NaN"),
    *("inf", "a=b", "${model}", "[1,2]", "{x: 1}", "null", "~", "'", '"', "\x00", "🚀", "DDP", "FSDP", "x" * 300),
)


def test_no_cell_ends_in_anything_but_a_reason_or_a_usage_error() -> None:
    drawn = random.Random(17)
    reasons = 0
    for _ in range(150):
        line = dict(ROW) | {"parameters": "", "sharding": "", "note": ""}
        for column in drawn.sample(list(line), 2):
            line[column] = drawn.choice(HOSTILE_CELLS)
        with contextlib.suppress(UsageError):
            reasons += read_line(1, line).reason is not None
    assert reasons > 50


HOSTILE_WORDS = (
    "TP 2, PP 0",
    "EP 8, PP 3",
    "TP 16, PP 16, CP 16",
    "VP 0",
    "GBS 0",
    "GBS 7; MBS 3",
    "rank 0",
    "DeepEP",
    "v3",
)


def test_no_shipped_row_with_other_words_ends_in_anything_else() -> None:
    drawn = random.Random(18)
    lines = [line for path in (PUBLISHED_CSV, MORE_PUBLISHED_CSV) for line in read_published_lines(path)]
    readings = 0
    for _ in range(400):
        line = dict(drawn.choice(lines))
        for column in drawn.sample(("model", "strategy", "sharding", "gpu_count", "note"), 2):
            line[column] = drawn.choice((*HOSTILE_WORDS, drawn.choice(lines)[column]))
        with contextlib.suppress(UsageError):
            readings += read_line(1, line).reason is None
    assert readings > 10


@pytest.mark.slow
def test_a_table_is_scored_row_by_row_with_what_was_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ROW,
        ROW | {"metric": "peak_memory_allocated", "value": "0.5", "unit": "GiB"},
        ROW | {"metric": "outcome", "value": "OOM", "unit": "", "batch_size_per_gpu": "2"},
        ROW | {"strategy": "FSDP + PP4"},
        ROW | {"precision": ""},
    ]
    out = tmp_path / "out.json"
    assert main(["--published", str(write_table(tmp_path / "t.csv", rows)), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "5 rows: 4 are runs that can be predicted (0 complete; 4 rough" in text
    assert "of 1 that ran out of memory 1 are said to fit" in text
    data = json.loads(out.read_text())
    speed, memory, outcome, refused, rough = data["rows"]
    assert speed["predicted_low"] < speed["predicted"] < speed["predicted_high"]
    assert speed["error"] == pytest.approx(0.01 / speed["predicted"] - 1)
    assert memory["error"] == pytest.approx(memory["predicted"] / 2**29 - 1)
    assert outcome["verdict"] == "fits"
    assert outcome["verdict_is_wrong"]
    assert refused["reason"] == "the number of micro-batches is not stated"
    assert (rough["class"], rough["assumptions"]) == (
        "rough",
        ["precision is not stated: bf16 mixed", "software, kernels and network, which nobody has looked up"],
    )
    assert data["verdicts"]["out_of_memory_said_to_fit"] == 1


@pytest.mark.slow
def test_a_row_that_cannot_be_predicted_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A V100 has no bf16."""
    path = write_table(tmp_path / "table.csv", [ROW, {**ROW, "gpu": "V100-32GB"}, {**ROW, "value": "~9-11"}])
    assert main(["--published", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows: 1 are runs that can be predicted" in shown
    assert "no speed for bf16" in shown
    assert "~9-11 is a range" in shown


def test_the_example_of_the_guide_is_read() -> None:
    readings = read_lines(read_published_table(DATA_FOLDER / "docs" / "examples" / "my-runs.csv"))
    reasons = [reading.reason for reading in readings]
    assert reasons[:3] == [None] * 3
    assert reasons[-1] == "the number of micro-batches is not stated"


# --- What is known of sources.


def test_every_published_row_has_its_torch_version_or_says_that_it_is_not_known() -> None:
    for line in list_published_lines():
        assert line["torch_version"].strip(), line
        assert line["torch_version"] == find_torch_version(line), line


def test_rows_of_llm_foundry_have_the_versions_of_their_tables() -> None:
    """Recomputation stops early from torch 2.1 on: A100-80GB DEFAULT and H100; not A100-40GB and PURE."""
    versions: dict[tuple[str, bool], set[str]] = {}
    for line in read_published_lines(PUBLISHED_CSV):
        if line["source_key"] == "llm_foundry":
            key = line["gpu"], "PURE" in line["note"] and line["gpu"].startswith("a100")
            versions.setdefault(key, set()).add(line["torch_version"])
    assert versions["a100_40gb", True] == versions["a100_80gb", True] == {"1.13.1"}
    assert versions["a100_80gb", False] == {"2.1.0"}
    assert versions["h100_80gb", False] == {"2.1.0", "unknown, 2.1 or later"}


@pytest.mark.parametrize(
    ("version", "is_whole"),
    [("1.13.1", True), ("2.0", True), ("2.1.0", False), ("unknown, before 2.1", True), ("unknown", False)],
)
def test_whole_blocks_are_computed_again_before_torch_2_1(version: str, is_whole: bool) -> None:
    assert recomputes_whole_blocks(version) == is_whole


@pytest.mark.parametrize(
    ("version", "is_recorded"),
    [("1.13.1", True), ("2.1.0", True), ("2.2.0", False), ("unknown, before 2.1", True), ("unknown", False)],
)
def test_nccl_s_stream_is_recorded_before_torch_2_2(version: str, is_recorded: bool) -> None:
    assert records_nccl_stream(version) == is_recorded


def test_every_source_is_known_and_has_a_licence_note() -> None:
    readme = PUBLISHED_CSV.with_name("README.md").read_text(encoding="utf-8")
    sources = {line["source_key"] for line in read_published_lines(MORE_PUBLISHED_CSV)}
    assert sources <= set(load_sources())
    assert not [source for source in sources if f"| `{source}` |" not in readme]


def test_tables_that_take_no_part_are_of_other_sources_and_all_read() -> None:
    lines = read_published_table(PUBLISHED_CSV.with_name("held_out.csv"))
    held_out = {line["source_key"] for line in lines}
    assert not held_out & (set(load_sources()) | {line["source_key"] for line in list_published_lines()})
    readme = PUBLISHED_CSV.with_name("README.md").read_text(encoding="utf-8")
    assert not [source for source in held_out if f"| `{source}` |" not in readme]
    assert all(line["torch_version"] for line in lines)
    readings = read_lines(lines)
    assert sum(reading.reason is None for reading in readings) > 400
    assert not [reading.row for reading in readings if reading.reason is None and reading.is_complete]


def test_hf_blog_rows_are_rough() -> None:
    lines = [line for line in list_published_lines() if line["source_key"] == "hf_blog_fsdp_2022"]
    assert lines
    assert not any(find_source_knowledge(line).complete for line in lines)


# ---- tables that nobody has looked up


UNKNOWN_ROW = {
    **ROW,
    **{"sharding": "", "note": "", "model": "Llama 3 8B", "parameters": "8B", "precision": "bf16"},
    "gpu": "H100 80GB SXM5",
}


def read_unknown(**columns: str) -> Reading:
    return read_line(1, {**UNKNOWN_ROW, **columns})


def test_rows_of_sources_that_nobody_has_looked_up_are_rough() -> None:
    reading = read_unknown(precision="bf16 mixed")
    assert not reading.is_complete
    assert reading.assumptions == ("software, kernels and network, which nobody has looked up",)


@pytest.mark.parametrize(
    ("columns", "precision"),
    [
        ({"strategy": "single (LoRA)", "gpu_count": "1"}, "bf16_pure"),
        ({"strategy": "FSDP2 (lora)"}, "bf16_pure"),
        ({"strategy": "FSDP2 (lora)", "precision": "bf16 mixed"}, "bf16"),
        ({"strategy": "FSDP2"}, "bf16"),
    ],
)
def test_frozen_weights_are_in_the_format_that_is_named(columns: dict[str, str], precision: str) -> None:
    assert dict(read_unknown(**columns).settings)["precision"] == precision


def test_fsdp_of_adapters_on_one_gpu_shards_nothing() -> None:
    assert dict(read_unknown(strategy="FSDP (lora)", gpu_count="1").settings)["strategy"] == "single"
    assert dict(read_unknown(strategy="FSDP", gpu_count="1").settings)["strategy"] == "fsdp1"


def test_megatron_is_read_as_its_defaults_have_it() -> None:
    reading = read_unknown(
        strategy="Megatron TP+PP+DP", sharding="TP2 PP2 CP1 VP1", precision="fp8", note="global batch 16"
    )
    settings = dict(reading.settings)
    assert settings["strategy.data"] == "zero1"
    assert settings["strategy.sequence_parallel"] == "true"
    assert (settings["precision.float8"], settings["precision.parameters"]) == ("transformer_engine", "bf16")
    assert reading.state_bytes == (6, 12)
    assert (
        dict(read_unknown(strategy="Megatron", activation_checkpointing="selective").settings)[
            "activation_checkpointing"
        ]
        == "none"
    )


@pytest.mark.parametrize(
    ("columns", "state_bytes", "data"),
    [
        ({"strategy": "TP + PP", "sharding": "TP2 PP2"}, (6, 12), "ddp"),
        ({"strategy": "Megatron-DeepSpeed", "sharding": "TP2 PP2 ZeRO-1", "precision": "fp16"}, (4, 12), "zero1"),
        ({"strategy": "ZeRO-2 + TP", "sharding": "TP2 ZeRO-2", "precision": "fp16"}, (2, 14), "fsdp"),
        ({"strategy": "FSDP + TP + PP", "sharding": "TP2 PP2"}, None, "fsdp"),
        ({"strategy": "Megatron-FSDP", "sharding": "CP2", "precision": "amp_bf16"}, None, "fsdp"),
        ({"strategy": "TP + PP", "sharding": "TP2 PP2", "note": "global batch 16; torchtitan"}, None, "ddp"),
    ],
)
def test_layouts_keep_what_megatron_keeps_unless_they_are_torch_s(
    columns: dict[str, str], state_bytes: tuple[float, float] | None, data: str
) -> None:
    reading = read_unknown(**{"note": "global batch 16", **columns})
    assert reading.state_bytes == state_bytes
    assert reading.receives_in_turn == (state_bytes is not None)
    assert dict(reading.settings)["strategy.data"] == data
    assert dict(reading.settings)["precision"] == ("bf16" if state_bytes is None else "bf16_pure")


def test_pipelines_of_deepspeed_wait_for_what_they_send() -> None:
    for strategy, waits in (("Megatron-DeepSpeed", True), ("Megatron", False)):
        assert read_unknown(strategy=strategy, sharding="PP2", note="global batch 16").waits_for_sends == waits


@pytest.mark.parametrize("sharding", ["TP2", "TP1 PP1"])
def test_a_distributed_optimizer_gathers_once_a_step_without_a_pipeline_too(sharding: str) -> None:
    copies = 4 if sharding == "TP2" else 8
    first, *_, timed = read_unknown(strategy="Megatron", sharding=sharding, note=f"global batch {4 * copies}").runs
    assert dict(first)["strategy.data"] == "zero1"
    assert dict(timed)["strategy.data"] == "fsdp"
    assert dict(timed)["strategy.micro_batches"] == "4"  # of one schedule, which keeps what it gathers
    assert "gradient_accumulation" not in dict(timed)


@pytest.mark.parametrize(
    ("columns", "setting", "value"),
    [
        ({"strategy": "DeepSpeed ZeRO-3", "precision": "fp16"}, "precision", "bf16"),
        ({"strategy": "DeepSpeed ZeRO-3", "precision": "bf16 pure"}, "precision", "bf16"),
        ({"strategy": "FSDP2 (lora)", "precision": "fp16"}, "precision", "bf16_pure"),
        ({"model": "Llama 3 8B LoRA", "strategy": "FSDP2"}, "finetune", "lora"),
        ({"gpu": "GB200", "gpu_count": "128"}, "gpus_per_node", "64"),
        ({"gpu": "GB200", "gpu_count": "128", "note": "4 GPUs per node"}, "gpus_per_node", "4"),
        ({"gpu": "GB200", "gpu_count": "72"}, "gpus_per_node", "36"),
        ({"gpu": "GH200", "gpu_count": "64", "note": "Alps, 4 GH200 a node"}, "gpus_per_node", "4"),
        ({"gpu_count": "64", "note": "800 Gb/s per node"}, "gpus_per_node", "8"),
        ({"gpu": "MI350X"}, "hardware.power_w", "1000"),
        (
            {"strategy": "Megatron", "sharding": "TP2", "note": "NeMo; global batch 16"},
            "strategy.async_tensor_parallel",
            "true",
        ),
        (
            {"strategy": "Megatron", "sharding": "TP2", "note": "NeMo; global batch 16"},
            "strategy.overlap_kernels",
            "transformer_engine",
        ),
        ({"strategy": "FSDP2", "note": "torchtune recipe"}, "precision", "bf16_pure"),
        ({"strategy": "Megatron-FSDP", "note": "GA 2"}, "gradient_accumulation_sync", "true"),
        ({"strategy": "FSDP2", "note": "NeMo Automodel; linear te"}, "compile", "true"),
        ({"strategy": "FSDP2", "figure_or_table": "torchtitan, table 1"}, "gradient_clip_norm", "1.0"),
        ({"note": "torchtitan; torch.compile", "torch_version": "2.9.0.dev20250811"}, "loss", "compiled"),
        ({"activation_checkpointing": "", "note": "activation checkpointing on"}, "activation_checkpointing", "full"),
        ({"strategy": "FSDP2 (lora)", "note": "LoRA rank 32 on q and v"}, "finetune.rank", "32"),
        ({"model": "Llama 2 34B", "parameters": "34B"}, "model.intermediate_size", "22016"),
        ({"model": "GPT-2 124M", "parameters": "124M"}, "model.vocabulary_size", "50257"),
        (
            {"model": "GPT-2 124M", "parameters": "124M", "note": "vocabulary 50304"},
            "model.vocabulary_size",
            "50304",
        ),
    ],
)
def test_words_of_tables_that_nobody_has_looked_up_mean_what_they_usually_do(
    columns: dict[str, str], setting: str, value: str
) -> None:
    reading = read_unknown(**columns)
    assert reading.reason is None
    assert dict(reading.settings)[setting] == value


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"note": "MaxText, JAX 0.4"}, "maxtext: another framework than PyTorch"),
        ({"strategy": "DeepSpeed ZeRO-3", "precision": "fp16", "gpu": "V100-32GB"}, "does not compute in bf16"),
        ({"parameters": "70B"}, "70B parameters are printed"),
        ({"metric": "iteration_time", "unit": "fortnights"}, "fortnights is no unit of time"),
        ({"note": "optimizer step in backward"}, "the optimizer steps within backward"),
        (
            {"source_key": "torchtitan_202412", "strategy": "FSDP2 + TP", "sharding": "TP 8", "gpu_count": "1"},
            "a tensor-parallel degree of 8 is more than 1 GPUs",
        ),
    ],
)
def test_what_is_no_run_of_this_suite_says_why(columns: dict[str, str], reason: str) -> None:
    assert reason in (read_unknown(**columns).reason or "")


@pytest.mark.parametrize(
    ("model", "parameters", "actual"),
    [
        ("GPT (hidden 2048, 24 layers, 16 heads)", "1B", 1.31e9),  # printed to one digit
        ("Llama-3.2-1B", "1B", 1.24e9),
        ("gemma-2b", "2B", 2.51e9),  # a part of the name
        ("TinyLlama-1.1B", "1.1B", 1.10e9),
        ("Falcon-7B", "7B", 7.2e9),
        ("tiiuae/falcon-40b", "40B", 41.9e9),
        ("bigscience/bloomz-7b1", "7.1B", 7.07e9),
        ("microsoft/Phi-3-mini-4k-instruct", "3.8B", 3.82e9),
        ("GPT3-5B", "5B", 5.0e9),
        ("Nemotron-4 340B", "340B", 341e9),
        ("Grok-1 314B", "314B", 316e9),
    ],
)
def test_models_that_tables_have_are_known_by_their_usual_names(model: str, parameters: str, actual: float) -> None:
    reading = read_unknown(model=model, parameters=parameters)
    assert reading.reason is None
    assert reading.config.model.num_parameters == pytest.approx(actual, rel=0.02)


def test_micro_batches_of_fsdp_without_a_pipeline_are_passes_of_their_own() -> None:
    """Each gathers parameters again, where those of a schedule keep them."""
    settings = dict(
        read_unknown(strategy="FSDP2 + CP", sharding="FSDP 4, CP 2", note="gradient accumulation 4").settings
    )
    assert (settings["gradient_accumulation"], settings["batch_size_per_gpu"]) == ("4", "1")
    assert "strategy.micro_batches" not in settings


def test_quantised_layers_are_read_without_the_compiler_and_predicted_with_none() -> None:
    settings = read_unknown(strategy="single (QLoRA)", gpu_count="1", note="torch.compile").settings
    assert dict(settings)["compile"] == "false"
    with pytest.raises(ImpossibleError, match=r"compile=true is not valid with mode=predict and finetune=qlora"):
        build_published_config(order_settings({**dict(settings), "compile": "true"}))


SINGLE_ROW = {**UNKNOWN_ROW, "parameters": "", "strategy": "single", "gpu_count": "1"}


def test_a_run_that_ran_is_read_as_one_that_fits_where_its_row_does_not_say() -> None:
    """6.7 B parameters in fp32 with their state, 107 GB, are too many for 40 GB; in bf16 with theirs, 54 GB, they are
    nearer: but only if the row names no more than the format, or none."""
    row = {**SINGLE_ROW, "model": "GPT-6.7B", "gpu": "A100-40GB"}
    precisions = ("bf16", "", "bf16 mixed")
    readings = [read_line(number, {**row, "precision": words}) for number, words in enumerate(precisions)]
    scores, reasons = score_readings(readings)
    assert not reasons
    assert [dict(score.reading.settings)["precision"] for score in scores] == ["bf16_pure", "bf16_pure", "bf16"]
    assert [score.is_verdict_wrong for score in scores] == [False, False, True]
    for score in scores[:2]:
        assert "without which it is predicted not to fit" in score.reading.assumptions[-1]


def test_details_of_a_note_that_the_suite_does_not_have_are_left_out_and_told() -> None:
    chunked = {"note": "chunked cross entropy, fused AdamW; global batch 4"}
    reading = read_unknown(strategy="FSDP2 + CP", sharding="FSDP 4, CP 2", **chunked)
    assert reading.reason is None
    assert not {"loss", "optimizer.implementation"} & set(dict(reading.settings))
    told = "without loss=chunked, optimizer.implementation=fused, which the suite does not have here"
    assert told in reading.assumptions
    assert dict(read_unknown(strategy="FSDP2", **chunked).settings)["loss"] == "chunked"


def test_gradients_are_reduced_after_every_micro_batch_where_they_are_too_many_otherwise() -> None:
    """Of 13 B parameters whole gradients in fp32 alone are 52 GB: more than there is, but the interval of rows of
    unknown sources is too wide to say that it does not fit."""
    row = {**UNKNOWN_ROW, "model": "Llama 2 13B", "parameters": "13B", "strategy": "FSDP2", "gpu_count": "64"}
    row |= {
        "gpu": "A100-40GB",
        "precision": "bf16 mixed",
        "sequence_length": "4096",
        "activation_checkpointing": "full",
    }
    noted = {"note": "gradient accumulation 2", "metric": "peak_memory_allocated", "value": "20", "unit": "GB"}
    (score,), _ = score_readings([read_line(1, {**row, **noted})])
    assert dict(score.reading.settings)["gradient_accumulation_sync"] == "true"
    assert score.predicted_value < 40e9
    assert "without which it is predicted not to fit" in score.reading.assumptions[-1]


def test_intervals_of_tables_that_nobody_has_looked_up_are_those_of_unknown_sources() -> None:
    row = {**SINGLE_ROW, "model": "GPT-2 124M", "sequence_length": "1024", "precision": "bf16 mixed"}
    measured = [
        {"metric": "iteration_time", "value": "1", "unit": "s"},
        {"metric": "peak_memory_allocated", "value": "5", "unit": "GiB"},
    ]
    unknown, known = (
        score_readings(
            [read_line(number, {**row, "source_key": key, **columns}) for number, columns in enumerate(measured)]
        )[0]
        for key in ("somebody", "fairseq_fsdp_2021")
    )
    for score, of_known in zip(unknown, known, strict=True):
        assert score.predicted_value == of_known.predicted_value
        metric = "step time" if score.kind == SPEED else "allocated"
        factors = find_factors(metric, score.device_class, row_class=UNKNOWN)
        assert score.low == pytest.approx(factors.low * score.predicted_value)
        assert score.high == pytest.approx(factors.high * score.predicted_value)
        assert score.low < of_known.low < of_known.high < score.high


def test_where_checkpointing_is_not_stated_a_run_that_needs_it_is_too_close_to_call() -> None:
    batch = {"sequence_length": "2048", "batch_size_per_gpu": "16"}
    row = {**SINGLE_ROW, **batch, "model": "GPT-1.3B", "gpu": "A100-40GB", "precision": "bf16 mixed"}
    (stated, open_), _ = score_readings([read_line(1, row), read_line(2, {**row, "activation_checkpointing": ""})])
    assert (stated.verdict, open_.verdict) == (DOES_NOT_FIT, TOO_CLOSE)
    assert open_.reading.settings == stated.reading.settings


@pytest.mark.slow
def test_how_many_were_read_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**SINGLE_ROW, "model": "GPT-6.7B", "gpu": "A100-40GB"}
    path = write_table(tmp_path / "table.csv", [row, {**row, "precision": "bf16 mixed"}])
    assert main(["--published", str(path)]) == 0
    assert (
        "of 2 configurations that ran 1 are said not to fit (rows 2), and 1 to be too close to call; 1 of them are "
        "read so that they may fit, where their rows do not say."
    ) in capsys.readouterr().out
