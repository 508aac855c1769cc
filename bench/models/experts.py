"""Mixture of experts: the products of all experts at once."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from bench.models.routing import Routing

GROUPED_EXPERTS = "grouped"
"""What `compute_grouped_experts` is called among transformers' implementations of experts."""


class ExpertDivision(Protocol):
    """How the experts of a layer are divided among ranks: what `compute_grouped_experts` asks of it."""

    @property
    def sequence_part(self) -> tuple[int, int]:
        """Which part of every sequence this rank's tokens are, and of how many."""

    def prepare_inputs(self, hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and how much each of their experts counts, before they are used."""

    def prepare_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, as a plain tensor."""

    def compute_rows(self, experts: Any, rows: torch.Tensor, row_experts: torch.Tensor) -> torch.Tensor:
        """`compute_sorted_rows`, wherever the experts are."""

    def finish_outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """The sums over the experts of each token, as the layer hands them on."""


def find_expert_choice(model: Any) -> tuple[int, int] | None:
    """Experts of a layer, and how many of them a token goes to; None for a model without experts."""
    experts_per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    all_experts = list_experts(model)
    return (all_experts[0].num_experts, experts_per_token) if all_experts and experts_per_token is not None else None


def list_experts(model: nn.Module) -> list[Any]:
    """The modules that hold the experts of a layer: transformers gives each class of them this attribute."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def find_spread_experts(model: nn.Module, expert_degree: int) -> set[int]:
    """Identities of the parameters of experts, if other ranks have other ones: each layer's are spread over so many."""
    if expert_degree == 1:
        return set()
    return {id(parameter) for experts in list_experts(model) for parameter in experts.parameters()}


def count_idle_parameters(model: Any) -> int:
    """Parameters of the experts that a token does not go to."""
    experts_per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if experts_per_token is None:
        return 0
    return sum(
        sum(parameter.numel() for parameter in experts.parameters())
        * (experts.num_experts - experts_per_token)
        // experts.num_experts
        for experts in list_experts(model)
    )


class CompiledAlone(nn.Module):
    """A part of a layer without parameters, which torch compiles also where the layer around it cannot be compiled."""


class TokenPermutation(CompiledAlone):
    """Copies tokens to rows, one for each of their experts, sorted by expert."""

    def forward(self, hidden: torch.Tensor, order: torch.Tensor, inverse_order: torch.Tensor) -> torch.Tensor:
        """Rows, shape (tokens x experts per token, width), of tokens, shape (tokens, width).

        Parameters
        ----------
        order: tensor
            For each row the token's choice that it is, choices counted through all tokens; shape (rows,).
        inverse_order: tensor
            For each choice its row; the same shape.
        """
        num_choices = order.shape[0] // hidden.shape[0]
        rows: torch.Tensor = _GatherRows.apply(hidden, order // num_choices, inverse_order, num_choices)
        return rows


class ExpertActivation(CompiledAlone):
    """What is between the two products of experts."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.activate = experts._apply_gate if experts.has_gate else experts.act_fn

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each row by itself."""
        activated: torch.Tensor = self.activate(rows)
        return activated


class TokenUnpermutation(CompiledAlone):
    """Adds up the rows of each token, by the weights of their experts."""

    def forward(
        self, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse_order: torch.Tensor
    ) -> torch.Tensor:
        """Shape (tokens, width), of rows sorted by expert and weights of shape (tokens, experts per token)."""
        rows = permute_rows(rows, inverse_order, order).unflatten(0, weights.shape)
        return (rows * weights.unsqueeze(-1)).sum(dim=1)


def permute_rows(rows: torch.Tensor, order: torch.Tensor, inverse_order: torch.Tensor) -> torch.Tensor:
    """``rows[order]``, whose gradient is gathered as well: torch, which does not know that each row is taken once, adds
    it up in a tensor of zeros."""
    permuted: torch.Tensor = _GatherRows.apply(rows, order, inverse_order, 1)
    return permuted


class _GatherRows(torch.autograd.Function):
    """Rows by their indices, each taken as often as any other; `inverse_order` has where the copies of each are."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, indices: torch.Tensor, inverse_order: torch.Tensor, num_copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse_order)
        ctx.num_copies = num_copies
        return rows[indices]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (inverse_order,) = ctx.saved_tensors
        gradient = grads[0][inverse_order]
        if ctx.num_copies > 1:
            gradient = gradient.unflatten(0, (-1, ctx.num_copies)).sum(dim=1)
        return gradient, None, None, None


def prepare_experts(model: Any, routing: Routing) -> None:
    """Have the experts of a model, if it has some, follow a routing, and do all but their products in modules of their
    own."""
    all_experts = list_experts(model)
    for experts in all_experts:
        experts._bench_routing = routing
        experts.permutation, experts.unpermutation = TokenPermutation(), TokenUnpermutation()
        experts.activation = ExpertActivation(experts)
    if all_experts:
        model.get_decoder().register_forward_pre_hook(routing.note_sequence_length, with_kwargs=True)


def register_grouped_experts() -> str:
    """Name of `compute_grouped_experts`, for a configuration's ``experts_implementation``."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(GROUPED_EXPERTS, compute_grouped_experts)
    for operator, formula in (
        (torch.ops.aten._grouped_mm, _count_grouped_flops),
        (torch.ops.transformers.grouped_mm_fallback, _count_grouped_flops),
        (torch.ops.transformers.grouped_mm_fallback_backward, _count_grouped_backward_flops),
    ):
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
    return GROUPED_EXPERTS


def _count_grouped_flops(left_shape: Any, right_shape: Any, *_: Any, **__: Any) -> int:
    """Of (rows, depth) times (experts, depth, columns), or (rows, depth) times (depth, columns) cut along the depth:
    every row, or slice of the depth, is one expert's."""
    return 2 * math.prod(left_shape) * right_shape[-1]


def _count_grouped_backward_flops(left_shape: Any, right_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * _count_grouped_flops(left_shape, right_shape)


def compute_grouped_experts(
    experts: Any, hidden: torch.Tensor, routed_experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' results for each token, added up by weight.

    Rows are sorted by expert, so that each of the two products is one operator for all experts.

    Parameters
    ----------
    experts: module
        One of transformers' classes of experts, whose weights have the experts as their first dimension.
    hidden: tensor
        Shape (tokens, width).
    routed_experts: tensor
        The experts that the router chose; shape (tokens, experts per token).
    weights: tensor
        How much each of them counts; the same shape.
    """
    routing: Routing = experts._bench_routing
    division: ExpertDivision | None = getattr(experts, "_bench_division", None)
    if routing.kind != "router":
        part = (0, 1) if division is None else division.sequence_part
        routed_experts = routing.choose_experts(routed_experts, experts.num_experts, part)
    if division is not None:
        hidden, weights = division.prepare_inputs(hidden, weights)
    row_experts, order = routed_experts.flatten().sort(stable=True)
    inverse_order = order.argsort()
    rows = experts.permutation(hidden, order, inverse_order)
    rows = (
        compute_sorted_rows(experts, rows, row_experts, experts.num_experts)
        if division is None
        else division.compute_rows(experts, rows, row_experts)
    )
    result = experts.unpermutation(rows, weights, order, inverse_order).to(hidden.dtype)
    return result if division is None else division.finish_outputs(result)


def compute_sorted_rows(experts: Any, rows: torch.Tensor, row_experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """What the expert of each row makes of it.

    Parameters
    ----------
    rows: tensor
        Shape (rows, width).
    row_experts: tensor
        The expert of each row, in ascending order; shape (rows,).
    num_experts: int
        Of which there are weights here.
    """
    ends = torch.searchsorted(row_experts, torch.arange(num_experts, device=rows.device), right=True).int()
    first_name = "gate_up_proj" if experts.has_gate else "up_proj"
    rows = _multiply_grouped(experts, first_name, rows, row_experts, ends)
    rows = experts.activation(rows)
    rows = _multiply_grouped(experts, "down_proj", rows, row_experts, ends)
    return experts.post_expert_norm(rows) if experts.has_post_expert_norm else rows


def _multiply_grouped(
    experts: Any, name: str, rows: torch.Tensor, row_experts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Each row times the weight of its expert, in the format of autocast, which does not know grouped products."""
    division: ExpertDivision | None = getattr(experts, "_bench_division", None)
    weight, device = getattr(experts, name), rows.device.type
    if division is not None:
        weight = division.prepare_weight(weight)
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else weight.dtype
    weight, rows = weight.to(dtype), rows.to(dtype)
    weight = weight if experts.is_transposed else weight.transpose(-2, -1)
    if dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm"):
        result = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    else:
        result = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    if not experts.has_bias:
        return result
    bias = getattr(experts, f"{name}_bias")
    return result + (bias if division is None else division.prepare_weight(bias)).to(dtype)[row_experts]
