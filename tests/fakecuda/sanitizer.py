"""torch's CUDA sanitizer, made quick enough for whole runs: it follows which stream reads and writes which memory."""

from __future__ import annotations

import traceback
import types
from typing import Any

import torch
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode


def create_sanitizer_mode() -> TorchDispatchMode:
    """Within, an operator fails that uses memory another stream used last, unless its stream waited for that one."""
    # Stacks of all earlier accesses, which take most of its time: the error is raised where the later one is.
    _sanitizer.traceback = types.SimpleNamespace(  # type: ignore[attr-defined]
        StackSummary=types.SimpleNamespace(extract=lambda *_, **__: traceback.StackSummary()), walk_stack=_walk_no_stack
    )
    _sanitizer.ArgumentHandler._handle_argument = _handle_nonempty_argument  # type: ignore[method-assign]
    return _sanitizer.CUDASanitizerDispatchMode()


_original_handle_argument = _sanitizer.ArgumentHandler._handle_argument


def _handle_nonempty_argument(handler: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    """Leaves out empty tensors, which it knows by a number that a later one may have."""
    if not (isinstance(value, torch.Tensor) and value.is_cuda and value.data_ptr() == 0):
        _original_handle_argument(handler, value, *args, **kwargs)


def _walk_no_stack(frame: Any) -> None:
    """No stack."""
