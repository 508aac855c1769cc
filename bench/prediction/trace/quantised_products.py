"""What a trace cannot see in bitsandbytes' products with quantised matrices: one operator does several things.

With 4 bits, on a CPU, and on a GPU for as many tokens as training has, it writes the scales and then the whole matrix
out in the format of its input, multiplies, and forgets both. With 8 bits on a GPU it multiplies into whole numbers of
32 bits, which it then scales. (bitsandbytes 0.50, ``backends/default/ops.py`` and ``backends/cuda/ops.py``.)
"""

from __future__ import annotations

import math
from typing import Any

MATMUL_4BIT, MATMUL_8BIT = "gemm_4bit", "int8_scaled_mm"

WORD_BYTES = 4
"""Of an fp32 or int32."""

MatmulShape = tuple[int, int, int, int, int]


def is_quantised_matmul(name: str) -> bool:
    """Whether an operator of this name is such a product."""
    return name in (MATMUL_4BIT, MATMUL_8BIT)


def compute_working_memory(name: str, args: tuple[Any, ...]) -> int:
    """Bytes it takes for a while."""
    if name == MATMUL_8BIT:
        return WORD_BYTES * math.prod(find_matmul_shape(name, args)[1:3])
    tokens, _, shape, _, block_size = args[:5]
    num_weights = math.prod(shape)
    return num_weights * tokens.element_size() + WORD_BYTES * math.ceil(num_weights / block_size)


def find_matmul_shape(name: str, args: tuple[Any, ...]) -> MatmulShape:
    """Batch, rows, columns and depth of the product, and that its right matrix is transposed."""
    tokens = args[0]
    outputs, inputs = args[1].shape if name == MATMUL_8BIT else args[2]
    return 1, tokens.numel() // inputs, outputs, inputs, 1
