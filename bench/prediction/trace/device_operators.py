"""Operators that CUDA devices have and CPUs lack, for traces made where there is no such device.

What they are called and what they return is all there is of these operators: fake tensors need no more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from bench.finetune import stand_ins

FAKE_NAMESPACE = "bench"
"""Of the operators that stand for those of CUDA devices."""

torch.library.define(
    "bench::attention_forward",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, bool is_causal, bool learns_bias=False)"
    " -> (Tensor output, Tensor log_sum_exp)",
)
torch.library.define(
    "bench::attention_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor output, Tensor log_sum_exp,"
    " bool is_causal, bool learns_bias=False) -> (Tensor, Tensor, Tensor)",
)


@torch.library.register_fake("bench::attention_forward")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    learns_bias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the query's shape (batch, heads, queries, head dimension), and the log-sum-exp of every row."""
    batch, heads, queries, _ = query.shape
    # In memory heads come after positions, so that putting them side by side again copies nothing.
    output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


@torch.library.register_fake("bench::attention_backward")
def _(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    """Gradients of query, key and value."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def run_attention_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    output: Any,
    log_sum_exp: Any,
    is_causal: bool,
    learns_bias: bool = False,
) -> tuple[Any, torch.Tensor | None]:
    """Gradients of query, key and value, and the scores' where a bias learns from them (their sum is its gradient); its
    buffers are there while it runs."""
    scores = query.new_empty(*query.shape[:3], key.shape[2]) if learns_bias else None
    buffers = [
        torch.empty_like(query, dtype=torch.float32),  # both kernels add up the query's gradient in fp32
        torch.empty_like(log_sum_exp),
    ]
    gradients = torch.ops.bench.attention_backward(
        gradient, query, key, value, bias, output, log_sum_exp, is_causal, learns_bias
    )
    del buffers
    return gradients, scores


class _FakeFusedAttention(torch.autograd.Function):
    """What a fused kernel keeps from forward to backward, and what backward needs for a while."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, is_causal: bool, learns_bias: bool
    ) -> torch.Tensor:
        output, log_sum_exp = torch.ops.bench.attention_forward(query, key, value, bias, is_causal, learns_bias)
        ctx.save_for_backward(query, key, value, bias, output, log_sum_exp)
        ctx.causal, ctx.learns_bias = is_causal, learns_bias
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        query, key, value, bias, output, log_sum_exp = ctx.saved_tensors
        gradients, scores = run_attention_backward(
            gradient, query, key, value, bias, output, log_sum_exp, ctx.causal, ctx.learns_bias
        )
        bias_gradient = None if scores is None else scores.sum_to_size(bias.shape)
        return (*gradients, bias_gradient, None, None)


def _run_fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    learns_bias = attn_mask is not None and attn_mask.requires_grad
    return _FakeFusedAttention.apply(query, key, value, attn_mask, is_causal, learns_bias)


def _run_fused_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """As `torch.nn.functional.dropout`."""
    return torch.native_dropout(input, p, training)[0] if p and training else input


def _run_int8_matmul(
    tokens: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, state: Any = None
) -> Any:
    """As `bitsandbytes.matmul` on a GPU."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    return MatMul8bitLt.apply(tokens, weight, None, bias, state)


@contextlib.contextmanager
def use_device_operators(device: str) -> Iterator[None]:
    """Within, attention and dropout allocate and compute as on `device`: cpu leaves them alone."""
    original_attention, original_dropout = functional.scaled_dot_product_attention, functional.dropout
    original_int8_product = stand_ins.multiply_int8
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    original_matmul = bitsandbytes and bitsandbytes.matmul
    if device == "cuda":
        functional.scaled_dot_product_attention, functional.dropout = _run_fused_attention, _run_fused_dropout
        stand_ins.multiply_int8 = stand_ins.multiply_int8_on_gpu
        if bitsandbytes:
            bitsandbytes.matmul = _run_int8_matmul
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = original_attention, original_dropout
        stand_ins.multiply_int8 = original_int8_product
        if bitsandbytes:
            bitsandbytes.matmul = original_matmul
