"""How parameters are updated: an optimizer per file, with what it keeps, needs for a while, moves and computes."""

from bench.optimizers.base import OptimizerConfig, list_optimizers, load_optimizer
from bench.optimizers.updated_tensor import UpdatedTensor, find_hidden_matrices

__all__ = ["OptimizerConfig", "UpdatedTensor", "find_hidden_matrices", "list_optimizers", "load_optimizer"]
