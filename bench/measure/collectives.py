"""Make collectives let go of their tensors before they return, while memory is observed on a CPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

COLLECTIVES = (
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
"""Of `torch.distributed`, those the strategies call; some were renamed from one version of torch to the next."""

FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Of ``torch.ops._c10d_functional``, what DTensors call: they return before they are done."""

PATIENCE_S = 0.5
"""How long a collective may take to let go before it is left at that."""


@contextlib.contextmanager
def letting_go() -> Iterator[None]:
    """Within, a collective returns only when no thread of the backend holds its tensors any longer.

    The profiler sees what the calling thread releases. Where a thread of gloo holds a tensor a moment longer than
    its owner, that thread releases it, unseen, and the tensor would count as allocated for ever.
    """
    watching = [True]  # for those who keep what they find here, as DeepSpeed does
    operators = torch.ops._c10d_functional
    originals = [(dist, name, getattr(dist, name)) for name in COLLECTIVES if hasattr(dist, name)]
    originals += [(operators, name, getattr(operators, name)) for name in FUNCTIONAL]
    try:
        for where, name, original in originals:
            collective = _Awaited(original) if where is operators else original
            setattr(where, name, _letting_go(collective, watching))
        yield
    finally:
        watching[0] = False
        for where, name, original in originals:
            setattr(where, name, original)


def _letting_go(collective: Callable[..., Any], watching: list[bool]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not watching[0]:
            return collective(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = [_holders(tensor) for tensor in tensors]
        work = collective(*args, **kwargs)
        if work is None or isinstance(work, torch.Tensor):  # else it is waited for, and held, by the caller
            _wait_until_let_go(tensors, before)
        return work

    return call


def _wait_until_let_go(tensors: list[torch.Tensor], counts: list[int]) -> None:
    """Wait until no more than so many hold each of the tensors."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if all(_holders(tensor) <= count for tensor, count in zip(tensors, counts, strict=True)):
            break
        time.sleep(0)


class _Awaited:
    """A functional collective that returns when it is done: what it was given is then nobody's but the caller's."""

    def __init__(self, collective: Callable[..., torch.Tensor]) -> None:
        self._collective = collective
        self.default = collective.default  # type: ignore[attr-defined]
        """Its overload, which some compare operators with."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(self._collective(*args, **kwargs))
        _wait_until_let_go([result], [_holders(torch.empty(0))])
        return result


def _holders(tensor: torch.Tensor) -> int:
    """How many hold the tensor or another one on its memory."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
