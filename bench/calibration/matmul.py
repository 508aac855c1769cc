"""Matrix products over the shapes that models use: forward, and the gradients of input and weight.

For GPUs. On a CPU they are timed inside of training steps (`bench.calibration.steps`), where they find weights that are
in no cache any more, and results are written to memory that is in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from bench.calibration.formats import computing_in, formats_of, operand_dtype
from bench.calibration.sample import MATMUL, Sample
from bench.calibration.timer import timer_of

SHAPES = (
    *((tokens, width, 4 * width) for tokens in (1024, 4096, 16384) for width in (512, 1024, 2048, 4096, 8192)),
    *((8192, width, width) for width in (256, 768, 1600, 5120)),
    *((rows, depth, 4096) for rows in (4096, 16384) for depth in (64, 128, 256, 512)),
)
"""Tokens, width that a product reads and width it makes. Some have a short inner dimension, which shows what a thread
block takes to begin and end."""

ROTATED_BYTES = 2**28
"""Operands that are used in turn take together more than the caches hold."""

MOST_OPERANDS = 24
REPETITIONS, QUICK_REPETITIONS = 9, 5


def measure_matmul(device: torch.device, *, quick: bool, progress: Callable[[str], None]) -> list[Sample]:
    """Time products of every shape in every format."""
    found = []
    for format_ in formats_of(device):
        progress(f"matrix products in {format_}")
        shapes = SHAPES[::2] if quick else SHAPES
        with computing_in(format_):
            for shape in shapes:
                found += list(_products(shape, format_, device, QUICK_REPETITIONS if quick else REPETITIONS))
    return found


def _products(shape: Sequence[int], format_: str, device: torch.device, repetitions: int) -> Iterator[Sample]:
    """The three products of a linear layer: of these tokens, from one width to another."""
    tokens, width, made = shape
    dtype = operand_dtype(format_)
    bytes_moved = float(dtype.itemsize * (tokens * width + width * made + tokens * made))
    count = min(MOST_OPERANDS, max(2, round(ROTATED_BYTES / bytes_moved)))
    hidden, weights, gradients = (
        [torch.randn(size, device=device).to(dtype) for _ in range(count)]
        for size in ((tokens, width), (made, width), (tokens, made))
    )
    # Name, operands, and rows, columns and inner dimension; the left operand is transposed in the last.
    layouts = (
        ("forward", hidden, [weight.t() for weight in weights], (tokens, made, width)),
        ("gradient of the input", gradients, weights, (tokens, width, made)),
        ("gradient of the weight", [gradient.t() for gradient in gradients], hidden, (made, width, tokens)),
    )
    for name, left, right, (rows, columns, depth) in layouts:
        calls = [lambda a=a, b=b: torch.mm(a, b) for a, b in zip(left, right, strict=True)]
        yield Sample(
            kind=MATMUL,
            name=name,
            format=format_,
            dims=(1, rows, columns, depth, int(left is layouts[2][1])),
            flops=2.0 * rows * columns * depth,
            bytes_moved=bytes_moved,
            seconds=timer_of(device).repeated(calls, repetitions),
        )
