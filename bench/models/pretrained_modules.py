"""What is found from the modules of a model that transformers built: its blocks, its buffers, how it is initialised."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.core.errors import ImpossibleError


@contextlib.contextmanager
def build_on_meta() -> Iterator[None]:
    """Within, models of transformers are built on meta, and torch does not go through the motions of drawing values for
    them, which take longer than all else."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        yield


def find_block_list_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the lists of nothing but layers that transformers can checkpoint one by one.

    Raises
    ------
    ImpossibleError
        If there is none; the sentence says which lists there are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    names = [
        name for name, blocks in lists.items() if all(isinstance(block, GradientCheckpointingLayer) for block in blocks)
    ]
    if not names:
        choices = ", ".join(lists) or "another model, since it has no lists of modules"
        raise ImpossibleError(
            f"{type(model).__name__} does not say which of its modules are blocks: choose model.block_lists from "
            f"{choices}."
        )
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


MAX_BLOCK_PERIOD = 8
"""Blocks after which they repeat at the latest, where a shortened model is to stand for the whole one."""

MAX_FIRST_BLOCKS = 8
"""Before them."""


def find_repetition(blocks: nn.ModuleList) -> tuple[int, int] | None:
    """How many blocks come before those that repeat, at least the first one, and after how many these repeat, all but
    the last one: but for their weights and their number. None if they do not."""
    descriptions = [describe_block(block) for block in list(blocks)[:-1]]
    for num_first in range(1, MAX_FIRST_BLOCKS + 1):
        period = _find_period(descriptions[num_first:])
        if period is not None and (num_first == 1 or len(descriptions) - num_first >= 2 * period):
            return num_first, period
    return None


def _find_period(descriptions: Sequence[str]) -> int | None:
    longest = max(1, min(MAX_BLOCK_PERIOD, len(descriptions) // 2))
    return next((period for period in range(1, longest + 1) if descriptions[period:] == descriptions[:-period]), None)


def describe_block(block: nn.Module) -> str:
    """What decides about the operators that a block runs."""
    descriptions = []
    for name, module in block.named_modules():
        values = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        shapes = [(key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)]
        descriptions.append(
            (name, type(module).__name__, sorted(item for item in values.items() if "idx" not in item[0]), shapes)
        )
    return repr(descriptions)


def count_unused_positions(model: nn.Module) -> int:
    """Learned positions that no token has, as RoBERTa's up to the one for padding."""
    position_tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name.rpartition(".")[2]
    ]
    return max((table.padding_idx + 1 for table in position_tables if table.padding_idx is not None), default=0)


@contextlib.contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute without the threads of OpenMP: a process that has them cannot be forked into others that compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@_use_one_thread()
def fill_pretrained_buffers(model: nn.Module) -> None:
    """Give a model's buffers, which are on meta, what transformers fills them with, on the CPU.

    Raises
    ------
    ImpossibleError
        If transformers does not say.
    """
    for owner, module in _iterate_owned_modules(model, model):
        meta_buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if not meta_buffers:
            continue
        for name, buffer in meta_buffers.items():
            persistent = name not in module._non_persistent_buffers_set
            unset_buffer = torch.full(buffer.shape, _get_unset_value(buffer.dtype), dtype=buffer.dtype)
            module.register_buffer(name, unset_buffer, persistent=persistent)
        owner._init_weights(module)
        for name in meta_buffers:
            buffer = module.get_buffer(name)
            unset = _get_unset_value(buffer.dtype)
            if buffer.isnan().any() or (unset is not False and (buffer == unset).any()):
                raise ImpossibleError(
                    f"transformers does not say what the buffer {name} of {type(module).__name__} holds."
                )


def _get_unset_value(dtype: torch.dtype) -> float | int:
    """What no buffer holds; False for booleans, which hold either."""
    return False if dtype is torch.bool else torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def _iterate_owned_modules(owner: Any, module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Modules, each with the innermost model of transformers that it belongs to."""
    owner = module if hasattr(module, "_init_weights") else owner
    yield owner, module
    for child in module.children():
        yield from _iterate_owned_modules(owner, child)


def find_initial_stds(model: nn.Module) -> dict[str, float | None]:
    """How transformers initialises each parameter of a model on meta, by its name.

    Returns
    -------
    The standard deviation of what is drawn at random; 0 for zeros, None for ones. Other constants are drawn at random
    in their size. What transformers does not initialise is not there.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recorder = _InitialisationRecorder(names)
    with torch.no_grad(), recorder:
        for owner, module in reversed(list(_iterate_owned_modules(model, model))):
            owner._init_weights(module)  # a module's own layers first, which it may then initialise otherwise
    return recorder.stds


class _InitialisationRecorder(TorchDispatchMode):
    """Notes what is written into parameters."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self._truncated: set[str] = set()
        self.stds: dict[str, float | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._names.get(id(args[0])) if args else None
        if name is not None:
            self._note(name, func._overloadpacket, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        aten = torch.ops.aten
        if operator is aten.normal_:
            self.stds[name] = float(kwargs.get("std", args[2] if len(args) > 2 else 1.0))
        elif operator is aten.uniform_:
            low, high = (*args[1:3], *(kwargs.get(key, default) for key, default in (("from", 0.0), ("to", 1.0))))[:2]
            self.stds[name] = (high - low) / math.sqrt(12)
        elif operator is aten.erfinv_:
            self._truncated.add(name)  # `nn.init.trunc_normal_` makes a normal distribution of a uniform one
        elif operator is aten.mul_ and name in self._truncated:
            self.stds[name] = float(args[1]) / math.sqrt(2)
        elif operator is aten.zero_:
            self.stds[name] = 0.0
        elif operator is aten.fill_ and isinstance(args[1], int | float):
            self.stds[name] = None if args[1] == 1 else abs(float(args[1]))
