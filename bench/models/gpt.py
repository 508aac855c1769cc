"""GPT: a decoder with learned positions and a head tied to the embedding, GPT-2's architecture at any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from bench.core.errors import invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.models.base import (
    IGNORED_LABEL,
    Batch,
    BlockCount,
    DropoutRate,
    Family,
    FlopCount,
    HeadCount,
    LayerWidth,
    TokenCount,
    find_undivided_attention_reason,
    require_predicted_positions,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new")


@dataclass(frozen=True)
class GPTFamily(Family):
    vocabulary_size: TokenCount
    block_size: TokenCount
    """Longest sequence: number of learned positions."""
    hidden_size: LayerWidth
    num_layers: BlockCount
    num_heads: HeadCount
    intermediate_size: Annotated[int | None, Within(1, 2**22)] = None
    """Width of the feed-forward layer; null for 4 x hidden_size."""
    dropout: DropoutRate = 0.0
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu_new"
    """Of the feed-forward layer, as transformers calls it: gelu, gelu_pytorch_tanh (each one kernel), or gelu_new, the
    same tanh approximation of elementary operators, eight kernels that read and write the widest tensor of a block."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.models.gpt2.modeling_gpt2",)
    can_divide_layers: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise invalid_value_error(
                "model.num_heads", self.num_heads, f"a divisor of model.hidden_size={self.hidden_size}"
            )

    def build_model(self) -> nn.Module:
        """`GPT2LMHeadModel` on meta."""
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

        from bench.models.pretrained import ignore_packed_sequences
        from bench.models.pretrained_modules import build_on_meta

        config = GPT2Config(
            vocab_size=self.vocabulary_size,
            n_positions=self.block_size,
            n_embd=self.hidden_size,
            n_layer=self.num_layers,
            n_head=self.num_heads,
            n_inner=self._intermediate_width,
            activation_function=self.activation,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            attn_implementation=self.attention,
        )
        ignore_packed_sequences()
        with build_on_meta():
            model = GPT2LMHeadModel(config)
        model.tie_weights()
        model.loss_type = "ForCausalLM"  # the name of this class tells transformers nothing, and it warns
        return model

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """GPT-2's initialisation: 0.02, and 0.02 / sqrt(2 layers) where a residual branch ends."""
        if name.endswith(".bias"):
            return 0.0
        layer = name.rsplit(".", 2)[-2]
        if layer.startswith("ln_"):
            return None
        return 0.02 / (2 * self.num_layers) ** 0.5 if layer == "c_proj" else 0.02

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Random tokens, each to be predicted from those before it."""
        import torch
        from torch import nn

        tokens = torch.randint(0, self.vocabulary_size, (num_sequences, sequence_length), generator=generator)
        next_tokens = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
        return Batch({"input_ids": tokens}, labels=next_tokens)

    def limit_blocks(self, max_blocks: int) -> GPTFamily:
        return dataclasses.replace(self, num_layers=min(max_blocks, self.num_layers))

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The one list of blocks."""
        return [model.get_submodule("transformer.h")]  # type: ignore[list-item]

    def find_undivided_sequence_reason(self) -> str:
        return find_undivided_attention_reason(self.attention)

    @property
    def num_blocks(self) -> int:
        return self.num_layers

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The first stage embeds, the last one has the final norm and the head."""
        from bench.models.gpt_stage import GPTPipelineStage

        return GPTPipelineStage(model, blocks)

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        return ((sequence_length, self.hidden_size),)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Query, key, value, output and feed-forward products per token; scores over the full square.

        The scores of all heads take ``2 * length**2 * hidden``, their product with the values as much.
        """
        length, hidden = sequence_length, self.hidden_size
        final_linear = 2 * length * hidden * self._intermediate_width
        linear, attention = 8 * length * hidden * hidden + 2 * final_linear, 4 * length * length * hidden
        return FlopCount(
            blocks_linear=self.num_layers * linear,
            blocks_attention=self.num_layers * attention,
            causal_attention=self.num_layers * attention,
            blocks_last_linear=self.num_layers * final_linear,
            outside_blocks=2 * length * hidden * self.vocabulary_size,
            recomputed_by_block=((linear + attention - final_linear,) * self.num_layers,),
        )

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Every token is read once."""
        return sequence_length

    def check_sequence_length(self, sequence_length: int) -> None:
        """At least 2, since a label is the next token, and at most the number of positions."""
        require_predicted_positions(sequence_length, self.block_size)

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """Heads, and the width of the feed-forward layer; the last rank's part of the vocabulary may be smaller."""
        width_name = "model.intermediate_size" if self.intermediate_size else "4 x model.hidden_size"
        sizes = {"model.num_heads": self.num_heads, width_name: self._intermediate_width}
        return sizes | {"sequence_length": sequence_length} if sequence_parallel else sizes

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        """Attention by heads, of which one matrix holds query, key and value; the feed-forward layer by its width."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

        from bench.models.division import (
            SEQUENCE_SHARD,
            ColwiseConv1D,
            FusedMatrices,
            LayerDivision,
            RowwiseConv1D,
            RowwiseEmbedding,
            build_sequence_split,
            strip_checkpoint_wrappers,
        )

        layer_division = LayerDivision()
        hidden_layout = SEQUENCE_SHARD if sequence_parallel else Replicate()
        for name, module in model.named_modules():
            layer = name.rpartition(".")[2]
            if layer == "wte":
                layer_division.parallel_styles.append((module, RowwiseEmbedding()))
            elif layer == "attn":
                layer_division.divided_attributes += [
                    (module, attribute) for attribute in ("num_heads", "embed_dim", "split_size")
                ]
            elif layer in ("c_attn", "c_fc"):
                layer_division.parallel_styles.append((module, ColwiseConv1D(input_layouts=hidden_layout)))
                if layer == "c_attn":
                    layer_division.fused_matrices |= {
                        f"{strip_checkpoint_wrappers(name)}.{parameter}": FusedMatrices(3)
                        for parameter, _ in module.named_parameters()
                    }
            elif layer == "c_proj":
                layer_division.parallel_styles.append((module, RowwiseConv1D(output_layouts=hidden_layout)))
            elif layer in ("ln_1", "ln_2", "ln_f") and sequence_parallel:
                layer_division.parallel_styles.append((module, SequenceParallel()))
            elif layer == "lm_head":
                logits_style = ColwiseParallel(
                    input_layouts=hidden_layout, output_layouts=Shard(-1), use_local_output=False
                )
                layer_division.parallel_styles.append((module, logits_style))
        if sequence_parallel:
            for blocks in self.find_block_lists(model):
                layer_division.parallel_styles.append((blocks[0], build_sequence_split(4)))
        return layer_division

    @property
    def _intermediate_width(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size
