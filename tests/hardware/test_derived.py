"""``hardware=like:NAME`` and ``like:`` in a file: what differs is said, the rest follows and says so."""

from __future__ import annotations

import pytest

from bench.config.compose import compose_config
from bench.config.groups import list_config_groups
from bench.config.hydra_calls import list_override_values, parse_overrides
from bench.core.errors import UsageError
from bench.hardware import Hardware
from bench.hardware.derived import (
    derive_sustained_shares,
    describe_assumed_share,
    find_source,
    list_assumed_fields,
    list_numbers,
)
from bench.hardware.hardware_file import UNDESCRIBED_OPTIONS, read_hardware_file
from bench.planning.run_predictions import predict_configs
from bench.prediction.prediction import Prediction
from tests.conftest import compose_run_config

GPUS = sorted(set(list_config_groups()["hardware"]) - set(UNDESCRIBED_OPTIONS))

ISSUE_GPUS = [
    "a100_40gb",
    "a100_80gb",
    "a100_pcie",
    "h100_80gb",
    "h100_pcie",
    "h100_nvl",
    "h200",
    "gh200",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "l40s",
    "l4",
    "a10",
    "a10g",
    "a6000",
    "rtx_6000_ada",
    "rtx_pro_6000",
    "rtx_3090",
    "rtx_4090",
    "rtx_5090",
    "v100_16gb",
    "v100_32gb",
    "t4",
    "h20",
    "l40",
    "a40",
    "titan_rtx",
    "mi210",
    "mi250",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
]

DENSE_BF16_TFLOPS = {
    "A100": (312, ("a100_40gb", "a100_80gb", "a100_pcie", "a100_pcie_40gb")),
    "H100 SXM": (989, ("h100_80gb", "h200", "gh200")),
    "H100 PCIe": (756, ("h100_pcie",)),
    "B200": (2250, ("b200", "b300")),
    "GB200": (2500, ("gb200", "gb300", "mi355x")),
    "L40S": (362, ("l40s",)),
    "MI300X": (1307, ("mi300x", "mi325x")),
    "A10G": (70, ("a10g",)),
    "A40": (149.7, ("a40",)),
    "L40": (181, ("l40",)),
    "H20": (148, ("h20",)),
    "MI210 and half of an MI250": (181, ("mi210", "mi250")),
    "MI250X, half of 383": (191.5, ("mi250x",)),
}
"""Without sparsity: https://github.com/stas00/ml-engineering (TFLOPS comparison table), the A10G's data sheet."""


def load_hardware(option: str, *overrides: str) -> Hardware:
    return compose_run_config("mode=predict", f"hardware={option}", *overrides).hardware


def test_the_gpus_people_have_are_described() -> None:
    assert set(ISSUE_GPUS) <= set(GPUS)


@pytest.mark.parametrize("table_row", DENSE_BF16_TFLOPS)
def test_peaks_are_dense(table_row: str) -> None:
    peak, options = DENSE_BF16_TFLOPS[table_row]
    assert {option: load_hardware(option).peak_tflops["bf16"] for option in options} == dict.fromkeys(options, peak)


@pytest.mark.parametrize("option", GPUS)
def test_formats_of_a_gpu_are_in_the_ratios_that_tensor_cores_have(option: str) -> None:
    """A peak with sparsity among others without it would be twice too large."""
    peaks = load_hardware(option).peak_tflops
    if "bf16" in peaks:
        assert peaks["fp16"] == peaks["bf16"]
        assert 1.9 < peaks.get("fp8", 2 * peaks["bf16"]) / peaks["bf16"] < 2.1
        assert 1.9 < peaks["bf16"] / peaks.get("tf32", peaks["bf16"] / 2) < 2.1


@pytest.mark.parametrize("option", GPUS)
def test_a_device_reports_nearly_its_memory_and_has_cublas_workspaces_of_its_kind(option: str) -> None:
    hardware = load_hardware(option)
    assert hardware.memory_gb is not None
    assert hardware.speeds is not None
    gib_by_share = hardware.speeds.outside.device_gib / hardware.memory_gb  # AMD's GB are GiB
    assert (0.99 if hardware.device == "rocm" else 0.89) < gib_by_share < 1.001
    new = option.startswith(("h", "gh", "b", "gb", "rtx_5", "rtx_pro"))
    expected_mib = 128 if option in ("mi300x", "mi325x", "mi355x") else 32 if new or option.startswith("mi2") else 8.125
    assert hardware.speeds.matmul is not None
    assert hardware.speeds.matmul.workspace_mib == expected_mib


def test_amds_gpus_are_rocm_and_cuda_to_pytorch() -> None:
    devices = {option: (load_hardware(option).device, load_hardware(option).torch_device) for option in GPUS}
    assert {option for option, kinds in devices.items() if kinds == ("rocm", "cuda")} == {
        option for option in GPUS if option.startswith("mi")
    }
    assert set(devices.values()) == {("rocm", "cuda"), ("cuda", "cuda")}


def test_a_small_model_is_predicted_on_every_gpu() -> None:
    settings = ("mode=predict", "model=gpt_tiny", "precision=fp16", "strategy=fsdp", "batch_size_per_gpu=8")
    configs = [compose_run_config(*settings, "gpus=8", f"hardware={option}") for option in GPUS]
    for option, prediction in zip(GPUS, predict_configs(configs), strict=True):
        assert isinstance(prediction, Prediction), option
        assert prediction.time is not None
        assert 0 < prediction.time.step_s.value < 1, option
        assert prediction.memory.verdict == "fits", option


# --- Like another one.


def test_what_is_not_said_is_the_others() -> None:
    base, like = load_hardware("a100_80gb"), load_hardware("like:a100_80gb")
    same = {
        field: getattr(base, field) for field in ("peak_tflops", "memory_gb", "speeds", "host", "device", "power_w")
    }
    assert {field: getattr(like, field) for field in same} == same
    assert (like.name, like.gpu_names) == ("like_a100_80gb", [])
    assert list_assumed_fields(like) == list_numbers(like)
    assert {"memory_gb", "speeds.links.latency", "host.memory_gib", "peak_tflops.bf16"} < set(list_numbers(like))
    assert find_source(like.sources, "memory_gb").startswith("assumed: as a100_80gb, https://")  # type: ignore[union-attr]


def test_other_formats_and_the_memory_a_device_reports_follow() -> None:
    changed = load_hardware(
        "like:h100_80gb", "hardware.memory_gb=96", "hardware.peak_tflops.bf16=494.5", "hardware.peak_tflops.fp8=500"
    )
    assert changed.peak_tflops == {"fp32": 33.5, "tf32": 247.25, "bf16": 494.5, "fp16": 494.5, "fp8": 500}
    assert changed.speeds is not None
    assert changed.speeds.outside.device_gib == pytest.approx(79.11 * 96 / 80)
    sources = changed.sources
    assert sources["peak_tflops.bf16"] == sources["peak_tflops.fp8"] == sources["memory_gb"] == "given"
    assert sources["peak_tflops.fp32"] == "derived: h100_80gb's in the ratio of bf16"
    assert sources["speeds.outside.device_gib"].startswith("derived: ")
    assert not {"memory_gb", "peak_tflops.bf16"} & set(list_assumed_fields(changed))
    assert "peak_tflops.tf32" in list_assumed_fields(changed)


def test_what_is_said_of_the_memory_a_device_reports_is_kept() -> None:
    changed = load_hardware("like:a100_80gb", "hardware.speeds.outside.device_gib=20", "hardware.memory_gb=96")
    assert changed.speeds is not None
    assert changed.speeds.outside.device_gib == 20


def test_a_file_may_be_like_another_description(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nlike: h100_80gb\npeak_tflops: {bf16: 500, fp8: null}\nspeeds: {links: {adapters: 1}}\n"
    )
    hardware = read_hardware_file(path)
    assert hardware.peak_tflops == pytest.approx({"bf16": 500, "fp16": 500, "tf32": 250, "fp32": 33.87}, rel=1e-3)
    assert hardware.speeds is not None
    assert hardware.speeds.matmul is not None
    assert set(hardware.speeds.matmul.efficiency) == set(hardware.peak_tflops)
    assert (hardware.speeds.links.adapters, hardware.speeds.links.node_gb_s) == (1, 400)
    assert compose_run_config(f"hardware={path}").hardware == hardware


def test_answers_say_how_much_is_assumed() -> None:
    assert describe_assumed_share(load_hardware("a100_80gb")) is None
    share = describe_assumed_share(load_hardware("like:a100_80gb", "hardware.memory_gb=96"))
    assert share is not None
    assert share.endswith("numbers of hardware=like_a100_80gb are assumed or derived, from a100_80gb")


def test_a_run_like_another_is_another_run_only_where_numbers_differ() -> None:
    settings = ("mode=predict", "hardware=like:a100_80gb")
    same, other = compose_run_config(*settings), compose_run_config(*settings, "hardware.memory_gb=96")
    assert same.run_id != other.run_id
    repeated = compose_run_config(*settings, "hardware.interconnect.machine=mine")
    assert repeated.run_id == same.run_id, "words change no result"
    slower = compose_run_config(*settings, "hardware.power_w=300")
    assert slower.run_id != same.run_id, "a power limit changes what a prediction comes to"


def test_what_is_typed_is_told_as_it_was_typed() -> None:
    (override,) = parse_overrides(["hardware=like:a100_80gb,h200"])
    assert list_override_values(override) == ["like:a100_80gb", "h200"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("hardware=like:abacus",), r"hardware\.like=abacus is not valid: choose a10, "),
        (("hardware=like:cpu",), r"hardware\.like=cpu is not valid: choose a10, "),
        (
            ("hardware=like:a100_80gb", "hardware.memory_gb=much"),
            r"hardware\.memory_gb=much is not valid: choose a num",
        ),
        (("hardware=like:a100_80gb", "hardware.colour=red"), r"hardware\.colour is not a field: choose hardware\.name"),
        (("hardware=like:a100_80gb", "hardware.peak_tflops.bf16=x"), r"hardware\.peak_tflops\.bf16=x is not valid"),
        (("hardware=abacus",), r"hardware=abacus is not valid: choose .*mi300x.*, or like:NAME"),
    ],
)
def test_what_nothing_is_like_earns_a_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compose_run_config(*overrides)


@pytest.mark.parametrize("option", ["h100_80gb", "like:h100_80gb"])
def test_products_and_attention_are_slower_under_another_power_limit(option: str) -> None:
    usual, limited = load_hardware("h100_80gb"), load_hardware(option, "hardware.power_w=500")
    assert usual.speeds is not None
    assert limited.speeds is not None
    assert usual.speeds.matmul is not None
    assert limited.speeds.matmul is not None
    slowdown = (500 / 700) ** (1 / 3)
    shares = limited.speeds.matmul.sustained_share
    assert shares["bf16"] == pytest.approx(usual.speeds.matmul.sustained_share["bf16"] * slowdown, rel=1e-3)
    assert shares["fp32"] == 1, "CUDA cores draw less"
    kernels, usual_kernels = limited.speeds.attention.kernels, usual.speeds.attention.kernels
    assert kernels["cudnn"].sustained_share == pytest.approx(
        usual_kernels["cudnn"].sustained_share * slowdown, rel=1e-3
    )
    assert kernels["efficient"].sustained_share == 1, "a kernel so slow draws less than 500 W"
    source = find_source(limited.sources, "speeds.matmul.sustained_share.bf16")
    assert source == "derived: 500 W instead of 700, by the law of bench/hardware/sustained_clocks.py"


def test_what_is_said_of_sustained_speeds_is_kept_beside_a_power_limit() -> None:
    given = ("hardware.speeds.matmul.sustained_share.bf16=0.5", "hardware.power_w=500")
    for option in ("h100_80gb", "like:h100_80gb"):
        hardware = load_hardware(option, *given)
        assert hardware.speeds is not None
        assert hardware.speeds.matmul is not None
        assert hardware.speeds.matmul.sustained_share["bf16"] == 0.5


def test_shares_of_formats_that_are_not_there_are_not_derived() -> None:
    """It was a StopIteration for a device whose peaks somebody had typed away."""
    values = compose_config({"hardware": "h100_80gb"})["hardware"]
    base = {**values, "power_w": 2 * values["power_w"]}
    assert derive_sustained_shares(dict(values), base)
    assert derive_sustained_shares({**values, "peak_tflops": {}}, base) == {}
