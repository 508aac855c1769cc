"""torch's CUDA sanitizer, made quick enough for whole runs: it follows which stream reads and writes which memory."""

from __future__ import annotations

import traceback
import types
from typing import Any

import torch
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode


def mode() -> TorchDispatchMode:
    """Within, an operator fails that uses memory another stream used last, unless its stream waited for that one."""
    # Stacks of all earlier accesses, which take most of its time: the error is raised where the later one is.
    _sanitizer.traceback = types.SimpleNamespace(  # type: ignore[attr-defined]
        StackSummary=types.SimpleNamespace(extract=lambda *_, **__: traceback.StackSummary()), walk_stack=_nothing
    )
    _sanitizer.ArgumentHandler._handle_argument = _of_what_has_memory  # type: ignore[method-assign]
    return _sanitizer.CUDASanitizerDispatchMode()


_handle_argument = _sanitizer.ArgumentHandler._handle_argument


def _of_what_has_memory(handler: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    """Leaves out empty tensors, which it knows by a number that a later one may have."""
    if not (isinstance(value, torch.Tensor) and value.is_cuda and value.data_ptr() == 0):
        _handle_argument(handler, value, *args, **kwargs)


def _nothing(frame: Any) -> None:
    """No stack."""
