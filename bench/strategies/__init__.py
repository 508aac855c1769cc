"""Parallelisation strategies: one file each. `name` in a strategy's YAML names the file, an installed entry point, or a
module of your own."""

from bench.strategies.base import (
    StepSettings,
    Strategy,
    WrapContext,
    format_float8_strategies,
    list_strategies,
    load_strategy,
    require_whole_replicas,
)
from bench.strategies.stepper import Stepper

__all__ = [
    "StepSettings",
    "Stepper",
    "Strategy",
    "WrapContext",
    "format_float8_strategies",
    "list_strategies",
    "load_strategy",
    "require_whole_replicas",
]
