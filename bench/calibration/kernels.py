"""Number formats that a device computes in, and how a calibration sets them up."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from bench.calibration.sample import (
    ATTENTION,
    LAUNCH,
    MATMUL,
    MEMORY,
    SUSTAINED,
    CalibrationSample,
    CallTimer,
    TimedCall,
    build_timer,
)
from bench.core.precision import TORCH_DTYPE_NAMES, Precision, get_torch_dtype
from bench.core.units import MIB
from bench.optimizers import UpdatedTensor, load_optimizer
from bench.optimizers.base import TORCH_IMPLEMENTATIONS
from bench.prediction.cost.rank_speed import build_updates_key
from bench.prediction.trace.kernels import ATTENTION_BACKWARD_MATMULS, ATTENTION_FORWARD_MATMULS


def list_formats(device: torch.device) -> tuple[str, ...]:
    """What is measured: fp32 and bf16 on a CPU, all that its compute capability allows on a GPU."""
    if device.type == "cpu":
        return "fp32", "bf16"
    capability = torch.cuda.get_device_capability(device)
    return ("fp32", "tf32", "bf16", "fp16") if capability >= (8, 0) else ("fp32", "fp16")


def find_operand_dtype(format_: str) -> torch.dtype:
    """How operands are stored: in fp32 for TF32."""
    return get_torch_dtype(format_) if format_ in TORCH_DTYPE_NAMES else torch.float32


@contextlib.contextmanager
def use_format(format_: str) -> Iterator[None]:
    """Within, fp32 matrix products use TF32 if that is the format."""
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if format_ == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous_precision)


def build_precision(format_: str) -> Precision:
    """Training as the suite does it in a format: mixed precision where it is narrower than fp32."""
    return Precision(
        name=format_,
        parameters="fp32",
        compute=format_ if format_ in TORCH_DTYPE_NAMES else "fp32",
        reduce="fp32",
        tf32=format_ == "tf32",
        peak=format_ if format_ in (*TORCH_DTYPE_NAMES, "tf32") else "fp32",
    )


# --- Fused attention, forward and backward, over sequence lengths and head dimensions.

ATTENTION_SHAPES = {
    "cpu": ((1, 5, 40, 64), (2, 10, 96, 32), (2, 5, 224, 64), (1, 6, 448, 32), (1, 3, 640, 64), (1, 2, 1024, 64)),
    "cuda": tuple(
        (16384 * 1024 // (sequence_length * head_dim * 16), 16, sequence_length, head_dim)
        for sequence_length in (512, 2048, 4096)
        for head_dim in (32, 64, 96, 128)
    ),
}
"""Batch, heads, queries (and as many keys), head dimension."""

FORWARD, BACKWARD = "forward", "backward"
OPERAND_SETS = 3
"""Operands that are used in turn."""

REPETITIONS, QUICK_REPETITIONS = 9, 5


def _time_each(
    calls_and_samples: Iterable[tuple[list[TimedCall], CalibrationSample]], device: torch.device, *, quick: bool
) -> list[CalibrationSample]:
    timer, repetitions = build_timer(device), QUICK_REPETITIONS if quick else REPETITIONS
    return [
        dataclasses.replace(sample, seconds=timer.time_repetitions(calls, repetitions))
        for calls, sample in calls_and_samples
    ]


def measure_attention(
    device: torch.device, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time causal attention of every shape in every format that has a fused kernel."""
    samples = []
    for format_ in list_formats(device):
        if format_ == "tf32":
            continue
        on_progress(f"attention in {format_}")
        with use_format(format_):
            for shape in ATTENTION_SHAPES[device.type][:: 2 if quick else 1]:
                samples += _time_each(_list_passes(shape, format_, device), device, quick=quick)
    return samples


def _list_passes(
    shape: tuple[int, int, int, int], format_: str, device: torch.device
) -> Iterator[tuple[list[TimedCall], CalibrationSample]]:
    """Calls of the forward pass and of the backward pass, each with its sample, not timed yet."""
    batch_size, heads, sequence_length, head_dim = shape
    dtype = find_operand_dtype(format_)

    def make_operands() -> list[torch.Tensor]:
        random_tensors = (torch.randn(batch_size, heads, sequence_length, head_dim, device=device) for _ in range(3))
        return [tensor.to(dtype).requires_grad_() for tensor in random_tensors]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    operand_sets = [make_operands() for _ in range(OPERAND_SETS)]
    outputs = [attend(*operand_set) for operand_set in operand_sets]
    gradients = [torch.randn_like(output) for output in outputs]
    forward_calls: list[TimedCall] = [
        partial(attend, *(tensor.detach() for tensor in operand_set)) for operand_set in operand_sets
    ]
    backward_calls: list[TimedCall] = [
        partial(torch.autograd.grad, *arguments, retain_graph=True)
        for arguments in zip(outputs, operand_sets, gradients, strict=True)
    ]
    product_flops = 2.0 * batch_size * heads * sequence_length * sequence_length * head_dim
    tensor_bytes = float(dtype.itemsize * batch_size * heads * sequence_length * head_dim)
    for name, calls, product_count, tensor_count in (
        (FORWARD, forward_calls, ATTENTION_FORWARD_MATMULS, 4),
        (BACKWARD, backward_calls, ATTENTION_BACKWARD_MATMULS, 8),
    ):
        yield (
            calls,
            CalibrationSample(
                kind=ATTENTION,
                name=name,
                format=format_,
                dims=(batch_size, heads, sequence_length, sequence_length, head_dim),
                flops=product_flops * product_count / 2,
                bytes_moved=tensor_count * tensor_bytes,
                seconds=(),
            ),
        )


# --- Matrix products over the shapes that models use: forward, and the gradients of input and weight.

MATMUL_SHAPES = (
    *((tokens, width, 4 * width) for tokens in (1024, 4096, 16384) for width in (512, 1024, 2048, 4096, 8192)),
    *((8192, width, width) for width in (256, 768, 1600, 5120)),
    *((rows, depth, 4096) for rows in (4096, 16384) for depth in (64, 128, 256, 512)),
)
"""Tokens, width that a product reads and width it makes. Some have a short inner dimension, which shows what a thread
block takes to begin and end."""

MIN_ROTATED_BYTES = 2**28
"""Operands that are used in turn take together more than the caches hold."""

MAX_OPERAND_SETS = 24


def measure_matmul(device: torch.device, *, quick: bool, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time products of every shape in every format."""
    samples = []
    for format_ in list_formats(device):
        on_progress(f"matrix products in {format_}")
        shapes = MATMUL_SHAPES[::2] if quick else MATMUL_SHAPES
        with use_format(format_):
            for shape in shapes:
                samples += _time_each(_list_products(shape, format_, device), device, quick=quick)
    return samples


def _list_products(
    shape: Sequence[int], format_: str, device: torch.device
) -> Iterator[tuple[list[TimedCall], CalibrationSample]]:
    """The three products of a linear layer, of these tokens, from one width to another: calls of each, and its sample,
    not timed yet."""
    tokens, input_width, output_width = shape
    dtype = find_operand_dtype(format_)
    bytes_moved = float(dtype.itemsize * (tokens * input_width + input_width * output_width + tokens * output_width))
    operand_count = min(MAX_OPERAND_SETS, max(2, round(MIN_ROTATED_BYTES / bytes_moved)))
    inputs, weights, gradients = (
        [torch.randn(size, device=device).to(dtype) for _ in range(operand_count)]
        for size in ((tokens, input_width), (output_width, input_width), (tokens, output_width))
    )
    # Name, operands, and rows, columns and inner dimension; the left operand is transposed in the last.
    layouts = (
        (FORWARD, inputs, [weight.t() for weight in weights], (tokens, output_width, input_width)),
        ("gradient of the input", gradients, weights, (tokens, input_width, output_width)),
        (
            "gradient of the weight",
            [gradient.t() for gradient in gradients],
            inputs,
            (output_width, input_width, tokens),
        ),
    )
    for name, left, right, (rows, columns, depth) in layouts:
        yield (
            [partial(torch.mm, a, b) for a, b in zip(left, right, strict=True)],
            CalibrationSample(
                kind=MATMUL,
                name=name,
                format=format_,
                dims=(1, rows, columns, depth, int(left is layouts[2][1])),
                flops=2.0 * rows * columns * depth,
                bytes_moved=bytes_moved,
                seconds=(),
            ),
        )


# --- What a power limit leaves of products and attention, once it sets the clocks.

SUSTAINED_PRODUCT = (16384, 2048, 8192)
SUSTAINED_ATTENTION = (4, 16, 2048, 128)
"""Shapes as in `MATMUL_SHAPES` and `ATTENTION_SHAPES`."""

SUSTAINED_S, QUICK_SUSTAINED_S = 3.0, 1.0
"""Seconds that each is kept up: clocks of an H100 settle in one (results/calibration/h100_power.csv)."""

SETTLED_SHARE = 0.5
"""Of these, the last part that counts."""


def measure_sustained(
    device: torch.device, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time a product and fused attention in every format but fp32, which draws less: in a burst, then for seconds."""
    samples: list[CalibrationSample] = []
    for format_ in list_formats(device):
        if format_ == "fp32":
            continue
        on_progress(f"what is kept up in {format_}")
        sustained_s = QUICK_SUSTAINED_S if quick else SUSTAINED_S
        with use_format(format_):
            kept_up = [_list_products(SUSTAINED_PRODUCT, format_, device)]
            if format_ != "tf32":
                kept_up.append(_list_passes(SUSTAINED_ATTENTION, format_, device))
            for calls_and_samples in kept_up:
                first = list(itertools.islice(calls_and_samples, 1))
                samples += _time_each(first, device, quick=quick)
                samples += [_keep_up(calls, sample, device, sustained_s) for calls, sample in first]
    return samples


def _keep_up(
    calls: list[TimedCall], burst: CalibrationSample, device: torch.device, sustained_s: float
) -> CalibrationSample:
    """The same operation again and again, and how long it takes in the end."""
    timer, seconds, elapsed_s = build_timer(device), [], 0.0
    while elapsed_s < sustained_s:
        stretch_s = timer.time_calls(calls * KEPT_UP_TOGETHER)
        seconds.append(stretch_s / (len(calls) * KEPT_UP_TOGETHER))
        elapsed_s += stretch_s
    settled = seconds[int(len(seconds) * (1 - SETTLED_SHARE)) :]
    return dataclasses.replace(burst, kind=SUSTAINED, name=burst.kind, seconds=tuple(settled))


KEPT_UP_TOGETHER = 10
"""Times that all calls are started before the processor waits for them."""


# --- Memory: how fast large tensors are read and written.

ELEMENTWISE_OPERATOR = "mul"

ELEMENT_COUNTS = {"cpu": (3 * MIB, 7 * MIB), "cuda": (2**26, 2**28)}
"""Elements of fp32."""

MEMORY_PASSES, QUICK_MEMORY_PASSES = 15, 7
TENSOR_PAIRS = 3


def measure_memory(device: torch.device, *, quick: bool, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time one elementwise operator on large tensors."""
    on_progress("memory")
    timer, repetitions = build_timer(device), QUICK_MEMORY_PASSES if quick else MEMORY_PASSES
    samples = []
    for element_count in ELEMENT_COUNTS[device.type]:
        pairs = [[torch.randn(element_count, device=device) for _ in range(2)] for _ in range(TENSOR_PAIRS)]
        calls = [lambda pair=pair: torch.mul(pair[0], 1.5, out=pair[1]) for pair in pairs]  # type: ignore[misc]
        seconds = timer.time_repetitions(calls, repetitions)
        samples.append(
            CalibrationSample(MEMORY, ELEMENTWISE_OPERATOR, "fp32", (element_count,), 0.0, 8.0 * element_count, seconds)
        )
    return samples


# --- Optimizers' steps: every implementation the suite knows, on the gradients of a training step.

SCRATCH_BYTES = 2**26
"""Memory that is written before each step: in training, parameters and states were last used a whole step ago."""


FP32_BYTES = 4


class TimedOptimizers:
    """All optimizers over one model's parameters, in fp32."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        parameters = list(module.parameters())
        self._parameter_counts = len(parameters), sum(parameter.numel() for parameter in parameters)
        self._scratch = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        configs = [
            load_optimizer(name)(name, implementation, learning_rate=1e-6)
            for name in ("adamw", "sgd")
            for implementation in TORCH_IMPLEMENTATIONS
        ]
        self._optimizers = [(config, config.build(module.parameters())) for config in configs]

    def initialize_states(self) -> None:
        """Take a first step of each, which makes its states. The parameters have gradients."""
        for _, optimizer in self._optimizers:
            optimizer.step()

    def time_steps(self, timer: CallTimer) -> Iterator[tuple[str, tuple[int, int], float, float]]:
        """Take a step of each: its name, number of tensors and of elements, bytes, and seconds."""
        for config, optimizer in self._optimizers:
            self._scratch.add_(1)
            bytes_moved = float(config.compute_moved_bytes([UpdatedTensor((self._parameter_counts[1],))], FP32_BYTES))
            yield build_updates_key(config), self._parameter_counts, bytes_moved, timer.time_calls([optimizer.step])


# --- The shortest time from one kernel to the next on a GPU.

KERNEL_SAMPLE = "kernel"
"""Name of the samples of one kernel after the other with next to nothing to do."""

KERNELS_PER_GRAPH = 500
LAUNCH_REPETITIONS = 15


def measure_launch(device: torch.device, *, on_progress: Callable[[str], None]) -> list[CalibrationSample]:
    """Time kernels that a graph starts one after the other: the processor has no part in it.

    What starting an operator takes on a processor is in the steps of the smallest models (`bench.calibration.steps`).
    """
    if device.type != "cuda":
        return []
    on_progress("kernels in a graph")
    tensor = torch.ones(1, device=device)
    tensor.mul_(1.0)  # loads the kernel, which cannot be done within a graph
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS_PER_GRAPH):
            tensor.mul_(1.0)
    replay_seconds = build_timer(device).time_repetitions([graph.replay], LAUNCH_REPETITIONS)
    kernel_seconds = tuple(time / KERNELS_PER_GRAPH for time in replay_seconds)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return [
        CalibrationSample(LAUNCH, KERNEL_SAMPLE, "fp32", (KERNELS_PER_GRAPH, multiprocessors), 0.0, 8.0, kernel_seconds)
    ]
