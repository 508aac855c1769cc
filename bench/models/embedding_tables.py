"""Embedding tables that are divided among all ranks: each rank has whole tables, looks up for the samples of all ranks
and sends the vectors to the ranks whose samples they are of.

Tables are no parameters of the model: no strategy replicates, shards or reduces them, and the run's optimizer does not
update them. The pass backward updates the rows that were looked up, with row-wise Adagrad, whose state is one number
per row. That is how FBGEMM's fused optimizers work ("Software-Hardware Co-design for Fast and Scalable Training of Deep
Learning Recommendation Models", Mudigere et al. 2022, arXiv:2104.05158, section 4.1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

ADAGRAD_EPSILON = 1e-8

TABLE_FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class EmbeddingTables(nn.Module):
    """Tables of equal shape, on meta until their buffers are built (`build_table_buffer`).

    Parameters
    ----------
    num_tables: int
        Of all ranks together: a multiple of the number of ranks.
    rows, width: int
        Of each table.
    table_format: str
        What values are stored in, and sent in forward; gradients are sent as they are computed.
    learning_rate: float
        Of row-wise Adagrad.
    """

    weight: torch.Tensor
    """Of this rank's tables: shape (tables, rows, width)."""
    squares: torch.Tensor
    """Per row, the sum over all steps of the mean square of its gradient: shape (tables, rows), fp32."""

    def __init__(self, num_tables: int, rows: int, width: int, table_format: str, learning_rate: float) -> None:
        super().__init__()
        self.num_tables, self.rows, self.width, self.learning_rate = num_tables, rows, width, learning_rate
        self.table_dtype = TABLE_FORMATS[table_format]
        self.register_buffer("weight", torch.empty(num_tables, rows, width, dtype=self.table_dtype, device="meta"))
        self.register_buffer("squares", torch.empty(num_tables, rows, dtype=torch.float32, device="meta"))

    def forward(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the rows that each sample names in each table.

        Parameters
        ----------
        ids: torch.Tensor
            Shape (samples, tables, ids per table), of this rank's samples.
        dtype: torch.dtype
            Of the result, and so of its gradient.

        Returns
        -------
        torch.Tensor
            Shape (samples, tables, width).
        """
        # Autograd calls a function's backward if one of its inputs has a gradient; ids and buffers have none.
        trigger = torch.empty((), device=ids.device, requires_grad=True)
        return _TableLookup.apply(trigger, ids, self, dtype)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def num_ranks(self) -> int:
        """Ranks that the tables are divided among."""
        return self.num_tables // self.weight.shape[0]

    def send_to_owners(self, values: torch.Tensor) -> torch.Tensor:
        """Exchange what each rank has for all tables, shape (samples, tables, n), for what all ranks have for this
        rank's tables: shape (ranks x samples, tables of this rank, n)."""
        if self.num_ranks == 1:
            return values
        by_owner = values.unflatten(1, (self.num_ranks, -1)).transpose(0, 1).contiguous()
        return _exchange(by_owner).flatten(0, 1)

    def return_from_owners(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of `send_to_owners`."""
        if self.num_ranks == 1:
            return values
        by_owner = _exchange(values.contiguous().unflatten(0, (self.num_ranks, -1)))
        return by_owner.transpose(0, 1).flatten(1, 2)

    def find_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's tables, one table behind the other, for ids of shape (samples, its tables, ids per
        table); an id beyond a table's rows is taken modulo their number. Shape (samples x tables, ids per table)."""
        table_starts = self.rows * torch.arange(ids.shape[1], device=ids.device)
        return (ids.remainder(self.rows) + table_starts[:, None]).flatten(0, 1)

    @torch.no_grad()
    def update_rows(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """One step of row-wise Adagrad: ``w -= learning_rate * g / sqrt(sum of mean(g^2))``, where a row's g is the sum
        over all samples that name it.

        All shapes follow from the number of ids, however many rows are different.

        Parameters
        ----------
        rows: torch.Tensor
            As `find_rows` returns them.
        gradients: torch.Tensor
            Of the loss with respect to each sum of rows: shape (samples x tables, width).
        """
        ids_per_table = rows.shape[1]
        sorted_rows, order = rows.flatten().sort()
        is_first = torch.ones_like(sorted_rows)
        is_first[1:] = sorted_rows[1:] != sorted_rows[:-1]
        positions = is_first.cumsum(0) - 1  # of each row among the different ones
        sums = torch.zeros(len(sorted_rows), self.width, device=rows.device)
        sums.index_add_(0, positions, gradients[order // ids_per_table].float())
        updated_rows = torch.zeros_like(sorted_rows).scatter_(0, positions, sorted_rows)  # beyond the last: 0, sum 0
        squares = self.squares.view(-1)
        squares.index_add_(0, updated_rows, sums.square().mean(1))
        sums *= (-self.learning_rate / (squares[updated_rows].sqrt() + ADAGRAD_EPSILON))[:, None]
        self.weight.view(-1, self.width).index_add_(0, updated_rows, sums.to(self.table_dtype))


class _TableLookup(torch.autograd.Function):
    """Looks up in forward, and in backward gives each row's gradient to the rank that has it, which updates the row."""

    @staticmethod
    def forward(
        ctx: Any, _trigger: torch.Tensor, ids: torch.Tensor, tables: EmbeddingTables, dtype: torch.dtype
    ) -> torch.Tensor:
        rows = tables.find_rows(tables.send_to_owners(ids))
        ctx.tables = tables
        ctx.save_for_backward(rows)
        sums = nn.functional.embedding_bag(rows, tables.weight.view(-1, tables.width), mode="sum")
        return tables.return_from_owners(sums.unflatten(0, (-1, tables.weight.shape[0]))).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        """The loss is the mean over all ranks' samples, and every rank's gradient is that of its own mean."""
        tables: EmbeddingTables = ctx.tables
        (rows,) = ctx.saved_tensors
        tables.update_rows(rows, tables.send_to_owners(gradients[0]).flatten(0, 1) / tables.num_ranks)
        return None, None, None, None


def _exchange(values: torch.Tensor) -> torch.Tensor:
    """Part i of the first dimension goes to rank i."""
    assert dist.group.WORLD is not None
    return wait_tensor(all_to_all_single(values, None, None, dist.group.WORLD))


def build_table_buffer(tables: EmbeddingTables, name: str, device: torch.device) -> torch.Tensor:
    """This rank's part of a buffer of `EmbeddingTables`: its tables' values, or zeros.

    A table is drawn at random by its number, so that it is the same on however many ranks.
    """
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    num_tables = tables.num_tables // num_ranks
    if name == "squares":
        return torch.zeros(num_tables, tables.rows, device=device)
    weight = torch.empty(num_tables, tables.rows, tables.width, dtype=tables.table_dtype, device=device)
    for index in range(num_tables):
        generator = torch.Generator(device).manual_seed(rank * num_tables + index)
        weight[index].normal_(std=tables.width**-0.5, generator=generator)
    return weight


def compute_table_bytes(tables: EmbeddingTables, num_ranks: int) -> int:
    """Of the buffers on each of so many ranks."""
    return (tables.weight.nbytes + tables.squares.nbytes) // num_ranks
