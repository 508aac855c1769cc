"""What the knobs of a mesh can be."""

from __future__ import annotations

from bench.core.precision import TRANSFORMER_ENGINE

FSDP_KIND, DDP_KIND, ZERO1_KIND, NO_DATA_PARALLEL = "fsdp", "ddp", "zero1", "none"

RING, ALL_GATHER, ALL_TO_ALL = CONTEXT_FORMS = ("ring", "all_gather", "all_to_all")

TORCH = "torch"
OVERLAP_KERNELS = (TORCH, TRANSFORMER_ENGINE)
"""Whose kernels overlap the exchanges of tensor parallelism with products."""

ALL_TO_ALL_DISPATCHER, DEEPEP = TOKEN_DISPATCHERS = ("all_to_all", "deepep")
"""The first is NCCL's exchange, the second sends a token to a node once."""
