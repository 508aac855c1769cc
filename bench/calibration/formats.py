"""Number formats that a device computes in, and how a calibration sets them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from bench.precision import DTYPES, Precision, dtype_of


def formats_of(device: torch.device) -> tuple[str, ...]:
    """What is measured: fp32 and bf16 on a CPU, all that its compute capability allows on a GPU."""
    if device.type == "cpu":
        return "fp32", "bf16"
    capability = torch.cuda.get_device_capability(device)
    return ("fp32", "tf32", "bf16", "fp16") if capability >= (8, 0) else ("fp32", "fp16")


def operand_dtype(format_: str) -> torch.dtype:
    """How operands are stored: in fp32 for TF32."""
    return dtype_of(format_) if format_ in DTYPES else torch.float32


@contextlib.contextmanager
def computing_in(format_: str) -> Iterator[None]:
    """Within, fp32 matrix products use TF32 if that is the format."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if format_ == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def precision_of(format_: str) -> Precision:
    """Training as the suite does it in a format: mixed precision where it is narrower than fp32."""
    return Precision(
        name=format_,
        parameters="fp32",
        compute=format_ if format_ in DTYPES else "fp32",
        reduce="fp32",
        tf32=format_ == "tf32",
        peak=format_ if format_ in (*DTYPES, "tf32") else "fp32",
    )
