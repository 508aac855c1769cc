"""Decoders as transformers builds them, divided among ranks: layers by tensor parallelism, blocks into stages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from bench.models.division import SEQUENCE_SHARD, LayerDivision, PipelineStageModule, build_sequence_split

HEAD_DIM = 2
"""The dimension of queries and keys, before they are transposed, that counts heads."""


def build_decoder_division(model: nn.Module, blocks: nn.ModuleList, *, sequence_parallel: bool) -> LayerDivision:
    """Attention by heads, of which those of keys and values may be fewer; the gated feed-forward layer by its width.

    For models whose layers are called as Llama's. Experts, and what routes tokens to them, are left whole.
    """
    division = LayerDivision()
    hidden_layout = SEQUENCE_SHARD if sequence_parallel else Replicate()
    for name, module in model.named_modules():
        layer = name.rpartition(".")[2]
        if layer == "embed_tokens":
            division.parallel_styles.append((module, RowwiseParallel(input_layouts=Replicate())))
        elif layer == "self_attn":
            # Once for query, key and value, so that their gradients are added up before they are sent.
            gathered_input = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": hidden_layout},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            division.parallel_styles.append((module, gathered_input))
        elif layer == "mlp" and not hasattr(module, "experts"):
            gathered_input = PrepareModuleInput(input_layouts=hidden_layout, desired_input_layouts=Replicate())
            division.parallel_styles.append((module, gathered_input))
        elif layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            division.parallel_styles.append((module, ColwiseParallel()))
        elif layer in ("o_proj", "down_proj"):
            division.parallel_styles.append((module, RowwiseParallel(output_layouts=hidden_layout)))
        elif layer in ("q_norm", "k_norm"):
            heads_style = SequenceParallel(sequence_dim=HEAD_DIM, use_local_output=True)
            division.parallel_styles.append((module, heads_style))
        elif layer.endswith("norm") and sequence_parallel:
            division.parallel_styles.append((module, SequenceParallel(use_local_output=True)))
        elif layer == "lm_head":
            logits_style = ColwiseParallel(
                input_layouts=hidden_layout, output_layouts=Shard(-1), use_local_output=False
            )
            division.parallel_styles.append((module, logits_style))
    if sequence_parallel:
        division.parallel_styles.append((blocks[0], build_sequence_split(1)))
    return division


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
