"""Fake tensors for traces, made in half the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    _DISPATCH_HANDLE_DIRECTLY,
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    FakeTensorMode,
)

PLAIN_TYPES = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

DISPATCHED_WITHOUT_CACHE = frozenset((*_DISPATCH_HANDLE_DIRECTLY, *_DISPATCH_META_HANDLERS))
"""Operators that ask for a tensor's size and the like, which torch answers at once."""


class TracingFakeTensorMode(FakeTensorMode):
    """A `FakeTensorMode` that finds sooner what it remembers, and returns it sooner.

    torch remembers what each operator returns for arguments of some shapes, and describes these arguments in twenty
    fields each, which takes as long as all else. Of the tensors of a trace six tell one from another. Torch describes
    the others, such as sparse or complex ones, or a tensor whose value it knows.

    A tensor that is returned differs from the first one of its device in its memory, shape and format alone: it is
    made with the other fields of that one, which torch would check and fill one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fields_by_device: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Its compiler never comes here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch's, without what it would log."""
        if func in DISPATCHED_WITHOUT_CACHE:
            return self.dispatch(func, types, args, kwargs or {})
        return self._cached_dispatch_impl(func, types, args, kwargs or {})

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

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        metadata = entry.metadata
        fields = metadata and self._fields_by_device.get(metadata.device)
        is_plain = metadata and metadata.layout is torch.strided and not (metadata.is_conj or metadata.is_neg)
        if not fields or not is_plain or entry.inplace_idx is not None:
            output = super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
            if type(output) is FakeTensor and entry.inplace_idx is None:
                self._fields_by_device.setdefault(output.fake_device, dict(vars(output)))
            return output
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            on_meta = torch.empty_strided(
                metadata.shape,
                metadata.stride,
                dtype=metadata.dtype,
                device="meta",
                requires_grad=metadata.requires_grad,
            )
            if func.is_view:
                viewed_storage = args[entry.view_idx].untyped_storage()
                on_meta.set_(viewed_storage, metadata.storage_offset, metadata.shape, metadata.stride)
        output = torch.Tensor._make_subclass(
            FakeTensor,
            on_meta,
            metadata.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=metadata.device,
        )
        vars(output).update(fields)
        torch._C._set_throw_on_mutable_data_ptr(output)
        return output

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.dtype.is_complex
        )
