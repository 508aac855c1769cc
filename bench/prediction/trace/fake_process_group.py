"""A process group that is there for its size alone, for what is traced as the first of several ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from bench.models import Family
from bench.strategies.tensor_parallel.split import TensorParallelSplit, localize_parameters

_kept_groups: contextlib.ExitStack | None = None
"""Where process groups stay when the trace is over that they were made for; None: they go."""


@contextlib.contextmanager
def keep_process_group() -> Iterator[None]:
    """Within, the fake process group of the first trace stays for all others, and with it what DTensor has worked out
    for its ranks, which takes a third of a trace: for traces of one model that is split in one way.

    DTensor may use groups of the meshes of earlier traces, which are alike: those of tensor parallelism, of which
    `split_model` yields nothing.
    """
    global _kept_groups
    with contextlib.ExitStack() as _kept_groups:
        try:
            yield
        finally:
            _kept_groups = None


@contextlib.contextmanager
def join_fake_process_group(world_size: int) -> Iterator[None]:
    """Within, this process is the first of so many ranks, which exchange nothing; nothing of it is left behind, unless
    it is kept.

    Raises
    ------
    RuntimeError
        If the process is a rank already.
    """
    if _kept_groups is None:
        with _make_process_group(world_size):
            yield
        return
    is_kept = dist.is_initialized() and dist.get_backend() == FAKE_BACKEND and dist.get_world_size() == world_size
    if not is_kept:
        _kept_groups.enter_context(_make_process_group(world_size))
    yield


FAKE_BACKEND = "fake"
"""Torch's, of its own tests."""


@contextlib.contextmanager
def _make_process_group(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process group of its own, and there is one already")
    excepthook = sys.excepthook  # torch puts one in its place that names the rank
    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        # torch remembers how operators divide their results by the shape of a mesh, and then finds a mesh that is gone.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # takes half a second

        _clear_sharding_prop_cache()
        dist.destroy_process_group()
        sys.excepthook = excepthook


@contextlib.contextmanager
def split_model(
    split: TensorParallelSplit | None, family: Family, model: nn.Module, *, keeps_dtensors: bool = False
) -> Iterator[Mapping[str, str]]:
    """Split a model, which is on meta, as its first rank has it; within, it can be run with fake tensors.

    Nothing happens to a model whose layers are whole (None). Yields what each process group is, as
    `TensorParallelSplit.divide_for_trace`.

    Parameters
    ----------
    keeps_dtensors: bool
        Leave parameters DTensors, whatever the split says: for a model of which a part is taken first.

    Raises
    ------
    RuntimeError
        If the process is a rank already.
    """
    if split is None:
        yield {}
        return
    with join_fake_process_group(split.num_ranks), _hide_shape_propagation():
        group_kinds = split.divide_for_trace(family, model)
        if not (split.keeps_dtensors or keeps_dtensors):
            localize_parameters(model)
        with split.divide_loss():
            yield group_kinds


@contextlib.contextmanager
def _hide_shape_propagation() -> Iterator[None]:
    """Within, nobody sees the operators on whole tensors that DTensor asks for the shape of their results.

    They share a mode: DTensor makes one for each where it finds none, and each notes who made it, which takes longer.
    """
    propagate, mode = ShardingPropagator._propagate_tensor_meta_non_cached, FakeTensorMode()

    def propagate_unseen(self: ShardingPropagator, schema: object) -> object:
        with _disable_current_modes(), mode:
            return propagate(self, schema)  # type: ignore[arg-type]

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen):
        yield
