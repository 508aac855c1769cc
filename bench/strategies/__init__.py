"""Parallelisation strategies: one file each. `name` in a strategy's YAML names the file, or a module of your own."""

from bench.strategies.base import Job, Strategy, load_strategy

__all__ = ["Job", "Strategy", "load_strategy"]
