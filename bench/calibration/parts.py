"""What one device's timings say of its speeds, and what those speeds say of the timings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.kernels import build_precision
from bench.calibration.sample import ATTENTION, MATMUL, CalibrationSample
from bench.hardware import Hardware
from bench.hardware.speeds import (
    AttentionSpeed,
    HardwareSpeeds,
    LaunchOverhead,
    LinkSpeeds,
    MatmulSpeed,
    MemoryOutsideAllocator,
    ProcessorSpeed,
)
from bench.prediction.cost.kernels import compute_kernel_seconds
from bench.prediction.trace import kernels
from bench.prediction.trace.kernels import OPERAND_FORMATS, FloatArray, KernelArrays

SINGLE_DEVICE_PLACEHOLDERS = LinkSpeeds(1.0, 1.0, 1.0, 1.0, 1, 0.0, 1.0), MemoryOutsideAllocator(1.0, 1.0, 1.0)
"""Where no others are: times of one device do not depend on it."""


@dataclass(frozen=True)
class SingleDeviceSpeeds:
    """Everything of `HardwareSpeeds` that one device alone shows, and its memory's bandwidth."""

    matmul: MatmulSpeed | None
    attention: AttentionSpeed | None
    memory_bandwidth_gb_s: float
    memory_efficiency: float
    overlap_loss: float
    launch: LaunchOverhead
    operators: dict[str, float] | None
    processor: ProcessorSpeed | None

    def build_speeds(self, links: LinkSpeeds, outside: MemoryOutsideAllocator) -> HardwareSpeeds:
        return HardwareSpeeds(
            matmul=self.matmul,
            attention=self.attention,
            memory_efficiency=self.memory_efficiency,
            overlap_loss=self.overlap_loss,
            launch=self.launch,
            links=links,
            outside=outside,
            operators=self.operators,
            processor=self.processor,
        )

    def build_hardware(self, base: Hardware) -> Hardware:
        return dataclasses.replace(
            base,
            memory_bandwidth_gb_s=self.memory_bandwidth_gb_s,
            speeds=self.build_speeds(*SINGLE_DEVICE_PLACEHOLDERS),
        )


def predict_kernel_seconds(samples: Sequence[CalibrationSample], hardware: Hardware) -> FloatArray:
    """Seconds that predictions come to for matrix products, attention and operators of one format, in short bursts."""
    return compute_kernel_seconds(
        build_kernels(samples), _describe_bursts(hardware), build_precision(samples[0].format)
    )


def _describe_bursts(hardware: Hardware) -> Hardware:
    """The same as if nothing lasted, and one GPU were alone: without what a power limit and other GPUs take."""
    speeds = hardware.speeds
    assert speeds is not None
    matmul, attention = speeds.matmul, speeds.attention
    if matmul is not None:
        matmul = dataclasses.replace(matmul, sustained_share={})
    if attention is not None:
        kernels = {name: dataclasses.replace(kernel, sustained_share=1.0) for name, kernel in attention.kernels.items()}
        attention = dataclasses.replace(attention, kernels=kernels)
    speeds = dataclasses.replace(speeds, matmul=matmul, attention=attention, many_gpus_share=1.0)
    return dataclasses.replace(hardware, speeds=speeds)


def build_kernels(samples: Sequence[CalibrationSample]) -> KernelArrays:
    """Timings as the kernels of a trace, all of one format."""
    kernel_kinds = {MATMUL: kernels.MATMUL, ATTENTION: kernels.ATTENTION}
    dims = np.zeros((len(samples), kernels.NUM_DIMS))
    for index, sample in enumerate(samples):
        if sample.kind in kernel_kinds:
            dims[index, : len(sample.dims)] = sample.dims
    return KernelArrays(
        operators=tuple(sample.name for sample in samples),
        kinds=np.array([kernel_kinds.get(sample.kind, kernels.MEMORY_BOUND) for sample in samples], dtype=np.int64),
        formats=np.array(
            [OPERAND_FORMATS.index(find_storage_format(sample.format)) for sample in samples], dtype=np.int64
        ),
        dims=dims,
        flops=np.array([sample.flops for sample in samples]),
        bytes_moved=np.array([sample.bytes_moved for sample in samples]),
        row_bytes=np.zeros(len(samples), dtype=np.int64),  # those of the models that are timed all are aligned
    )


def find_storage_format(format_: str) -> str:
    """The format of operands: TF32 is fp32 in memory."""
    return "fp32" if format_ == "tf32" else format_
