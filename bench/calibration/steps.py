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

from bench.calibration.formats import precision_of
from bench.calibration.optimizer import Optimizers
from bench.calibration.sample import ATTENTION as ATTENTION_SAMPLE
from bench.calibration.sample import LAUNCH, OPERATOR, OPTIMIZER, Sample
from bench.calibration.sample import MATMUL as MATMUL_SAMPLE
from bench.calibration.timer import Timer, timer_of
from bench.models import Batch, Family
from bench.models.gpt import GPT
from bench.models.t5 import T5
from bench.simulate.kernels import ATTENTION, FORMATS, MATMUL
from bench.simulate.recorder import describe, is_kernel
from bench.strategies.single import Single
from bench.training.engine import Engine, build_engine, micro_batches
from bench.training.optimizer import OptimizerConfig

STEP = "step"
"""Name of the samples of whole forward and backward passes, of so little work that starting it is all."""

CALL = "call"
"""Name of the samples of one operator among those of such a pass."""

KIND = {MATMUL: MATMUL_SAMPLE, ATTENTION: ATTENTION_SAMPLE}
LEAST_S = 10e-6
"""Operators that take less say nothing about rates."""

VOCABULARY, SMALLEST_VOCABULARY = 3000, 64


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int = VOCABULARY
    activation: str = "gelu_pytorch_tanh"
    """Of the GPT."""

    def models(self) -> tuple[Family, Family]:
        """A GPT and a T5."""
        named = ("calibration", "gpt", "sdpa", self.vocabulary)
        gpt = GPT(*named, 1024, hidden_size=self.width, num_layers=2, num_heads=self.heads, activation=self.activation)
        named = ("calibration", "t5", "sdpa", self.vocabulary)
        dimensions = (self.width, 4 * self.width, self.width // self.heads, self.heads)
        return gpt, T5(*named, *dimensions, num_encoder_layers=1, num_decoder_layers=2)


def _shapes(*sizes: tuple[int, int, int, int]) -> tuple[Shape, ...]:
    """Shapes whose activation is one operator or several, in turn."""
    return tuple(Shape(*size, activation=ACTIVATIONS[number % 2]) for number, size in enumerate(sizes))


ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")

SHAPES = {
    "cpu": _shapes(
        (96, 3, 8, 224),
        (192, 6, 4, 96),
        (320, 5, 1, 40),
        (320, 5, 6, 192),
        (640, 10, 2, 56),
        (640, 10, 4, 160),
        (896, 14, 2, 96),
    ),
    "cuda": _shapes((1280, 20, 8, 512), (2560, 20, 4, 1024)),
}
QUICK_SHAPES = {
    "cpu": _shapes((96, 3, 4, 96), (320, 5, 1, 40), (320, 5, 4, 112), (640, 10, 3, 72)),
    "cuda": SHAPES["cuda"][:1],
}
SMALLEST = tuple(Shape(*each, SMALLEST_VOCABULARY) for each in ((32, 2, 1, 8), (48, 3, 1, 16)))
"""Models whose steps are nothing but starting operators."""

TOGETHER = {"cpu": 1, "cuda": 10}
"""Calls of an operator that are timed together: a GPU has to be busy while the processor launches."""

STEPS, QUICK_STEPS = 4, 3
PASSES, QUICK_PASSES = 3, 1
"""How often all models are gone through: what disturbs one pass may spare the other."""


def measure_steps(
    device: torch.device, formats: Sequence[str], *, quick: bool, progress: Callable[[str], None]
) -> list[Sample]:
    """Time operators within training steps, and whole steps of the smallest models."""
    found = _Found()
    for number in range(QUICK_PASSES if quick else PASSES):
        for format_ in formats:
            for shape in (QUICK_SHAPES if quick else SHAPES)[device.type]:
                for family in shape.models():
                    progress(f"steps of {family.family} of width {shape.width} in {format_}, pass {number + 1}")
                    _watch(family, shape, format_, device, QUICK_STEPS if quick else STEPS, found)
    samples = found.samples()
    tiny = _Found()
    for shape in SMALLEST:
        for family in shape.models():
            _watch(family, shape, "fp32", device, QUICK_STEPS, tiny)
    samples += [sample for sample in tiny.samples() if sample.kind == OPTIMIZER]
    for format_ in formats:
        for shape in SMALLEST:
            progress(f"steps of the smallest models in {format_}")
            for family in shape.models():
                samples += _smallest(family, shape, format_, device, 15 if quick else 40)
    return samples


def _engine(family: Family, shape: Shape, format_: str, device: torch.device) -> tuple[Engine, list[Batch]]:
    engine = build_engine(
        family,
        Single("single", 1),
        precision_of(format_),
        OptimizerConfig("adamw", "fused", learning_rate=1e-4),
        device=device,
    )
    return engine, micro_batches(family, batch_size=shape.batch, sequence_length=shape.length, device=device)


def _passes(engine: Engine, batches: Sequence[Batch]) -> None:
    """Forward and backward as in `Engine.step`, without the optimizer, which is timed by itself."""
    engine.module.zero_grad(set_to_none=True)
    (batch,) = batches
    with engine.autocast():
        logits = engine.module(**batch.inputs)["logits"]
    engine.loss(logits, batch.labels).backward()


def _watch(family: Family, shape: Shape, format_: str, device: torch.device, steps: int, found: _Found) -> None:
    engine, batches = _engine(family, shape, format_, device)
    for _ in range(2):
        engine.step(batches)
    watch = _Watch(timer_of(device), TOGETHER[device.type], format_)
    for _ in range(steps):
        watch.times.clear()
        with watch:
            _passes(engine, batches)
        found.add(watch.times)
    if format_ == "fp32":
        _update(engine, batches, device, steps, found)


def _update(engine: Engine, batches: Sequence[Batch], device: torch.device, steps: int, found: _Found) -> None:
    """Steps of all optimizers with gradients of a real pass."""
    optimizers = Optimizers(engine.module, device)
    _passes(engine, batches)
    optimizers.prepare()
    for _ in range(steps):
        timed = optimizers.timed(timer_of(device))
        found.add([((OPTIMIZER, name, "fp32", size, 0.0, moved), seconds) for name, size, moved, seconds in timed])


def _smallest(family: Family, shape: Shape, format_: str, device: torch.device, repetitions: int) -> list[Sample]:
    """Both passes of a model with next to nothing to compute, and an operator that is bound by memory there."""
    engine, batches = _engine(family, shape, format_, device)
    counter = _Counter()
    _passes(engine, batches)
    with counter:
        _passes(engine, batches)
    seconds = timer_of(device).repeated([lambda: _passes(engine, batches)], repetitions)
    dims = (counter.kernels, counter.products, *counter.attention)
    calls = []
    watch = _Watch(timer_of(device), 1, format_)
    for _ in range(repetitions):
        watch.times.clear()
        with watch:
            _passes(engine, batches)
        calls.append(statistics.median(seconds for key, seconds in watch.times if key[0] == OPERATOR))
    return [
        Sample(LAUNCH, f"{STEP} {family.family}", format_, dims, counter.flops, counter.bytes_moved, seconds),
        Sample(LAUNCH, f"{CALL} {family.family}", format_, dims, 0.0, 0.0, tuple(calls)),
    ]


Key = tuple[str, str, str, tuple[int, ...], float, float]
"""Kind, name, format, dimensions, FLOPs and bytes of a sample."""


class _Found:
    """Times of the same operator on the same operands, put together."""

    def __init__(self) -> None:
        self._times: dict[Key, list[float]] = defaultdict(list)

    def add(self, times: Sequence[tuple[Key, float]]) -> None:
        """Of one step: the mean of all calls that are alike is one repetition."""
        step: dict[Key, list[float]] = defaultdict(list)
        for key, seconds in times:
            step[key].append(seconds)
        for key, several in step.items():
            self._times[key].append(statistics.fmean(several))

    def samples(self) -> list[Sample]:
        """Those that take long enough to say anything."""
        made = [Sample(*key, seconds=tuple(seconds)) for key, seconds in self._times.items()]
        return [sample for sample in made if sample.median_s >= LEAST_S]


class _Watch(TorchDispatchMode):
    """Times every operator that is called within."""

    def __init__(self, timer: Timer, together: int, format_: str) -> None:
        super().__init__()
        self._timer = timer
        self._together = together
        self._format = format_
        self.times: list[tuple[Key, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kernel(func):
            return func(*args, **kwargs)
        results: list[Any] = [None]

        def call() -> None:
            results[0] = func(*args, **kwargs)

        seconds = self._timer.stretch([call] * self._together) / self._together
        name, kind, number, dims, flops, moved = describe(func, args, kwargs, results[0])
        format_ = FORMATS[number]
        if kind == MATMUL and format_ == "fp32" and self._format == "tf32":
            format_ = "tf32"
        if kind == ATTENTION:
            format_ = "fp32" if self._format == "tf32" else self._format
            name = "backward" if "backward" in name else "forward"
        if kind not in KIND:
            dims = (_elements(results[0]),)
        self.times.append(((KIND.get(kind, OPERATOR), name, format_, dims, float(flops), float(moved)), seconds))
        return results[0]


class _Counter(TorchDispatchMode):
    """Counts operators, what they compute and what they move."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.products = 0
        self.attention = [0, 0]
        """Pairs of sequence and head, forward and backward."""
        self.flops = self.bytes_moved = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_kernel(func):
            name, kind, _, dims, flops, moved = describe(func, args, kwargs, out)
            self.kernels += 1
            self.products += kind == MATMUL
            if kind == ATTENTION:
                self.attention["backward" in name] += dims[0] * dims[1]
            self.flops += flops
            self.bytes_moved += moved
        return out


def _elements(out: Any) -> int:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return math.prod(first.shape) if isinstance(first, torch.Tensor) else 0
