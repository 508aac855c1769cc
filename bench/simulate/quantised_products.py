"""What a trace cannot see in bitsandbytes' products with quantised matrices: one operator does several things.

With 4 bits, on a CPU, and on a GPU for as many tokens as training has, it writes the scales and then the whole matrix
out in the format of its input, multiplies, and forgets both. With 8 bits on a GPU it multiplies into whole numbers of
32 bits, which it then scales. (bitsandbytes 0.50, ``backends/default/ops.py`` and ``backends/cuda/ops.py``.)
"""

from __future__ import annotations

import math
from typing import Any

FOUR_BITS, EIGHT_BITS = "gemm_4bit", "int8_scaled_mm"

WORD_BYTES = 4
"""Of an fp32 or int32."""

Shape = tuple[int, int, int, int, int]


def is_product(name: str) -> bool:
    """Whether an operator of this name is such a product."""
    return name in (FOUR_BITS, EIGHT_BITS)


def working_memory(name: str, args: tuple[Any, ...]) -> int:
    """Bytes it takes for a while."""
    if name == EIGHT_BITS:
        return WORD_BYTES * math.prod(dimensions(name, args)[1:3])
    tokens, _, shape, _, block = args[:5]
    weights = math.prod(shape)
    return weights * tokens.element_size() + WORD_BYTES * math.ceil(weights / block)


def dimensions(name: str, args: tuple[Any, ...]) -> Shape:
    """Batch, rows, columns and depth of the product, and that its right matrix is transposed."""
    tokens = args[0]
    outputs, inputs = args[1].shape if name == EIGHT_BITS else args[2]
    return 1, tokens.numel() // inputs, outputs, inputs, 1
