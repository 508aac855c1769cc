"""The slow, faithful prediction of memory: trace the real engine, step by step, with fake tensors.

Nothing is composed and no strategy's plan is believed: `bench.training.engine` builds and trains the model as in a
real run, as rank 0 of a process group of the true size that exchanges nothing, and every storage is followed from
allocation to release. It takes seconds to minutes, so it is not for planning. It is what the fast prediction is
tested against where nobody can measure.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bench.config import RunConfig
from bench.errors import ImpossibleError
from bench.models import Batch
from bench.simulate.cpu_memory import Sums, noting_random_states, working_memory
from bench.simulate.cuda_operators import operators_of
from bench.simulate.lone import lone_rank
from bench.simulate.prediction import PARTS
from bench.strategies import Job
from bench.strategies.sharding import ShardingStrategy
from bench.training.engine import Engine, build_engine, micro_batches

STEPS = 2
"""Optimizer state first appears in step 1, so step 2 is the first like all others."""

TRACED = ("single", "fsdp", "fsdp1")
"""Strategies whose traces were held against what was measured. DDP's reducer, which others use as well, takes no fake
tensors; other libraries' engines, split layers and stages were never tried."""

BUILD, FORWARD, BACKWARD, OPTIMIZER = "build", "forward", "backward", "optimizer"

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of a module's path that wrappers add."""

NOTHING = "nothing"

PURPOSES = {
    "foreach_all_gather": "gathered",
    "wait_for_unshard": "gathered",
    "init_flat_param_attributes": "gathered",
    "foreach_reduce": "reduced",
    "_post_backward_hook": "reduced",
    "_propagate_tensor_meta_non_cached": NOTHING,
}
"""Functions of torch's FSDP2, FSDP1 and DTensor, and what they allocate for: the last one asks for shapes alone."""


@dataclass(frozen=True)
class FullTrace:
    """Peaks of rank 0 in bytes: what the run asks the allocator for."""

    allocated: int
    """Peak in a step after warm-up."""
    allocated_overall: int
    """Peak over construction and all steps."""
    phase_peaks: dict[str, int]
    """Peak in each phase of the steady step: forward, backward, optimizer."""
    parts: dict[str, int]
    """What the steady peak consists of, per name in `PARTS`."""
    phase: str
    """forward, backward or optimizer: where the steady peak is."""
    module: str
    """Path of the module whose forward or backward is at the steady peak; empty outside of all."""


def full_trace(config: RunConfig) -> FullTrace:
    """Trace construction and two optimizer steps of rank 0 with fake tensors.

    For `hardware.device=cuda` too the trace needs no GPU: attention then allocates what CUDA's kernels do.

    Raises
    ------
    ImpossibleError
        For strategies but those in `TRACED`, for offloading, and for compiled blocks.
    RuntimeError
        If the process is a rank already.
    """
    strategy = config.strategy
    if strategy.name not in TRACED:
        raise ImpossibleError(f"strategy={strategy.name} cannot be traced in full: choose {', '.join(TRACED)}.")
    if strategy.uses_host:
        raise ImpossibleError(
            f"strategy={strategy.name} that offloads cannot be traced in full: keep all on the device."
        )
    if config.compile:
        raise ImpossibleError("compile=true cannot be traced in full: compiled blocks take no fake tensors.")
    ledger, sums = _Ledger(), Sums()
    device = config.hardware.device
    with (
        _process_group(config),
        operators_of(device),
        _storages_as_real(ledger),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        kept = noting_random_states(ledger.follow) if device == "cpu" else contextlib.nullcontext()
        with _Follower(ledger, sums, on_cpu=device == "cpu"), kept:
            engine, losses = _train(config, ledger)
        ledger.note_storages_of(engine)
        del losses
        return ledger.summary()


@contextlib.contextmanager
def _process_group(config: RunConfig) -> Iterator[None]:
    """Within, this process is rank 0 of a group that exchanges nothing, with the threads a rank has."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(config.hardware.cpu_threads)  # attention on a CPU has buffers for every thread
    try:
        with lone_rank(config.gpus):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _train(config: RunConfig, ledger: _Ledger) -> tuple[Engine, list[torch.Tensor | None]]:
    """Build the engine and take `STEPS` steps. Returns what a real run keeps."""
    device = torch.device("cpu")
    family = copy.copy(config.trained)
    with _disable_current_modes():
        model = family.build().to(config.precision.parameter_dtype)
    object.__setattr__(family, "build", lambda: model)  # on meta, where a fake tensor would be one too many
    engine = build_engine(
        family,
        _with_real_mesh(config),
        config.precision,
        config.optimizer,
        device=device,
        world_size=config.gpus,
        activation_checkpointing=config.activation_checkpointing,
        compile=False,
        synchronize_every_micro_batch=config.gradient_accumulation_sync,
        seed=config.seed,
        enter_phase=ledger.enter_phase,
    )
    share, shares = config.strategy.batch_share(0, config.gpus)
    batches = micro_batches(
        config.model,
        num_micro_batches=config.gradient_accumulation,
        batch_size=config.sequences_per_rank,
        sequence_length=config.sequence_length,
        share=share,
        shares=shares,
        device=device,
        seed=config.seed,
    )
    if config.hardware.device == "cuda":  # where a rank's share is copied to, and the rest is not
        batches = [_copy(batch) for batch in batches]
    losses: list[torch.Tensor | None] = []
    with ledger.watching(engine):
        for _ in range(STEPS):
            ledger.start_step()
            losses.append(engine.step(batches))
    return engine, losses


def _copy(batch: Batch) -> Batch:
    return Batch({name: tensor.clone() for name, tensor in batch.inputs.items()}, batch.labels.clone())


def _with_real_mesh(config: RunConfig) -> Any:
    """The strategy, whose device mesh reads its own tensor of ranks, which must not be fake."""
    strategy = copy.copy(config.strategy)
    if isinstance(strategy, ShardingStrategy):
        build_mesh = strategy.mesh

        def mesh(job: Job) -> DeviceMesh:
            with _disable_current_modes():
                return build_mesh(job)

        object.__setattr__(strategy, "mesh", mesh)
    return strategy


@dataclass
class _Storage:
    """One storage, from allocation on."""

    born: int
    """Number of the event that allocated it first."""
    phase: str
    """Phase it was allocated in."""
    part: str | None
    """Name in `PARTS`, where more is known than its lifetime."""
    size: int = 0
    died: int | None = None


class _Ledger:
    """All storages, and every change of their sizes in order."""

    def __init__(self) -> None:
        self._storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}
        """Numbers of the living, by address of the storage."""
        self._events: list[tuple[int, int]] = []
        """Number of a storage and its new size."""
        self._phase = BUILD
        self._turns: list[int] = []
        """Event at which each phase of the steady step began."""
        self._now = self._overall = 0
        self._phase_peaks: dict[str, int] = {}
        self._peak = (0, 0, BUILD, "")
        """Steady peak: bytes, number of events until then, phase, module."""
        self._modules: list[str] = []
        """Paths of the modules whose forward is running, outermost first."""
        self._marks: list[tuple[int, str]] = []
        """From which autograd sequence number on which module's operators ran."""

    def start_step(self) -> None:
        """A step begins: peaks of the one before are forgotten."""
        self._phase_peaks = {}
        self._turns = []
        self._peak = (0, len(self._events), BUILD, "")

    def enter_phase(self, phase: str) -> None:
        """A phase of a step begins."""
        self._phase = phase
        self._turns.append(len(self._events))
        self._note_peaks()

    def follow(self, tensor: torch.Tensor) -> None:
        """Follow the tensor's storage from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            purpose = _purpose()
            if purpose == NOTHING:
                return
            number = len(self._storages)
            self._storages.append(_Storage(len(self._events), self._phase, purpose))
            self._numbers[storage._cdata] = number
            weakref.finalize(storage, self._release, storage._cdata)
        self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage that may be followed has the size it has now."""
        number = self._numbers.get(storage._cdata)
        if number is not None and self._storages[number].size != storage.nbytes():
            self._change(number, storage.nbytes())

    def work(self, size: int) -> None:
        """Something had `size` bytes and has released them again."""
        number = len(self._storages)
        self._storages.append(_Storage(len(self._events), self._phase, "temporaries"))
        self._change(number, size)
        self._change(number, 0)

    def _release(self, address: int) -> None:
        number = self._numbers.pop(address)
        self._storages[number].died = len(self._events)
        self._change(number, 0)

    def _change(self, number: int, size: int) -> None:
        storage = self._storages[number]
        self._now += size - storage.size
        storage.size = size
        self._events.append((number, size))
        self._note_peaks()

    def _note_peaks(self) -> None:
        self._overall = max(self._overall, self._now)
        self._phase_peaks[self._phase] = max(self._phase_peaks.get(self._phase, 0), self._now)
        if self._now > self._peak[0]:
            self._peak = (self._now, len(self._events), self._phase, self._module())

    def label(self, tensor: torch.Tensor | None, part: str) -> None:
        """Say what the tensor's storage is for."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        number = self._numbers.get(tensor.untyped_storage()._cdata) if tensor is not None else None
        if number is not None:
            self._storages[number].part = part

    def note_gradients(self, module: nn.Module) -> None:
        """The module's gradients are complete."""
        for parameter in module.parameters():
            self.label(parameter.grad, "gradients")

    def note_storages_of(self, engine: Engine) -> None:
        """What the engine has kept is its parameters and optimizer state."""
        for parameter in engine.module.parameters():
            self.label(parameter, "parameters")
        for state in engine.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.label(value, "optimizer")

    @contextlib.contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Within, which module runs is known."""
        paths = {id(module): _clean(path) for path, module in engine.module.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(paths.get(id(module), ""))
            self._mark()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()
            self._mark()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
            engine.optimizer.register_step_pre_hook(lambda *_: self.note_gradients(engine.module)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _mark(self) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._marks.append((number, self._modules[-1] if self._modules else ""))

    def _module(self) -> str:
        """Path of the module whose forward is running, or whose operators' backward is."""
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        if node is None or self._phase != BACKWARD:
            return ""
        place = bisect.bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1
        return self._marks[place][1] if place >= 0 else ""

    def summary(self) -> FullTrace:
        """The steady step's peaks, and what the highest of them consists of."""
        peak, events, phase, module = self._peak
        sizes: dict[int, int] = {}
        for number, size in self._events[:events]:
            sizes[number] = size
        parts = dict.fromkeys(PARTS, 0)
        turned = next((turn for turn in self._turns if turn >= events), len(self._events))
        for number, size in sizes.items():
            parts[self._part(self._storages[number], phase, turned)] += size
        return FullTrace(peak, self._overall, self._phase_peaks, parts, phase, module)

    def _part(self, storage: _Storage, phase: str, turned: int) -> str:
        """What a storage that is alive at the peak is for, where the peak's phase ends at the event `turned`."""
        if storage.part is not None:
            return storage.part
        if storage.phase not in (BUILD, FORWARD):
            return "temporaries"
        lasts = storage.died is None or storage.died >= turned
        return "activations" if phase != FORWARD or lasts or storage.phase == BUILD else "temporaries"


def _clean(path: str) -> str:
    for wrapper in WRAPPERS:
        path = (path + ".").replace(wrapper, "").removesuffix(".")
    return path


def _purpose() -> str | None:
    """What the library that allocates does it for, as a name in `PARTS`, if any of `PURPOSES` is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        purpose = PURPOSES.get(frame.f_code.co_name)
        if purpose is not None:
            return purpose
        frame = frame.f_back
    return None


class _Follower(TorchDispatchMode):
    """Follows every storage that an operator makes."""

    def __init__(self, ledger: _Ledger, sums: Sums, *, on_cpu: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._sums = sums
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors, as a real run would, then see what it made."""
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes back as operators on the local tensors
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._sums.in_place(func, args, sys._getframe(1)):
            return torch.ops.aten.add_.Tensor(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0.0  # a loss scaler asks for the number of gradients that overflowed
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._ledger.follow(value)
        if self._on_cpu:
            size = working_memory(func, args, kwargs, out)
            if size:
                self._ledger.work(size)
        return out


@contextlib.contextmanager
def _storages_as_real(ledger: _Ledger) -> Iterator[None]:
    """Within, storages that are resized without an operator are seen, and have addresses.

    FSDP frees parameters by resizing them. FSDP1 compares addresses to see whether anybody replaced a parameter, and
    fake tensors all have the address 0.
    """
    storages, tensors = torch.UntypedStorage, torch.Tensor
    originals = storages.resize_, storages.data_ptr, tensors.data_ptr

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        originals[0](storage, size)
        ledger.resize(storage)

    def storage_address(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage.nbytes() else 0

    def tensor_address(tensor: torch.Tensor) -> int:
        address = storage_address(tensor.untyped_storage())
        return address + int(tensor.storage_offset()) * tensor.element_size() if address else 0

    storages.resize_, storages.data_ptr, tensors.data_ptr = resize, storage_address, tensor_address  # type: ignore
    try:
        yield
    finally:
        storages.resize_, storages.data_ptr, tensors.data_ptr = originals  # type: ignore[method-assign]
