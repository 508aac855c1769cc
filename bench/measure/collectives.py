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
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "reduce",
    "broadcast",
)
"""Of `torch.distributed`, those the strategies call; some were renamed from one version of torch to the next."""

FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Of ``torch.ops._c10d_functional``, what DTensors call: they return before they are done."""

PATIENCE_S = 0.5
"""How long a collective may take to let go before it is left at that."""


@contextlib.contextmanager
def letting_go() -> Iterator[None]:
    """Within, a collective is over only when no thread of the backend holds its tensors any longer.

    It is over when it returns or, if it runs beside its caller, when it was waited for. The profiler sees what the
    calling thread releases. Where a thread of gloo holds a tensor a moment longer than its owner, that thread releases
    it, unseen, and the tensor would count as allocated for ever.
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
        before = [holders(tensor) for tensor in tensors]
        work = collective(*args, **kwargs)
        if isinstance(work, dist.Work):
            return _LettingGo(work, tensors, before)
        _wait_until_let_go(tensors, before)
        return work

    return call


def _wait_until_let_go(tensors: list[torch.Tensor], counts: list[int]) -> None:
    """Wait until no more than so many hold each of the tensors."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if all(holders(tensor) <= count for tensor, count in zip(tensors, counts, strict=True)):
            break
        time.sleep(0)


class _LettingGo(dist.Work):
    """Work under way which, once waited for, nobody but its caller holds the tensors of.

    As the work itself does, it keeps its tensors for as long as it is kept.
    """

    def __init__(self, work: dist.Work, tensors: list[torch.Tensor], before: list[int]) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._tensors = tensors
        self._before = before

    def wait(self, *args: Any) -> bool:
        if self._work is not None:
            self._work.wait(*args)
            self._work = None
            _wait_until_let_go(self._tensors, self._before)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def get_future(self) -> Any:
        if self._work is None:
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(self._tensors)
            return done
        return self._work.get_future()


class _Awaited:
    """A functional collective that returns when it is done: what it was given is then nobody's but the caller's."""

    def __init__(self, collective: Callable[..., torch.Tensor]) -> None:
        self._collective = collective
        self.default = collective.default  # type: ignore[attr-defined]
        """Its overload, which some compare operators with."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(self._collective(*args, **kwargs))
        _wait_until_let_go([result], [holders(torch.empty(0))])
        return result


def holders(tensor: torch.Tensor) -> int:
    """How many hold the tensor or another one on its memory; Python's names for a tensor count as one."""
    return tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
