"""What one device's timings say of its speeds, and what those speeds say of the timings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.calibration.formats import precision_of
from bench.calibration.sample import ATTENTION, MATMUL, Sample
from bench.hardware import Hardware
from bench.hardware.processor import Processor
from bench.hardware.speeds import Attention, Launch, Links, Matmul, Outside, Speeds
from bench.simulate import kernels
from bench.simulate.cost import kernel_seconds
from bench.simulate.kernels import FORMATS, Floats, Kernels

NOBODY = Links(1.0, 1.0, 1.0, 1.0, 1, 0.0, 1.0), Outside(1.0, 1.0, 1.0)
"""Where no others are: times of one device do not depend on it."""


@dataclass(frozen=True)
class Parts:
    """Everything of `Speeds` that one device alone shows, and its memory's bandwidth."""

    matmul: Matmul | None
    attention: Attention | None
    memory_bandwidth_gb_s: float
    memory_efficiency: float
    overlap_loss: float
    launch: Launch
    operators: dict[str, float] | None
    processor: Processor | None

    def speeds(self, links: Links, outside: Outside) -> Speeds:
        """Together with the rest."""
        return Speeds(
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

    def device(self, base: Hardware) -> Hardware:
        """The device they describe."""
        return dataclasses.replace(base, memory_bandwidth_gb_s=self.memory_bandwidth_gb_s, speeds=self.speeds(*NOBODY))


def predicted(samples: Sequence[Sample], hardware: Hardware) -> Floats:
    """Seconds that predictions come to for matrix products, attention and operators of one format."""
    return kernel_seconds(as_kernels(samples), hardware, precision_of(samples[0].format))


def as_kernels(samples: Sequence[Sample]) -> Kernels:
    """Timings as the kernels of a trace, all of one format."""
    kinds = {MATMUL: kernels.MATMUL, ATTENTION: kernels.ATTENTION}
    dims = np.zeros((len(samples), 5))
    for index, sample in enumerate(samples):
        if sample.kind in kinds:
            dims[index, : len(sample.dims)] = sample.dims
    return Kernels(
        operators=tuple(sample.name for sample in samples),
        kinds=np.array([kinds.get(sample.kind, kernels.MEMORY) for sample in samples], dtype=np.int64),
        formats=np.array([FORMATS.index(stored_in(sample.format)) for sample in samples], dtype=np.int64),
        dims=dims,
        flops=np.array([sample.flops for sample in samples]),
        bytes_moved=np.array([sample.bytes_moved for sample in samples]),
    )


def stored_in(format_: str) -> str:
    """The format of operands: TF32 is fp32 in memory."""
    return "fp32" if format_ == "tf32" else format_
