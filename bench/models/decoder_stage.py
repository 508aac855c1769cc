"""A stage of a causal language model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bench.models.pipeline_stage import PipelineStageModule


class DecoderPipelineStage(PipelineStageModule):
    """Some blocks of a causal language model, called as its own forward pass calls them.

    It is made of copies of the model and of its decoder that have other blocks; all further modules are the model's.
    """

    def __init__(self, model: Any, blocks: range) -> None:
        super().__init__()
        decoder = _copy_module(model.get_decoder())
        self._has_embedding, self._has_head = blocks.start == 0, blocks.stop == len(decoder.layers)
        decoder.layers = nn.ModuleList(decoder.layers[index] for index in blocks)
        decoder.config = copy.copy(decoder.config)
        if getattr(decoder.config, "layer_types", None) is not None:
            decoder.config.layer_types = [decoder.config.layer_types[index] for index in blocks]
        if not self._has_embedding:
            del decoder.embed_tokens
        if self._has_head:
            self.model = _copy_module(model)
            self.model.model = decoder
        else:
            decoder.norm = nn.Identity()
            self.model = decoder
        self.block_lists = (decoder.layers,)

    def forward(self, *stage_inputs: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """Hidden states, or logits."""
        if not self._has_embedding:
            inputs = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
            inputs["inputs_embeds"] = stage_inputs[0]
        outputs = self.model(**inputs)
        return outputs["logits"] if self._has_head else (outputs["last_hidden_state"],)


def _copy_module(module: nn.Module) -> Any:
    """A module with the same parts, of which others can take the place."""
    copied_module = copy.copy(module)
    copied_module._modules = dict(module._modules)
    return copied_module
