"""``python -m bench.predict``: what a person gets, with the predictor as it is."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from bench import predict
from bench.advice.json_csv import CSV_COLUMNS
from bench.config.compose import compose_config
from bench.planning import run_predictions
from bench.planning.request import parse_sweep_request
from bench.prediction.prediction import MEMORY_PARTS, TimelineSpan
from bench.prediction.predictor import predict_run
from bench.reporting.drawing import style
from bench.reporting.timelines.timeline import (
    HATCHED_KINDS,
    SPAN_KIND_COLOURS,
    draw_timeline,
    get_lane_name,
    list_streams,
)
from tests.conftest import CPU, SMALL_GPT, compose_run_config, run_command

pytestmark = pytest.mark.slow

GPT = ("model=gpt_tiny", "hardware=a100_80gb", "sequence_length=64")
AT_LEAST_1 = "a whole number of at least 1"

# What is typed, and parts of the sentence it earns: the field, the value, what is valid.
MISTAKES: dict[str, tuple[str, ...]] = {
    "hardware=h100": ("hardware=h100", "hardware=h100 is not valid: choose a10, "),
    "model=t5_12b": ("model=t5_12b", "t5_11b"),
    "strategy=zero": ("strategy=zero", "fsdp, fsdp1"),
    "precision=fp4": ("precision=fp4", "bf16, bf16_pure"),
    "batch_size_per_gpu=0": ("batch_size_per_gpu=0", AT_LEAST_1),
    "batch_size_per_gpu=-1": ("batch_size_per_gpu=-1", AT_LEAST_1),
    "gpus=0": ("gpus=0", AT_LEAST_1),
    "gpus=many": ("gpus=many", "a whole number"),
    "gpus=12": ("gpus=12", "gpus_per_node=8"),
    "gpus=16 gpus_per_node=5": ("gpus=16", "gpus_per_node=5"),
    "gpus_per_node=0": ("gpus_per_node=0", AT_LEAST_1),
    "gpus=8 strategy.sharding_factor=16": ("strategy.sharding_factor=16", "gpus=8", "1, 2, 4, 8"),
    "gpus=8 strategy.sharding_factor=3": ("strategy.sharding_factor=3", "gpus=8", "1, 2, 4, 8"),
    "gpus=8 strategy.sharding_factor=half": ("strategy.sharding_factor=half", "full, node"),
    "gpus=8 strategy=ddp strategy.sharding_factor=4": ("strategy.sharding_factor=4", "strategy=ddp"),
    "gpus=8 strategy=single": ("gpus=8", "strategy=single"),
    "gpus=1 strategy=pipeline": ("strategy.stages=full", "gpus"),
    "gpus=1 strategy=naive_pipeline": ("strategy.stages=full", "gpus"),
    "gpus=8 strategy.shard=4": ("strategy.shard ", "not a field"),
    "model=gpt_tiny sequence_length=513": ("sequence_length=513", "model.block_size=512"),
    "model=gpt_tiny model.d_model=4": ("model.d_model ", "model.hidden_size"),
    "model=gpt_tiny model.num_heads=3": ("model.num_heads=3", "a divisor of model.hidden_size=128"),
    "model=gemma2_2b model.hidden_size=100": ("model.hidden_size=100", "a multiple of model.num_heads=8"),
    "model=t5_mini gpus=1024 hardware=v100_32gb precision=bf16": ("precision=bf16", "no peak for bf16: choose fp16"),
    "activation_checkpointing=some": ("activation_checkpointing=some", "none, full, selective"),
    "hardware=v100_32gb precision=bf16": ("precision=bf16", "hardware=v100_32gb", "fp16", "fp32"),
    "hardware=v100_32gb precision=tf32": ("precision=tf32", "hardware=v100_32gb"),
    "hardware=cpu precision=tf32": ("precision=tf32",),
    "tokens=-1": ("tokens=-1", "above 0"),
    "tokens=0": ("tokens=0", "above 0"),
    "tokens=nan": ("tokens=nan", "above 0"),
    "tokens=inf": ("tokens=inf", "above 0"),
    "tokens=many": ("tokens=many", "above 0"),
    "--tokens=-3e9": ("tokens=-3e9", "above 0"),
    "price=aws": ("price=aws ", "a number", "aws_p5"),
    "price=-2": ("price=-2 ", "a number", "aws_p5"),
    "hardware=a100_40gb price=aws_p5": ("price=aws_p5", "aws_p4d or ", "hardware=a100_40gb"),
    "pue=0.5": ("pue=0.5", "at least 1"),
    "power_share=2": ("power_share=2", "at most 1"),
    "rank=cost": ("rank=cost", "price="),
    "rank=power": ("rank=power", "speed, cost"),
    "format=xml": ("format=xml", "table, json, csv"),
    "--format xml": ("format=xml", "table, json, csv"),
    "top=0": ("top=0", "all"),
    "top=few": ("top=few", "all"),
    "details=maybe": ("details=maybe", "true, false"),
    "timeline=step.pdf": ("timeline=step.pdf", ".png, .svg, .json"),
    "timeline=": ("timeline=", ".png, .svg, .json"),
    "timeline=nowhere/step.png": ("timeline=nowhere/step.png", "folder"),
    "mode=measure": ("mode=measure", "predict"),
    "sweep=model_scale": ("sweep ", "bench.sweep sweep=NAME mode=predict"),
    "store=runs": ("store ", "no part of a prediction"),
    "search=largest_batch": ("search ", "no part of a prediction"),
    "gpus": ("'gpus'", "write key=value"),
    "gpu=4": ("gpu ", "not a field", "gpus"),
    "hardware.memory_limit_gib=-1": ("hardware.memory_limit_gib=-1", "above 0"),
    "model=gpt_tiny gpus=1,abc": ("gpus=abc", "a whole number"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.advice.question.detect_device", lambda: CPU)
    monkeypatch.chdir(tmp_path)


def asked(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    try:
        code = predict.main(list(arguments))
    except SystemExit as exit:  # argparse
        code = int(exit.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def data(capsys, *arguments: str) -> dict[str, Any]:
    """The answer as JSON, which holds nothing that is no number."""
    _, out, err = asked(capsys, *arguments, "format=json")
    assert err == ""

    def refuse(word: str) -> None:
        pytest.fail(f"{word} in the answer")

    return json.loads(out, parse_constant=refuse)


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_earns_one_sentence(typed, capsys, tmp_path):
    model = [] if "model" in typed else ["model=t5_tiny"]
    code, out, err = asked(capsys, *model, *typed.split())
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    for part in MISTAKES[typed]:
        assert part in err
    assert err.rstrip().endswith(".")
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_is_refused(capsys):
    code, out, err = asked(capsys, "--gpus=4")
    assert (code, out) == (2, "")
    assert "--gpus=4" in err


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """The answer for a small model on 16 GPUs, from a process of its own: only data on its output."""
    done = run_command("bench.predict", *GPT, "gpus=16", "tokens=1e9", "format=json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ROW_KEYS = {
    "rank", "status", "run_id", "overrides", "strategy", "effective_strategy", "sharding_factor", "precision",
    "reshard_after_forward", "activation_checkpointing", "gradient_accumulation", "batch_size_per_gpu",
    "largest_batch_per_gpu", "tokens_per_step", "tflops_per_gpu", "hardware_tflops_per_gpu", "mfu", "hfu",
    "causal_tflops_per_gpu", "causal_mfu",
    "tokens_per_second_per_gpu", "tokens_per_second", "gpu_hours", "days", "dollars", "kwh",
    "dollars_per_billion_tokens", "kwh_per_billion_tokens", "step_time_s", "time", "memory", "reason",
    "notes",
}  # fmt: skip


@pytest.mark.long
def test_json_has_the_documented_keys(small):
    assert set(small) == {"format", "tokens", "prices", "pue", "power_share", "sections", "left_out"}
    assert small["tokens"] == 1e9
    (section,) = small["sections"]
    assert set(section) == {
        "question",
        "advice",
        "warnings",
        "ranked",
        "infeasible",
        "impossible",
        "rules_of_thumb",
        "layouts",
    }
    assert section["question"]["gpus"] == 16
    assert section["question"]["parameters"] == 1_121_024
    for row in section["ranked"]:
        assert set(row) == ROW_KEYS
        assert set(row["memory"]["parts"]) == set(MEMORY_PARTS)
        for values in (row["step_time_s"], *(row["memory"][name] for name in ("allocated", "reserved", "device_used"))):
            assert 0 < values["low"] <= values["value"] <= values["high"]


def test_the_ranking_compares_what_can_be_varied(small):
    rows = small["sections"][0]["ranked"]
    assert {row["strategy"] for row in rows} == {"ddp", "fsdp"}
    assert {row["sharding_factor"] for row in rows if row["strategy"] == "fsdp"} == {1, 2, 4, 8, 16}
    assert {row["activation_checkpointing"] for row in rows} == {"none", "selective", "full"}
    assert {row["reshard_after_forward"] for row in rows} == {None, True, False}
    assert {row["precision"] for row in rows} == {"bf16"}
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))


def test_numbers_of_a_row_agree_with_each_other(small):
    for row in small["sections"][0]["ranked"]:
        step = row["step_time_s"]["value"]
        time = row["time"]
        parts = ("compute_s", "exposed_communication_s", "optimizer_s", "bubble_s")
        assert sum(time[name] for name in parts) == pytest.approx(step, rel=1e-6)
        assert row["tokens_per_second"] == pytest.approx(16 * row["tokens_per_second_per_gpu"])
        assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / step)
        assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 312)
        assert row["hfu"] >= row["mfu"]
        assert row["gpu_hours"] == pytest.approx(1e9 / row["tokens_per_second_per_gpu"] / 3600)
        assert row["days"] == pytest.approx(row["gpu_hours"] / 16 / 24)
        assert row["kwh"] == pytest.approx(row["gpu_hours"] * 0.4)
        assert row["kwh_per_billion_tokens"] == pytest.approx(row["kwh"])
        assert row["dollars"] is row["dollars_per_billion_tokens"] is None
        memory = row["memory"]
        assert memory["headroom_bytes"] == pytest.approx(memory["capacity_bytes"] - memory["reserved"]["value"], abs=1)
        assert sum(memory["parts"].values()) == pytest.approx(memory["allocated"]["value"], rel=0.01)


def test_the_largest_batch_fits_and_the_next_does_not_surely(capsys):
    limited = (*GPT, "gpus=4", "hardware.memory_limit_gib=2", "strategy=fsdp", "activation_checkpointing=none")
    rows = data(capsys, *limited)["sections"][0]["ranked"]
    for row in rows[:3]:
        assert row["memory"]["verdict"] == "fits"
        assert row["batch_size_per_gpu"] == row["largest_batch_per_gpu"] > 1
        knobs = [text for text in row["overrides"] if text.startswith(("strategy", "activation"))]
        following = data(capsys, *limited, *knobs, f"batch_size_per_gpu={row['largest_batch_per_gpu'] + 1}")
        (section,) = following["sections"]
        (found,) = section["ranked"] + section["infeasible"]
        assert found["memory"]["verdict"] != "fits"
        assert found["largest_batch_per_gpu"] == row["largest_batch_per_gpu"]


@pytest.mark.long
def test_what_is_fixed_is_not_varied(capsys):
    fixed = ("strategy=fsdp", "strategy.sharding_factor=2", "activation_checkpointing=full", "batch_size_per_gpu=8")
    rows = data(capsys, *GPT, "gpus=4", *fixed, "precision=fp32,tf32")["sections"][0]["ranked"]
    assert {row["sharding_factor"] for row in rows} == {2}
    assert {row["activation_checkpointing"] for row in rows} == {"full"}
    assert {row["batch_size_per_gpu"] for row in rows} == {8}
    assert {row["precision"] for row in rows} == {"fp32", "tf32"}
    assert {row["reshard_after_forward"] for row in rows} == {True, False}
    assert all(row["largest_batch_per_gpu"] > 8 for row in rows)


@pytest.mark.long
def test_a_knob_of_one_strategy_asks_for_that_strategy(capsys):
    limiter = data(capsys, *GPT, "gpus=2", "strategy.limit_all_gathers=false", "batch_size_per_gpu=1")
    assert {row["strategy"] for row in limiter["sections"][0]["ranked"]} == {"fsdp1"}
    buckets = data(capsys, *GPT, "gpus=2", "strategy.bucket_cap_mb=5", "batch_size_per_gpu=1")
    assert {row["strategy"] for row in buckets["sections"][0]["ranked"]} == {"ddp"}


@pytest.mark.long
def test_several_losses_are_compared_in_one_table(capsys):
    question = (
        "model=gpt_tiny",
        "gpus=1",
        "hardware=a100_80gb",
        "activation_checkpointing=full",
        "batch_size_per_gpu=64",
    )
    losses = "loss=whole,chunked,compiled"
    sections = data(capsys, *question, losses)["sections"]
    assert len(sections) == 1
    ranked = [row["overrides"] for row in sections[0]["ranked"]]
    assert sorted(override for overrides in ranked for override in overrides if override.startswith("loss=")) == [
        "loss=chunked",
        "loss=compiled",
        "loss=whole",
    ]
    code, text, _ = asked(capsys, *question, losses)
    assert code == 0
    assert re.search(r"Use Single with .*, batch 64, loss compiled: it fits", text.replace("\n", " "))
    code, text, _ = asked(capsys, *question, "loss=compiled")
    assert "loss compiled, verdict fits" in text.replace("\n", " ")


def test_the_same_question_gets_the_same_answer(small, capsys):
    again = data(capsys, *GPT, "gpus=16", "tokens=1e9")
    assert again == small


def test_csv_has_a_line_per_candidate(small, capsys):
    code, out, err = asked(capsys, *GPT, "gpus=16", "tokens=1e9", "--format", "csv")
    assert (code, err) == (0, "")
    lines = list(csv.DictReader(io.StringIO(out)))
    assert tuple(lines[0]) == CSV_COLUMNS
    rows = small["sections"][0]["ranked"]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert float(line["tokens_per_second"]) == row["tokens_per_second"]
        assert line["overrides"].split(" ") == row["overrides"]
        assert all(value.lower() not in ("nan", "inf") for value in line.values())


def test_several_world_sizes_make_a_table_each(capsys):
    sections = data(capsys, *GPT, "gpus=[1,2]", "batch_size_per_gpu=2")["sections"]
    assert [section["question"]["gpus"] for section in sections] == [1, 2]
    assert {row["strategy"] for row in sections[0]["ranked"]} == {"single"}


def test_a_table_that_cannot_be_does_not_take_the_others_along(capsys):
    found = data(capsys, *GPT, "gpus=8,12", "batch_size_per_gpu=2")
    assert [section["question"]["gpus"] for section in found["sections"]] == [8]
    ((left_out),) = found["left_out"]
    assert left_out["question"] == "gpus=12"
    assert "gpus=12 is not valid" in left_out["reason"]


@pytest.mark.long
def test_gpus_without_bf16_train_in_fp16(capsys):
    found = data(capsys, "model=gpt_tiny", "hardware=v100_32gb", "gpus=2", "batch_size_per_gpu=2")
    assert {row["precision"] for row in found["sections"][0]["ranked"]} == {"fp16"}


@pytest.mark.long
@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_without_speeds_memory_alone_is_ranked(hardware, capsys):
    found = data(capsys, "model=gpt_tiny", f"hardware={hardware}", "gpus=2", "batch_size_per_gpu=2")
    (section,) = found["sections"]
    assert f"hardware={hardware} says nothing of its speed" in section["advice"]
    rows = section["ranked"]
    needs = [row["memory"]["reserved"]["value"] for row in rows]
    assert needs == sorted(needs)
    assert all(row["step_time_s"] is row["mfu"] is row["days"] is None for row in rows)
    code, out, _ = asked(capsys, "model=gpt_tiny", f"hardware={hardware}", "gpus=2", "details=true")
    assert code == 0
    assert "not predicted" in out
    assert "nan" not in out.lower().split()


@pytest.mark.long
def test_more_shards_than_there_is_to_shard_is_possible_and_said(capsys):
    asked_for = ("gpus=16384", "strategy.sharding_factor=full", "batch_size_per_gpu=1")
    (section,) = data(capsys, *SMALL_GPT, "hardware=a100_80gb", "sequence_length=16", *asked_for)["sections"]
    assert section["ranked"]
    assert all("nothing" in row["notes"][0] for row in section["ranked"])
    assert all(math.isfinite(row["tokens_per_second"]) for row in section["ranked"])


@pytest.mark.long
def test_nothing_fits_says_why_and_what_would(capsys):
    small_card = ("model=gpt_mini", "hardware=a100_80gb", "hardware.memory_limit_gib=0.2", "strategy=ddp")
    code, out, err = asked(capsys, *small_card, "gpus=2", "--top", "3")
    assert (code, err) == (1, "")
    said = " ".join(out.split())
    assert "Nothing fits" in said
    assert "DDP" in said
    assert "strategy=fsdp would fit from 4 GPUs on" in said


def test_where_the_host_is_short_the_host_is_named(capsys):
    """All there is to offload is 16 bytes per parameter of fp32; the device has room."""
    offload = ("strategy=fsdp", "strategy.cpu_offload=true", "precision=fp32", "batch_size_per_gpu=1")
    typed = (*GPT, "gpus=4", *offload, "activation_checkpointing=none", "hardware.host.memory_gib=0.01")
    (section,) = data(capsys, *typed)["sections"]
    assert not section["ranked"]
    rows = {row["sharding_factor"]: row for row in reversed(section["infeasible"])}
    assert section["infeasible"][0]["sharding_factor"] == 4, "what comes nearest to fitting, though not on the device"
    for factor, row in rows.items():
        needed, share = re.findall(r"[\d.]+(?= GiB)", row["reason"])
        assert row["reason"].startswith(f"what a rank offloads needs {needed} GiB, and its share of its machine")
        assert float(needed) == pytest.approx(16 * section["question"]["parameters"] / factor / 2**30, rel=0.05)
        assert float(share) == pytest.approx(0.01 / 4)
    assert section["infeasible"][0]["reason"] in section["advice"]
    code, out, _ = asked(capsys, *typed, "details=true")
    assert code == 1
    assert "does not fit in the machine's memory" in " ".join(out.split())


def test_a_copy_that_the_host_does_not_hold_is_no_matter_of_the_gpu(capsys):
    offload = ("strategy=fsdp", "strategy.cpu_offload=true", "precision=fp32", "batch_size_per_gpu=1")
    (section,) = data(capsys, *GPT, "gpus=4", *offload, "hardware.host.memory_gib=0.03")["sections"]
    assert "a whole copy of the model for each GPU does not fit (what a rank offloads needs" in section["advice"]


@pytest.mark.long
@pytest.mark.parametrize("asked_for", [(), ("strategy=fsdp",), ("strategy=ddp",)])
def test_more_gpus_are_tried_with_tensor_parallelism_too(asked_for, capsys):
    """Where the largest layer does not fit however thinly it is sharded, an eighth of it does."""
    layer = ("model.vocabulary_size=400000", "model.num_heads=8", "activation_checkpointing=full")
    wide = ("model=gpt_tiny", "model.hidden_size=512", "sequence_length=64", "hardware=a100_80gb", *layer)
    typed = (*wide, *asked_for, "gpus=4", "hardware.memory_limit_gib=1.1")
    (section,) = data(capsys, *typed)["sections"]
    assert section["advice"].startswith("Nothing fits")
    assert section["advice"].endswith("; strategy=tensor_parallel would fit from 8 GPUs on.")
    eight = data(capsys, *wide, "gpus=8", "hardware.memory_limit_gib=1.1", "strategy=fsdp,tensor_parallel")["sections"]
    assert {row["strategy"] for row in eight[0]["ranked"]} == {"tensor_parallel"}
    (section,) = data(capsys, *typed, "precision=fp16")["sections"]  # which tensor parallelism refuses
    assert section["advice"].endswith("; nor would strategy=fsdp fit on any number of GPUs tried, up to 16,384.")
    (section,) = data(capsys, *typed, "hardware.memory_limit_gib=0.3")["sections"]
    assert "; nor would strategy=fsdp or tensor_parallel fit on any" in section["advice"]


@pytest.mark.long
@pytest.mark.parametrize("asked_for", ["fsdp", "tensor_parallel", "fsdp,tensor_parallel"])
def test_sharding_is_named_where_it_needs_as_few_gpus_as_tensor_parallelism(asked_for, capsys):
    knobs = ("hardware.memory_limit_gib=0.3", "gpus=2", "activation_checkpointing=none", f"strategy={asked_for}")
    model = ("model=gpt_tiny", "model.hidden_size=512", "model.num_heads=8", "model.num_layers=16")
    (section,) = data(capsys, *model, "hardware=a100_80gb", "sequence_length=64", *knobs)["sections"]
    assert section["infeasible"][0]["strategy"] == asked_for.split(",")[-1]
    assert section["advice"].endswith(f"; strategy={asked_for.split(',')[0]} would fit from 4 GPUs on.")


@pytest.mark.parametrize(
    ("name", "reshard"), [("zero2", False), ("zero2_fsdp1", False), ("accelerate", None), ("lightning", None)]
)
def test_when_to_reshard_is_not_varied_where_the_file_of_a_strategy_decides(name, reshard, capsys):
    """ZeRO-2 is not compared with ZeRO-3, nor is a framework given a knob that its backend does not have."""
    typed = (*GPT, "gpus=4", "batch_size_per_gpu=1", "activation_checkpointing=none", f"strategy={name}")
    (section,) = data(capsys, *typed)["sections"]
    assert section["ranked"]
    for row in section["ranked"]:
        (point,) = parse_sweep_request(row["overrides"], multirun=False, device=CPU).points
        assert compose_config(point)["strategy"]["reshard_after_forward"] is reshard


@pytest.mark.parametrize("stage", [2, 3])
def test_the_sharding_factor_is_not_varied_where_the_stage_decides_it(stage, capsys):
    code, out, err = asked(
        capsys, *GPT, "gpus=4", "batch_size_per_gpu=1", "strategy=deepspeed", f"strategy.stage={stage}"
    )
    assert (code, err) == (0, "")
    assert f"DeepSpeed stage {stage}" in out
    assert "Not possible" not in out


PRICED = (*GPT[::2], "batch_size_per_gpu=8", "strategy=fsdp", "activation_checkpointing=none")


@pytest.mark.long
def test_tables_are_ranked_by_what_the_training_costs(capsys):
    """So is the same GPU at half the price, whatever was named first."""
    typed = (*PRICED, "gpus=8,16", "hardware=a100_80gb,h100_80gb", "price=aws_p4de,aws_p5", "rank=cost", "tokens=2e9")
    answer = data(capsys, *typed)
    assert [offer["name"] for offer in answer["prices"]] == ["aws_p4de", "aws_p5"]
    best = [section["ranked"][0] for section in answer["sections"]]
    assert [row["dollars"] for row in best] == sorted(row["dollars"] for row in best)
    for section in answer["sections"]:
        price, watt = {"a100_80gb": (3.4309, 400), "h100_80gb": (6.88, 700)}[section["question"]["hardware"]]
        for row in section["ranked"]:
            assert row["dollars"] == pytest.approx(price * row["gpu_hours"])
            assert row["kwh"] == pytest.approx(watt / 1000 * row["gpu_hours"])
            assert row["dollars"] == pytest.approx(2 * row["dollars_per_billion_tokens"])
    said = " ".join(asked(capsys, *typed)[1].split())
    assert "The best of each" in said
    assert "Price: aws_p5, $6.88 per GPU-hour (on demand, in instances of 8, region us-east-1, read on 2026-" in said
    assert "Energy: 400 W of board power per GPU all the time, an upper bound" in said


def test_without_a_budget_dollars_are_those_of_a_billion_tokens(capsys):
    _, out, _ = asked(capsys, *PRICED, "hardware=a100_80gb", "gpus=8", "price=2", "pue=1.3")
    assert "$/1e9 tokens" in out
    assert "x pue=1.3" in out
    _, out, _ = asked(capsys, *PRICED, "hardware=a100_80gb", "gpus=8")
    assert "$" not in out
    assert "kWh" not in out


def test_the_table_can_be_read(capsys):
    code, out, err = asked(capsys, *GPT, "gpus=8", "tokens=1e9", "top=3")
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "gpt_tiny, 1.12 M parameters, on 8 GPUs a100_80gb" in said
    assert "Use " in said
    for heading in ("batch", "TFLOP/s", "MFU", "tokens/s", "GPU-hours", "days", "kWh"):
        assert heading in out
    assert "more: top=all" in out


@pytest.mark.long
def test_a_model_that_fits_on_one_gpu_and_one_that_does_not(capsys):
    typed = ("hardware=a100_80gb", "gpus=8", "sequence_length=512", "precision=bf16", "activation_checkpointing=full")
    (section,) = data(capsys, "model=t5_2b", *typed)["sections"]
    copies = [row for row in section["ranked"] if row["sharding_factor"] == 1]
    assert copies, "DDP at 2.28B fits on 80 GB, as the paper says"
    best = section["ranked"][0]
    named = [row for row in section["ranked"] if row["batch_size_per_gpu"] == best["batch_size_per_gpu"]]
    assert section["advice"].startswith("Use ")
    assert f"batch {best['batch_size_per_gpu']}" in section["advice"] or "DDP" in section["advice"], named
    (section,) = data(capsys, "model=t5_11b", *typed)["sections"]
    assert "does not fit on one GPU" in section["advice"]
    assert "FSDP2" in section["advice"]
    assert {row["strategy"] for row in section["infeasible"] if row["sharding_factor"] == 1} == {"ddp", "fsdp"}
    assert all(row["reason"] for row in section["infeasible"])
    assert all(row["reason"] is None for row in section["ranked"])


def test_rules_of_thumb_are_arithmetic_and_compared(small):
    (section,) = small["sections"]
    parameters = section["question"]["parameters"]
    rules = {rule["rule"]: rule for rule in section["rules_of_thumb"]}
    per_parameter = {
        "16 bytes per parameter": 16,
        "20 x the weights (fp32)": 80,
        "ZeRO-1": 4 + 12 / 16,
        "ZeRO-2": 2 + 14 / 16,
        "ZeRO-3": 16 / 16,
        "4-bit weights, all trained": 14.5,
        "LoRA, 1/64 trained": 2 + 14 / 64,
        "QLoRA, 1/64 trained": 0.5 + 14 / 64,
    }
    for name, size in per_parameter.items():
        assert rules[name]["says_bytes"] == pytest.approx(size * parameters)
    for name in ("16 bytes per parameter", "20 x the weights (fp32)", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
        assert rules[name]["predicted_allocated_bytes"] > 0
        assert "activations" in rules[name]["why"]
    for name in ("4-bit weights, all trained", "LoRA, 1/64 trained"):
        assert rules[name]["predicted_allocated_bytes"] is None
        assert rules[name]["why"].startswith("not predicted")


def test_zero_paper_table_1():
    """7.5B parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB (ZeRO paper, figure 1 and table 1)."""
    from bench.advice.answer import MEMORY_RULES

    says = {rule.name: rule.bytes_per_parameter(64) * 7.5 for rule in MEMORY_RULES}
    assert says["16 bytes per parameter"] == 120
    assert round(says["ZeRO-1"], 1) == 31.4
    assert round(says["ZeRO-2"], 1) == 16.6
    assert round(says["ZeRO-3"], 1) == 1.9


DETAILED = (*GPT, "gpus=8", "strategy=fsdp", "strategy.sharding_factor=4", "batch_size_per_gpu=4")


def test_details_show_where_memory_and_time_go(capsys):
    code, out, _ = asked(capsys, "explain", *DETAILED)
    assert code == 0
    for part in (
        "Memory: the peak is in",
        "activations",
        "Time: limited by",
        "exposed communication",
        "Rules of thumb",
    ):
        assert part in out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_timeline_as_a_picture(ending, capsys, tmp_path):
    code, out, err = asked(capsys, *DETAILED, f"timeline=step.{ending}", "format=json")
    assert code == 0
    assert f"step.{ending}" in err
    json.loads(out)  # nothing but data
    written = (tmp_path / f"step.{ending}").read_bytes()
    assert written.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_the_timeline_as_a_trace(capsys, tmp_path):
    code, _, _ = asked(capsys, *DETAILED, "activation_checkpointing=full", "timeline=step.json")
    assert code == 0
    trace = json.loads((tmp_path / "step.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "gather", "reduce", "replicate"} <= set(threads.values())
    assert any(event["name"] == "process_name" and "FSDP2 hybrid (F=4)" in event["args"]["name"] for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    for span in spans:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(span)
        assert span["tid"] in threads
        assert span["ts"] >= 0
        assert span["dur"] >= 0
    assert {"forward", "backward", "optimizer", "all-gather", "reduce-scatter"} <= {s["cat"] for s in spans}
    for thread in threads:
        mine = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if span["tid"] == thread)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(mine)), threads[thread]
    step_us = trace["otherData"]["step_s"] * 1e6
    assert max(span["ts"] + span["dur"] for span in spans) <= step_us * 1.001


@pytest.mark.long
def test_no_timeline_without_speeds(capsys, tmp_path):
    code, out, err = asked(capsys, "model=gpt_tiny", "hardware=cpu", "batch_size_per_gpu=1", "timeline=step.png")
    assert (code, out) == (2, "")
    assert "timeline=step.png" in err
    assert "hardware=cpu says nothing of its speed" in err
    assert not list(tmp_path.iterdir())


def test_help_documents_the_keys(capsys):
    code, out, _ = asked(capsys, "--help")
    assert code == 0
    for name in (
        "tokens",
        "price",
        "rank",
        "details",
        "timeline",
        "format",
        "top",
        "validate",
        "exit code",
        "sections[]",
    ):
        assert name in out


def test_overrides_of_a_row_ask_for_that_row(small, capsys):
    for row in (small["sections"][0]["ranked"][0], small["sections"][0]["ranked"][-1]):
        (section,) = data(capsys, *row["overrides"])["sections"]
        (again,) = section["ranked"]
        assert (again["run_id"], again["memory"], again["step_time_s"]) == (
            row["run_id"],
            row["memory"],
            row["step_time_s"],
        )


def test_a_predictor_that_fails_says_so_in_a_sentence(capsys, monkeypatch):
    def fail(configs, **options):
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(run_predictions, "predict_runs", fail)
    code, out, err = asked(capsys, *GPT, "gpus=2", "model.vocabulary_size=77")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "the predictor failed" in err
    assert "nothing to divide by" in err


@pytest.mark.long
def test_too_close_to_call_is_neither_a_yes_nor_a_no(capsys):
    close = ("model=gpt_tiny", "hardware=a100_80gb", "gpus=2", "strategy=ddp", "activation_checkpointing=none")
    (row,) = data(capsys, *close, "batch_size_per_gpu=8")["sections"][0]["ranked"]
    memory = row["memory"]
    between = (memory["allocated"]["value"] + memory["reserved"]["value"]) / 2 / 2**30
    limit = f"hardware.memory_limit_gib={between}"
    (section,) = data(capsys, *close, limit, "batch_size_per_gpu=8")["sections"]
    (row,) = section["ranked"]
    assert row["memory"]["verdict"] == "too close to call"
    assert row["memory"]["headroom_bytes"] == 0, "the allocator takes all there is"
    assert row["largest_batch_per_gpu"] < 8
    assert section["advice"].startswith("Too close to call")
    code, out, _ = asked(capsys, *close, limit, "batch_size_per_gpu=8", "explain")
    assert code == 0
    assert "(0 %) are left: too close to call" in " ".join(out.split())


@pytest.mark.long
def test_a_slow_network_is_a_reason_to_shard_less(capsys):
    slow = ("model=gpt_125m", "hardware=a100_80gb", "gpus=64", "hardware.speeds.links.node_gb_s=1")
    few = ("strategy=fsdp", "strategy.reshard_after_forward=true", "activation_checkpointing=none")
    (section,) = data(capsys, *slow, *few, "batch_size_per_gpu=1")["sections"]
    assert section["ranked"][0]["sharding_factor"] < 64
    assert section["ranked"][0]["time"]["limited_by"] == "network"
    assert "wait for the network" in section["advice"] or section["ranked"][0]["sharding_factor"] == 1


# --- The picture of a simulated step: what occupies which lane, and how it is told apart.


ON_GPUS = (*SMALL_GPT, "mode=predict", "hardware=a100_80gb", "precision=bf16", "gpus=4")
SPLIT = ("strategy=tensor_parallel", "strategy.degree=2")
OFFLOADED = ("strategy=fsdp", "strategy.cpu_offload=true")


def spans(*overrides: str) -> tuple[TimelineSpan, ...]:
    time = predict_run(compose_run_config(*ON_GPUS, *overrides), timeline=True).time
    assert time is not None
    return time.timeline


def drawn(of: tuple[TimelineSpan, ...]) -> tuple[list[str], list[str], set[str]]:
    """Labels of the lanes, those of the key, and the colours of what is not hatched."""
    with style.apply_report_style():
        figure = draw_timeline(of, "title", "subtitle")
    axes = figure.axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    colours = {to_hex(bar.get_facecolor()) for bar in bars if not bar.get_hatch()}
    return (
        [text.get_text() for text in axes.get_yticklabels()],
        [t.get_text() for t in figure.legends[0].texts],
        colours,
    )


def test_what_ranks_that_share_layers_exchange_is_no_idleness() -> None:
    found = spans(*SPLIT)
    exchanges = [span for span in found if span.name.startswith("exchange ")]
    assert exchanges
    assert {span.kind for span in exchanges} == {"exchange"}
    _, key, colours = drawn(found)
    assert "exchange" in key
    assert SPAN_KIND_COLOURS["exchange"] in colours


def test_a_lane_of_transfers_is_called_so() -> None:
    found = spans(*OFFLOADED)
    names, key, colours = drawn(found)
    assert names == ["compute", "all-gather", "reduce", "transfer"]
    assert "transfer" in key
    assert SPAN_KIND_COLOURS["transfer"] in colours
    hybrid = spans("strategy=fsdp", "strategy.sharding_factor=2")
    assert [get_lane_name(stream, hybrid) for stream in list_streams(hybrid)] == [
        "compute",
        "all-gather",
        "reduce",
        "replicas",
    ]


@pytest.mark.parametrize("overrides", [SPLIT, OFFLOADED], ids=["tensor parallelism", "offload"])
def test_every_kind_has_a_colour_of_its_own(overrides: tuple[str, ...]) -> None:
    kinds = {span.kind for span in spans(*overrides)}
    assert kinds <= set(SPAN_KIND_COLOURS)
    assert len({SPAN_KIND_COLOURS[kind] for kind in kinds}) == len(kinds)
    assert HATCHED_KINDS == ("wait",)
