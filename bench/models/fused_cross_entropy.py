"""Cross entropy as flash-attn has it."""

from __future__ import annotations

from typing import Any

import torch

from bench.models.base import IGNORED_LABEL


class FusedCrossEntropy(torch.autograd.Function):
    """As flash-attn's: forward keeps the logits and a number per row, backward makes their gradient in one go."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        is_counted = labels != IGNORED_LABEL
        log_sum_exp = torch.logsumexp(logits, dim=1)
        label_logits = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        ctx.save_for_backward(logits, labels, is_counted)
        return torch.where(is_counted, (log_sum_exp - label_logits).float(), 0.0).sum() / is_counted.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        logits, labels, counted = ctx.saved_tensors
        logits_gradient = torch.softmax(logits, dim=1)
        logits_gradient.scatter_add_(
            1, labels.clamp(min=0)[:, None], -torch.ones_like(labels, dtype=logits_gradient.dtype)[:, None]
        )
        return logits_gradient.mul_((counted / counted.sum() * gradient).to(logits_gradient.dtype)[:, None]), None
