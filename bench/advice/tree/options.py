"""The ways to train that the tree ends at, as the strategies and the ways to fine-tune state them."""

from __future__ import annotations

import functools

from bench.core.training_guide import TrainingOption
from bench.finetune import list_finetunes
from bench.strategies import list_strategies


@functools.cache
def list_training_options() -> tuple[TrainingOption, ...]:
    """All of them, in the order of the strategies, then of the ways to fine-tune."""
    classes: list[type] = [*list_strategies().values(), *list_finetunes()]
    # Of each class its own: what extends DDP is another way to train than DDP.
    return tuple(option for plugin_class in classes for option in vars(plugin_class).get("training_options", ()))


@functools.cache
def list_leaf_options(leaf_key: str) -> tuple[TrainingOption, ...]:
    """Those that one leaf names, the first before the others."""
    options = [option for option in list_training_options() if leaf_key in option.leaves]
    return tuple(sorted(options, key=lambda option: option.leaves[leaf_key]))
