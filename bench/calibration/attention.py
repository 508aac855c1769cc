"""Fused attention, forward and backward, over sequence lengths and head dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from bench.calibration.formats import computing_in, formats_of, operand_dtype
from bench.calibration.sample import ATTENTION, Sample
from bench.calibration.timer import timer_of
from bench.simulate.kernels import BACKWARD_PRODUCTS, FORWARD_PRODUCTS

SHAPES = {
    "cpu": ((1, 5, 40, 64), (2, 10, 96, 32), (2, 5, 224, 64), (1, 6, 448, 32), (1, 3, 640, 64), (1, 2, 1024, 64)),
    "cuda": tuple(
        (16384 * 1024 // (length * width * 16), 16, length, width)
        for length in (512, 2048, 4096)
        for width in (32, 64, 96, 128)
    ),
}
"""Batch, heads, queries (and as many keys), head dimension."""

FORWARD, BACKWARD = "forward", "backward"
SETS = 3
"""Operands that are used in turn."""

REPETITIONS, QUICK_REPETITIONS = 9, 5


def measure_attention(device: torch.device, *, quick: bool, progress: Callable[[str], None]) -> list[Sample]:
    """Time causal attention of every shape in every format that has a fused kernel."""
    found = []
    for format_ in formats_of(device):
        if format_ == "tf32":
            continue
        progress(f"attention in {format_}")
        with computing_in(format_):
            for shape in SHAPES[device.type][:: 2 if quick else 1]:
                found += list(_passes(shape, format_, device, QUICK_REPETITIONS if quick else REPETITIONS))
    return found


def _passes(shape: tuple[int, int, int, int], format_: str, device: torch.device, repetitions: int) -> Iterator[Sample]:
    batch, heads, length, width = shape
    dtype, timer = operand_dtype(format_), timer_of(device)

    def operands() -> list[torch.Tensor]:
        made = (torch.randn(batch, heads, length, width, device=device) for _ in range(3))
        return [tensor.to(dtype).requires_grad_() for tensor in made]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    sets = [operands() for _ in range(SETS)]
    results = [attend(*each) for each in sets]
    gradients = [torch.randn_like(result) for result in results]
    forward = [partial(attend, *(tensor.detach() for tensor in each)) for each in sets]
    backward = [
        partial(torch.autograd.grad, *each, retain_graph=True) for each in zip(results, sets, gradients, strict=True)
    ]
    whole = 2.0 * batch * heads * length * length * width
    moved = float(dtype.itemsize * batch * heads * length * width)
    for name, calls, products, tensors in (
        (FORWARD, forward, FORWARD_PRODUCTS, 4),
        (BACKWARD, backward, BACKWARD_PRODUCTS, 8),
    ):
        yield Sample(
            kind=ATTENTION,
            name=name,
            format=format_,
            dims=(batch, heads, length, length, width),
            flops=whole * products / 2,
            bytes_moved=tensors * moved,
            seconds=timer.repeated(calls, repetitions),
        )
