"""Tensor parallelism: the strategy, and how a model's layers are split."""
