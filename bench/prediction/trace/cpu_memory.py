"""What a real run on a CPU allocates otherwise than a trace with fake tensors shows.

Two things cannot be seen from operators' results. Operators have working memory of their own, and autograd adds up the
gradients of a tensor that was used several times in place, except where a trace watches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils._python_dispatch import TorchDispatchMode

from bench.prediction.trace.kernels import find_query_block_size

aten = torch.ops.aten

FP32_BYTES = 4

HALF_DTYPES = (torch.bfloat16, torch.float16)

AUTOGRAD_ENGINE_FUNCTION = "_engine_run_backward"
"""The last Python function before autograd's engine."""

DISPATCH_FRAME_FILES = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/utils/_python_dispatch.py")
"""Files whose frames may lie between a dispatch mode and what called the operator."""


class InPlaceSumDetector:
    """Knows the additions that autograd's engine would do in place in a real run.

    The engine adds up the gradients of a tensor that was used several times, into the one it holds already if nothing
    else holds that memory (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp), but never where a
    dispatch mode is active. Create it before entering one.
    """

    def __init__(self) -> None:
        self._private_use_counts = _measure_private_use_counts()

    def is_in_place_sum(self, func: Any, args: tuple[Any, ...], caller: FrameType | None) -> bool:
        """Whether a call of an operator is such an addition, into its first argument.

        Parameters
        ----------
        caller: FrameType or None
            The frame that called the dispatch mode.
        """
        if func is not aten.add.Tensor or torch._C._current_graph_task_id() == -1 or not _is_called_by_engine(caller):
            return False
        use_counts = zip(_count_uses(args[0]), self._private_use_counts, strict=True)
        return all(count <= private_count for count, private_count in use_counts) and _is_dense(args[0])


def _measure_private_use_counts() -> tuple[int, int]:
    """What `_count_uses` says within a dispatch mode of a gradient that the engine alone holds."""
    use_counts: list[tuple[int, int]] = []

    class UseCountMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                use_counts.append(_count_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with UseCountMode():
        doubled = torch.ones(2, requires_grad=True) * 2
        torch.cat([doubled * 3, doubled * 4]).sum().backward()
    return use_counts[0]


def _count_uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the tensor, and how many its memory."""
    count = tensor._use_count()  # type: ignore[attr-defined]
    return count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_called_by_engine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(DISPATCH_FRAME_FILES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == AUTOGRAD_ENGINE_FUNCTION


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in memory without gaps, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@contextlib.contextmanager
def track_rng_states(track_tensor: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within, `track_tensor` is told of the states of the random number generator that checkpointing keeps of a block
    that drops something out, and of the one that computing it again keeps for a while: 5 KB each, made by no
    operator."""
    original_get_rng_state = torch.get_rng_state

    def get_tracked_rng_state() -> torch.Tensor:
        state = original_get_rng_state()
        track_tensor(state)
        return state

    torch.get_rng_state = get_tracked_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original_get_rng_state


def compute_working_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes an operator allocates on a CPU while it runs, besides its results.

    Left out is what comes to a few kilobytes: numbers wrapped as tensors, partial sums of layer norms. And what oneDNN
    takes for a product in 16 bits, which is not counted where memory is measured either (`CpuMemoryProbe`): how much
    depends on the processor's instructions and on the library's choice of blocks, and not smoothly on the shape.
    """
    name = func._schema.name.partition("::")[2]
    if name == "_safe_softmax":  # which scores are masked, and which rows are masked altogether
        return args[0].numel() + args[0].numel() // args[0].shape[args[1]]
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return _compute_attention_buffers(name, args)
    if name in ("scatter_add", "scatter_add_") and args[0].dtype in HALF_DTYPES:
        return args[0].numel() * FP32_BYTES  # sums up in fp32 (aten/src/ATen/native/cpu/ScatterGatherKernel.cpp)
    if name == "chunk_cat":  # FSDP2's
        return _compute_chunk_cat_copies(args[0], args[2] if len(args) > 2 else kwargs["num_chunks"], kwargs["out"])
    if name.startswith("native_layer_norm"):  # whose kernels take what is contiguous (.../native/layer_norm.cpp)
        inputs = args[:2] if name.endswith("backward") else args[:1]
        return sum(tensor.nbytes for tensor in inputs if not tensor.is_contiguous())
    if torch.Tag.pointwise in func.tags:
        return _compute_promotion_copies(func, args, kwargs)
    return 0


def _compute_attention_buffers(name: str, args: tuple[Any, ...]) -> int:
    """Blocks of scores, one set per thread (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    backward = name.endswith("backward")
    query, key = args[1:3] if backward else args[:2]
    queries, head_size = query.shape[-2:]
    query_block_size = find_query_block_size(queries)
    num_scores = query_block_size * min(512, key.shape[-2])
    rounded_score_bytes = num_scores * query.element_size() if query.element_size() < FP32_BYTES else 0
    if backward:
        bytes_per_thread = 2 * (num_scores * FP32_BYTES + rounded_score_bytes) + query_block_size * FP32_BYTES
    else:
        bytes_per_thread = (num_scores + query_block_size * (head_size + 2)) * FP32_BYTES + rounded_score_bytes
    return torch.get_num_threads() * bytes_per_thread


def _compute_chunk_cat_copies(tensors: list[torch.Tensor], num_chunks: int, output: torch.Tensor) -> int:
    """Copies of tensors whose rows cannot be cut into so many equal chunks, and where the format changes one of each
    in turn (``_chunk_cat`` in aten/src/ATen/native/TensorShape.cpp)."""
    padded_sizes = [
        -(-tensor.shape[0] // num_chunks) * num_chunks * (tensor.nbytes // tensor.shape[0]) for tensor in tensors
    ]
    padded_bytes = sum(size for size, tensor in zip(padded_sizes, tensors, strict=True) if size != tensor.nbytes)
    largest_conversion = max(
        (size for size, tensor in zip(padded_sizes, tensors, strict=True) if tensor.dtype != output.dtype), default=0
    )
    return padded_bytes + largest_conversion


def _compute_promotion_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Copies of the operands that are not of the format the operator computes in, as `TensorIterator` makes them."""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    # A number of its own or within a tensor counts for its kind alone, never for its width.
    _, common_dtype = elementwise_dtypes(
        *(value for value in args if isinstance(value, (torch.Tensor, int, float))),
        type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT,
    )
    converted_operands = [operand for operand in operands if operand.dtype != common_dtype]
    if func._schema.is_mutable:
        converted_operands += [args[0]] * (args[0].dtype != common_dtype)
    return sum(operand.numel() for operand in converted_operands) * common_dtype.itemsize
