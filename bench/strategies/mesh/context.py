"""Context parallelism: every sequence divided over ranks, and attention that reaches beyond a rank's part.

Three forms. ``ring``: keys and values go around, and what each part of them comes to is merged (Liu et al. 2023,
arXiv:2310.01889); ``all_gather``: they are gathered first, as in Llama 3's training (arXiv:2407.21783, section 3.3.2);
``all_to_all``: queries, keys and values are exchanged for whole sequences of a part of the heads (DeepSpeed-Ulysses,
Jacobs et al. 2023, arXiv:2309.14509). The first two are torch's, whose template is told which operators to use: torch
2.13 names those of CUDA alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from bench.models import Batch
from bench.models.experts import list_experts
from bench.strategies.mesh.knobs import ALL_TO_ALL, RING

ATTENTION_NAME = "bench_context_parallel"
"""What it is called among transformers' implementations of attention: one without a mask function, so that no mask is
made."""

SEQUENCE_DIM = 2
"""Of queries, keys and values: (sequences, heads, tokens, width)."""


@dataclass(frozen=True)
class ContextSplit:
    """This rank's part of every sequence."""

    mesh: DeviceMesh
    form: str

    @property
    def degree(self) -> int:
        return self.mesh.size()

    def select_tokens(self, batch: Batch) -> Batch:
        """This rank's tokens, their positions in the sequence, and their labels."""
        length = batch.labels.shape[1]
        positions = self._find_positions(length).to(batch.labels.device)
        inputs = {name: tensor[:, positions] for name, tensor in batch.inputs.items()}
        inputs["position_ids"] = positions.expand(batch.labels.shape[0], -1).contiguous()
        return Batch(inputs, batch.labels[:, positions])

    def _find_positions(self, length: int) -> torch.Tensor:
        """Of the ring one part from the beginning and one from the end, so that all ranks have as many pairs of tokens
        to compute under a causal mask; else one part."""
        rank = self.mesh.get_local_rank()
        if self.form == ALL_TO_ALL:
            return torch.arange(length).chunk(self.degree)[rank]
        parts = torch.arange(length).chunk(2 * self.degree)
        return torch.cat([parts[rank], parts[2 * self.degree - 1 - rank]])

    def apply_to_model(self, model: Any) -> None:
        """Have a causal language model of transformers attend beyond its part of the sequence."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.form != ALL_TO_ALL:
            torch_ring.set_rotate_method("alltoall" if self.form == RING else "allgather")
            torch_ring._cp_options.enable_load_balance = True
        name = f"{ATTENTION_NAME}_{self.form}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        model.config._attn_implementation = name
        for module in model.modules():
            # FP8 layers have a config of another kind
            if hasattr(getattr(module, "config", None), "_attn_implementation"):
                module.config._attn_implementation = name
        for experts in list_experts(model):
            experts._bench_routing.num_parts = self.degree

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Causal attention of this rank's queries, called as transformers calls it.

        Result (sequences, tokens, heads, width), and no weights.
        """
        assert attention_mask is None
        assert not dropout
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        repeats = query.shape[1] // key.shape[1]
        if self.form == ALL_TO_ALL:  # as few as let every rank have its part of the heads
            repeats = self.degree // math.gcd(key.shape[1], self.degree)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        with torch.autocast(device, enabled=False):
            if self.form == ALL_TO_ALL:
                result = self._attend_by_heads(query, key, value, scaling)
            else:
                result = _RingAttention.apply(query, key, value, self.mesh, scaling)
        return result.transpose(1, 2).contiguous(), None

    def _attend_by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        query, key, value = (_exchange(tensor, 1, SEQUENCE_DIM, self.mesh) for tensor in (query, key, value))
        result = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
        return _exchange(result, SEQUENCE_DIM, 1, self.mesh)


def _exchange(tensor: torch.Tensor, split_dim: int, joined_dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """Give every rank its part of one dimension and take what they have of another; the result is contiguous."""
    group, degree = mesh.get_group(), mesh.size()
    parts = torch.stack(tensor.chunk(degree, dim=split_dim))
    received = all_to_all_single_autograd(parts.flatten(0, 1), None, None, group)
    return torch.cat(list(received.unflatten(0, (degree, -1))), dim=joined_dim)


class _RingAttention(torch.autograd.Function):
    """Causal attention by torch's template, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mesh: DeviceMesh, scale: float | None
    ) -> torch.Tensor:
        forward, ctx.backward = choose_operators(query)
        ctx.mesh, ctx.scale = mesh, scale
        out, logsumexp, *rest = forward(mesh, query, key, value, scale)
        ctx.rest = rest
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gradients = ctx.backward(ctx.mesh, grads[0].contiguous(), *ctx.saved_tensors, ctx.rest, ctx.scale)
        return (*gradients[:3], None, None)


def choose_operators(query: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Attention forward and backward on the device and in the format of queries."""
    if query.device.type == "cpu":
        return _attend_on_cpu, _attend_backward_on_cpu
    if query.dtype == torch.float32:
        return _attend_in_fp32, _attend_backward_in_fp32
    return _attend_by_flash, _attend_backward_by_flash


def _attend_on_cpu(mesh: DeviceMesh, query: Any, key: Any, value: Any, scale: float | None) -> Any:
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return torch_ring._templated_ring_attention(
        mesh.get_group(), SEQUENCE_DIM, operator, query, key, value, is_causal=True, scale=scale
    )


def _attend_backward_on_cpu(
    mesh: DeviceMesh, grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, rest: Any, scale: Any
) -> Any:
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return torch_ring._templated_ring_attention_backward(
        mesh.get_group(),
        SEQUENCE_DIM,
        operator,
        grad,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal=True,
        dropout_p=0.0,
        scale=scale,
    )


def _attend_by_flash(mesh: DeviceMesh, query: Any, key: Any, value: Any, scale: float | None) -> Any:
    return torch_ring._scaled_dot_product_ring_flash_attention(mesh, query, key, value, is_causal=True, scale=scale)


def _attend_backward_by_flash(mesh: DeviceMesh, grad: Any, *saved: Any) -> Any:
    *tensors, rest, scale = saved
    cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, *_ = rest
    operator: Any = torch_ring._scaled_dot_product_ring_flash_attention_backward
    return operator(
        mesh, grad, *tensors, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, True, philox_seed, philox_offset, scale=scale
    )


def _attend_in_fp32(mesh: DeviceMesh, query: Any, key: Any, value: Any, scale: float | None) -> Any:
    return torch_ring._scaled_dot_product_ring_efficient_attention(mesh, query, key, value, is_causal=True, scale=scale)


def _attend_backward_in_fp32(mesh: DeviceMesh, grad: Any, query: Any, key: Any, value: Any, *saved: Any) -> Any:
    out, logsumexp, rest, scale = saved
    philox_seed, philox_offset = rest
    return torch_ring._scaled_dot_product_ring_efficient_attention_backward(
        mesh,
        grad,
        query,
        key,
        value,
        None,  # type: ignore[arg-type]
        out,
        logsumexp,
        philox_seed,
        philox_offset,
        0.0,
        (True, True, True, False),
        True,
        scale=scale,
    )
