"""llm-foundry's MPT: a GPT whose activation and loss are one kernel each.

llm-foundry's MPT (with learned positions, as its benchmarks count them) calls ``torch.nn.GELU``, and a fused cross
entropy that makes no copy of the logits in fp32. Nothing else differs that takes time or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from bench.core.typed_config import OneOf
from bench.models.gpt import ACTIVATIONS, GPTFamily

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MPTFamily(GPTFamily):
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu"

    can_divide_layers: ClassVar[bool] = False  # its cross entropy takes whole logits

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in the format of the logits, whose gradient is all that it allocates."""
        from bench.models.fused_cross_entropy import FusedCrossEntropy

        return FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
