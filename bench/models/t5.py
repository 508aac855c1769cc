"""T5: encoder and decoder, relative position bias, one embedding shared by encoder, decoder and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from bench.models.base import LENGTH, Batch, Blocks, Dropout, Family, FlopCount, Heads, Width, Words
from bench.models.division import SEQUENCE, Division, first_argument_divided
from bench.models.stages import Stage, twin

DECODER_START = 0
"""T5 starts its decoder with the padding token."""


@dataclass(frozen=True)
class T5(Family):
    """Shape of a T5 of version 1.0: ReLU feed-forward, no biases, tied embeddings."""

    vocabulary_size: Words
    d_model: Width
    d_ff: Width
    d_kv: Width
    num_heads: Heads
    num_encoder_layers: Blocks
    num_decoder_layers: Blocks
    decoder_sequence_length: Annotated[int | None, LENGTH] = None
    """Tokens per sequence in the decoder; null for the encoder's length."""
    dropout: Dropout = 0.0

    imports: ClassVar[tuple[str, ...]] = ("transformers.models.t5.modeling_t5",)
    divides: ClassVar[bool] = True

    def build(self) -> nn.Module:
        """`T5ForConditionalGeneration` on meta."""
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

        config = T5Config(
            vocab_size=self.vocabulary_size,
            d_model=self.d_model,
            d_ff=self.d_ff,
            d_kv=self.d_kv,
            num_heads=self.num_heads,
            num_layers=self.num_encoder_layers,
            num_decoder_layers=self.num_decoder_layers,
            dropout_rate=self.dropout,
            feed_forward_proj="relu",
            tie_word_embeddings=True,
            decoder_start_token_id=DECODER_START,
            pad_token_id=DECODER_START,
            use_cache=False,
            attn_implementation=self.attention,
        )
        with torch.device("meta"):
            model = T5ForConditionalGeneration(config)
        model.tie_weights()
        return model

    def init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """Mesh TensorFlow's initialisation, as in the T5 reference implementation."""
        layer = name.rsplit(".", 2)[-2]
        if "layer_norm" in layer:
            return None
        inner = self.num_heads * self.d_kv
        return {
            "shared": 1.0,
            "q": (self.d_model * self.d_kv) ** -0.5,
            "o": inner**-0.5,
            "wo": self.d_ff**-0.5,
        }.get(layer, self.d_model**-0.5)

    def batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Random source and target tokens, without padding."""
        lengths = [sequence_length, self._decoder_length(sequence_length)]
        tokens = torch.randint(1, self.vocabulary_size, (num_sequences, sum(lengths)), generator=generator)
        source, target = (part.contiguous() for part in tokens.split(lengths, dim=1))
        shifted = nn.functional.pad(target[:, :-1], (1, 0), value=DECODER_START)
        return Batch({"input_ids": source, "decoder_input_ids": shifted}, labels=target)

    def shortened(self, blocks: int) -> T5:
        """Fewer layers in encoder and decoder."""
        return dataclasses.replace(
            self,
            num_encoder_layers=min(blocks, self.num_encoder_layers),
            num_decoder_layers=min(blocks, self.num_decoder_layers),
        )

    def block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The encoder's blocks, then the decoder's."""
        return [model.get_submodule("encoder.block"), model.get_submodule("decoder.block")]  # type: ignore[list-item]

    def chain(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Hand hidden states and position biases from block to block, as `T5Stack` does."""
        hidden, mask, bias, encoder_hidden, encoder_mask, cross_bias = args
        for block in blocks:
            hidden, bias, cross_bias = block(hidden, mask, bias, encoder_hidden, encoder_mask, cross_bias, **kwargs)
        return hidden, bias, cross_bias

    @property
    def num_blocks(self) -> int:
        """The encoder's, then the decoder's."""
        return self.num_encoder_layers + self.num_decoder_layers

    def stage(self, model: nn.Module, blocks: range) -> Stage:
        """Encoder and decoder begin with the embedding and end with a norm; the decoder ends with the head, too."""
        return T5Stage(self, model, blocks)

    def handed_over(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        """Hidden states of the encoder or, in the decoder, its own and behind them the encoder's output."""
        source, target = (sequence_length, self.d_model), (self._decoder_length(sequence_length), self.d_model)
        return (source,) if block <= self.num_encoder_layers else (target, source)

    def flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Encoder and decoder apart; the decoder's cross-attention projects the encoder's output.

        The scores of all heads take ``2 * queries * keys * heads * d_kv``, their product with the values as much.
        """
        source, target = sequence_length, self._decoder_length(sequence_length)
        inner = self.num_heads * self.d_kv
        projection = 2 * self.d_model * inner
        feed_forward = 2 * self.d_model * self.d_ff
        encoder_linear = source * (4 * projection + 2 * feed_forward)
        decoder_linear = target * (4 * projection + 2 * feed_forward) + 2 * (target + source) * projection
        encoder_attention = 4 * source * source * inner
        decoder_attention = 4 * (target * target + target * source) * inner
        return FlopCount(
            blocks_linear=self.num_encoder_layers * encoder_linear + self.num_decoder_layers * decoder_linear,
            blocks_attention=self.num_encoder_layers * encoder_attention + self.num_decoder_layers * decoder_attention,
            blocks_final=(self.num_encoder_layers * source + self.num_decoder_layers * target) * feed_forward,
            outside=2 * target * self.d_model * self.vocabulary_size,
        )

    def tokens_per_sequence(self, sequence_length: int) -> int:
        """Encoder and decoder tokens together."""
        return sequence_length + self._decoder_length(sequence_length)

    def check_sequence_length(self, sequence_length: int) -> None:
        """Relative positions have no upper limit."""

    def divisible(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, and the width of the feed-forward layer; the last rank's part of the vocabulary may be smaller."""
        sizes = {"model.num_heads": self.num_heads, "model.d_ff": self.d_ff}
        if sequence_parallel:
            sizes["sequence_length"] = sequence_length
            if self.decoder_sequence_length is not None:
                sizes["model.decoder_sequence_length"] = self.decoder_sequence_length
        return sizes

    def division(self, model: nn.Module, *, sequence_parallel: bool) -> Division:
        """Attention by heads, their position biases with them; the feed-forward layer by its width.

        The encoder's output is made whole once, for the cross-attention of all decoder blocks.
        """
        found = Division()
        hidden = SEQUENCE if sequence_parallel else Replicate()
        whole = Replicate()
        for name, module in model.named_modules():
            layer = name.rpartition(".")[2]
            if layer in ("shared", "embed_tokens"):
                found.styles.append((module, RowwiseParallel(input_layouts=whole)))
            elif layer in ("SelfAttention", "EncDecAttention"):
                # Once for query, key and value, so that their gradients are added up before they are sent.
                found.styles.append((module, PrepareModuleInput(input_layouts=hidden, desired_input_layouts=whole)))
                found.counts += [(module, "n_heads"), (module, "inner_dim")]
            elif layer in ("q", "k", "v", "relative_attention_bias"):
                found.styles.append((module, ColwiseParallel()))
            elif layer == "wi":
                found.styles.append((module, ColwiseParallel(input_layouts=hidden)))
            elif layer in ("o", "wo"):
                found.styles.append((module, RowwiseParallel(output_layouts=hidden)))
            elif layer in ("layer_norm", "final_layer_norm") and sequence_parallel:
                found.styles.append((module, SequenceParallel()))
            if name == "encoder.final_layer_norm":
                together = PrepareModuleOutput(
                    output_layouts=hidden, desired_output_layouts=whole, use_local_output=False
                )
                found.styles.append((module, together))
            if layer == "lm_head":
                logits = ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False)
                found.styles.append((module, logits))
        if sequence_parallel:
            for blocks in self.block_lists(model):
                found.styles.append((blocks[0], first_argument_divided(6)))
        return found

    def fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The feed-forward output projections, which overflow in fp16."""
        return [module for name, module in model.named_modules() if name.endswith("DenseReluDense.wo")]

    def _decoder_length(self, sequence_length: int) -> int:
        return self.decoder_sequence_length or sequence_length


class T5Stage(Stage):
    """Some blocks of a `T5ForConditionalGeneration`, called as `T5Stack.forward` calls them.

    Stages that run decoder blocks hand the encoder's output on, through which its gradients come back. The position
    bias, which the first block of encoder and decoder computes for all others, is computed again in every stage, from a
    copy of its table.
    """

    def __init__(self, family: T5, model: nn.Module, blocks: range) -> None:
        super().__init__()
        whole: Any = model
        self._family, self._configs = family, {"encoder": whole.encoder.config, "decoder": whole.decoder.config}
        boundary, end = family.num_encoder_layers, family.num_blocks
        encoder = range(blocks.start, min(blocks.stop, boundary))
        decoder = range(max(blocks.start, boundary) - boundary, blocks.stop - boundary)
        self._ends, self._scales = blocks.stop == end, whole.config.scale_decoder_outputs
        self.dropout = nn.Dropout(family.dropout)
        self.encoder = _first_with_bias(whole.encoder.block, encoder)
        self.encoder_embedding = whole.encoder.embed_tokens if blocks.start == 0 else None
        self.encoder_norm = whole.encoder.final_layer_norm if boundary - 1 in encoder else None
        self.decoder = _first_with_bias(whole.decoder.block, decoder)
        self.decoder_embedding = whole.decoder.embed_tokens if 0 in decoder else None
        if self._ends:
            self.decoder_norm, self.lm_head = whole.decoder.final_layer_norm, whole.lm_head
        self.block_lists = [blocks for blocks in (self.encoder, self.decoder) if len(blocks)]

    def forward(self, *handed_over: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The encoder's hidden states; the decoder's and the encoder's output; or logits."""
        *hidden, received = handed_over or (None,)
        encoded = self._encode(received, inputs["input_ids"]) if len(self.encoder) else received
        assert encoded is not None
        if not len(self.decoder):
            return (encoded,)
        if not len(self.encoder):
            encoded = encoded.view_as(encoded)  # autocast keeps casts of leaves, and checkpointing then misses some
        decoded = self._decode(hidden[0] if hidden else None, encoded, inputs["decoder_input_ids"])
        return self._logits(decoded) if self._ends else (decoded, encoded)

    def _encode(self, hidden: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.masking_utils import create_bidirectional_mask

        if self.encoder_embedding is not None:
            hidden = self.dropout(self.encoder_embedding(tokens))
        assert hidden is not None
        mask = create_bidirectional_mask(config=self._configs["encoder"], inputs_embeds=hidden, attention_mask=None)
        hidden, *_ = self._family.chain(list(self.encoder), hidden, mask, None, None, None, None, past_key_values=None)
        return hidden if self.encoder_norm is None else self.dropout(self.encoder_norm(hidden))

    def _decode(self, hidden: torch.Tensor | None, encoded: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

        if self.decoder_embedding is not None:
            hidden = self.dropout(self.decoder_embedding(tokens))
        assert hidden is not None
        masks = {"config": self._configs["decoder"], "inputs_embeds": hidden, "attention_mask": None}
        causal = create_causal_mask(**masks, past_key_values=None)
        across = create_bidirectional_mask(**masks, encoder_hidden_states=encoded)
        hidden, *_ = self._family.chain(
            list(self.decoder), hidden, causal, None, encoded, across, None, past_key_values=None
        )
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.decoder_norm(hidden))
        if self._scales:
            hidden = hidden * self._family.d_model**-0.5
        return self.lm_head(hidden)


def _first_with_bias(blocks: nn.ModuleList, chosen: range) -> nn.ModuleList:
    """Some of the blocks, the first of which computes the position bias that the others use."""
    found: list[Any] = [blocks[index] for index in chosen]
    if chosen and chosen.start > 0:
        origin: Any = blocks[0]
        attention = found[0].layer[0].SelfAttention
        attention.relative_attention_bias = twin(origin.layer[0].SelfAttention.relative_attention_bias)
        attention.has_relative_attention_bias = True
    return nn.ModuleList(found)
