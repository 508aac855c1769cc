"""minGPT of 2020, what the FSDP paper trained at 175B: a GPT with ``torch.nn.GELU`` and a head of its own.

https://github.com/karpathy/minGPT/blob/08c08d8db0475a1cea334a25bf98dee51972180c/mingpt/model.py. What differs from
GPT-2 in transformers: the activation function is one kernel, the head over the vocabulary shares nothing with the
embedding. The causal mask that minGPT keeps in every block is a choice (``model.causal_masks``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from bench.core.typed_config import OneOf
from bench.models.gpt import ACTIVATIONS, GPTFamily

if TYPE_CHECKING:
    import torch
    from torch import nn

MASK_NAME = "mask"


@dataclass(frozen=True)
class MinGPTFamily(GPTFamily):
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu"
    causal_masks: bool = False
    """Every block holds a causal mask in fp32, block_size x block_size, as minGPT's do. Attention makes its own."""

    def build_model(self) -> nn.Module:
        """On meta."""
        import torch
        from torch import nn

        model = super().build_model()
        model.lm_head = nn.Linear(self.hidden_size, self.vocabulary_size, bias=False, device="meta")
        if self.causal_masks:
            (blocks,) = self.find_block_lists(model)
            for block in blocks:
                mask = torch.empty(self.block_size, self.block_size, device="meta")
                block.register_buffer(MASK_NAME, mask, persistent=False)
        return model

    def build_buffer(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """A block's mask, ones where a token (row) sees another (column)."""
        import torch

        if name != MASK_NAME:
            return super().build_buffer(module, name, device)
        return torch.ones(self.block_size, self.block_size, device=device).tril_()
