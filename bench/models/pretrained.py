"""Models as transformers builds them from a configuration: what a family needs to know is found from the modules."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.models.base import IGNORED_LABEL, SEQUENCE_LENGTH_RANGE, Batch, Family, FlopCount
from bench.models.gpt import register_causal_sdpa


@dataclass(frozen=True)
class PretrainedFamily(Family):
    """A decoder that transformers builds from a configuration, its weights drawn at random."""

    preload_modules: ClassVar[tuple[str, ...]] = ("transformers.modeling_layers", "transformers.masking_utils")

    @abstractmethod
    def build_config(self) -> Any:
        """Its configuration, a `transformers.PretrainedConfig`."""

    def build_model(self) -> nn.Module:
        """Parameters on meta, buffers on the CPU with what they hold."""
        from transformers import AutoModelForCausalLM

        config = self.build_config()
        config.use_cache = False
        config._attn_implementation = register_causal_sdpa() if self.attention == "sdpa" else self.attention
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        fill_pretrained_buffers(model)
        if self.attention == "sdpa":
            apply_sliding_windows(model)
        self.__dict__.setdefault("_block_list_names", find_block_list_names(model))
        return model

    @functools.cached_property
    def _block_list_names(self) -> tuple[str, ...]:
        """Names of the lists of blocks in the model, known since it was built first: where it is traced, another model
        would be part of the trace."""
        return find_block_list_names(self.build_model())

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        return [model.get_submodule(name) for name in self._block_list_names]  # type: ignore[misc]

    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden states from block to block."""
        hidden, *rest = args
        for block in blocks:
            hidden = block(hidden, *rest, **kwargs)
        return hidden

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """0.02; norms start as what leaves their input as it is."""
        if name.endswith("bias"):
            return 0.0
        if "norm" in name.rsplit(".", 2)[-2]:
            return 0.0 if self._has_centred_norms else None
        return 0.02

    @functools.cached_property
    def _has_centred_norms(self) -> bool:
        """Whether norms multiply by one more than their weight, as Gemma's."""
        return type(self.build_config()).__name__.startswith(("Gemma", "RecurrentGemma"))

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Random tokens, each to be predicted from those before it."""
        tokens = torch.randint(0, self._vocabulary_size, (num_sequences, sequence_length), generator=generator)
        next_tokens = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
        return Batch({"input_ids": tokens}, labels=next_tokens)

    @property
    def _vocabulary_size(self) -> int:
        return self.build_config().get_text_config().vocab_size

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """As traced: every matrix product of a forward pass on meta."""
        return trace_flops(self, sequence_length)

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Every token is read once."""
        return sequence_length

    def check_sequence_length(self, sequence_length: int) -> None:
        """At least 2, since a label is the next token, and at most the positions that the model was made for."""
        text_config = self.build_config().get_text_config()
        longest = getattr(text_config, "max_position_embeddings", None) or int(SEQUENCE_LENGTH_RANGE.maximum)
        if not 2 <= sequence_length <= longest:
            valid = f"a whole number from 2 to {longest}, the model's longest"
            raise invalid_value_error("sequence_length", sequence_length, valid, ImpossibleError)


def find_block_list_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the lists of nothing but layers that transformers can checkpoint one by one.

    Raises
    ------
    ImpossibleError
        If there is none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    )
    if not names:
        raise ImpossibleError(f"{type(model).__name__} has no list of blocks that could be sharded one by one.")
    return names


def fill_pretrained_buffers(model: nn.Module) -> None:
    """Give a model's buffers, which are on meta, what transformers fills them with, on the CPU."""
    for owner, module in _iterate_owned_modules(model, model):
        meta_buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not meta_buffers:
            continue
        for name, buffer in meta_buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, torch.full_like(buffer, torch.nan, device="cpu"), persistent=persistent)
        owner._init_weights(module)
        for name in meta_buffers:
            if module.get_buffer(name).isnan().any():
                raise ImpossibleError(
                    f"transformers does not say what the buffer {name} of {type(module).__name__} holds."
                )


def _iterate_owned_modules(owner: Any, module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Modules, each with the innermost model of transformers that it belongs to."""
    owner = module if hasattr(module, "_init_weights") else owner
    yield owner, module
    for child in module.children():
        yield from _iterate_owned_modules(owner, child)


def apply_sliding_windows(model: nn.Module) -> None:
    """Have layers with a sliding window attend to it where sequences are longer: the mask is handed to the model.

    What transformers would make of the mask itself looks for several sequences packed into one, which waits for the
    device, see `register_causal_sdpa`.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    config = decoder.config
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return

    def add_mask(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs["input_ids"]
        if tokens.shape[1] > window and kwargs.get("attention_mask") is None:
            sliding_mask = build_window_mask(tokens.shape[1], window, tokens.device)
            kwargs["attention_mask"] = (
                sliding_mask if layer_types is None else {"full_attention": None, "sliding_attention": sliding_mask}
            )
        return args, kwargs

    decoder.register_forward_pre_hook(add_mask, with_kwargs=True)


def build_window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where a position attends: to itself and the `window` - 1 before it; shape (1, 1, length, length)."""
    positions = torch.arange(length, device=device)
    distances = positions[:, None] - positions[None, :]
    return ((distances >= 0) & (distances < window))[None, None]


LINEAR_OPERATORS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._grouped_mm}
"""Products with weights; all other products are attention's."""


class _FlopRecorder(TorchDispatchMode):
    """Counts the FLOPs of matrix products, inside blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.block_depth = 0
        self.linear = self.attention = self.last_linear = self.outside = self._newest_linear = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=results)
            if not self.block_depth:
                self.outside += flops
            elif packet in LINEAR_OPERATORS:
                self.linear += flops
                self._newest_linear = flops
            else:
                self.attention += flops
        return results

    def enter_block(self, *_: Any) -> None:
        self.block_depth += 1

    def leave_block(self, *_: Any) -> None:
        self.block_depth -= 1
        if not self.block_depth:
            self.last_linear += self._newest_linear


@functools.lru_cache(maxsize=256)
def trace_flops(family: Family, sequence_length: int) -> FlopCount:
    """Count the matrix products of one sequence's forward pass, on meta."""
    model = family.build_model().to("meta")
    recorder = _FlopRecorder()
    for blocks in family.find_block_lists(model):
        for block in blocks:
            block.register_forward_pre_hook(recorder.enter_block)
            block.register_forward_hook(recorder.leave_block)
    batch = family.build_batch(1, sequence_length, torch.Generator())
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, torch.no_grad():
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})
    return FlopCount(recorder.linear, recorder.attention, recorder.last_linear, recorder.outside)
