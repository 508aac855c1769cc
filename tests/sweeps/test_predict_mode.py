"""``mode=predict`` on any sweep: nothing runs, every run has its row. And what predictions do for sweeps that run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import records, run, sweep
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.launch.local import LocalLauncher
from bench.planning import run_predictions, sweep_plan
from bench.planning.checkpointing_choice import CHOICES, choose_budget
from bench.planning.run_predictions import compute_rough_step_s, predict_configs, predict_duration_s
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import DOES_NOT_FIT, FITS, MemoryPrediction, PredictedRange, Prediction, TimePrediction
from bench.prediction.predictor import predict_runs
from bench.records import Record
from bench.records.reading import read_latest_attempts
from bench.records.store import validate_record
from bench.sweeps import predict_sweep, run_sweep
from tests.conftest import CPU, FULL_SCALE, ROOT, SMALL_GPT, SMALL_T5, compose_run_config, limit_cpu_time, needs

MEASURED = ROOT / "results" / "measured" / "cpu_2core"
A100 = "hardware=a100_80gb"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path_factory):
    """On a machine without GPUs and without SLURM, where launching is a failure; predictions are not remembered."""

    def launch(*_args, **_options):
        pytest.fail("something was launched")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    monkeypatch.setattr(run_sweep, "detect_device", lambda: CPU)
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm")
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(run_predictions, "_predictions", {})


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def rows(store: Path) -> list[Record]:
    return records.read_latest_attempts(store).records


def attempts(store: Path) -> list[int]:
    return sorted(
        len(records.list_attempts(store, folder.name)) for folder in store.iterdir() if len(folder.name) == 16
    )


def told(monkeypatch, answer: Callable[[RunConfig], Prediction]) -> list[RunConfig]:
    """Have a predictor of our own; what it is asked for."""
    asked: list[RunConfig] = []

    def predict_all(configs, **options):
        asked.extend(configs)
        return [answer(config) for config in configs]

    monkeypatch.setattr(run_predictions, "predict_runs", predict_all)
    return asked


def told_so(verdict: str | None = FITS, step_s: float = 0.5) -> Prediction:
    """A prediction of 10 GB that reserves 11 of them, of which there are 12."""
    memory = MemoryPrediction(
        allocated=PredictedRange(10e9, 9.5e9, 10.5e9),
        active=PredictedRange(10.2e9, 9.7e9, 10.7e9),
        reserved=PredictedRange(11e9, 10e9, 12e9),
        device_used=PredictedRange(12e9, 11e9, 13e9),
        wanted=PredictedRange(11e9, 10e9, 12e9),
        parts={"parameters": 2 * 10**9, "optimizer": 4 * 10**9, "activations": 4 * 10**9},
        phase="backward",
        module="block.3",
        capacity=12 * 10**9,
        verdict=verdict,
        phase_peaks={"forward": 8 * 10**9, "backward": 10 * 10**9, "optimizer": 9 * 10**9},
    )
    spent = TimePrediction(
        PredictedRange(step_s, 0.9 * step_s, 1.1 * step_s), 0.6 * step_s, 0.2 * step_s, 0.1 * step_s, 0.1 * step_s,
        0.3 * step_s,
        "compute", False,
    )  # fmt: skip
    return Prediction(memory, spent)


# ---- rows


@pytest.mark.slow
def test_rows_are_the_same_whether_one_process_writes_them_or_several(tmp_path, monkeypatch):
    typed = ["-m", *SMALL_GPT, "strategy=ddp,fsdp", "gpus=1,8", "precision=bf16", A100, "mode=predict", "report=false"]
    writers: list[int] = []
    open_worker_pool = predict_sweep.processes.open_worker_pool
    for name, min_rows in (("one", 1000), ("several", 2)):
        monkeypatch.setattr(predict_sweep, "MIN_ROWS_PER_PROCESS", min_rows)
        monkeypatch.setattr(predict_sweep.processes, "count_workers", lambda: 2)
        monkeypatch.setattr(
            predict_sweep.processes, "open_worker_pool", lambda count: writers.append(count) or open_worker_pool(count)
        )
        assert sweep.main([*typed, f"store={tmp_path / name}"]) == 0
    assert writers == [2]
    of_one, of_several = ({row["run_id"]: row for row in rows(tmp_path / name)} for name in ("one", "several"))
    assert len(of_one) == 4
    times = {"started_at": None, "finished_at": None}
    assert {run_id: row | times for run_id, row in of_one.items()} == {
        run_id: row | times for run_id, row in of_several.items()
    }
    assert [list(row) for row in of_one.values()] == [list(of_several[run_id]) for run_id in of_one]


@pytest.mark.slow
def test_a_sweep_is_predicted_and_nothing_runs(store, capsys):
    typed = ["-m", *SMALL_GPT, "strategy=ddp,fsdp,fsdp1", "gpus=1,8,64", "precision=bf16", A100, "mode=predict"]
    assert sweep.main([*typed, f"store={store}"]) == 0
    shown = capsys.readouterr().out
    assert "9 runs, 0 done, 9 to run" in shown
    assert "nothing ran" in shown
    assert (store / "report" / "index.html").exists()
    found = rows(store)
    assert len(found) == 9
    for row in found:
        validate_record(row)
        assert (row["evidence"], row["launcher"], row["status"], row["fit"]) == ("predicted", "predict", "ok", "fits")
        assert row["run_id"] == build_run_config(row["config"]).run_id
        assert not {"ranks", "losses", "trace", "concurrent"} & set(row)
        assert row["hosts"] is None
        assert row["attempt"] == 0
        memory, spent = row["prediction"]["memory"], row["prediction"]["time"]
        told_apart = sum(memory["parts_bytes"].values())
        assert 0 <= row["peak_allocated_bytes"] - told_apart < 16 * 2**20  # the matmul library's workspace
        low, high = row["peak_reserved_low_bytes"], row["peak_reserved_high_bytes"]
        assert row["peak_allocated_low_bytes"] <= low <= row["peak_reserved_bytes"] <= high <= memory["capacity_bytes"]
        parts = ("compute_s", "exposed_communication_s", "optimizer_s", "bubble_s")
        assert sum(spent[name] for name in parts) == pytest.approx(row["step_time_median_s"], rel=0.01)
        assert row["step_time_ci_low_s"] <= row["step_time_median_s"] <= row["step_time_ci_high_s"]
        assert 0 <= row["exposed_communication"] < 1
        # FSDP's collectives in a group of one are copies on the device.
        assert (row["exposed_communication"] > 0.001) <= (row["world_size"] > 1)
        assert 0 < row["mfu"] <= row["hfu"] < 1
        assert row["limited_by"] in ("compute", "memory bandwidth", "network", "kernel launches", "allocator")
    table = records.load(store)
    assert set(table["predictor"]) == {predict_sweep.compute_predictor_version()}


def test_speed_follows_from_the_step_as_it_does_for_measured_rows(monkeypatch):
    config = compose_run_config(*SMALL_GPT, A100, "mode=predict", "precision=bf16", "activation_checkpointing=full")
    row = build_predicted_row(config, told_so(step_s=0.25))
    count = config.model.count_flops_per_sequence(config.sequence_length)
    assert row["tflops_per_gpu"] == pytest.approx(4 * count.model_flops / 0.25 / 1e12)
    assert row["hardware_tflops_per_gpu"] == pytest.approx(4 * count.compute_hardware_flops("full") / 0.25 / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 312)
    assert row["tokens_per_second_per_gpu"] == pytest.approx(4 * 128 / 0.25)
    assert row["exposed_communication"] == pytest.approx(0.2)


@pytest.mark.slow
def test_a_run_that_does_not_fit_has_its_phase_and_no_speed(store, capsys):
    typed = [*SMALL_GPT, "strategy=ddp", "gpus=8", A100, "mode=predict", "hardware.memory_limit_gib=0.001"]
    assert sweep.main([*typed, f"store={store}", "report=false"]) == 0
    (row,) = rows(store)
    assert (row["status"], row["fit"]) == ("oom", "does not fit")
    assert row["oom_phase"] in ("init", "forward", "backward", "optimizer")
    assert row["error"].startswith("predicted not to fit: needs ")
    assert "step_time_median_s" not in row
    assert row["peak_reserved_bytes"] > row["memory_limit_bytes"]
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capacity", "beside", "phase"),
    [
        (2.1, 0.0, "init"),
        (3.2, 0.0, "init"),
        (4.2, 0.0, "forward"),
        (6.4, 0.0, "backward"),
        (9.8, 0.0, "optimizer"),
        (10.5, 0.0, "backward"),
        (7.0, 0.5, "backward"),
    ],
)
def test_memory_runs_out_in_the_first_phase_that_needs_more(capacity, beside, phase):
    """Of 10 GB, 4 are state that the first forward (8 in later steps) and backward (10) do without; before it there
    are 3 GB, DDP's buckets among them; 1.1 is reserved for every 1 that is allocated."""
    prediction = told_so(DOES_NOT_FIT)
    sizes = {"capacity": int(capacity * 10**9), "beside": int(beside * 10**9), "initial": 3 * 10**9}
    memory = dataclasses.replace(prediction.memory, **sizes)
    row = build_predicted_row(compose_run_config(*SMALL_GPT), dataclasses.replace(prediction, memory=memory))
    assert row["oom_phase"] == phase


@pytest.mark.long
@pytest.mark.slow
def test_a_cpu_has_memory_and_no_speed(store):
    assert sweep.main(["mode=predict", *SMALL_T5, "gpus=2", f"store={store}"]) == 0
    (row,) = rows(store)
    assert (row["device"], row["hardware"], row["status"], row["fit"]) == ("cpu", "cpu", "ok", None)
    assert row["peak_allocated_bytes"] > 0
    assert row["prediction"]["time"] is None
    assert "step_time_median_s" not in row
    assert records.load(store)["step_time_median_s"].isna().all()


@pytest.mark.parametrize("gpus", [1, 16384])
def test_one_gpu_to_sixteen_thousand_on_a_cluster_nobody_has(gpus, store):
    typed = ["mode=predict", "cluster=slurm", A100, *SMALL_GPT, f"gpus={gpus}", "strategy.sharding_factor=node"]
    assert sweep.main([*typed, f"store={store}", "report=false"]) == 0
    (row,) = rows(store)
    assert (row["world_size"], row["nodes"], row["sharding_factor"]) == (gpus, max(1, gpus // 8), min(8, gpus))


def test_predictions_are_not_repeated(store, capsys):
    typed = ["sweep=model_scale", "mode=predict", A100, "dry_run=true", f"store={store}"]
    assert sweep.main(typed) == 0
    assert "53 runs, 0 done, 53 to run" in capsys.readouterr().out
    assert not store.exists()


# ---- once, and again


def test_what_is_predicted_stays_until_it_is_forced_or_the_predictor_changes(store, monkeypatch, capsys):
    typed = ["-m", "mode=predict", A100, *SMALL_GPT, "gpus=1,8", f"store={store}", "report=false"]
    asked = told(monkeypatch, lambda config: told_so())
    assert sweep.main(typed) == 0
    before = {path: path.read_bytes() for path in store.glob("*/0.json")}
    assert sweep.main(typed) == 0
    assert "2 runs, 2 done, 0 to run" in capsys.readouterr().out
    assert (len(asked), attempts(store)) == (2, [1, 1])
    assert sweep.main([*typed, "force=true"]) == 0
    assert attempts(store) == [2, 2]
    for module in (sweep_plan, predict_sweep):
        monkeypatch.setattr(module, "compute_predictor_version", lambda *_: "another")
    assert sweep.main([*typed, "dry_run=true"]) == 0
    assert "2 runs, 0 done, 2 to run" in capsys.readouterr().out
    assert sweep.main(typed) == 0
    assert attempts(store) == [3, 3]
    assert set(records.load(store)["predictor"]) == {"another"}
    assert {path: path.read_bytes() for path in store.glob("*/0.json")} == before
    assert sweep.main(typed) == 0
    assert attempts(store) == [3, 3]


@needs("peft")
def test_a_row_names_the_predictor_of_its_libraries(store, monkeypatch):
    told(monkeypatch, lambda config: told_so())
    run = ("mode=predict", A100, "model=gpt_tiny", "gpus=1", "strategy=ddp", "finetune=lora")
    assert sweep.main([*run, f"store={store}", "report=false"]) == 0
    (named,) = records.load(store)["predictor"]
    assert named == predict_sweep.compute_predictor_version(("peft",)) != predict_sweep.compute_predictor_version()


def test_the_measured_run_is_another_run(store, monkeypatch, capsys):
    told(monkeypatch, lambda config: told_so())
    launched: list[RunConfig] = []
    monkeypatch.setattr(
        LocalLauncher, "launch", lambda self, tasks, *rest: launched.extend(task.config for task in tasks)
    )
    typed = ["-m", *SMALL_GPT, "gpus=1,2", "mode=measure,predict", "hardware=cpu", f"store={store}", "report=false"]
    assert sweep.main(typed) == 1  # nothing came of the measured runs
    assert {config.mode for config in launched} == {"measure"}
    assert [row["evidence"] for row in rows(store)] == ["predicted", "predicted"]
    assert len(launched) == 2
    assert "nothing ran" in capsys.readouterr().out


@pytest.mark.parametrize("row", read_latest_attempts(MEASURED).records, ids=lambda row: row["run_id"])
def test_measured_runs_keep_their_names(row):
    assert build_run_config(row["config"]).run_id == row["run_id"]


def test_what_cannot_change_a_prediction_is_no_part_of_its_name():
    base = (*SMALL_GPT, A100, "mode=predict")
    config = compose_run_config(*base)
    for setting in ("measurement.steps=7", "measurement.profile=true", "seed=3", "repeat=2", "sweep.name=x"):
        assert compose_run_config(*base, setting).run_id == config.run_id, setting
    for setting in (
        "mode=measure",
        "hardware.memory_limit_gib=40",
        "batch_size_per_gpu=5",
        "hardware.peak_tflops.fp32=9",
    ):
        assert compose_run_config(*base, setting).run_id != config.run_id, setting


def test_what_is_believed_of_the_hardwares_speed_names_predictions_alone():
    for mode, same in (("measure", True), ("predict", False)):
        values = compose_config({"hardware": "a100_80gb", "mode": mode})
        config = build_run_config(values)
        values["hardware"]["speeds"]["overlap_loss"] = 0.5
        assert (build_run_config(values).run_id == config.run_id) == same


# ---- what cannot be predicted


def refuses(config: RunConfig) -> Prediction:
    if config.gpus == 8:
        raise ImpossibleError("gpus=8 is not valid: choose 1.")
    return told_so()


def fails(config: RunConfig) -> Prediction:
    if config.gpus == 8:
        raise ZeroDivisionError("division by zero")
    return told_so()


def no_number(config: RunConfig) -> Prediction:
    return told_so(step_s=math.nan if config.gpus == 8 else 1.0)


@pytest.mark.parametrize(
    ("answer", "code", "status", "words"),
    [
        (refuses, 0, "skipped", "gpus=8 is not valid: choose 1."),
        (fails, 1, "error", "the predictor failed: ZeroDivisionError: division by zero (fails, line "),
        (no_number, 1, "error", "the predictor failed: it came to no number."),
    ],
)
def test_one_run_that_cannot_be_predicted_costs_the_others_nothing(
    answer, code, status, words, store, monkeypatch, capsys
):
    told(monkeypatch, answer)
    typed = ["-m", "mode=predict", A100, *SMALL_GPT, "gpus=1,8,16", f"store={store}", "report=false"]
    assert sweep.main(typed) == code
    assert "Not predicted (1)" in capsys.readouterr().out
    assert sorted(row["status"] for row in rows(store)) == sorted(["ok", "ok", status])
    (row,) = (row for row in rows(store) if row["status"] == status)
    assert row["world_size"] == 8
    assert row["error"].startswith(words)
    assert "NaN" not in "".join(path.read_text() for path in store.glob("*/*.json"))


def test_a_sweep_of_which_nothing_can_be_predicted_is_refused_in_a_sentence(store, monkeypatch, capsys):
    told(monkeypatch, refuses)
    assert sweep.main(["mode=predict", A100, *SMALL_GPT, "gpus=8", f"store={store}"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "None of the 1 run(s) asked for can run. gpus=8 is not valid: choose 1.\n"
    assert shown.out == ""
    assert not list(store.glob("*/*.json"))


def test_a_single_run_is_not_for_predictions(capsys, store):
    assert run.main(["mode=predict", *SMALL_GPT, f"store={store}"]) == 2
    assert capsys.readouterr().err.startswith("mode=predict executes nothing: ")
    assert not store.exists()


# ---- the largest batch


@pytest.mark.slow
def test_the_largest_batch_is_found_without_trying_all(store, capsys):
    typed = (*SMALL_GPT, "strategy=fsdp", "gpus=8", A100, "hardware.memory_limit_gib=0.5", "mode=predict")
    assert sweep.main([*typed, "search=largest_batch", f"store={store}", "report=false"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    surely, perhaps = int(line[-2]), int(line[-1])
    assert 0 < surely <= perhaps
    sizes = (surely, surely + 1, perhaps, perhaps + 1)
    verdicts = [
        told.memory.verdict
        for told in predict_configs([compose_run_config(*typed, f"batch_size_per_gpu={size}") for size in sizes])
        if isinstance(told, Prediction)
    ]
    assert verdicts[0] == FITS
    assert verdicts[1] != FITS
    assert verdicts[2] != DOES_NOT_FIT
    assert verdicts[3] == DOES_NOT_FIT
    assert len(rows(store)) < 30


@pytest.mark.slow
def test_where_nothing_fits_the_search_says_so(store, monkeypatch, capsys):
    told(monkeypatch, lambda config: told_so(DOES_NOT_FIT))
    assert sweep.main(["mode=predict", A100, *SMALL_GPT, "search=largest_batch", f"store={store}"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[-2:] == ["none", "none"]


# ---- sweeps that do run


def verdicts(config: RunConfig) -> Prediction:
    return told_so(DOES_NOT_FIT if config.strategy.name == "ddp" else FITS, step_s=2.0)


CLUSTER = ["-m", "cluster=slurm", A100, *SMALL_GPT, "strategy=ddp,fsdp", "gpus=8,64", "dry_run=true"]


def test_a_dry_run_says_what_fits_how_long_it_takes_and_what_it_costs(store, monkeypatch, capsys):
    told(monkeypatch, verdicts)
    assert sweep.main([*CLUSTER, f"store={store}"]) == 0
    shown = capsys.readouterr().out
    assert "4 runs, 0 done, 4 to run" in shown
    assert "Memory: 2 fit, 0 are too close to call, 2 will surely not fit (skip_oom=true leaves them out)." in shown
    seconds = 60 + 5 + 3 + 26 * 2.0  # to start, on a GPU, least seconds of warm-up, and warm-up, timed, observed steps
    hours = 2 * (8 + 64) * seconds / 3600
    assert f"Expected: {4 * seconds / 60:.0f} min one after the other, {hours:.1f} GPU-hours." in shown
    assert "does not fit" in shown
    assert "kWh" not in shown
    assert sweep.main([*CLUSTER, f"store={store}", "price=aws_p4de", "pue=1.5"]) == 0
    shown = capsys.readouterr().out
    assert f"{hours:.1f} GPU-hours, ${hours * 3.4309:.2f}, {hours * 0.4 * 1.5:.2f} kWh." in shown
    for part in (f"{64 * seconds / 3600 * 3.4309:.2f}", "Price: aws_p4de, $3.4309", "x pue=1.5"):
        assert part in shown
    assert not store.exists()
    assert sweep.main([*CLUSTER, f"store={store}", "skip_oom=true"]) == 0
    shown = capsys.readouterr().out
    assert "4 runs, 0 done, 2 to run, 2 skipped: predicted not to fit" in shown
    assert "2 runs in 2 arrays" in shown
    assert not store.exists()


def test_predictions_of_a_sweep_tell_what_a_billion_tokens_cost_and_no_row_knows_the_price(store, monkeypatch, capsys):
    told(monkeypatch, lambda config: told_so(step_s=2.0))
    typed = ["mode=predict", A100, *SMALL_GPT, "gpus=4", f"store={store}", "report=false", "price=lambda_a100_80gb"]
    assert sweep.main(typed) == 0
    (row,) = rows(store)
    gpu_hours = 1e9 / row["tokens_per_second_per_gpu"] / 3600
    shown = capsys.readouterr().out
    for part in ("$/1e9 tokens", f"{2 * gpu_hours * 2.79:,.2f}", f"{gpu_hours * 0.4:,.2f}"):
        assert part in shown
    assert sweep.main([*typed, "price=7"]) == 0
    assert "1 runs, 1 done, 0 to run" in capsys.readouterr().out
    assert sweep.main([*typed, "price=aws_p5"]) == 2
    assert "price=aws_p5 is not valid: choose aws_p4de or" in capsys.readouterr().err


def test_a_dry_run_without_a_predictor_says_why_and_guesses(store, monkeypatch, capsys):
    def broken(config: RunConfig) -> Prediction:
        raise RuntimeError("out of order")

    told(monkeypatch, broken)
    assert sweep.main([*CLUSTER, f"store={store}"]) == 0
    shown = capsys.readouterr().out
    assert "Not predicted (4): the predictor failed: RuntimeError: out of order" in shown
    assert "GPU-hours" in shown


def test_what_surely_does_not_fit_is_skipped_on_request(store, monkeypatch, capsys):
    told(monkeypatch, verdicts)
    launched: list[RunConfig] = []

    def launch(self: Any, tasks: Any, *_rest: Any) -> None:
        launched.extend(task.config for task in tasks)

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    typed = ["-m", "hardware=cpu", *SMALL_GPT, "strategy=ddp,fsdp", "gpus=2", f"store={store}", "report=false"]
    for _ in range(2):
        sweep.main([*typed, "skip_oom=true"])
        assert [config.strategy.name for config in launched] == ["fsdp"]
        launched.clear()
    (row,) = rows(store)
    assert (row["strategy"], row["status"], row["evidence"], row["attempt"]) == ("ddp", "skipped", "measured", 0)
    assert row["error"].startswith("predicted not to fit: needs 10.2 GiB (at least 9.31) of 11.2 GiB")
    assert row["error"].endswith("(skip_oom=true)")
    assert records.list_attempts(store, row["run_id"]) == [0]
    sweep.main(typed)
    assert [config.strategy.name for config in launched] == ["ddp", "fsdp"]
    capsys.readouterr()


def test_time_is_asked_for_as_predicted_or_roughly(monkeypatch):
    told(monkeypatch, lambda config: told_so(step_s=3.0))
    described = compose_run_config(*SMALL_GPT, A100, "cluster=slurm")
    assert predict_duration_s(described) == pytest.approx(60 + 5 + 3 + 26 * 3.0, rel=0.01)
    assert predict_duration_s(described, search=True) == pytest.approx(12 * predict_duration_s(described))
    on_cpu = compose_run_config(*SMALL_GPT, "hardware=cpu")
    assert predict_duration_s(on_cpu) == pytest.approx(60 + 26 * compute_rough_step_s(on_cpu), rel=0.01)
    told(monkeypatch, lambda config: dataclasses.replace(told_so(), time=None))
    undescribed = compose_run_config(*SMALL_GPT, "hardware=gpu")
    step_s = compute_rough_step_s(undescribed)
    assert predict_duration_s(undescribed) == pytest.approx(60 + 5 + 3 + 6 * step_s + max(20 * step_s, 5), rel=0.01)
    assert run_predictions.compute_time_limit_min(600.0) == 35  # three times as long, five minutes more


# ---- thousands


@pytest.mark.alone
def test_around_the_predictor_thousands_of_runs_take_seconds(store, monkeypatch, capsys):
    count = 4032 if FULL_SCALE else 1008
    told(monkeypatch, lambda config: told_so())
    batches = ("batch_size_per_gpu=1,2,4,8", "activation_checkpointing=none,full")
    typed = [
        "-m", "mode=predict", A100, "precision=bf16,tf32,fp32", "gpus=1,2,4,8,16,32,64,128", "strategy=ddp,fsdp,fsdp1",
        "model=gpt_tiny,gpt_mini,gpt_125m,gpt_350m,t5_tiny,t5_mini,t5_small", f"store={store}",
        *(batches if FULL_SCALE else ("batch_size_per_gpu=1,2",)),
    ]  # fmt: skip
    with limit_cpu_time(count):  # a third of it was seen, half of that writing
        assert sweep.main(typed) == 0
    with limit_cpu_time(count / 2):
        assert sweep.main(typed) == 0
    shown = capsys.readouterr().out
    assert f"{count} runs, {count} done, 0 to run" in shown
    assert f"No report of {count} runs, which takes minutes: python -m bench.report" in shown
    assert len(list(store.glob("*/0.json"))) == count


@pytest.mark.slow
def test_memory_is_predicted_to_run_out_where_it_did():
    """Every run of a model on this kind of machine that ran out of memory."""
    measured = [
        row
        for row in read_latest_attempts(ROOT / "results" / "measured" / "cpu_frontier").records
        if row["status"] == "oom"
    ]
    ran_out = [row for row in measured if row["evidence"] == "measured"]
    predictions = predict_runs([build_run_config(row["config"]) for row in ran_out])
    found = [
        build_predicted_row(
            build_run_config(row["config"]),
            dataclasses.replace(each, memory=dataclasses.replace(each.memory, verdict=DOES_NOT_FIT)),
        )["oom_phase"]
        for row, each in zip(ran_out, predictions, strict=True)
    ]
    assert len(found) >= 14
    assert found == [row["oom_phase"] for row in ran_out]


# --- activation_checkpointing=budget: the most that fits.

BUDGET_RUN = {
    "model": "llama_tiny",
    "hardware": "a100_80gb",
    "gpus": "2",
    "strategy": "fsdp",
    "precision": "bf16",
    "sequence_length": "512",
    "batch_size_per_gpu": "64",
    "activation_checkpointing": "budget",
    "mode": "predict",
}


@pytest.mark.long
def test_the_largest_budget_that_fits_is_taken() -> None:
    chosen = [
        choose_budget({**BUDGET_RUN, "hardware.memory_gb": memory_gb})["activation_checkpointing"]
        for memory_gb in ("80", "2.6", "2.4", "1")
    ]
    positions = [CHOICES.index(mode) for mode in chosen]
    assert (chosen[0], chosen[-1]) == ("none", "full")
    assert positions == sorted(positions)
    assert len(set(positions)) > 2
    memory_gb = ("80", "2.6", "2.4", "1")[next(i for i, mode in enumerate(chosen) if mode.startswith("budget"))]
    mode = next(mode for mode in chosen if mode.startswith("budget"))
    settings = {**BUDGET_RUN, "hardware.memory_gb": memory_gb}
    larger = CHOICES[CHOICES.index(mode) - 1]
    fits = [
        prediction.memory.verdict
        for prediction in predict_runs(
            [
                build_run_config(compose_config({**settings, "activation_checkpointing": choice}))
                for choice in (mode, larger)
            ]
        )
    ]
    assert fits[0] == FITS != fits[1]


@pytest.mark.long
def test_a_row_has_the_budget_that_was_chosen(store: Path) -> None:
    typed = [f"{key}={value}" for key, value in BUDGET_RUN.items() if key != "batch_size_per_gpu"]
    assert sweep.main([*typed, "batch_size_per_gpu=1", f"store={store}", "report=false"]) == 0
    (row,) = rows(store)
    assert (row["status"], row["activation_checkpointing"]) == ("ok", "none")


def test_a_budget_needs_a_limit() -> None:
    with pytest.raises(ImpossibleError, match="hardware=cpu, whose memory is not limited"):
        choose_budget({"model": "gpt_tiny", "hardware": "cpu", "activation_checkpointing": "budget"})
