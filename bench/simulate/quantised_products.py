"""What a trace cannot see in bitsandbytes' product with a matrix in 4 bits: one operator, which does several things.

On a CPU, and on a GPU for as many tokens as training has, it writes the scales and then the whole matrix out in the
format of its input, multiplies, and forgets both (``gemm_4bit`` in bitsandbytes 0.50, ``backends/default/ops.py`` and
``backends/cuda/ops.py``).
"""

from __future__ import annotations

import math
from typing import Any

NAME = "gemm_4bit"

FP32_BYTES = 4

Shape = tuple[int, int, int, int, int]


def is_product(name: str) -> bool:
    """Whether an operator of this name is such a product."""
    return name == NAME


def working_memory(args: tuple[Any, ...]) -> int:
    """Bytes it takes for a while: the matrix, and its scales in fp32."""
    tokens, _, shape, _, block = args[:5]
    weights = math.prod(shape)
    return weights * tokens.element_size() + FP32_BYTES * math.ceil(weights / block)


def dimensions(args: tuple[Any, ...]) -> Shape:
    """Batch, rows, columns and depth of the product, and that its right matrix is transposed."""
    tokens, (outputs, inputs) = args[0], args[2]
    return 1, tokens.numel() // inputs, outputs, inputs, 1
