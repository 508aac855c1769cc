"""What every model family provides: the model on meta, its weights, a batch, its blocks and its FLOPs."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core import plugins
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision
from bench.core.typed_config import OneOf, Within
from bench.core.units import MIB

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the model's keyword arguments, whose first dimension is the sequences, mostly of shape
    (sequences, length), and what to predict."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    """Shape (sequences, predictions); of tokens, `IGNORED_LABEL` where there is nothing to predict."""

    def select_sequences(self, sequences: slice, device: torch.device) -> Batch:
        """Some of the sequences, on a device."""
        inputs = {name: tensor[sequences].to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels[sequences].to(device))


IGNORED_LABEL = -100
"""Label of a position without prediction."""

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

BlockCount = Annotated[int, Within(1, 512)]
"""Number of blocks: each is built to be counted, which takes milliseconds."""
LayerWidth = Annotated[int, Within(1, MIB)]
HeadCount = Annotated[int, Within(1, 4096)]
TokenCount = Annotated[int, Within(1, 10**7)]
"""Size of a vocabulary, or number of positions."""
SEQUENCE_LENGTH_RANGE = Within(1, MIB)
"""Of sequences, in tokens."""
DropoutRate = Annotated[float, Within(0, 1, exclusive_maximum=True)]


# --- FLOPs, and which of them the modes of activation checkpointing compute again.

NONE, FULL, SELECTIVE, OPERATORS = "none", "full", "selective", "operators"
ALTERNATE_OPERATORS = "operators_every_2"
"""Modes of activation checkpointing, beside ``every_K`` and ``budget_P``."""

INTERVAL_PREFIX, BUDGET_PREFIX = "every_", "budget_"

BUDGET = "budget"
"""Asks for a ``budget_P`` to be chosen: what no run has, but who asks for one."""


def find_checkpointing_interval(mode: str) -> int | None:
    """K of ``every_K``; None for the modes that treat all blocks alike."""
    return int(mode.removeprefix(INTERVAL_PREFIX)) if mode.startswith(INTERVAL_PREFIX) else None


def find_checkpointing_budget(mode: str) -> int | None:
    """P of ``budget_P``, in percent; None for other modes."""
    return int(mode.removeprefix(BUDGET_PREFIX)) if mode.startswith(BUDGET_PREFIX) else None


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one sequence's forward pass, a multiply-add counting 2.

    Only matrix products are counted. Attention is counted over the full square of scores, for causal attention
    too: the same convention as Megatron's and as `torch.utils.flop_counter`'s. What a fused attention kernel
    computes again for its own backward is not counted. A sliding window is counted as if it were not there.
    """

    blocks_linear: int
    """Matrix products with weights, inside the blocks."""
    blocks_attention: int
    """Scores and their product with the values, inside the blocks."""
    blocks_last_linear: int
    """Of `blocks_linear`, the last product of each block where its result is no input of the block's backward:
    checkpointing stops short of computing it again."""
    outside_blocks: int
    """Matrix products outside the blocks: the head over the vocabulary."""
    recomputed_by_block: tuple[tuple[int, ...], ...] = ()
    """Per list and block, what computing the block again takes: its products but `blocks_last_linear`. Empty where a
    family does not say."""
    head: int | None = None
    """Of `outside_blocks`, the head over the vocabulary; None for all of it."""
    causal_attention: int = 0
    """Of `blocks_attention`, what a causal mask leaves half of."""

    @property
    def causal_model_flops(self) -> int:
        """`model_flops` with half of the square of scores where attention is causal: ``- 3 * causal_attention / 2``."""
        return self.model_flops - 3 * self.causal_attention // 2

    @property
    def model_flops(self) -> int:
        """Forward and backward without recomputation: backward takes each product twice."""
        return 3 * (self.blocks_linear + self.blocks_attention + self.outside_blocks)

    def compute_hardware_flops(
        self, activation_checkpointing: str, *, loss_in_chunks: bool = False, recorded_flops: int | None = None
    ) -> int:
        """What the device executes: `model_flops` and the forward products that checkpointing, and a loss in chunks,
        compute again.

        Parameters
        ----------
        recorded_flops: int or None
            What ``budget_P`` and ``operators_every_2`` compute again
            (`bench.models.checkpointing_budget.count_recomputed_flops`).

        Raises
        ------
        ImpossibleError
            If some blocks are checkpointed, and the family does not say what each takes.
        """
        executed_flops = self.model_flops
        if loss_in_chunks:
            executed_flops += self.outside_blocks if self.head is None else self.head
        if recorded_flops is not None:
            return executed_flops + recorded_flops
        interval = find_checkpointing_interval(activation_checkpointing)
        if interval is not None:
            if not self.recomputed_by_block:
                raise ImpossibleError(
                    f"activation_checkpointing={activation_checkpointing} is not valid for this model, whose family "
                    f"does not say what each block computes: choose {NONE}, {FULL}, {SELECTIVE} or {OPERATORS}."
                )
            return executed_flops + sum(sum(blocks[interval - 1 :: interval]) for blocks in self.recomputed_by_block)
        recomputed_flops = {
            NONE: 0,
            SELECTIVE: self.blocks_attention,
            OPERATORS: 0,
            FULL: self.blocks_linear + self.blocks_attention - self.blocks_last_linear,
        }[activation_checkpointing]
        return executed_flops + recomputed_flops


@dataclass(frozen=True)
class StoredFormat:
    """A parameter that is not stored as it was drawn."""

    shape: tuple[int, ...]
    """Of the tensor that holds it."""
    num_bytes: int
    """Of this tensor."""
    scale_bytes: int
    """Of what belongs to it and is no parameter."""


@dataclass(frozen=True)
class Family(ABC):
    """A model family and the shape of one model in it. Subclasses add the dimensions as fields."""

    name: str
    """Name of the configuration, for rows and figures."""
    family: str
    """File under bench/models, or module path, that defines the subclass."""
    attention: Annotated[str, OneOf(*ATTENTION_IMPLEMENTATIONS)]
    """Attention implementation: sdpa (flash where the device and the model allow it) or eager."""

    preload_modules: ClassVar[tuple[str, ...]] = ()
    """Modules worth importing once, before ranks are forked."""

    can_divide_layers: ClassVar[bool] = False
    """Whether `build_layer_division` says how tensor parallelism divides the layers."""

    can_divide_expert_layers: ClassVar[bool] = False
    """Whether it says so of all but the experts, which are divided otherwise."""

    scales_with_batch: ClassVar[bool] = False
    """Whether every dimension of its tensors has the batch as a factor or does not depend on it, nothing rounded: then
    one trace gives those of all batches."""

    communicates: ClassVar[bool] = False
    """Whether the model itself exchanges something among all ranks, by functional collectives, and divides buffers
    among them: every rank must then run the whole model on samples of its own."""

    @classmethod
    def complete_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The fields as they were chosen, with what a family reads from elsewhere."""
        return values

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on meta: ``model(**batch.inputs)["logits"]`` has shape (sequences, predictions, vocabulary)."""

    @functools.cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once. Counted on meta."""
        return self.count_parameters(self.build_model())

    def count_parameters(self, model: nn.Module) -> int:
        """Those of `build_model`'s model, and what is trained without being a parameter of a module."""
        return sum(parameter.numel() for parameter in model.parameters())

    @functools.cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all, but in a mixture of experts."""
        return self.num_parameters

    @abstractmethod
    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """Standard deviation of the parameter's normal distribution; 0 for zeros, None for ones."""

    @abstractmethod
    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Synthetic token sequences on the CPU, each tensor of shape (num_sequences, length)."""

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy over all predictions, in fp32 whatever the format of the logits, so that every strategy
        computes the same loss."""
        from torch.nn import functional

        return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())

    @property
    def block_period(self) -> int:
        """Blocks after which they repeat in every list: more than 1 where kinds of blocks alternate."""
        return 1

    @property
    def num_first_blocks(self) -> int:
        """Blocks at the beginning of every list that come before those that repeat."""
        return 1

    def limit_blocks(self, max_blocks: int) -> Family | None:
        """The same model with at most `max_blocks` blocks in every list, all others being copies of its inner ones.

        None, what a family says by itself, where blocks differ from one another, or where several come before those
        that repeat and so few would not have all kinds: predictions then trace all of them.
        A family whose `block_period` is more than 1 takes the period that a trace has as a second argument: of a list
        with fewer blocks the last `period` ones are like those of the whole list.
        """
        return None

    @abstractmethod
    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The lists of repeated blocks, in the order they run: what strategies wrap and checkpoint one by one."""

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Run several blocks as if they were one, with the call the model makes for one block: by default the hidden
        states, its first argument, are handed from block to block."""
        hidden, *rest = args
        for block in blocks:
            hidden = block(hidden, *rest, **kwargs)
        return hidden

    @abstractmethod
    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Matrix products of one sequence's forward pass."""

    @abstractmethod
    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Tokens the model reads per sequence."""

    def count_expert_tokens(self, sequence_length: int) -> tuple[int, ...]:
        """Tokens of a sequence that each expert of a layer takes; empty for a model without experts."""
        return ()

    @abstractmethod
    def check_sequence_length(self, sequence_length: int) -> None:
        """Raise `UsageError` if the model cannot take sequences of this length."""

    def check_run(self, precision: Precision, num_ranks: int) -> None:
        """Raise `ImpossibleError` if the model cannot be trained in this precision, or by so many ranks."""

    def check_expert_width(self, precision: Precision, num_parts: int) -> None:
        """Raise `ImpossibleError` if no kernel multiplies experts of which ranks have so many parts of the width."""

    def find_seed_name(self, name: str) -> str:
        """The name by which a parameter is drawn at random: its own, but for layers that were wrapped since."""
        return name

    def convert_drawn_parameters(self, module: nn.Module) -> None:
        """A module's own parameters have just been drawn: for what is not stored as it was drawn."""

    def list_converted_modules(self, model: nn.Module) -> list[nn.Module]:
        """Modules that `convert_drawn_parameters` changes: they are drawn whole, and sharded as they are stored."""
        return []

    def build_buffer(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """What a module's buffer holds, such as the frequencies of rotary embeddings: `build_model` leaves it on meta.

        Called wherever the model is given its weights, and with fake tensors where it is traced.

        Parameters
        ----------
        name: str
            The buffer's name in the module.
        device: torch.device
            Where the result goes.

        Raises
        ------
        ImpossibleError
            If the family does not say.
        """
        raise ImpossibleError(
            f"model.family={self.family} does not say what the buffer {name} of {type(module).__name__} holds, which "
            "its model has on meta: give it a `build_buffer`, or choose a model without buffers."
        )

    def count_divided_buffer_bytes(self, num_ranks: int) -> int:
        """Bytes that each of so many ranks has of all buffers of a model that divides them (`communicates`).

        Raises
        ------
        ImpossibleError
            If the family does not say.
        """
        raise ImpossibleError(
            f"model.family={self.family} does not say how many bytes each rank has of the buffers that it divides: "
            "give it a `count_divided_buffer_bytes`, or choose a model that does not communicate."
        )

    def find_stored_formats(self, model: nn.Module) -> dict[int, StoredFormat]:
        """The parameters that are not stored as they were drawn, by their identity."""
        return {}

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """What tensor parallelism divides evenly among ranks: dimensions by the name of their field."""
        return {}

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        """How tensor parallelism divides the layers of a model whose blocks may have been wrapped already.

        Logits are divided over the vocabulary, hidden states between the layers over the sequence if
        `sequence_parallel` says so.
        """
        raise ImpossibleError(f"model.family={self.family} does not say how its layers are divided among ranks.")

    def find_layer_style(self, layer: nn.Module, style: ParallelStyle) -> ParallelStyle:
        """The style that divides a linear layer of the model as `style` divides torch's own."""
        return style

    def find_undivided_sequence_reason(self) -> str:
        """Why context parallelism cannot divide its sequences, as a relative clause; empty if it can: a causal language
        model that takes ``position_ids`` and whose attention is a function of queries, keys and values alone."""
        return "whose family does not say that a part of a sequence is computed with positions of its own"

    @property
    def num_blocks(self) -> int | None:
        """Blocks between which the model can be cut into stages; None where the family does not say how."""
        return None

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The part of the model that runs some of its blocks, counted over all lists in the order they run.

        It is made of the model's own blocks, and of modules over its own parameters.
        """
        raise ImpossibleError(f"model.family={self.family} does not say how it is cut into stages.")

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        """Shape, per sequence, of each tensor that a stage which begins with a block takes from the one before it."""
        raise ImpossibleError(f"model.family={self.family} does not say what its stages take from one another.")

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Linear layers whose result overflows in fp16, and which fp16 runs therefore keep in fp32."""
        return ()

    def list_layers_stored_in_fp32(self, model: nn.Module) -> Sequence[nn.Module]:
        """Layers whose parameters are in fp32 whatever the format of the others."""
        return ()


def find_undivided_attention_reason(attention: str, layer_types: Sequence[str] = ()) -> str:
    """Why attention cannot reach beyond a part of a sequence, as a relative clause; empty if it can."""
    if attention != "sdpa":
        return f"whose model.attention={attention} needs a mask of whole sequences"
    if any(kind != "full_attention" for kind in layer_types):
        return "which has layers with a sliding window, whose mask no form of context parallelism here has"
    return ""


def require_predicted_positions(sequence_length: int, block_size: int) -> None:
    """Raise `ImpossibleError` unless a sequence has a next token to predict and as many positions as there are."""
    if not 2 <= sequence_length <= block_size:
        valid = f"a whole number from 2 to model.block_size={block_size}"
        raise invalid_value_error("sequence_length", sequence_length, valid, ImpossibleError)


def list_dividing_families() -> list[str]:
    """Names of the families whose layers tensor parallelism can divide."""
    package = sys.modules[__package__]
    return [name for name in plugins.list_plugin_names(package, Family) if load_family(name).can_divide_layers]


def load_family(name: str) -> type[Family]:
    """The family class that ``bench/models/<name>.py``, or the module with that path, defines."""
    return plugins.find_plugin_class("model.family", name, sys.modules[__package__], Family)
