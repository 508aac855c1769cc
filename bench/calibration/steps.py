"""Operators and optimizers timed inside real training steps of small models, and what the steps take besides.

Alone and in a row an operator finds its operands in the caches, or never; between others it finds what training leaves
there. The models are made for this: nothing in them has the width, or the length, of a model of ``conf/model``.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bench.calibration.kernels import TimedOptimizers, build_precision
from bench.calibration.sample import ATTENTION as ATTENTION_SAMPLE
from bench.calibration.sample import (
    LAUNCH,
    OPERATOR,
    OPTIMIZER,
    CalibrationSample,
    CallTimer,
    build_timer,
)
from bench.calibration.sample import MATMUL as MATMUL_SAMPLE
from bench.models import Batch, Family
from bench.models.gpt import GPTFamily
from bench.models.t5 import T5Family
from bench.optimizers.adamw import AdamWConfig
from bench.prediction.trace.kernel_calls import describe_kernel, is_kernel
from bench.prediction.trace.kernels import ATTENTION, MATMUL, OPERAND_FORMATS
from bench.rank.engine import Engine, build_engine, build_micro_batches
from bench.strategies.single import SingleProcessStrategy

STEP_SAMPLE = "step"
"""Name of the samples of whole forward and backward passes, of so little work that starting it is all."""

CALL_SAMPLE = "call"
"""Name of the samples of one operator among those of such a pass."""

SAMPLE_KIND_BY_KERNEL = {MATMUL: MATMUL_SAMPLE, ATTENTION: ATTENTION_SAMPLE}
MIN_OPERATOR_S = 10e-6
"""Operators that take less say nothing about rates."""

VOCABULARY_SIZE, SMALLEST_VOCABULARY_SIZE = 3000, 64


@dataclass(frozen=True)
class StepShape:
    """A model and a batch."""

    hidden_size: int
    num_heads: int
    batch_size: int
    sequence_length: int
    vocabulary_size: int = VOCABULARY_SIZE
    activation: str = "gelu_pytorch_tanh"
    """Of the GPT."""

    def build_models(self) -> tuple[Family, Family]:
        """A GPT and a T5."""
        common_arguments = ("calibration", "gpt", "sdpa", self.vocabulary_size)
        gpt = GPTFamily(
            *common_arguments,
            1024,
            hidden_size=self.hidden_size,
            num_layers=2,
            num_heads=self.num_heads,
            activation=self.activation,
        )
        common_arguments = ("calibration", "t5", "sdpa", self.vocabulary_size)
        dimensions = (self.hidden_size, 4 * self.hidden_size, self.hidden_size // self.num_heads, self.num_heads)
        return gpt, T5Family(*common_arguments, *dimensions, num_encoder_layers=1, num_decoder_layers=2)


def _build_shapes(*sizes: tuple[int, int, int, int]) -> tuple[StepShape, ...]:
    """Shapes whose activation is one operator or several, in turn."""
    return tuple(StepShape(*size, activation=ACTIVATIONS[index % 2]) for index, size in enumerate(sizes))


ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")

STEP_SHAPES = {
    "cpu": _build_shapes(
        (96, 3, 8, 224),
        (192, 6, 4, 96),
        (320, 5, 1, 40),
        (320, 5, 6, 192),
        (640, 10, 2, 56),
        (640, 10, 4, 160),
        (896, 14, 2, 96),
    ),
    "cuda": _build_shapes((1280, 20, 8, 512), (2560, 20, 4, 1024)),
}
QUICK_STEP_SHAPES = {
    "cpu": _build_shapes((96, 3, 4, 96), (320, 5, 1, 40), (320, 5, 4, 112), (640, 10, 3, 72)),
    "cuda": STEP_SHAPES["cuda"][:1],
}
SMALLEST_SHAPES = tuple(StepShape(*size, SMALLEST_VOCABULARY_SIZE) for size in ((32, 2, 1, 8), (48, 3, 1, 16)))
"""Models whose steps are nothing but starting operators."""

CALLS_TOGETHER = {"cpu": 1, "cuda": 10}
"""Calls of an operator that are timed together: a GPU has to be busy while the processor launches."""

STEPS_PER_MODEL, QUICK_STEPS_PER_MODEL = 4, 3
MODEL_PASSES, QUICK_MODEL_PASSES = 3, 1
"""How often all models are gone through: what disturbs one pass may spare the other."""


def measure_steps(
    device: torch.device, formats: Sequence[str], *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time operators within training steps, and whole steps of the smallest models."""
    operator_times = _OperatorTimes()
    for pass_index in range(QUICK_MODEL_PASSES if quick else MODEL_PASSES):
        for format_ in formats:
            for shape in (QUICK_STEP_SHAPES if quick else STEP_SHAPES)[device.type]:
                for family in shape.build_models():
                    on_progress(
                        f"steps of {family.family} of width {shape.hidden_size} in {format_}, pass {pass_index + 1}"
                    )
                    _time_operators(
                        family,
                        shape,
                        format_,
                        device,
                        QUICK_STEPS_PER_MODEL if quick else STEPS_PER_MODEL,
                        operator_times,
                    )
    samples = operator_times.build_samples()
    smallest_times = _OperatorTimes()
    for shape in SMALLEST_SHAPES:
        for family in shape.build_models():
            _time_operators(family, shape, "fp32", device, QUICK_STEPS_PER_MODEL, smallest_times)
    samples += [sample for sample in smallest_times.build_samples() if sample.kind == OPTIMIZER]
    for format_ in formats:
        for shape in SMALLEST_SHAPES:
            on_progress(f"steps of the smallest models in {format_}")
            for family in shape.build_models():
                samples += _time_smallest_steps(family, shape, format_, device, 15 if quick else 40)
    return samples


def _build_step_engine(
    family: Family, shape: StepShape, format_: str, device: torch.device
) -> tuple[Engine, list[Batch]]:
    engine = build_engine(
        family,
        SingleProcessStrategy("single", 1),
        build_precision(format_),
        AdamWConfig("adamw", "fused", learning_rate=1e-4),
        device=device,
    )
    return engine, build_micro_batches(
        family, batch_size=shape.batch_size, sequence_length=shape.sequence_length, device=device
    )


def _run_forward_backward(engine: Engine, batches: Sequence[Batch]) -> None:
    """Forward and backward as in `Engine.step`, without the optimizer, which is timed by itself."""
    engine.module.zero_grad(set_to_none=True)
    (batch,) = batches
    with engine.autocast():
        logits = engine.module(**batch.inputs)["logits"]
    engine.loss(logits, batch.labels).backward()


def _time_operators(
    family: Family, shape: StepShape, format_: str, device: torch.device, steps: int, operator_times: _OperatorTimes
) -> None:
    engine, batches = _build_step_engine(family, shape, format_, device)
    for _ in range(2):
        engine.step(batches)
    operator_timer = _OperatorTimer(build_timer(device), CALLS_TOGETHER[device.type], format_)
    for _ in range(steps):
        operator_timer.times.clear()
        with operator_timer:
            _run_forward_backward(engine, batches)
        operator_times.add_step(operator_timer.times)
    if format_ == "fp32":
        _time_optimizers(engine, batches, device, steps, operator_times)


def _time_optimizers(
    engine: Engine, batches: Sequence[Batch], device: torch.device, steps: int, operator_times: _OperatorTimes
) -> None:
    """Steps of all optimizers with gradients of a real pass."""
    optimizers = TimedOptimizers(engine.module, device)
    _run_forward_backward(engine, batches)
    optimizers.initialize_states()
    for _ in range(steps):
        step_times = optimizers.time_steps(build_timer(device))
        operator_times.add_step(
            [
                ((OPTIMIZER, name, "fp32", size, 0.0, bytes_moved), seconds)
                for name, size, bytes_moved, seconds in step_times
            ]
        )


def _time_smallest_steps(
    family: Family, shape: StepShape, format_: str, device: torch.device, repetitions: int
) -> list[CalibrationSample]:
    """Both passes of a model with next to nothing to compute, and an operator that is bound by memory there."""
    engine, batches = _build_step_engine(family, shape, format_, device)
    counter = _OperatorCounter()
    _run_forward_backward(engine, batches)
    with counter:
        _run_forward_backward(engine, batches)
    seconds = build_timer(device).time_repetitions([lambda: _run_forward_backward(engine, batches)], repetitions)
    dims = (counter.kernel_count, counter.product_count, *counter.attention_pairs)
    call_seconds = []
    operator_timer = _OperatorTimer(build_timer(device), 1, format_)
    for _ in range(repetitions):
        operator_timer.times.clear()
        with operator_timer:
            _run_forward_backward(engine, batches)
        call_seconds.append(statistics.median(seconds for key, seconds in operator_timer.times if key[0] == OPERATOR))
    return [
        CalibrationSample(
            LAUNCH, f"{STEP_SAMPLE} {family.family}", format_, dims, counter.flops, counter.bytes_moved, seconds
        ),
        CalibrationSample(LAUNCH, f"{CALL_SAMPLE} {family.family}", format_, dims, 0.0, 0.0, tuple(call_seconds)),
    ]


SampleKey = tuple[str, str, str, tuple[int, ...], float, float]
"""Kind, name, format, dimensions, FLOPs and bytes of a sample."""


class _OperatorTimes:
    """Times of the same operator on the same operands, put together."""

    def __init__(self) -> None:
        self._times: dict[SampleKey, list[float]] = defaultdict(list)

    def add_step(self, times: Sequence[tuple[SampleKey, float]]) -> None:
        """Of one step: the mean of all calls that are alike is one repetition."""
        seconds_by_key: dict[SampleKey, list[float]] = defaultdict(list)
        for key, seconds in times:
            seconds_by_key[key].append(seconds)
        for key, call_seconds in seconds_by_key.items():
            self._times[key].append(statistics.fmean(call_seconds))

    def build_samples(self) -> list[CalibrationSample]:
        """Those that take long enough to say anything."""
        samples = [CalibrationSample(*key, seconds=tuple(seconds)) for key, seconds in self._times.items()]
        return [sample for sample in samples if sample.median_s >= MIN_OPERATOR_S]


class _OperatorTimer(TorchDispatchMode):
    """Times every operator that is called within."""

    def __init__(self, timer: CallTimer, calls_together: int, format_: str) -> None:
        super().__init__()
        self._timer = timer
        self._calls_together = calls_together
        self._format = format_
        self.times: list[tuple[SampleKey, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kernel(func):
            return func(*args, **kwargs)
        timed_args, timed_kwargs = args, kwargs
        if func._schema.is_mutable:  # a step changes its operands once: what is called again and again has copies
            timed_args, timed_kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        results: list[Any] = [None]

        def run_operator() -> None:
            results[0] = func(*timed_args, **timed_kwargs)

        seconds = self._timer.time_calls([run_operator] * self._calls_together) / self._calls_together
        result = func(*args, **kwargs) if func._schema.is_mutable else results[0]
        kernel = describe_kernel(func, args, kwargs, result)
        name, kind, format_ = kernel.operator, kernel.kind, OPERAND_FORMATS[kernel.format]
        if kind == MATMUL and format_ == "fp32" and self._format == "tf32":
            format_ = "tf32"
        if kind == ATTENTION:
            format_ = "fp32" if self._format == "tf32" else self._format
            name = "backward" if "backward" in name else "forward"
        sample_kind = SAMPLE_KIND_BY_KERNEL.get(kind, OPERATOR)
        dims = kernel.dims if kind in SAMPLE_KIND_BY_KERNEL else (_count_elements(result),)
        sample_key = (sample_kind, name, format_, dims, float(kernel.flops), float(kernel.bytes_moved))
        self.times.append((sample_key, seconds))
        return result


class _OperatorCounter(TorchDispatchMode):
    """Counts operators, what they compute and what they move."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_count = self.product_count = 0
        self.attention_pairs = [0, 0]
        """Pairs of sequence and head, forward and backward."""
        self.flops = self.bytes_moved = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if is_kernel(func):
            kernel = describe_kernel(func, args, kwargs, output)
            self.kernel_count += 1
            self.product_count += kernel.kind == MATMUL
            if kernel.kind == ATTENTION:
                self.attention_pairs["backward" in kernel.operator] += kernel.dims[0] * kernel.dims[1]
            self.flops += kernel.flops
            self.bytes_moved += kernel.bytes_moved
        return output


def _count_elements(output: Any) -> int:
    first_output = output[0] if isinstance(output, (tuple, list)) and output else output
    return math.prod(first_output.shape) if isinstance(first_output, torch.Tensor) else 0
