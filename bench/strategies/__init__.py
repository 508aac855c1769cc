"""Parallelisation strategies: one file each. `name` in a strategy's YAML names the file, an installed entry point, or a
module of your own.

What a strategy says and plans needs no torch, whose import takes longer than most commands: it is imported where a
model is wrapped and trained.
"""

from bench.strategies.base import StepSettings, Strategy, WrapContext
from bench.strategies.registry import (
    list_strategies,
    load_strategy,
    normalize_precision,
    require_finetune,
    require_float8,
    require_fp32_adapters,
    require_whole_replicas,
)
from bench.strategies.stepper import Stepper

__all__ = [
    "StepSettings",
    "Stepper",
    "Strategy",
    "WrapContext",
    "list_strategies",
    "load_strategy",
    "normalize_precision",
    "require_finetune",
    "require_float8",
    "require_fp32_adapters",
    "require_whole_replicas",
]
