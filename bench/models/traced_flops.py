"""FLOPs of a model without a formula: the matrix products of a forward pass on meta."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.models.base import Family, FlopCount

ATTENTION_OPERATORS = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}
"""Products of activations; scaled dot-product attention consists of them on meta. All others are with weights."""


CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")
"""How models of transformers call a decoder block's attention to the encoder's output, which no mask halves."""


@functools.lru_cache(maxsize=256)
def trace_flops(family: Family, sequence_length: int) -> FlopCount:
    """Count the matrix products of one sequence's forward pass, on meta."""
    model = family.build_model().to("meta")
    recorder = _FlopRecorder()
    block_lists = family.find_block_lists(model)
    task_name = getattr(family, "task_name", None)
    causal_lists = block_lists if task_name == "causal_lm" else block_lists[1:] if task_name == "seq2seq_lm" else ()
    for block in (block for blocks in causal_lists for block in blocks):
        block.register_forward_pre_hook(recorder.enter_causal)
        block.register_forward_hook(recorder.leave_causal)
        for name, module in block.named_modules():
            if name.rpartition(".")[2] in CROSS_ATTENTION_NAMES:
                module.register_forward_pre_hook(recorder.leave_causal)
                module.register_forward_hook(recorder.enter_causal)
    for block in (block for blocks in block_lists for block in blocks):
        block.register_forward_pre_hook(recorder.enter_block)
        block.register_forward_hook(recorder.leave_block)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if head is not None:
        head.register_forward_pre_hook(recorder.enter_head)
        head.register_forward_hook(recorder.leave_head)
    batch = family.build_batch(1, sequence_length, torch.Generator())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        torch.autograd.graph.saved_tensors_hooks(recorder.note_saved, lambda tensor: tensor),
    ):
        model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})
    recomputed_by_block = tuple(tuple(recorder.recomputed.get(block, 0) for block in blocks) for blocks in block_lists)
    return FlopCount(
        recorder.linear,
        recorder.attention,
        recorder.last_linear,
        recorder.outside,
        recomputed_by_block=recomputed_by_block,
        head=None if recorder.head in (0, recorder.outside) else recorder.head,
        causal_attention=recorder.causal_attention,
    )


class _FlopRecorder(TorchDispatchMode):
    """Counts the FLOPs of matrix products, inside blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.block_depth = 0
        self.causal_depth = self.causal_attention = 0
        self.linear = self.attention = self.last_linear = self.outside = self._flops_before = 0
        self._flops_at_last_save = 0
        self.head = self._flops_before_head = 0
        self.recomputed: dict[nn.Module, int] = {}
        """Of each block, the products before autograd keeps the last tensor for its backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=results)
            if not self.block_depth:
                self.outside += flops
            elif packet in ATTENTION_OPERATORS or "attention" in packet.__name__:
                self.attention += flops
                self.causal_attention += flops if self.causal_depth else 0
            else:
                self.linear += flops
        return results

    def enter_head(self, *_: Any) -> None:
        self._flops_before_head = self.outside

    def leave_head(self, *_: Any) -> None:
        self.head = self.outside - self._flops_before_head

    def enter_causal(self, *_: Any) -> None:
        self.causal_depth += 1

    def leave_causal(self, *_: Any) -> None:
        self.causal_depth -= 1

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called with what autograd keeps: an operator's inputs before it runs."""
        if self.block_depth:
            self._flops_at_last_save = self.linear + self.attention
        return tensor

    def enter_block(self, *_: Any) -> None:
        if not self.block_depth:
            self._flops_before = self._flops_at_last_save = self.linear + self.attention
        self.block_depth += 1

    def leave_block(self, block: nn.Module, *_: Any) -> None:
        self.block_depth -= 1
        if not self.block_depth:
            self.last_linear += self.linear + self.attention - self._flops_at_last_save
            self.recomputed[block] = self._flops_at_last_save - self._flops_before
