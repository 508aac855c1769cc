"""MPT and minGPT: a GPT whose activation function is one kernel.

GPT-2 in transformers computes the tanh approximation of GELU from elementary operators, each a kernel that reads and
writes the widest tensor of the block. llm-foundry's MPT (configured with learned positions, as its benchmarks count
them) and minGPT of 2020, what the FSDP paper trained, call ``torch.nn.GELU``: one kernel. Nothing else differs that
takes time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bench.models.gpt import GPT


@dataclass(frozen=True)
class MPT(GPT):
    """Shape of an MPT, or a minGPT."""

    def build(self) -> nn.Module:
        """A GPT with ``torch.nn.GELU`` in every block, on meta."""
        model = super().build()
        for block in self.block_lists(model)[0]:
            block.get_submodule("mlp").act = nn.GELU()
        return model
