"""GPT-NeoX, as somebody outside would add it: rotary embeddings, whose frequencies are buffers; a head of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from bench.models import Batch
from bench.models.base import IGNORED_LABEL, Family, FlopCount
from bench.models.materialize import fill_buffers
from bench.models.pretrained import ignore_packed_sequences


@dataclass(frozen=True)
class NeoX(Family):
    """Shape of a GPT-NeoX."""

    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    block_size: int
    buffers_filled: bool = False
    """The model comes with its buffers, not on meta."""
    dropout: float = 0.0
    activation: str = "gelu"

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.gpt_neox.modeling_gpt_neox",)

    def build_model(self) -> nn.Module:
        """`GPTNeoXForCausalLM` on meta."""
        from transformers import GPTNeoXConfig
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM

        config = GPTNeoXConfig(
            vocab_size=self.vocabulary_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.block_size,
            hidden_act=self.activation,
            attention_dropout=self.dropout,
            use_cache=False,
            attn_implementation=self.attention,
        )
        ignore_packed_sequences()
        with torch.device("meta"):
            model = GPTNeoXForCausalLM(config)
        if self.buffers_filled:
            for module in model.modules():
                fill_buffers(module, self, torch.device("cpu"))
        return model

    def build_buffer(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """The rotary embedding's frequencies, and a copy of them: a quarter of each head is rotated."""
        rotated = self.hidden_size // self.num_heads // 4
        return 1.0 / 10_000 ** (torch.arange(0, rotated, 2, device=device) / rotated)

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """Ones in norms."""
        if name.endswith("bias"):
            return 0.0
        return None if "norm" in name else 0.02

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Random tokens."""
        tokens = torch.randint(0, self.vocabulary_size, (num_sequences, sequence_length), generator=generator)
        return Batch({"input_ids": tokens}, labels=nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL))

    def limit_blocks(self, max_blocks: int) -> NeoX:
        """Fewer layers."""
        return dataclasses.replace(self, num_layers=min(max_blocks, self.num_layers))

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The one list of blocks."""
        return [model.get_submodule("gpt_neox.layers")]  # type: ignore[list-item]

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Of the products with weights, and of attention's."""
        length, hidden = sequence_length, self.hidden_size
        final = 2 * length * hidden * self.intermediate_size
        return FlopCount(
            blocks_linear=self.num_layers * (8 * length * hidden * hidden + 2 * final),
            blocks_attention=self.num_layers * 4 * length**2 * hidden,
            blocks_last_linear=self.num_layers * final,
            outside_blocks=2 * length * hidden * self.vocabulary_size,
        )

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Every token is read once."""
        return sequence_length

    def check_sequence_length(self, sequence_length: int) -> None:
        """Any."""
