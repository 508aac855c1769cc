"""Activation offload: what blocks keep for backward waits in the memory of the machine around the device.

torch's `save_on_cpu` offloads everything that autograd saves. Here weights stay where they are, and so does what all
blocks are given in common, such as masks and the encoder's output; a tensor that several operators save moves once.
Copies are on the stream that computes, which waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bench.models.base import Family

MIN_OFFLOADED_DIMS = 2
"""Of what moves: tokens and their features. What has fewer is small."""


class HostTransfer(Protocol):
    """Moves tensors between the device and the host."""

    def copy_to_host(self, tensor: torch.Tensor) -> Any:
        """What stands for the tensor on the host."""
        ...

    def copy_to_device(self, host_copy: Any, device: torch.device) -> torch.Tensor:
        """The tensor again."""
        ...


class PinnedTransfer:
    """Copies to memory that the device can read by itself. On a CPU, whose memory is the host's, plain copies."""

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host_copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        return host_copy.copy_(tensor, non_blocking=True)

    def copy_to_device(self, host_copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_like(host_copy, device=device).copy_(host_copy, non_blocking=True)


@dataclass(eq=False)
class _OffloadedTensor:
    host_copy: Any
    device: torch.device
    num_savings: int = 0
    """Times that it was saved and not yet used."""
    on_device: torch.Tensor | None = None
    """From the first use in backward to the last one."""


class _BlockOffload:
    """What one pass through a block saves."""

    def __init__(self, transfer: HostTransfer, shared_tensors: Iterator[torch.Tensor]) -> None:
        self._transfer = transfer
        self._shared_storages = {tensor.untyped_storage()._cdata for tensor in shared_tensors}
        self._offloaded: dict[tuple[Any, ...], tuple[StorageWeakRef, _OffloadedTensor]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _OffloadedTensor:
        storage = tensor.untyped_storage()
        if tensor.dim() < MIN_OFFLOADED_DIMS or storage._cdata in self._shared_storages or _is_weight(tensor):
            return tensor
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        reference, offloaded = self._offloaded.get(key, (None, None))
        if offloaded is None or reference is None or reference.expired():
            with torch.no_grad():
                offloaded = _OffloadedTensor(self._transfer.copy_to_host(tensor.detach()), tensor.device)
            self._offloaded[key] = StorageWeakRef(storage), offloaded
        offloaded.num_savings += 1
        return offloaded

    def unpack(self, saved: torch.Tensor | _OffloadedTensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = saved.on_device
        if tensor is None:
            tensor = self._transfer.copy_to_device(saved.host_copy, saved.device)
        saved.num_savings -= 1
        saved.on_device = tensor if saved.num_savings > 0 else None
        return tensor


def offload_activations(family: Family, model: nn.Module, transfer: HostTransfer) -> None:
    """Have every block, checkpointed or not, offload what autograd saves in it.

    Of a block that is checkpointed that is what its checkpoint keeps, except for results of operators that are saved
    by choice, which torch keeps elsewhere.
    """
    for block in (block for blocks in family.find_block_lists(model) for block in blocks):
        block.forward = _build_offloading_forward(block.forward, transfer)  # type: ignore[method-assign]


def _build_offloading_forward(forward: Any, transfer: HostTransfer) -> Any:
    def run_offloading(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        offload = _BlockOffload(transfer, _iterate_tensors((args, kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
            return forward(hidden, *args, **kwargs)

    return run_offloading


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return True
    if base.grad_fn is None or base.grad_fn.name() != "ToCopyBackward0":
        return False
    source = base.grad_fn.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _iterate_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_tensors(item)
