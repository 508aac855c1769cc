"""``hardware=FILE``: a description of one's own is as good as the suite's, and its place and date mean nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import predict, run, sweep
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import UsageError
from bench.core.option_files import CONF_FOLDER
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import format_hardware_yaml, read_hardware_file
from bench.hardware.speeds import AttentionKernelSpeed
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.records import read_latest_attempts
from tests.conftest import CPU, ROOT, compose_run_config, limit_cpu_time

H200_FILE = CONF_FOLDER / "hardware" / "h200.yaml"
FILE_NUMBERS = itertools.count()


@pytest.fixture
def described(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file like that of the H200, changed: a file is read once, so each has a name of its own."""

    def write_changed_file(change: Callable[[dict[str, Any]], object] = lambda values: None) -> Path:
        values = yaml.safe_load(H200_FILE.read_text())
        change(values)
        path = tmp_path / f"mine{next(FILE_NUMBERS)}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write_changed_file


def compute_run_id(hardware: str | Path, **settings: str) -> str:
    values = {"model": "gpt_125m", "gpus": "8", "mode": "predict", "hardware": str(hardware), **settings}
    return build_run_config(compose_config(values)).run_id


def test_a_file_means_what_the_same_description_in_the_suite_means(described):
    path = described()
    assert compose_run_config(f"hardware={path}", "gpus=8") == compose_run_config("hardware=h200", "gpus=8")
    assert compute_run_id(path) == compute_run_id("h200")


@pytest.mark.slow
def test_identity_is_the_content_not_path_date_or_layout(described):
    path = described()
    moved = described(lambda values: values["sources"].update(calibration="1999-12-31 on host elsewhere"))
    written_out = described(lambda values: values["speeds"]["links"].update(gloo=None))
    (flow := moved.with_name("flow.yaml")).write_text(json.dumps(yaml.safe_load(path.read_text())))
    assert compute_run_id(path) == compute_run_id(moved) == compute_run_id(written_out) == compute_run_id(flow)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["speeds"]["links"].update(latency=7.0),
        lambda values: values["speeds"]["links"].update(gpu_latency=2.0),
        lambda values: values["speeds"]["links"].update(gloo={"step_us": 50, "reduce": 1.0, "reduce_scatter": 2.0}),
        lambda values: values.update(name="mine"),
    ],
)
def test_identity_is_the_whole_content(described, change):
    assert compute_run_id(described(change)) != compute_run_id("h200")


def test_numbers_that_came_later_leave_earlier_predictions_their_identity():
    rows = read_latest_attempts(ROOT / "results" / "predicted" / "a100_80gb").records[:5]
    assert rows
    for row in rows:
        links = dict(row["config"]["hardware"]["speeds"]["links"])
        ids = []
        for later in ({}, {"gpu_latency": 1.0, "gloo": None}):
            known = {name: value for name, value in links.items() if name not in ("gpu_latency", "gloo")}
            row["config"]["hardware"]["speeds"]["links"] = {**known, **later}
            ids.append(build_run_config(row["config"]).run_id)
        assert ids[0] == ids[1]


def test_attention_of_before_kernels_had_names_is_the_kernel_that_runs(described):
    speed = {"forward": 0.5, "backward": 0.4, "half_width": 30.0}
    path = described(lambda values: values["speeds"].update(attention=dict(speed)))
    attention = compose_run_config(f"hardware={path}").hardware.speeds.attention
    assert attention.kernels == {"sdpa": AttentionKernelSpeed(**speed)}
    named = described(lambda values: values["speeds"].update(attention={"kernels": {"sdpa": speed}}))
    assert compute_run_id(path) == compute_run_id(named)


def test_a_measurement_does_not_depend_on_what_is_believed_of_speeds(described):
    path = described(lambda values: values["speeds"]["links"].update(latency=7.0))
    assert compute_run_id(path, mode="measure") == compute_run_id("h200", mode="measure")


def test_fields_of_a_file_can_be_set_and_added_to(described):
    settings = {"hardware": str(described()), "+hardware.sources.mine": "a guess", "hardware.memory_limit_gib": "40"}
    values = compose_config(settings)["hardware"]
    assert values["sources"]["mine"] == "a guess"
    assert values["memory_limit_gib"] == 40
    assert "mine" not in compose_config({"hardware": settings["hardware"]})["hardware"]["sources"]


def test_a_file_without_the_fields_that_have_a_default_has_them_all_the_same(tmp_path):
    (tmp_path / "short.yaml").write_text("name: short\ndevice: cpu\n")
    settings = {"hardware": str(tmp_path / "short.yaml"), "hardware.memory_limit_gib": "2", "hardware.cpu_threads": "4"}
    config = build_run_config(compose_config(settings))
    assert (config.hardware.memory_limit_gib, config.hardware.cpu_threads) == (2, 4)


def test_relative_paths_are_those_of_the_current_folder(described, monkeypatch, tmp_path):
    path = described(lambda values: values.update(name="here"))
    spaced = path.with_name("with a space.yaml")
    spaced.write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    for typed in (path.name, f"./{path.name}", f"'{spaced.name}'"):
        (point,) = parse_sweep_request(["sweep=adhoc", f"hardware={typed}"], multirun=False, device=CPU).points
        assert build_run_config(compose_config(point)).hardware.name == "here"
    (other := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(other)
    with pytest.raises(UsageError, match=f"hardware={other / path.name} is not valid: choose a file that exists"):
        compose_config({"hardware": path.name})


def plan_runs(*arguments: str) -> list[RunConfig]:
    request = parse_sweep_request(arguments, multirun=True, device=DetectedDevice("cuda", "NVIDIA H200", 8))
    return build_sweep_plan(request.points, Path("/no/such/store"), force=False, check_run=lambda config: None).possible


def test_a_file_is_a_value_of_an_axis(described):
    path = described(lambda values: values.update(name="mine"))
    configs = plan_runs("model=gpt_tiny", f"hardware=a100_80gb,{path}", "mode=predict", "gpus=8")
    assert [config.hardware.name for config in configs] == ["a100_80gb", "mine"]


@pytest.mark.alone
def test_thousands_of_runs_with_a_file_are_planned_without_reading_it_for_each(described):
    path = described(lambda values: values.update(name="mine"))
    plan_runs("model=gpt_tiny", f"hardware={path}", "batch_size_per_gpu=1,2", "gpus=8")  # imports what it needs

    with limit_cpu_time(500):
        configs = plan_runs("model=gpt_tiny", f"hardware={path}", "batch_size_per_gpu=range(1,2001)", "gpus=8")
    assert len({config.run_id for config in configs}) == 2000


def test_what_goes_to_a_cluster_holds_the_numbers_not_the_file(described):
    path = described(lambda values: values.update(name="mine"))
    (config,) = plan_runs(f"hardware={path}", "model=gpt_tiny", "gpus=8")
    path.unlink()
    assert build_run_config(json.loads(json.dumps({**config.to_dict(), "strategy": config.requested}))) == config
    assert str(path) not in repr(config)


def test_what_is_written_is_read_back_equal(tmp_path):
    hardware = compose_run_config("hardware=h200").hardware
    (tmp_path / "copy.yaml").write_text(format_hardware_yaml(hardware, "two\nlines"))
    assert (tmp_path / "copy.yaml").read_text().startswith("# two\n# lines\nname: h200\n")
    assert read_hardware_file(tmp_path / "copy.yaml") == hardware


# What is wrong with a file, and parts of the sentence it earns.
BAD_FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "no YAML": ("a: [", ("choose a file that holds a description in YAML",)),
    "no text": (bytes(range(128, 255)), ("choose a file that holds a description in YAML",)),
    "no fields": ("- 1\n- 2\n", ("choose a file that holds fields and their values",)),
    "empty": ("", ("choose a file that holds fields and their values",)),
    "unknown": ("name: x\ndevice: cpu\ncolour: red\n", ("hardware.colour is not a field", "memory_gb")),
    "missing": ("name: x\n", ("hardware.device has no value",)),
    "wrong type": ("name: x\ndevice: cpu\nmemory_gb: much\n", ("hardware.memory_gb=much", "a number")),
    "wrong value": ("name: x\ndevice: abacus\n", ("hardware.device=abacus", "cpu, cuda, rocm")),
    "like nothing": ("name: x\nlike: abacus\n", ("hardware.like=abacus", "a100_80gb")),
    "wrong section": ("name: x\ndevice: cpu\nspeeds: 3\n", ("hardware.speeds=3", "hardware.speeds.links")),
}


@pytest.mark.parametrize("mistake", BAD_FILES)
def test_a_file_that_is_wrong_earns_a_sentence(mistake, tmp_path, capsys):
    text, parts = BAD_FILES[mistake]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert_refused(sweep.main, capsys, f"hardware={path}", *parts)


@pytest.mark.parametrize("where", ["speeds", "speeds.links", "speeds.links.gloo"])
def test_a_field_inside_a_section_that_is_wrong_is_named_in_full(where, described, capsys):
    def add_unknown_field(values: dict[str, Any]) -> None:
        values["speeds"]["links"]["gloo"] = {"step_us": 50, "reduce": 1.0, "reduce_scatter": 2.0}
        for name in where.split("."):
            values = values[name]
        values["colour"] = "red"

    assert_refused(
        sweep.main, capsys, f"hardware={described(add_unknown_field)}", f"hardware.{where}.colour is not a field"
    )


@pytest.mark.parametrize("main", [sweep.main, predict.main, run.main], ids=["sweep", "predict", "run"])
@pytest.mark.parametrize("value", ["no/such/file.yaml", "h200.yml", "a_folder.yaml"])
def test_what_is_no_file_earns_a_sentence(main, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_folder.yaml").mkdir()
    assert_refused(main, capsys, f"hardware={value}", value, "choose", ".yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["a_folder.yaml"]


def assert_refused(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], argument: str, *parts: str
) -> None:
    """One sentence on standard error, exit code 2."""
    assert main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("hardware")
    for part in parts:
        assert part in captured.err


@pytest.mark.slow
def test_predictions_with_a_file_are_those_of_its_numbers(described, capsys):
    slow = described(lambda values: values["speeds"]["links"].update(gpu_efficiency=0.01))
    question = ("model=gpt_125m", "gpus=8", "strategy=ddp", "batch_size_per_gpu=1", "format=json", "top=1")
    assert predict.main([*question, f"hardware=h200,{slow}"]) == 0
    fast, slowed = (
        section["ranked"][0]["step_time_s"]["value"] for section in json.loads(capsys.readouterr().out)["sections"]
    )
    assert slowed > 2 * fast
