"""What a compiler makes of a block's kernels: everything between two matrix products in one, each operand read once.

torch.compile fuses chains of elementwise operators and reductions. A fused kernel reads what was made outside of it and
writes what is read later; what lives within it alone never reaches memory. That is the bound that Inductor comes close
to, not a trace of its work: it also chooses what backward computes again, so memory stays as without compiling here,
and is less in truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.simulate.kernels import MEMORY
from bench.simulate.recorder import Kernel

FUSED = "fused"
"""Name of a kernel that stands for several."""

APART = ("embedding", "index", "scatter", "gather", "cat", "native_dropout", "sort", "nll_loss")
"""Parts of the names of operators that gather or scatter, which end a fused kernel."""

NUMBER_BYTES = 8
"""Of a single number, in whatever format."""


@dataclass(frozen=True)
class Use:
    """Storages a kernel reads and writes: number and bytes."""

    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


def fused(
    kernels: Sequence[Kernel],
    uses: Sequence[Use],
    last_read: Mapping[int, int],
    first: int = 0,
    exchanges: Collection[int] = (),
) -> tuple[list[Kernel], list[int]]:
    """Kernels after fusion, and for each of the original ones the position of the one it became part of.

    Parameters
    ----------
    last_read: mapping
        Storage to the last kernel that reads it, counted over the whole trace.
    first: int
        The number of the first of `kernels` in that count.
    exchanges: collection of int
        Positions of `kernels` before which ranks exchange something, over which nothing is fused.
    """
    result: list[Kernel] = []
    became: list[int] = []
    start: int | None = None
    for index, kernel in enumerate(kernels):
        if _fuses(kernel):
            start = index if start is None else start
            became.append(len(result))
            after = index + 1
            ends = after == len(kernels) or after in exchanges or not _fuses(kernels[after])
            if ends or _reduces_to_a_number(uses[index]):
                result.append(_together(kernels[start : index + 1], uses[start : index + 1], last_read, first + index))
                start = None
        else:
            became.append(len(result))
            result.append(kernel)
    return result, became


def _fuses(kernel: Kernel) -> bool:
    return kernel[1] == MEMORY and not any(part in kernel[0] for part in APART)


def _reduces_to_a_number(use: Use) -> bool:
    """Whether what follows can only start when a whole tensor was read, as FP8's scale for all of it wants."""
    written, read = (max((size for _, size in each), default=0) for each in (use.writes, use.reads))
    return written <= NUMBER_BYTES < read


def _together(kernels: Sequence[Kernel], uses: Sequence[Use], last_read: Mapping[int, int], last: int) -> Kernel:
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for use in uses:
        for number, size in use.reads:
            if number not in made:
                read[number] = max(size, read.get(number, 0))
        made |= dict(use.writes)
    moved = sum(read.values()) + sum(size for number, size in made.items() if last_read.get(number, -1) > last)
    return FUSED, MEMORY, min(kernel[2] for kernel in kernels), (0, 0, 0, 0, 0), 0, moved
