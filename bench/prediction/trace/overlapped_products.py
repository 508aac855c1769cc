"""Products that go on beside the exchange of their operands or results: what asynchronous tensor parallelism calls, as
``torch/distributed/_symmetric_memory`` (torch 2.13) carries it out, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from bench.prediction.trace.op_recorder import WAITING_OPERATOR

Multiply = Callable[[torch.Tensor, int, int, torch.Tensor], object]
"""Takes some rows, the number of the rank that they are of, the number of the factor, and where the result goes."""

torch.library.define(f"bench::{WAITING_OPERATOR}", "(Tensor result) -> ()")


@torch.library.register_fake(f"bench::{WAITING_OPERATOR}")
def _(result: torch.Tensor) -> None:
    """Computes nothing."""


def _gather_and_multiply(
    shard: torch.Tensor,
    factors: list[torch.Tensor],
    dimension: int,
    group_name: GroupName,
    *,
    return_A: bool = True,  # noqa: N803
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    def multiply(rows: torch.Tensor, _rank: int, number: int, result: torch.Tensor) -> None:
        torch.mm(rows, factors[number], out=result)

    widths = [(factor.shape[1], shard.dtype) for factor in factors]
    whole, results = _multiply_what_comes(shard, widths, dimension, group_name, multiply)
    return whole if return_A else None, results


def _gather_and_multiply_scaled(
    shard: torch.Tensor,
    factors: list[torch.Tensor],
    scale: torch.Tensor,
    factor_scales: list[torch.Tensor],
    dimension: int,
    group_name: GroupName,
    _biases: object,
    _result_scales: object,
    out_dtypes: list[torch.dtype],
    _use_fast_accum: object,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    def multiply(rows: torch.Tensor, _rank: int, number: int, result: torch.Tensor) -> None:
        torch._scaled_mm(rows, factors[number], row_scale, factor_scales[number], out_dtype=result.dtype, out=result)  # type: ignore[call-overload]

    row_scale = scale if scale.numel() == 1 else scale.movedim(dimension, 0).flatten(0, -2)
    widths = [(factor.shape[1], dtype) for factor, dtype in zip(factors, out_dtypes, strict=True)]
    return _multiply_what_comes(shard, widths, dimension, group_name, multiply)


def _multiply_what_comes(
    shard: torch.Tensor,
    widths: list[tuple[int, torch.dtype]],
    dimension: int,
    group_name: GroupName,
    multiply: Multiply,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A gather beside products: each rank's part is multiplied when it has come, the own one first
    (``_pipelined_all_gather_and_consume``)."""
    num_ranks = _resolve_process_group(group_name).size()
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(shard.movedim(dimension, 0), num_ranks, group_name)
    rows = gathered.flatten(0, -2)
    results = [torch.empty(len(rows), width, dtype=dtype, device=rows.device) for width, dtype in widths]
    for rank in range(num_ranks):
        for number, result in enumerate(results):
            multiply(rows.chunk(num_ranks)[rank], rank, number, result.chunk(num_ranks)[rank])
    torch.ops.bench.wait_for_exchange(gathered)
    outputs = [result.unflatten(0, gathered.shape[:-1]).movedim(0, dimension) for result in results]
    return gathered.movedim(0, dimension), outputs


def _multiply_and_scatter(
    operand: torch.Tensor, factor: torch.Tensor, reduction: str, dimension: int, group_name: GroupName
) -> torch.Tensor:
    def multiply(rows: torch.Tensor, _rank: int, _number: int, result: torch.Tensor) -> None:
        torch.mm(rows, factor, out=result)

    moved = operand.movedim(dimension, 0)
    summed = _send_what_is_done(moved.flatten(0, -2), factor.shape[1], operand.dtype, reduction, group_name, multiply)
    return summed.unflatten(0, (-1, *moved.shape[1:-1])).movedim(0, dimension)


def _multiply_scaled_and_scatter(
    operand: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    factor_scale: torch.Tensor,
    reduction: str,
    dimension: int,
    _operand_dimension: int,
    group_name: GroupName,
    output_shape: list[int],
    _bias: object = None,
    _result_scale: object = None,
    out_dtype: torch.dtype = torch.bfloat16,
    _use_fast_accum: bool = False,
) -> torch.Tensor:
    def multiply(rows: torch.Tensor, rank: int, _number: int, result: torch.Tensor) -> None:
        torch._scaled_mm(rows, factor, row_scales[rank], factor_scale, out_dtype=result.dtype, out=result)  # type: ignore[call-overload]

    num_ranks = _resolve_process_group(group_name).size()
    row_scales = [scale] * num_ranks if scale.numel() == 1 else scale.flatten(0, -2).chunk(num_ranks)
    rows = operand.flatten(0, -2)
    summed = _send_what_is_done(rows, factor.shape[1], out_dtype, reduction, group_name, multiply)
    shape = list(output_shape)
    shape[dimension] //= num_ranks
    return summed.reshape(shape)


def _send_what_is_done(
    rows: torch.Tensor, width: int, dtype: torch.dtype, reduction: str, group_name: GroupName, multiply: Multiply
) -> torch.Tensor:
    """A product beside the exchange of its results: each rank's part is sent when it is done, the own one stays; then
    what has come is added up (``_pipelined_produce_and_all2all``)."""
    num_ranks = _resolve_process_group(group_name).size()
    parts = torch.empty(num_ranks, len(rows) // num_ranks, width, dtype=dtype, device=rows.device)
    received = torch.ops._c10d_functional.reduce_scatter_tensor(parts, reduction, num_ranks, group_name)
    for rank in range(num_ranks):
        multiply(rows.chunk(num_ranks)[rank], rank, 0, parts[rank])
    torch.ops.bench.wait_for_exchange(received)
    return parts.sum(0)


OVERLAPPED_PRODUCTS: Mapping[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _gather_and_multiply,
    "fused_all_gather_scaled_matmul": _gather_and_multiply_scaled,
    "fused_matmul_reduce_scatter": _multiply_and_scatter,
    "fused_scaled_matmul_reduce_scatter": _multiply_scaled_and_scatter,
}
"""By their names in torch's namespace ``symm_mem``."""
