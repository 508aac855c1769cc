"""Which published microbenchmarks are of which device, and what stands in where a device has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.hardware.attention_kernels import AOTRITON, CUDNN, EFFICIENT, FLASH_2, FLASH_3, TRITON_2022

ARCHITECTURES = {
    "volta": ("v100_16gb", "v100_32gb"),
    "turing": ("t4", "titan_rtx"),
    "ampere": ("a100_40gb", "a100_80gb", "a100_pcie", "a100_pcie_40gb"),
    "ampere_graphics": ("a6000", "a40", "a10", "a10g", "rtx_3090"),
    "ada": ("l40s", "l40", "l4", "rtx_4090", "rtx_6000_ada"),
    "hopper": ("h100_80gb", "h200", "gh200", "h100_pcie", "h100_nvl", "h20"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "blackwell_graphics": ("rtx_pro_6000", "rtx_5090"),
    "cdna2": ("mi250x", "mi250", "mi210"),
    "cdna3": ("mi300x", "mi325x"),
    "cdna4": ("mi355x",),
}
"""Devices by architecture: compute capability 7.0, 7.5, 8.0, 8.6, 8.9, 9.0, 10.x, 12.0, and AMD's."""

TIMED_CHIPS = {
    "A100": ARCHITECTURES["ampere"],
    "H100": ARCHITECTURES["hopper"],
    "B200": ("b200", "gb200"),
}
"""Devices with the chips whose products were timed at length under their power limit: the B300's is another."""

NEAREST_ARCHITECTURES = {
    "volta": ("ampere",),
    "turing": ("volta", "ampere"),
    "ampere_graphics": ("ada", "ampere"),
    "ada": ("ampere_graphics",),
    "blackwell_graphics": ("ada",),
    "cdna2": ("cdna3",),
    "cdna4": ("cdna3",),
}
"""Where to look for a curve when no device of an architecture has one, nearest first."""

ATTENTION_KERNELS_BY_ARCHITECTURE = {
    "volta": (EFFICIENT,),
    "turing": (EFFICIENT,),
    "ampere": (FLASH_2, EFFICIENT, TRITON_2022),
    "ampere_graphics": (FLASH_2, EFFICIENT, TRITON_2022),
    "ada": (FLASH_2, EFFICIENT, TRITON_2022),
    "hopper": (CUDNN, FLASH_3, FLASH_2, EFFICIENT, TRITON_2022),
    "blackwell": (CUDNN, FLASH_2, EFFICIENT, TRITON_2022),
    "blackwell_graphics": (FLASH_2, EFFICIENT, TRITON_2022),
    "cdna2": (AOTRITON,),
    "cdna3": (AOTRITON,),
    "cdna4": (AOTRITON,),
}

POINT_NAMES = {
    "v100_16gb": ("V100", "Tesla V100-PCIE-32GB"),
    "v100_32gb": ("V100", "Tesla V100-PCIE-32GB"),
    "t4": ("Tesla T4",),
    "a100_40gb": ("A100-SXM-80GB", "NVIDIA A100 SXM", "A100-PCIe-80GB", "NVIDIA A100-PCIE-40GB"),
    "a100_80gb": ("A100-SXM-80GB", "NVIDIA A100 SXM", "A100-PCIe-80GB", "NVIDIA A100 80GB PCIe"),
    "a100_pcie": ("NVIDIA A100 PCIe", "A100-PCIe-80GB", "NVIDIA A100 80GB PCIe"),
    "a6000": ("A6000",),
    "rtx_3090": ("3090 Ti", "RTX 3090 Ti"),
    "l40s": ("L40S",),
    "l4": ("NVIDIA L4",),
    "rtx_4090": ("4090",),
    "h100_80gb": ("H100-SXM", "NVIDIA H100 SXM", "NVIDIA H100 80GB HBM3"),
    "h200": ("H200-SXM", "NVIDIA H200 SXM", "H200"),
    "gh200": ("NVIDIA GH200 SXM",),
    "b200": ("B200-SXM", "NVIDIA B200 SXM"),
    "b300": ("B300-SXM", "NVIDIA B300 SXM"),
    "gb200": ("GB200", "NVIDIA GB200 SXM"),
    "gb300": ("GB300",),
    "rtx_pro_6000": ("RTX PRO 6000 Blackwell Server",),
    "mi300x": ("AMD MI300X",),
    "mi325x": ("AMD MI325X",),
    "mi355x": ("AMD MI355X",),
}
"""Names that the points have for a device, or for one with the same chip and power limit: attention was timed on the
PCIe card of the A100 alone."""

POINT_PEAK_TFLOPS = {"3090 Ti": 80.0, "A100-PCIe-80GB": 312.0, "RTX A5000": 111.1}
"""Dense 16-bit peaks, summing in fp32, of cards in the points whose name stands for another device."""

POINT_BANDWIDTHS_GB_S = {
    "NVIDIA A100 80GB PCIe": 1935.0,
    "NVIDIA A100-PCIE-40GB": 1555.0,
    "NVIDIA L4": 300.0,
    "Tesla T4": 320.0,
    "Tesla V100-PCIE-32GB": 900.0,
    "RTX 3090 Ti": 1008.0,
}
"""Memory bandwidth on paper of cards whose elementwise kernels were timed, in GB/s (their vendor's data sheets)."""

BURST_DEVICES = {"A100-PCIe-80GB": (300.0, "A100"), "B200-SXM": (1000.0, "B200")}
"""Power limit in watts, and chip, of the boards whose kernels were timed at length."""

ALIGNMENT_POINTS = {
    "a100_80gb": "A100 (cookbook)",
    "v100_32gb": "V100 (cookbook)",
    "mi250x": "MI250X (cookbook)",
    "rtx_4090": "RTX 4090 (issue 181718)",
    "h200": "H200 (results/calibration)",
}
"""Whose products were timed with rows that do not begin at multiples of 16 bytes. The first has all alignments, and so
has the H200. What is published of an H100 was timed at 1,200 of its 1,980 MHz, where shares are others: not used."""

ALIGNMENT_MODELS = {
    **dict.fromkeys(("volta", "turing"), "v100_32gb"),
    "ampere": "a100_80gb",
    **dict.fromkeys(("ampere_graphics", "ada", "blackwell_graphics"), "rtx_4090"),
    **dict.fromkeys(("hopper", "blackwell"), "h200"),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), "mi250x"),
}
"""By architecture: the one of these that its devices are assumed to be like."""

LINK_POINTS = {
    "a100_40gb": "A100-SXM-80GB",
    "a100_80gb": "A100-SXM-80GB",
    "h100_80gb": "H100-SXM",
    "h200": "H200-SXM",
    "h20": "H200-SXM",
    "b200": "B200-SXM",
    "b300": "B300-SXM",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx_pro_6000": "RTX PRO 6000 Blackwell Server",
}
"""Whose collectives inside a node were timed, or those of a device with the same links."""


PCIE_THROUGH_HOST = (
    *("t4", "titan_rtx", "a10", "a10g", "a40", "a6000", "rtx_3090"),
    *("l4", "l40", "rtx_4090", "rtx_6000_ada", "rtx_5090"),
)
"""Cards without peer-to-peer: what their collectives lose with the number of GPUs is between two that were timed."""
PCIE_POINTS = ("l40s", "rtx_pro_6000")


def find_chip(name: str) -> str | None:
    """The one of `TIMED_CHIPS` that a device under ``conf/hardware`` has; None where it has another."""
    return _find_key(TIMED_CHIPS, name)


def find_architecture(name: str) -> str | None:
    """Of a device under ``conf/hardware``; None where the table above lacks it."""
    return _find_key(ARCHITECTURES, name)


def _find_key(devices_by_key: Mapping[str, Sequence[str]], name: str) -> str | None:
    return next((key for key, names in devices_by_key.items() if name in names), None)


def list_similar_devices(name: str) -> list[tuple[str, ...]]:
    """Devices of the same architecture, then those of the nearest ones: groups to take a median over."""
    architecture = find_architecture(name)
    if architecture is None:
        return []
    groups: Iterable[str] = (architecture, *NEAREST_ARCHITECTURES.get(architecture, ()))
    return [ARCHITECTURES[group] for group in groups]
