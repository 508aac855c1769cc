"""What DeepSpeed's ZeRO stages 0 to 2 store and send, read in DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bench.optimizers import UpdatedTensor
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_ACCUMULATED,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    GRADIENTS_KEPT,
    PARAMETER_MEMORY,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    WORLD_GROUP,
    PlanDevice,
    ReplicatedPlan,
    StepPlan,
    allocate_optimizer_state,
    name_unit_gradients,
)

STAGE_0_BUCKET_NUMEL = 500_000_000
"""Elements that stage 0 reduces at a time (``MEMORY_OPT_ALLREDUCE_SIZE`` in deepspeed/runtime/engine.py)."""


class DeepSpeedStage0Plan(ReplicatedPlan):
    """Nothing is sharded: when backward is over, gradients are copied into one tensor, reduced and copied back."""

    _synchronize = True

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._synchronize = synchronize

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """One bucket after the other; a bucket is full when it has more elements than it should."""
        if not self._synchronize:
            return
        filled_numel = 0
        for number, numel in enumerate(self.updated_numels):
            filled_numel += numel
            if filled_numel > STAGE_0_BUCKET_NUMEL or number == len(self.updated_numels) - 1:
                all_reduce_flat(device, f"bucket {number}", filled_numel * self.inputs.parameter_itemsize)
                device.wait_for_event(f"bucket {number}")
                device.free(f"bucket {number}")
                filled_numel = 0


class DeepSpeedStage1And2Plan(StepPlan):
    """What the rank with most to hold at each moment holds: whole parameters, its part of fp32 parameters and states.

    ``deepspeed/runtime/zero/stage_1_and_2.py``: parameters lie one behind the other in a flat tensor, cut into equal
    partitions. A rank updates a copy of its own partition, then all partitions are gathered in place. Gradients are
    copied into a buffer of `bucket_numel` elements, which is there from a backward's first gradient on. When it is full
    it is copied once more, unless all of it is one rank's, and all-reduced. Each rank then copies the gradients that
    its partition needs, of whole parameters, into a tensor of its own. In bf16 it is copied and converted to fp32
    first, and what a rank keeps are fp32 gradients of its partition alone. Stage 2 does so during backward; stage 1
    when backward is over, unless it overlaps.

    Parameters
    ----------
    inputs: Setting
        The run.
    partitions_gradients: bool
        Stage 2: gradients are gone from other ranks as soon as they are reduced.
    overlaps: bool
        Reduction overlaps backward, with a second buffer.
    bucket_numel: int
        Elements of the buffer.
    """

    def __init__(self, inputs: PlanInputs, *, partitions_gradients: bool, overlaps: bool, bucket_numel: int) -> None:
        super().__init__(inputs)
        self._partitions_gradients = partitions_gradients
        self._overlaps_reduction = overlaps
        self._bucket_numel = bucket_numel
        self._compute_itemsize = inputs.precision.compute_itemsize
        self._reduce_itemsize = inputs.reduce_itemsize
        self._buffer_itemsize = self._compute_itemsize
        self._casts_gradients = self._compute_itemsize != self._reduce_itemsize
        self._named_parameters = list_in_flat_order(inputs.units)
        self._frozen_bytes = count_frozen_numel(inputs) * self._compute_itemsize + inputs.scale_bytes
        parameters = [parameter for _, parameter in self._named_parameters]
        alignment = 2 * inputs.world_size
        self._padded_numel = -(-sum(parameter.numel for parameter in parameters) // alignment) * alignment
        self._partition_numel = self._padded_numel // inputs.world_size
        self._ranks_of_parameter = dict(
            zip(
                (name for name, _ in self._named_parameters),
                find_ranks_of_parameters(parameters, self._partition_numel),
                strict=True,
            )
        )
        self._touched_numel_per_rank = [0] * inputs.world_size
        for name, parameter in self._named_parameters:
            for rank in self._ranks_of_parameter[name]:
                self._touched_numel_per_rank[rank] += parameter.numel
        self._kept_numel = 0
        self._bucket_gradients: list[str] = []
        self._synchronize = True
        self._has_buffers = False
        self._bucket_filled_numel = 0
        self._pending_events: list[str] = []

    @property
    def norm_groups(self) -> Sequence[str]:
        """All ranks, each with its partition of the gradients."""
        return (WORLD_GROUP,)

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """The partition, as one tensor."""
        return [UpdatedTensor((self._partition_numel,))]

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Parameters, a copy of this rank's partition, and its optimizer state."""
        master_bytes = self._partition_numel * self.inputs.parameter_itemsize
        parameter_bytes = self._padded_numel * self._compute_itemsize + self._frozen_bytes
        device.allocate("parameters", parameter_bytes + master_bytes, PARAMETER_MEMORY)
        allocate_optimizer_state(device, self.inputs, self.updated_tensors)

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """The buffers come with the first gradient."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._synchronize = synchronize
        self._bucket_filled_numel, self._pending_events, self._kept_numel = 0, [], 0

    @property
    def _reduces_in_backward(self) -> bool:
        return self._partitions_gradients or (
            self._overlaps_reduction and self._synchronize and self.inputs.num_micro_batches == 1
        )

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Of the last block, before which the first gradients of all, the last layer norm's, are complete."""
        if not unit.is_root:
            self._allocate_buffers(device)

    def _allocate_buffers(self, device: PlanDevice) -> None:
        if not self._has_buffers:
            device.allocate(
                "buffers",
                (2 if self._overlaps_reduction else 1) * self._bucket_numel * self._buffer_itemsize,
                REDUCTION_MEMORY,
            )
            self._has_buffers = True

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format of the parameter."""
        return parameter.numel * self._compute_itemsize

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Stage 2 copies each as soon as it is complete; stage 1 leaves them until backward is over."""
        if self._reduces_in_backward:
            return GRADIENTS_HANDLED_ONE_BY_ONE
        return GRADIENTS_KEPT if self._micro_batch == 0 else GRADIENTS_ACCUMULATED

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """Into the buffer, which is sent before if there is no room."""
        self._allocate_buffers(device)
        self._add_to_bucket(device, parameter, name_parameter_gradient(unit, parameter))

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """What is left in the buffer goes; this rank's gradients are what stays."""
        if not self._reduces_in_backward:
            if not self._synchronize:
                return
            for unit in self.inputs.units:
                device.free(name_unit_gradients(unit))
            for name, parameter in self._named_parameters:
                device.allocate(name, parameter.numel * self._buffer_itemsize, GRADIENT_MEMORY)
            for name, parameter in self._named_parameters:
                self._add_to_bucket(device, parameter, name)
        self._reduce_gradients(device)
        for name in self._pending_events:
            device.wait_for_event(name)
        for name, _ in self._named_parameters:
            device.free(name)
        # The room is made once a step where gradients are added to it, else for every micro-batch.
        accumulates = not self._casts_gradients and self._partitions_gradients
        if self._micro_batch > 0 and accumulates:  # added to those of the micro-batches before
            device.copy_within_device("accumulated", 3 * self._kept_numel * self._reduce_itemsize)
            device.free("gradients of another micro-batch")
        device.free("buffers")
        self._has_buffers = False

    def _add_to_bucket(self, device: PlanDevice, parameter: ParameterSpec, gradient_name: str) -> None:
        if self._bucket_filled_numel + parameter.numel > self._bucket_numel:
            self._reduce_gradients(device)
        self._bucket_filled_numel += parameter.numel
        self._bucket_gradients.append(gradient_name)
        if parameter.numel <= self._bucket_numel:
            device.copy_within_device("into buffer", 2 * parameter.numel * self._buffer_itemsize)
            device.free(gradient_name)
        elif self._reduces_in_backward:  # too large for the buffer: reduced as it is
            device.allocate(gradient_name, parameter.numel * self._buffer_itemsize, GRADIENT_MEMORY)

    def _reduce_gradients(self, device: PlanDevice) -> None:
        if not self._bucket_filled_numel:
            return
        name = f"bucket {len(self._pending_events)}"
        if self._overlaps_reduction and self._pending_events:
            device.wait_for_event(self._pending_events[-1])
        size = self._bucket_filled_numel * self._reduce_itemsize
        if self._casts_gradients:
            self._allocate_kept_gradients(device)
            device.allocate("flat", self._bucket_filled_numel * self._compute_itemsize, REDUCTION_MEMORY)
            all_reduce_flat(device, name, size)
        elif self._is_of_one_rank():
            device.run_collective(name, "all-reduce", size, WORLD_GROUP, REDUCE_STREAM, after="compute")
        else:
            all_reduce_flat(device, name, size)
        if not self._overlaps_reduction:
            device.wait_for_event(name)
        for buffer_name in (name, "flat"):
            device.free(buffer_name, after=REDUCE_STREAM if self._overlaps_reduction else None)
        self._pending_events.append(name)
        self._bucket_filled_numel = 0
        if not self._casts_gradients:
            self._allocate_kept_gradients(device)

    def _is_of_one_rank(self) -> bool:
        """Whether all that is in the buffer goes to one rank, so that it is reduced where it lies."""
        rank_ranges = [self._ranks_of_parameter[name] for name in self._bucket_gradients]
        return (
            min(rank_range.start for rank_range in rank_ranges)
            == max(rank_range.stop for rank_range in rank_ranges) - 1
        )

    def _allocate_kept_gradients(self, device: PlanDevice) -> None:
        """A rank makes room for all its gradients when the first of them is reduced: hold as much as any rank does.

        Where they are reduced in another format than computed in, the room is that of its partition, to which those of
        all micro-batches are added.
        """
        if self._casts_gradients:
            self._bucket_gradients.clear()
            device.allocate("gradients", self._partition_numel * self._reduce_itemsize, GRADIENT_MEMORY)
            return
        ranks = {rank for name in self._bucket_gradients for rank in self._ranks_of_parameter[name]}
        self._bucket_gradients.clear()
        max_numel = max(self._touched_numel_per_rank[rank] for rank in ranks)
        if max_numel > self._kept_numel:
            is_first = self._micro_batch == 0 or not self._partitions_gradients
            name = "gradients" if is_first else "gradients of another micro-batch"
            device.allocate(name, max_numel * self._compute_itemsize, GRADIENT_MEMORY)
            self._kept_numel = max_numel

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gather all partitions; gradients have gone before the update, but for one flat tensor of them."""
        self._all_gather_updated(device)

    def _all_gather_updated(self, device: PlanDevice) -> None:
        device.run_collective(
            "updated",
            "all-gather",
            self._padded_numel * self._compute_itemsize,
            WORLD_GROUP,
            ALL_GATHER_STREAM,
            after="compute",
        )
        device.wait_for_event("updated")
        device.free("gradients")


class DeepSpeedBf16Stage1Plan(StepPlan):
    """Stage 1 in bf16, which DeepSpeed's BF16_Optimizer carries out (``deepspeed/runtime/bf16_optimizer.py``).

    Every rank holds all gradients in fp32, all the time; what backward completes is added to them and gone. After the
    last micro-batch they are reduced as in stage 0; each rank updates its partition in fp32, and all are gathered.
    """

    def __init__(self, inputs: PlanInputs) -> None:
        super().__init__(inputs)
        self._compute_itemsize = inputs.precision.compute_itemsize
        alignment = 2 * inputs.world_size
        self._padded_numel = (
            -(-sum(parameter.numel for parameter in inputs.trained_parameters) // alignment) * alignment
        )
        self._frozen_bytes = count_frozen_numel(inputs) * self._compute_itemsize + inputs.scale_bytes
        self._synchronize = True

    @property
    def norm_groups(self) -> Sequence[str]:
        """All ranks, each with its partition of the gradients."""
        return (WORLD_GROUP,)

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """The partition, as one tensor."""
        return [UpdatedTensor((self._padded_numel // self.inputs.world_size,))]

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Parameters, all gradients, and this rank's partition with its states."""
        master_bytes = self.updated_numels[0] * self.inputs.parameter_itemsize
        parameter_bytes = self._padded_numel * self._compute_itemsize + self._frozen_bytes
        device.allocate("parameters", parameter_bytes + master_bytes, PARAMETER_MEMORY)
        device.allocate("gradients", self._padded_numel * self.inputs.reduce_itemsize, GRADIENT_MEMORY)
        allocate_optimizer_state(device, self.inputs, self.updated_tensors)

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._synchronize = synchronize

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format that is computed in."""
        return parameter.numel * self._compute_itemsize

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Added to those in fp32 as they are complete."""
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """Read, and read and written."""
        device.copy_within_device(
            "accumulated", parameter.numel * (self._compute_itemsize + 2 * self.inputs.reduce_itemsize)
        )

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """All in one tensor, unless they are more than a bucket of stage 0."""
        remaining_numel = self._padded_numel if self._synchronize else 0
        while remaining_numel > 0:
            numel = min(remaining_numel, STAGE_0_BUCKET_NUMEL)
            all_reduce_flat(device, f"bucket {remaining_numel}", numel * self.inputs.reduce_itemsize)
            device.wait_for_event(f"bucket {remaining_numel}")
            device.free(f"bucket {remaining_numel}")
            remaining_numel -= numel

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gather all partitions; gradients are set to zero."""
        device.run_collective(
            "updated",
            "all-gather",
            self._padded_numel * self._compute_itemsize,
            WORLD_GROUP,
            ALL_GATHER_STREAM,
            after="compute",
        )
        device.wait_for_event("updated")
        device.copy_within_device("zeros", self._padded_numel * self.inputs.reduce_itemsize)


def all_reduce_flat(device: PlanDevice, name: str, size: float) -> None:
    """Copy gradients into one tensor, all-reduce it, copy the result back."""
    device.allocate(name, size, REDUCTION_MEMORY)
    device.copy_within_device(name, 4 * size)
    device.run_collective(name, "all-reduce", size, WORLD_GROUP, REDUCE_STREAM, after="compute")


def list_in_flat_order(units: Sequence[ShardingUnit]) -> list[tuple[str, ParameterSpec]]:
    """Trained parameters as they lie in the flat tensor, each with the name of its gradient.

    Embeddings, the blocks in order, and the norms that follow them (a T5's encoder's too, which lies in the middle).
    """
    parameters = [(unit, parameter) for unit in units for parameter in unit.trained_parameters]
    parameters.sort(key=lambda pair: pair[0].is_root and len(pair[1].shape) < 2)
    return [(name_parameter_gradient(unit, parameter), parameter) for unit, parameter in parameters]


def count_frozen_numel(inputs: PlanInputs) -> int:
    """Elements of the parameters that stay as they are, and where they are."""
    return sum(parameter.numel for unit in inputs.units for parameter in unit.parameters if not parameter.is_trained)


def name_parameter_gradient(unit: ShardingUnit, parameter: ParameterSpec) -> str:
    """The name under which a parameter's own gradient is held."""
    return f"gradient {unit.index} {parameter.name}"


def find_ranks_of_parameters(parameters: Sequence[ParameterSpec], partition_numel: int) -> list[range]:
    """The ranks in whose partitions of the flat tensor, of so many elements, each parameter lies, if only in part."""
    ends = accumulate(parameter.numel for parameter in parameters)
    return [
        range((end - parameter.numel) // partition_numel, (end - 1) // partition_numel + 1)
        for parameter, end in zip(parameters, ends, strict=True)
    ]
