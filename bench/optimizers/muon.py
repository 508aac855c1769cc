"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for hidden matrices: torch's, with torch's AdamW beside
it for embeddings, head, norms and biases, which Muon is not made for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.typed_config import OneOf, Within
from bench.optimizers import adamw
from bench.optimizers.base import (
    TENSORS_PER_UPDATE_KERNEL,
    TORCH_IMPLEMENTATIONS,
    IsHiddenMatrix,
    MatrixProduct,
    OptimizerConfig,
    UpdateCollective,
    list_parameter_groups,
)
from bench.optimizers.updated_tensor import DTENSORS, WHOLE_TENSORS, UpdatedTensor

if TYPE_CHECKING:
    import torch


NEWTON_SCHULZ_STEPS = 5
"""torch's default (``DEFAULT_NS_STEPS`` in torch/optim/_muon.py of torch 2.13)."""

ORTHOGONALISED_ITEMSIZE = 2
"""The Newton-Schulz iteration is in bf16, whatever the parameter's format."""

MOMENTUM_PASSES, UPDATE_PASSES, NORM_PASSES = 6, 4, 3
"""Reads and writes of a matrix: momentum and its mixture with the gradient (two operands and a result each); the
parameter, decayed and updated; and in bf16 its norm and division."""

KERNELS_PER_MATRIX = 8
"""Beside the products."""


@dataclass(frozen=True)
class MuonConfig(OptimizerConfig):
    """One state per hidden matrix, AdamW's two per other parameter, all in the parameter's format.

    The update of a matrix is its momentum with all singular values near 1, found by five Newton-Schulz iterations on
    the whole matrix in bf16. Steps are scaled as AdamW's (``adjust_lr_fn="match_rms_adamw"``, Liu et al. 2025,
    arXiv:2502.16982), so one learning rate serves both. On FSDP2's DTensors the iteration is divided among the ranks,
    and sums are rounded to bf16 in another order than in one process.
    """

    implementation: Annotated[str, OneOf(*TORCH_IMPLEMENTATIONS)]
    """Of AdamW: fused, foreach or for_loop. Muon takes one matrix after the other."""
    momentum: Annotated[float, Within(0, 1, exclusive_maximum=True)] = 0.95
    """Of Muon."""

    label = "Muon"
    supported_tensors = (WHOLE_TENSORS, DTENSORS)
    unsupported_reason = (
        "Muon makes the rows or columns of whole matrices orthogonal. Choose strategy ddp, zero1 or fsdp, or "
        "optimizer=adamw"
    )
    updates_like_one_process = (WHOLE_TENSORS,)

    @property
    def states_per_parameter(self) -> float:
        return 1

    def build(
        self, parameters: Iterable[Any], is_hidden_matrix: IsHiddenMatrix = lambda parameter: False
    ) -> torch.optim.Optimizer:
        import torch

        from bench.optimizers.optimizer_pair import OptimizerPair

        groups = list_parameter_groups(parameters)
        hidden_matrices = [
            parameter for group in groups for parameter in group["params"] if is_hidden_matrix(parameter)
        ]
        others = [parameter for group in groups for parameter in group["params"] if not is_hidden_matrix(parameter)]
        optimizers: list[torch.optim.Optimizer] = []
        if hidden_matrices:
            optimizers.append(
                torch.optim.Muon(
                    hidden_matrices, lr=self.learning_rate, momentum=self.momentum, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            optimizers.append(adamw.build_torch_adamw(others, self.learning_rate, self.implementation))
        return OptimizerPair(groups, optimizers)

    def compute_state_bytes(self, tensor: UpdatedTensor, itemsize: int) -> float:
        """The momentum of a hidden matrix; AdamW's states of any other tensor."""
        if tensor.is_hidden_matrix:
            return tensor.numel * itemsize
        return adamw.compute_adamw_state_bytes(tensor, itemsize)

    def compute_temporary_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int, *, is_on_cpu: bool) -> float:
        """Muon's largest matrix, or what AdamW needs for the others after it."""
        hidden, others = _split_tensors(tensors)
        return max(
            max((_compute_iteration_bytes(tensor, itemsize) for tensor in hidden), default=0.0),
            adamw.compute_adamw_temporary_bytes(others, itemsize, self.implementation),
        )

    def compute_moved_bytes(self, tensors: Sequence[UpdatedTensor], itemsize: int) -> float:
        hidden, others = _split_tensors(tensors)
        hidden_numel = sum(tensor.numel for tensor in hidden)
        return (
            (MOMENTUM_PASSES + UPDATE_PASSES) * itemsize + NORM_PASSES * ORTHOGONALISED_ITEMSIZE
        ) * hidden_numel + adamw.PASSES[self.implementation] * sum(tensor.numel for tensor in others) * itemsize

    def count_kernels(self, tensors: Sequence[UpdatedTensor]) -> int:
        hidden, others = _split_tensors(tensors)
        num_adamw_kernels = round(len(others) / TENSORS_PER_UPDATE_KERNEL[self.implementation])
        return max(1, KERNELS_PER_MATRIX * len(hidden) + num_adamw_kernels)

    def list_matrix_products(self, tensors: Sequence[UpdatedTensor]) -> list[MatrixProduct]:
        """With X the matrix, or its transpose if that has fewer rows, of s rows and l columns: A = X X', then A A, then
        (b A + c A A) X; 4 s^2 l + 2 s^3 FLOPs per iteration. Of a DTensor each rank has as many rows of s, or columns
        of l, as it stores; A A is computed whole by every rank where A was summed."""
        products: list[MatrixProduct] = []
        for tensor in _split_tensors(tensors)[0]:
            short, _, local_short, local_long = _find_sides(tensor)
            products += [
                MatrixProduct(local_short, short, local_long, NEWTON_SCHULZ_STEPS),
                MatrixProduct(local_short, short, short, NEWTON_SCHULZ_STEPS),
                MatrixProduct(local_short, local_long, short, NEWTON_SCHULZ_STEPS),
            ]
        return products

    def list_collectives(self, tensors: Sequence[UpdatedTensor]) -> list[UpdateCollective]:
        """Of DTensors, whose rows are divided: the norm is summed. Where rows are not the longer side each product's
        right operand is gathered, which is X', A and X; where they are, X is divided along its columns, so that A
        is summed, before it is squared and after. Seen in torch 2.13."""
        collectives: list[UpdateCollective] = []
        for tensor in _split_tensors(tensors)[0]:
            if tensor.num_shards == 1:
                continue
            short, long, _, _ = _find_sides(tensor)
            whole_bytes, square_bytes = short * long * ORTHOGONALISED_ITEMSIZE, short**2 * ORTHOGONALISED_ITEMSIZE
            collectives.append(UpdateCollective("all-reduce", ORTHOGONALISED_ITEMSIZE))
            if _is_divided_along_short_side(tensor):
                collectives += [
                    UpdateCollective("all-gather", whole_bytes, 2 * NEWTON_SCHULZ_STEPS),
                    UpdateCollective("all-gather", square_bytes, NEWTON_SCHULZ_STEPS),
                ]
            else:
                collectives.append(UpdateCollective("all-reduce", square_bytes, 2 * NEWTON_SCHULZ_STEPS))
        return collectives


def _split_tensors(tensors: Sequence[UpdatedTensor]) -> tuple[list[UpdatedTensor], list[UpdatedTensor]]:
    return (
        [tensor for tensor in tensors if tensor.is_hidden_matrix],
        [tensor for tensor in tensors if not tensor.is_hidden_matrix],
    )


def _is_divided_along_short_side(tensor: UpdatedTensor) -> bool:
    rows, columns = tensor.whole_shape
    return rows <= columns


def _find_sides(tensor: UpdatedTensor) -> tuple[int, int, int, int]:
    """Short and long side of the whole matrix, and of what this rank has of it."""
    (rows, columns), local_rows = tensor.whole_shape, tensor.shape[0]
    if _is_divided_along_short_side(tensor):
        return rows, columns, local_rows, columns
    return columns, rows, columns, local_rows


def _compute_iteration_bytes(tensor: UpdatedTensor, itemsize: int) -> float:
    """The update before the iteration, in the parameter's format, which the caller keeps; the matrix of this iteration
    and of the next; A and the polynomial of it.

    As DTensors, beside them: the gathered right operand, and where rows are the shorter side the same in the order in
    which it arrives.
    """
    short, long, local_short, _ = _find_sides(tensor)
    bf16_numel = 2 * tensor.numel + 2 * local_short * short
    if tensor.num_shards > 1:
        bf16_numel += short * long if _is_divided_along_short_side(tensor) else short * short
    return tensor.numel * itemsize + bf16_numel * ORTHOGONALISED_ITEMSIZE
