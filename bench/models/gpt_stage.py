"""A stage of a GPT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.models.pipeline_stage import PipelineStageModule


class GPTPipelineStage(PipelineStageModule):
    """Some blocks of a `GPT2LMHeadModel`, called as `GPT2Model.forward` calls them."""

    def __init__(self, model: nn.Module, blocks: range) -> None:
        super().__init__()
        transformer: Any = model.get_submodule("transformer")
        self._config = transformer.config
        self._has_embedding, self._has_head = blocks.start == 0, blocks.stop == len(transformer.h)
        if self._has_embedding:
            self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop
        self.h = nn.ModuleList(transformer.h[index] for index in blocks)
        if self._has_head:
            self.ln_f, self.lm_head = transformer.ln_f, model.get_submodule("lm_head")
        self.block_lists = (self.h,)

    def forward(self, *stage_inputs: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        from transformers.masking_utils import create_causal_mask

        tokens = inputs["input_ids"]
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        hidden = self.drop(self.wte(tokens) + self.wpe(positions)) if self._has_embedding else stage_inputs[0]
        causal_mask = create_causal_mask(
            config=self._config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        for block in self.h:
            hidden = block(hidden, None, causal_mask, None, encoder_attention_mask=None, use_cache=False)
        return self.lm_head(self.ln_f(hidden)) if self._has_head else (hidden,)
