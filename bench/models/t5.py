"""T5: encoder and decoder, relative position bias, one embedding shared by encoder, decoder and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core.typed_config import OneOf
from bench.models.base import (
    SEQUENCE_LENGTH_RANGE,
    Batch,
    BlockCount,
    DropoutRate,
    Family,
    FlopCount,
    HeadCount,
    LayerWidth,
    TokenCount,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule

DECODER_START_TOKEN = 0
"""T5 starts its decoder with the padding token."""


FEED_FORWARDS = ("relu", "gated-gelu", "gated-silu")


@dataclass(frozen=True)
class T5Family(Family):
    """Shape of a T5, which has no biases: of version 1.0 or, with a gated feed-forward layer and a head of its own, of
    1.1, mT5 and UL2."""

    vocabulary_size: TokenCount
    d_model: LayerWidth
    d_ff: LayerWidth
    d_kv: LayerWidth
    num_heads: HeadCount
    num_encoder_layers: BlockCount
    num_decoder_layers: BlockCount
    decoder_sequence_length: Annotated[int | None, SEQUENCE_LENGTH_RANGE] = None
    """Tokens per sequence in the decoder; null for the encoder's length."""
    dropout: DropoutRate = 0.0
    feed_forward: Annotated[str, OneOf(*FEED_FORWARDS)] = "relu"
    """The feed-forward layer, as transformers calls it; a gated one has two matrices where others have one."""
    tie_embeddings: bool = True
    """The head over the vocabulary shares the embedding's weight."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.t5.modeling_t5",)
    can_divide_layers: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    def build_model(self) -> nn.Module:
        """`T5ForConditionalGeneration` on meta."""
        from torch import nn
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

        from bench.models.pretrained_modules import build_on_meta

        config = T5Config(
            vocab_size=self.vocabulary_size,
            d_model=self.d_model,
            d_ff=self.d_ff,
            d_kv=self.d_kv,
            num_heads=self.num_heads,
            num_layers=self.num_encoder_layers,
            num_decoder_layers=self.num_decoder_layers,
            dropout_rate=self.dropout,
            feed_forward_proj=self.feed_forward,
            tie_word_embeddings=self.tie_embeddings,
            decoder_start_token_id=DECODER_START_TOKEN,
            pad_token_id=DECODER_START_TOKEN,
            use_cache=False,
            attn_implementation=self.attention,
        )
        with build_on_meta():
            model = T5ForConditionalGeneration(config)
        model.tie_weights()
        if not self.tie_embeddings:  # which transformers takes for how logits are scaled alone
            model.lm_head = nn.Linear(self.d_model, self.vocabulary_size, bias=False, device="meta")
        return model

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """Mesh TensorFlow's initialisation, as in the T5 reference implementation."""
        layer = name.rsplit(".", 2)[-2]
        if "layer_norm" in layer:
            return None
        inner_width = self.num_heads * self.d_kv
        return {
            "shared": 1.0,
            "q": (self.d_model * self.d_kv) ** -0.5,
            "o": inner_width**-0.5,
            "wo": self.d_ff**-0.5,
        }.get(layer, self.d_model**-0.5)

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Random source and target tokens, without padding."""
        import torch
        from torch import nn

        lengths = [sequence_length, self._find_decoder_length(sequence_length)]
        tokens = torch.randint(1, self.vocabulary_size, (num_sequences, sum(lengths)), generator=generator)
        source, target = (tokens_part.contiguous() for tokens_part in tokens.split(lengths, dim=1))
        decoder_inputs = nn.functional.pad(target[:, :-1], (1, 0), value=DECODER_START_TOKEN)
        return Batch({"input_ids": source, "decoder_input_ids": decoder_inputs}, labels=target)

    def limit_blocks(self, max_blocks: int) -> T5Family:
        """Fewer layers in encoder and decoder."""
        return dataclasses.replace(
            self,
            num_encoder_layers=min(max_blocks, self.num_encoder_layers),
            num_decoder_layers=min(max_blocks, self.num_decoder_layers),
        )

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The encoder's blocks, then the decoder's."""
        return [model.get_submodule("encoder.block"), model.get_submodule("decoder.block")]  # type: ignore[list-item]

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Hand hidden states and position biases from block to block, as `T5Stack` does."""
        hidden, mask, bias, encoder_hidden, encoder_mask, cross_bias = args
        for block in blocks:
            hidden, bias, cross_bias = block(hidden, mask, bias, encoder_hidden, encoder_mask, cross_bias, **kwargs)
        return hidden, bias, cross_bias

    @property
    def num_blocks(self) -> int:
        """The encoder's, then the decoder's."""
        return self.num_encoder_layers + self.num_decoder_layers

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """Encoder and decoder begin with the embedding and end with a norm; the decoder ends with the head, too."""
        from bench.models.t5_stage import T5PipelineStage

        return T5PipelineStage(self, model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        """Hidden states of the encoder or, in the decoder, its own and behind them the encoder's output."""
        source, target = (sequence_length, self.d_model), (self._find_decoder_length(sequence_length), self.d_model)
        return (source,) if block <= self.num_encoder_layers else (target, source)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Encoder and decoder apart; the decoder's cross-attention projects the encoder's output.

        The scores of all heads take ``2 * queries * keys * heads * d_kv``, their product with the values as much.
        """
        source, target = sequence_length, self._find_decoder_length(sequence_length)
        inner_width = self.num_heads * self.d_kv
        projection = 2 * self.d_model * inner_width
        feed_forward = 2 * self.d_model * self.d_ff
        num_matrices = 3 if self.feed_forward.startswith("gated") else 2
        encoder_linear = source * (4 * projection + num_matrices * feed_forward)
        decoder_linear = target * (4 * projection + num_matrices * feed_forward) + 2 * (target + source) * projection
        encoder_attention = 4 * source * source * inner_width
        decoder_attention = 4 * (target * target + target * source) * inner_width
        return FlopCount(
            blocks_linear=self.num_encoder_layers * encoder_linear + self.num_decoder_layers * decoder_linear,
            blocks_attention=self.num_encoder_layers * encoder_attention + self.num_decoder_layers * decoder_attention,
            causal_attention=self.num_decoder_layers * 4 * target * target * inner_width,
            blocks_last_linear=(self.num_encoder_layers * source + self.num_decoder_layers * target) * feed_forward,
            outside_blocks=2 * target * self.d_model * self.vocabulary_size,
            recomputed_by_block=(
                (encoder_linear + encoder_attention - source * feed_forward,) * self.num_encoder_layers,
                (decoder_linear + decoder_attention - target * feed_forward,) * self.num_decoder_layers,
            ),
        )

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Encoder and decoder tokens together."""
        return sequence_length + self._find_decoder_length(sequence_length)

    def check_sequence_length(self, sequence_length: int) -> None:
        """Relative positions have no upper limit."""

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, and the width of the feed-forward layer; the last rank's part of the vocabulary may be smaller."""
        sizes = {"model.num_heads": self.num_heads, "model.d_ff": self.d_ff}
        if sequence_parallel:
            sizes["sequence_length"] = sequence_length
            if self.decoder_sequence_length is not None:
                sizes["model.decoder_sequence_length"] = self.decoder_sequence_length
        return sizes

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        """Attention by heads, their position biases with them; the feed-forward layer by its width.

        The encoder's output is made whole once, for the cross-attention of all decoder blocks.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        from bench.models.division import SEQUENCE_SHARD, LayerDivision, RowwiseEmbedding, build_sequence_split

        layer_division = LayerDivision()
        hidden_layout = SEQUENCE_SHARD if sequence_parallel else Replicate()
        replicated = Replicate()
        for name, module in model.named_modules():
            layer = name.rpartition(".")[2]
            if layer in ("shared", "embed_tokens"):
                layer_division.parallel_styles.append((module, RowwiseEmbedding()))
            elif layer in ("SelfAttention", "EncDecAttention"):
                # Once for query, key and value, so that their gradients are added up before they are sent.
                layer_division.parallel_styles.append(
                    (module, PrepareModuleInput(input_layouts=hidden_layout, desired_input_layouts=replicated))
                )
                layer_division.divided_attributes += [(module, "n_heads"), (module, "inner_dim")]
            elif layer in ("q", "k", "v", "relative_attention_bias"):
                layer_division.parallel_styles.append((module, ColwiseParallel()))
            elif layer == "DenseReluDense":
                layer_division.parallel_styles.append(
                    (module, PrepareModuleInput(input_layouts=hidden_layout, desired_input_layouts=replicated))
                )
            elif layer in ("wi", "wi_0", "wi_1"):
                layer_division.parallel_styles.append((module, ColwiseParallel()))
            elif layer in ("o", "wo"):
                layer_division.parallel_styles.append((module, RowwiseParallel(output_layouts=hidden_layout)))
            elif layer in ("layer_norm", "final_layer_norm") and sequence_parallel:
                layer_division.parallel_styles.append((module, SequenceParallel()))
            if name == "encoder.final_layer_norm":
                output_style = PrepareModuleOutput(
                    output_layouts=hidden_layout, desired_output_layouts=replicated, use_local_output=False
                )
                layer_division.parallel_styles.append((module, output_style))
            if layer == "lm_head":
                logits_style = ColwiseParallel(
                    input_layouts=hidden_layout, output_layouts=Shard(-1), use_local_output=False
                )
                layer_division.parallel_styles.append((module, logits_style))
        if sequence_parallel:
            for blocks in self.find_block_lists(model):
                layer_division.parallel_styles.append((blocks[0], build_sequence_split(6)))
        return layer_division

    def find_undivided_sequence_reason(self) -> str:
        return "whose attention adds a bias for each pair of positions, which no form of context parallelism here has"

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """The feed-forward output projections, which overflow in fp16."""
        return [module for name, module in model.named_modules() if name.endswith("DenseReluDense.wo")]

    def _find_decoder_length(self, sequence_length: int) -> int:
        return self.decoder_sequence_length or sequence_length
