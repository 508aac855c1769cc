"""Whatever is typed, a command ends with 0, 1 or 2, at once, and says in one sentence which field it refuses.

Every command is called in this process with Hydra's real composition; nothing of it is executed, sent or drawn, and by
default one real prediction stands for all. `make fuzz` predicts every run, for as long as it is given.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from bench import advise, calibrate, compare, dashboard, history, jobs, predict, report, run, sweep, track
from bench.advice import question
from bench.calibration import session
from bench.config import compose, groups, hydra_calls, parts
from bench.core import option_files
from bench.core.typed_config import read_plain_yaml
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import read_hardware_file
from bench.launch.local import LocalLauncher
from bench.planning import run_predictions
from bench.sweeps import run_sweep
from tests import hostile
from tests.conftest import compose_run_config

FUZZING = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
MAX_CPU_S = 20.0
"""Of one command, predictions included; without them half of it."""

CPU = DetectedDevice("cpu", "a processor", 0)


def limit_examples(count: int) -> settings:
    """So many in CI; fuzzing as many as its time allows."""
    return settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "1000")) if FUZZING else count)


class ExecutionReached(Exception):  # noqa: N818 (no error)
    """A command was about to execute something."""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_executed(tmp_path_factory) -> Iterator[Path]:
    """In a folder of their own, on a machine without GPUs and without SLURM's commands."""
    folder = tmp_path_factory.mktemp("hostile")

    def raise_execution_reached(*_args, **_options):
        raise ExecutionReached

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", str(folder))
        for module in (run_sweep, question, run, session):
            patch.setattr(module, "detect_device", lambda: CPU)
        patch.setattr(LocalLauncher, "launch", raise_execution_reached)
        patch.setattr(run, "execute_single_run", raise_execution_reached)
        patch.setattr(calibrate, "run_calibration", raise_execution_reached)
        patch.setattr(track, "send_store", raise_execution_reached)
        patch.setattr(report, "write_report", raise_execution_reached)
        if not FUZZING:
            (prediction,) = run_predictions.predict_configs(
                [compose_run_config("hardware=a100_80gb", "gpus=2", "mode=predict")]
            )
            patch.setattr(run_predictions, "predict_runs", lambda configs, **options: [prediction for _ in configs])
        yield folder


def call_command(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str]:
    """Exit code of a command and what it wrote to standard error."""
    note(" ".join([main.__module__, *map(ascii, arguments)]))
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
        except ExecutionReached:
            code = 0
        out.flush()
    taken = time.process_time() - started
    assert code in (0, 1, 2)
    assert taken < (MAX_CPU_S if FUZZING else MAX_CPU_S / 2), f"{taken:.1f} s"
    text = out.buffer.getvalue().decode()
    assert not set(text + err.getvalue()) & {"\x1b", "\x00"}, "a control character reached the terminal"
    assert "Traceback" not in text + err.getvalue()
    return code, err.getvalue()


def assert_refusal(sentence: str, typed: list[str]) -> None:
    """A refusal is one sentence that names a field, or repeats what cannot be read."""
    lines = sentence.splitlines()
    assert len(lines) == 1, sentence
    assert lines[0].rstrip(")").endswith("."), sentence
    keys = {word.partition("=")[0].lstrip("+~") for word in typed} | hostile.list_field_names()
    assert "cannot read" in sentence or any(key in sentence for key in keys if key), sentence


def check_command(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    code, sentence = call_command(main, arguments)
    if code == 2:
        assert_refusal(sentence, arguments)


@pytest.mark.long
@pytest.mark.slow
@limit_examples(420)
@given(st.sampled_from(["measure", "predict", "rehearse"]), st.booleans(), hostile.draw_overrides())
@example("measure", False, ["optimizer.learning_rate=nan"])
@example("measure", False, ["optimizer.learning_rate=inf"])
@example("predict", False, ["hardware=a100_80gb", "hardware.memory_bandwidth_gb_s=0"])
@example("predict", False, ["hardware=a100_80gb", "hardware.peak_tflops.bf16={1:2}"])
@example("predict", False, ["hardware=a100_80gb", "hardware.speeds.matmul.efficiency.fp16=[1]"])
@example("measure", False, ["tracker.tags=glob(*)"])
@example("measure", False, ["sweep.repeats=2147483648"])
@example("measure", True, ["gpus=shuffle(range(1,10000000000))"])
@example("measure", False, ["gpus=" + "9" * 5000])
@example("measure", False, ["strategy.name=.."])
@example("measure", False, ["tracker.name=.."])
@example("measure", False, ["model.name='[/a]'"])
@example("measure", False, ["store=" + "x" * 5000])
def test_sweeps(mode, multirun, typed):
    check_command(sweep.main, ["dry_run=true", "store=nowhere", f"mode={mode}", *(["-m"] if multirun else []), *typed])


@pytest.mark.slow
@limit_examples(90)
@given(
    hostile.draw_overrides(),
    st.sampled_from(["tokens=1e9", "tokens=nan", "top=0", "top=all", "format=json", "format=x"]),
)
def test_predictions(typed, own):
    check_command(predict.main, ["hardware=a100_80gb", own, *typed])


@pytest.mark.slow
@limit_examples(60)
@given(hostile.draw_overrides())
def test_advice(typed):
    check_command(advise.main, ["hardware=a100_80gb", *typed])


@pytest.mark.slow
@limit_examples(90)
@given(hostile.draw_overrides())
def test_single_runs(typed):
    check_command(run.main, ["store=nowhere", *typed])


@pytest.mark.slow
@limit_examples(70)
@given(
    hostile.draw_overrides(within=("hardware",)),
    st.sampled_from(["ranks=2", "ranks=-1", "ranks=nan", "only=x", "quick=2"]),
)
def test_calibrations(typed, own):
    check_command(calibrate.main, [own, *typed])


@pytest.mark.slow
@limit_examples(60)
@given(hostile.draw_overrides(within=("tracker",)), st.sampled_from(["track", "dashboard", "compare"]))
def test_trackers(typed, command):
    if command == "track":
        check_command(track.main, ["nowhere", *typed])
    elif command == "dashboard":
        check_command(dashboard.main, ["dry_run=true", *typed])
    else:
        check_command(compare.main, ["nowhere", "nowhere", "--alert", *typed])


HOSTILE_PATHS = (
    "nowhere",
    "loop",
    "file",
    "loop/below",
    "file/below",
    "x" * 5000,
    "a/" + "x" * 300,
    "",
    ".",
    "/proc/self/mem",
    "\udcff",
)
HOSTILE_NUMBERS = ("nan", "inf", "-1", "0", "100", "1e400", "x", "", "5")


@limit_examples(80)
@given(
    st.sampled_from(["compare", "history", "report", "jobs", "track", "sweep"]),
    st.sampled_from(HOSTILE_PATHS),
    st.sampled_from(HOSTILE_PATHS),
    st.sampled_from(HOSTILE_NUMBERS),
)
def test_stores(command, store, other, number):
    Path("file").write_text("3")
    if not Path("loop").is_symlink():
        Path("loop").symlink_to("loop")
    commands = {
        "compare": (compare.main, [store, other, f"--threshold={number}", f"--margin={number}"]),
        "history": (history.main, [store, other, f"--output={other}"]),
        "report": (report.main, [store, f"--output={other}"]),
        "jobs": (jobs.main, ["collect", store, f"--submission={number}"]),
        "track": (track.main, [store]),
        "sweep": (sweep.main, [f"store={store}", "dry_run=true", "hardware=cpu"]),
    }
    main, arguments = commands[command]
    code, sentence = call_command(main, arguments)
    assert code != 2 or sentence


YAML_TEXTS = (
    *("", "3", "[1]", "a: [", "\x00", "!!python/object/apply:os.system [ls]", "# @package _global_\nname: x\n"),
    *("a: " + "[" * 3000 + "]" * 3000, "name: &a\n  x: *a\n", "name: x\ndevice: cpu\nmemory_gb: 0x" + "f" * 9000),
    "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
    *("name: x\ndevice: cpu\nmemory_gb: 2020-01-01", "? [a, b]\n: c", "name: x\ndevice: cpu\nname: y", "name: ${name}"),
    *("name: x\ndevice: cpu\nmemory_gb: " + "9" * 5000, "defaults: [../model: x]", "repeats: 1\ngrids: &g\n  - *g\n"),
)

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["${gpus}", "fsdp"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.=, ", max_size=4), inner, max_size=3),
    max_leaves=6,
)
file_contents = st.one_of(
    st.sampled_from(YAML_TEXTS).map(str.encode),
    st.binary(max_size=40),
    st.dictionaries(
        st.sampled_from(["name", "device", "speeds", "host", "memory_gb", "peak_tflops", "repeats", "grids"]),
        plain_values,
    ).map(lambda values: yaml.safe_dump(values).encode()),
    st.lists(
        st.fixed_dictionaries({}, optional=dict.fromkeys(("fixed", "axes", "exclude"), plain_values)), max_size=2
    ).map(lambda grids: yaml.safe_dump({"name": "own", "grids": grids}).encode()),
)
file_numbers = itertools.count()


@pytest.mark.long
@pytest.mark.slow
@limit_examples(70)
@given(file_contents)
def test_hardware_files(content):
    file = Path(f"hardware_{next(file_numbers)}.yaml")
    file.write_bytes(content)
    try:
        check_command(sweep.main, ["dry_run=true", "store=nowhere", "gpus=1", f"hardware={file}"])
    finally:
        file.unlink()
        read_hardware_file.cache_clear()
        read_plain_yaml.cache_clear()


@pytest.fixture(scope="module")
def own_sweep(nothing_is_executed) -> Iterator[Path]:
    """A file in a copy of conf/sweep, which every example may change."""
    copy = nothing_is_executed / "conf"
    shutil.copytree(option_files.CONF_FOLDER, copy)
    file = copy / "sweep" / "own.yaml"
    file.write_text("name: own\ngrids: [{}]\n")
    with pytest.MonkeyPatch.context() as patch:
        for module in (option_files, groups, hydra_calls):
            patch.setattr(module, "CONF_FOLDER", copy)
        clear_compose_caches()
        yield file
    clear_compose_caches()


def clear_compose_caches() -> None:
    """Have compositions read the files again."""
    for cached in (
        groups.list_config_groups,
        hydra_calls.compose_choices,
        parts.compute_part_value,
        compose._compute_plain_value,
        compose._resolve_interpolations,
        read_plain_yaml,
    ):
        cached.cache_clear()
    for cached in (hydra_calls.parse_override, compose._find_interpolated_keys, compose._count_interpolations):
        cached.cache_clear()
    option_files._find_option_file.cache_clear()
    parts._composed_values.clear()


@pytest.mark.long
@pytest.mark.slow
@limit_examples(60)
@given(file_contents)
def test_own_sweeps(own_sweep, content):
    own_sweep.write_bytes(content)
    clear_compose_caches()
    check_command(sweep.main, ["sweep=own", "dry_run=true", "store=nowhere", "hardware=cpu"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("device: cuda\nmemory_gb: '141'\n", "hardware.memory_gb=141 is not valid: choose a number of GB"),
        ("memory_gb: 141\n", "hardware.device=null is not valid: choose cpu, cuda, rocm."),
        ("device: cuda\nmemory_gb: !!binary aGVsbG8=\n", "choose a file whose values are text, numbers, "),
    ],
)
def test_own_hardware_that_is_wrong_earns_a_sentence(own_sweep, text, sentence, capsys):
    file = own_sweep.parents[1] / "hardware" / "own.yaml"
    file.write_text(f"name: own\n{text}")
    clear_compose_caches()
    try:
        code = sweep.main(["mode=predict", "hardware=own", "dry_run=true", "store=nowhere"])
    finally:
        file.unlink()
        clear_compose_caches()
    assert code == 2
    assert sentence in capsys.readouterr().err
