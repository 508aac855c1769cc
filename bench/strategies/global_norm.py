"""Clip gradients by the norm of all that all ranks have, where torch's own function knows one mesh, or one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

MIN_NORM = 1e-6
"""Added to the norm, as torch's ``clip_grad_norm_`` does."""


def clip_by_global_norm(parameters: Iterable[tuple[nn.Parameter, float]], max_norm: float) -> None:
    """Scale the gradients on this rank so that the norm of all gradients, on all ranks, is at most `max_norm`.

    Parameters
    ----------
    parameters: iterable of (nn.Parameter, float)
        Those of this rank, each with the number of ranks that have this part of it: among so many its squares are
        divided before all ranks add up theirs.
    """
    gradients_by_copies: dict[float, list[torch.Tensor]] = {}
    for parameter, num_copies in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients_by_copies.setdefault(num_copies, []).append(local)
    squares = [
        torch.nn.utils.get_total_norm(gradients).float() ** 2 / num_copies
        for num_copies, gradients in gradients_by_copies.items()
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    coefficient = torch.clamp(max_norm / (total.sqrt() + MIN_NORM), max=1.0)
    for gradients in gradients_by_copies.values():
        torch._foreach_mul_(gradients, coefficient)


def count_parts(tensor: DTensor | DTensorSpec | None) -> int:
    """Different parts that ranks have of a DTensor; 1 for a tensor that is none."""
    if tensor is None:
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
