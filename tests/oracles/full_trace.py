"""The slow, faithful prediction of memory: trace the real engine, step by step, with fake tensors.

Nothing is composed and no strategy's plan is believed: `bench.rank.engine` builds and trains the model as in a
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

from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError
from bench.models import Batch
from bench.models.checkpointing_budget import count_recomputed_flops
from bench.prediction.prediction import MEMORY_PARTS
from bench.prediction.trace.cpu_memory import InPlaceSumDetector, compute_working_memory, track_rng_states
from bench.prediction.trace.device_operators import use_device_operators
from bench.prediction.trace.fake_process_group import join_fake_process_group
from bench.rank.engine import Engine, build_engine, build_micro_batches
from bench.strategies import WrapContext
from bench.strategies.sharding import ShardingStrategy

TRACED_STEPS = 2
"""Optimizer state first appears in step 1, so step 2 is the first like all others."""

TRACEABLE_STRATEGIES = ("single", "fsdp", "fsdp1")
"""Strategies whose traces were held against what was measured. DDP's reducer, which others use as well, takes no fake
tensors; other libraries' engines, split layers and stages were never tried."""

BUILD, FORWARD, BACKWARD, OPTIMIZER = "build", "forward", "backward", "optimizer"

WRAPPER_PATH_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of a module's path that wrappers add."""

NO_ALLOCATION = "nothing"

ALLOCATION_PURPOSES = {
    "foreach_all_gather": "gathered",
    "wait_for_unshard": "gathered",
    "init_flat_param_attributes": "gathered",
    "foreach_reduce": "reduced",
    "_post_backward_hook": "reduced",
    "_propagate_tensor_meta_non_cached": NO_ALLOCATION,
}
"""Functions of torch's FSDP2, FSDP1 and DTensor, and what they allocate for: the last one asks for shapes alone."""


@dataclass(frozen=True)
class FullTracePeaks:
    """Peaks of rank 0 in bytes: what the run asks the allocator for."""

    step_peak: int
    """Peak in a step after warm-up."""
    overall_peak: int
    """Peak over construction and all steps."""
    phase_peaks: dict[str, int]
    """Peak in each phase of the steady step: forward, backward, optimizer."""
    parts: dict[str, int]
    """What the steady peak consists of, per name in `MEMORY_PARTS`."""
    phase: str
    """forward, backward or optimizer: where the steady peak is."""
    module: str
    """Path of the module whose forward or backward is at the steady peak; empty outside of all."""


def trace_training_peaks(config: RunConfig) -> FullTracePeaks:
    """Trace construction and two optimizer steps of rank 0 with fake tensors.

    For `hardware.device=cuda` too the trace needs no GPU: attention then allocates what CUDA's kernels do.

    Raises
    ------
    ImpossibleError
        For strategies but those in `TRACEABLE_STRATEGIES`, for offloading, and for compiled blocks.
    RuntimeError
        If the process is a rank already.
    """
    strategy = config.strategy
    if strategy.name not in TRACEABLE_STRATEGIES:
        raise ImpossibleError(
            f"strategy={strategy.name} cannot be traced in full: choose {', '.join(TRACEABLE_STRATEGIES)}."
        )
    if strategy.has_offloaded_state:
        raise ImpossibleError(
            f"strategy={strategy.name} that offloads cannot be traced in full: keep all on the device."
        )
    if config.compile:
        raise ImpossibleError("compile=true cannot be traced in full: compiled blocks take no fake tensors.")
    tracker, sum_detector = _StorageTracker(), InPlaceSumDetector()
    device = config.hardware.device
    with (
        _enter_fake_rank(config),
        use_device_operators(device),
        _track_storage_resizes(tracker),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        rng_tracking = track_rng_states(tracker.track_storage) if device == "cpu" else contextlib.nullcontext()
        with _StorageTrackingMode(tracker, sum_detector, on_cpu=device == "cpu"), rng_tracking:
            engine, losses = _train_steps(config, tracker)
        tracker.label_kept_storages(engine)
        del losses
        return tracker.summarize_peaks()


@contextlib.contextmanager
def _enter_fake_rank(config: RunConfig) -> Iterator[None]:
    """Within, this process is rank 0 of a group that exchanges nothing, with the threads a rank has."""
    original_threads, original_precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(config.hardware.cpu_threads)  # attention on a CPU has buffers for every thread
    try:
        with join_fake_process_group(config.gpus):
            yield
    finally:
        torch.set_num_threads(original_threads)
        torch.set_float32_matmul_precision(original_precision)


def _train_steps(config: RunConfig, tracker: _StorageTracker) -> tuple[Engine, list[torch.Tensor | None]]:
    """Build the engine and take `TRACED_STEPS` steps. Returns what a real run keeps."""
    device = torch.device("cpu")
    family = copy.copy(config.trained_model)
    with _disable_current_modes():
        model = family.build_model().to(config.precision.parameter_dtype)
        count_recomputed_flops(
            family, config.sequence_length, config.activation_checkpointing
        )  # with a model of its own
    object.__setattr__(family, "build_model", lambda: model)  # on meta, where a fake tensor would be one too many
    engine = build_engine(
        family,
        _copy_strategy_with_real_mesh(config),
        config.precision,
        config.optimizer,
        device=device,
        world_size=config.gpus,
        activation_checkpointing=config.activation_checkpointing,
        sequence_length=config.sequence_length,
        loss_chunks=config.loss_chunks,
        activation_offload=config.activation_offload,
        compile=False,
        synchronize_every_micro_batch=config.gradient_accumulation_sync,
        seed=config.seed,
        enter_phase=tracker.enter_phase,
    )
    share_index, num_shares = config.strategy.find_batch_share(0, config.gpus)
    batches = build_micro_batches(
        config.model,
        num_micro_batches=config.gradient_accumulation,
        batch_size=config.sequences_per_rank,
        sequence_length=config.sequence_length,
        share_index=share_index,
        num_shares=num_shares,
        device=device,
        seed=config.seed,
    )
    if config.hardware.device == "cuda":  # where a rank's share is copied to, and the rest is not
        batches = [_copy_batch(batch) for batch in batches]
    losses: list[torch.Tensor | None] = []
    with tracker.track_modules(engine):
        for _ in range(TRACED_STEPS):
            tracker.start_step()
            losses.append(engine.step(batches))
    return engine, losses


def _copy_batch(batch: Batch) -> Batch:
    return Batch({name: tensor.clone() for name, tensor in batch.inputs.items()}, batch.labels.clone())


def _copy_strategy_with_real_mesh(config: RunConfig) -> Any:
    """The strategy, whose device mesh reads its own tensor of ranks, which must not be fake."""
    strategy = copy.copy(config.strategy)
    if isinstance(strategy, ShardingStrategy):
        build_mesh = strategy.build_mesh

        def build_real_mesh(job: WrapContext) -> DeviceMesh:
            with _disable_current_modes():
                return build_mesh(job)

        object.__setattr__(strategy, "build_mesh", build_real_mesh)
    return strategy


@dataclass
class _TrackedStorage:
    """One storage, from allocation on."""

    allocated_at: int
    """Number of the event that allocated it first."""
    phase: str
    """Phase it was allocated in."""
    part: str | None
    """Name in `MEMORY_PARTS`, where more is known than its lifetime."""
    size: int = 0
    freed_at: int | None = None


class _StorageTracker:
    """All storages, and every change of their sizes in order."""

    def __init__(self) -> None:
        self._storages: list[_TrackedStorage] = []
        self._number_by_address: dict[int, int] = {}
        """Numbers of the living, by address of the storage."""
        self._events: list[tuple[int, int]] = []
        """Number of a storage and its new size."""
        self._phase = BUILD
        self._phase_starts: list[int] = []
        """Event at which each phase of the steady step began."""
        self._allocated_bytes = self._overall_peak = 0
        self._phase_peaks: dict[str, int] = {}
        self._steady_peak = (0, 0, BUILD, "")
        """Steady peak: bytes, number of events until then, phase, module."""
        self._running_modules: list[str] = []
        """Paths of the modules whose forward is running, outermost first."""
        self._module_starts: list[tuple[int, str]] = []
        """From which autograd sequence number on which module's operators ran."""

    def start_step(self) -> None:
        """A step begins: peaks of the one before are forgotten."""
        self._phase_peaks = {}
        self._phase_starts = []
        self._steady_peak = (0, len(self._events), BUILD, "")

    def enter_phase(self, phase: str) -> None:
        """A phase of a step begins."""
        self._phase = phase
        self._phase_starts.append(len(self._events))
        self._note_peaks()

    def track_storage(self, tensor: torch.Tensor) -> None:
        """Follow the tensor's storage from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._number_by_address:
            purpose = _find_allocation_purpose()
            if purpose == NO_ALLOCATION:
                return
            number = len(self._storages)
            self._storages.append(_TrackedStorage(len(self._events), self._phase, purpose))
            self._number_by_address[storage._cdata] = number
            weakref.finalize(storage, self._note_free, storage._cdata)
        self.update_size(storage)

    def update_size(self, storage: torch.UntypedStorage) -> None:
        """A storage that may be followed has the size it has now."""
        number = self._number_by_address.get(storage._cdata)
        if number is not None and self._storages[number].size != storage.nbytes():
            self._change_size(number, storage.nbytes())

    def note_working_memory(self, size: int) -> None:
        """Something had `size` bytes and has released them again."""
        number = len(self._storages)
        self._storages.append(_TrackedStorage(len(self._events), self._phase, "temporaries"))
        self._change_size(number, size)
        self._change_size(number, 0)

    def _note_free(self, address: int) -> None:
        number = self._number_by_address.pop(address)
        self._storages[number].freed_at = len(self._events)
        self._change_size(number, 0)

    def _change_size(self, number: int, size: int) -> None:
        storage = self._storages[number]
        self._allocated_bytes += size - storage.size
        storage.size = size
        self._events.append((number, size))
        self._note_peaks()

    def _note_peaks(self) -> None:
        self._overall_peak = max(self._overall_peak, self._allocated_bytes)
        self._phase_peaks[self._phase] = max(self._phase_peaks.get(self._phase, 0), self._allocated_bytes)
        if self._allocated_bytes > self._steady_peak[0]:
            self._steady_peak = (self._allocated_bytes, len(self._events), self._phase, self._find_running_module())

    def label_storage(self, tensor: torch.Tensor | None, part: str) -> None:
        """Say what the tensor's storage is for."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        number = self._number_by_address.get(tensor.untyped_storage()._cdata) if tensor is not None else None
        if number is not None:
            self._storages[number].part = part

    def label_gradients(self, module: nn.Module) -> None:
        """The module's gradients are complete."""
        for parameter in module.parameters():
            self.label_storage(parameter.grad, "gradients")

    def label_kept_storages(self, engine: Engine) -> None:
        """What the engine has kept is its parameters and optimizer state."""
        for parameter in engine.module.parameters():
            self.label_storage(parameter, "parameters")
        for state in engine.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.label_storage(value, "optimizer")

    @contextlib.contextmanager
    def track_modules(self, engine: Engine) -> Iterator[None]:
        """Within, which module runs is known."""
        paths = {id(module): _strip_wrappers(path) for path, module in engine.module.named_modules()}

        def enter_module(module: nn.Module, args: Any) -> None:
            self._running_modules.append(paths.get(id(module), ""))
            self._note_module_start()

        def leave_module(module: nn.Module, args: Any, output: Any) -> None:
            self._running_modules.pop()
            self._note_module_start()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter_module),
            nn.modules.module.register_module_forward_hook(leave_module, always_call=True),
            engine.optimizer.register_step_pre_hook(lambda *_: self.label_gradients(engine.module)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note_module_start(self) -> None:
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._module_starts.append((number, self._running_modules[-1] if self._running_modules else ""))

    def _find_running_module(self) -> str:
        """Path of the module whose forward is running, or whose operators' backward is."""
        if self._running_modules:
            return self._running_modules[-1]
        node = torch._C._current_autograd_node()
        if node is None or self._phase != BACKWARD:
            return ""
        position = (
            bisect.bisect_right(self._module_starts, node._sequence_nr(), key=lambda module_start: module_start[0]) - 1
        )
        return self._module_starts[position][1] if position >= 0 else ""

    def summarize_peaks(self) -> FullTracePeaks:
        """The steady step's peaks, and what the highest of them consists of."""
        peak, num_events, phase, module = self._steady_peak
        sizes: dict[int, int] = {}
        for number, size in self._events[:num_events]:
            sizes[number] = size
        parts = dict.fromkeys(MEMORY_PARTS, 0)
        phase_end = next((start for start in self._phase_starts if start >= num_events), len(self._events))
        for number, size in sizes.items():
            parts[self._find_part(self._storages[number], phase, phase_end)] += size
        return FullTracePeaks(peak, self._overall_peak, self._phase_peaks, parts, phase, module)

    def _find_part(self, storage: _TrackedStorage, phase: str, phase_end: int) -> str:
        """What a storage that is alive at the peak is for, where the peak's phase ends at the event `phase_end`."""
        if storage.part is not None:
            return storage.part
        if storage.phase not in (BUILD, FORWARD):
            return "temporaries"
        outlives_phase = storage.freed_at is None or storage.freed_at >= phase_end
        return "activations" if phase != FORWARD or outlives_phase or storage.phase == BUILD else "temporaries"


def _strip_wrappers(path: str) -> str:
    for wrapper in WRAPPER_PATH_PARTS:
        path = (path + ".").replace(wrapper, "").removesuffix(".")
    return path


def _find_allocation_purpose() -> str | None:
    """What the library that allocates does it for, as a name in `MEMORY_PARTS`, if any of `ALLOCATION_PURPOSES` is
    running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        purpose = ALLOCATION_PURPOSES.get(frame.f_code.co_name)
        if purpose is not None:
            return purpose
        frame = frame.f_back
    return None


class _StorageTrackingMode(TorchDispatchMode):
    """Follows every storage that an operator makes."""

    def __init__(self, tracker: _StorageTracker, sum_detector: InPlaceSumDetector, *, on_cpu: bool) -> None:
        super().__init__()
        self._tracker = tracker
        self._sum_detector = sum_detector
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on fake tensors, as a real run would, then see what it made."""
        if any(tensor_type is DTensor for tensor_type in types):
            return NotImplemented  # it comes back as operators on the local tensors
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._sum_detector.is_in_place_sum(func, args, sys._getframe(1)):
            return torch.ops.aten.add_.Tensor(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0.0  # a loss scaler asks for the number of gradients that overflowed
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._tracker.track_storage(value)
        if self._on_cpu:
            working_bytes = compute_working_memory(func, args, kwargs, out)
            if working_bytes:
                self._tracker.note_working_memory(working_bytes)
        return out


@contextlib.contextmanager
def _track_storage_resizes(tracker: _StorageTracker) -> Iterator[None]:
    """Within, storages that are resized without an operator are seen, and have addresses.

    FSDP frees parameters by resizing them. FSDP1 compares addresses to see whether anybody replaced a parameter, and
    fake tensors all have the address 0.
    """
    storage_type, tensor_type = torch.UntypedStorage, torch.Tensor
    originals = storage_type.resize_, storage_type.data_ptr, tensor_type.data_ptr

    def resize_tracked(storage: torch.UntypedStorage, size: int) -> None:
        originals[0](storage, size)
        tracker.update_size(storage)

    def storage_address(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage.nbytes() else 0

    def tensor_address(tensor: torch.Tensor) -> int:
        address = storage_address(tensor.untyped_storage())
        return address + int(tensor.storage_offset()) * tensor.element_size() if address else 0

    storage_type.resize_, storage_type.data_ptr, tensor_type.data_ptr = resize_tracked, storage_address, tensor_address  # type: ignore
    try:
        yield
    finally:
        storage_type.resize_, storage_type.data_ptr, tensor_type.data_ptr = originals  # type: ignore[method-assign]
