"""minGPT of 2020, what the FSDP paper trained at 175B: a GPT with ``torch.nn.GELU`` and a head of its own.

https://github.com/karpathy/minGPT/blob/08c08d8db0475a1cea334a25bf98dee51972180c/mingpt/model.py. What differs from
GPT-2 in transformers: the activation function is one kernel, and the head over the vocabulary shares nothing with the
embedding. (The causal mask that minGPT keeps in every block is not rebuilt.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from bench.core.typed_config import OneOf
from bench.models.gpt import ACTIVATIONS, GPTFamily


@dataclass(frozen=True)
class MinGPTFamily(GPTFamily):
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu"

    def build_model(self) -> nn.Module:
        """On meta."""
        model = super().build_model()
        model.lm_head = nn.Linear(self.hidden_size, self.vocabulary_size, bias=False, device="meta")
        return model
