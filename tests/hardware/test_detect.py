"""Which device is taken, and what is said of GPUs that cannot be used, or that others use."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from bench import run, sweep
from bench.core.errors import ImpossibleError
from bench.hardware import detect_device, facts, refuse_unsupported
from bench.hardware.detect import DetectedDevice, choose_device
from bench.hardware.facts import CudaSetup, GpuUsage, VisibleGpu
from bench.sweeps import run_sweep
from tests.conftest import compose_run_config

GIB = 2**30
H100 = VisibleGpu("NVIDIA H100 80GB HBM3", (9, 0), int(79.11 * GIB), "00000000:04:00")
A100 = VisibleGpu("NVIDIA A100-SXM4-80GB", (8, 0), int(79.25 * GIB), "00000000:07:00")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
WORKING_FACTS = CudaSetup(
    "2.13.0+cu130",
    "13.0",
    cuda_architectures=CU130,
    driver_version="580.65.06",
    driver_cuda=13000,
    installed_gpu_names=(H100.name,) * 2,
    visible_gpus=(H100, H100),
)
IDLE_USAGE = GpuUsage(0, 0, 400 * 2**20, 80 * GIB)

TORCH_BUILDS = {
    "12.6": {"x86_64": {50, 60, 70, 75, 80, 86, 90}, "aarch64": {80, 90}},
    "12.9": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 120}},
    "13.0": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
    "13.2": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
}
"""Of torch 2.13, as torch has them."""


@pytest.fixture(autouse=True)
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", TORCH_BUILDS, raising=False)


def read_refusal(device: DetectedDevice, *overrides: str) -> str:
    config = compose_run_config("hardware=gpu", *overrides)
    with pytest.raises(ImpossibleError) as refused:
        refuse_unsupported(config.hardware, device, config.precision, compiling_setting=config.compiling_setting)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_first_gpu_that_cuda_shows_is_taken_with_the_memory_cuda_has() -> None:
    mixed = dataclasses.replace(WORKING_FACTS, installed_gpu_names=(H100.name, A100.name), visible_gpus=(A100, H100))
    device = choose_device(mixed)
    assert (device.kind, device.name, device.count, device.capability) == ("cuda", A100.name, 2, (8, 0))
    assert device.memory_bytes == A100.memory_bytes  # not the 80 GiB that NVML counts, which no process gets
    assert device.unusable_reason is None
    assert device.messages == ()


@pytest.mark.parametrize(
    ("driver", "driver_cuda", "variant"),
    [("535.104.05", 12020, "cu126"), ("570.86.10", 12080, "cu126"), ("575.51.03", 12090, "cu129")],
)
def test_a_driver_too_old_for_the_build_is_named_with_the_build_to_install(driver, driver_cuda, variant) -> None:
    too_old = "The NVIDIA driver on your system is too old (found version 12020)."
    gpu_facts = dataclasses.replace(
        WORKING_FACTS, driver_version=driver, driver_cuda=driver_cuda, visible_gpus=(), failure=too_old
    )
    device = choose_device(gpu_facts)
    assert (device.kind, device.name, device.count) == ("cuda", H100.name, 2)
    message = read_refusal(device)
    assert (
        f"which needs NVIDIA's driver 580 or later, and this machine has {driver} (CUDA 12.{driver_cuda // 10 % 100}"
        in message
    )
    assert f"pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/{variant}" in message
    assert "hardware=cpu" in message
    on_cpu = compose_run_config("hardware=cpu")
    refuse_unsupported(on_cpu.hardware, device, on_cpu.precision)


def test_builds_are_known_as_torch_2_11_has_them(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {"12.6": {70, 80}, "13.0": {80}})
    v100 = VisibleGpu("Tesla V100-SXM2-32GB", (7, 0), 31 * GIB, "00000000:04:00")
    assert "whl/cu126" in read_refusal(
        choose_device(dataclasses.replace(WORKING_FACTS, installed_gpu_names=(v100.name,), visible_gpus=(v100,)))
    )


def test_a_driver_for_which_there_is_no_build_is_to_be_updated() -> None:
    gpu_facts = dataclasses.replace(
        WORKING_FACTS, driver_version="470.82.01", driver_cuda=11040, visible_gpus=(), failure="too old"
    )
    message = read_refusal(choose_device(gpu_facts))
    assert "update the driver" in message
    assert "pip" not in message


def test_builds_for_all_minor_versions_run_on_a_driver_of_the_same_major_one() -> None:
    gpu_facts = dataclasses.replace(WORKING_FACTS, cuda_build="12.9", torch_version="2.13.0+cu129", driver_cuda=12020)
    assert choose_device(gpu_facts).unusable_reason is None


def test_another_failure_of_cuda_is_told_in_its_words() -> None:
    gpu_facts = dataclasses.replace(WORKING_FACTS, visible_gpus=(), failure="CUDA unknown error")
    assert "CUDA cannot be started: CUDA unknown error" in read_refusal(choose_device(gpu_facts))


def test_a_gpu_the_build_has_no_kernels_for_is_named_with_a_build_that_has() -> None:
    v100 = VisibleGpu("Tesla V100-SXM2-32GB", (7, 0), 31 * GIB, "00000000:04:00")
    message = read_refusal(
        choose_device(dataclasses.replace(WORKING_FACTS, installed_gpu_names=(v100.name,), visible_gpus=(v100,)))
    )
    assert (
        "Tesla V100-SXM2-32GB has compute capability 7.0, and torch 2.13.0+cu130 has kernels for sm_75, sm_80"
        in message
    )
    assert "whl/cu126" in message
    kepler = dataclasses.replace(v100, name="Tesla K80", capability=(3, 7))
    assert "as have all builds of it" in read_refusal(
        choose_device(dataclasses.replace(WORKING_FACTS, visible_gpus=(kepler,)))
    )


@pytest.mark.parametrize(
    ("capability", "codes", "runs"),
    [
        ((8, 9), ("sm_86",), True),
        ((8, 6), ("sm_89",), False),
        ((9, 0), ("sm_80",), False),
        ((10, 3), ("sm_90", "compute_90"), True),
        ((10, 0), ("sm_90a", "compute_90a"), False),
        ((9, 0), ("sm_90a",), True),
        ((12, 1), ("sm_120f",), True),
    ],
)
def test_machine_code_runs_within_a_major_version_and_intermediate_code_on_all_later_gpus(
    capability, codes, runs
) -> None:
    gpu = dataclasses.replace(H100, capability=capability)
    device = choose_device(dataclasses.replace(WORKING_FACTS, visible_gpus=(gpu,), cuda_architectures=codes))
    assert (device.unusable_reason is None) == runs


def test_a_mig_device_is_one_gpu_and_said_to_be() -> None:
    slice_ = VisibleGpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), int(39.3 * GIB), A100.pci_address)
    device = choose_device(dataclasses.replace(WORKING_FACTS, installed_gpu_names=(A100.name,), visible_gpus=(slice_,)))
    assert (device.count, device.memory_bytes) == (1, slice_.memory_bytes)
    assert "one MIG device" in device.messages[0]


def test_gpus_that_others_use_are_named_and_idle_ones_are_not() -> None:
    busy = {H100.pci_address: IDLE_USAGE, A100.pci_address: GpuUsage(2, 93, int(41.2 * GIB), 80 * GIB)}
    device = choose_device(dataclasses.replace(WORKING_FACTS, visible_gpus=(H100, A100), usage_by_pci_address=busy))
    (remark,) = device.messages
    assert remark.startswith("Others use GPU 1 (2 processes, 93 % busy, 41.2 GiB taken): ")
    for usage in ({H100.pci_address: IDLE_USAGE}, {H100.pci_address: GpuUsage(None, None, None, None)}, {}):
        assert choose_device(dataclasses.replace(WORKING_FACTS, usage_by_pci_address=usage)).messages == ()


def test_a_build_without_cuda_on_a_machine_with_gpus_computes_on_the_cpu_and_says_so() -> None:
    device = choose_device(
        CudaSetup("2.13.0+cpu", None, installed_gpu_names=(H100.name,) * 8, driver_version="580.65", driver_cuda=13000)
    )
    assert (device.kind, device.count) == ("cpu", 0)
    (remark,) = device.messages
    assert remark.startswith("The 8 NVIDIA H100 80GB HBM3 of this machine are not used, runs are on its CPU: ")
    assert "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130" in remark
    assert "torch 2.13.0+cpu is built without CUDA" in read_refusal(device)


@pytest.mark.parametrize(
    "gpu_facts",
    [
        CudaSetup("2.13.0+cpu", None),
        CudaSetup("2.13.0+rocm7.1", None, rocm_build="7.1"),
        CudaSetup("2.13.0+cu130", "13.0"),
        CudaSetup("2.13.0+cu130", "13.0", failure="Found no NVIDIA driver on your system."),
        dataclasses.replace(WORKING_FACTS, all_gpus_hidden=True, visible_gpus=(), failure="No CUDA GPUs are available"),
    ],
    ids=["neither", "ROCm", "no driver", "no driver, said so", "hidden by CUDA_VISIBLE_DEVICES"],
)
def test_where_there_is_no_gpu_to_use_nothing_is_said(gpu_facts) -> None:
    device = choose_device(gpu_facts)
    assert (device.kind, device.count, device.unusable_reason, device.messages) == ("cpu", 0, None, ())
    assert "this machine has none" in read_refusal(device)


def test_amds_gpus_are_taken_by_a_torch_that_is_built_for_them() -> None:
    gpu = VisibleGpu("AMD Instinct MI300X", (9, 4), 196592 * 2**20, "00000000:04:00")
    rocm_facts = CudaSetup("2.13.0+rocm7.1", None, rocm_build="7.1", installed_gpu_names=("a GPU",) * 8)
    device = choose_device(dataclasses.replace(rocm_facts, visible_gpus=(gpu,) * 8))
    assert (device.kind, device.torch_device, device.name, device.count) == ("rocm", "cuda", gpu.name, 8)
    broken = choose_device(dataclasses.replace(rocm_facts, failure="hipErrorNoDevice"))
    assert broken.unusable_reason == "ROCm cannot be started: hipErrorNoDevice"


@pytest.mark.parametrize(("tools", "missing"), [((), "a C compiler (gcc or clang)"), (("gcc",), None), (("cc",), None)])
def test_compiling_on_a_gpu_needs_what_compiles_tritons_launcher(monkeypatch, tmp_path, tools, missing) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(detect_module.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(detect_module.shutil, "which", lambda name: name if name in tools else None)
    config = compose_run_config("hardware=gpu", "compile=true")
    if missing:
        assert missing in read_refusal(choose_device(WORKING_FACTS), "compile=true")
    else:
        refuse_unsupported(
            config.hardware, choose_device(WORKING_FACTS), config.precision, compiling_setting="compile=true"
        )
        (tmp_path / "Python.h").unlink()
        assert "python3-dev" in read_refusal(choose_device(WORKING_FACTS), "compile=true")


detect_module = sys.modules["bench.hardware.detect"]


# What NVML and torch are asked


class FakeNvml(types.ModuleType):
    """Two GPUs, of which the second cannot say how busy it is."""

    def __init__(self) -> None:
        super().__init__("pynvml")

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 13000

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return (H100.name, A100.name)[handle]

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return types.SimpleNamespace(domain=0, bus=(4, 7)[handle], device=0)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return types.SimpleNamespace(used=400 * 2**20, total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise RuntimeError("Not Supported")
        return types.SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [] if handle == 0 else [types.SimpleNamespace(pid=1)]


def fake_cuda_build(monkeypatch: pytest.MonkeyPatch, shown: list[VisibleGpu]) -> None:
    """The torch of a CUDA build, which shows some GPUs in some order."""

    def properties(index: int) -> Any:
        gpu = shown[index]
        bus = int(gpu.pci_address.split(":")[1], 16)
        major, minor = gpu.capability
        address = {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
        return types.SimpleNamespace(name=gpu.name, major=major, minor=minor, total_memory=gpu.memory_bytes, **address)

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(CU130))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_facts_follow_cudas_order_and_keep_what_can_be_known(monkeypatch) -> None:
    fake_cuda_build(monkeypatch, [A100, H100])
    gpu_facts = facts.query_cuda_setup()
    assert (gpu_facts.driver_version, gpu_facts.driver_cuda, gpu_facts.installed_gpu_names) == (
        "580.65.06",
        13000,
        (H100.name, A100.name),
    )
    assert gpu_facts.visible_gpus == (A100, H100)
    assert gpu_facts.cuda_architectures == CU130
    assert gpu_facts.usage_by_pci_address == {
        H100.pci_address: IDLE_USAGE,
        A100.pci_address: GpuUsage(1, None, 400 * 2**20, 80 * GIB),
    }
    assert choose_device(gpu_facts).messages == (
        "Others use GPU 0 (1 process, 0.4 GiB taken): runs beside them are slower and have less memory.",
    )


def test_cuda_that_does_not_start_is_a_fact(monkeypatch) -> None:
    fake_cuda_build(monkeypatch, [])

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system\nis too old")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert facts.query_cuda_setup().failure == "The NVIDIA driver on your system is too old"
    assert facts.query_cuda_setup().all_gpus_hidden


@pytest.mark.parametrize("shown", [-1, 0])
def test_gpus_of_which_nvml_says_nothing_are_gpus_all_the_same(shown, monkeypatch, tmp_path) -> None:
    fake_cuda_build(monkeypatch, [])

    def fail() -> None:
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: shown)  # 0: CUDA_VISIBLE_DEVICES is empty
    monkeypatch.setattr(facts, "DEVICE_FOLDER", tmp_path)
    assert choose_device(facts.query_cuda_setup()).kind == "cpu"
    for name in ("nvidiactl", "nvidia2", "nvidia3"):
        (tmp_path / name).touch()
    device = choose_device(facts.query_cuda_setup())
    if shown:
        assert (device.kind, device.name, device.count) == ("cuda", "a GPU", 2)
        assert "CUDA cannot be started: Driver/library version mismatch" in read_refusal(device)
    else:
        assert (device.kind, device.unusable_reason) == ("cpu", None)


# What is typed


def set_detected_device(monkeypatch: pytest.MonkeyPatch, device: DetectedDevice) -> None:
    for module in (run_sweep, run):
        monkeypatch.setattr(module, "detect_device", lambda: device)


def test_a_sweep_on_unusable_gpus_is_one_sentence(monkeypatch, tmp_path, capsys) -> None:
    gpu_facts = dataclasses.replace(
        WORKING_FACTS, driver_version="535.104.05", driver_cuda=12020, visible_gpus=(), failure="too old"
    )
    set_detected_device(monkeypatch, choose_device(gpu_facts))
    assert sweep.main([f"store={tmp_path / 'store'}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("whl/cu126") == 1
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.glob("store/*/*.json"))


@pytest.mark.slow
def test_what_is_to_be_known_before_a_run_is_said_once(monkeypatch, tmp_path, capsys) -> None:
    set_detected_device(
        monkeypatch,
        DetectedDevice("cpu", "a processor", 0, unusable_reason="no CUDA", messages=("The GPUs are not used.",)),
    )
    arguments = ["model=t5_tiny", "strategy=ddp", f"store={tmp_path / 'store'}", "dry_run=true"]
    assert sweep.main(arguments) == 0
    assert capsys.readouterr().out.count("The GPUs are not used.") == 1
    assert sweep.main([*arguments, "mode=predict", "hardware=a100_80gb"]) == 0
    assert "not used" not in capsys.readouterr().out


def test_a_machine_without_gpus_is_not_asked_in_a_child(monkeypatch) -> None:
    detect_device.cache_clear()
    monkeypatch.setattr(detect_module.processes, "can_reach_gpus", lambda: False)
    monkeypatch.setattr(detect_module.facts, "query_cuda_setup", lambda: CudaSetup("2.13.0+cpu", None))
    monkeypatch.setattr(detect_module.processes, "open_worker_pool", lambda *_: pytest.fail("a child was started"))
    try:
        assert detect_device().kind == "cpu"
    finally:
        detect_device.cache_clear()
