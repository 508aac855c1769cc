"""Matrix products over the shapes that models use: forward, and the gradients of input and weight.

For GPUs. On a CPU they are timed inside of training steps (`bench.calibration.steps`), where they find weights that are
in no cache any more, and results are written to memory that is in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from bench.calibration.formats import find_operand_dtype, list_formats, use_format
from bench.calibration.sample import MATMUL, CalibrationSample
from bench.calibration.timer import build_timer

MATMUL_SHAPES = (
    *((tokens, width, 4 * width) for tokens in (1024, 4096, 16384) for width in (512, 1024, 2048, 4096, 8192)),
    *((8192, width, width) for width in (256, 768, 1600, 5120)),
    *((rows, depth, 4096) for rows in (4096, 16384) for depth in (64, 128, 256, 512)),
)
"""Tokens, width that a product reads and width it makes. Some have a short inner dimension, which shows what a thread
block takes to begin and end."""

MIN_ROTATED_BYTES = 2**28
"""Operands that are used in turn take together more than the caches hold."""

MAX_OPERAND_SETS = 24
REPETITIONS, QUICK_REPETITIONS = 9, 5


def measure_matmul(device: torch.device, *, quick: bool, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time products of every shape in every format."""
    samples = []
    for format_ in list_formats(device):
        on_progress(f"matrix products in {format_}")
        shapes = MATMUL_SHAPES[::2] if quick else MATMUL_SHAPES
        with use_format(format_):
            for shape in shapes:
                samples += list(_time_products(shape, format_, device, QUICK_REPETITIONS if quick else REPETITIONS))
    return samples


def _time_products(
    shape: Sequence[int], format_: str, device: torch.device, repetitions: int
) -> Iterator[CalibrationSample]:
    """The three products of a linear layer: of these tokens, from one width to another."""
    tokens, input_width, output_width = shape
    dtype = find_operand_dtype(format_)
    bytes_moved = float(dtype.itemsize * (tokens * input_width + input_width * output_width + tokens * output_width))
    operand_count = min(MAX_OPERAND_SETS, max(2, round(MIN_ROTATED_BYTES / bytes_moved)))
    inputs, weights, gradients = (
        [torch.randn(size, device=device).to(dtype) for _ in range(operand_count)]
        for size in ((tokens, input_width), (output_width, input_width), (tokens, output_width))
    )
    # Name, operands, and rows, columns and inner dimension; the left operand is transposed in the last.
    layouts = (
        ("forward", inputs, [weight.t() for weight in weights], (tokens, output_width, input_width)),
        ("gradient of the input", gradients, weights, (tokens, input_width, output_width)),
        (
            "gradient of the weight",
            [gradient.t() for gradient in gradients],
            inputs,
            (output_width, input_width, tokens),
        ),
    )
    for name, left, right, (rows, columns, depth) in layouts:
        calls = [lambda a=a, b=b: torch.mm(a, b) for a, b in zip(left, right, strict=True)]
        yield CalibrationSample(
            kind=MATMUL,
            name=name,
            format=format_,
            dims=(1, rows, columns, depth, int(left is layouts[2][1])),
            flops=2.0 * rows * columns * depth,
            bytes_moved=bytes_moved,
            seconds=build_timer(device).time_repetitions(calls, repetitions),
        )
