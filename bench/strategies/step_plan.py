"""What a strategy stores and sends, and when: the vocabulary in which each strategy's file states its plan.

A plan is told of every event of a step, in the order the processor meets them, and answers by acting on a `PlanDevice`:
memory is held and released, collectives are sent and waited for. Whoever simulates a step implements `PlanDevice` and
simulates the model's own computation in between; it knows no strategy by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit

PARAMETER_MEMORY, GRADIENT_MEMORY, OPTIMIZER_MEMORY, ALL_GATHER_MEMORY, REDUCTION_MEMORY = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "reduced",
)
"""What memory is held for."""

COMPUTE_STREAM = "compute"
REDUCE_INPUT = "reduce input"
"""Name of the copy, by ``torch._chunk_cat``, of gradients into what FSDP2 reduces."""

ALL_GATHER_STREAM, REDUCE_STREAM, REPLICA_STREAM, CAST_STREAM = "gather", "reduce", "replicate", "cast"
"""Streams that communicate, or cast what will be gathered, beside the one that computes."""

NCCL_STREAM = "nccl"
"""On which NCCL itself runs, of which the allocator knew before torch 2.2 (`HardwareSpeeds.records_nccl_stream`); later
ones never are behind here."""

WORLD_GROUP, SHARD_GROUP, REPLICA_GROUP, TENSOR_GROUP = "world", "shards", "replicas", "tensor"
"""Groups of ranks: all of them; those that share one copy of the model; those that hold the same shard; those that
share every layer, of each of which the three others then have one rank."""

DATA_GROUP, PIPELINE_GROUP = "data", "pipeline"
"""Where layers are spread over stages: ranks that compute gradients of the same parameters; the stages of one copy."""

CONTEXT_GROUP, EXPERT_GROUP, EXPERT_SHARD_GROUP, EXPERT_DATA_GROUP = (
    "context",
    "expert",
    "expert shards",
    "expert data",
)
"""Further ones, of a mesh: those that share sequences; those that have different experts; those that share the shards
of the same experts; those that compute gradients of the same experts."""


class GroupDim(NamedTuple):
    """Ranks of a group along one dimension of a mesh."""

    size: int
    stride: int
    """From one to the next of them."""


GRADIENTS_KEPT, GRADIENTS_ACCUMULATED, GRADIENTS_HANDLED_ONE_BY_ONE = "stay", "added", "told"
"""What becomes of gradients as they are completed: they stay, all of a unit's held under `name_unit_gradients` it; they
are added to what is held there already; or the plan is told of each."""


def name_unit_gradients(unit: ShardingUnit) -> str:
    """The name under which a unit's gradients are held."""
    return f"gradients {unit.index}"


class PlanDevice(Protocol):
    """One rank's device, as a plan acts on it."""

    def allocate(self, name: str, size: float, part: str, *, stream: str = COMPUTE_STREAM) -> None:
        """Allocate `size` bytes under a name, for one of PARAMETERS ... REDUCED. What is held under it is freed. The
        caching allocator can use them again only on the stream that they are allocated on."""

    def grow_allocation(self, name: str, size: float, part: str) -> None:
        """Hold more under a name, or less: without a look at the peak."""

    def free(self, name: str, *, after: str | None = None) -> None:
        """Free what is held under a name, if it is. On a device with streams the memory can be used again only when
        the work already given to stream `after` (None: the one that computes) is done."""

    def copy_within_device(self, name: str, size: float) -> None:
        """Move `size` bytes (read and written together) on the device, before what is computed next."""

    def run_collective(
        self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None
    ) -> None:
        """Start a collective of `size` bytes (the whole, gathered) on a stream, when what was given to it, and to
        stream `after` (``compute`` or another), is done."""

    def copy_host_device(self, name: str, size: float, stream: str, *, after: str | None = None) -> None:
        """Start copying `size` bytes between the device and its machine's memory, on a stream as in
        `run_collective`."""

    def wait_for_event(self, name: str) -> None:
        """Let computation go on only when a collective, or a transfer, is done."""

    def record_event(self, name: str) -> None:
        """Give this point of the computation a name."""

    def follow_stream(self, stream: str, name: str) -> None:
        """Let what is sent on a stream from now on start only when the computation has come to a mark."""

    def note_late_free(self, *, after: str | None = None) -> None:
        """Remember this point of the work given to stream `after` (None: the one that computes) for
        `limit_all_gathers`."""

    def limit_all_gathers(self, max_unfinished: int) -> None:
        """If `max_unfinished` points noted by `note_late_free` have not been waited for, stop the processor until the
        device has come to the oldest of them."""

    def run_hooks(self, count: float = 1.0) -> None:
        """The processor is busy with a unit's hooks."""


class RankPlan(ABC):
    """What one rank stores from one step to the next, whether the model or a few stages of it are its part."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.inputs = inputs

    @property
    @abstractmethod
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """What this rank's optimizer updates, in its order."""

    @property
    def updated_numels(self) -> Sequence[int]:
        """Elements of each."""
        return [tensor.numel for tensor in self.updated_tensors]

    @property
    def clipped_numels(self) -> Sequence[int]:
        """Elements of each gradient whose norm this rank takes part in, and which it scales."""
        return self.updated_numels

    @property
    def norm_groups(self) -> Sequence[str]:
        """Groups of ranks that add up the squares of their gradients, one after the other."""
        return ()

    @property
    def early_sizes(self) -> Sequence[float]:
        """Bytes of tensors that a GPU holds beside all else in the second step and never again: a run that comes
        through it goes on, with this memory cached."""
        return ()

    @abstractmethod
    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """What is held from one step to the next: parameters, optimizer state, buckets."""

    def add_gradients(self, device: PlanDevice, added_bytes: float, sum_bytes: float) -> None:
        """Gradients are added to those that are there, unless they were as they were computed."""
        if not self.inputs.gradient_accumulation_fusion:
            device.copy_within_device("add gradients", added_bytes + 2 * sum_bytes)

    @abstractmethod
    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gradients are no longer needed."""


class StepPlan(RankPlan):
    """One rank's part in a step, unit by unit. Called in the order of the step."""

    updates_on_host = False
    """Whether the processors of the machine carry out the optimizer's step."""

    updates_tensors_apart = False
    """Whether the optimizer is called for every tensor by itself."""

    _micro_batch = 0
    """Number of the present one in its step."""

    @property
    def host_bytes(self) -> float:
        """What this rank keeps in the memory of the machine around its device."""
        return 0.0

    @property
    def optimizer_transfer_bytes(self) -> float:
        """Bytes that come to the device for the optimizer's step, and those that go back, one after the other."""
        return 0.0

    @property
    def host_copy_bytes(self) -> float:
        """Bytes read and written in the machine's memory once a step, beside what the optimizer does there."""
        return 0.0

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """A micro-batch starts, `number` of the step's, counted from 0; `synchronize` says whether its gradients are
        reduced. Not every one is announced: of many that are alike some are left out."""
        self._micro_batch = number

    def before_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """A unit is about to run forward."""

    def after_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """A unit has run forward."""

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """A unit is about to run backward."""

    @abstractmethod
    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """Size of a parameter's gradient as autograd leaves it."""

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """What becomes of a unit's gradients as they are completed: `GRADIENTS_KEPT` or one of its like."""
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """Where they are handled one by one: one is complete. The trace frees it next; what is to stay must be held."""

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """A unit has run backward, all its gradients are complete."""

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """The micro-batch's backward is over, the root's included."""


class ReplicatedPlan(StepPlan):
    """Whole parameters, gradients and optimizer state on every rank: what one process does."""

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Everything is there all the time but the gradients."""
        parameters = [parameter for unit in self.inputs.units for parameter in unit.parameters]
        stored_bytes = sum(map(self.inputs.compute_stored_bytes, parameters)) + self.inputs.scale_bytes
        device.allocate("parameters", stored_bytes, PARAMETER_MEMORY)
        allocate_optimizer_state(device, self.inputs, self.updated_tensors)
        if self.inputs.keep_gradients:
            for unit in self.inputs.units:
                device.allocate(
                    name_unit_gradients(unit),
                    sum(map(self.compute_gradient_bytes, unit.trained_parameters)),
                    GRADIENT_MEMORY,
                )

    @property
    def total_gradient_numel(self) -> int:
        return sum(unit.trained_numel for unit in self.inputs.units)

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """All parameters that are trained."""
        return [parameter.updated_tensor for parameter in self.inputs.trained_parameters]

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format of the parameter."""
        return parameter.numel * self.inputs.parameter_itemsize

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """They stay until the optimizer has used them; later micro-batches add to them."""
        return GRADIENTS_KEPT if self._micro_batch == 0 and not self.inputs.keep_gradients else GRADIENTS_ACCUMULATED

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Autograd adds a gradient to the one that is there."""
        if unit.trained_parameters and (self._micro_batch > 0 or self.inputs.keep_gradients):
            size = sum(map(self.compute_gradient_bytes, unit.trained_parameters))
            self.add_gradients(device, size, size)

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Set to None, or to zero."""
        if self.inputs.keep_gradients:
            device.copy_within_device("zeros", self.total_gradient_numel * self.inputs.parameter_itemsize)
            return
        for unit in self.inputs.units:
            device.free(name_unit_gradients(unit))


def compute_optimizer_bytes(inputs: PlanInputs, tensors: Sequence[UpdatedTensor]) -> float:
    """Of the optimizer's states of these tensors."""
    counts = Counter(map(id, tensors))  # blocks that are alike share theirs
    distinct_tensors = {id(tensor): tensor for tensor in tensors}
    return sum(
        counts[identity] * inputs.optimizer.compute_state_bytes(tensor, inputs.parameter_itemsize)
        for identity, tensor in distinct_tensors.items()
    )


def allocate_optimizer_state(device: PlanDevice, inputs: PlanInputs, tensors: Sequence[UpdatedTensor]) -> None:
    """Hold the optimizer's states of these tensors."""
    device.allocate("optimizer", compute_optimizer_bytes(inputs, tensors), OPTIMIZER_MEMORY)


def allocate_copy_in_briefly(
    device: PlanDevice,
    parameters: Sequence[ParameterSpec],
    num_ranks: int,
    gradient_itemsize: int,
    buffer_itemsize: int,
) -> None:
    """Hold for a moment what a CPU needs to copy gradients into the buffer that is reduced (``_chunk_cat`` in
    aten/src/ATen/native/TensorShape.cpp): copies, of all parameters' at once, of those whose rows the ranks do not
    divide; and where the buffer has another format a copy of each in turn.

    Parameters
    ----------
    gradient_itemsize, buffer_itemsize: int
        Bytes of an element of a gradient, and of the buffer.
    """
    padded_numel = sum(parameter.compute_padded_numel(num_ranks) for parameter in parameters)
    largest_numel = max(
        (parameter.compute_padded_numel(num_ranks) or parameter.numel for parameter in parameters), default=0
    )
    device.allocate(
        "copied in",
        (padded_numel + (largest_numel if gradient_itemsize != buffer_itemsize else 0)) * gradient_itemsize,
        REDUCTION_MEMORY,
    )
    device.free("copied in")
