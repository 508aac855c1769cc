"""Fused attention, forward and backward, over sequence lengths and head dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from bench.calibration.formats import find_operand_dtype, list_formats, use_format
from bench.calibration.sample import ATTENTION, CalibrationSample
from bench.calibration.timer import build_timer
from bench.prediction.trace.kernels import ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS

ATTENTION_SHAPES = {
    "cpu": ((1, 5, 40, 64), (2, 10, 96, 32), (2, 5, 224, 64), (1, 6, 448, 32), (1, 3, 640, 64), (1, 2, 1024, 64)),
    "cuda": tuple(
        (16384 * 1024 // (sequence_length * head_dim * 16), 16, sequence_length, head_dim)
        for sequence_length in (512, 2048, 4096)
        for head_dim in (32, 64, 96, 128)
    ),
}
"""Batch, heads, queries (and as many keys), head dimension."""

FORWARD, BACKWARD = "forward", "backward"
OPERAND_SETS = 3
"""Operands that are used in turn."""

REPETITIONS, QUICK_REPETITIONS = 9, 5


def measure_attention(
    device: torch.device, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time causal attention of every shape in every format that has a fused kernel."""
    samples = []
    for format_ in list_formats(device):
        if format_ == "tf32":
            continue
        on_progress(f"attention in {format_}")
        with use_format(format_):
            for shape in ATTENTION_SHAPES[device.type][:: 2 if quick else 1]:
                samples += list(_time_passes(shape, format_, device, QUICK_REPETITIONS if quick else REPETITIONS))
    return samples


def _time_passes(
    shape: tuple[int, int, int, int], format_: str, device: torch.device, repetitions: int
) -> Iterator[CalibrationSample]:
    batch_size, heads, sequence_length, head_dim = shape
    dtype, timer = find_operand_dtype(format_), build_timer(device)

    def make_operands() -> list[torch.Tensor]:
        random_tensors = (torch.randn(batch_size, heads, sequence_length, head_dim, device=device) for _ in range(3))
        return [tensor.to(dtype).requires_grad_() for tensor in random_tensors]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    operand_sets = [make_operands() for _ in range(OPERAND_SETS)]
    outputs = [attend(*operand_set) for operand_set in operand_sets]
    gradients = [torch.randn_like(output) for output in outputs]
    forward_calls = [partial(attend, *(tensor.detach() for tensor in operand_set)) for operand_set in operand_sets]
    backward_calls = [
        partial(torch.autograd.grad, *arguments, retain_graph=True)
        for arguments in zip(outputs, operand_sets, gradients, strict=True)
    ]
    product_flops = 2.0 * batch_size * heads * sequence_length * sequence_length * head_dim
    tensor_bytes = float(dtype.itemsize * batch_size * heads * sequence_length * head_dim)
    for name, calls, product_count, tensor_count in (
        (FORWARD, forward_calls, ATTENTION_FORWARD_MATMULS, 4),
        (BACKWARD, backward_calls, ATTENTION_BACKWARD_MATMULS, 8),
    ):
        yield CalibrationSample(
            kind=ATTENTION,
            name=name,
            format=format_,
            dims=(batch_size, heads, sequence_length, sequence_length, head_dim),
            flops=product_flops * product_count / 2,
            bytes_moved=tensor_count * tensor_bytes,
            seconds=timer.time_repetitions(calls, repetitions),
        )
