"""A stage of a T5."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.models.pipeline_stage import PipelineStageModule, copy_sharing_parameters
from bench.models.t5 import T5Family


class T5PipelineStage(PipelineStageModule):
    """Some blocks of a `T5ForConditionalGeneration`, called as `T5Stack.forward` calls them.

    Stages that run decoder blocks hand the encoder's output on, through which its gradients come back. The position
    bias, which the first block of encoder and decoder computes for all others, is computed again in every stage, from a
    copy of its table.
    """

    def __init__(self, family: T5Family, model: nn.Module, blocks: range) -> None:
        super().__init__()
        t5_model: Any = model
        self._family, self._configs = family, {"encoder": t5_model.encoder.config, "decoder": t5_model.decoder.config}
        num_encoder_layers, num_blocks = family.num_encoder_layers, family.num_blocks
        encoder = range(blocks.start, min(blocks.stop, num_encoder_layers))
        decoder = range(max(blocks.start, num_encoder_layers) - num_encoder_layers, blocks.stop - num_encoder_layers)
        self._has_head, self._scales_decoder_outputs = blocks.stop == num_blocks, t5_model.config.scale_decoder_outputs
        self.dropout = nn.Dropout(family.dropout)
        self.encoder = _select_blocks_with_bias(t5_model.encoder.block, encoder)
        self.encoder_embedding = t5_model.encoder.embed_tokens if blocks.start == 0 else None
        self.encoder_norm = t5_model.encoder.final_layer_norm if num_encoder_layers - 1 in encoder else None
        self.decoder = _select_blocks_with_bias(t5_model.decoder.block, decoder)
        self.decoder_embedding = t5_model.decoder.embed_tokens if 0 in decoder else None
        if self._has_head:
            self.decoder_norm, self.lm_head = t5_model.decoder.final_layer_norm, t5_model.lm_head
        self.block_lists = [blocks for blocks in (self.encoder, self.decoder) if len(blocks)]

    def forward(self, *stage_inputs: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The encoder's hidden states; the decoder's and the encoder's output; or logits."""
        *hidden, encoder_hidden = stage_inputs or (None,)
        encoder_output = self._run_encoder(encoder_hidden, inputs["input_ids"]) if len(self.encoder) else encoder_hidden
        assert encoder_output is not None
        if not len(self.decoder):
            return (encoder_output,)
        if not len(self.encoder):
            encoder_output = encoder_output.view_as(
                encoder_output
            )  # autocast keeps casts of leaves, and checkpointing then misses some
        decoder_output = self._run_decoder(hidden[0] if hidden else None, encoder_output, inputs["decoder_input_ids"])
        return self._compute_logits(decoder_output) if self._has_head else (decoder_output, encoder_output)

    def _run_encoder(self, hidden: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.masking_utils import create_bidirectional_mask

        if self.encoder_embedding is not None:
            hidden = self.dropout(self.encoder_embedding(tokens))
        assert hidden is not None
        mask = create_bidirectional_mask(config=self._configs["encoder"], inputs_embeds=hidden, attention_mask=None)
        hidden, *_ = self._family.run_blocks(
            list(self.encoder), hidden, mask, None, None, None, None, past_key_values=None
        )
        return hidden if self.encoder_norm is None else self.dropout(self.encoder_norm(hidden))

    def _run_decoder(
        self, hidden: torch.Tensor | None, encoder_output: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

        if self.decoder_embedding is not None:
            hidden = self.dropout(self.decoder_embedding(tokens))
        assert hidden is not None
        mask_options = {"config": self._configs["decoder"], "inputs_embeds": hidden, "attention_mask": None}
        causal_mask = create_causal_mask(**mask_options, past_key_values=None)
        cross_attention_mask = create_bidirectional_mask(**mask_options, encoder_hidden_states=encoder_output)
        hidden, *_ = self._family.run_blocks(
            list(self.decoder),
            hidden,
            causal_mask,
            None,
            encoder_output,
            cross_attention_mask,
            None,
            past_key_values=None,
        )
        return hidden

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.decoder_norm(hidden))
        if self._scales_decoder_outputs:
            hidden = hidden * self._family.d_model**-0.5
        return self.lm_head(hidden)


def _select_blocks_with_bias(blocks: nn.ModuleList, indices: range) -> nn.ModuleList:
    """Some of the blocks, the first of which computes the position bias that the others use."""
    selected_blocks: list[Any] = [blocks[index] for index in indices]
    if indices and indices.start > 0:
        first_block: Any = blocks[0]
        attention = selected_blocks[0].layer[0].SelfAttention
        attention.relative_attention_bias = copy_sharing_parameters(
            first_block.layer[0].SelfAttention.relative_attention_bias
        )
        attention.has_relative_attention_bias = True
    return nn.ModuleList(selected_blocks)
