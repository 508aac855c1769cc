"""llm-foundry's MPT: a GPT whose activation and loss are one kernel each.

llm-foundry's MPT (with learned positions, as its benchmarks count them) calls ``torch.nn.GELU``, and a fused cross
entropy that makes no copy of the logits in fp32. Nothing else differs that takes time or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from bench.core.typed_config import OneOf
from bench.models.base import IGNORED_LABEL
from bench.models.gpt import ACTIVATIONS, GPTFamily


@dataclass(frozen=True)
class MPTFamily(GPTFamily):
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu"

    can_divide_layers: ClassVar[bool] = False  # its cross entropy takes whole logits

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in the format of the logits, whose gradient is all that it allocates."""
        return _FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())


class _FusedCrossEntropy(torch.autograd.Function):
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
