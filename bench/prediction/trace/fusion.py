"""What a compiler makes of a block's kernels: everything between two matrix products in one, each operand read once.

torch.compile fuses chains of elementwise operators and reductions. A fused kernel reads what was made outside of it and
writes what is read later; what lives within it alone never reaches memory. That is the bound that Inductor comes close
to, not a trace of its work: it also chooses what backward computes again, so memory stays as without compiling here,
and is less in truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.prediction.trace.kernels import MEMORY_BOUND
from bench.prediction.trace.op_recorder import KernelRecord

FUSED_OPERATOR = "fused"
"""Name of a kernel that stands for several."""

UNFUSED_NAME_PARTS = ("embedding", "index", "scatter", "gather", "cat", "native_dropout", "sort", "nll_loss")
"""Parts of the names of operators that gather or scatter, which end a fused kernel."""

MAX_SCALAR_BYTES = 8
"""Of a single number, in whatever format."""


@dataclass(frozen=True)
class KernelAccesses:
    """Storages a kernel reads and writes: number and bytes."""

    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


def fuse_kernels(
    kernels: Sequence[KernelRecord],
    accesses: Sequence[KernelAccesses],
    last_reader: Mapping[int, int],
    first_number: int = 0,
    collective_positions: Collection[int] = (),
) -> tuple[list[KernelRecord], list[int]]:
    """Kernels after fusion, and for each of the original ones the position of the one it became part of.

    Parameters
    ----------
    last_reader: mapping
        Storage to the last kernel that reads it, counted over the whole trace.
    first_number: int
        The number of the first of `kernels` in that count.
    collective_positions: collection of int
        Positions of `kernels` before which ranks exchange something, over which nothing is fused.
    """
    fused_kernels: list[KernelRecord] = []
    fused_positions: list[int] = []
    chain_start: int | None = None
    for index, kernel in enumerate(kernels):
        if _is_fusible(kernel):
            chain_start = index if chain_start is None else chain_start
            fused_positions.append(len(fused_kernels))
            next_index = index + 1
            ends_chain = (
                next_index == len(kernels) or next_index in collective_positions or not _is_fusible(kernels[next_index])
            )
            if ends_chain or _reduces_to_scalar(accesses[index]):
                fused_kernels.append(
                    _merge_kernels(
                        kernels[chain_start : index + 1],
                        accesses[chain_start : index + 1],
                        last_reader,
                        first_number + index,
                    )
                )
                chain_start = None
        else:
            fused_positions.append(len(fused_kernels))
            fused_kernels.append(kernel)
    return fused_kernels, fused_positions


def _is_fusible(kernel: KernelRecord) -> bool:
    return kernel[1] == MEMORY_BOUND and not any(part in kernel[0] for part in UNFUSED_NAME_PARTS)


def _reduces_to_scalar(accesses: KernelAccesses) -> bool:
    """Whether what follows can only start when a whole tensor was read, as FP8's scale for all of it wants."""
    written_bytes, read_bytes = (
        max((size for _, size in storages), default=0) for storages in (accesses.writes, accesses.reads)
    )
    return written_bytes <= MAX_SCALAR_BYTES < read_bytes


def _merge_kernels(
    kernels: Sequence[KernelRecord],
    accesses: Sequence[KernelAccesses],
    last_reader: Mapping[int, int],
    last_number: int,
) -> KernelRecord:
    written_bytes: dict[int, int] = {}
    read_bytes: dict[int, int] = {}
    for kernel_accesses in accesses:
        for number, size in kernel_accesses.reads:
            if number not in written_bytes:
                read_bytes[number] = max(size, read_bytes.get(number, 0))
        written_bytes |= dict(kernel_accesses.writes)
    bytes_moved = sum(read_bytes.values()) + sum(
        size for number, size in written_bytes.items() if last_reader.get(number, -1) > last_number
    )
    return FUSED_OPERATOR, MEMORY_BOUND, min(kernel[2] for kernel in kernels), (0, 0, 0, 0, 0), 0, bytes_moved
