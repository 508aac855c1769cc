"""Expert parallelism: each rank has some of the experts of every layer, and tokens go to them and back (all-to-all).

As in GShard (Lepikhin et al. 2020, arXiv:2006.16668), with no limit to the tokens of an expert: how many go where is
exchanged first, which the host waits for. Over tensor-parallel ranks each expert is divided by its width, as a
feed-forward layer is: one all-reduce forward, and two backward. Or experts are spread over these ranks as well, each of
which then sends its own part of every sequence (MoE parallel folding, Liu et al. 2025, arXiv:2504.14960).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.models import Family
from bench.models.division import SEQUENCE_SHARD, LocalComputation, divide_module
from bench.models.experts import compute_sorted_rows, list_experts, permute_rows
from bench.strategies.mesh.layout import EXPERT, TENSOR, RankMesh

WIDTH_DIMS = {"gate_up_proj": 1, "up_proj": 1, "down_proj": 2}
"""The dimension of each parameter (experts, outputs, inputs) that is the width of an expert."""


@dataclass(frozen=True)
class ExpertSplit:
    """The experts of a layer divided over ranks by their number, by their width, or both."""

    expert_mesh: DeviceMesh | None
    """Of the ranks that have different experts."""
    width_mesh: DeviceMesh | None
    """Of those that have parts of the same ones."""
    sequence_mesh: DeviceMesh | None
    """Of those ranks in `expert_mesh` that have parts of the same sequences."""

    @property
    def sequence_part(self) -> tuple[int, int]:
        """Which part of every sequence comes to this rank's layer, and of how many."""
        if self.sequence_mesh is None:
            return 0, 1
        return self.sequence_mesh.get_local_rank(), self.sequence_mesh.size()

    def prepare_inputs(self, hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of both are added up over the ranks that have parts of each expert."""
        if self.width_mesh is None:
            return hidden, weights
        group = self.width_mesh.get_group()
        return _SumGradients.apply(hidden, group), _SumGradients.apply(weights, group)

    def prepare_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part. Its gradient comes from the tokens of all expert-parallel ranks, each of which has the mean
        loss of its own sequences: of their sum the mean is needed."""
        local_weight = weight.to_local() if isinstance(weight, DTensor) else weight
        if self.expert_mesh is None or not local_weight.requires_grad:
            return local_weight
        scaled: torch.Tensor = _ScaleGradient.apply(local_weight, self.sequence_part[1] / self.expert_mesh.size())
        return scaled

    def compute_rows(self, experts: Any, rows: torch.Tensor, row_experts: torch.Tensor) -> torch.Tensor:
        """Send each row, shape (rows, width), to the rank of its expert, and take the result back."""
        if self.expert_mesh is None:
            return compute_sorted_rows(experts, rows, row_experts, experts.num_experts)
        group, degree = self.expert_mesh.get_group(), self.expert_mesh.size()
        num_local = experts.num_experts // degree
        numbers = torch.arange(experts.num_experts, device=rows.device)
        sent_counts = torch.searchsorted(row_experts, numbers, right=True)
        sent_counts[1:] -= sent_counts[:-1].clone()
        received_counts = _wait(all_to_all_single(sent_counts, None, None, group))
        sent_splits, received_splits = self.list_splits(sent_counts, received_counts, rows.shape[0])
        received = all_to_all_single_autograd(rows, received_splits, sent_splits, group)
        local_experts = torch.arange(num_local, device=rows.device).repeat(degree)
        local_experts = local_experts.repeat_interleave(received_counts, output_size=sum(received_splits))
        sorted_experts, order = local_experts.sort(stable=True)
        inverse_order = order.argsort()
        results = compute_sorted_rows(experts, permute_rows(received, order, inverse_order), sorted_experts, num_local)
        return all_to_all_single_autograd(
            permute_rows(results, inverse_order, order), sent_splits, received_splits, group
        )

    def list_splits(
        self, sent_counts: torch.Tensor, received_counts: torch.Tensor, num_rows: int
    ) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and that come from each, of those per expert: the host waits for them."""
        assert self.expert_mesh is not None
        degree = self.expert_mesh.size()
        return (
            sent_counts.view(degree, -1).sum(dim=1).tolist(),
            received_counts.view(degree, -1).sum(dim=1).tolist(),
        )

    def build_traced(self) -> ExpertSplit:
        """The same for tensors without values."""
        return TracedExpertSplit(self.expert_mesh, self.width_mesh, self.sequence_mesh)

    def finish_outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of each expert."""
        if self.width_mesh is None:
            return outputs
        total: torch.Tensor = _SumOutputs.apply(outputs, self.width_mesh.get_group())
        return total


class TracedExpertSplit(ExpertSplit):
    """Takes rows to go to the experts of all ranks in equal numbers: where nothing is computed nobody can tell."""

    def list_splits(
        self, sent_counts: torch.Tensor, received_counts: torch.Tensor, num_rows: int
    ) -> tuple[list[int], list[int]]:
        """As many to and from each rank; one more for the first of them where they do not divide."""
        assert self.expert_mesh is not None
        degree = self.expert_mesh.size()
        # What a rank would compute of the counts, but for their values.
        sent_counts.view(degree, -1).sum(dim=1)
        received_counts.view(degree, -1).sum(dim=1)
        splits = [num_rows // degree + (rank < num_rows % degree) for rank in range(degree)]
        return splits, splits


def divide_experts(model: nn.Module, family: Family, mesh: RankMesh, *, sequence_parallel: bool) -> set[int]:
    """Divide the experts of a model, which is on meta: their parameters become DTensors.

    Returns
    -------
    set of int
        Identities of the modules that hold experts.
    """
    tensor_mesh, all_experts = mesh.get_mesh(TENSOR), list_experts(model)
    expert_mesh = mesh.get_mesh(*mesh.layout.expert_dims)
    if not all_experts or (expert_mesh is None and tensor_mesh is None):
        return set()
    is_spread = not mesh.layout.expert_tensor_parallel
    split = ExpertSplit(expert_mesh, None if is_spread else tensor_mesh, tensor_mesh if is_spread else None)
    parameter_mesh = expert_mesh if is_spread else mesh.get_dims(EXPERT, TENSOR)
    assert parameter_mesh is not None
    for experts in all_experts:
        experts._bench_division = split
        for name, parameter in list(experts.named_parameters(recurse=False)):
            placements: list[Placement] = [] if expert_mesh is None else [Shard(0)]
            if split.width_mesh is not None:
                placements.append(Shard(WIDTH_DIMS[name]) if name in WIDTH_DIMS else Replicate())
            divided = distribute_tensor(parameter, parameter_mesh, placements, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    if tensor_mesh is not None:
        for layer in (module for module in model.modules() if getattr(module, "experts", None) in all_experts):
            styles = _list_expert_layer_styles(layer, sequence_parallel=sequence_parallel, is_spread=is_spread)
            for module, style in styles:
                divide_module(module, tensor_mesh, family.find_layer_style(module, style))
    return {id(experts) for experts in all_experts}


def _list_expert_layer_styles(
    layer: Any, *, sequence_parallel: bool, is_spread: bool
) -> list[tuple[nn.Module, ParallelStyle]]:
    """What a layer takes and hands on, its router, and the experts that every token goes to, which are divided as a
    feed-forward layer."""
    within: Placement = SEQUENCE_SHARD if is_spread else Replicate()
    styles: list[tuple[nn.Module, ParallelStyle]] = []
    if is_spread:
        styles.append((layer.gate, LocalComputation()))
    elif sequence_parallel:
        takes = PrepareModuleInput(
            input_layouts=SEQUENCE_SHARD, desired_input_layouts=Replicate(), use_local_output=True
        )
        returns = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=SEQUENCE_SHARD, use_local_output=True
        )
        styles += [(layer, takes), (layer, returns)]
    shared = getattr(layer, "shared_experts", None)
    if shared is not None:
        styles += [
            (shared, PrepareModuleInput(input_layouts=within, desired_input_layouts=Replicate())),
            (shared.gate_proj, ColwiseParallel()),
            (shared.up_proj, ColwiseParallel()),
            (shared.down_proj, RowwiseParallel(output_layouts=within)),
        ]
    return styles


def arrange_expert_parameter(name: str, whole: torch.Tensor, width_parts: int) -> torch.Tensor:
    """A whole parameter in such an order that equal parts of it are what ranks have: of gate and up each a part."""
    if width_parts == 1 or not name.endswith("experts.gate_up_proj"):
        return whole
    return whole.unflatten(1, (2, width_parts, -1)).transpose(1, 2).flatten(1, 3)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _add_up(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' tensors, beside this rank's."""
    return _wait(all_reduce(tensor.contiguous(), "sum", group))


class _SumGradients(torch.autograd.Function):
    """A tensor that all ranks of a group have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _add_up(grads[0], ctx.group), None


class _SumOutputs(torch.autograd.Function):
    """The sum over the ranks of a group; the gradient of each is that of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _add_up(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None
