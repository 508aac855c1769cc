"""Gradients of micro-batches that are added up before they are communicated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def control_data_parallel_sync(wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
    """Forward and backward within it reduce gradients among data-parallel ranks only if `synchronize` says so, under
    FSDP2 and DDP."""
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(synchronize)
    if isinstance(wrapped, DistributedDataParallel) and not synchronize:
        with wrapped.no_sync():
            yield
    else:
        yield
