"""Parallelisation strategies: one file each. `name` in a strategy's YAML names the file, or a module of your own."""

from bench.strategies.base import Job, Step, Strategy, load_strategy, that_take_float8
from bench.strategies.stepper import Stepper

__all__ = ["Job", "Step", "Stepper", "Strategy", "load_strategy", "that_take_float8"]
