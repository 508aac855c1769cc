"""Number formats that a device computes in, and how a calibration sets them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from bench.core.precision import TORCH_DTYPE_NAMES, Precision, get_torch_dtype


def list_formats(device: torch.device) -> tuple[str, ...]:
    """What is measured: fp32 and bf16 on a CPU, all that its compute capability allows on a GPU."""
    if device.type == "cpu":
        return "fp32", "bf16"
    capability = torch.cuda.get_device_capability(device)
    return ("fp32", "tf32", "bf16", "fp16") if capability >= (8, 0) else ("fp32", "fp16")


def find_operand_dtype(format_: str) -> torch.dtype:
    """How operands are stored: in fp32 for TF32."""
    return get_torch_dtype(format_) if format_ in TORCH_DTYPE_NAMES else torch.float32


@contextlib.contextmanager
def use_format(format_: str) -> Iterator[None]:
    """Within, fp32 matrix products use TF32 if that is the format."""
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if format_ == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous_precision)


def build_precision(format_: str) -> Precision:
    """Training as the suite does it in a format: mixed precision where it is narrower than fp32."""
    return Precision(
        name=format_,
        parameters="fp32",
        compute=format_ if format_ in TORCH_DTYPE_NAMES else "fp32",
        reduce="fp32",
        tf32=format_ == "tf32",
        peak=format_ if format_ in (*TORCH_DTYPE_NAMES, "tf32") else "fp32",
    )
