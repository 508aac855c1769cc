"""Fake tensors for traces, made in three quarters of the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN_TYPES = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class TracingFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` that finds sooner what it remembers.

    torch remembers what each operator returns for arguments of some shapes, and describes these arguments in twenty
    fields each, which takes as long as all else. Of the tensors of a trace six tell one from another. Torch describes
    the others, such as sparse or complex ones, or a tensor whose value it knows.
    """

    def _prep_args_for_hash(
        self,
        result: list[object],
        args: Mapping[str, Any] | Iterable[Any],
        state: Any,
        id_hashed_objects: list[object],
    ) -> None:
        if isinstance(args, Mapping):
            result.append(tuple(args))
        values: Iterable[Any] = args.values() if isinstance(args, Mapping) else args
        for arg in values:
            kind = type(arg)
            if kind is FakeTensor and self._is_plain(arg):
                result += (kind, arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.requires_grad)
                result.append(arg.fake_device)
            elif kind in PLAIN_TYPES:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                result.append((kind, len(arg)))
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.dtype.is_complex
        )
