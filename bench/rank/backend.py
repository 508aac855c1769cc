"""What a run's ranks communicate by."""

from __future__ import annotations

from bench.config.run_config import RunConfig

REHEARSAL_BACKEND = "rehearsal"


def choose_backend(config: RunConfig) -> str:
    """The communication library of a run's devices, and gloo beside it where tensors that were offloaded are reduced:
    NCCL knows none that lie in the machine's memory."""
    if config.hardware.device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if config.strategy.has_host_collectives else "nccl"
