"""Models as transformers builds them from a configuration: what a family needs to know is found from the modules."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.models.base import Batch, Family, FlopCount
from bench.models.checkpointing import BlockPositions
from bench.models.routing import Routing, count_expert_tokens
from bench.models.tasks import TASKS, Task

if TYPE_CHECKING:
    import torch
    from torch import nn


DEFAULT_STD = 0.02
"""Of weights that transformers does not initialise."""


class ModuleFacts(NamedTuple):
    """What is the same in every model of a family."""

    block_list_names: tuple[str, ...]
    num_unused_positions: int
    block_repetitions: tuple[tuple[int, int] | None, ...]
    """Per list, blocks before those that repeat, and after how many these do; None where they do not."""
    num_idle_parameters: int
    """Of experts that a token does not go to."""
    expert_choice: tuple[int, int] | None
    """Experts of a layer and how many of them a token goes to; None where there are none."""


@dataclass(frozen=True)
class PretrainedFamily(Family):
    """A model that transformers builds from a configuration, its weights drawn at random."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.modeling_layers", "transformers.masking_utils")

    @abstractmethod
    def build_config(self) -> Any:
        """Its configuration, a `transformers.PretrainedConfig`."""

    def list_layer_types(self) -> list[str]:
        """Kinds of attention of the layers, as transformers calls them."""
        config = self.build_config()
        if getattr(config, "layer_types", None) is not None:
            return list(config.layer_types)
        return ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]

    @property
    def task_name(self) -> str:
        """What the model is trained to do: a key of `TASKS`."""
        return "causal_lm"

    @property
    def _task(self) -> Task:
        return TASKS["causal_lm"]

    def _build_routing(self) -> Routing:
        return Routing("balanced", 0.0)

    def build_model(self) -> nn.Module:
        """Parameters on meta, buffers on the CPU with what they hold."""
        import transformers

        from bench.models.experts import prepare_experts, register_grouped_experts
        from bench.models.pretrained_modules import build_on_meta, fill_pretrained_buffers

        ignore_packed_sequences()
        config = self.build_config()
        config.use_cache = False
        config._attn_implementation = self.attention
        config._experts_implementation = register_grouped_experts()
        with build_on_meta():
            try:
                model = getattr(transformers, self._task.auto_class_name).from_config(config)
            except ValueError as error:
                if "attn_implementation" not in str(error):
                    raise
                raise invalid_value_error(
                    "model.attention",
                    self.attention,
                    f"eager, since transformers has no other for {type(config).__name__}",
                    ImpossibleError,
                ) from None
        model.tie_weights()
        fill_pretrained_buffers(model)
        prepare_experts(model, self._build_routing())
        if "_module_facts" not in self.__dict__:
            self.__dict__["_module_facts"] = self._find_module_facts(model)
        return model

    def _find_block_list_names(self, model: nn.Module) -> tuple[str, ...]:
        from bench.models.pretrained_modules import find_block_list_names

        return find_block_list_names(model)

    def _find_module_facts(self, model: nn.Module) -> ModuleFacts:
        from bench.models.experts import count_idle_parameters, find_expert_choice
        from bench.models.pretrained_modules import count_unused_positions, find_repetition

        names = self._find_block_list_names(model)
        return ModuleFacts(
            names,
            count_unused_positions(model),
            tuple(find_repetition(model.get_submodule(name)) for name in names),  # type: ignore[arg-type]
            count_idle_parameters(model),
            find_expert_choice(model),
        )

    @functools.cached_property
    def _module_facts(self) -> ModuleFacts:
        """Known since the model was built first: where it is traced, another model would be part of the trace."""
        return self._find_module_facts(self.build_model())

    @functools.cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all but those of the experts that it does not go to. Some publishers leave
        out the embedding, too."""
        return self.num_parameters - self._module_facts.num_idle_parameters

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        return [model.get_submodule(name) for name in self._module_facts.block_list_names]  # type: ignore[misc]

    @property
    def block_period(self) -> int:
        return math.lcm(*(period for _, period in self._list_block_repetitions()))

    @property
    def num_first_blocks(self) -> int:
        return max((num_first for num_first, _ in self._list_block_repetitions()), default=1)

    def _list_block_repetitions(self) -> list[tuple[int, int]]:
        return [repetition or (1, 1) for repetition in self._module_facts.block_repetitions]

    def _can_be_shortened(self, max_blocks: int, period: int) -> bool:
        """Whether a model with so many blocks has all kinds of blocks there are."""
        num_first = self.num_first_blocks
        is_long_enough = num_first == 1 or max_blocks >= num_first + 3 * period
        return None not in self._module_facts.block_repetitions and is_long_enough

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden states from block to block."""
        hidden, *rest = args
        for block in blocks:
            result = block(hidden, *rest, **kwargs)
            if isinstance(result, tuple) and len(result) > 1:
                raise ImpossibleError(
                    f"strategy.blocks_per_unit is not valid for {type(block).__name__}, which hands more than hidden "
                    "states to the next block: choose 1."
                )
            hidden = result[0] if isinstance(result, tuple) else result
        return result

    @functools.cached_property
    def _initial_stds(self) -> dict[str, float | None]:
        """By name of the parameter: only who draws them needs to know."""
        from bench.models.pretrained_modules import find_initial_stds

        return find_initial_stds(self.build_model())

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """As transformers does."""
        return self._initial_stds.get(name, DEFAULT_STD)

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Those that transformers keeps in fp32."""
        patterns: Any = getattr(model, "_keep_in_fp32_modules", None) or ()
        return [
            module
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in patterns and any(True for _ in module.parameters(recurse=False))
        ]

    @property
    def _decoder_length(self) -> int | None:
        """Tokens per sequence in the decoder of a model that has an encoder, too; None for as many as in that."""
        return None

    def _find_lengths(self, sequence_length: int) -> tuple[int, int]:
        return sequence_length, self._decoder_length or sequence_length

    @functools.cached_property
    def _text_config(self) -> Any:
        return self.build_config().get_text_config()

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        return self._task.build_batch(self._text_config, num_sequences, self._find_lengths(sequence_length), generator)

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """As traced: every matrix product of a forward pass on meta."""
        from bench.models.traced_flops import trace_flops

        return trace_flops(self, sequence_length)

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        return self._task.count_tokens(self._find_lengths(sequence_length))

    def count_expert_tokens(self, sequence_length: int) -> tuple[int, ...]:
        if self._module_facts.expert_choice is None:
            return ()
        routing, (_, length) = self._build_routing(), self._find_lengths(sequence_length)
        return count_expert_tokens(routing.kind, routing.skew, *self._module_facts.expert_choice, length)

    def check_sequence_length(self, sequence_length: int) -> None:
        self._task.check_sequence_length(self._text_config, sequence_length, self._module_facts.num_unused_positions)


def shorten_list(values: Sequence[Any], length: int, period: int) -> list[Any]:
    """What is said of each of a list's blocks, for a shortened list as `limit_blocks` says."""
    if length <= 3 * period:
        return list(values[:length])
    positions = BlockPositions(len(values), length, period)
    return [values[positions.find_whole(position)] for position in range(length)]


def ignore_packed_sequences() -> None:
    """Have transformers take every sequence as one, and not look for several that were packed into it.

    Looking for them waits for the device in every forward pass, and finds none here. Where values are not known, as in
    a trace, it would make masks that no run has.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = _find_no_packed_sequences


def _find_no_packed_sequences(position_ids: torch.Tensor) -> None:
    return None
