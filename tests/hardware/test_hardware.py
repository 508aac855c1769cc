"""Hardware: descriptions, what a device refuses, and a CPU memory limit that really limits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from bench.config.groups import list_config_groups
from bench.core.errors import ImpossibleError, UsageError
from bench.core.option_files import find_option_file
from bench.hardware import refuse_unsupported
from bench.hardware.derived import NUMERIC_SECTIONS, find_source, list_leaves, list_numbers
from bench.hardware.detect import DetectedDevice
from bench.planning.request import find_hardware_description, parse_sweep_request
from bench.planning.run_predictions import predict_configs
from bench.prediction.prediction import Prediction
from tests.conftest import CPU, ROOT, compose_run_config

A100 = DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 8, (8, 0), 80 * 2**30)
V100 = DetectedDevice("cuda", "Tesla V100-SXM2-32GB", 8, (7, 0), 32 * 2**30)
MI300X = DetectedDevice("rocm", "AMD Instinct MI300X", 8, (9, 4), 196592 * 2**20)
MI250X = DetectedDevice("rocm", "AMD Instinct MI250X", 8, (9, 0), int(63.98 * 2**30))


def refuse_unsupported_config(device: DetectedDevice, *overrides: str) -> None:
    config = compose_run_config(*overrides)
    refuse_unsupported(config.hardware, device, config.precision, compiling_setting=config.compiling_setting)


def assert_says_sources_of_its_own(option: str) -> None:
    """What a file says itself, it says the source of: that of the description it is like is another device's."""
    values = yaml.safe_load(find_option_file("hardware", option).read_text())
    for name, value in list_leaves({key: value for key, value in values.items() if key in NUMERIC_SECTIONS}):
        assert value is None or find_source(values["sources"], name), f"{option}.yaml does not say where {name} is from"


@pytest.mark.parametrize("option", [option for option in list_config_groups()["hardware"] if option != "auto"])
def test_every_description_is_complete_and_sourced(option: str) -> None:
    hardware = compose_run_config(f"hardware={option}").hardware
    assert hardware.name == option
    if hardware.gpu_names:
        assert set(hardware.peak_tflops) >= {"fp32", "fp16"}
        assert hardware.peak_tflops["fp32"] < hardware.peak_tflops["fp16"]
        assert hardware.power_w is not None
        assert hardware.interconnect is not None
        assert hardware.speeds is not None
        required = {"peak_tflops", "memory_gb", "memory_bandwidth_gb_s", "power_w"}
        assert all(hardware.sources[field].startswith("https://") for field in required)
        assert set(hardware.speeds.matmul.efficiency) == set(hardware.peak_tflops)
        for number in list_numbers(hardware):
            source = find_source(hardware.sources, number)
            assert source is not None, f"{option} does not say where {number} comes from"
            assert source.startswith(("https://", "fitted: ", "assumed: ", "derived: ", "the same table")), source
        assert_says_sources_of_its_own(option)
    else:
        assert hardware.peak_tflops == {}, "an unknown device has no peak: MFU stays empty"


def test_auto_finds_the_description_by_the_drivers_name() -> None:
    assert find_hardware_description(A100) == "a100_80gb"
    assert find_hardware_description(DetectedDevice("cuda", "NVIDIA H200", 1, (9, 0))) == "h200"
    assert find_hardware_description(V100) == "v100_32gb"
    assert find_hardware_description(DetectedDevice("cuda", "Tesla T4", 1, (7, 5))) == "t4"
    assert find_hardware_description(DetectedDevice("cuda", "Tesla P40", 1, (6, 1))) == "gpu"
    assert find_hardware_description(MI300X) == "mi300x"
    assert find_hardware_description(DetectedDevice("rocm", "AMD Instinct MI100", 1, (9, 0))) == "gpu_rocm"
    assert find_hardware_description(CPU) == "cpu"


@pytest.mark.parametrize(
    ("device", "overrides", "sentence"),
    [
        (CPU, ("hardware=a100_80gb",), "hardware=a100_80gb needs a GPU"),
        (V100, ("hardware=a100_80gb",), "this machine has Tesla V100"),
        (CPU, ("precision=tf32",), "precision=tf32 needs an NVIDIA GPU of compute capability 8.0"),
        (V100, ("hardware=gpu", "precision=bf16"), "choose fp32 or fp16"),
        (A100, ("hardware=a100_80gb", "hardware.memory_limit_gib=82"), "choose at most 80.0"),
        (MI300X, ("hardware=a100_80gb",), "this machine has AMD Instinct MI300X"),
        (MI300X, ("hardware=gpu",), "describes a GPU of NVIDIA's, but this machine has AMD Instinct MI300X"),
        (A100, ("hardware=gpu_rocm",), "describes a GPU of AMD's, but this machine has NVIDIA A100"),
        (MI300X, ("hardware=mi300x", "precision=tf32"), "precision=tf32 needs an NVIDIA GPU"),
        (CPU, ("hardware=mi300x",), "hardware=mi300x needs a GPU, and this machine has none"),
    ],
)
def test_what_a_device_cannot_do_is_refused(device: DetectedDevice, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ImpossibleError, match=sentence):
        refuse_unsupported_config(device, *overrides)


def test_what_a_device_can_do_is_not_refused() -> None:
    refuse_unsupported_config(A100, "hardware=a100_80gb", "precision=tf32", "hardware.memory_limit_gib=40")
    refuse_unsupported_config(V100, "hardware=gpu", "precision=fp16", "compile=true")
    refuse_unsupported_config(MI300X, "hardware=mi300x", "precision=bf16")
    refuse_unsupported_config(MI250X, "hardware=mi250x", "precision=bf16")
    for precision in ("fp32", "bf16", "fp16", "bf16_pure"):
        refuse_unsupported_config(CPU, f"precision={precision}")


def test_compiling_on_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ImpossibleError, match=r"compile=true on a CPU needs a C\+\+ compiler"):
        refuse_unsupported_config(CPU, "compile=true")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "hardware.speeds.links.node_gb_s=0",
            "hardware.speeds.links.node_gb_s=0 is not valid: choose a number of GB/s of at least 1e-06",
        ),
        ("hardware.speeds.links.node_gb_s=fast", "hardware.speeds.links.node_gb_s=fast is not valid: choose a number"),
        ("hardware.speeds.links.node_gb=5", "hardware.speeds.links.node_gb is not a field: choose .*links.node_gb_s"),
        ("hardware.speeds.links=5", "hardware.speeds.links=5 is not valid: choose .*hardware.speeds.links.gpu_gb_s"),
        (
            "hardware.speeds.links.adapters=1.5",
            "hardware.speeds.links.adapters=1.5 is not valid: choose a whole number",
        ),
        ("hardware.speeds.matmul.efficiency.bf16=1.2", "efficiency.bf16=1.2 is not valid: choose a number .*at most 1"),
        ("hardware.speeds.matmul.efficiency.bf16=x", "efficiency.bf16=x is not valid: choose a number"),
        ("+hardware.speeds.matmul.efficiency.fp4=1", "efficiency=fp4 is not valid: choose fp32, tf32, bf16, fp16, fp8"),
        ("hardware.speeds.overlap_loss=-1", "overlap_loss=-1 is not valid: choose a number of at least 0"),
        ("hardware.speeds=3", "hardware.speeds=3 is not valid: choose .*hardware.speeds.matmul"),
    ],
)
def test_a_bad_speed_is_named(override: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compose_run_config("hardware=a100_80gb", override)


def test_a_network_is_overridden_in_one_word() -> None:
    changed = compose_run_config("hardware=a100_80gb", "hardware.speeds.links.node_gb_s=50").hardware.speeds
    assert changed is not None
    assert changed.links.node_gb_s == 50.0


def test_what_is_believed_about_speed_does_not_change_what_was_measured() -> None:
    measured = compose_run_config("hardware=a100_80gb")
    slower = compose_run_config("hardware=a100_80gb", "hardware.speeds.links.node_gb_s=50")
    assert measured.run_id == slower.run_id
    predicted = compose_run_config("mode=predict", "hardware=a100_80gb")
    assert (
        predicted.run_id
        != compose_run_config("mode=predict", "hardware=a100_80gb", "hardware.speeds.links.node_gb_s=50").run_id
    )


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_above_zero(limit: int) -> None:
    with pytest.raises(UsageError, match=r"hardware\.memory_limit_gib"):
        compose_run_config("hardware=cpu", f"hardware.memory_limit_gib={limit}")


LIMIT_SCRIPT = """
import torch
from bench.hardware import MemoryLimit
limit = MemoryLimit(256 * 2**20, [torch.device("cpu")])
held = torch.empty(200 * 2**20, dtype=torch.uint8)
for round in range(50):                      # what is given back can be taken again
    again = torch.empty(32 * 2**20, dtype=torch.uint8); del again
try:
    torch.empty(80 * 2**20, dtype=torch.uint8)
except RuntimeError as error:
    print("refused" if "allocate memory" in str(error) else error)
with limit.suspend():
    extra = torch.empty(80 * 2**20, dtype=torch.uint8)
fits = torch.empty(32 * 2**20, dtype=torch.uint8); del fits
try:
    torch.empty(80 * 2**20, dtype=torch.uint8)
except RuntimeError:
    print("refused again")
limit.lift()
torch.empty(80 * 2**20, dtype=torch.uint8)
print("lifted")
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_cpu_memory_limit_limits_to_within_some_mebibytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMIT_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split("\n")[:3] == ["refused", "refused again", "lifted"], done.stderr


@pytest.mark.slow
def test_the_memory_that_is_set_is_the_memory_there_is() -> None:
    question = ("mode=predict", "hardware=a100_80gb", "model=t5_tiny")
    outside = compose_run_config(*question, "hardware.memory_gb=24").hardware.speeds.outside  # type: ignore[union-attr]
    assert outside.device_gib == pytest.approx(79.35 * 24 / 80)
    (whole, less) = (
        predict_configs([compose_run_config(*question, *more)])[0] for more in ((), ("hardware.memory_gb=24",))
    )
    assert isinstance(whole, Prediction)
    assert isinstance(less, Prediction)
    assert whole.memory.capacity is not None
    assert less.memory.capacity is not None
    assert whole.memory.capacity - less.memory.capacity == pytest.approx(79.35 * 56 / 80 * 2**30, rel=1e-6)
    both = compose_run_config(*question, "hardware.speeds.outside.device_gib=20", "hardware.memory_gb=24")
    assert both.hardware.speeds.outside.device_gib == 20  # type: ignore[union-attr]


def test_a_run_is_refused_where_the_gpu_has_another_memory() -> None:
    config = compose_run_config("hardware=a100_80gb", "hardware.memory_gb=24")
    device = DetectedDevice("cuda", "NVIDIA A100-SXM4-80GB", 1, (8, 0), int(79.35 * 2**30))
    with pytest.raises(ImpossibleError, match=r"memory_gb=24 is not what .* choose hardware\.memory_limit_gib=24"):
        refuse_unsupported(config.hardware, device, config.precision)
    usual = compose_run_config("hardware=a100_80gb").hardware
    refuse_unsupported(usual, device, config.precision)


def test_a_sweep_for_gpus_takes_those_of_both_vendors() -> None:
    for device, option in ((A100, "a100_80gb"), (MI300X, "mi300x")):
        points = parse_sweep_request(["sweep=single_gpu"], multirun=True, device=device).points
        assert {point["hardware"] for point in points} == {option}
